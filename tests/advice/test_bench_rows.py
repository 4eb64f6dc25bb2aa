"""Rows of llama-bench: four formats say the same, broken ones say what is wrong."""

from dataclasses import replace

import pytest
from support.bench_files import FORMATS, as_json, row

from moesim.advice.observed import check_one_machine, read_bench, setting_of
from moesim.advice.plan.commands import overridden_layers
from moesim.base.errors import AdviceError

ROWS = [
    row("tg", 128, 52.3, n_cpu_moe=11),
    row("pp", 2048, 560.0, n_cpu_moe=11, n_ubatch=1024),
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_the_same(tmp_path, name):
    path = tmp_path / f"rows.{name}"
    path.write_text(FORMATS[name](ROWS))
    decode, prefill = read_bench(path)
    assert (decode.kind, decode.tokens, decode.tokens_per_s) == ("decode", 128, 52.3)
    assert decode.spread == pytest.approx(0.01, rel=0.01)
    assert decode.seconds == pytest.approx(1 / 52.3)
    assert prefill.seconds == pytest.approx(2048 / 560)

    setting = setting_of(prefill)
    assert setting.cpu_layers == 11
    assert setting.micro_batch == 1024
    assert setting.threads == 8
    assert setting.page_locked
    newer = {"n_cpu_moe": "11", "load_mode": "none"}
    assert setting_of(replace(prefill, values=newer)).page_locked


def test_a_test_of_prompt_and_answer_together_is_left_out(tmp_path):
    path = tmp_path / "rows.json"
    mixed = {**row("tg", 128, 40.0), "n_prompt": 512}
    path.write_text(as_json([mixed, ROWS[0]]))
    assert len(read_bench(path)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected the output of `llama-bench"),
        ("hello", "expected the output of `llama-bench"),
        ('{"a": 1', "not JSON"),
        ("[1, 2]", "expected a list of objects"),
        ("[]", "no row with a speed"),
        ('[{"avg_ts": 3}]', "expected llama-bench's n_prompt, n_gen"),
        (as_json([{**ROWS[0], "avg_ts": "fast"}]), "expected a number, found 'fast'"),
        (as_json([{**ROWS[0], "avg_ts": 0}]), "expected a speed above 0"),
    ],
)
def test_broken_files_are_one_line_with_a_way_out(tmp_path, text, expected):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(AdviceError) as caught:
        read_bench(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_bytes_are_refused(tmp_path):
    with pytest.raises(AdviceError, match="cannot be read"):
        read_bench(tmp_path / "nothing.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AdviceError, match="not text"):
        read_bench(tmp_path / "b.json")


def test_rows_of_two_machines_are_refused(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(as_json([ROWS[0], row("tg", 128, 60, gpu_info="RTX 3090")]))
    with pytest.raises(AdviceError, match="different machines"):
        check_one_machine(read_bench(path))


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (r"blk\.(1|2|1[0-2])\.ffn_.*_exps.*=CPU", {1, 2, 10, 11, 12}),
        (r"blk\.3\.ffn_.*exps=CPU;blk\.5\.ffn_.*exps=CPU", {3, 5}),
        # The first pattern that matches a tensor places it.
        (r"blk\.3\.ffn_.*exps=CUDA0,blk\.[345]\.ffn_.*exps=CPU", {4, 5}),
        (r"blk\.3\.ffn_.*exps=CPU,exps=CUDA0", {3}),
        (r"ffn_.*_exps=CUDA0", set()),
        ("none", None),
    ],
)
def test_overrides_name_layers(text, layers):
    found = overridden_layers(text)
    assert found == (None if layers is None else frozenset(layers))


@pytest.mark.parametrize(
    "text", [r"blk\.3\.ffn_up_exps=CPU", r"ffn_(gate|down)_exps=CPU", "_up_exps=CPU"]
)
def test_a_part_of_an_expert_is_not_read_as_all_or_nothing(text):
    """Without `up` the rest is not on the GPU as a whole, nor with it on the CPU."""
    with pytest.raises(AdviceError, match="a part of an expert's three matrices"):
        overridden_layers(text)


def test_an_expression_that_is_cut_off_is_named():
    with pytest.raises(AdviceError, match="is it cut off"):
        overridden_layers("blk.(1|2=CPU")
