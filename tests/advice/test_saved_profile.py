"""An advised machine as a profile: every number says where it is from, and replays of
the advised placement take what advice says.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_files import bench, row
from support.command_line import refused

from moesim.advice.advise import advise
from moesim.advice.machine import machine_of_profile
from moesim.advice.plan.memory import Candidate, bill_of
from moesim.advice.plan.saved_profile import (
    cache_ratio,
    profile_of_advice,
    replay_command,
)
from moesim.advice.plan.what_if import shape_of
from moesim.hwprofiles import paths
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.hwprofiles.schema import Quantity
from moesim.runs.config import RunConfig
from moesim.runs.replay import replay
from moesim.traces.format.reader import open_trace
from moesim.traces.synthetic.generate import stated, synthesise

TINY = Path(__file__).parents[2] / "runtime" / "data" / "tiny"
PC = {"cpu": "Ryzen 7 5700X", "ram": "2x16GB DDR4-3600"}
CARD = {"gpu": "RTX 4060 Ti 16GB", "pcie": "4.0x8"}
SAME_WITHIN = 1.05
"""Replay and advice of one placement, without keys and values of a longer context."""


@pytest.fixture(scope="module")
def advice():
    return advise("qwen3-30b-a3b", **PC, **CARD)


def replayed(advice, setting, trace, folder, steps=None):
    """Decode seconds of a step by lane and kind, and in all, with the saved profile."""
    profile = load_profile(save_profile(profile_of_advice(advice), folder / "hw.toml"))
    ratio = cache_ratio(advice.model, setting)
    config = RunConfig.of(
        trace,
        policy="llama.cpp",
        hw=profile,
        steps=steps,
        cache_ratio=ratio,
    )
    run = replay(config)
    passes = run.timeline.step_frame()
    decodes = passes[passes.phase == "decode"]
    spans = run.timeline.frame()
    spans = spans[spans.step.isin(decodes.step)]
    seconds = (spans.end_s - spans.start_s).groupby([spans.lane, spans.kind]).sum()
    parts = {key: value / len(decodes) for key, value in seconds.items()}
    whole_s = float((decodes.end_s - decodes.start_s).mean())
    return whole_s, parts


def predicted(advice, setting):
    bill = bill_of(advice.model, advice.machine, setting, advice.job)
    prospect = advice.forecast.prospect(Candidate(setting, bill))
    return prospect.decode_terms


def test_a_replay_of_the_placement_takes_what_advice_says(advice, tmp_path):
    """Ten layers on the CPU: the CPU's part and the GPU's, each, and both together."""
    trace = tmp_path / "t.parquet"
    shape = shape_of(advice.model)
    synthesise(stated(shape, skew=0.8, reuse=0.3, new_tokens=24), trace, tokens=24)
    setting = advice.best.candidate.setting
    whole_s, parts = replayed(advice, setting, open_trace(trace), tmp_path)

    terms = predicted(advice, setting)
    # Which ten layers have larger down projections differs a little from the recipe's.
    host_s = terms["cpu experts"] + terms["cpu floor"]
    replayed_host_s = parts["cpu", "compute"] + parts["d2h0", "activation"]
    assert replayed_host_s == pytest.approx(host_s, rel=0.03)
    # The trace's context is short, so keys and values are left out on both sides.
    card_s = terms["gpu weights"] + terms["gpu kernels"] + terms["step"]
    replayed_card_s = parts["gpu0", "compute"] + parts["gpu0", "dense"]
    assert replayed_card_s == pytest.approx(card_s, rel=0.02)
    assert parts["control", "plan"] == 0.0

    advised_s = sum(terms.values()) - terms["gpu keys and values"]
    assert advised_s / SAME_WITHIN < whole_s < advised_s * SAME_WITHIN


def test_every_number_says_where_it_is_from(advice):
    profile = profile_of_advice(advice)
    assert profile.kind == "datasheet"
    numbers = profile.numbers
    assert all(quantity.source.strip() for quantity in numbers.values())
    assert numbers["costs.cpu.bytes_per_s"].kind == "datasheet"
    assert "read share of the stated memory's rate" in (
        numbers["costs.cpu.bytes_per_s"].source
    )
    assert numbers["costs.cpu.first_s"].kind == "assumed"
    # Without rows nothing may pass for measured.
    assert not any(quantity.kind == "measured" for quantity in numbers.values())


def test_what_rows_taught_is_measured_with_their_number(advice, tmp_path):
    rows = [
        row("tg", 128, 0.8 * advice.curve[layers].decode.value, n_cpu_moe=layers)
        for layers in (12, 48)
    ]
    learned = advise("qwen3-30b-a3b", **PC, **CARD, bench=bench(tmp_path, rows))
    profile = profile_of_advice(learned)
    assert profile.kind == "measured"
    rate = profile.numbers["costs.cpu.bytes_per_s"]
    assert (rate.kind, rate.samples) == ("measured", 2)
    assert 0 < rate.spread < 0.3 * rate.value
    assert rate.value < profile_of_advice(advice).numbers["costs.cpu.bytes_per_s"].value
    # Two decode rows say nothing of copies.
    assert profile.numbers["costs.h2d.bytes_per_s"].kind == "datasheet"


def test_probes_stay_probes(tmp_path):
    """Advice from the saved file starts from the rates that the first one began with."""
    profile = replace(load_profile("rtx4060ti"), kind="measured")
    rates = {
        paths.host_read(8): 40e9,
        paths.LINK_PAGE_LOCKED: 13e9,
        paths.DEVICE_READ: 260e9,
        paths.HOST_BESIDE_LINK: 30e9,
        paths.LINK_BESIDE_HOST: 11e9,
    }
    for path, rate in rates.items():
        profile.numbers[path] = Quantity(rate, "published", "a test")
    save_profile(profile, tmp_path / "probed.toml")
    advice = advise("qwen3-30b-a3b", hw=tmp_path / "probed.toml", **PC, **CARD)

    saved = profile_of_advice(advice)
    assert saved.kind == "measured"
    save_profile(saved, tmp_path / "saved.toml")
    again = machine_of_profile(tmp_path / "saved.toml")
    assert again.probes == advice.machine.probes
    # What products reach of 40 GB/s alone, and 30 beside a copy.
    beliefs = advice.forecast.beliefs
    alone = beliefs.median("host_read") * beliefs.median("host_reach")
    assert alone == pytest.approx(40e9, rel=0.15)
    slowdown = saved.numbers["contention.cpu.h2d"].value
    assert slowdown == pytest.approx(alone / 30e9, rel=1e-6)


def test_the_command_writes_it_and_says_how_to_replay(command, advice):
    words = [word for key, value in (PC | CARD).items() for word in (f"--{key}", value)]
    save = ("--save-profile", "pc.toml")
    code, out, err = command("advise", "qwen3-30b-a3b", *words, *save)
    assert code == 0, err
    assert replay_command(advice, "pc.toml") in out
    steps = ("--policy", "llama.cpp", "--steps", "5")
    code, out, err = command("replay", "tiny", "--hw", "pc.toml", *steps)
    assert code == 0, err
    assert "bound: at " in out


def test_a_machine_without_a_card_is_refused(command):
    words = ("--cpu", PC["cpu"], "--ram", PC["ram"], "--save-profile", "pc.toml")
    result = command("advise", "olmoe-1b-7b", *words)
    assert refused(result, "no graphics card with memory of its own")
