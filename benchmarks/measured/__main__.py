"""Predicts every row of other people's machines blind, and says how far off it is.

``python -m benchmarks.measured FOLDER… --out report`` reads ``decode.csv``,
``llama_bench.csv`` and the like, and writes the page, every prediction, and the
population that ships in ``moesim/advice/data``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from benchmarks.measured.judge import judge
from benchmarks.measured.page import save, terminal_text, to_json
from benchmarks.measured.rows import read_folder
from moesim.base.errors import AdviceError
from moesim.cli.output import bar


def main(words: list[str] | None = None) -> int:
    """Judge, print, and write a report if asked to; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = sys.argv[1:] if words is None else words
    asked = parser.parse_args(words)
    try:
        folders = [read_folder(path) for path in asked.folders]
    except AdviceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with bar("predicting", 1.0) as show:
        judgement = judge(folders, lambda _name, share: show(share))
    written = []
    if asked.out is not None:
        command = shlex.join([*parser.prog.split(), *words])
        written = save(judgement, asked.out, command)
    if asked.json:
        print(json.dumps(to_json(judgement), indent=2))
        return 0
    print(terminal_text(judgement))
    print("".join(f"\nwrote {path}" for path in written))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
