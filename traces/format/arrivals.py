"""Requests that arrive while others run: the steps of a batch that is formed as they
come.

A request waits until there is room in the batch. At the end of a step those that wait
join: their prompts are computed in one step of their own, and afterwards they generate
with the others. A request leaves with its last token.

Source: Yu et al., *Orca* (iteration-level scheduling); prompts go first as in vLLM's
default scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesim.base.errors import TraceError
from moesim.base.inputs import read_text
from moesim.traces.format.batch import SequenceGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from moesim.traces.format.batch import RoutedStep
    from moesim.traces.format.reader import SequenceRows, Trace

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing runs until the next request arrives.

    Attributes:
        until_s: when that is.
    """

    until_s: float


@dataclass(slots=True)
class Request:
    """One sequence as a request.

    Attributes:
        arrival_s: when it came.
        prompt: tokens of its prompt.
        due: tokens that it generates in decode steps.
        decoded: those of them that it has.
        begin_s: when its prompt began to be computed; NaN before.
        first_s: when its first token was there; NaN before.
        last_s: when its last token was there; NaN before.
        generated: tokens made after the first.
        is_served: whether it has all its tokens.
    """

    arrival_s: float
    prompt: int = 0
    due: int = 0
    decoded: int = 0
    begin_s: float = math.nan
    first_s: float = math.nan
    last_s: float = math.nan
    generated: int = 0
    is_served: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to first token, waiting included."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Seconds per later token; NaN where there is none."""
        later = self.generated
        return (self.last_s - self.first_s) / later if later else math.nan


