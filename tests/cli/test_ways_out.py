"""What a user typed in good faith is answered with what he can type instead, and JSON
holds what the text says.
"""

import json

import pytest
from support.command_line import refused


@pytest.mark.parametrize(("words", "expected"), [
    (("tiny", "--policy", "greedy,on-demand"), "one policy is expected here"),
    (("tiny", "--cache", "lru,lfu"), "one policy is expected here"),
    (("tiny", "--hw", "rtx4060ti,rtx3080ti"), "one machine is expected here"),
    (("tiny", "--gpu-memory", "4GiB,8GiB"), "one size is expected here"),
    (("tiny", "--hw", "RTX 4060 Ti"), "did you mean 'rtx4060ti'"),
    (("tiny", "--cache-ratio", "50%"), "expected a number between 0 and 1, got '50%'"),
    (("tiny", "--steps", "0"), "expected a whole number >= 1, got 0"),
    (("tiny", "--gpu-memory", "1KiB"), "1.0 KiB do not hold 1.4 MiB"),
    (("qwen3-30b-a3b",), "moesim trace synth qwen3-30b-a3b.parquet"),
    (("gpt-oss-20b-lik",), "did you mean 'gpt-oss-20b-like'"),
    (("model.gguf",), "`moesim advise` and `moesim model` read it"),
])  # fmt: skip
def test_a_refusal_says_what_to_type_instead(
    command, tmp_path, monkeypatch, words, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert refused(command("replay", *words), expected)


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


def test_a_wrong_share_names_its_option(command):
    run = command("hits", "tiny", "--cache-ratio", "0.1,2")
    assert refused(run, "--cache-ratio", "expected a number between 0 and 1, got 2.0")
