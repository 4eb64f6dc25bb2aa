"""The expert store gives back every byte it was given, or says in one line why not."""

import errno
import json
import os
import shutil
import threading
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.real_machine import mapping
from transformers import MixtralConfig, MixtralForCausalLM

from moesim.base.errors import RuntimeFault, StoreError
from moesim.runs.machine import default_store
from moesim.runtime.accelerators import Cuda
from moesim.runtime.store import build
from moesim.runtime.store import memory as direct_io
from moesim.runtime.store.build import build_random_store, build_store
from moesim.runtime.store.memory import (
    BLOCK_BYTES,
    DeviceSlots,
    DirectFile,
    HostSlots,
    huge_tensor,
)
from moesim.runtime.store.store import (
    BUILD_LOG_NAME,
    DATA_NAME,
    INDEX_NAME,
    SEAL_NAME,
    VERSION,
    ExpertStore,
)
from moesim.traces.format.schema import ModelShape

SHAPE = ModelShape(
    name="toy", layers=3, experts=4, top_k=2, hidden=32, expert_intermediate=16,
    expert_bytes=(1,) * 3, other_bytes=0,
)  # fmt: skip
# gate and up 2 x 16 x 32, down 32 x 16: 1,536 weights of 2 bytes fit one block
SHAPE_STRIDE = 4096


