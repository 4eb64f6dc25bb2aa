"""Memory that engines logged, beside what `advise` bills for the same.

    python benchmarks/logged_memory.py

Prints a table for `docs/measurements/memory.md`: one row a log, MiB, and how far the
bill is off.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.logged_memory import LOGS, billed


def main() -> None:
    """Print the table."""
    print("| model, file | context, micro-batch | keys, values | buffer | log |")
    print("|---|---|---|---|---|")
    for log in sorted(LOGS, key=lambda log: log["model"]):
        bill = billed(log)
        cells = [f"{log['model']}, {log['quant']}"]
        where = ", experts on the CPU" if log.get("on_host") else ""
        cells.append(f"{log['context']:,}, {log.get('micro_batch', 512)}{where}")
        for item in ("kept", "computing"):
            cells.append("")
            if item in log:
                off = bill[item] / log[item] - 1.0
                cells[-1] = f"{log[item]:,.0f} ({off:+.1%})"
        print("|", " | ".join([*cells, log["source"]]), "|")


if __name__ == "__main__":
    main()
