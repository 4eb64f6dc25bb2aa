"""Freeze what moesim answers, so that a change which must not change anything can be
checked to the last bit.

Everything goes through the command line, the one interface that stays the same while
the code behind it moves. Inputs are prepared once, results are reduced to digests of
their tables' columns, and two freezes are compared::

    python -m benchmarks.frozen prepare INPUTS --shared DIR  # once
    python -m benchmarks.frozen freeze INPUTS before.json      # before the change
    python -m benchmarks.frozen freeze INPUTS after.json       # after it
    python -m benchmarks.frozen compare before.json after.json

Digests depend on the machine (libraries choose their own order of summation), so they
are not part of the project.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]

TIMES = {
    "wall_s",
    "seconds",
    "date",
    "created",
    "config",
    "warnings",
    "git_commit",
    "git",
    "trace",
    "path",
    "out",
}
"""Keys of JSON results that differ from one run to the next, or say where things
lie.
"""

ASSIGNMENTS = [
    "all-cpu",
    "beam",
    "daop",
    "exact",
    "fetch-split",
    "fiddler",
    "fixed-mapping",
    "greedy",
    "hybrimoe-released",
    "hybrimoe-schedule",
    "ik-break-even",
    "ilp",
    "layer-wise",
    "moe-lightning",
    "on-demand",
    "smoe-balancer",
    "static-threshold",
]
CACHES = [
    "arc",
    "belady",
    "belady-cost",
    "belady-size",
    "clock",
    "fifo",
    "flashmoe",
    "least-stale-interval",
    "least-stale-layer",
    "least-stale-pass",
    "lecar",
    "lfru",
    "lfu",
    "lifo",
    "lru",
    "moe-infinity",
    "mrs",
    "none",
    "prefill-swap",
    "random",
    "s3-fifo",
    "score-window",
    "sieve",
    "slru",
    "static",
    "workload-window",
]
PREFETCHES = [
    "activation-matrix",
    "clairvoyant",
    "first-missing",
    "hybrimoe-released",
    "impact",
    "next-gate",
    "noisy-oracle",
    "none",
    "partial-hidden",
    "pre-gated",
    "random",
    "residual",
    "statistical",
    "whole-layer",
]
ROUTINGS = [
    "adaptive-gating",
    "as-recorded",
    "cache-prior",
    "expert-cache-router",
    "graceful-degradation",
]
SYSTEMS = [
    "adapmoe",
    "dali",
    "daop",
    "deepspeed",
    "edgemoe",
    "fiddler",
    "flashmoe",
    "hybrimoe",
    "hybrimoe-released",
    "ktransformers",
    "llama.cpp",
    "mixtral-offloading",
    "moe-infinity",
    "moe-lightning",
    "moe-on-demand",
    "pre-gated",
    "smoe",
]
NEED_SCORES = {"mrs", "score-window"}


def call(*words: object) -> str:
    """Run one moesim command in this process and return what it printed.

    Raises:
        RuntimeError: it did not end with code 0; the message holds what it said.
    """
    from moesim.cli import main

    printed = io.StringIO()
    said = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    if code:
        raise RuntimeError(f"exit {code}: {said.getvalue().strip()[:300]}")
    return printed.getvalue()


def digest(value: object) -> str:
    """Sixteen hexadecimal digits of anything that JSON can say."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


def without_times(value: object) -> object:
    """Leave out what is no result."""
    if isinstance(value, dict):
        return {
            key: without_times(item) for key, item in value.items() if key not in TIMES
        }
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def table_digest(path: Path, columns: list[str] | None = None) -> str:
    """Digest of a Parquet file's values, column by column."""
    table = pq.read_table(path, columns=columns)
    found = hashlib.sha256()
    for name in sorted(table.column_names):
        found.update(name.encode())
        found.update(repr(table[name].to_pylist()).encode())
    return found.hexdigest()[:16]


