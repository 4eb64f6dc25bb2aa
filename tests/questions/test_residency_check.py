"""The engine's recorded residency against a replay, access by access.

The engine here is written from its description, without policies, planner or Residency:
one list of (layer, expert) by recency under a budget of bytes; each expert of a batch
is looked up once, in routing order; eviction follows the batch and spares what it
touched. Source: BigMoeOnEdge docs/telemetry.md and scripts/route-replay.py.
"""

import numpy as np
import pytest
from support import foreign_files as files
from support.imports import bring

from benchmarks.residency import check_residency, main
from moesim.base.errors import TraceError

SIZES = (1000, 2000, 3000)


def engine(truth, budget):  # noqa: C901 - one loop, as the engine runs it
    """Residency [T, L, K] per sequence that the engine writes, and its (lookups, hits)
    in decode.
    """
    recency = []
    found = []
    counts = [0, 0]

    def batch(layer, ids, decode):
        touched = set()
        met = {}
        for expert in ids:
            key = (layer, expert)
            if key not in touched:
                met[expert] = int(key in recency)
                if decode:
                    counts[0] += 1
                    counts[1] += met[expert]
            touched.add(key)
            if key in recency:
                recency.remove(key)
            recency.append(key)
        while sum(SIZES[one] for one, _ in recency) > budget:
            victim = next((key for key in recency if key not in touched), None)
            if victim is None:
                break
            recency.remove(victim)
        return met

    for prompt, ids, *_ in truth:
        out = np.zeros(ids.shape, np.int8)
        for layer in range(3):
            part = slice(prompt - 1, prompt) if layer == 2 else slice(0, prompt)
            met = batch(layer, ids[part, layer].reshape(-1).tolist(), decode=False)
            out[part, layer] = np.vectorize(met.get)(ids[part, layer])
        for token in range(prompt, len(ids)):
            for layer in range(3):
                met = batch(layer, ids[token, layer].tolist(), decode=True)
                out[token, layer] = [
                    met[expert] for expert in ids[token, layer].tolist()
                ]
        found.append(out)
    return found, counts


@pytest.mark.parametrize("budget", [18_000, 26_000, 33_333, 40_000, 48_000])
def test_every_access_agrees_with_the_engines_own_lru(tmp_path, budget):
    """All layers' experts weigh 48,000 bytes; unequal layers compete for one pool, from
    one sequence to the next.
    """
    truth = files.routing(((3, 60), (4, 50), (2, 40)), seed=4)
    residency, (lookups, hits) = engine(truth, budget)
    path = files.route_trace(tmp_path / "dump", truth, residency=residency)
    _, trace = bring(path)
    found = check_residency(trace, path, cache_bytes=budget)
    decode = found.phases["decode"]
    assert (decode.accesses, decode.engine_hits) == (lookups, hits)
    assert found.first is None
    assert [counts.share for counts in found.phases.values()] == [1.0, 1.0]
    assert hits not in (0, lookups) or budget == 48_000


def test_another_budget_or_policy_does_not_agree(tmp_path):
    truth = files.routing(((3, 60),), seed=4)
    residency, _ = engine(truth, 26_000)
    path = files.route_trace(tmp_path / "dump", truth, residency=residency)
    _, trace = bring(path)
    assert (
        check_residency(trace, path, cache_bytes=26_000).phases["decode"].share == 1.0
    )
    smaller = check_residency(trace, path, cache_bytes=20_000)
    other = check_residency(trace, path, cache_bytes=26_000, cache="lfu")
    assert smaller.phases["decode"].share < 1.0
    assert smaller.phases["decode"].only_engine > smaller.phases["decode"].only_replay
    assert other.phases["decode"].share < 1.0
    assert "resident in the" in other.first


def test_a_prefetched_expert_is_counted_as_such_and_a_dropped_one_left_out(tmp_path):
    truth = files.routing(((3, 20),), seed=4)
    residency, _ = engine(truth, 26_000)
    token, layer, slot = np.argwhere(residency[0][3:] == 0)[-1] + [3, 0, 0]
    residency[0][token, layer, slot] = 2
    path = files.route_trace(tmp_path / "dump", truth, residency=residency)
    _, trace = bring(path)
    decode = check_residency(trace, path, cache_bytes=26_000).phases["decode"]
    assert (decode.only_engine, decode.prefetched, decode.agree) == (
        1,
        1,
        decode.accesses - 1,
    )
    lines = path.read_text().splitlines()
    lines[-1] = lines[-1][:-1] + "1"
    path.write_text("\n".join(lines) + "\n")
    _, trace = bring(path)
    after = check_residency(trace, path, cache_bytes=26_000).phases["decode"]
    assert (after.dropped, after.accesses) == (1, decode.accesses - 1)


def test_the_record_must_belong_to_the_trace(tmp_path):
    path = files.route_trace(tmp_path / "dump", files.routing())
    _, trace = bring(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(TraceError, match="its experts are not those of"):
        check_residency(trace, path, cache_bytes=1000)
    path.write_text("turn,step\n1,2\n")
    with pytest.raises(TraceError, match="expected a route_trace v1 file"):
        check_residency(trace, path, cache_bytes=1000)
    with pytest.raises(TraceError, match="No such file"):
        check_residency(trace, tmp_path / "none", cache_bytes=1000)


@pytest.mark.parametrize("budget", [20_000, 33_333])
def test_the_engines_cache_is_found_from_its_hits(tmp_path, budget):
    """The least number of the largest experts at which as many accesses hit."""
    truth = files.routing(((3, 60), (4, 50)), seed=4)
    residency, _ = engine(truth, budget)
    path = files.route_trace(tmp_path / "dump", truth, residency=residency)
    _, trace = bring(path)
    check = check_residency(trace, path, cache_bytes=None)
    assert check.replay_hits >= check.engine_hits
    smaller = check_residency(trace, path, cache_bytes=check.cache_bytes - max(SIZES))
    assert smaller.replay_hits < smaller.engine_hits
    assert abs(check.cache_bytes - budget) <= 2 * max(SIZES)


def test_a_size_is_found_where_none_is_stated(capsys, tmp_path):
    truth = files.routing(((3, 20),), seed=4)
    residency, _ = engine(truth, 26_000)
    path = files.route_trace(tmp_path / "dump", truth, residency=residency)
    _, trace = bring(path)
    assert main([str(trace.path), str(path)]) == 0
    assert "100.00% agree" in capsys.readouterr().out
    assert main([str(trace.path), str(path), "--cache-size", "lots"]) == 2
    assert "expected a size" in capsys.readouterr().err
