"""JSON holds what the text says, and an option that changes nothing is named."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_json_holds_the_bound_that_the_text_prints(command):
    """It was left out."""
    _, text, _ = command("replay", "tiny", "--steps", 4)
    _, answer, _ = command("replay", "tiny", "--steps", 4, "--json")
    bound = json.loads(answer)["bound"]
    assert f"at {100 * bound['share']:.0f} % of what this machine can do" in text
    reads = f"{bound['least_reads']} of {bound['accesses']} expert reads"
    assert reads in text

    _, answer, _ = command(
        "compare", "tiny", "--policy", "greedy", "--steps", 4, "--json"
    )
    assert json.loads(answer)["bound"] == bound


def test_commands_that_messages_name_exist(command):
    """`moesim list hardware` was one of them."""
    named = set()
    for folder in ("moesim", "hwprofiles", "policies", "runtime", "sim", "traces"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named |= set(
                        re.findall(r"`moesim (list [a-z]+|[a-z][a-z-]+)", node.value)
                    )
    assert "list machines" in named
    for words in sorted(named):
        asked = words.split() if " " in words else (words, "--help")
        assert command(*asked)[0] == 0, words


def test_slots_of_all_cells_stand_in_the_head(command):
    _, text, _ = command(
        "compare", "tiny", "--policy", "greedy,all-cpu", "--slots-per-layer", 4,
        "--hw", "rtx4060ti,rtx3080ti", "--steps", 4,
    )  # fmt: skip
    assert "experts per layer 4" in text.partition("\n\n")[0]


def test_a_drawn_trace_is_told_as_json(command, tmp_path):
    words = ("--shape", "layers=2,experts=4,top_k=1,expert_bytes=1MiB", "--tokens", 20)
    code, out, _ = command("trace", "synth", tmp_path / "q.parquet", *words, "--json")
    assert code == 0
    assert json.loads(out)["rows"] == 40


@pytest.mark.parametrize("words", [
    ("--host-cache", "lfu"),
    ("--gpu-split", "experts"),
    ("--prefetch-budget", "1MiB"),
    ("--acceptance", "0.5"),
    ("--context-tokens", "100", "--cache-ratio", "0.2"),
])  # fmt: skip
def test_an_option_without_effect_is_named(command, words):
    code, _, err = command("replay", "tiny", "--steps", 4, *words)
    assert code == 0
    assert f"note: {words[0]} changes nothing: " in err


def test_options_with_effect_and_defaults_are_not(command):
    _, _, err = command("replay", "tiny", "--steps", 4)
    assert "changes nothing" not in err
    words = ("--prefetch", "next-gate", "--prefetch-budget", "1MiB")
    _, _, err = command("replay", "tiny", "--steps", 4, *words)
    assert "changes nothing" not in err
