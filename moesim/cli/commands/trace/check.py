"""`moesim trace check`: whether a trace can be trusted."""

import json

import typer

from moesim.cli.options import AsJson, TraceFile

MISLEADING = 1
"""Exit code for a trace whose results would mislead."""


def check(trace: TraceFile, as_json: AsJson = False) -> None:
    """Say in plain words what speaks against trusting a trace; exit code 1 if results
    would mislead.

    \b
    Example:
      moesim trace check trace.parquet
    """
    from moesim.traces.format.reader import open_trace
    from moesim.traces.stats.quality_checks import check_quality

    findings = check_quality(open_trace(trace))
    is_misleading = any(finding.grave for finding in findings)
    if as_json:
        rows = [
            {"kind": finding.kind, "grave": finding.grave, "text": finding.text}
            for finding in findings
        ]
        facts = {"trace": str(trace), "trusted": not is_misleading, "findings": rows}
        print(json.dumps(facts, indent=2))
    else:
        for finding in findings:
            print(f"{'warning' if finding.grave else 'note'}: {finding.text}")
        if is_misleading:
            print("do not trust results of this trace")
        else:
            print("nothing speaks against this trace")
    # Scripts look at the exit code, whatever was printed.
    if is_misleading:
        raise typer.Exit(MISLEADING)
