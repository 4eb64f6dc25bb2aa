"""Contents that are well formed and cannot be true: experts that a model does not have,
negative times, weights that are no numbers, more memory than there can be. Each is
refused in one line, whichever file it stands in.
"""

import json
import tomllib

import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w
from support import bench_files, foreign_files
from support import imports as importers
from support.model_files import write_gguf, write_hf
from support.small_trace import write_small_trace
from torture import subjects

from moesim.base.seals import sealed_metadata
from moesim.cli.errors import message_for_users
from moesim.hwprofiles.costs import Costs
from moesim.hwprofiles.profile import load_profile, save_profile
from moesim.runs.config_file import load_config
from moesim.traces.format.arrivals import arrival_times
from moesim.traces.format.reader import open_trace
from moesim.traces.format.schema import METADATA_KEY
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape

NAN = float("nan")
INFINITE = float("inf")


def refused(read, *arguments):
    """One line for users, and nothing else."""
    with pytest.raises(Exception) as caught:
        read(*arguments)
    message = message_for_users(caught.value)
    assert message is not None, repr(caught.value)
    assert message.strip()
    assert "\n" not in message


def changed(tree, path, value):
    """A tree of lists and objects with another value at a path such as ``a.0.b``;
    without it where the value is `GONE`.
    """
    tree = json.loads(json.dumps(tree))
    place = tree
    *way, last = path.split(".")
    for key in way:
        place = place[int(key) if isinstance(place, list) else key]
    if isinstance(place, list):
        last = int(last)
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return tree


GONE = object()


def cases(*groups):
    """(place, value) for every value of every place."""
    return [(place, value) for places, values in groups for place in places.split() for value in values]  # fmt: skip


def named(case):
    return "gone" if case is GONE else None


# -- headers of traces -----------------------------------------------------------------

COUNTS = "layers experts top_k"
WIDTHS = "hidden expert_intermediate heads kv_heads head_dim vocab"
HEADERS = cases(
    (COUNTS, [0, -1, 2.5, None, "8", 10**12]),
    (WIDTHS, [-1, "64", 0.5]),
    ("top_k", [9]),
    ("expert_bytes", [[], [12288] * 2, [12288] * 4, [-1] * 3, [0] * 3, 12288]),
    ("other_bytes shared_experts shared_intermediate dense_intermediate", [-1, "many"]),
    ("dense_layers", [[-1], [0, 0], ["x"]]),
    ("scoring", [3]),
    ("dtype", [7]),
    ("norm_topk", ["perhaps"]),
    ("name", [None, 5]),
)


def with_header(path, change):
    table = pq.read_table(path)
    header = json.loads(table.schema.metadata[METADATA_KEY])
    metadata = {METADATA_KEY: json.dumps(change(header))}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def read_whole(path):
    trace = open_trace(path)
    return list(trace.sequences(sorted(trace.columns)))


@pytest.fixture
def trace(tmp_path):
    columns = ("weights", "scores", "pred1_raw")
    return write_small_trace(tmp_path / "t.parquet", new_tokens=3, columns=columns)


@pytest.mark.parametrize(("key", "value"), HEADERS)
def test_headers_of_traces(trace, key, value):
    path = with_header(trace, lambda header: changed(header, f"shape.{key}", value))
    refused(read_whole, path)


# -- shapes that a user states ---------------------------------------------------------

