"""Every importer gives back the routing its writer was given; every broken file is one
line and no trace.
"""

import json
from contextlib import suppress

import pytest
from support import foreign_files as files
from support.imports import WRITERS, bring, compare, refused, write

from moesim.base.errors import TraceError


@pytest.mark.parametrize("name", WRITERS)
def test_what_was_routed_comes_back(tmp_path, name):
    _, importer, options, given = WRITERS[name]
    truth = files.routing()
    source = write(tmp_path, name, truth)
    # Layouts are told by content: people rename their dumps.
    summary, trace = bring(source.rename(tmp_path / "a.parquet"), options)
    assert summary.importer == importer
    expected = [one._replace(cut="ragged" in given) for one in truth]
    if "first" in given:
        expected = expected[:1]
    if "cut" in given:
        shortest = min(len(one.ids) for one in truth)
        expected = [one._replace(ids=one.ids[:shortest]) for one in expected]
    assert summary.sequences == len(expected)
    compare(trace, expected, {"phases", "weights"} & set(given.split()))


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_cut_off_anywhere_is_refused_or_a_whole_shorter_trace(tmp_path, name):
    data = write(tmp_path, name).read_bytes()
    for share in (0.0, 0.01, 0.3, 0.6, 0.9, 0.999):
        (tmp_path / "cut").write_bytes(data[: int(share * len(data))])
        with suppress(TraceError):
            summary, trace = bring(tmp_path / "cut", WRITERS[name][2])
            assert sum(len(rows.pos) for rows in trace.sequences()) == summary.rows


@pytest.mark.parametrize("name", WRITERS)
def test_a_shape_of_another_model_is_refused(tmp_path, name):
    source = write(tmp_path, name)
    for change in (
        ("layers=3", "layers=2"),
        ("layers=3", "layers=7"),
        ("experts=8", "experts=4"),
    ):
        refused(source, "expected", WRITERS[name][2], files.SHAPE.replace(*change))


_DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        (
            '{"pos": 0, "layer": 0, "experts": [1, 2]}\n{"pos": 0, "layer": 1,'
            f' "experts": {_DEEP}}}\n'
        ),
        f'{{"top_k": 2}}\n{_DEEP}\n',
        f'{{"step":0,"layer":0,"rank":0,"num_tokens":1,"topk":2,"top_indices":{_DEEP}}}\n',
        f'{{"id": "x", "choices": [{{"index": 0, "routed_experts": {_DEEP}}}]}}',
        len(_DEEP).to_bytes(8, "little").decode() + f'{{"a": {_DEEP}}}',
    ],
    ids=["jsonl", "lists", "megatron", "vllm", "safetensors"],
)
def test_text_nested_without_end_is_one_line(tmp_path, text):
    (tmp_path / "deep").write_text(text)
    refused(tmp_path / "deep", "lists and objects in each other")


def test_an_empty_file_a_folder_and_nothing(tmp_path):
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", "no importer knows this layout")
    refused(tmp_path, "a folder; expected one file")
    refused(tmp_path / "none", "no such file")


def test_options_nobody_knows(tmp_path):
    source = write(tmp_path, "llama_cpp")
    refused(
        source,
        "expected options that it knows, --option prompt_passes, found --option colour",
        {"colour": "red"},
    )
    refused(
        source,
        "layout llama_cpp: expected options that it knows, .* found --batch",
        {"batch": "2"},
    )
    refused(
        write(tmp_path, "hf_npz"),
        "--batch: expected a whole number >= 1, got 'two'",
        {"batch": "two"},
    )


def test_half_of_a_surrogate_pair_does_not_make_a_trace_unreadable(tmp_path):
    source = write(tmp_path, "vllm_json")
    source.write_text(source.read_text().replace('"model": "m"', '"model": "\\ud800"'))
    assert bring(source)[1].header.provenance["model"] == "?"


def test_provenance_names_file_and_importer(tmp_path):
    _, trace = bring(write(tmp_path, "vllm_json"))
    told = trace.header.provenance
    assert (told["importer"], told["file"], told["model"]) == ("vllm", "dump", "m")
    assert json.dumps(told)
