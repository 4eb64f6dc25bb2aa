"""Predictions held against measured rows: none sees its platform, or its source; any
folder with the columns is read as what its rows say; intervals hold what they promise.
"""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured.__main__ import main
from benchmarks.measured.fit import Fit, Member
from benchmarks.measured.judge import judge
from benchmarks.measured.rows import read_folder, runs_of
from benchmarks.measured.scores import BASELINES, OURS, score
from moesim.advice.machine import describe_machine
from moesim.advice.model.catalogue import named_contents
from moesim.advice.times.latents import (
    NINETY,
    Beliefs,
    Observation,
    Prior,
)
from moesim.advice.times.priors import (
    Population,
    PriorTable,
    priors_of,
    textbook_priors,
)
from moesim.advice.times.step_times import decode_target
from moesim.advice.times.work import NEVER, Setting
from moesim.base.errors import AdviceError

WIDE = Path("../shared/reference/machines_wide")
MODELS = ("gpt-oss-20b", "gpt-oss-120b")
CARDS = {
    "one": ("Ryzen 9 9950X", "RTX 5090", "mine/first"),
    "two": ("Ryzen 7 5700X", "RTX 3090", "mine/first"),
    "three": ("Core i9-13900K", "RTX 4090", "yours/second"),
    "four": ("Ryzen 5 7600", "RTX 4070", "yours/second"),
}
FACTORS = {"one": 0.8, "two": 1.1, "three": 0.95, "four": 1.2}
COUNTS = (8, 16, 24)
COLUMNS = "id model quant cpu ram gpu pcie flags n_cpu_moe threads pp_tokens pp_tps"
MORE = "tg_tokens tg_tps source notes platform os engine ctx_depth batch ubatch"


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def bench_row(**cells):
    """One row of llama_bench.csv; what is not given is not stated."""
    row = dict.fromkeys(f"{COLUMNS} {MORE}".split(), "")
    plain = {
        "model": "gpt-oss-20b",
        "quant": "MXFP4",
        "source": "mine/first",
        "id": "a",
    }
    return row | plain | {key: str(value) for key, value in cells.items()}


def true_speed(name, model, count):
    """What a machine would show that is faster than its textbook by one factor."""
    cpu, gpu, _ = CARDS[name]
    machine = describe_machine(cpu=cpu, gpu=gpu, ram="DDR5 64GB", lenient=True)
    contents = named_contents(model, "MXFP4")
    target = decode_target(machine, contents, Setting(cpu_layers=count), 64.0)
    table = PriorTable(textbook_priors(machine), Population())
    return FACTORS[name] / target.predicted(Beliefs(table)).value


def make(folder, changes=()):
    """Write four machines of two sources; `changes` multiply speeds of machines."""
    rows = []
    for name, (cpu, gpu, source) in CARDS.items():
        for model in MODELS:
            for count in COUNTS:
                speed = true_speed(name, model, count) * dict(changes).get(name, 1)
                rows.append(
                    bench_row(
                        model=model,
                        cpu=cpu,
                        gpu=gpu,
                        ram="DDR5 64GB",
                        flags=f"llama-bench -ncmoe {count} -t 8",
                        n_cpu_moe=count,
                        tg_tokens=128,
                        tg_tps=speed,
                        source=source,
                        platform=name,
                    )
                )
    write(folder, "llama_bench.csv", rows)
    return folder


@pytest.fixture(scope="module")
def judgement(tmp_path_factory):
    return judge([read_folder(make(tmp_path_factory.mktemp("measured")))])


def predicted(judgement, left_out, name):
    case = judgement.cases[0]
    return {
        (each.run.model.name, each.run.words): each.guesses
        for each in case.predictions[left_out]
        if each.run.machine_name == name
    }


@pytest.mark.parametrize(
    ("left_out", "changed"), [("platforms", ("one",)), ("sources", ("one", "two"))]
)
def test_no_prediction_sees_its_own_platform_or_source(
    judgement, tmp_path, left_out, changed
):
    """Every row of it becomes three times as fast: what is predicted for it stays."""
    again = judge([read_folder(make(tmp_path, dict.fromkeys(changed, 3.0)))])
    before = predicted(judgement, left_out, "one")
    after = predicted(again, left_out, "one")
    for key, guesses in before.items():
        assert after[key][OURS].log_s == pytest.approx(guesses[OURS].log_s, abs=0.02)
        for name in set(guesses) & set(BASELINES):
            assert after[key][name].log_s == pytest.approx(guesses[name].log_s)
    # Others learn from it, though one odd machine does not carry them away.
    other = predicted(judgement, left_out, "three")
    moved = predicted(again, left_out, "three")
    moves = [
        abs(moved[key][OURS].log_s - guesses[OURS].log_s)
        for key, guesses in other.items()
    ]
    assert 1e-3 < max(moves) < 0.1