SHAPES = [
    "layers=0,experts=8,top_k=2,expert_bytes=1KiB",
    "layers=-3,experts=8,top_k=2,expert_bytes=1KiB",
    "layers=3,experts=0,top_k=2,expert_bytes=1KiB",
    "layers=3,experts=70000,top_k=2,expert_bytes=1KiB",
    "layers=40000,experts=8,top_k=2,expert_bytes=1KiB",
    "layers=3,experts=8,top_k=2,expert_bytes=0",
    "layers=3,experts=8,top_k=2,expert_bytes=-1KiB",
    "layers=3,experts=8,top_k=2,expert_bytes=nan",
    "layers=3,experts=8,top_k=2,expert_bytes=1e400",
    "layers=3.5,experts=8,top_k=2,expert_bytes=1KiB",
    "layers=3,layers=4,experts=8,top_k=2,expert_bytes=1KiB",
    "layers=3,experts=8,top_k=2,hidden=0,expert_intermediate=16",
    "layers=3,experts=8,top_k=2,hidden=-16,expert_intermediate=16",
    "layers=3,experts=8,top_k=2,expert_bytes=1KiB,colour=red",
]


@pytest.mark.parametrize("words", SHAPES)
def test_shapes(words):
    refused(model_shape, words)


# -- hardware profiles -----------------------------------------------------------------

RATES = "costs.gpu.bytes_per_s costs.cpu.flops_per_s costs.h2d.bytes_per_s costs.ssd.bytes_per_s costs.dense.flops_per_s"
TIMES = "costs.gpu.overhead_s costs.h2d.latency_s costs.planning.default.base_s costs.dispatch.join_s"
PROFILES = cases(
    (RATES, [-1.0, 0.0, NAN, INFINITE, "fast", True]),
    (TIMES, [-1e-6, NAN, INFINITE, "soon"]),
    ("memory.gpu_bytes memory.host_bytes", [-1, NAN, 1.5, "16GiB"]),
    ("memory.host_bytes", [0]),
    ("memory.staging_experts", [-1, 0.5, NAN]),
    ("cores", [0, -4, 2.5, NAN, "many"]),
    ("power.gpu0.busy_w power.cpu.idle_w", [-5.0, NAN, "hot"]),
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("hw") / "hw.toml"
    save_profile(load_profile("rtx4060ti"), path)
    return tomllib.loads(path.read_text())


def read_profile(path):
    Costs(load_profile(path), model_shape("olmoe-1b-7b"))


@pytest.mark.parametrize(("place", "value"), PROFILES)
def test_figures_of_profiles(machine, tmp_path, place, value):
    path = tmp_path / "hw.toml"
    path.write_text(tomli_w.dumps(changed(machine, f"{place}.value", value)))
    refused(read_profile, path)


STRUCTURES = [
    ("kind", "guessed"),
    ("name", ""),
    ("date", 5),
    ("accelerator", "abacus"),
    ("workers", {}),
    ("workers.gpu0", ["gpu0", "cpu"]),
    ("workers.gpu0", []),
    ("workers.cpu", ["typewriter"]),
    ("workers.h2d0", GONE),
    ("costs.h2d.bytes_per_s.kind", "rumour"),
    ("costs.h2d.bytes_per_s.source", GONE),
    ("costs.h2d.bytes_per_s.interval", {"value": [2.0, 1.0]}),
]


@pytest.mark.parametrize(("place", "value"), STRUCTURES)
def test_structures_of_profiles(machine, tmp_path, place, value):
    path = tmp_path / "hw.toml"
    path.write_text(tomli_w.dumps(changed(machine, place, value)))
    refused(read_profile, path)


# -- configurations and run.json -------------------------------------------------------

MOST_OF_TOML = (1 << 63) - 1
OPTIONS = cases(
    ("cache_ratio", [-0.1, 1.5, NAN, "much"]),
    ("gpu_memory_bytes host_memory_bytes", [-1, NAN, 10**30, "lots", [1]]),
    ("steps batch", [0, -1, 1.5, "all"]),
    ("slots_per_layer", [-1, 0.5, "two"]),
    ("seed", [-1, 1.5, "x"]),
    ("prefetch_budget_bytes", [-1, NAN]),
    ("trace hw policy", [5, [], "no-such-thing"]),
    ("cache prefetch routing", [5, "no-such-thing"]),
    ("cache_scope", ["galaxy", 3]),
    ("context_tokens", [-1, 0.5]),
    ("colour", ["red"]),
)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        (key, value, kind)
        for key, value in OPTIONS
        for kind in ("run.json", "exp.toml")
        # TOML has no larger integers.
        if kind == "run.json" or not (isinstance(value, int) and value > MOST_OF_TOML)
    ],
)
def test_options_of_runs(tmp_path, key, value, kind):
    options = {"trace": "tiny", "policy": "greedy", "hw": "rtx4060ti", key: value}
    path = tmp_path / kind
    if kind == "run.json":
        config = {"version": "0.1.0", "git_commit": "abc", "options": options}
        path.write_text(json.dumps({"config": config}))
    else:
        path.write_text(tomli_w.dumps(options))
    refused(read_run, path)


