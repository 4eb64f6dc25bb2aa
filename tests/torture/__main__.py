"""``python -m torture [SUITE …] [--count N] [--seed N]``, with ``tests`` on the path."""

import argparse
import importlib
import sys

from .report import Report

SUITES = {
    # name -> attacks of one turn of `make torture`
    "mutations": 100_000,
    "separators": 4_500,
    "configurations": 1_000,
    "imports": 2_000,
    "bombs": 500,
    "screen": 200,
    "real_runs": 50,
    "write_errors": 500,
    "kills": 500,
    "signals": 500,
    "places": 2_000,
    "streams": 200,
    "users": 100,
    "options": 1_000,
    "calls": 1_000,
}


def main():
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--count", type=int, help="attacks of each suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="subjects whose name has this in it")
    parser.add_argument("--minutes", type=float, help="most time of each suite")
    chosen = parser.parse_args()
    if chosen.minutes is not None:
        Report.longest_s = 60 * chosen.minutes

    failed = 0
    for name in chosen.suites or SUITES:
        suite = importlib.import_module(f".{name}", __package__)
        report = suite.run_suite(chosen.count or SUITES[name], chosen.seed, chosen.only)
        if not report.tried:
            report.fail("nothing was tried")
        report.show()
        failed += len(report.failures)
    sys.exit(1 if failed else 0)


main()
