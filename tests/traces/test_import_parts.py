"""Files that are read in parts give what they give as a whole, wherever a part ends."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support import foreign_files as files
from support.imports import WRITERS, bring, refused, write

from moesim.traces.format.schema import Phase
from moesim.traces.importers import hf_router_logits, sglang
from moesim.traces.importers.readers import tables


def told(trace, columns=()):
    return [
        [
            rows.pos.tolist(),
            rows.phase.tolist(),
            rows.experts.tolist(),
            *(rows.columns[n].tolist() for n in columns),
        ]
        for rows in trace.sequences(columns)
    ]


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "columns_csv"])
def test_parts_of_any_size_are_the_whole(tmp_path, monkeypatch, name):
    """Texts in parts of a line, arrays of a token, passes one by one."""
    source = write(tmp_path, name)
    options = WRITERS[name][2]
    columns = ("weights",) if "weights" in WRITERS[name][3] else ()
    whole = told(bring(source, options)[1], columns)
    monkeypatch.setattr(tables, "JSON_ROWS", 1)
    monkeypatch.setattr(tables, "CSV_BYTES", 160)
    for module in (hf_router_logits, sglang):
        monkeypatch.setattr(module, "BATCH_ROWS", 1)
    assert told(bring(source, options)[1], columns) == whole


def lines_of(path):
    lines = path.read_text().splitlines()
    first = (
        next(number for number, line in enumerate(lines) if line.startswith("turn")) + 1
    )
    return lines[:first], lines[first:]


def test_route_trace_one_unknown_weight_makes_all_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BYTES", 200)
    path = files.route_trace(tmp_path / "dump", files.routing())
    head, rows = lines_of(path)
    last = rows[-1].split(",")
    last[6] = "nan"
    path.write_text("\n".join([*head, *rows[:-1], ",".join(last)]) + "\n")
    summary, trace = bring(path)
    assert summary.columns == ()
    for rows, (_, ids, *_) in zip(trace.sequences(), files.routing(), strict=True):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()


def test_vllm_a_prompt_alone_is_a_prompt(tmp_path):
    ids = files.routing()[0][1]
    np.savez(tmp_path / "dump.npz", prompt_routed_experts=ids)
    _, trace = bring(tmp_path / "dump.npz")
    (rows,) = trace.sequences()
    assert (rows.phase == Phase.PREFILL).all()
    assert (rows.experts == ids[rows.pos, rows.layer]).all()


@pytest.mark.parametrize("name", ["hf_npz", "hf_torch"])
def test_a_number_that_changed_in_a_zip_is_found(tmp_path, name):
    source = write(tmp_path, name)
    data = bytearray(source.read_bytes())
    logits = files.hf_arrays(files.routing())["router_logits.1"]
    data[data.index(logits.tobytes()[:16])] ^= 1
    source.write_bytes(data)
    refused(source, "found: Bad CRC-32 for file", {"batch": "2"})


CUT_WHILE_READ = """
import os, sys
from pathlib import Path
from support.imports import WRITERS, files, model_shape, write
from moesim.base.errors import TraceError
from moesim.traces.importers import import_trace
from moesim.traces.importers.readers import tables

tables.CSV_BYTES = 4096
folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    source = write(folder, name, files.routing([(80, 80)] * 3))
    source.write_bytes(source.read_bytes() * (1 + name.startswith("columns")))
    written = []

    def cut(rows):
        written.append(rows)
        os.truncate(source, source.stat().st_size // 3)

    shape = model_shape(files.SHAPE)
    options = WRITERS[name][2]
    if "batch" in options:
        options = options | {"batch": "3"}
    try:
        import_trace(source, folder / "out", shape=shape, options=options, progress=cut)
    except TraceError as error:
        assert "expected" in str(error), error
    assert written, "it was cut too late"
"""


def test_a_file_that_is_cut_short_while_it_is_read_does_not_kill(tmp_path):
    """The system kills whoever touches a mapped page that its file has lost."""
    names = [
        "hf_safetensors",
        "hf_torch",
        "vllm_npz",
        "pass_records",
        "columns_csv",
    ]
    subprocess.run(
        [sys.executable, "-c", CUT_WHILE_READ, str(tmp_path), *names],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