def read_run(path):
    config = load_config(path)
    open_trace(config.trace)
    load_profile(config.hw)


# -- models ----------------------------------------------------------------------------

GGUF = cases(("experts", [0]), ("top_k", [0, 5, 10**6]))


@pytest.mark.parametrize(("key", "value"), GGUF)
def test_gguf_files(tmp_path, key, value):
    write_gguf(tmp_path / "m.gguf", **{"experts": 4, key: value})
    refused(subjects._read_model, tmp_path / "m.gguf")


HF = cases(
    ("num_hidden_layers", [0, -2, "x", 10**9]),
    ("num_experts", [-4, 2.5, 10**9]),
    ("num_experts_per_tok", [0, -1, 5, "x", None, [2, None]]),
    ("num_hidden_layers num_experts", [None]),
    ("hidden_size num_attention_heads num_key_value_heads head_dim", [-1, "x"]),
)


@pytest.mark.parametrize(("key", "value"), HF)
def test_configurations_of_hugging_face(tmp_path, key, value):
    write_hf(tmp_path / "model", experts=4)
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, key: value}))
    refused(subjects._read_model, tmp_path / "model")


BENCH = cases(
    ("avg_ts", [-1.0, 0.0, NAN, "fast"]),
    ("stddev_ts", [-1.0, NAN]),
    ("n_prompt n_gen", [-5, "x"]),
)


@pytest.mark.parametrize(("key", "value"), BENCH)
def test_measurements_of_llama_bench(tmp_path, key, value):
    path = tmp_path / "bench.json"
    row = bench_files.row("tg", 128, 20.0, **{key: value})
    path.write_text(bench_files.as_json([row]))
    refused(subjects._read_bench, path)


# -- what commands of ours wrote -------------------------------------------------------


def rewritten(path, arrays, **metadata):
    """Tensors with a right seal, whatever is in them."""
    from safetensors.numpy import save

    path.write_bytes(save(arrays, sealed_metadata(arrays, metadata)))


NETWORKS = {
    "a weight that is no number": lambda a: a["w1"].__setitem__((0, 0, 0), NAN),
    "an infinite weight": lambda a: a["b3"].__setitem__((0, 0), INFINITE),
    "a layer too few": lambda a: a.update(w2=a["w2"][:1]),
    "an input too few": lambda a: a.update(w1=a["w1"][:, :, :-1].copy()),
    "an output too many": lambda a: a.update(b3=np.zeros((2, 5), np.float32)),
    "no bias": lambda a: a.pop("b2"),
    "a matrix for a vector": lambda a: a.update(b1=np.zeros((2, 3, 3), np.float32)),
    "no layers": lambda a: a.update({name: array[:0] for name, array in a.items()}),
}


@pytest.mark.parametrize("change", NETWORKS.values(), ids=NETWORKS)
def test_learned_networks(tmp_path, change):
    from safetensors.numpy import load

    path = subjects._network(tmp_path, 0)
    arrays = {name: array.copy() for name, array in load(path.read_bytes()).items()}
    change(arrays)
    rewritten(path, arrays, moesim="{}")
    refused(subjects._read_network, path)