def folder_digest(folder: Path) -> dict[str, str]:
    """Digests of all tables in a folder."""
    return {path.name: table_digest(path) for path in sorted(folder.glob("*.parquet"))}


# -- what is frozen --------------------------------------------------------------------


def replays(inputs: Path) -> dict[str, list[object]]:
    """Name and words of every replay."""
    tiny = ROOT / "traces" / "data" / "tiny_evaluation.parquet"
    warm = ROOT / "traces" / "data" / "tiny_calibration.parquet"
    art = inputs / "artefacts"
    qwen = inputs / "qwen.parquet"
    mixtral = inputs / "mixtral.parquet"
    deepseek = inputs / "deepseek.parquet"
    gpt = inputs / "gpt_oss.parquet"
    olmoe = inputs / "olmoe.parquet"
    found: dict[str, list[object]] = {}
    few = ["--steps", 24]
    for name in ASSIGNMENTS:
        found[f"assignment/{name}/tiny"] = [
            tiny,
            "--policy",
            name,
            "--cache",
            "lru",
            "--batch",
            2,
            *few,
        ]
        found[f"assignment/{name}/qwen"] = [
            qwen,
            "--policy",
            name,
            "--cache",
            "lru",
            "--steps",
            8,
            "--hw",
            "rtx4060ti",
        ]
        if name != "daop":
            found[f"assignment/{name}/mixtral"] = [
                mixtral,
                "--policy",
                name,
                "--cache",
                "lfu",
                "--batch",
                4,
                "--steps",
                12,
                "--warm",
                mixtral,
            ]
    for name in CACHES:
        more = ["--artefacts", art] if name == "flashmoe" else []
        if name == "belady-size":
            more = ["--cache-scope", "global"]
        found[f"cache/{name}/tiny"] = [
            tiny,
            "--policy",
            "on-demand",
            "--cache",
            name,
            *few,
            *more,
            "--warm",
            warm,
        ]
        found[f"cache/{name}/greedy"] = [
            tiny,
            "--policy",
            "greedy",
            "--cache",
            name,
            *few,
            *more,
            "--batch",
            3,
        ]
        found[f"cache/{name}/ssd"] = [
            tiny,
            "--policy",
            "greedy",
            "--cache",
            name,
            *few,
            *more,
            "--host-memory",
            "9MiB",
            "--host-cache",
            "lfu",
            "--hw",
            "two-core-host",
        ]
        if name not in NEED_SCORES | {"flashmoe", "belady-size"}:
            found[f"cache/{name}/mixtral"] = [
                mixtral,
                "--policy",
                "on-demand",
                "--cache",
                name,
                "--steps",
                16,
            ]
            found[f"cache/{name}/only"] = [
                mixtral,
                "--cache",
                name,
                "--cache-only",
                "--steps",
                64,
            ]
    for name in PREFETCHES:
        for policy in ("greedy", "on-demand", "hybrimoe-schedule"):
            found[f"prefetch/{name}/{policy}"] = [
                tiny,
                "--policy",
                policy,
                "--cache",
                "lru",
                "--prefetch",
                name,
                *few,
                "--warm",
                warm,
            ]
        found[f"prefetch/{name}/none"] = [
            tiny,
            "--policy",
            "greedy",
            "--cache",
            "none",
            "--prefetch",
            name,
            *few,
            "--staging",
            6,
            "--warm",
            warm,
        ]
        found[f"prefetch/{name}/ssd"] = [
            tiny,
            "--policy",
            "greedy",
            "--cache",
            "lru",
            "--prefetch",
            name,
            *few,
            "--host-memory",
            "9MiB",
            "--hw",
            "two-core-host",
            "--warm",
            warm,
        ]
    for name in ROUTINGS:
        for policy in ("greedy", "daop"):
            found[f"routing/{name}/{policy}"] = [
                tiny,
                "--policy",
                policy,
                "--cache",
                "lru",
                "--routing",
                name,
                *few,
            ]
    for name in SYSTEMS:
        more = ["--artefacts", art] if name == "flashmoe" else []
        for label, words in (
            ("plain", []),
            ("half", ["--cache-ratio", 0.5, "--batch", 4, "--warm", warm]),
            ("ssd", ["--host-memory", "9MiB", "--hw", "two-core-host"]),
            ("noise", ["--hw", "two-core-host", "--noise-seed", 3]),
            ("other", ["--hw", "rtx4060ti", "--seed", 5, "--batch", 2]),
        ):
            found[f"system/{name}/{label}"] = [
                tiny,
                "--policy",
                name,
                *words,
                *more,
                *few,
            ]
    for name in (
        "deepspeed",
        "edgemoe",
        "fiddler",
        "ktransformers",
        "llama.cpp",
        "mixtral-offloading",
        "moe-infinity",
        "moe-lightning",
        "moe-on-demand",
        "pre-gated",
    ):
        found[f"system/{name}/deepseek"] = [
            deepseek,
            "--policy",
            name,
            "--batch",
            4,
            "--steps",
            6,
        ]
        found[f"system/{name}/qwen"] = [
            qwen,
            "--policy",
            name,
            "--steps",
            6,
            "--gpu-memory",
            "8GiB",
            "--hw",
            "rtx5060ti-ryzen9900x",
        ]
    for hw in (
        "a6000-i9-10980xe",
        "a6000-xeon5220r-10c",
        "rtx3080ti",
        "rtx3090-epyc7532",
        "rtx5070ti-ryzen9600x",
    ):
        for trace in (gpt, olmoe):
            found[f"hw/{hw}/{trace.stem}"] = [
                trace,
                "--policy",
                "greedy",
                "--cache",
                "lru",
                "--hw",
                hw,
                "--steps",
                20,
            ]
    for scope in ("layer", "global"):
        found[f"scope/{scope}"] = [
            deepseek,
            "--policy",
            "greedy",
            "--cache",
            "lru",
            "--cache-scope",
            scope,
            "--steps",
            10,
        ]
    two = inputs / "two_gpus.toml"
    for split in ("layers", "experts"):
        for policy in (
            "greedy",
            "on-demand",
            "ilp",
            "exact",
            "hybrimoe-schedule",
            "dali",
        ):
            found[f"gpus/{split}/{policy}"] = [
                tiny,
                "--policy",
                policy,
                "--gpu-split",
                split,
                "--hw",
                two,
                *few,
            ]
    for budget in ("200KiB", "2MiB"):
        found[f"budget/{budget}"] = [
            tiny,
            "--policy",
            "greedy",
            "--prefetch",
            "residual",
            "--prefetch-budget",
            budget,
            *few,
        ]
    return found