def test_rows_of_the_machine_tell_more_than_its_specification(judgement):
    by_name = {case.name: case for case in judgement.cases}
    errors = [
        score(by_name[f"decode, {words}"].predictions["platforms"]).median
        for words in ("specification", "one row of the model")
    ]
    assert errors[0] > 0.05
    assert errors[1] < 0.03


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"n_cpu_moe": "cpu"}, {"gpu_layers": 0}),
        ({"n_cpu_moe": "all (ngl 0)"}, {"gpu_layers": 0}),
        ({"n_cpu_moe": "~12"}, {"cpu_layers": 12}),
        ({"n_cpu_moe": "all"}, {"cpu_layers": 999}),
        ({"n_cpu_moe": "ngl14"}, {"gpu_layers": 14}),
        ({"flags": "llama.cpp; 25 % of experts on GPU"}, {"cpu_layers": 18}),
        ({"flags": "-ot exps=CPU --no-mmap"}, {"cpu_layers": 999, "page_locked": True}),
        (
            {"flags": r"-ot blk\.(1|2)\.ffn_.*_exps=CPU"},
            {"chosen_layers": frozenset({1, 2})},
        ),
        ({"flags": "--n-cpu-moe 9 -ub 2048"}, {"cpu_layers": 9, "micro_batch": 2048}),
        ({"n_cpu_moe": "8", "ubatch": "1024"}, {"micro_batch": 1024}),
        ({"flags": "-ncmoe 8 -lm none"}, {"page_locked": True}),
        # The fork's GPU kernels know no repacked experts; it uploads the used ones
        # alone since October 2025.
        (
            {"n_cpu_moe": "8", "flags": "ik -rtr", "pp_tokens": 512, "pp_tps": 90},
            {"used_only": False, "iqk": False, "gpu_from_tokens": NEVER},
        ),
        (
            {
                "model": "qwen3-30b-a3b",
                "quant": "Q4_K_M",
                "n_cpu_moe": "8",
                "source": "ikawrakow/ik_llama.cpp/pull/2262",
            },
            {"used_only": True, "iqk": True, "gpu_from_tokens": 32 * 128 // 8},
        ),
        (
            {
                "n_cpu_moe": "8",
                "flags": "llama.cpp",
                "source": "ikawrakow/ik_llama.cpp/discussions/357",
            },
            {"iqk": False, "gpu_from_tokens": None},
        ),
        # The engine of a row is what its column says, not a folder of comparisons.
        (
            {"n_cpu_moe": "8", "engine": "llama.cpp b1", "source": "a/b:ik-ab/main"},
            {"used_only": True},
        ),
    ],
)
def test_a_row_is_read_as_what_it_says(tmp_path, cells, expected):
    plain = {"cpu": "Ryzen 9 9950X", "gpu": "RTX 5090", "tg_tps": 20, "ram": "64GB"}
    write(tmp_path, "llama_bench.csv", [bench_row(**(plain | cells))])
    ((run, *_), skipped) = runs_of(read_folder(tmp_path))
    assert not skipped
    found = {name: getattr(run.setting, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({}, "where the experts lie"),
        ({"n_cpu_moe": "fit", "flags": "--fit"}, "where the experts lie"),
        ({"flags": "mosl cache; 25 % of experts on GPU"}, "another engine"),
        ({"engine": "Strata 0.1.31", "n_cpu_moe": "4"}, "another engine"),
        ({"n_cpu_moe": "4", "flags": "--spec-draft-n-max 8"}, "drafted"),
        ({"n_cpu_moe": "0", "model": "gpt-oss-120b"}, "spills"),
        ({"n_cpu_moe": "36", "model": "gpt-oss-120b", "ram": "32GB"}, "pages"),
        ({"n_cpu_moe": "4", "flags": "-ot ffn_up_exps=CPU"}, "single matrices"),
        ({"n_cpu_moe": "4", "model": "no-such-model"}, "no such file"),
        ({"n_cpu_moe": "4", "tg_tps": ""}, "no speed"),
        ({"n_cpu_moe": "4", "notes": "VRAM thrash"}, "the source says"),
        ({"n_cpu_moe": "4", "notes": "depth of it unclear"}, "the source says"),
        ({"n_cpu_moe": "4", "flags": "-sm row"}, "parted among the cards"),
    ],
)
def test_a_row_about_something_else_is_skipped_with_its_reason(tmp_path, cells, reason):
    plain = {"cpu": "Ryzen 9 9950X", "gpu": "RTX 5090", "tg_tps": 20, "ram": "64GB"}
    write(tmp_path, "llama_bench.csv", [bench_row(**(plain | cells))])
    runs, (skipped,) = runs_of(read_folder(tmp_path))
    assert not runs
    assert reason in skipped.reason