def test_a_null_in_a_configuration_is_as_good_as_nothing(tmp_path):
    """Transformers writes it where it has a default of its own."""
    write_hf(tmp_path / "model", experts=4, sliding_window=None, kv_lora_rank=None)
    assert subjects._read_model(tmp_path / "model")


RESIDUALS = {
    "a vector that is no number": np.full((2, 8), NAN, np.float32),
    "no vectors": np.zeros((0, 8), np.float32),
    "vectors of nothing": np.zeros((2, 0), np.float32),
    "one number": np.zeros((), np.float32),
    "a cube": np.zeros((2, 2, 8), np.float32),
}


@pytest.mark.parametrize("vectors", RESIDUALS.values(), ids=RESIDUALS)
def test_residual_vectors(tmp_path, vectors):
    path = subjects._residual(tmp_path, 0)
    rewritten(path, {"residual": vectors}, moesim='{"model": "small"}')
    refused(subjects._read_residual, path)


STORES = cases(
    ("experts", [[], [0], [-4], [5]]),
    ("distinct", [-1, 3, 10**9]),
    ("layer_layouts", [[-1], [1], [], [0, 0]]),
    ("layouts.0.tensors.0.1", [[-32, 16], [10**6, 10**6]]),
    ("layouts.0.tensors.1.2", [-1, 10**9]),
    ("layouts.0.dtype", ["float3", 5]),
    ("checksums", [[], [1]]),
    ("version", [0, 99]),
)


@pytest.mark.parametrize(("place", "value"), STORES)
def test_indexes_of_stores(tmp_path, place, value):
    path = subjects._store(tmp_path, 0)
    index = changed(json.loads(path.read_text()), place, value)
    path.write_bytes(subjects._sealed_again(json.dumps(index).encode()))
    refused(subjects._read_store, path)


ARRIVALS = ["-1\n2\n", "1\nnan\n", "1\ninf\n", "3\n2\n", "soon\n", "", "1,2\n"]


@pytest.mark.parametrize("text", ARRIVALS)
def test_arrivals_in_files(tmp_path, text):
    path = tmp_path / "arrivals.txt"
    path.write_text(text)
    refused(lambda: list(arrival_times(str(path), 0)))


# -- files of others -------------------------------------------------------------------