@pytest.fixture(scope="module")
def mixtral():
    """Return a random two-layer model of four experts."""
    torch.manual_seed(0)
    widths = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = MixtralConfig(num_hidden_layers=2, **widths, **heads, **experts)
    return MixtralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def checkpoint(mixtral, tmp_path_factory):
    """Return the model as a sharded directory with one tensor per expert and
    projection.
    """
    directory = tmp_path_factory.mktemp("checkpoint") / "toy-mixtral"
    mixtral.save_pretrained(directory, max_shard_size="64KB")
    names = json.loads((directory / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(set(names.values())) > 2
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    return directory


@pytest.fixture
def store(tmp_path):
    """Return a small random store."""
    with build_random_store(SHAPE, tmp_path / "store") as built:
        yield built


class KilledError(Exception):
    """The process was killed here."""


def kill_after(records):
    """Make a progress callback that kills the build after so many records."""

    def progress(at):
        if at.records == records:
            raise KilledError

    return progress


def contents(directory):
    return (directory / DATA_NAME).read_bytes(), (directory / INDEX_NAME).read_bytes()


# -- what was stored comes back --------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_expert_reads_back_bit_for_bit(mixtral, checkpoint, tmp_path, dtype):
    """Records are contiguous and begin on blocks: gate and up 96 x 32, down 32 x 48, in
    float32 18,432 bytes, padded to five blocks.
    """
    with (
        build_store(checkpoint, tmp_path / "s", dtype=dtype) as store,
        HostSlots(1, store.slot_bytes) as slots,
    ):
        for layer in range(2):
            experts = mixtral.model.layers[layer].mlp.experts
            for expert in range(4):
                store.read_into(layer, expert, slots.record(0), check=True)
                weights = slots.weights(0, store.layout(layer))
                for found, stored in (
                    (weights.up, experts.gate_up_proj[expert]),
                    (weights.down, experts.down_proj[expert]),
                ):
                    assert torch.equal(found, stored.to(found.dtype))
        assert store.layout(0).dtype == (dtype or "float32")
        stride = 20_480 if dtype is None else 12_288
        assert store.record_bytes(0) == store.slot_bytes == stride
        assert [place.offset_bytes for place in store.places] == list(
            range(0, 8 * stride, stride)
        )


def test_one_expert_at_a_time_never_reads_the_tensors_of_another(checkpoint):
    source = build.CheckpointSource(checkpoint)
    asked = []
    read = source._tensor
    source._tensor = lambda key, part=None: (asked.append(key), read(key, part))[1]
    source.expert(1, 2)
    where = "model.layers.1.block_sparse_moe.experts.2"
    assert sorted(asked) == [f"{where}.{name}.weight" for name in ("w1", "w2", "w3")]


# -- random stores ---------------------------------------------------------------------


def test_equal_seeds_give_equal_bytes_and_other_seeds_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_random_store(SHAPE, tmp_path / name, seed).close()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")[0] != contents(tmp_path / "c")[0]


def test_distinct_records_bound_the_disk_and_are_used_in_turn(tmp_path):
    """Twelve experts share five records: expert 5 (layer 1, expert 1) reads the first
    again.
    """
    with (
        build_random_store(SHAPE, tmp_path / "s", distinct=5) as store,
        HostSlots(2, store.slot_bytes) as slots,
    ):
        assert store.index.distinct == 5
        assert (store.directory / DATA_NAME).stat().st_size == 5 * SHAPE_STRIDE
        store.read_into(0, 0, slots.record(0))
        store.read_into(1, 1, slots.record(1))
        assert torch.equal(slots.record(0), slots.record(1))
        store.verify()


def test_distinct_beyond_the_number_of_experts_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"distinct: expected 1 to 12 .*got 13"):
        build_random_store(SHAPE, tmp_path / "s", distinct=13)


# -- builds that are stopped -----------------------------------------------------------


def lost_pages(folder):
    """A record that did not reach the disk, and a line of the journal that was torn."""
    with (folder / (DATA_NAME + ".part")).open("r+b") as data:
        data.seek(2 * SHAPE_STRIDE + 100)
        data.write(b"lost")
    with (folder / BUILD_LOG_NAME).open("a") as journal:
        journal.write("6 12345")


def renamed(folder):
    """The last but one step of a build."""
    (folder / (DATA_NAME + ".part")).rename(folder / DATA_NAME)


@pytest.mark.parametrize(("seed", "records", "damage", "kept"), [
    (0, 1, None, 1),
    (0, 12, None, 12),
    (0, 6, lost_pages, 2),
    (0, 12, renamed, 12),
    # The journal of another model is not trusted.
    (1, 6, None, 0),
])  # fmt: skip
def test_a_killed_build_continues_and_gives_the_same_bytes(
    tmp_path, seed, records, damage, kept
):
    """Behind the last record that is as the journal says."""
    folder = tmp_path / "s"
    build_random_store(SHAPE, tmp_path / "whole").close()
    with pytest.raises(KilledError):
        build_random_store(SHAPE, folder, seed, progress=kill_after(records))
    with pytest.raises(
        StoreError, match="an unfinished build; run it again to continue"
    ):
        ExpertStore(folder)
    if damage is not None:
        damage(folder)
    seen = []
    build_random_store(SHAPE, folder, progress=seen.append).close()
    assert [at.records for at in seen] == list(range(kept + 1, 13))
    assert contents(folder) == contents(tmp_path / "whole")
    assert {path.name for path in folder.iterdir()} == {
        SEAL_NAME,
        DATA_NAME,
        INDEX_NAME,
    }


def test_two_builds_in_one_directory_are_refused(tmp_path):
    entered = threading.Event()
    leave = threading.Event()

    def hold(_at):
        entered.set()
        leave.wait(120)

    first = threading.Thread(
        target=lambda: build_random_store(SHAPE, tmp_path / "s", progress=hold).close()
    )
    first.start()
    try:
        assert entered.wait(120)
        with pytest.raises(StoreError, match="another build is at work here"):
            build_random_store(SHAPE, tmp_path / "s")
    finally:
        leave.set()
        first.join()
    with ExpertStore(tmp_path / "s") as whole:
        whole.verify()


def test_a_build_that_waited_for_another_opens_what_that_one_made(
    tmp_path, monkeypatch
):
    """The first ends between the second's look for an index and its lock: nothing is
    built again under whoever has it open.
    """
    open_log = build._open_log

    def late(directory):
        monkeypatch.setattr(build, "_open_log", open_log)
        build_random_store(SHAPE, directory).close()
        return open_log(directory)

    monkeypatch.setattr(build, "_open_log", late)
    seen = []
    with build_random_store(SHAPE, tmp_path / "s", progress=seen.append) as store:
        store.verify()
    assert seen == []
    assert not (tmp_path / "s" / BUILD_LOG_NAME).exists()


@pytest.mark.parametrize("declared", ["bfloat16", None])
def test_a_store_has_the_type_of_its_checkpoint(mixtral, tmp_path, declared):
    """Whether config.json names it or the tensors alone tell."""
    folder = tmp_path / "m"
    deepcopy(mixtral).bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": declared}))
    with build_store(folder, tmp_path / "s") as store:
        assert store.layout(0).dtype == "bfloat16"


@pytest.mark.parametrize("text", ["{}", "{", "[]", '{"weight_map": 3}'])
def test_a_damaged_table_of_tensors_is_one_line(checkpoint, tmp_path, text):
    folder = shutil.copytree(checkpoint, tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StoreError, match=r"index\.json: expected JSON with a weight"):
        build_store(folder, tmp_path / "s")


def test_a_full_disk_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=12 * SHAPE_STRIDE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match="of free disk space, found"):
        build_random_store(SHAPE, tmp_path / "s")
    assert (tmp_path / "s" / (DATA_NAME + ".part")).stat().st_size == 0


def test_a_finished_store_is_opened_not_built_and_not_overwritten(tmp_path):
    build_random_store(SHAPE, tmp_path / "s", 1).close()
    seen = []
    build_random_store(SHAPE, tmp_path / "s", 1, progress=seen.append).close()
    assert seen == []
    with pytest.raises(StoreError, match=r"found that of toy \(random\)"):
        build_random_store(SHAPE, tmp_path / "s", 2)


