"""Eight minutes on a card: what a call has measured is kept, whatever ends it; what
fails is named, and the rest goes on.
"""

import json
import re

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu import Session, holds, page, same_routing, verdict

torch = pytest.importorskip("torch", reason="the runtime extra is not installed")

from moesim.runtime import accelerators  # noqa: E402
from moesim.runtime.accelerators import Rehearsal  # noqa: E402

MACHINE = {"accelerator": "host accelerator", "kind": "host"}
NAMES = tuple(f"checks/{number}" for number in range(4))
WELL = {"outcome": "well", "verdict": "ok"}


def interrupted():
    raise KeyboardInterrupt


def session(folder, machine=MACHINE, **options):
    folder.mkdir(exist_ok=True)
    made = Session(folder, Rehearsal(), gpu.REHEARSAL, 8.0, dict(machine), **options)
    made.load()
    return made


def saved(folder):
    return json.loads((folder / gpu.RESULTS).read_text())["steps"]


def test_an_interrupted_call_goes_on_behind_its_last_step(tmp_path):
    """Ctrl-C in the third of four steps: those before it are kept, with their page."""
    made = []
    first = session(tmp_path)
    for name in NAMES[:2]:
        first.make(name, lambda name=name: made.append(name) or WELL)
    with pytest.raises(KeyboardInterrupt):
        first.make(NAMES[2], interrupted)

    second = session(tmp_path)
    assert list(second.steps) == made == list(NAMES[:2])
    for name in NAMES:
        second.make(name, lambda name=name: made.append(name) or WELL)
    assert made == list(saved(tmp_path)) == list(NAMES)
    assert (tmp_path / gpu.PAGE).read_text().count("ok, well") == 4


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path):
    """And the next call tries it again."""
    made = session(tmp_path)
    made.make("checks/broken", lambda: 1 / 0)
    made.make("checks/whole", lambda: WELL)
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
    made.make("checks/one", lambda: WELL)
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


@pytest.mark.parametrize(("card", "words", "message"), [
    (None, [], r"error: expected a card, torch finds none; .* --rehearse"),
    # Real runs would take the card.
    (Rehearsal(), ["--rehearse"], "error: --rehearse: there is a card"),
])  # fmt: skip
def test_the_wrong_machine_is_refused_in_a_line(
    tmp_path, monkeypatch, capsys, card, words, message
):
    monkeypatch.setattr(accelerators, "accelerator_here", lambda: card)
    assert gpu.main(["--out", str(tmp_path / "out"), *words]) == 2
    assert re.match(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


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


def test_a_rehearsal_records_the_shipped_model(tmp_path):
    recorded = gpu._recorded(session(tmp_path / "gpu"))
    assert recorded["passed"]
    assert recorded["tokens"] > gpu.NEW_TOKENS


NEAR, FAR, TIED, OTHER = (np.array(SCORES) for _ in range(4))
NEAR[0, 0] += 2.0**-11
FAR[0, 0] += 2.0**-8
# The last token's second expert is any of three; the second one's is not.
TIED[2, 3] = np.nextafter(np.float16(0.1), np.float16(1.0))
OTHER[1] = [0.1, 0.4, 0.3, 0.2]


@pytest.mark.parametrize(("scores", "largest", "same", "passed"), [
    (SCORES, 0.0, 1.0, True),
    # The rounding of sixteen bits, and no more.
    (NEAR, 2.0**-11, 1.0, True),
    (FAR, 2.0**-8, 1.0, False),
    # Experts that scores do not tell apart may change places.
    (TIED, 2.0**-14, 2 / 3, True),
    (OTHER, 0.2, 2 / 3, False),
])  # fmt: skip
def test_recordings_are_equal_up_to_their_rounding(scores, largest, same, passed):
    result = compared(scores=scores)
    assert (result["tokens"], result["same_tokens"]) == (3, True)
    assert result["largest"] == pytest.approx(largest, rel=0.01)
    assert result["same_experts"] == pytest.approx(same)
    assert result["passed"] is passed


def test_another_token_ends_the_comparison_and_fails():
    result = compared(tokens=(5, 9, 7))
    assert (result["tokens"], result["same_tokens"]) == (1, False)
    assert not result["passed"]
