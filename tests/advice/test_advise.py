"""Advice: what is answered, how sure, how fast; it learns from rows and names bad ones."""

import json
import re

import pytest
from support.bench_files import bench, row
from support.browser import browser, check_page, data_of
from support.command_line import refused
from support.model_files import write_gguf

from moesim.advice.advise import advise
from moesim.advice.machine import Grade, describe_machine
from moesim.advice.model.catalogue import named_contents
from moesim.advice.plan.bound import placement_bound
from moesim.advice.plan.commands import override_pattern
from moesim.advice.plan.memory import Job, bill_of
from moesim.advice.plan.what_if import replayed_hits
from moesim.advice.tables import table
from moesim.advice.times.step_times import key_passes
from moesim.advice.times.work import Setting
from moesim.base.errors import AdviceError
from moesim.traces.synthetic.generate import synthesise
from moesim.traces.synthetic.saved import model_like, shipped_statistics

MODEL = "qwen3-30b-a3b"
PC = {
    "cpu": "Ryzen 7 5700X",
    "ram": "2x16GB DDR4-3600",
    "gpu": "RTX 4060 Ti 16GB",
    "pcie": "4.0x8",
}
WORDS = [word for name, value in PC.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def advice():
    return advise(MODEL, **PC)


def test_a_bound_by_hand(advice):
    """All experts in host memory: 1.1 GB of experts at 57.6 GB/s."""
    setting = Setting(cpu_layers=99)
    bound = placement_bound(advice.machine, advice.model, setting)
    layers = advice.model.layers
    host_bytes = sum(layer.expert_bytes * 8 / 128 for layer in layers)
    assert bound.seconds == pytest.approx(host_bytes / 57.6e9)
    assert bound.resource == "host memory"


def test_bytes_of_the_bill_are_those_of_the_model(advice):
    setting = advice.best.candidate.setting
    bill = bill_of(advice.model, advice.machine, setting, advice.job)
    experts = bill.gpu["experts"] + bill.host["experts"]
    assert experts == advice.model.expert_bytes
    weights = experts + bill.gpu["dense weights"] + bill.host["embeddings"]
    assert weights == advice.model.file_bytes


def test_with_no_rows_it_asks_for_two_to_four_with_a_reason(advice):
    assert 2 <= len(advice.questions) <= 4
    for question in advice.questions:
        assert question.command.startswith("llama-bench -m ")
        assert question.reason.startswith("tells ")
        assert question.spread_after < question.spread_before


def test_rows_narrow_the_answer_and_move_it(tmp_path, advice):
    slower = 0.8 * advice.curve[12].decode.value
    rows = [
        row("tg", 128, slower, n_cpu_moe=12),
        row("tg", 128, 0.8 * advice.curve[48].decode.value, n_cpu_moe=48),
    ]
    learned = advise(MODEL, **PC, bench=bench(tmp_path, rows))
    assert learned.grade is Grade.OBSERVED
    assert learned.best.decode.spread < 0.5 * advice.best.decode.spread
    # The row has a shorter context than the curve.
    assert learned.curve[12].decode.value == pytest.approx(slower, rel=0.09)
    # Between the two rows as well: the terms are physical.
    ratio = learned.curve[30].decode.value / advice.curve[30].decode.value
    assert ratio == pytest.approx(0.8, abs=0.06)


def test_a_row_that_contradicts_the_rest_is_named_not_averaged_in(tmp_path, advice):
    rows = [
        row("tg", 128, advice.curve[count].decode.value, n_cpu_moe=count)
        for count in (12, 24, 48)
    ]
    clean = advise(MODEL, **PC, bench=bench(tmp_path, rows))
    gross = row("tg", 128, 3 * advice.curve[36].decode.value, n_cpu_moe=36)
    found = advise(MODEL, **PC, bench=bench(tmp_path, [*rows, gross]))
    assert len(found.observed.used) == 3
    ((contradicting, reason),) = found.observed.contradicting
    assert "-ncmoe 36" in contradicting.words
    assert "the other rows say" in reason
    assert found.best.decode.value == pytest.approx(clean.best.decode.value)


def test_what_if_says_what_each_change_brings(advice):
    changes = {each.change: each for each in advice.what_ifs}
    memory = changes["host memory 25 % faster"]
    assert 1 < memory.factor < 1.25
    assert changes["a link twice as wide (prompts only)"].factor == 1
    assert changes["quantisation Q8_0"].factor < 1
    assert changes["quantisation IQ3_XXS"].factor > 1


def test_hits_of_an_expert_cache_come_from_this_models_routing_or_are_wide():
    known = advise(MODEL, **PC, replay_cache=True).what_ifs[0]
    assert "on routing with the statistics of qwen3-30b-a3b" in known.note
    larger = PC | {"ram": "4x32GB DDR4-3200"}
    open_ended = advise("gpt-oss-120b", **larger, replay_cache=True).what_ifs[0]
    assert "no routing of this one is known" in open_ended.note
    widths = [
        float(each.note.partition(" to ")[2].partition(")")[0])
        - float(re.search(r"90 %: (\d+)", each.note).group(1))
        for each in (known, open_ended)
    ]
    assert widths[0] < widths[1]


def test_shipped_hits_are_those_of_a_replay(tmp_path):
    known = table("cache_hits")
    trace = tmp_path / "drawn.parquet"
    synthesise(model_like("olmoe-1b-7b"), trace, tokens=192)
    at = known["ratios"].index(0.5)
    shipped = known["models"]["olmoe-1b-7b"]["hits"][at]
    assert replayed_hits(trace, 0.5) == pytest.approx(shipped, abs=0.001)
    assert set(known["models"]) == set(shipped_statistics())


def test_overrides_are_written_with_ranges():
    pattern = override_pattern([0, 1, 2, 3, 7, 10, 11, 12])
    assert pattern == r"blk\.([0-3]|7|1[0-2])\.ffn_.*_exps.*=CPU"
    hit = {at for at in range(50) if re.search(pattern[:-4], f"blk.{at}.ffn_up_exps")}
    assert hit == {0, 1, 2, 3, 7, 10, 11, 12}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ram": "1x4GB DDR4-3200"}, "does not fit: it needs 17.3 GiB of weights"),
        ({"job": Job(context=100)}, "context: 100 tokens do not hold a prompt"),
        ({"job": Job(answer=0)}, "answer: expected at least 1, got 0"),
        ({"quant": "Q9"}, "quantisation 'Q9': unknown"),
        ({"ram": "32"}, "--ram '32': expected a size with its unit"),
        ({"job": Job(keep_vram_bytes=20 * 2**30)}, "a smaller --keep-gpu-memory"),
    ],
)
def test_what_cannot_be_is_one_line(changes, expected):
    with pytest.raises(AdviceError) as caught:
        advise(MODEL, **{**PC, **changes})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("rtx4060ti 16gb", "RTX 4060 Ti 16GB"),
        ("2x3090", "2x RTX 3090"),
        ("7900xtx", "RX 7900 XTX"),
        ("2x RTX 3090", "2x RTX 3090"),
    ],
)
def test_cards_are_found_as_people_write_them(words, name):
    machine = describe_machine(cpu=PC["cpu"], gpu=words)
    assert machine.name == f"{PC['cpu']} + {name}"


