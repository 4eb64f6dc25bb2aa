"""JSON holds what the text says."""

import json


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
