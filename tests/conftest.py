"""Shared fixtures: a small model shape, small traces, and the folder of other people's
traces.
"""

from __future__ import annotations

import gc
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.command_line import runner
from support.drawn_schedules import DrawnSchedules
from support.learned_network import write as write_artefacts
from support.small_trace import write_small_trace, write_trace

from moesim.base.host import available_cores
from moesim.runs import machine
from moesim.traces.format.schema import ModelShape

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = Path(__file__).parents[2] / "shared"

# How long an example takes depends on what else the machine does.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser):
    """More draws than every test run can afford."""
    parser.addoption(
        "--screenshots", metavar="FOLDER", help="keep pictures of all pages there"
    )
    parser.addoption(
        "--schedules", type=int, default=20, help="schedules drawn per claim, at most"
    )
    parser.addoption(
        "--schedule-seconds", type=float, help="time for each claim; no limit if absent"
    )
    parser.addoption(
        "--interval-draws",
        type=int,
        default=150,
        help="draws that intervals must cover",
    )
    parser.addoption(
        "--schedules-done",
        type=Path,
        help="file that notes how far each claim has come; the next run goes on there",
    )


@pytest.fixture
def screenshots(request):
    """The folder that keeps pictures of pages; None for none."""
    return request.config.getoption("--screenshots")


def pytest_configure(config):
    """Look for circles rarely: tests make few, and it takes a tenth of all time."""
    del config
    gc.set_threshold(50_000, 50, 100)


@pytest.fixture
def draws(request) -> int:
    """How often a test draws what an interval must cover."""
    return request.config.option.interval_draws


@pytest.fixture
def schedules(request) -> Iterator[DrawnSchedules]:
    """Seeds of the schedules that one claim about the device is tried with."""
    options = request.config.option
    drawn = DrawnSchedules(
        options.schedules, options.schedule_seconds, options.schedules_done
    )
    yield drawn.of(request.node.name)
    drawn.note(request.node.name)


def pytest_terminal_summary(terminalreporter, config):
    """Say how many schedules stand behind each claim so far."""
    place = config.option.schedules_done
    if place is None or not place.is_file():
        return
    terminalreporter.section("schedules drawn, all runs together")
    for name, count in json.loads(place.read_text(encoding="utf-8")).items():
        terminalreporter.write_line(f"{count:6,}  {name}")


@pytest.fixture(scope="session", autouse=True)
def any_machine_will_do():
    """Real runs take a profile of two cores and no GPU wherever the tests are: on one
    core, and beside a GPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            machine, "this_machine", lambda: ("host", max(2, available_cores()))
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """A shell makes what it starts in the background deaf to ctrl-C, and all that this
    starts: what tests stop, too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """The folder with real traces of other people; it is not part of the project."""
    folder = SHARED / "traces"
    if not folder.is_dir():
        pytest.skip(
            "other people's traces, no part of the project: ../shared/traces is not"
            " here"
        )
    return folder


@pytest.fixture
def tiny_shape() -> ModelShape:
    """3 MoE layers of 8 experts, top-2, one MiB per expert."""
    return ModelShape(
        name="tiny", layers=3, experts=8, top_k=2, hidden=64, expert_intermediate=32,
        expert_bytes=(1 << 20,) * 3, other_bytes=1 << 20,
    )  # fmt: skip


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run a command line as a user would in an empty folder: ``command("replay", path)``
    returns exit code, standard output and standard error.
    """
    return runner(capsys, monkeypatch, tmp_path)


@pytest.fixture
def trace(tmp_path) -> Path:
    """A trace of two short sequences."""
    return write_small_trace(tmp_path / "small.parquet")


@pytest.fixture(scope="module")
def store(trace, tmp_path_factory):
    """Random experts for the module's own `trace`, opened."""
    from support.real_machine import random_store  # torch

    with random_store(trace, tmp_path_factory.mktemp("store")) as opened:
        yield opened


@pytest.fixture(scope="module")
def artefacts(trace, tmp_path_factory):
    """What learned policies need for the module's own `trace`."""
    folder = tmp_path_factory.mktemp("learned")
    return write_artefacts(folder, trace.shape.layers, trace.shape.experts)


@pytest.fixture
def make_trace(tmp_path, tiny_shape):
    """Write a synthetic trace into `tmp_path`: ``make_trace(sequences=((prompt,
    decode), …), shape=…, columns=…)``.
    """

    def make(name="trace.parquet", *, shape=None, sequences=((4, 6),), **options):
        return write_trace(tmp_path / name, shape or tiny_shape, sequences, **options)

    return make
