"""JSON holds what the text says, and an option that changes nothing is named."""

import json

import pytest


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
