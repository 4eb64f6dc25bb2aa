"""A new policy is one file: dropped into its folder, it is found, listed, replayed, and
held by the contract suite, while no other file changes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT
from support.small_trace import write_small_trace

NEW = {
    "assignment/every_other.py": '''
"""Alternating lanes."""

from moesim.policies.base import AssignmentPolicy


class EveryOther(AssignmentPolicy):
    """Compute every other active expert on the CPU.

    Args:
        first: lane of the first one.
    """

    def __init__(self, *, first: int = 0) -> None:
        self.first = first

    def assign(self, work, view, lanes, order):
        for i in range(work.active):
            lanes[i] = (i + self.first) % 2
        return 0
''',
    "cache/highest_id.py": '''
"""Eviction by id."""

from moesim.policies.base import CachePolicy


class HighestId(CachePolicy):
    """Evict the expert with the highest id."""

    def victims(self, incoming, candidates, chosen):
        for n in range(len(incoming)):
            chosen[n] = candidates[len(candidates) - 1 - n]
''',
    "prefetch/first_ids.py": '''
"""Prefetch by id."""

from moesim.policies.base import PrefetchPolicy


class FirstIds(PrefetchPolicy):
    """Prefetch the lowest absent ids of the next layer."""

    def prefetch(self, work, view, named):
        layer = work.layer + 1
        if layer == view.layers:
            return 0
        resident = view.resident(layer)
        absent = [e for e in range(view.experts) if not resident[e]][:2]
        for n, expert in enumerate(absent):
            named[n] = layer * view.experts + expert
        return len(absent)
''',
    "routing/equal_weights.py": '''
"""Routing with equal weights."""

import numpy as np
from moesim.policies.base import RoutingPolicy


class EqualWeights(RoutingPolicy):
    """Give the chosen experts of a token equal weights."""

    def route(self, gate, view, routing):
        experts = np.asarray(gate.experts)
        for n, expert in enumerate(experts.reshape(-1)):
            routing[n] = expert
        return experts.shape[1]

    def weigh(self, gate, experts):
        return np.full(experts.shape, 1.0 / experts.shape[1], np.float32)
''',
}
"""Path below ``policies/`` and text of one new policy of each kind."""

NAMES = {path.partition("/")[0]: Path(path).stem.replace("_", "-") for path in NEW}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package: `policies` with the four new files, all else linked."""
    folder = tmp_path_factory.mktemp("copy") / "moesim"
    folder.mkdir()
    for path in (ROOT / "moesim").iterdir():
        (folder / path.name).symlink_to(path.resolve())

    (folder / "policies").unlink()
    shutil.copytree(ROOT / "policies", folder / "policies")
    for path, text in NEW.items():
        (folder / "policies" / path).write_text(text.lstrip(), encoding="utf-8")
    return folder.parent


def python(package, *words):
    """Run Python on the copy, away from the checkout; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_contract_suite_holds_it(package):
    """Every test of the suite that runs over names meets the four new ones; a policy
    that broke its promises would fail there.
    """
    suite = Path(__file__).parent / "test_policy_contract.py"
    options = ("-p", "no:cacheprovider", "-k", " or ".join(NAMES.values()))
    printed = python(package, "pytest", suite, *options)
    # One for the assignment, three for the cache (two scopes), two for prefetching,
    # one for routing.
    assert re.search(r"\b7 passed", printed), printed


def test_a_replay_takes_all_four(package, tmp_path):
    trace = write_small_trace(tmp_path / "t.parquet")
    printed = python(
        package,
        *("moesim", "replay", trace, "--json", "--hw", "rtx3090-epyc7532"),
        *("--policy", "every-other:first=1", "--cache", "highest-id"),
        *("--prefetch", "first-ids", "--routing", "equal-weights"),
    )
    assert json.loads(printed)["layer_steps"] > 0