def test_cores_of_a_profile_are_not_assumed():
    """The flags said six threads, the line above them eight cores."""
    machine = advise(MODEL, hw="rtx4060ti").machine
    assert machine.processor.cores == 6
    assert "CPU: two memory channels" in machine.assumed


def test_without_a_machine_it_asks_for_one(command):
    assert refused(command("advise", MODEL), "which machine? give --cpu")


def test_unknown_devices_and_broken_rows_are_refused(command, tmp_path):
    assert refused(command("advise", MODEL, "--gpu", "RTX 1"), "not among the")
    (tmp_path / "rows.json").write_text("{")
    result = command("advise", MODEL, "--bench", tmp_path / "rows.json")
    assert refused(result, "rows.json", "let llama-bench write it again")
    both = bench(tmp_path, [row("tg", 8, 9), row("tg", 8, 9, cpu_info="another")])
    assert refused(command("advise", MODEL, "--bench", both), "different machines")


def test_the_command_answers_a_file(command, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, layers=6, dense_layers=1, shared=True)
    code, text, _ = command("advise", path, *WORDS, "--explain")
    assert code == 0
    for words in (
        "llama-server -m model.gguf",
        "90 %:",
        "headroom before it spills",
        "bound",
    ):
        assert words in text
    for words in ("Where the time goes", "What would change it", "llama-bench -m"):
        assert words in text