def arrival_times(arrivals: str, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive.

    Args:
        arrivals: ``poisson:RATE`` with requests per second, or a file with one number
            of seconds per line, ascending; then sequences beyond its end do not arrive.
        seed: of the draws.

    Raises:
        TraceError: neither.
    """
    kind, _, rate = arrivals.partition(":")
    if kind != "poisson":
        return iter(_times_of(Path(arrivals)))
    try:
        per_s = float(rate)
    except ValueError:
        per_s = math.nan
    if not 0 < per_s < math.inf:
        raise TraceError(
            f"arrivals: expected poisson:RATE with a rate > 0 such as poisson:2, got"
            f" {arrivals!r}"
        )
    return _poisson(per_s, np.random.default_rng(seed))


def _poisson(per_s: float, rng: np.random.Generator) -> Iterator[float]:
    time_s = 0.0
    while True:
        time_s += float(rng.exponential(1 / per_s))
        yield time_s


def _times_of(file: Path) -> list[float]:
    try:
        lines = read_text(file).split()
        times_s = [float(line) for line in lines]
    except (OSError, UnicodeDecodeError, ValueError):
        times_s = []
    is_ascending = all(a <= b for a, b in pairwise(times_s))
    if (
        not times_s
        or times_s[0] < 0
        or not is_ascending
        or not math.isfinite(times_s[-1])
    ):
        raise TraceError(
            f"arrivals: expected poisson:RATE, or a file with one number of seconds per"
            f" line, ascending; got {str(file)!r}"
        )
    return times_s


class RequestSteps:
    """Steps of a batch that is formed as requests come.

    Args:
        trace: each sequence of it is a request.
        times_s: when they arrive, in the order of the trace.
        batch: most requests that run together.
        columns: optional columns that policies need.
        clock: tells the time at which the step before has ended.

    Attributes:
        requests: all that were admitted, in order.
    """

    def __init__(
        self,
        trace: Trace,
        times_s: Iterator[float],
        *,
        batch: int,
        columns: tuple[str, ...],
        clock: Callable[[], float],
    ) -> None:
        self._trace = trace
        self._batch = batch
        self._clock = clock
        self._coming = zip(times_s, trace.sequences(columns), strict=False)
        self._next = next(self._coming, None)
        # Requests that generate, and their rows.
        self._running: list[tuple[Request, SequenceRows]] = []
        # Busy periods so far: a batch, as the metrics count them, ends in idleness.
        self._periods = 0
        self._made = 0
        self.requests: list[Request] = []

    def steps(self, limit: int | None = None) -> Iterator[RoutedStep | Idle]:
        """Steps, and waits between them; the next is asked for when one has ended.

        Args:
            limit: keep the first so many steps.
        """
        while limit is None or self._made < limit:
            joining = list(self._admitted())
            if joining:
                is_computed = yield from self._numbered(self._prefill(joining), limit)
                if is_computed:
                    self._note_first(joining)
            elif self._running:
                group = self._group(self._running)
                step = group.decode_at([each.decoded for each, _ in self._running])
                yield from self._numbered([step], limit)
                self._note_tokens()
            elif self._next is not None:
                if self._made:
                    self._periods += 1
                yield Idle(self._next[0])
            else:
                return

    def _numbered(
        self, steps: Iterable[RoutedStep], limit: int | None
    ) -> Generator[RoutedStep, None, bool]:
        """Number steps; return whether the limit let all of them pass."""
        for step in steps:
            if self._made == limit:
                return False
            step.step = self._made
            self._made += 1
            yield step
        return True

    def _admitted(self) -> Iterator[tuple[Request, SequenceRows]]:
        """Requests that have arrived and find room."""
        room = self._batch - len(self._running)
        while room > 0 and self._next is not None:
            arrival_s, rows = self._next
            if arrival_s > self._clock():
                return
            self._next = next(self._coming, None)
            request = Request(arrival_s)
            self.requests.append(request)
            room -= 1
            yield request, rows

    def _prefill(
        self, joining: list[tuple[Request, SequenceRows]]
    ) -> Iterator[RoutedStep]:
        group = self._group(joining)
        generated = group.generated.tolist()
        for (request, _), prompt, due in zip(
            joining, group.prompts, generated, strict=True
        ):
            request.prompt = prompt
            request.due = due
            request.begin_s = self._clock()
        # A prompt alone is a request, too, which leaves at once; those without a prompt
        # begin to generate at once.
        self._running += [each for each in joining if each[0].due]
        if group.has_prompt:
            yield from group.prefills()

    def _note_first(self, joining: list[tuple[Request, SequenceRows]]) -> None:
        now_s = self._clock()
        for request, _ in joining:
            if request.prompt:
                request.first_s = now_s
                request.last_s = now_s
            request.is_served = not request.due

    def _group(self, requests: list[tuple[Request, SequenceRows]]) -> SequenceGroup:
        rows = [rows for _, rows in requests]
        return SequenceGroup(rows, self._trace.shape, self._trace.passes, self._periods)

    def _note_tokens(self) -> None:
        now_s = self._clock()
        for request, _ in self._running:
            # Without a prompt in the trace the first token is that of a decode step.
            if math.isnan(request.first_s):
                request.first_s = now_s
            else:
                request.generated += 1
            request.last_s = now_s
            request.decoded += 1
            request.is_served = request.decoded == request.due
        self._running = [each for each in self._running if not each[0].is_served]


def request_figures(
    requests: list[Request], slo: dict[str, float], makespan_s: float
) -> dict[str, Any]:
    """Compute what users of a server see.

    Args:
        requests: those that were admitted. Unfinished ones do not count: their times
            are not known yet.
        slo: most ``ttft`` and ``tpot`` seconds that a request may take.
        makespan_s: of the run.

    Returns:
        ``requests`` that were served to their end; means and percentiles of their
        ``ttft_s`` and ``tpot_s``; ``prefill_tokens_per_s_seq`` and
        ``decode_tokens_per_s_seq``, own tokens per own second, mean over requests; the
        share ``slo_attainment`` of requests within both limits, and ``goodput_per_s``,
        such requests per second. None where nothing was served, or without a limit.
    """
    served = [each for each in requests if each.is_served]
    ttft_s = np.array([each.ttft_s for each in served])
    tpot_s = np.array([each.tpot_s for each in served])
    prefill_s = np.array(
        [each.first_s - each.begin_s for each in served if each.prompt]
    )
    prompts = np.array([each.prompt for each in served if each.prompt])
    figures: dict[str, Any] = {
        "requests": len(served),
        "prefill_tokens_per_s_seq": _mean(prompts / prefill_s),
        "decode_tokens_per_s_seq": _mean(1 / tpot_s),
    }
    for name, seconds in (("ttft", ttft_s), ("tpot", tpot_s)):
        known = seconds[~np.isnan(seconds)]
        figures[f"{name}_s"] = _mean(known)
        for percent in PERCENTILES:
            value = float(np.percentile(known, percent)) if len(known) else None
            figures[f"{name}_p{percent}_s"] = value

    figures |= {"slo_attainment": None, "goodput_per_s": None}
    if slo and served:
        # Who generates nothing cannot be too slow at it.
        is_met = (ttft_s <= slo.get("ttft", math.inf)) & ~(
            tpot_s > slo.get("tpot", math.inf)
        )
        figures["slo_attainment"] = float(is_met.mean())
        figures["goodput_per_s"] = float(is_met.sum() / makespan_s)
    return figures


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def parse_slo(text: str | None) -> dict[str, float]:
    """Parse ``ttft=0.5,tpot=0.1``, in seconds.

    Raises:
        TraceError: naming what is expected.
    """
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text else []:
        name, _, value = part.strip().partition("=")
        is_second = name in limits
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in ("ttft", "tpot") or is_second or not limits[name] > 0:
            raise TraceError(
                "slo: expected a limit in seconds of each, such as"
                f" ttft=0.5,tpot=0.1, got {text!r}"
            )
    return limits
