"""What a policy could reach that knows no more than a predictor or a draft could tell.

The clairvoyant system's copies, by a cache that sees a part of what comes: the experts
of the next layers, as many of them as gates applied early name rightly elsewhere (75,
67, 61 and 57 % of misses one to four layers ahead, wrong ones left out), or all of the
next tokens. Beyond that it goes by two decayed frequencies, as recall does. Price and
discount are searched for each run, so that these are ceilings::

    python -m benchmarks.judge_recall run results.jsonl --shared DIR --strongest
    python -m benchmarks.causal_ceilings run ceilings.jsonl --shared DIR
    python -m benchmarks.causal_ceilings print ceilings.jsonl --judged results.jsonl

``print`` says which share of the way from the best fixed rival to clairvoyant each
goes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

import moesim
from benchmarks.judge_recall import MACHINES, OURS, drawn, seconds_of, verdict
from moesim.policies.cache.static import Static
from moesim.policies.foresight import Foresight
from moesim.policies.names import ABSENT, NONE, RESIDENT
from moesim.policies.prefetch.foresight import ForesightPrefetch
from moesim.policies.ranked_cache import OutscoringCache
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moesim.policies.arrays import Ints
    from moesim.policies.base import Work
    from moesim.policies.run_context import RunContext
    from moesim.traces.format.reader import Trace

TRACES = ("qwen3-30b-a3b", "kimi-linear-48b-a3b", "olmoe-1b-7b")
RATIOS = (0.1, 0.25)
DECAYS = (0.65, 0.8, 0.9)
MARGINS = (0.1, 0.2, 0.3, 0.5, 0.9)

HORIZONS = {
    "frequency alone": "layers=0,tokens=0",
    **{f"{n} layers at measured recall": f"layers={n},tokens=0" for n in (1, 2, 3, 4)},
    **{f"{n} layers, all right": f"layers={n},tokens=0,right=1" for n in (1, 4)},
    **{f"{n} tokens": f"layers=0,tokens={n}" for n in (1, 2, 4, 8)},
}

RECALLS = (0.75, 0.67, 0.61, 0.57)
"""Of misses, by a gate applied so many layers earlier (everett6/moe-prefetch)."""

HALF_LIVES = (4.0, 32.0)
SHARES = (0.3, 0.7)
"""Of the two frequencies, as recall has them."""


class Horizon(Foresight):
    """Foresight that is shown a part of what comes."""

    def __init__(
        self, context: RunContext, tokens: int, layers: int, right: float, decay: float
    ) -> None:
        super().__init__(context.future, context, decay)
        keys = self.layers * self.experts
        self.tokens = tokens
        self.seen_layers = layers
        self.decay = decay
        self.layer_steps = len(self.edges) - 1
        self.value = np.zeros(keys).data
        self.next_step = np.full(keys, NONE, np.int64).data
        self.frequencies = np.zeros((len(HALF_LIVES), keys))
        # One draw for each use: what is below a recall is foreseen.
        self.draws = np.random.default_rng(0).random(len(self.used))
        self.recalls = np.maximum(RECALLS, right)

    @classmethod
    def shared(cls, context: RunContext, *rules: float) -> Horizon:
        """The horizon of a run, the same for both parts."""
        return context.share((cls, *rules), lambda: cls(context, *rules))

    def foresee(self, work: Work) -> None:
        """Value a layer that a token has passed by what is seen of the next ones, and
        mark what is seen of the coming layers.
        """
        now = work.step * self.layers + work.layer
        if self.last == now:
            return
        self.last = now
        passed = slice(work.first, work.first + self.experts)
        late = np.zeros(self.experts)
        for row, half_life in enumerate(HALF_LIVES):
            kept = 0.5 ** (1.0 / half_life)
            frequency = self.frequencies[row, passed]
            frequency *= kept
            frequency[np.asarray(work.experts)] += 1.0 - kept
            late += SHARES[row] * frequency
        beyond = self.decay ** (self.tokens + 1) / (1.0 - self.decay)
        np.asarray(self.value)[passed] = beyond * late
        np.asarray(self.next_step)[passed] = NONE
        for later in range(self.tokens, 0, -1):
            for use in self._uses(now + later * self.layers):
                key = work.first + self.used[use]
                self.value[key] += self.decay**later
                self.next_step[key] = work.step + later
        for ahead in range(min(self.seen_layers, self.layers - 1 - work.layer)):
            coming = work.first + (1 + ahead) * self.experts
            for use in self._uses(now + 1 + ahead):
                key = coming + self.used[use]
                is_seen = self.draws[use] < self.recalls[ahead]
                if is_seen and self.next_step[key] != work.step:
                    self.next_step[key] = work.step
                    self.value[key] += self.decay

    def _uses(self, layer_step: int) -> range:
        if layer_step >= self.layer_steps:
            return range(0)
        return range(self.edges[layer_step], self.edges[layer_step + 1])


class _Rules:
    """What either part is told, and at which discount and price it copies."""

    def __init__(
        self,
        *,
        tokens: int = 0,
        layers: int = 0,
        right: float = 0.0,
        decay: float = 0.8,
        margin: float = 0.3,
    ) -> None:
        self.rules = (tokens, layers, right, decay)
        self.decay = decay
        self.margin = margin


class HorizonCache(_Rules, OutscoringCache):
    """Keep what is worth most by what is seen, and by use of late beyond."""

    oracle: ClassVar[bool] = True

    def start(self, context: RunContext) -> None:
        """Take the run's horizon, and begin as decayed frequency does."""
        super().start(context)
        self._initial_content = Static(fill="auto")
        self._initial_content.start(context)
        self.horizon = Horizon.shared(context, *self.rules)
        self.score = self.horizon.value

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)

    def accessed(self, work: Work) -> None:
        """Look."""
        self.horizon.foresee(work)

    def replacements(
        self, work: Work, states: Ints, outgoing: Ints, incoming: Ints
    ) -> int:
        """Pair the best absent expert of a layer with its worst resident while that
        gains more than the margin.
        """
        first = work.first
        values = np.asarray(self.score)[first : first + self.experts]
        state = np.asarray(states)[first : first + self.experts]
        absent = np.flatnonzero(state == ABSENT)
        resident = np.flatnonzero(state == RESIDENT)
        best = absent[np.argsort(-values[absent], kind="stable")]
        worst = resident[np.argsort(values[resident], kind="stable")]
        count = 0
        # The shorter list decides how many pairs there are.
        for enters, leaves in zip(best.tolist(), worst.tolist(), strict=False):
            if values[enters] - values[leaves] <= self.margin:
                break
            incoming[count] = first + enters
            outgoing[count] = first + leaves
            count += 1
        return count


