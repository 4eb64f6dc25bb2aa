"""Machine code on disk: found by digest, the user's own, and made anew if damaged."""

import os
import sys

import numpy as np
import pytest

from moesim.machine_code import library, store
from moesim.machine_code import types as nb
from moesim.machine_code.functions import INTERPRETED, Function, compiled

pytestmark = pytest.mark.skipif(
    INTERPRETED or sys.platform == "win32",
    reason="machine code is off, or Windows: no files with an owner",
)
STEP = 3


@compiled
def shifted(x):
    return x + STEP


def doubled(x):
    return 2 * shifted(x)


def fresh():
    """A function that this process has not loaded."""
    return Function(doubled, nb.int64(nb.int64))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    store.folder.cache_clear()
    yield tmp_path / "machine-code"
    store.folder.cache_clear()


@pytest.fixture
def made(monkeypatch):
    names = []
    monkeypatch.setattr(library, "compiled", names)
    return names


def test_it_is_compiled_once(kept, made):
    assert [fresh()(4), fresh()(5)] == [14, 16]
    assert made == ["doubled"]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_made_anew(kept, made, damage):
    fresh()(1)
    (file,) = [path for path in kept.iterdir() if path.suffix != ".lock"]
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    cut = content[: len(content) // 2]
    file.write_bytes({"cut": cut, "changed": content, "empty": b""}[damage])
    assert fresh()(4) == 14
    assert made == ["doubled", "doubled"]
    assert fresh()(4) == 14
    assert made == ["doubled", "doubled"]


def test_what_others_may_write_is_not_loaded(kept, made):
    fresh()(1)
    (file,) = [path for path in kept.iterdir() if path.suffix != ".lock"]
    file.chmod(0o666)
    assert fresh()(4) == 14
    assert made == ["doubled", "doubled"]


def test_a_folder_that_others_may_write_is_not_used(tmp_path, monkeypatch, made):
    folder = tmp_path / "machine-code"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path))
    store.folder.cache_clear()
    try:
        assert fresh()(4) == 14
        assert not list(folder.iterdir())
    finally:
        store.folder.cache_clear()


def test_a_folder_for_the_user_alone(kept):
    fresh()(1)
    assert kept.stat().st_mode & 0o077 == 0
    assert kept.stat().st_uid == os.getuid()


def test_a_change_of_what_is_called_is_another_digest(monkeypatch):
    before = library.digest_of(fresh())
    assert library.digest_of(fresh()) == before
    monkeypatch.setitem(globals(), "STEP", 4)
    assert library.digest_of(fresh()) != before
    monkeypatch.setitem(globals(), "STEP", 3)
    monkeypatch.setitem(globals(), "shifted", compiled(lambda x: x - STEP))
    assert library.digest_of(fresh()) != before


def test_numpy_lays_arrays_out_as_machine_code_reads_them():
    """Should NumPy change `PyArrayObject`, this fails and `entries.py` must follow."""

    @compiled(nb.int64(nb.int32[:, ::1], nb.int64))
    def corner(table, place):
        table[place, 1] = 9
        return table.shape[0] * 100 + table.shape[1] + table[0, 0]

    table = np.arange(6, dtype=np.int32).reshape(2, 3) + 5
    assert corner(table, 1) == 208
    assert table[1, 1] == 9
    with pytest.raises(TypeError):
        corner(table[:, ::2], 1)
