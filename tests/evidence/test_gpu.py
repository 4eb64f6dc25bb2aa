"""Eight minutes on a card: what a call has measured is kept, whatever ends it; what
fails is named, and the rest goes on.
"""

import json

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu import Session, holds, page, same_routing, verdict
from moesim.base.errors import RuntimeFault

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from moesim.runtime import accelerators  # noqa: E402
from moesim.runtime.accelerators import Rehearsal  # noqa: E402

MACHINE = {"accelerator": "host accelerator", "kind": "host"}
NAMES = tuple(f"checks/{number}" for number in range(6))


def session(folder, machine=MACHINE, **options):
    folder.mkdir(exist_ok=True)
    made = Session(folder, Rehearsal(), gpu.REHEARSAL, 8.0, dict(machine), **options)
    made.load()
    return made


def saved(folder):
    return json.loads((folder / gpu.RESULTS).read_text())["steps"]


@pytest.mark.parametrize("stopped", range(5))
def test_an_interrupted_call_goes_on_behind_its_last_step(tmp_path, stopped):
    """Ctrl-C in one of six steps: those before it are kept, with their page."""
    made = []

    def work(name):
        if name == NAMES[stopped] and not resumed:
            raise KeyboardInterrupt
        made.append(name)
        return {"outcome": "well", "verdict": "ok"}

    resumed = False
    first = session(tmp_path)
    for name in NAMES[:stopped]:
        first.make(name, lambda name=name: work(name))
    with pytest.raises(KeyboardInterrupt):
        first.make(NAMES[stopped], lambda: work(NAMES[stopped]))
    assert made == list(NAMES[:stopped])

    resumed = True
    second = session(tmp_path)
    assert list(second.steps) == made
    for name in NAMES:
        second.make(name, lambda name=name: work(name))
    assert made == list(NAMES)
    assert list(saved(tmp_path)) == made
    assert (tmp_path / gpu.PAGE).read_text().count("ok, well") == 6


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path):
    """And the next call tries it again."""
    made = session(tmp_path)
    made.make("checks/broken", lambda: 1 / 0)
    made.make("checks/whole", lambda: {"outcome": "well", "verdict": "ok"})
    assert (
        made.steps["checks/broken"]["failed"] == "ZeroDivisionError: division by zero"
    )
    assert "**broken** FAILED: ZeroDivisionError" in (tmp_path / gpu.PAGE).read_text()
    assert verdict(made.steps)[0] == (
        "it does not hold: checks/broken: ZeroDivisionError: division by zero"
    )
    assert list(session(tmp_path).steps) == ["checks/whole"]


@pytest.mark.parametrize("change", ["another machine", "finished", "damaged"])
def test_a_folder_is_begun_anew_where_it_says_nothing_about_this_call(tmp_path, change):
    made = session(tmp_path)
    made.make("checks/one", lambda: {"outcome": "well", "verdict": "ok"})
    machine = dict(MACHINE)
    if change == "another machine":
        machine["accelerator"] = "another card"
    elif change == "finished":
        made.make("verdict/words", lambda: ["it holds"])
    else:
        (tmp_path / gpu.RESULTS).write_text('{"steps": ')
    assert session(tmp_path, machine).steps == {}
    assert not (tmp_path / gpu.PAGE).exists()


def test_a_rehearsal_is_not_taken_for_a_card():
    """Its title says so, and that it is not finished."""
    text = page(MACHINE, {})
    assert text.startswith("# Rehearsal on the host accelerator: no figure here is a")
    assert "Not finished; the same command goes on." in text
    assert page({"kind": "cuda"}, {}).startswith("# Eight minutes on a card")


def test_without_a_card_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "accelerator_here", lambda: None)
    with pytest.raises(RuntimeFault, match=r"torch finds none; .* --rehearse"):
        gpu.verify_gpu(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_beside_a_card_is_refused(tmp_path, monkeypatch):
    """Real runs would take the card."""
    monkeypatch.setattr(accelerators, "accelerator_here", Rehearsal)
    with pytest.raises(RuntimeFault, match="--rehearse: there is a card"):
        gpu.verify_gpu(tmp_path / "out", rehearse=True)


def some_times(**changes):
    times = {
        "holds": True,
        "words": "the simulator holds on this PC: …",
        "whole_error": 0.03,
        "first_token_error": 0.05,
        "repetitions": 0.01,
        "left_out": "",
        "rows": [],
    }
    return {"runs/times": {"result": times | changes, "seconds": 1.0}}


def test_it_holds_where_nothing_fails_and_times_do():
    assert holds({}) is None
    assert holds(some_times()) is True
    assert holds(some_times(holds=None)) is None
    far = some_times(holds=False, words="it does not hold here: …")
    assert holds(far) is False
    assert verdict(far)[0] == "it does not hold: runs/times: it does not hold here: …"
    lru = {"policy": "lru", "timing_free": True, "decisions_equal": True}
    other = lru | {"decisions_equal": False}
    decided = some_times(rows=[other, lru])
    assert holds(decided) is False
    assert "runs/times: lru decided otherwise than simulated" in verdict(decided)[0]
    assert holds(some_times(rows=[lru, other | {"timing_free": False}])) is True
    assert holds(some_times() | {"checks/one": {"failed": "Error: …"}}) is False
    assert len(verdict(decided)) <= 10


def a_recording(tokens, scores):
    """Of one layer; the two best of four experts serve each token."""
    scores = np.asarray(scores, np.float16)
    experts = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    return {"token": np.asarray(tokens), "scores": scores, "experts": experts}


SCORES = [[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]
CPU = a_recording([5, 6, 7], SCORES)


def compared(tokens=(5, 6, 7), scores=SCORES):
    return same_routing(CPU, a_recording(tokens, scores), layers=1)


def test_equal_recordings_pass():
    assert compared() == {
        "tokens": 3,
        "same_tokens": True,
        "same_experts": 1.0,
        "largest": 0.0,
        "passed": True,
    }


def test_a_rehearsal_records_the_shipped_model(tmp_path):
    recorded = gpu._recorded(session(tmp_path / "gpu"))
    assert recorded["passed"]
    assert recorded["tokens"] > gpu.NEW_TOKENS


def test_scores_may_differ_by_the_rounding_of_sixteen_bits_and_no_more():
    near, far = np.array(SCORES), np.array(SCORES)
    near[0, 0] += 2.0**-11
    far[0, 0] += 2.0**-8
    assert compared(scores=near)["passed"]
    assert compared(scores=near)["largest"] == 2.0**-11
    assert not compared(scores=far)["passed"]


def test_experts_that_scores_do_not_tell_apart_may_change_places():
    """The last token's second expert is any of three; the second one's is not."""
    tied, other = np.array(SCORES), np.array(SCORES)
    tied[2, 3] = np.nextafter(np.float16(0.1), np.float16(1.0))
    other[1] = [0.1, 0.4, 0.3, 0.2]
    assert compared(scores=tied)["same_experts"] == pytest.approx(2 / 3)
    assert compared(scores=tied)["passed"]
    assert not compared(scores=other)["passed"]


def test_another_token_ends_the_comparison_and_fails():
    result = compared(tokens=(5, 9, 7))
    assert (result["tokens"], result["same_tokens"]) == (1, False)
    assert not result["passed"]