# -- stores that cannot be trusted -----------------------------------------------------


def test_a_store_truncated_while_open_is_noticed_by_the_read(store):
    os.truncate(store.directory / DATA_NAME, 11 * SHAPE_STRIDE + 512)
    with (
        HostSlots(1, store.slot_bytes) as slots,
        pytest.raises(StoreError, match="at byte 45056, the file ended after"),
    ):
        store.read_into(2, 3, slots.record(0))


def test_a_flipped_bit_is_found_where_it_is(store):
    path = store.directory / DATA_NAME
    raw = bytearray(path.read_bytes())
    raw[6 * SHAPE_STRIDE + 17] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        StoreError, match=r"layer 1, expert 2 \(byte 24576\): checksum does not match"
    ):
        ExpertStore(store.directory).trusted()
    with (
        ExpertStore(store.directory) as damaged,
        HostSlots(1, store.slot_bytes) as slots,
    ):
        damaged.read_into(1, 1, slots.record(0), check=True)
        with pytest.raises(StoreError, match="layer 1, expert 2"):
            damaged.read_into(1, 2, slots.record(0), check=True)


def index_with(change):
    """Write another index over that of a store."""
    return lambda folder: (folder / INDEX_NAME).write_text(
        change((folder / INDEX_NAME).read_text())
    )


@pytest.mark.parametrize(("damage", "found"), [
    (index_with(lambda text: text.replace("toy", "joy")), "digest does not match"),
    (index_with(lambda text: json.dumps(json.loads(text) | {"version": 99})),
     "store version: expected 2, found 99"),
    (index_with(lambda _: "[1, 2]"), "expected the index of an expert store"),
    (lambda folder: (folder / INDEX_NAME).unlink(),
     r"expected an expert store with store\.json, found none"),
    (lambda folder: (folder / DATA_NAME).unlink(),
     r"experts\.bin: cannot open: No such file"),
    (lambda folder: os.truncate(folder / DATA_NAME, 12 * SHAPE_STRIDE - 1),
     r"experts\.bin: expected 49152 bytes, found 49151; it was truncated"),
])  # fmt: skip
def test_a_damaged_store_is_refused_in_one_line(store, damage, found):
    damage(store.directory)
    with pytest.raises(StoreError, match=found):
        ExpertStore(store.directory)


# -- reads -----------------------------------------------------------------------------


@pytest.fixture
def numbered(tmp_path):
    """Return a file of nine blocks that differ everywhere, and its bytes."""
    draws = torch.Generator().manual_seed(0)
    size = (9 * BLOCK_BYTES,)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=draws)
    path = tmp_path / "numbered"
    path.write_bytes(raw.numpy().tobytes())
    return path, raw


def read_blocks(path, first, blocks, *, pretend_direct=False):
    """Read blocks through `DirectFile`; with `pretend_direct`, by its rules for direct
    I/O on any file system.
    """
    with (
        HostSlots(1, blocks * BLOCK_BYTES) as slots,
        DirectFile(path, direct=False) as file,
    ):
        file.direct = pretend_direct
        file.read_into(first * BLOCK_BYTES, memoryview(slots.record(0).numpy()))
        return slots.record(0).clone()