class HorizonPrefetch(_Rules, ForesightPrefetch):
    """Copy what is seen, as the clairvoyant system does."""

    def take(self, context: RunContext) -> Horizon:
        """The run's horizon."""
        tokens, layers, *_ = self.rules
        # So far it looks: never beyond what is seen.
        self.tokens = min(2.0, tokens) or (layers + 0.5) / context.shape.layers
        return Horizon.shared(context, *self.rules)


def searched(trace: Trace, hw: str, ratio: float, horizon: str) -> float:
    """The least seconds of a run over discounts, then over prices."""

    def seconds(decay: float, margin: float) -> float:
        parts = f"horizon:{HORIZONS[horizon]},decay={decay},margin={margin}"
        replayed = moesim.replay(
            *(trace, "hybrimoe-schedule"),
            cache=parts,
            prefetch=parts,
            hw=hw,
            cache_ratio=ratio,
            keep=False,
        )
        return replayed.metrics["makespan_s"]

    decay = min(DECAYS, key=lambda decay: seconds(decay, MARGINS[2]))
    return min(seconds(decay, margin) for margin in MARGINS)


def run(
    results: Path, shared: Path, traces: Sequence[str], machines: Sequence[str]
) -> None:
    """Replay what the results lack, and append it."""
    warnings.simplefilter("ignore")
    moesim.register("cache", "horizon", HorizonCache)
    moesim.register("prefetch", "horizon", HorizonPrefetch)
    done = set()
    if results.exists():
        lines = results.read_text().splitlines()
        done = {tuple(json.loads(line)[:5]) for line in lines}
    with results.open("a") as file, tempfile.TemporaryDirectory() as folder:
        drawn_of = {name: drawn(name, shared, Path(folder)) for name in traces}
        opened = {name: open_trace(paths[0]) for name, paths in drawn_of.items()}
        for hw, name, ratio, horizon in product(machines, traces, RATIOS, HORIZONS):
            cell = (name, 0, hw, ratio, horizon)
            if cell in done:
                continue
            seconds = searched(opened[name], hw, ratio, horizon)
            file.write(json.dumps([*cell, seconds]) + "\n")
            file.flush()


def printed(results: Path, judged: Path) -> str:
    """Lay out which share of the gap each closes, as a Markdown table."""
    columns = ["trace", "text", "hw", "ratio", "horizon", "seconds"]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    reached = pd.DataFrame(lines, columns=columns).pivot_table(
        index=columns[:4], columns="horizon", values="seconds"
    )
    # An interrupted run leaves a cell unfinished.
    reached = reached.dropna()
    rivals = seconds_of(judged)
    rivals = rivals[rivals.index.isin(reached.index)]
    ours, clairvoyant = OURS
    groups = list(rivals.groupby(level=["trace", "ratio"], sort=False))
    heads = [f"{trace}, {ratio:.0%}" for (trace, ratio), _ in groups]
    rows = {"best fixed rival": [], ours: []}
    rows |= {horizon: [] for horizon in HORIZONS}
    for _, cells in groups:
        best = cells[str(verdict(cells)["rival"])]
        way = (best - cells[clairvoyant]).sum()
        rows["best fixed rival"].append(f"`{best.name}`")
        rows[ours].append(f"{(best - cells[ours]).sum() / way:.0%}")
        for horizon in HORIZONS:
            gone = (best - reached.loc[cells.index, horizon]).sum()
            rows[horizon].append(f"{gone / way:.0%}")
    table = [f"| | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    table += [f"| {name} | {' | '.join(each)} |" for name, each in rows.items()]
    return "\n".join(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("results", type=Path)
    running.add_argument("--shared", type=Path, required=True)
    running.add_argument("--traces", default=",".join(TRACES))
    running.add_argument("--machines", default=",".join(MACHINES[:3]))
    printing = commands.add_parser("print")
    printing.add_argument("results", type=Path)
    printing.add_argument("--judged", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "run":
        chosen = given.traces.split(","), given.machines.split(",")
        run(given.results, given.shared, *chosen)
    else:
        print(printed(given.results, given.judged))


if __name__ == "__main__":
    main()
