"""SGLang dumps: what torch.save writes comes back without torch; nothing in it is ever
executed.
"""

import pickle
import zipfile

import numpy as np
import pytest
import torch
from support import foreign_files as files
from support.imports import bring, refused

from moesim.base.errors import TraceError
from moesim.traces.format.schema import Phase
from moesim.traces.importers.readers.arrays import floats, load_torch


def test_dense_layers_stay_minus_one_and_are_not_counted(tmp_path):
    truth = files.routing()
    _, trace = bring(
        files.sglang_per_token(tmp_path / "dump.pt", truth, dense_before=1)
    )
    for rows, (_, ids, *_) in zip(trace.sequences(("token",)), truth, strict=True):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()
    assert (
        rows.columns["token"].tolist()
        == np.repeat([110 + position for position in range(10)], 3).tolist()
    )


def test_chunked_prefill_goes_on_and_equal_positions_follow_the_batch(tmp_path):
    """Two prompts of equal length, one of them in two chunks; both decode at the same
    positions.
    """
    truth = files.routing(((4, 3), (4, 3)))
    path = files.sglang_per_token(tmp_path / "dump.pt", truth)
    found = torch.load(path, weights_only=True)
    whole = found["records"][0]
    rest = found["records"][1:]

    def part(columns, lengths):
        cut = {
            name: [whole[name][i] for i in columns]
            for name in ("positions", "input_ids")
        }
        return {
            **whole,
            **cut,
            "extend_seq_lens": lengths,
            "topk_ids_of_layer": whole["topk_ids_of_layer"][:, columns],
        }

    found["records"] = [part([0, 1], [2]), part([2, 3, 4, 5, 6, 7], [2, 4]), *rest]
    torch.save(found, path)
    refused(path, "may be either; say --option cut_at=N")
    assert bring(path, {"cut_at": "0"})[0].sequences == 3
    _, trace = bring(path, {"cut_at": "2"})
    for rows, (prompt, ids, *_) in zip(trace.sequences(), truth, strict=True):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()
        assert ((rows.phase == Phase.PREFILL) == (rows.pos < prompt)).all()


def test_a_prompt_goes_on_behind_a_pass_as_full_as_the_fullest(tmp_path):
    """A server cuts 1,030 tokens at 1,024; nobody has to say so."""
    truth = files.routing(((1030, 2),))
    path = files.sglang_per_token(tmp_path / "dump.pt", truth)
    found = torch.load(path, weights_only=True)
    whole, *rest = found["records"]

    def part(columns):
        names = ("positions", "input_ids")
        ids = whole["topk_ids_of_layer"][:, columns]
        cut = {name: whole[name][columns] for name in names}
        lengths = [columns.stop - columns.start]
        return whole | cut | {"extend_seq_lens": lengths, "topk_ids_of_layer": ids}

    found["records"] = [part(slice(0, 1024)), part(slice(1024, 1030)), *rest]
    torch.save(found, path)
    _, trace = bring(path)
    (rows,) = trace.sequences()
    assert (rows.experts == truth[0][1][rows.pos, rows.layer]).all()
    assert ((rows.phase == Phase.PREFILL) == (rows.pos < 1030)).all()


def test_requests_that_ran_before_the_recording_are_met_in_its_first_decode_pass(
    tmp_path,
):
    truth = files.routing(((4, 3), (6, 3)))
    path = files.sglang_per_token(tmp_path / "dump.pt", truth)
    found = torch.load(path, weights_only=True)
    del found["records"][0]
    torch.save(found, path)
    summary, trace = bring(path)
    assert summary.sequences == 2
    for rows, (prompt, ids, *_) in zip(trace.sequences(), truth, strict=True):
        assert sorted(set(rows.pos.tolist())) == list(range(prompt, prompt + 3))
        assert (rows.experts == ids[rows.pos, rows.layer]).all()


def test_one_of_two_at_the_same_position_ends(tmp_path):
    """Nothing in the dump says which, so it is refused unless an option decides."""
    truth = files.routing(((4, 3), (4, 1)))
    path = files.sglang_per_token(tmp_path / "dump.pt", truth)
    refused(path, "one request at each position, found several at 5")
    summary, trace = bring(path, {"equal_positions": "first"})
    for rows, (_, ids, *_) in zip(trace.sequences(), truth, strict=True):
        assert (rows.experts == ids[rows.pos, rows.layer]).all()
    assert any("the first are taken to go on" in note for note in summary.notes)


def test_a_reused_prefix_is_a_hole_that_the_notes_name(tmp_path):
    path = files.sglang_per_token(tmp_path / "dump.pt", files.routing(((4, 3),)))
    found = torch.load(path, weights_only=True)
    for record in found["records"]:
        record["positions"] = [position + 100 for position in record["positions"]]
    torch.save(found, path)
    summary, _ = bring(path)
    assert any("begin their prompt behind position 0" in note for note in summary.notes)


def test_a_dump_of_workloads_is_refused(tmp_path):
    source = tmp_path / "dump.pt"
    counts = {"global_physical_count": torch.zeros((3, 10), dtype=torch.int32)}
    logical = torch.from_numpy(files.PHYSICAL)
    torch.save({"records": [counts], "last_physical_to_logical_map": logical}, source)
    refused(source, "mode: expected per_token, found per_pass .* which holds sums only")


