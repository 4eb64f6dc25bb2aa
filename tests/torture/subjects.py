"""Every kind of file that moesim reads, with a small valid one of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# Where the makers of small files stand.
sys.path.insert(0, str(TESTS))


class Subject(NamedTuple):
    """A kind of file.

    Attributes:
        name: of the kind.
        make: writes a valid file into a folder; two seeds give two files of one kind.
        read: reads it as a command does, and returns what it says.
        is_sealed: whether a change of one byte is always found out.
        seal: makes the digest right again in a mutant, as whoever altered it on purpose.
    """

    name: str
    make: Callable[[Path, int], Path]
    read: Callable[[Path], object]
    is_sealed: bool = False
    seal: Callable[[bytes], bytes] = lambda data: data


# -- our own files ---------------------------------------------------------------------


def _trace(folder, seed):
    from support.small_trace import write_small_trace

    columns = ("weights", "scores", "pred1_raw")
    return write_small_trace(folder / "trace.parquet", seed=seed, columns=columns)


def _read_trace(path):
    from moesim.traces.format.reader import open_trace

    trace = open_trace(path)
    rows = [
        [one.seq]
        + [values.tobytes() for values in (one.pos, one.layer, one.experts)]
        + [one.columns[name].tobytes() for name in sorted(one.columns)]
        for one in trace.sequences(sorted(trace.columns))
    ]
    return trace.header.to_json(), rows


def _timeline(folder, seed):
    from moesim.traces.timeline.spans import Timeline

    draw = np.random.default_rng(seed)
    with Timeline(("cpu", "gpu0"), folder) as timeline:
        for step in range(40):
            start = float(step)
            timeline.span(
                step % 2, 2, step, 0, int(draw.integers(8)), start, start + 1, 0
            )
            timeline.step(step, 1, 1, 1, 1, start, start + 1)
    return folder / "timeline.parquet"


def _read_timeline(path):
    from moesim.traces.timeline.spans import Timeline

    timeline = Timeline.load(path.parent)
    return [
        tuple(values.tobytes() for values in chunk.values())
        for chunk in timeline.chunks()
    ]


def _statistics(folder, seed):
    from moesim.traces.format.reader import open_trace
    from moesim.traces.synthetic.fit import fit
    from moesim.traces.synthetic.saved import save

    return save(fit(open_trace(_trace(folder, seed))), folder / "stats.npz")


def _read_statistics(path):
    from moesim.traces.synthetic.saved import load

    model = load(path)
    return model.shape, model.popularity.tobytes(), model.reuse.tobytes()


def _network(folder, seed):
    from safetensors.numpy import save

    from moesim.base.files import write_bytes
    from moesim.base.seals import sealed_metadata
    from moesim.policies.cache._learned_network import sizes

    draw = np.random.default_rng(seed)
    arrays = {
        name: draw.normal(size=size).astype(np.float32)
        for name, size in sizes(2, 4, 3).items()
    }
    write_bytes(
        folder / "flashmoe.safetensors",
        save(arrays, sealed_metadata(arrays, {"moesim": "{}"})),
    )
    return folder / "flashmoe.safetensors"


def _read_network(path):
    from moesim.policies.cache._learned_network import Network
    from moesim.runs.setup import load_artefacts

    arrays = load_artefacts(path)["flashmoe"]
    return [part.tobytes() for part in Network.of(arrays, str(path))]


def _residual(folder, seed):
    from moesim.runtime.record.calibration import Residual

    vectors = np.random.default_rng(seed).normal(size=(2, 8)).astype(np.float32)
    Residual(vectors, {"model": "small"}).save(folder / "residual.safetensors")
    return folder / "residual.safetensors"


def _read_residual(path):
    from moesim.runtime.record.calibration import Residual

    loaded = Residual.load(path)
    return loaded.id


def _routing(folder, seed):
    from moesim.runtime.executor.live_routing import save_routing
    from moesim.traces.format.batch import RoutedLayer, RoutedStep
    from moesim.traces.format.schema import Phase

    draw = np.random.default_rng(seed)
    experts = np.sort(draw.choice(8, 2, replace=False)).astype(np.int32)
    layer = RoutedLayer(
        layer=0,
        experts=experts,
        tokens=np.ones(2, np.int32),
        routing=experts[None].astype(np.uint16),
        weights=None,
        scores=None,
        predicted={},
    )
    step = RoutedStep(0, Phase.DECODE, 1, 1, 4, 1, [layer])
    save_routing(folder / "routing.npz", [step])
    return folder / "routing.npz"


def _read_routing(path):
    from moesim.runtime.executor.live_routing import load_routing

    return repr(load_routing(path))


def _store(folder, seed):
    from moesim.runtime.store.build import build_random_store
    from moesim.traces.models import model_shape

    shape = model_shape("layers=1,experts=4,top_k=2,hidden=16,expert_intermediate=16")
    build_random_store(shape, folder / "store", seed).close()
    return folder / "store" / "store.json"


def _read_store(path):
    from moesim.runtime.store.store import ExpertStore

    with ExpertStore(path.parent) as store:
        store.trusted()
        return store.index.to_json()


def _sealed_again(data):
    """An index with a right digest, whatever is in it."""
    from moesim.runtime.store.store import digest_of

    try:
        body = json.loads(data)
        body.pop("digest", None)
        body["digest"] = digest_of(body)
        return json.dumps(body).encode()
    except (ValueError, TypeError, AttributeError):
        return data


def _store_data(folder, seed):
    return _store(folder, seed).with_name("experts.bin")


def _profile(folder, seed):
    from moesim.hwprofiles.profile import load_profile, save_profile

    names = ("rtx4060ti", "rtx3090-epyc7532")
    return save_profile(load_profile(names[seed % 2]), folder / "hw.toml")


def _read_profile(path):
    from moesim.hwprofiles.costs import Costs
    from moesim.hwprofiles.profile import load_profile
    from moesim.traces.models import model_shape

    profile = load_profile(path)
    Costs(profile, model_shape("olmoe-1b-7b"))
    return profile.digest


def _config(folder, seed):
    text = f"""trace = "tiny"
