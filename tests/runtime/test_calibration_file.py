"""One file holds what policies may know beforehand; it is counted from calibration text
and asked for by name.
"""

import numpy as np
import pytest
import torch
from support.families import family

import moesim
from moesim import cli
from moesim.base.errors import TraceError
from moesim.policies.base import PolicyError
from moesim.runs.setup import load_artefacts
from moesim.runtime.record.calibration import (
    Residual,
    residual_vectors,
    write_calibration,
)
from moesim.runtime.record.record import record
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import TraceHeader
from moesim.traces.format.writer import TraceWriter

torch.set_num_threads(1)


def test_the_tables_of_two_tokens_by_hand(tmp_path, tiny_shape):
    """Sequence 0: token a goes 0,1 -> 1,2 -> 3,4; sequence 1: token b goes 0,5 -> 2,6
    -> 3,7.
    """
    paths = [[[0, 1], [1, 2], [3, 4]], [[0, 5], [2, 6], [3, 7]]]
    with TraceWriter(
        tmp_path / "t.parquet", TraceHeader(tiny_shape, split="calibration")
    ) as writer:
        for seq, experts in enumerate(paths):
            writer.write(seq, 0, 0, np.arange(3), np.array(experts))
    write_calibration(tmp_path / "t.parquet", tmp_path / "c.safetensors")
    found = load_artefacts(tmp_path / "c.safetensors")
    follows = found["transitions"]
    assert follows.shape == (3, 8, 8)
    # Both tokens chose 0; both went on to 2.
    assert follows[0, 0].tolist() == [0, 0.5, 1, 0, 0, 0, 0.5, 0]
    assert follows[0, 5].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert follows[1, 2].tolist() == [0, 0, 0, 1, 0.5, 0, 0, 0.5]
    assert not follows[2].any()
    assert found["activation_matrices"].shape == (2, 3, 8)
    assert [
        np.flatnonzero(row).tolist() for row in found["activation_matrices"][1]
    ] == paths[1]
    assert found["activation_counts"][0].tolist() == [2, 1, 0, 0, 0, 1, 0, 0]


def test_what_adapmoe_divides_slots_by_is_counted_token_by_token(tmp_path, tiny_shape):
    """Of four tokens three keep one expert in layer 1; layer 0 foresees layer 1 for
    two, layer 1 layer 2 for all.
    """
    with TraceWriter(
        tmp_path / "t.parquet",
        TraceHeader(tiny_shape, split="calibration"),
        ("weights", "pred1_raw"),
    ) as writer:
        for pos in range(4):
            weights = np.array(
                [[0.5, 0.5], [0.95, 0.05] if pos else [0.6, 0.4], [0.7, 0.3]]
            )
            predicted = np.zeros((3, 8))
            predicted[0, 2 if pos < 2 else 7] = 1.0
            predicted[1, 5] = 1.0
            experts = np.array([[0, 1], [2, 3], [4, 5]])
            writer.write(
                0, pos, 0, np.arange(3), experts, weights=weights, pred1_raw=predicted
            )
    write_calibration(tmp_path / "t.parquet", tmp_path / "c.safetensors")
    found = load_artefacts(tmp_path / "c.safetensors")
    assert found["single_share"].tolist() == [0.0, 0.75, 0.0]
    assert found["prefetch_accuracy"].tolist() == [0.0, 0.5, 1.0]


def test_an_evaluation_trace_calibrates_nothing(make_trace, tmp_path):
    with pytest.raises(
        TraceError,
        match="expected a trace of calibration text, found split 'evaluation'",
    ):
        write_calibration(make_trace(), tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()


def test_the_command_line_makes_it_and_policies_find_it(tmp_path, capsys):
    """`record --calibration` on a model without vectors of its own; replay and later
    recordings take the file.
    """
    folder = tmp_path / "glm4_moe"
    out = tmp_path / "t.parquet"
    file = tmp_path / "artefacts" / "glm4.safetensors"
    family("glm4_moe").model.save_pretrained(folder)
    (tmp_path / "p.txt").write_text("for i in x:\n\nimport os\n\ndef f(): pass")
    line = f"record {out} --model {folder} --prompts {tmp_path}/p.txt --new-tokens 3"
    words = f"{line} --calibration {file}".split()

    def run(*more):
        with pytest.raises(SystemExit) as end:
            cli.main([*words, *more])
        return end.value.code or 0, capsys.readouterr()

    code, printed = run("--split", "evaluation")
    assert code == 2
    assert "expected calibration text" in printed.err
    code, printed = run()
    assert code == 0, printed.err
    named = (
        "calibration: activation_counts, activation_matrices, prefetch_accuracy,"
        " residual, single_share, transitions"
    )
    assert named in printed.out.splitlines()

    trace = open_trace(out)
    assert trace.header.split == "calibration"
    residual = Residual.load(file)
    assert residual.id == trace.header.calibration["residual"]["id"]
    texts = ["for i in x:", "import os", "def f(): pass"]
    np.testing.assert_array_equal(
        residual.vectors, residual_vectors(family("glm4_moe"), texts).vectors
    )
    done = record(
        family("glm4_moe"),
        ["x = 1"],
        tmp_path / "e.parquet",
        new_tokens=8,
        residual=Residual(residual.vectors),
    )
    for prefetch in ("statistical:table=calibrated", "activation-matrix"):
        how = {"prefetch": prefetch, "hw": "rtx3090-epyc7532"}
        figures = moesim.replay(
            done.path, "greedy", **how, artefacts=file.parent
        ).metrics
        assert figures["prefetched"] > 0


def test_a_tensor_that_two_files_have_is_refused(tmp_path):
    """Which one would be meant? Other names may repeat: networks have layers of the
    same names.
    """
    np.savez(tmp_path / "a.npz", transitions=np.zeros((1, 2, 2)), layer=np.zeros(2))
    np.savez(tmp_path / "b.npz", layer=np.ones(2))
    found = load_artefacts(tmp_path)
    assert found["transitions"].shape == (1, 2, 2)
    assert set(found) == {"a", "b", "transitions"}
    np.save(tmp_path / "transitions.npy", np.zeros((1, 2, 2)))
    with pytest.raises(
        PolicyError,
        match=(
            r"transitions: expected one file with it, found a\.npz and transitions\.npy"
        ),
    ):
        load_artefacts(tmp_path)
