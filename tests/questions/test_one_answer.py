"""One setting has the same figures under the same words, whichever way it is asked for
(issue 44, Done when 3).
"""

import html
import json
import re

import pytest

import moesim
from moesim.base.units import parse_bytes
from moesim.reporting.parts import Facts

SETTING = {"hw": "rtx3090-epyc7532", "cache_ratio": 0.25, "steps": 40}
OPTIONS = [
    word
    for name, value in SETTING.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]
POLICIES = ["greedy+lru", "on-demand+lru"]
FIGURES = (
    *("tpot_s", "ttft_s", "decode_tokens_per_s", "prefill_tokens_per_s"),
    *("makespan_s", "hit_rate_active", "energy_j"),
)
"""In each way of asking; a replay has them among its metrics."""


@pytest.fixture(scope="module")
def comparison():
    return moesim.compare("tiny", POLICIES, **SETTING)


@pytest.fixture(scope="module")
def runs():
    return {policy: moesim.replay("tiny", policy, **SETTING) for policy in POLICIES}


def of_policy(records):
    return {record["candidate"]: record for record in records}


def test_command_line_and_python_say_the_same_figures(command, comparison, runs):
    said = {}
    for asked in ("compare", "sweep"):
        line = (asked, "tiny", "--policy", ",".join(POLICIES), *OPTIONS, "--json")
        code, text, _ = command(*line)
        assert code == 0
        said[f"{asked} --json"] = of_policy(json.loads(text)["table"])
    swept = moesim.sweep("tiny", policy=POLICIES, **SETTING, details=True)
    said["compare"] = of_policy(comparison.answer().frame.to_dict("records"))
    said["sweep"] = of_policy(moesim.answer(swept).frame.to_dict("records"))
    for policy, run in runs.items():
        expected = {name: run.metrics[name] for name in FIGURES}
        for way, records in said.items():
            found = {name: records[policy][name] for name in FIGURES}
            assert found == pytest.approx(expected, rel=1e-12), (way, policy)


def test_texts_and_pages_say_them_in_the_same_words(
    command, comparison, runs, tmp_path
):
    table = comparison.answer().tables[0]
    words = table.heads()
    for asked in ("compare", "sweep"):
        page = tmp_path / f"{asked}.html"
        line = (asked, "tiny", "--policy", ",".join(POLICIES), *OPTIONS)
        code, text, _ = command(*line, "--html", page)
        assert code == 0
        shown = re.sub(r"<[^>]+>", "\n", html.unescape(page.read_text()))
        # A terminal breaks a wide table, and a long head, but leaves no word out.
        printed = text.split()
        for word in words:
            assert set(word.split()) <= set(printed), (asked, word)
        for cell in (*words, *(cell for row in table.cells() for cell in row)):
            assert f"\n{cell}\n" in shown, (asked, cell)
    of_name = {each.name: each for each in table.columns}
    for policy, run in runs.items():
        facts = dict(moesim.answer(run).facts)
        for name in ("tpot_s", "ttft_s", "hit_rate_active"):
            column = of_name[name]
            cell = column.cell(run.metrics[name])
            assert cell in facts[column.head], (policy, name)


def test_the_command_of_a_run_names_its_memory_to_the_byte():
    sizes = [5_000_000, 8 << 20]
    frame = moesim.sweep(
        "tiny", ["greedy"], gpu_memory=sizes, steps=1, jobs=1, details=True
    )
    sections = moesim.answer(frame).sections()
    facts = [p for section in sections for p in section.parts if isinstance(p, Facts)]
    commands = [words[-1] for words in facts[0].table.cells()]
    said = [re.search(r"--gpu-memory (\S+)", command)[1] for command in commands]
    assert list(map(parse_bytes, said)) == sizes
    assert said[1] == "8MiB"
