"""Command lines as people paste them: what they mean, whether they fit, what to change.

Placements are held against `support.llama_placement`, a small model of llama.cpp's own.
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from support.command_line import refused
from support.llama_placement import MIB, option, placed

from moesim.advice.given.answer import advise_flags
from moesim.advice.given.options import Settings, options_of, read_flags
from moesim.advice.model.catalogue import named_contents
from moesim.advice.plan.memory import Job
from moesim.base.errors import AdviceError

PC = {"cpu": "Ryzen 9 7950X", "ram": "2x48GB DDR5-6000", "gpu": "RTX 3090"}
TWO = PC | {"gpu": "2x RTX 3090"}
MODEL = "qwen3-30b-a3b"


PASTED = yaml.safe_load(
    Path(__file__).with_name("pasted_lines.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", PASTED["lines"])
def test_a_pasted_line_is_read_and_answered(case):
    given = read_flags(case["line"])
    assert given.engine == case["engine"]
    for name, value in case["settings"].items():
        kept = getattr(given.settings, name)
        assert (list(kept) if isinstance(kept, tuple) else kept) == value, name
    answer = advise_flags(MODEL, case["line"], **PC)
    assert answer.prospect.decode.low < answer.prospect.decode.high
    told = "\n".join(each.words for each in answer.findings)
    assert [words for words in case["words"] if words not in told] == []


@pytest.mark.parametrize("case", PASTED["refused"])
def test_nonsense_is_refused_in_one_line(case):
    with pytest.raises(AdviceError) as caught:
        advise_flags(MODEL, case["line"], **PC)
    assert case["words"] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "flags"),
    [
        (PC, "-ngl 99 --n-cpu-moe 20 -c 8192"),
        (PC, "-ngl 99 --cpu-moe -c 65536"),
        (PC, "-ngl 30 -c 4096"),
        (PC, "-ngl 40 --n-cpu-moe 25 -c 4096"),
        (TWO, "-ngl 99 --n-cpu-moe 24 -c 65536"),
        (TWO, "-ngl 99 -ts 3,1 --n-cpu-moe 10 -c 8192"),
        (TWO, r"-ngl 99 -ot blk\.([0-9]|1[0-9])\.ffn_.*_exps.*=CPU -c 8192"),
    ],
)
def test_placements_are_those_of_llama_cpp(machine, flags):
    answer = advise_flags(MODEL, f"llama-server -m a.gguf {flags}", **machine)
    model = answer.reading.model
    cards = answer.reading.machine.single_cards
    words = flags.split()
    context = int(option(words, "-c"))
    used, _ = placed(model, words, cards, context)
    bill = answer.reading.bill
    kept = sum(
        bill.gpu[item] for item in ("dense weights", "experts", "keys and values")
    )
    assert kept == pytest.approx(sum(used), rel=1e-6)
    buffers = bill.gpu["compute buffers"] / len(cards) + 420 * MIB
    for card, stored in zip(bill.cards, used, strict=False):
        assert card.needed == pytest.approx(stored + buffers, rel=0.02)


def test_n_cpu_moe_means_other_layers_in_ik_llama_cpp():
    """A14: 24 of 48 layers are 12-23 and 36-47 with two cards, the last 24 with one."""
    line = "ik_llama.cpp/llama-server -ngl 99 --n-cpu-moe 24 -c 8192"
    two = advise_flags(MODEL, line, **TWO).reading
    assert two.setting.chosen_layers == {*range(12, 24), *range(36, 48)}
    one = advise_flags(MODEL, line, **PC).reading
    assert one.setting.chosen_layers == set(range(24, 48))
    plain = advise_flags(MODEL, line.replace("ik_", ""), **PC).reading
    assert plain.setting.on_host(named_contents(MODEL)) == tuple(range(24))


def test_ik_llama_cpp_multiplies_faster_and_uploads_used_experts_alone():
    """Its #842 made that the default; #533 names 2.1 times llama.cpp's products."""
    line = "llama-server -ngl 99 --cpu-moe -c 8192 -ub 512"
    fork = advise_flags(MODEL, f"ik_llama.cpp/{line} -rtr", **PC)
    plain = advise_flags(MODEL, f"{line} --no-op-offload", **PC)
    assert 1.3 < fork.prospect.prefill.value / plain.prospect.prefill.value < 2.5
    assert fork.reading.setting.used_only
    older = advise_flags(MODEL, f"ik_llama.cpp/{line} -no-ooae", **PC)
    assert not older.reading.setting.used_only


def test_the_second_card_is_asked_for_too_much():
    """A14: 35,378 MiB of weights asked of the second of two RTX 3090."""
    line = "llama-server -c 65536 -ub 2048 --n-cpu-moe 24 -ngl 99"
    answer = advise_flags("qwen3.5-122b-a10b", line, quant="UD-Q4_K_XL", **TWO)
    reading = answer.reading
    weights, _ = placed(
        answer.reading.model, line.split(), reading.machine.single_cards, 0
    )
    assert weights[1] / MIB == pytest.approx(35378, rel=0.03)
    first, second = reading.bill.cards
    assert second.left < 0 < first.left
    assert answer.most_context == 0
    # The same flags fit once layers are parted by size.
    assert any("-ts" in change.change for change in answer.changes)


