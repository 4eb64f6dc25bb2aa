"""A model whose experts stay on the disk gives the recording of the complete model."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.families import family

from moesim import cli
from moesim.base.errors import RuntimeFault, StoreError
from moesim.runtime.models.local_model import load_model
from moesim.runtime.models.offloaded import StoreExperts, stored_model
from moesim.runtime.record.calibration import residual_vectors
from moesim.runtime.record.record import record
from moesim.runtime.store.build import build_random_store
from moesim.runtime.store.store import ExpertStore
from moesim.traces.format.schema import ModelShape

torch.set_num_threads(1)
PROMPTS = ["def double(x):", "for i", "import numpy as np"]
FIXED = {
    "new_tokens": 4,
    "batch": 2,
    "provenance": {"date": "2026-01-01"},
}
HALF = 2e-3


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def saved(request, tmp_path_factory):
    """A checkpoint on disk and its plain recording; biased, grouped and transposed
    kinds are among them.
    """
    folder = tmp_path_factory.mktemp("offloaded") / request.param
    family(request.param).model.save_pretrained(folder)
    residual = residual_vectors(load_model(folder), ["calibrate me"])
    return (
        folder,
        residual,
        record(
            load_model(folder),
            PROMPTS,
            folder.parent / "plain.parquet",
            residual=residual,
            **FIXED,
        ),
    )


@pytest.mark.parametrize("experts", [1, 5, 1000])
def test_ids_are_those_of_the_plain_recording_whatever_the_memory(
    saved, tmp_path, experts
):
    """Room for one expert, for a few, for all; tokens and ids equal, values up to the
    rounding of 16-bit floats.
    """
    folder, residual, plain = saved
    with stored_model(
        folder, folder.parent / "store", host_bytes=experts << 13
    ) as local:
        done = record(
            local, PROMPTS, tmp_path / "t.parquet", residual=residual, **FIXED
        )
        cache = local.cache
    shape = plain.header.shape
    total = shape.layers * shape.experts
    assert done.header.shape == shape
    assert len(done.header.provenance["checkpoint"]) == 32
    assert cache.slots == min(experts, total)
    assert cache.reads <= total if experts > total else cache.reads > total
    mine = pq.read_table(done.path)
    theirs = pq.read_table(plain.path)
    assert mine.column_names == theirs.column_names
    for name in ("seq", "pos", "phase", "layer", "token", "experts"):
        assert mine[name].equals(theirs[name]), name
    for name in ("weights", "scores", "pred1_raw", "pred1_res"):
        left, right = (np.array(table[name].to_pylist()) for table in (mine, theirs))
        np.testing.assert_allclose(left, right, atol=HALF)


def test_memory_changes_no_byte(saved, tmp_path):
    """Results are summed by expert id, not by who was in memory: so a resumed recording
    is the same file too.
    """
    folder, _, _ = saved
    files = []
    for experts in (1, 6):
        with stored_model(
            folder, folder.parent / "store", host_bytes=experts << 13
        ) as local:
            files.append(
                record(
                    local, PROMPTS, tmp_path / f"{experts}.parquet", **FIXED
                ).path.read_bytes()
            )
    assert files[0] == files[1]


def test_residual_vectors_are_calibrated_through_the_store(saved):
    """As those of the whole model, and accepted by both ways of recording it."""
    folder, residual, _ = saved
    with stored_model(folder, folder.parent / "store", host_bytes=0) as local:
        mine = residual_vectors(local, ["calibrate me"])
    np.testing.assert_allclose(mine.vectors, residual.vectors, atol=1e-5)


def test_the_store_of_another_model_is_refused(saved, tmp_path):
    folder, _, _ = saved
    family("olmoe").model.save_pretrained(tmp_path / "m")
    with (
        stored_model(folder, folder.parent / "store", host_bytes=0),
        pytest.raises(
            StoreError, match="expected no store or that of m, found that of"
        ),
        stored_model(tmp_path / "m", folder.parent / "store", host_bytes=0),
    ):
        pytest.fail("a store of another model was taken")


def test_the_command_line_builds_the_store_and_says_what_was_read(tmp_path, capsys):
    """Then continues with it; what contradicts itself is refused before anything is
    made.
    """
    folder = tmp_path / "qwen3_moe"
    texts = tmp_path / "set.csv"
    family("qwen3_moe").model.save_pretrained(folder)
    texts.write_text("prompt\nfor i\nimport os\nx\n")
    line = f"record {tmp_path}/t.parquet --model {folder} --prompts {texts}"
    words = f"{line} --limit 2 --new-tokens 2".split()

    def run(*more):
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in (*words, *more)])
        return end.value.code or 0, capsys.readouterr()

    assert "expected --store beside it" in run("--host-memory", "1MiB")[1].err
    code, printed = run(
        "--store", tmp_path / "store", "--host-memory", "64KiB", "--json"
    )
    said = json.loads(printed.out)
    assert (code, said["sequences"]) == (0, 2)
    assert 0 < said["host_experts"] < 24 < said["reads"]
    assert said["read_bytes"] % said["reads"] == 0
    code, printed = run("--store", tmp_path / "store")
    reads = re.search(r"24 experts fit in memory; (\d+) reads in all", printed.out)
    assert 0 < int(reads[1]) <= 24


def test_whoever_goes_on_after_a_failed_read_gets_right_weights(tmp_path, monkeypatch):
    """A read that fails takes no slot from an expert that is in memory."""
    shape = ModelShape("f", 2, 4, 2, 32, 16, (6144,) * 2, 0)
    with build_random_store(shape, tmp_path / "s", dtype="float32") as store:
        cache = StoreExperts(store, host_bytes=3 * store.slot_bytes)
        right = StoreExperts(store)
        cpu = torch.device("cpu")
        for expert in range(3):
            cache._views(0, expert, cpu)
        straight = ExpertStore.read_into
        with monkeypatch.context() as patch:
            patch.setattr(ExpertStore, "read_into", failing)
            for _ in range(2):
                with pytest.raises(RuntimeFault):
                    cache._views(1, 0, cpu)
        assert ExpertStore.read_into is straight
        cache._views(1, 1, cpu)
        cache._views(1, 2, cpu)
        for key in list(cache._residents):
            mine, *_ = cache._views(*key, cpu)
            assert torch.equal(mine, right._views(*key, cpu)[0]), key
        cache.close()


def failing(*_, **__):
    """A disk that does not answer."""
    raise RuntimeFault("EIO")