@pytest.mark.parametrize("most", [BLOCK_BYTES, 5000, 3 * BLOCK_BYTES + 1])
@pytest.mark.parametrize("direct", [False, True])
def test_short_reads_are_continued_and_direct_ones_from_whole_blocks(
    numbered, monkeypatch, most, direct
):
    path, raw = numbered
    places = []
    real = os.preadv

    def short(descriptor, buffers, offset):
        places.append(offset)
        return real(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    found = read_blocks(path, 1, 7, pretend_direct=direct)
    assert torch.equal(found, raw[BLOCK_BYTES : 8 * BLOCK_BYTES])
    assert len(places) >= 7 * BLOCK_BYTES // most
    if direct:
        assert all(place % BLOCK_BYTES == 0 for place in places)


def trickling(read, descriptor, buffers, offset):
    return read(descriptor, [buffers[0][:100]], offset)


def failing(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(("disk", "found"), [
    (trickling, "at byte 4096 gave 100 bytes, 4 times in a row; check the disk"),
    (failing, r"numbered: reading 8192 bytes at byte 4096 failed: .*\(EIO\)"),
])  # fmt: skip
def test_a_disk_that_fails_is_a_fault_not_a_hang(numbered, monkeypatch, disk, found):
    monkeypatch.setattr(os, "preadv", partial(disk, os.preadv))
    with pytest.raises(RuntimeFault, match=found):
        read_blocks(numbered[0], 1, 2, pretend_direct=True)


@pytest.mark.parametrize("refused_by", ["open", "read"])
def test_a_file_system_without_direct_io_is_said_plainly_and_its_cache_is_dropped(
    numbered, monkeypatch, refused_by
):
    path, raw = numbered
    forgotten = []
    noted = lambda _fd, *told: forgotten.append(told)  # noqa: E731 - a stand-in
    monkeypatch.setattr(os, "posix_fadvise", noted)
    if refused_by == "open":
        real = os.open

        def no_direct(name, flags, *mode):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(name, flags, *mode)

        monkeypatch.setattr(os, "open", no_direct)
    else:

        def refuse(_descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        monkeypatch.setattr(direct_io, "_probe", refuse)
    with DirectFile(path) as file, HostSlots(1, BLOCK_BYTES) as slots:
        assert not file.direct
        assert "refuses" in file.reason
        assert "page cache" in file.reason
        file.read_into(BLOCK_BYTES, memoryview(slots.record(0).numpy()))
        assert torch.equal(slots.record(0), raw[BLOCK_BYTES : 2 * BLOCK_BYTES])
    assert forgotten == [(BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)]


# -- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HostSlots, DeviceSlots])
def test_slots_are_aligned_disjoint_and_handed_out_lowest_first(kind):
    with kind(3, 5000) as slots:
        assert slots.slot_bytes == 8192
        assert [slots.take(), slots.take(), slots.take()] == [0, 1, 2]
        assert all(
            slots.record(slot).data_ptr() % BLOCK_BYTES == 0 for slot in range(3)
        )
        slots.record(1).fill_(7)
        assert (int(slots.record(0).max()), int(slots.record(2).max())) == (0, 0)
        with pytest.raises(
            RuntimeFault, match="all 3 slots of 8192 bytes on cpu are taken"
        ):
            slots.take()
        slots.give_back(1)
        assert (slots.free, slots.take()) == (1, 1)


def test_slots_lie_in_huge_pages_where_the_system_has_them():
    """Over scattered small pages the same direct read took up to 2.5 times as long,
    differently in every run.
    """
    advised = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not advised.exists() or "[never]" in advised.read_text():
        pytest.skip("this system gives no transparent huge pages")
    with HostSlots(16, 4 << 20) as slots:
        flags = mapping(slots.memory.data_ptr())["VmFlags"]
    assert "hg" in flags, "the mapping is advised"


def test_weights_of_no_width_are_a_tensor_too():
    """A model at a fraction of its size may have no dense feed-forward left; nothing
    cannot be mapped.
    """
    assert huge_tensor((2, 3), torch.float32).shape == (2, 3)
    assert huge_tensor((0, 3), torch.float32).shape == (0, 3)


def test_more_memory_than_there_is_is_refused_in_words():
    with pytest.raises(RuntimeFault, match=r"GiB available; ask for a smaller cache"):
        HostSlots(1 << 20, 1 << 30)


class CudaRuntime:
    """CUDA's runtime, whose answers are a code."""

    def __init__(self, monkeypatch, code=0):
        self.code = code
        self.calls = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        waits = lambda _: self.calls.append("wait")  # noqa: E731 - a stand-in
        monkeypatch.setattr(torch.cuda, "synchronize", waits)

    def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
        return self.code

    def cudaHostUnregister(self, _):  # noqa: N802 - CUDA's name
        self.calls.append("unlock")


def test_page_locking_without_a_gpu_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        RuntimeFault, match=r"cannot page-lock .* there is no CUDA device"
    ):
        HostSlots(1, BLOCK_BYTES, page_lock=Cuda())


def test_page_locking_that_cuda_refuses_names_the_way_out(monkeypatch):
    launched = []

    def next_launch(*_, device, **__):
        launched.append(device)
        # CUDA reports a failed call at the next launch, too.
        raise RuntimeError("CUDA error: out of memory")

    CudaRuntime(monkeypatch, code=2)
    monkeypatch.setattr(torch, "zeros", next_launch)
    with pytest.raises(
        RuntimeFault,
        match=r"CUDA error 2; ask for less host memory, or raise the limit",
    ):
        HostSlots(1, BLOCK_BYTES, page_lock=Cuda())
    assert launched == ["cuda"], "the failure is not left for whoever launches next"


def test_pages_are_unlocked_after_what_was_launched_has_ended(monkeypatch):
    """Ctrl-C may come between the launch of a copy and the wait for it."""
    runtime = CudaRuntime(monkeypatch)
    slots = HostSlots(1, BLOCK_BYTES, page_lock=Cuda())
    slots.close()
    slots.close()
    assert runtime.calls == ["wait", "unlock"]


def test_stores_that_another_version_built_lie_elsewhere():
    """Nobody has to remove a folder that nobody named."""
    assert default_store("a/b").parts[-2:] == (f"stores-{VERSION}", "a_b")