def real_runs(inputs: Path) -> dict[str, list[object]]:
    """Name and words of runs whose decisions do not depend on how long anything
    took.
    """
    tiny = ROOT / "traces" / "data" / "tiny_evaluation.parquet"
    warm = ROOT / "traces" / "data" / "tiny_calibration.parquet"
    prompts = inputs / "prompts.txt"
    hw = ["--hw", "two-core-host"]
    found: dict[str, list[object]] = {}
    for name in (
        "all-cpu",
        "fixed-mapping",
        "greedy",
        "on-demand",
        "ilp",
        "exact",
        "hybrimoe-schedule",
        "beam",
        "fiddler",
        "layer-wise",
        "smoe-balancer",
        "static-threshold",
        "fetch-split",
    ):
        found[f"run/assignment/{name}"] = [
            tiny,
            "--policy",
            name,
            "--cache",
            "lru",
            "--steps",
            6,
            "--batch",
            2,
            *hw,
        ]
    for name in (
        "arc",
        "clock",
        "fifo",
        "lecar",
        "lfru",
        "lfu",
        "lifo",
        "moe-infinity",
        "mrs",
        "none",
        "s3-fifo",
        "score-window",
        "sieve",
        "slru",
        "random",
        "belady",
        "static",
    ):
        found[f"run/cache/{name}"] = [
            tiny,
            "--policy",
            "on-demand",
            "--cache",
            name,
            "--steps",
            8,
            "--warm",
            warm,
            *hw,
        ]
    for name in (
        "fiddler",
        "ktransformers",
        "llama.cpp",
        "mixtral-offloading",
        "moe-on-demand",
    ):
        found[f"run/system/{name}"] = [
            tiny,
            "--policy",
            name,
            "--steps",
            8,
            "--warm",
            warm,
            *hw,
        ]
    for name in ("greedy", "on-demand", "all-cpu"):
        live = ["--model", "tiny", "--prompt", prompts, "--max-new-tokens", 6]
        found[f"run/live/{name}"] = [*live, "--policy", name, "--cache", "lru", *hw]
        found[f"run/live-batch/{name}"] = [
            *live,
            "--policy",
            name,
            "--cache",
            "lfu",
            "--batch",
            2,
            *hw,
        ]
        found[f"run/ssd/{name}"] = [
            tiny,
            "--policy",
            name,
            "--cache",
            "lru",
            "--steps",
            6,
            "--host-memory",
            "9MiB",
            *hw,
        ]
    return found


