"""`import moesim` in a notebook: values as one writes them, results that print as tables,
and errors of one's own policies.
"""

import hashlib
import json
from functools import partial

import pytest
from support.command_line import refused

import moesim
from moesim.base.errors import TraceError
from moesim.base.options import ConfigError
from moesim.policies import registry
from moesim.policies.cache.lru import LRU
from moesim.policies.faults import PolicyFault
from moesim.policies.systems import SYSTEMS
from moesim.runs.config import RunConfig
from moesim.runs.replay import share_of
from moesim.runs.sweeps.rows import ResultsError
from moesim.runs.sweeps.sweep import configs_of

STEPS = 2


# Values as people write them.


def test_one_machine_is_a_list_of_one():
    """Its letters were taken for machines."""
    compared = moesim.compare("tiny", ["greedy"], hw="rtx4060ti", steps=STEPS)
    assert set(compared.table["hw"]) == {"rtx4060ti"}
    swept = moesim.sweep("tiny", "greedy", hw="rtx4060ti", steps=STEPS)
    assert list(swept["hw"]) == ["rtx4060ti"]


def test_policies_may_stand_in_one_text():
    table, runs = moesim.compare(
        "tiny", "greedy+lfu:decay=0.9,variant=perfect,all-cpu", steps=STEPS
    )
    assert set(runs) == {"greedy+lfu:decay=0.9,variant=perfect", "all-cpu"}
    assert len(table) == 2
    assert list(moesim.compare("tiny", "greedy", steps=STEPS).runs) == ["greedy"]
    swept = moesim.sweep("tiny", "greedy,all-cpu", steps=STEPS, jobs=1)
    assert list(swept["policy"]) == ["greedy", "all-cpu"]
    every = configs_of("tiny", {"policy": "systems,greedy"})
    assert [config.policy for config in every] == [*SYSTEMS, "greedy"]


def test_a_size_is_an_option_under_both_names():
    expected = 8 * 2**30
    for name in ("gpu_memory", "gpu_memory_bytes"):
        config = moesim.RunConfig.of("tiny", **{name: "8GiB"})
        assert config.gpu_memory_bytes == expected
    with pytest.raises(ConfigError, match="gpu_memory_bytes: unknown unit 'frogs'"):
        moesim.RunConfig.of("tiny", gpu_memory="8 frogs")


