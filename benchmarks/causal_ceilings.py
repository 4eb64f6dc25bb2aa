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
from moesim.machine_code.functions import compiled
from moesim.policies.names import ABSENT, RESIDENT
from moesim.policies.cache.foresight import _victims
from moesim.policies.cache.static import Static
from moesim.policies.compiled import AdmittingCompiledCache
from moesim.policies.foresight import EDGES, NAMED, NEXT_STEP, VALUE, Foresight
from moesim.policies.kernels import (
    ACCESSED,
    PREFETCH,
    REPLACEMENTS,
    CacheKernels,
    KernelView,
    PrefetchKernels,
    State,
    Work,
)
from moesim.policies.prefetch.foresight import ForesightPrefetch, _copies
from moesim.traces.format.reader import open_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

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

# Rows of the scores behind the value.
_SHORT = 1
_LONG = 2

# Places at the end of the numbers.
_TOKENS = -1
_LAYERS = -2
_DECAY = -3
_STEPS = -4
_MARGIN = -5
_DRAWN = -6
"""Where draws begin, one for each use: what is below a recall is foreseen."""
_RECALLS = -10

# Places in the integers, as foresight has them.
_LAYERS_OF_MODEL = 1
_LAST = 2
_USES = 5
_NONE = -1


class Horizon(Foresight):
    """Foresight that is shown a part of what comes."""

    def __init__(
        self, context: RunContext, tokens: int, layers: int, right: float, decay: float
    ) -> None:
        super().__init__(context.future, context, decay)
        state = self.state
        keys = state.scores.shape[1]
        state.marks[NEXT_STEP] = _NONE
        uses = len(context.future.experts)
        layer_steps = len(context.future.edges) - 1
        draws = np.random.default_rng(0).random(uses)
        recalls = np.maximum(RECALLS, right)
        begin = len(state.numbers)
        margin = 0.0
        rules = (begin, margin, layer_steps, decay, layers, tokens)
        self.state = state._replace(
            scores=np.zeros((3, keys)),
            numbers=np.concatenate((state.numbers, draws, recalls, rules)),
        )

    @classmethod
    def shared(cls, context: RunContext, *rules: float) -> State:
        """The horizon of a run, the same for both parts."""
        return context.share((cls, *rules), lambda: cls(context, *rules)).state


@compiled
def _count(state: State, work: Work, first: int, row: int, half_life: float) -> None:
    uses = state.scores[row]
    kept = 0.5 ** (1.0 / half_life)
    for key in range(first, first + state.integers[0]):
        uses[key] *= kept
    for expert in work.experts:
        uses[first + expert] += 1.0 - kept


@compiled
def _see(state: State, work: Work) -> None:
    """Value a layer that a token has passed by what is seen of the next ones, and mark
    what is seen of the coming layers.
    """
    integers = state.integers
    numbers = state.numbers
    scores = state.scores
    edges = state.marks[EDGES]
    layers = integers[_LAYERS_OF_MODEL]
    now = work.step * layers + work.layer
    if integers[_LAST] == now:
        return
    integers[_LAST] = now
    first = work.layer * integers[0]
    _count(state, work, first, _SHORT, HALF_LIVES[0])
    _count(state, work, first, _LONG, HALF_LIVES[1])
    decay = numbers[_DECAY]
    tokens = int(numbers[_TOKENS])
    beyond = decay ** (tokens + 1) / (1.0 - decay)
    for key in range(first, first + integers[0]):
        late = SHARES[0] * scores[_SHORT, key] + SHARES[1] * scores[_LONG, key]
        scores[VALUE, key] = beyond * late
        state.marks[NEXT_STEP, key] = _NONE
    for later in range(tokens, 0, -1):
        layer_step = now + later * layers
        if layer_step >= int(numbers[_STEPS]):
            continue
        for use in range(edges[layer_step], edges[layer_step + 1]):
            key = first + integers[integers[_USES] + 2 * use]
            scores[VALUE, key] += decay**later
            state.marks[NEXT_STEP, key] = work.step + later
    for ahead in range(int(numbers[_LAYERS])):
        layer_step = now + 1 + ahead
        if work.layer + 1 + ahead >= layers:
            break
        coming = (work.layer + 1 + ahead) * integers[0]
        for use in range(edges[layer_step], edges[layer_step + 1]):
            key = coming + integers[integers[_USES] + 2 * use]
            is_seen = (
                numbers[int(numbers[_DRAWN]) + use]
                < numbers[len(numbers) + _RECALLS + ahead]
            )
            if is_seen and state.marks[NEXT_STEP, key] != work.step:
                state.marks[NEXT_STEP, key] = work.step
                scores[VALUE, key] += decay


@compiled(ACCESSED)
def _accessed(state: State, work: Work) -> None:
    _see(state, work)


@compiled(REPLACEMENTS)
def _replacements(
    state: State,
    work: Work,
    states: np.ndarray,
    outgoing: np.ndarray,
    incoming: np.ndarray,
) -> int:
    """Pair the best absent expert of a layer with its worst resident while that gains
    more than the margin.
    """
    values = state.scores[VALUE]
    named = state.marks[NAMED]
    first = work.layer * state.integers[0]
    count = 0
    while True:
        best = -1
        worst = -1
        for key in range(first, first + state.integers[0]):
            if named[key] != 0:
                continue
            if states[key] == ABSENT and (best < 0 or values[key] > values[best]):
                best = key
            if states[key] == RESIDENT and (worst < 0 or values[key] < values[worst]):
                worst = key
        if best < 0 or worst < 0:
            break
        if values[best] - values[worst] <= state.numbers[_MARGIN]:
            break
        outgoing[count] = worst
        incoming[count] = best
        count += 1
        named[worst] = 1
        named[best] = 1
    for n in range(count):
        named[outgoing[n]] = 0
        named[incoming[n]] = 0
    return count


@compiled(PREFETCH)
def _seen_copies(state: State, work: Work, view: KernelView, named: np.ndarray) -> int:
    _see(state, work)
    return _copies(state, work, view, named)


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


class HorizonCache(_Rules, AdmittingCompiledCache):
    """Keep what is worth most by what is seen, and by use of late beyond."""

    oracle: ClassVar[bool] = True
    replaces_by_kernel = True

    def bring(self, context: RunContext) -> CacheKernels:
        """Take the run's horizon, and begin as decayed frequency does."""
        self._initial_content = Static(fill="auto")
        self._initial_content.start(context)
        known = Horizon.shared(context, *self.rules)
        known.numbers[_MARGIN] = self.margin
        return CacheKernels(
            known, victims=_victims, accessed=_accessed, replacements=_replacements
        )

    def initial(self, capacity_slots: np.ndarray) -> np.ndarray:
        """Int64 flat keys, ascending."""
        return self._initial_content.initial(capacity_slots)


class HorizonPrefetch(_Rules, ForesightPrefetch):
    """Copy what is seen, as the clairvoyant system does."""

    def start(self, context: RunContext) -> None:
        """Take the run's horizon."""
        tokens, layers, *_ = self.rules
        # So far its kernel looks: never beyond what is seen.
        layers_of_model = context.shape.layers
        self.tokens = min(2.0, tokens) or (layers + 0.5) / layers_of_model
        super().start(context)
        known = Horizon.shared(context, *self.rules)
        known.numbers[1:3] = self.margin, self.tokens
        self.brought = PrefetchKernels(_seen_copies, known)


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