policy = "greedy"
cache = "lfu:decay=0.9"
cache_ratio = 0.{seed + 2}
steps = 6
seed = {seed}
"""
    (folder / "exp.toml").write_text(text)
    return folder / "exp.toml"


def _read_config(path):
    from moesim.runs.config_file import load_config

    return repr(load_config(path))


def _saved_config(folder, seed):
    options = {"trace": "tiny", "policy": "greedy", "cache_ratio": 0.25, "seed": seed}
    content = {
        "tpot_s": 0.1,
        "config": {"version": "0.1.0", "git_commit": "abc", "options": options},
        "warnings": [],
    }
    (folder / "run.json").write_text(json.dumps(content, indent=2))
    return folder / "run.json"


# -- files of others -------------------------------------------------------------------


def _bench(kind):
    def make(folder, seed):
        from support import bench_files

        row = bench_files.row
        rows = [row("tg", 128, 20.0 + seed), row("pp", 512, 300.0, n_cpu_moe=4)]
        text = getattr(bench_files, f"as_{kind}")(rows)
        (folder / f"bench.{kind}").write_text(text)
        return folder / f"bench.{kind}"

    return make


def _read_bench(path):
    from moesim.advice.observed import read_bench

    return repr(read_bench(path))


def _gguf(folder, seed):
    from support.model_files import write_gguf

    write_gguf(folder / "model.gguf", experts=4 + 2 * seed)
    return folder / "model.gguf"


def _hf_config(folder, seed):
    from support.model_files import write_hf

    write_hf(folder / "model", experts=4 + 2 * seed)
    return folder / "model" / "config.json"


def _read_model(path):
    from moesim.advice.model.catalogue import model_contents

    return repr(model_contents(str(path)))


def _read_hf(path):
    return _read_model(path.parent)


def _prompts(folder, seed):
    lines = [json.dumps({"prompt": f"{seed} and {number}"}) for number in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "prompts.jsonl"


def _read_prompts(path):
    from moesim.runtime.text import read_prompts

    return read_prompts(path)


def _foreign(name):
    """A subject for each foreign layout of a routing trace."""

    def make(folder, seed):
        from support import foreign_files as files
        from support.imports import write

        return write(folder, name, files.routing(((3, 2), (2, 2)), seed=seed))

    def read(path):
        from support.imports import WRITERS, bring

        for old in path.parent.glob("out.parquet*"):
            old.unlink()
        try:
            return _read_trace(bring(path, WRITERS[name][2])[1].path)[1]
        except BaseException:
            assert not list(path.parent.glob("*out.parquet*")), "left behind"
            raise

    return Subject(f"foreign {name}", make, read)


def subjects():
    """Every kind of file."""
    from support.imports import WRITERS

    own = [
        Subject("trace", _trace, _read_trace, is_sealed=True),
        Subject("timeline", _timeline, _read_timeline, is_sealed=True),
        Subject("store index", _store, _read_store, is_sealed=True),
        Subject(
            "store index, its digest right", _store, _read_store, seal=_sealed_again
        ),
        Subject("store data", _store_data, _read_store, is_sealed=True),
        Subject("statistics", _statistics, _read_statistics),
        Subject("learned network", _network, _read_network, is_sealed=True),
        Subject("residual vectors", _residual, _read_residual, is_sealed=True),
        Subject("live routing", _routing, _read_routing),
        Subject("run.json", _saved_config, _read_config),
        Subject("configuration", _config, _read_config),
        Subject("hardware profile", _profile, _read_profile),
    ]
    others = [
        Subject("llama-bench JSON", _bench("json"), _read_bench),
        Subject("llama-bench CSV", _bench("csv"), _read_bench),
        Subject("GGUF header", _gguf, _read_model),
        Subject("config.json of a model", _hf_config, _read_hf),
        Subject("prompts", _prompts, _read_prompts),
    ]
    return [*own, *others, *(_foreign(name) for name in WRITERS)]