@pytest.mark.parametrize("options", [
    {"trace": ["tiny", "tiny"]},
    {"seed": [0, 1]},
    {"hw": ["rtx4060ti"]},
    {"policy": ["greedy"]},
    {"cache_ratio": [0.1, 0.2]},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_list_where_one_value_is_meant_says_so(options):
    arguments = {"trace": "tiny", **options}
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"{name}: expected one value, got"):
        moesim.replay(arguments.pop("trace"), **arguments)


def test_results_answer_in_words_figures_and_pages(tmp_path):
    """Whatever a function returned, `answer` takes; what it does not, it names."""
    run = moesim.replay("tiny", "greedy", steps=STEPS)
    answer = moesim.answer(run)
    assert "per token" in str(answer)
    assert answer.frame["lane"].tolist() == list(run.metrics["busy_s"])
    assert answer.to_json()["tpot_s"] == run.metrics["tpot_s"]
    assert answer.write(tmp_path / "run.html").is_file()
    with pytest.raises(ConfigError, match="step, placement"):
        answer.figure("speed")
    with pytest.raises(TypeError, match="answer: expected what replay"):
        moesim.answer(7)


# Results.


def test_results_show_small_tables_in_a_notebook():
    run = moesim.replay("tiny", "greedy", steps=STEPS)
    assert len(repr(run)) < 200
    assert "greedy" in repr(run)
    assert "\n| hit rate | " in run._repr_markdown_()
    machines = ["rtx4060ti", "rtx3080ti"]
    compared = moesim.compare("tiny", "greedy", hw=machines, steps=STEPS)
    assert "rtx3080ti" in compared._repr_markdown_()
    assert len(repr(compared)) < 200


# Policies of one's own.


class Failing(LRU):
    """Fails at the fourth layer step."""

    layers = 0

    def accessed(self, work):
        self.layers += 1
        if self.layers > 3:
            {}["no such key"]
        super().accessed(work)


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    moesim.register("cache", "failing", Failing)


def test_a_bug_in_a_policy_is_named_and_shown_in_its_own_lines(failing):
    with pytest.raises(PolicyFault) as caught:
        moesim.replay("tiny", "greedy", cache="failing")
    message = str(caught.value)
    assert message.startswith("cache policy 'failing' failed, in ")
    assert __file__ in message
    assert "KeyError: 'no such key'" in message
    frames = caught.value.frames
    assert '{}["no such key"]' in frames
    assert "planner.py" not in frames
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert cause.__traceback__.tb_frame.f_code.co_name == "accessed"


SOURCE = """
from moesim.policies.cache.lru import LRU

class Mine(LRU):
    '''Fails at once.'''

    def accessed(self, work):
        helper()

def helper():
    raise KeyError(7)
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_command_prints_the_lines_of_the_policy_alone(command, tmp_path, jobs):
    """Also where another process ran it."""
    (tmp_path / "mine.py").write_text(SOURCE)
    policy = tmp_path / "mine.py"
    code, out, err = command(
        "compare", "tiny", "--policy", "greedy,on-demand", "--cache", policy,
        "--jobs", jobs, "--steps", STEPS,
    )  # fmt: skip
    assert code == 2
    assert out == ""
    assert "in helper" in err
    assert "moesim/runs" not in err
    assert err.splitlines()[-1].startswith(f"error: cache policy '{policy}' failed")


def test_a_policy_may_refuse_in_one_line(command, tmp_path):
    refusing = SOURCE.replace("raise KeyError(7)", "raise PolicyError('not here')")
    imported = "from moesim.policies.base import PolicyError\n"
    (tmp_path / "mine.py").write_text(imported + refusing)
    assert refused(
        command("replay", "tiny", "--cache", tmp_path / "mine.py"), "not here"
    )


def test_a_run_names_defaults_and_the_digest_of_a_policys_file(command, tmp_path):
    source = SOURCE.replace("helper()\n\n", "super().accessed(work)\n\n")
    (tmp_path / "mine.py").write_text(source)
    code, out, _ = command(
        "replay", "tiny", "--cache", tmp_path / "mine.py", "--steps", STEPS, "--json"
    )
    assert code == 0
    policies = json.loads(out)["config"]["policies"]
    # A default that nobody stated.
    assert policies["assignment"] == {"name": "greedy", "staging": None}
    assert policies["cache"] == {
        "name": str(tmp_path / "mine.py"),
        "file": str(tmp_path / "mine.py"),
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
    }


@pytest.mark.parametrize("steps", [None, 5])
def test_a_replay_tells_the_share_that_is_done(steps):
    """It rises from the first step on, and ends with all."""
    config = RunConfig.of("tiny", "greedy", steps=steps)
    shares = []
    moesim.replay(config, keep=False, progress=share_of(config, shares.append))
    assert 0 < shares[0] < 0.5
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    if steps:
        assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


# Calls that cannot be.


SWEEP = partial(moesim.sweep, "tiny", "greedy", steps=1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (partial(SWEEP, jobs=0), ConfigError, "jobs: expected a whole number >= 1"),
        (partial(SWEEP, jobs=-1), ConfigError, "jobs: expected a whole number >= 1"),
        (partial(SWEEP, jobs=1, results=""), ResultsError, "results: expected a folder"),
        (partial(SWEEP, jobs=1, seed=2**63), ConfigError, "a number of 64 bits"),
        (partial(moesim.replay, "tiny", slo="ttft=x"), TraceError, "slo: expected"),
        (partial(moesim.replay, "tiny", slo="ttft=1,ttft=2"), TraceError, "of each"),
        (partial(moesim.synth, "t", tokens=9, like="qwen3-30b-a3b", skew=1.0),
         ValueError, "--skew states what --like measures"),
    ],
    # A call's own words hold an address, which differs between processes.
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