def altered(tmp_path, change):
    path = files.sglang_per_token(tmp_path / "dump.pt", files.routing())
    found = torch.load(path, weights_only=True)
    change(found)
    torch.save(found, path)
    return path


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d["records"].clear(), "records: expected at least one pass, found none"),
    (lambda d: d["records"][1].update(forward_mode=6),
     r"forward_mode 1 \(extend\), 2 \(decode\) or 3"),
    (lambda d: d["records"][0].update(extend_seq_lens=[1, 2]),
     "extend_seq_lens that add up to 9"),
    (lambda d: d["records"][0]["positions"].pop(),
     "as many positions and input_ids as tokens"),
    (lambda d: d["records"][0]["positions"].__setitem__(1, 7),
     "consecutive positions of a request"),
    (lambda d: d["records"][0]["topk_ids_of_layer"].__setitem__((0, 0, 0), 99),
     "physical ids 0..9 or -1, found 99"),
    (lambda d: d["records"][0]["topk_ids_of_layer"].__setitem__((1, 2, 1), -1),
     "token 2, layer 1: expected 2 experts"),
    (lambda d: d["records"][0]["topk_ids_of_layer"].__setitem__((0, 0, 1), 7),
     "distinct ids"),
    (
        lambda d: d.update(
            last_physical_to_logical_map=d["last_physical_to_logical_map"][:2]
        ),
        "2 layers as in the map",
    ),
    (lambda d: d.update(logical_count=torch.zeros(1)),
     "stat, which holds sums only; record with --expert-dist"),
    (lambda d: d["records"][0].pop("positions"), "positions"),
])  # fmt: skip
def test_a_dump_that_contradicts_itself(tmp_path, change, message):
    if (
        "distinct" in message
        # expert 0 has the physical ids 7 and 8 in layer 0: make both choices of a token
        # meet
    ):

        def change(found):
            found["records"][0]["topk_ids_of_layer"][0, 0, :2] = torch.tensor([7, 8])

    refused(altered(tmp_path, change), message)


class _Bomb:
    def __reduce__(self):
        return print, ("executed",)


def test_pickles_are_never_executed(tmp_path, capsys):
    source = tmp_path / "dump"
    source.write_bytes(
        pickle.dumps(
            {"records": [_Bomb()], "last_physical_to_logical_map": 1}, protocol=2
        )
    )
    refused(
        source, "found a bare pickle, which is never executed; open it with torch.load"
    )
    torch.save({"records": [_Bomb()], "last_physical_to_logical_map": 1}, source)
    refused(source, "refused to call .*print: pickles are never executed")
    torch.save(files.routing()[0], source, _use_new_zipfile_serialization=False)
    refused(source, "bare pickle")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n(K\x01o.",
        b"\x80\x02(K\x01ios\nsystem\n.",
        b"\x80\x02P7\n.",
    ],
    ids=repr,
)
def test_a_pickle_that_would_do_more_than_hold_data_is_one_line(tmp_path, data):
    with zipfile.ZipFile(tmp_path / "t.pt", "w") as archive:
        archive.writestr("t/data.pkl", data)
    with pytest.raises(TraceError) as error:
        load_torch(tmp_path / "t.pt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "bool",
    ],
)
def test_tensors_equal_what_torch_saved(tmp_path, dtype):
    """Views with strides and offsets share one storage, as torch keeps them."""
    base = (torch.arange(48).reshape(4, 12) % 2).to(getattr(torch, dtype))
    if dtype not in ("bool", "uint8"):
        base = base * 3 - 1
    views = {
        "whole": base,
        "turned": base.t(),
        "part": base[1:3, 2:9:3],
        "row": base[2],
        "one": base[1, 1],
        "none": base[:0],
    }
    torch.save(
        {
            **views,
            "numbers": [1, -2, 3.5, None, True, "x", 1 << 40],
            "pair": (1, (2, 3)),
        },
        tmp_path / "t.pt",
    )
    found = load_torch(tmp_path / "t.pt")
    for name, view in views.items():
        # numpy has no bfloat16.
        expected = view.float() if dtype == "bfloat16" else view
        assert np.array_equal(floats(found[name]), expected.numpy())
    assert (found["numbers"], found["pair"]) == (
        [1, -2, 3.5, None, True, "x", 1 << 40],
        (1, (2, 3)),
    )


def test_a_torch_file_rewritten_by_other_hands(tmp_path):
    source = files.sglang_per_token(tmp_path / "dump.pt", files.routing())
    other = tmp_path / "packed"
    with (
        zipfile.ZipFile(source) as old,
        zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    for one, same in zip(
        load_torch(source)["records"], load_torch(other)["records"], strict=True
    ):
        ids = "topk_ids_of_layer"
        assert (one[ids] == same[ids]).all()
    torch.save({"records": torch.zeros(1).expand(1 << 30)}, tmp_path / "wide.pt")
    with pytest.raises(TraceError, match="twice"):
        load_torch(tmp_path / "wide.pt")
