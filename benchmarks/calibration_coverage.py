"""How often a calibration's 95 % intervals hold the truth, term by term, on machines
whose constants are known.

    python benchmarks/calibration_coverage.py [--draws 300] [--terms contention]
        [--noise 2]

Prints a share for each term and noise; 90 to 98 % is what an interval of 95 % should
show. Contention takes a CPU second a draw, the others milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import known_machine as known

NOISES = {2: (0.02, 0.0, 0.0), 10: (0.10, 0.01, 0.02), 25: (0.25, 0.02, 0.02)}
TERMS = {
    "means": known.mean_covers,
    "samples": known.few_samples_cover,
    "control": known.plane_covers,
    "links": known.line_covers,
    "rooflines": known.roofline_covers,
    "slowdowns": known.slowdowns_cover,
    "contention": known.contention_covers,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--terms", choices=TERMS, action="append")
    parser.add_argument("--noise", type=int, choices=NOISES, action="append")
    arguments = parser.parse_args()
    for name in arguments.terms or TERMS:
        for percent in arguments.noise or NOISES:
            scatter, drift, outliers = NOISES[percent]
            noise = known.Noise(scatter, drift, outliers)
            shares = known.coverage(TERMS[name], noise, arguments.draws)
            print(f"{name}: noise {scatter:.0%}, drift {drift:.0%}", flush=True)
            for term, share in shares.items():
                print(f"  {term:<24} {share:6.1%}", flush=True)


if __name__ == "__main__":
    main()