def test_json_holds_what_the_text_says(command, tmp_path, advice):
    rows = bench(tmp_path, [row("tg", 128, 48.0, n_cpu_moe=12)])
    _, text, _ = command("advise", MODEL, *WORDS, "--bench", rows, "--json")
    printed = json.loads(text)
    first = printed["settings"][0]
    speed = first["decode_tokens_per_s"]
    assert speed["low_90"] < speed["median"] < speed["high_90"]
    assert speed["median"] < printed["bound"]["tokens_per_s"]
    # Terms add up to a step, but for the misfit of the model.
    step = sum(first["decode_terms_s"].values())
    assert step == pytest.approx(1 / speed["median"], rel=0.1)
    assert printed["machine"]["grade"] == "observed"
    assert len(printed["curve"]) == len(advice.curve)


def test_the_page_shows_the_curve_the_cliff_and_measured_points(
    command, tmp_path, screenshots
):
    rows = bench(
        tmp_path,
        [row("tg", 128, 48.0, n_cpu_moe=12), row("pp", 2048, 600, n_cpu_moe=12)],
    )
    page = tmp_path / "advice.html"
    code, text, _ = command("advise", MODEL, *WORDS, "--bench", rows, "--html", page)
    assert code == 0
    assert f"wrote {page}" in text
    html = page.read_text()
    shown = ("--n-cpu-moe", "90 %", "learned from 2 of 2 rows")
    for words in (*shown, ">copy</button>"):
        assert words in html
    charts = [part for part in data_of(page)["parts"] if part and "spec" in part]
    drawn = [chart["data"]["rows"] for chart in charts]
    decode, prompt = drawn
    for points, speed in ((decode, 48.0), (prompt, 600.0)):
        (point,) = [each for each in points if "measured" in each["what"]]
        assert (point["layers"], point["speed"]) == (12, speed)
    assert "predicted, does not fit" in {each["what"] for each in decode}
    with browser(tmp_path / "browser") as driver:
        check_page(driver, page, screenshots)


def test_rows_of_another_model_teach_about_the_machine(tmp_path, advice):
    name = "gpt-oss-20b-MXFP4.gguf"
    rows = [
        row("tg", 128, 40.0, n_cpu_moe=24, model_filename=name, model_size=""),
        row("tg", 128, 60.0, n_cpu_moe=8, model_filename=name, model_size=""),
        row("tg", 128, 50.0, model_filename="x.gguf", model_size=""),
    ]
    learned = advise(MODEL, **PC, bench=bench(tmp_path, rows))
    assert len(learned.observed.used) == 2
    assert [each.text("model_filename") for each in learned.observed.foreign] == [
        "x.gguf"
    ]
    assert learned.best.decode.spread < advice.best.decode.spread


def test_keys_are_read_again_where_a_kernel_does_not_take_a_whole_group():
    """Five query heads share a key: 8, 4 and 2 do not divide them, so each reads it."""
    assert [key_passes(group, "sycl") for group in (1, 2, 4, 8, 16)] == [1, 1, 1, 1, 2]
    assert [key_passes(group, "sycl") for group in (3, 5, 6, 12)] == [3, 5, 3, 3]
    # CUDA's kernels pad a group instead.
    assert key_passes(5, "cuda") == 1


def test_attention_of_a_dynamic_llama_4_file_has_four_to_six_bits():
    dynamic = named_contents("llama-4-scout", "UD-Q3_K_XL", 49_016_000_000)
    assert set(dynamic.layers[0].dense_formats) == {"q5_k", "f32"}
    weights = sum(layer.expert_weights for layer in dynamic.layers)
    # Stated: 3.5 bits, 4.5 in down projections.
    assert 3.3 < 8 * dynamic.expert_bytes / weights < 4.5
