"""What strangers ask and published, each with its figure (issue 43, sections 1 and 2)."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moesim.advice.advise import advise
from moesim.advice.given.answer import advise_flags
from moesim.advice.machine import Probes, describe_machine
from moesim.advice.model.catalogue import named_contents
from moesim.advice.observed import states
from moesim.advice.plan.memory import (
    GIB,
    MIB,
    PROGRAM_BYTES,
    TABLES,
    Job,
    candidates,
)
from moesim.advice.plan.what_if import cached_speed
from moesim.advice.times.latents import Beliefs
from moesim.advice.times.priors import priors_of
from moesim.advice.times.step_times import decode_target, prefill_target
from moesim.advice.times.work import HELD, LAZY, Setting
from moesim.base.errors import AdviceError

CASES = yaml.safe_load(
    Path(__file__).with_name("field_cases.yaml").read_text(encoding="utf-8")
)
PARTS = ("cpu", "ram", "gpu", "system", "quant")
FLASH_NEXT = "qwen3.8-flash-next"
MODEL = "qwen3-30b-a3b"


def answered(case):
    job = Job(
        prompt=case.get("prompt", 2048),
        answer=case.get("answer", 512),
        sequences=case.get("requests", 1),
    )
    words = {name: case[name] for name in PARTS if name in case}
    return advise_flags(case["model"], case["flags"], **words, job=job)


@pytest.mark.parametrize("case", CASES, ids=[each["id"] for each in CASES])
def test_published_speeds_lie_inside_their_intervals(case):
    prospect = answered(case).prospect
    inside = prospect.decode.low < case["decode"] < prospect.decode.high
    # What another build measured may lie outside, and says so.
    assert inside != ("reason" in case), prospect.decode
    if "speed" in case:
        assert prospect.prefill.low < case["speed"] < prospect.prefill.high


def test_the_memory_and_first_tokens_of_several_requests():
    """A6: 21,150, 21,578, 22,150 and 23,308 MiB, 144 for each request of 4,096 tokens; the
    first token after 0.16, 0.62, 1.18 and 2.43 s. Bytes of the file follow from its label,
    which is good to a few per cent.
    """
    words = {"ram": "31GB DDR4", "gpu": "RTX 3090", "quant": "UD-Q4_K_M"}
    measured = {1: (21150, 0.16), 4: (21578, 0.62), 8: (22150, 1.18), 16: (23308, 2.43)}
    needed = {}
    for requests, (_, first_s) in measured.items():
        line = f"llama-server -ngl 99 -np {requests} -c {4096 * requests}"
        job = Job(prompt=198, answer=256, sequences=requests)
        answer = advise_flags("qwen3.6-35b-a3b", line, **words, job=job)
        prefill = answer.prospect.prefill
        needed[requests] = answer.reading.bill.gpu_bytes / MIB
        assert needed[requests] == pytest.approx(measured[requests][0], rel=0.055)
        assert prefill.low < requests * 198 / first_s < prefill.high
    growth = (needed[16] - needed[1]) / (measured[16][0] - measured[1][0])
    assert growth == pytest.approx(1, rel=0.05)


def test_the_card_holds_what_is_not_an_expert():
    """A9: 2.9 GB with a context that is not stated."""
    words = {"ram": "32GB", "gpu": "RTX 5080", "system": "windows"}
    needed = [
        advise_flags(
            "qwen3.6-35b-a3b", f"llama-server -ngl 99 --cpu-moe -c {context}", **words
        ).reading.bill.gpu_bytes
        for context in (8192, 32768)
    ]
    assert needed[0] < 2.9e9 < needed[1]


def test_a_whole_context_is_too_much_before_memory_runs_out():
    """A12: 24,840 MiB wanted of 22,341 free with all experts on the CPU; a smaller
    micro-batch or context fits.
    """
    words = {"quant": "UD-Q2_K_XL", "gpu": "RTX 3090", "ram": "192GB"}
    line = "llama-server -ngl 99 --cpu-moe -c 1048576 -ub 2048"
    answer = advise_flags("deepseek-v4-flash", line, **words)
    (card,) = answer.reading.bill.cards
    assert card.needed / MIB == pytest.approx(24_840, rel=0.1)
    assert answer.reading.bill.gpu_left < 0
    assert 262_144 < answer.most_context < 1_048_576
    assert any("-ub" in change.change for change in answer.changes)
    smaller = advise_flags("deepseek-v4-flash", f"{line} -ub 1024", **words)
    assert smaller.reading.bill.gpu_left > 0


def test_without_huge_pages_the_first_token_takes_half_as_long_again():
    """A16b: 56 % longer; 690 tokens/s of a prompt with them."""
    words = {
        "cpu": "Threadripper PRO 3975WX",
        "ram": "8x32GB DDR4-3200",
        "gpu": "2x RTX 3090",
        "quant": "UD-Q4_K_XL",
    }
    flags = "llama-server -ngl 99 --cpu-moe -c 16384 --load-mode none"
    job = Job(context=16384, prompt=8192)
    wide = advise_flags(FLASH_NEXT, f"{flags} -ub 2048", **words, job=job).prospect
    assert wide.prefill.low < 690 < wide.prefill.high
    reading = advise_flags(FLASH_NEXT, flags, **words, job=job).reading
    machine, setting = reading.machine, reading.setting
    prompt = prefill_target(machine, reading.model, setting, job.prompt)
    rates = {name: priors_of(machine)[name].value for name in prompt.latents}
    (state,) = (each for each in states(machine, setting) if "huge pages" in each.words)
    slower = {name: rate * state.factors.get(name, 1.0) for name, rate in rates.items()}
    longer = prompt.seconds(slower) / prompt.seconds(rates)
    assert longer == pytest.approx(1.56, rel=0.1)


def test_weights_are_loaded_where_the_hosts_part_fits_not_the_file():
    """A1: a file of 73.45 GiB beside 63.4 GiB of memory, 25 GiB of it on the card: 48
    GiB of host memory, loaded.
    """
    model = named_contents(FLASH_NEXT, "UD-Q2_K_XL", round(73.45 * GIB))
    advice = advise(model, cpu="Ryzen 9 9950X", ram="2x32GB DDR5-5600", gpu="RTX 5090")
    best = advice.best.candidate
    assert model.file_bytes > advice.machine.memory.size_bytes
    assert not best.setting.mapped
    line = "llama-server -ngl 99 -c 32768 --n-cpu-moe 23 --load-mode none"
    words = {"cpu": "Ryzen 9 9950X", "ram": "2x32GB DDR5-5600", "gpu": "RTX 5090"}
    reading = advise_flags(model, line, **words).reading
    on_card = reading.bill.gpu["experts"] + reading.bill.gpu["dense weights"]
    assert on_card / GIB == pytest.approx(25, rel=0.2)
    assert reading.bill.host_bytes / GIB == pytest.approx(48, rel=0.06)


def test_look_up_tables_are_a_tier_of_the_bill():
    """A2, A3: 26.8 GiB; held, or left in a mapped file since 2026-08-28; ik_llama.cpp
    holds them, with 8 layers 38,010 MiB.
    """
    model = named_contents(FLASH_NEXT, "UD-IQ4_XS", round(93.7e9))
    words = {"ram": "128GB", "gpu": "2x Quadro RTX 8000"}
    line = "llama-server -ngl 99 --n-cpu-moe 8 -c 32768"
    lazy = advise_flags(model, line, **words).reading
    assert lazy.bill.file[TABLES] / GIB == pytest.approx(26.8, rel=0.01)
    for held_line in (f"{line} --load-mode none", f"{line} --lazy-mode off"):
        held = advise_flags(model, held_line, **words).reading
        assert held.bill.host[TABLES] / GIB == pytest.approx(26.8, rel=0.01)
    ik = advise_flags(model, f"ik_llama.cpp/{line} --no-mmap", **words).reading
    locked = (ik.bill.host_bytes - PROGRAM_BYTES) / MIB
    assert locked == pytest.approx(38_010, rel=0.03)


def test_what_lazy_tables_cost():
    """A2, D9: decode 1 to 8 %, prompts from a cold page cache 15 to 19 % with batched
    reads (1,482 to 1,541 of 1,823 tokens/s).
    """
    model = named_contents(FLASH_NEXT, "UD-IQ1_S")
    full = describe_machine(cpu="Ryzen 9 9950X", ram="24GB DDR5-5600", gpu="RTX 5090")
    rates = Beliefs(priors_of(full))
    speeds = []
    for tables in (HELD, LAZY):
        setting = Setting(micro_batch=2048, tables=tables)
        decode = decode_target(full, model, setting, 512.0).predicted(rates).value
        prompt = prefill_target(full, model, setting, 8192).predicted(rates).value
        speeds.append((1 / decode, 8192 / prompt))
    held, lazy = speeds
    assert 0.90 < lazy[0] / held[0] < 0.99
    assert 0.55 < lazy[1] / held[1] < 0.95


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ("RTX 3080 20GB", 20),
        ("RTX 2080 Ti 22GB", 22),
        ("RTX 4090 48GB", 48),
        ("RTX 3070 (16 GB)", 16),
        ("NVIDIA GeForce RTX 3060 Lite Hash Rate 12GB", 12),
        ("RTX 5090, 32 GB", 32),
        ("RTX 3090 24576MiB", 24),
        ("RTX 4060 Ti 16GB", 16),
    ],
)
def test_the_stated_memory_of_a_card_counts(words, gib):
    """A5: cards with changed memory exist."""
    machine = describe_machine(cpu="Ryzen 9 7950X", gpu=words)
    assert machine.vram_bytes == gib * GIB
    pair = describe_machine(cpu="Ryzen 9 7950X", gpu=f"2x {words}")
    assert pair.vram_bytes == 2 * gib * GIB


def test_memory_that_no_such_card_has_is_refused():
    with pytest.raises(AdviceError, match="RTX 3060 has 8 or 12 GB"):
        describe_machine(cpu="Ryzen 9 7950X", gpu="RTX 3060 10GB")
    both = describe_machine(cpu="Ryzen 9 7950X", gpu="2x RTX 3090 48GB")
    assert both.vram_bytes == 48 * GIB
    assert any("those of all 2 cards" in words for words in both.assumed)


def test_shared_memory_is_all_or_nothing():
    """A10: a split is half as fast as the CPU alone."""
    machine = describe_machine(cpu="Core Ultra 9 285H", ram="32GB LPDDR5X-8533")
    model = named_contents("qwen3.6-35b-a3b")
    places = {
        (each.setting.cpu_layers, each.setting.gpu_layers > 0)
        for each in candidates(model, machine, Job())
    }
    assert places == {(0, True), (0, False)}
    line = "llama-server -ngl 99 --n-cpu-moe 20 -c 8192"
    words = {"cpu": "Core Ultra 9 285H", "ram": "32GB LPDDR5X-8533"}
    told = [each.words for each in advise_flags(model, line, **words).findings]
    assert any("share one memory" in each for each in told)


def test_a_chip_with_graphics_may_be_asked_about_without_them():
    """A11."""
    words = {"cpu": "Ryzen AI 9 HX PRO 370", "ram": "96GB DDR5-5600"}
    alone = advise("qwen3-next-80b-a3b", **words, gpu="none")
    assert alone.machine.graphics == ()
    assert alone.best.candidate.bill.gpu_bytes == 0
    both = advise("qwen3-next-80b-a3b", **words)
    assert both.best.decode.value > alone.best.decode.value


@pytest.mark.parametrize(
    ("cpu", "ram", "measured"),
    [
        ("Threadripper PRO 3975WX", "8x32GB DDR4-3200", 85),
        ("Threadripper PRO 5955WX", "8x16GB DDR4-3200", 63.8),
        ("Threadripper 3960X", "4x32GB DDR4-3200", 86),
    ],
)
def test_few_dies_read_less_than_their_channels_give(cpu, ram, measured):
    """A16b, D1: four dies of Zen 2 share what eight channels could give."""
    machine = describe_machine(cpu=cpu, ram=ram)
    read = priors_of(machine)["host_read"]
    spread = 1.6449 * read.spread
    assert read.value / 1e9 == pytest.approx(measured, rel=min(0.6, 1.1 * spread))
    assert read.value < 0.75 * machine.host_peak_bytes_per_s


def test_a_probe_of_both_sockets_is_not_what_weights_are_read_at():
    """Twice 378 GB/s gave 9.79 instead of 9.08 tokens/s (llama.cpp#11733)."""

    def read(gb_per_s):
        probes = Probes(host_read={32: gb_per_s * 1e9})
        machine = describe_machine(cpu="2x EPYC 9175F", ram="24x32GB DDR5-6000")
        return priors_of(replace(machine, probes=probes))["host_read"].value

    assert read(753.6) < 9.79 / 9.08 * read(378.3)


def test_wsl_has_half_of_the_memory_and_locks_little_of_it():
    """A15: 14.8 GB cannot be page-locked."""
    words = {"cpu": "i7-4790K", "ram": "32GB DDR3", "gpu": "GTX 1080 Ti"}
    half = describe_machine(**words, system="wsl")
    assert half.memory.size_bytes == 16 * GIB
    assert any(".wslconfig" in each for each in half.assumed)
    stated = describe_machine(**words, system="wsl 24GB")
    assert stated.memory.size_bytes == 24 * GIB
    assert stated.most_page_locked_bytes < 14.8e9
    line = "llama-server -ngl 99 --cpu-moe -c 8192 --load-mode none"
    answer = advise_flags("qwen3.6-35b-a3b", line, **words, system="wsl 24GB")
    assert not answer.reading.setting.page_locked
    told = [each.words for each in answer.findings]
    assert any("GGML_CUDA_NO_PINNED" in each for each in told)
    with pytest.raises(AdviceError, match="expected linux, windows, wsl"):
        describe_machine(**words, system="beos")


WSL_PC = {
    "cpu": "i7-4790K",
    "ram": "32GB DDR3",
    "gpu": "GTX 1080 Ti + GTX 1070",
    "system": "wsl 24GB",
}
ENGINES = [
    # (model, quant, machine, slots, experts, tokens/s)
    (FLASH_NEXT, "UD-Q2_K_XL", {"gpu": "RTX 5090", "ram": "64GB"}, 186, 512, 65),
    (FLASH_NEXT, "UD-Q4_K_XL", {"gpu": "RTX 4090", "ram": "192GB"}, 128, 512, 36),
    (
        FLASH_NEXT,
        "UD-Q4_K_XL",
        {
            "gpu": "2x RTX 3090",
            "cpu": "Threadripper PRO 3975WX",
            "ram": "8x32GB DDR4-3200",
        },
        256,
        512,
        35.5,
    ),
    (
        "qwen3.6-35b-a3b",
        "Q4_K_M",
        {"gpu": "RTX 3060 12GB", "ram": "64GB"},
        124,
        256,
        51.3,
    ),
    ("glm-4.7-flash", "Q4_K_M", {"gpu": "RTX 3060 12GB", "ram": "64GB"}, 40, 64, 46.3),
    # As many slots as both cards hold; 46 to 53 tokens/s.
    (
        FLASH_NEXT,
        "UD-Q4_K_XL",
        {
            "gpu": "2x RTX 5090",
            "cpu": "Threadripper PRO 3975WX",
            "ram": "8x32GB DDR4-3200",
        },
        348,
        512,
        49.5,
    ),
    # A15, and D6: 98.45 % of uses covered.
    ("qwen3.6-35b-a3b", "Q4_K_M", WSL_PC, 112, 256, 11.3),
    ("qwen3.6-35b-a3b", "Q4_K_M", WSL_PC, 252, 256, 25.1),
]


@pytest.mark.parametrize("case", ENGINES, ids=[each[0] for each in ENGINES])
def test_speeds_of_engines_with_an_expert_cache_lie_inside(case):
    """A0b, A15, A16b: 119, 89, 124, 94 and 74 tokens/s were promised, without an interval;
    under WSL each cached layer waits for the card through Windows' driver.
    """
    model, quant, words, slots, experts, measured = case
    forecast = advise(model, quant=quant, **words).forecast
    speed, hits = cached_speed(forecast, slots / experts)
    assert speed.low < measured < speed.high
    assert hits.odds.spread > 0


def test_a_half_cached_layer_pays_for_its_second_chain():
    """D6: 40 layers cached (98.45 % hits) are slower than 33 cached and 7 whole."""
    forecast = advise("qwen3.6-35b-a3b", **WSL_PC).forecast
    whole, _ = cached_speed(forecast, 1.0)
    nearly, hits = cached_speed(forecast, 0.99)
    assert hits.odds.value > 63  # 98.45 %
    assert nearly.value < 0.85 * whole.value


def test_hits_at_a_third_of_the_slots_are_not_those_of_a_hot_set():
    """A0: 62 % at 186 of 512 slots, 43.5 at 93; 92 % at 35 % was promised."""
    forecast = advise(FLASH_NEXT, gpu="RTX 5090", ram="192GB").forecast
    for slots, measured in ((93, 0.435), (186, 0.62), (279, 0.72), (372, 0.789)):
        _, hits = cached_speed(forecast, slots / 512)
        low, high = (odds / (1 + odds) for odds in (hits.odds.low, hits.odds.high))
        assert low < measured < high