def test_a_line_that_fits_is_told_how_far_its_context_may_grow():
    answer = advise_flags(MODEL, "llama-server -ngl 99 --n-cpu-moe 20 -c 8192", **PC)
    grown = f"llama-server -ngl 99 --n-cpu-moe 20 -c {answer.most_context}"
    assert advise_flags(MODEL, grown, **PC).reading.bill.fits
    beyond = f"llama-server -ngl 99 --n-cpu-moe 20 -c {answer.most_context + 1024}"
    refused_bill = advise_flags(MODEL, beyond, **PC).reading.bill
    assert not refused_bill.fits


LINE = "llama-server -ngl 99 --n-cpu-moe 30 -c 16384 --load-mode none"


def test_a_measured_speed_is_normal_or_has_causes_with_commands():
    """A29: "my command gives 9.5 t/s: is that normal?"."""
    expected = advise_flags(MODEL, LINE, **PC).prospect.decode
    normal = advise_flags(MODEL, LINE, **PC, measured=expected.value * 0.95).verdict
    assert normal.word == "normal"
    assert not normal.causes
    slow = advise_flags(MODEL, LINE, **PC, measured=expected.value * 0.55).verdict
    assert slow.word == "slower"
    assert 1 <= len(slow.causes) <= 3
    assert all(each.command for each in slow.causes)
    words = " ".join(each.words for each in slow.causes)
    assert re.search("channel|XMP|threads", words)
    fast = advise_flags(MODEL, LINE, **PC, measured=expected.high * 1.2).verdict
    assert fast.word == "faster"


def test_more_threads_than_cores_are_the_first_suspect_of_a_line_that_has_them():
    line = f"{LINE} -t 32"
    answer = advise_flags(MODEL, line, **PC, measured=30.0)
    assert "more threads than cores" in answer.verdict.causes[0].words


def test_a_target_is_reached_by_the_smallest_change():
    now = advise_flags(MODEL, LINE, **PC).prospect.decode.value
    near = advise_flags(MODEL, LINE, **PC, target=1.3 * now)
    (way,) = near.ways
    assert way.decode.value >= 1.3 * now
    assert "--n-cpu-moe" in way.change
    reached = advise_flags(MODEL, LINE, **PC, target=0.5 * now)
    assert reached.ways == ()
    far = advise_flags(MODEL, LINE, **PC, target=100 * now)
    assert far.ways
    assert all(each.decode.value < 100 * now for each in far.ways)


def test_what_runs_beside_the_model_takes_its_place():
    """Published for one model at 256k: 1.65 GiB of projector, 2.26 of heads."""
    sizes = {"mmproj": 1.65 * 2**30, "draft": 2.26 * 2**30}
    with_both = advise_flags(MODEL, LINE, **PC, job=Job(beside=sizes))
    alone = advise_flags(MODEL, LINE, **PC)
    more = with_both.reading.bill.gpu_bytes - alone.reading.bill.gpu_bytes
    assert more == pytest.approx(sum(sizes.values()))
    assert with_both.most_context < alone.most_context
    line = f"{LINE} --mmproj there-is-none.gguf"
    told = [each.words for each in advise_flags(MODEL, line, **PC).findings]
    assert any("say its size with --mmproj" in words for words in told)


def test_keys_on_the_cpu_leave_the_card():
    line = f"{LINE} -nkvo"
    bill = advise_flags(MODEL, line, **PC).reading.bill
    assert bill.gpu["keys and values"] == 0
    assert bill.host["keys and values"] > 0


def test_every_option_sets_a_field_that_there_is():
    fields = set(Settings.__dataclass_fields__)
    for engine in ("llama.cpp", "ik_llama.cpp", "ollama", "LM Studio"):
        for option_ in options_of(engine).values():
            assert not option_.sets or option_.sets in fields, option_.names


def test_the_command_answers_a_line(command, tmp_path):
    words = [word for name, value in PC.items() for word in (f"--{name}", value)]
    code, text, _ = command(
        "advise", MODEL, *words, "--flags", LINE, "--measured", "9.5", "--target", "80"
    )
    assert code == 0
    for part in (
        "read as",
        "decode, deep",
        "is slow",
        "What to change first",
        "To reach",
    ):
        assert part in text
    file = tmp_path / "line.txt"
    file.write_text("llama-server \\\n -ngl 99 \\\n --cpu-moe -c 8192\n")
    code, text, _ = command("advise", MODEL, *words, "--flags", str(file), "--json")
    assert json.loads(text)["placement"] == "all experts on the CPU"
    result = command("advise", MODEL, *words, "--flags", "llama-server --n-cpu-mo 3")
    assert refused(result, "unknown option")
    code, text, _ = command("advise", MODEL, *words, "--measured", "150")
    assert "tokens/s is" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ik_llama.cpp/llama-server -ngl 99 --cpu-moe -c 8192 --no-mmap", "--no-mmap"),
        (
            "GPU Offload: 48/48; Force Model Expert Weights onto CPU: on; Try mmap(): off",
            "try mmap(): off",
        ),
    ],
)
def test_what_goes_is_named_as_its_engine_names_it(line, words):
    answer = advise_flags(MODEL, line, **PC)
    assert f"without {words}" in answer.changes[0].change