def test_a_row_on_one_card_of_two_has_one_card_and_stays_with_its_platform(tmp_path):
    cells = {"gpu": "2x R9700", "platform": "mine", "n_cpu_moe": 8, "tg_tps": 20}
    ways = (("layer", "ROCm"), ("none", "ROCm"), ("layer", "Vulkan"))
    both, one, vulkan = (
        cells | {"flags": f"-sm {mode}", "engine": engine} for mode, engine in ways
    )
    # A second nameless host with that card may be the first one.
    other = both | {"platform": "yours", "gpu": "R9700"}
    rows = [bench_row(**each) for each in (both, one, vulkan, other)]
    write(tmp_path, "llama_bench.csv", rows)
    runs, _ = runs_of(read_folder(tmp_path))
    assert [run.machine.gpu_count for run in runs] == [2, 1, 2, 1]
    assert len({run.machine_name for run in runs}) == 4
    assert len({run.group for run in runs}) == 1


def test_one_measurement_in_two_files_counts_once(tmp_path):
    cells = {"cpu": "Ryzen 9 9950X", "gpu": "RTX 5090", "platform": "mine"}
    bench = bench_row(**cells, n_cpu_moe=8, tg_tps=50.01)
    write(tmp_path, "llama_bench.csv", [bench])
    decode = {"platform": "mine", "model": "gpt-oss-20b", "quant": "MXFP4"}
    write(tmp_path, "decode.csv", [decode | {"n_cpu_moe": 8, "tok_s": 50.0}])
    (run,), (skipped,) = runs_of(read_folder(tmp_path))
    assert run.row.file == "decode.csv"
    assert "same measurement" in skipped.reason


def drawn_members(rng, spread, machines=40):
    """Machines whose one latent is drawn with a known spread, three rows each."""
    members = []
    for number in range(machines):
        name = f"machine {number}"
        kind = "fast" if number % 2 else "slow"
        truth = math.exp(rng.normal(0, spread) + (0.3 if kind == "fast" else 0.0))
        prior = Prior(1.0, 0.30, "", (f"rate@{kind}",))
        rows = [
            Observation(
                truth * math.exp(rng.normal(0, 0.02)),
                lambda rates: rates["rate"],
                frozenset({"rate"}),
                0.02,
            )
            for _ in range(3)
        ]
        members.append(Member(name, {"rate": prior}, rows))
    return members


@pytest.mark.parametrize("spread", [0.10, 0.30, 0.60])
def test_the_spread_over_machines_is_not_shrunk(spread):
    """Where the prior says the same as the machines, its spread comes back as it is."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(6):
        population = Fit(drawn_members(rng, spread)).population()
        found.append(0.30 * population.scales["rate"])
    # The textbook's own four machines pull a tenth of the way towards 0.30.
    variance = (40 * spread**2 + 4 * 0.30**2) / 44
    assert np.mean(found) == pytest.approx(math.sqrt(variance), rel=0.12)


@pytest.mark.skipif(not WIDE.is_dir(), reason="no folder of other people's machines")
def test_shipped_intervals_hold_other_peoples_rows():
    """Not blind: the shipped population knows them. Blind figures are in machines.md."""
    runs, skipped = runs_of(read_folder(WIDE))
    assert len(runs) > 550
    assert len(skipped) < 500
    inside = []
    for run in runs:
        target = run.target(probed=False)
        beliefs = Beliefs(priors_of(run.specified, run.setting.threads))
        found = target.predicted(beliefs, run.row_spread)
        distance = abs(math.log(run.seconds / found.value)) / found.spread
        inside.append(distance < NINETY)
    assert 0.80 < np.mean(inside) < 0.99


def test_the_program_prints_the_table_and_writes_the_page(capsys, tmp_path):
    folder = make(tmp_path / "measured")
    out = tmp_path / "out"
    assert main([str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "inside 90 %" in printed
    assert "decode, specification" in printed
    page = (out / "machines.md").read_text(encoding="utf-8")
    assert "roofline, two constants" in page
    assert "sources left out:" in page
    numbers = json.loads((out / "machines.json").read_text(encoding="utf-8"))
    rows = len(CARDS) * len(MODELS) * len(COUNTS)
    assert numbers["rows"] + len(numbers["skipped"]) == rows
    assert all("spills" in each["reason"] for each in numbers["skipped"])
    assert (out / "specification.svg").is_file()
    assert (out / "population.yaml").is_file()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "found none of"),
        ({"decode.csv": "a,b\n1,2\n"}, "missing"),
        ({"decode.csv": b"\xff\xfe"}, "not a CSV file in UTF-8"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, files, expected):
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    with pytest.raises(AdviceError, match=expected):
        read_folder(tmp_path)