def answers(inputs: Path) -> dict[str, list[object]]:
    """Name and words of commands that print JSON."""
    tiny = ROOT / "traces" / "data" / "tiny_evaluation.parquet"
    traces = [
        tiny,
        *(
            inputs / f"{name}.parquet"
            for name in ("qwen", "mixtral", "deepseek", "olmoe")
        ),
    ]
    found: dict[str, list[object]] = {}
    for trace in traces:
        found[f"info/{trace.stem}"] = ["trace", "info", trace, "--json"]
        found[f"check/{trace.stem}"] = ["trace", "check", trace, "--json"]
        found[f"hits/{trace.stem}"] = ["hits", trace, "--json"]
    found["compare/tiny"] = [
        "compare",
        tiny,
        "--policies",
        "greedy,on-demand+lfu,dali,fiddler",
        "--steps",
        16,
        "--json",
    ]
    found["compare/sweep"] = [
        "compare",
        tiny,
        "--policies",
        "greedy,all-cpu",
        "--steps",
        8,
        "--gpu-memory",
        "4GiB,8GiB",
        "--hw",
        "rtx4060ti,rtx3080ti",
        "--json",
    ]
    found["gap/tiny"] = ["gap", tiny, "--policy", "greedy", "--steps", 16, "--json"]
    return found


def imports(inputs: Path) -> dict[str, list[object]]:
    """Name and words of imports of every foreign layout."""
    wanted = json.loads((inputs / "foreign" / "imports.json").read_text())
    return {
        f"import/{name}": [inputs / "foreign" / name, "DST", *words]
        for name, words in wanted.items()
    }


# -- preparing -------------------------------------------------------------------------


