"""Rows as llama-bench prints them, in each of its formats."""

import csv
import io
import json

ROW = {
    "cpu_info": "AMD Ryzen 7 5700X 8-Core Processor",
    "gpu_info": "NVIDIA GeForce RTX 4060 Ti",
    "model_filename": "Qwen3-30B-A3B-Q4_K_M.gguf",
    "model_type": "qwen3moe 30B.A3B Q4_K - Medium",
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 8,
    "n_gpu_layers": 99,
    "flash_attn": True,
    "use_mmap": False,
    "type_k": "f16",
    "type_v": "f16",
    "n_depth": 0,
}


def row(kind, tokens, speed, *, n_cpu_moe=0, spread=0.01, **changes):
    """One test of llama-bench, as its JSON has it."""
    return {
        **ROW,
        "n_cpu_moe": n_cpu_moe,
        "n_prompt": tokens if kind == "pp" else 0,
        "n_gen": tokens if kind == "tg" else 0,
        "avg_ts": speed,
        "stddev_ts": speed * spread,
        **changes,
    }


def as_json(rows):
    return json.dumps(rows, indent=2)


def as_jsonl(rows):
    return "\n".join(json.dumps(each) for each in rows)


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_markdown(rows):
    lines = [
        "ggml_cuda_init: found 1 CUDA devices:",
        "| model | size | ngl | n_cpu_moe | threads | n_ubatch | fa | mmap | test | t/s |",
        "| --- | ---: | --: | --: | --: | --: | --: | --: | ---: | ---: |",
    ]
    for each in rows:
        test = f"pp{each['n_prompt']}" if each["n_prompt"] else f"tg{each['n_gen']}"
        cells = [
            each["model_type"],
            "17.28 GiB",
            each["n_gpu_layers"],
            each["n_cpu_moe"],
            each["n_threads"],
            each["n_ubatch"],
            1,
            0,
            test,
            f"{each['avg_ts']:.2f} ± {each['stddev_ts']:.2f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bench(folder, rows):
    """A file with these rows."""
    path = folder / "rows.json"
    path.write_text(as_json(rows))
    return path


FORMATS = {"json": as_json, "jsonl": as_jsonl, "csv": as_csv, "md": as_markdown}