def replace_first(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    return change


def in_json(line, place, value):
    def change(text):
        lines = text.splitlines()
        lines[line] = json.dumps(changed(json.loads(lines[line]), place, value))
        return "\n".join(lines) + "\n"

    return change


def in_csv(column, value, separator=","):
    """In a row below the header line that names the column."""

    def change(text):
        lines = text.splitlines()
        head = next(
            at for at, line in enumerate(lines) if f"{separator}{column}" in line
        )
        at = lines[head].split(separator).index(column)
        fields = lines[head + 3].split(separator)
        fields[at] = str(value)
        lines[head + 3] = separator.join(fields)
        return "\n".join(lines) + "\n"

    return change


FOREIGN = [
    *[("llama_cpp", replace_first("\n1,", f"\n{word},")) for word in ("-1", "9", "x")],
    *[("llama_cpp", replace_first("0,", "0,1\n0,1\n0,")) for _ in (1,)],
    *[
        ("megatron", in_json(0, place, value))
        for place, value in cases(
            ("layer", [-1, 3, 0.5]),
            ("topk", [0, 9, -2]),
            ("num_tokens", [0, -1, 99]),
            ("top_indices.0.0", [-1, 8, 1.5, "x"]),
            ("top_indices.0", [[1, 1], [1], []]),
            ("top_indices", [[], None]),
            ("step", [-1, 0.5]),
        )
    ],
    *[
        ("route_trace", in_csv(column, value))
        for column, value in cases(
            ("phase", [2, -1, "x"]),
            ("step", [-1, "x"]),
            ("layer", [-1, 99]),
            ("slot", [-1, 2]),
            ("expert", [-1, 8]),
        )
    ],
    *[
        ("route_trace", replace_first(old, new))
        for old, new in (
            ("n_expert=8", "n_expert=0"),
            ("n_expert=8", "n_expert=-8"),
            ("n_expert=8", "n_expert=9"),
            ("n_layer=4", "n_layer=2"),
            ("n_layer=4", "n_layer=100000000"),
            ("expert_bytes=1000", "expert_bytes=-1"),
            ("dense_bytes=500", "dense_bytes=-500"),
            ("# layer=1", "# layer=-1"),
        )
    ],
    *[
        ("lattice", in_json(3, place, value))
        for place, value in cases(
            ("layer_idx", [-1, 3, 0.5, None]),
            ("token_idx", [-1, 0.5, 10**10]),
            ("selected_ids", [[], [1], [1, 1], [1, 8], [-1, 2], [0.5, 1], None]),
            ("gate_weights", [[0.5], [None, 0.5], None]),
        )
    ],
    *[
        ("per_token", in_json(1, place, value))
        for place, value in cases(
            ("layers", [[], None, 5]),
            ("layers.0.experts", [[], [1, 1], [9, 1], [-1, 1]]),
            ("token", [-1, 0.5]),
        )
    ],
    *[
        ("vllm_json", in_json(0, place, value))
        for place, value in cases(
            ("prompt_routed_experts.0.0.0", [-1, 8, "x", 0.5]),
            ("prompt_routed_experts.0.0", [[1, 1], [1], []]),
            ("prompt_routed_experts.0", [[], None]),
            ("choices.0.routed_experts.0.1.1", [-1, 8]),
        )
    ],
    *[
        ("json_export", in_json(0, f"conditional.prompts.0.{key}", value))
        for key, value in cases(
            ("start_row decode_step_rows", [-1, 999, "x"]), ("end_row", [0, 999])
        )
    ],
    *[
        ("columns_csv", in_csv(column, value, ";"))
        for column, value in cases(
            ("block e0", [-1, 9, "x"]), ("position", [-1, "x"]), ("w0", ["x"])
        )
    ],
]


@pytest.mark.parametrize(("name", "change"), FOREIGN)
def test_dumps_of_engines(tmp_path, name, change):
    source = importers.write(tmp_path, name)
    source.write_text(change(source.read_text()))
    refused(imported, source, importers.WRITERS[name][2])
    assert list(tmp_path.glob("out.parquet*")) == []


def imported(source, options):
    out = source.parent / "out.parquet"
    import_trace(source, out, shape=model_shape(foreign_files.SHAPE), options=options)


ARRAYS = {
    "negative experts": lambda ids: ids - 9,
    "experts beyond the model": lambda ids: ids + 8,
    "one expert twice": np.zeros_like,
    "a layer too few": lambda ids: ids[:, :2],
    "a layer too many": lambda ids: np.concatenate([ids, ids[:, :1]], axis=1),
    "halves": lambda ids: ids + 0.5,
    "no tokens": lambda ids: ids[:0],
    "no experts": lambda ids: ids[:, :, :0],
    "a flat list": lambda ids: ids.ravel(),
}


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_arrays_of_vllm(tmp_path, change):
    path = tmp_path / "ids.npy"
    ids = foreign_files.routing()[0][1].astype(np.int16)
    np.save(path, change(ids))
    refused(imported, path, {"prompt_tokens": "5"})


LOGITS = {
    "no number": lambda a: a * NAN,
    "infinite": lambda a: a + INFINITE,
    "seven experts": lambda a: a[:, :7],
    "no tokens": lambda a: a[:0],
    "flat": lambda a: a.ravel(),
}


@pytest.mark.parametrize("change", LOGITS.values(), ids=LOGITS)
def test_logits_of_hugging_face(tmp_path, change):
    path = tmp_path / "logits.npz"
    arrays = foreign_files.hf_arrays(foreign_files.routing())
    np.savez(path, **{name: change(array) for name, array in arrays.items()})
    refused(imported, path, {"batch": "2"})