def prepare(inputs: Path, shared: Path) -> None:
    """Write the inputs: imported traces, foreign files, a trained network, a machine
    with two GPUs.
    """
    inputs.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "tests"))
    import foreign_files as foreign

    from tests.support import learned_network

    for source, name, words in (
        ("qwen3_30b_a3b_top6", "qwen", ("qwen3-30b-a3b", "q4_k_m")),
        ("gpt_oss_20b", "gpt_oss", ("gpt-oss-20b", "mxfp4")),
        ("olmoe_1b_7b_decode299", "olmoe", ("olmoe-1b-7b", "bf16")),
    ):
        call(
            "trace",
            "import",
            shared / f"{source}.parquet",
            inputs / f"{name}.parquet",
            "--shape",
            words[0],
            "--weights",
            words[1],
        )
    shutil.copy(shared / "mixtral_8x7b_like.parquet", inputs / "mixtral.parquet")
    shutil.copy(shared / "deepseek_v2_lite_like.parquet", inputs / "deepseek.parquet")
    learned_network.write(inputs / "artefacts", 6, 32)
    (inputs / "prompts.txt").write_text(
        "def add(a, b):\n    return\n\nimport os\nimport\n\nclass Point:\n"
    )
    folder = inputs / "foreign"
    folder.mkdir(exist_ok=True)
    truth = foreign.routing()
    named = {
        "sglang_per_token.pt": (foreign.sglang_per_token, {}, []),
        "sglang_dense.pt": (foreign.sglang_per_token, {"dense_before": 1}, []),
        "sglang_per_pass.pt": (foreign.sglang_per_pass, {}, []),
        "vllm.npz": (foreign.vllm_npz, {}, []),
        "vllm.npy": (foreign.vllm_npy, {}, ["--prompt-tokens", 5]),
        "vllm.jsonl": (foreign.vllm_json, {}, []),
        "vllm_encoded.jsonl": (foreign.vllm_json, {"encoded": True}, []),
        "hf.safetensors": (foreign.hf_safetensors, {}, ["--batch", 2]),
        "hf.npz": (foreign.hf_npz, {}, ["--batch", 2]),
        "hf.pt": (foreign.hf_torch, {}, ["--batch", 2]),
        "llama_cpp.csv": (foreign.llama_cpp, {}, []),
        "megatron.jsonl": (foreign.megatron, {}, []),
        "route_trace.csv": (foreign.route_trace, {}, []),
        "lattice.jsonl": (foreign.lattice, {}, []),
        "per_token.jsonl": (foreign.per_token, {}, []),
        "imp.jsonl": (foreign.imp, {}, []),
        "imp.json": (foreign.imp, {"lines": False}, []),
        "columns.csv": (foreign.columns_csv, {}, ["--map", foreign.COLUMNS_MAP["map"]]),
        "columns_long.parquet": (foreign.columns_long, {}, []),
        "routing_rows.parquet": (foreign.routing_rows, {}, []),
        "moesim_unordered.parquet": (foreign.moesim_unordered, {}, None),
    }
    wanted = {}
    larger = foreign.routing(((40, 160), (33, 201), (7, 5), (64, 64)), seed=3)
    for size, rows in (("", truth), ("large_", larger)):
        for name, (write, options, words) in named.items():
            write(folder / f"{size}{name}", rows, **options)
            wanted[f"{size}{name}"] = (
                [] if words is None else ["--shape", foreign.SHAPE, *words]
            )
    for name, words in wanted.items():
        with contextlib.suppress(ValueError):
            words[words.index("--batch") + 1] = 4 if name.startswith("large_") else 2
    (folder / "imports.json").write_text(json.dumps(wanted))
    profile = (ROOT / "hwprofiles" / "data" / "rtx3090-epyc7532.toml").read_text()
    for lane in ("gpu", "h2d", "d2h"):
        profile = profile.replace(
            f'{lane}0 = [\n    "{lane}0",\n]',
            f'{lane}0 = [\n    "{lane}0",\n]\n{lane}1 = [\n    "{lane}1",\n]',
        )
    (inputs / "two_gpus.toml").write_text(profile)


# -- freezing --------------------------------------------------------------------------


def freeze(inputs: Path, only: str = "") -> dict[str, object]:
    """Run everything and return digests by name; what cannot run freezes its error."""
    found: dict[str, object] = {}
    jobs = [
        *((name, words, _replayed) for name, words in replays(inputs).items()),
        *((name, words, _answered) for name, words in answers(inputs).items()),
        *((name, words, _imported) for name, words in imports(inputs).items()),
        *(
            (f"stats/{name}", [inputs / f"{name}.parquet"], _surveyed)
            for name in ("qwen", "mixtral", "olmoe")
        ),
        (
            "stats/tiny",
            [ROOT / "traces" / "data" / "tiny_evaluation.parquet"],
            _surveyed,
        ),
        (
            "synth/qwen",
            [
                "--shape",
                "qwen3-30b-a3b",
                "--tokens",
                40,
                "--prompt",
                8,
                "--generated",
                12,
            ],
            _drawn,
        ),
        ("synth/like", ["--like", inputs / "mixtral.parquet", "--tokens", 200], _drawn),
        *((name, words, _ran) for name, words in real_runs(inputs).items()),
    ]
    jobs = [job for job in jobs if job[0].startswith(tuple(only.split(",")))]
    for number, (name, words, work) in enumerate(jobs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = work(words, Path(folder))
            except RuntimeError as error:
                found[name] = f"error: {str(error).replace(str(folder), 'FOLDER')}"
        print(
            f"\r{number + 1}/{len(jobs)} {name:60}", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return found


def _replayed(words: list[object], folder: Path) -> object:
    if "--cache-only" in words:
        return without_times(json.loads(call("replay", *words, "--json")))
    told = json.loads(call("replay", *words, "--out", folder / "run", "--json"))
    return {
        "metrics": digest(without_times(told)),
        "events": told["events"],
        **folder_digest(folder / "run"),
    }


def _answered(words: list[object], _folder: Path) -> object:
    return digest(without_times(json.loads(call(*words))))


def _imported(words: list[object], folder: Path) -> object:
    target = folder / "t.parquet"
    call("trace", "import", words[0], target, *words[2:])
    told = json.loads(call("trace", "info", target, "--json"))
    told["size_bytes"] = 0
    told["provenance"] = {}
    return {"rows": table_digest(target), "info": digest(without_times(told))}


def _surveyed(words: list[object], folder: Path) -> object:
    told = json.loads(call("trace", "stats", *words, "--out", folder / "s", "--json"))
    return {"figures": digest(without_times(told)), **folder_digest(folder / "s")}


def _drawn(words: list[object], folder: Path) -> object:
    call("trace", "synth", folder / "s.parquet", *words)
    return table_digest(folder / "s.parquet")


def _ran(words: list[object], folder: Path) -> object:
    told = json.loads(
        call(
            "run",
            *words,
            "--out",
            folder / "run",
            "--store",
            folder / "store",
            "--json",
        )
    )
    columns = ["step", "layer", "expert", "tokens", "lane", "state"]
    return {
        "accesses": table_digest(folder / "run" / "accesses.parquet", columns),
        "figures": {
            key: told[key]
            for key in ("hits", "misses", "accesses", "steps")
            if key in told
        },
    }


def compare(
    before: dict[str, object], after: dict[str, object], only: str = ""
) -> list[str]:
    """One line for everything that differs."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if not name.startswith(tuple(only.split(","))):
            continue
        old = before.get(name)
        new = after.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts = [
                part
                for part in sorted(old.keys() | new.keys())
                if old.get(part) != new.get(part)
            ]
            lines.append(f"{name}: {', '.join(parts)}")
        else:
            lines.append(f"{name}: {old} -> {new}")
    return lines


def main() -> None:
    """Parse, and do one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("prepare", "freeze", "compare"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    parser.add_argument(
        "--shared", type=Path, default=ROOT / ".." / "shared" / "traces"
    )
    parser.add_argument(
        "--only",
        default="",
        help="only names that begin with one of these, comma-separated",
    )
    chosen = parser.parse_args()
    if chosen.action == "prepare":
        prepare(chosen.first, chosen.shared)
    elif chosen.action == "freeze":
        chosen.second.write_text(
            json.dumps(freeze(chosen.first, chosen.only), indent=1)
        )
    else:
        before = json.loads(chosen.first.read_text())
        after = json.loads(chosen.second.read_text())
        lines = compare(before, after, chosen.only)
        print(
            "\n".join(
                [*lines, f"{len(before)} frozen, {len(after)} now, {len(lines)} differ"]
            )
        )
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
