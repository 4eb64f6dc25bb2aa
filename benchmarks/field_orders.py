"""Orders of policies that other people's cards showed, replayed on profiles of their
machines: ``python -m benchmarks.field_orders``.

A profile is what `moesim advise` makes of a machine's words, with the rates that the
source states in the place of its own; nothing is fitted to the order. Caches are in
use for long, and have the size with which their policy misses as often as was stated.
Where no misses were stated, they have the size with which the first policy is as fast
as measured, and only the second one's speed is predicted. The turning point is the
cost of a shared layer (`costs.dispatch.split_s`) at which both policies are equal, the
implied one that with which they differ by as much as measured.

Where misses were stated and the first policy is slower than predicted all the same,
each of `CAUSES` is given as much as explains its speed, and nothing else; then the
second policy's speed is predicted. A cause that is the right one predicts it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from scipy.optimize import brentq

from benchmarks.replay_speed import SHARED
from moesim.advice.advise import advise
from moesim.advice.plan.saved_profile import profile_of_advice
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import CPU, GPU, H2D
from moesim.hwprofiles.schema import Quantity
from moesim.policies import systems
from moesim.runs.replay import replay
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.generate import synth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.hwprofiles.profile import HardwareProfile

FLASH_NEXT = "qwen3.8-flash-next"
ROUTING = {
    FLASH_NEXT: "qwen38_flash_next_chat_decode67",
    "qwen3.6-35b-a3b": "qwen36_35b_a3b_coding_prefill28_decode192",
}
"""Models of which routing was recorded; that of others is drawn."""
DRAWN_TOKENS = 100
FETCH = "on-demand+lru"
SPLIT = "fetch-split+lru"
CACHED = "llama.cpp-moe-cache"
SEVEN_WHOLE = f"{CACHED} with 7 whole layers"
"""As `CACHED`, but the first layers have slots for all of their experts."""

UNEXPLAINED = "D1"
"""The order that does not come out."""

PUBLISHED_S = (0.0, 26e-6, 44e-6, 115e-6)
"""None, least, median and most that shared layers were measured to cost elsewhere; see
`moesim.advice.plan.saved_profile`.
"""


class Cause(NamedTuple):
    """What may take the time that a policy's speed leaves unexplained: seconds more of
    some of a profile's numbers, or lower rates.
    """

    name: str
    seconds: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()


_LAYER_S = paths.roofline(paths.DENSE).overhead_s
CHAIN = Cause("each chain of a layer", seconds=(_LAYER_S, paths.SPLIT_S))
CAUSES = (
    CHAIN,
    Cause("each layer, once", seconds=(_LAYER_S,)),
    Cause("each copied expert", seconds=(paths.link(H2D.name).latency_s,)),
    Cause("a slower link", rates=(paths.link(H2D.name).bytes_per_s,)),
    Cause(
        "a slower card",
        rates=tuple(
            paths.roofline(part).bytes_per_s for part in (GPU.name, paths.DENSE)
        ),
    ),
)


class Arm(NamedTuple):
    """A policy, its tokens/s, and its share of misses where that was stated."""

    policy: str
    measured: tuple[float, float]
    misses: float | None = None


@dataclass(frozen=True)
class Order:
    """Two policies on one machine.

    Attributes:
        name: of the field's case.
        words: the machine, as `moesim advise` takes it.
        model, quant: its file.
        first, second: what was compared.
        stated: path of a profile's number -> what the source states of it.
        source: who measured it.
    """

    name: str
    words: dict[str, str]
    model: str
    quant: str
    first: Arm
    second: Arm
    source: str
    stated: dict[str, float] = field(default_factory=dict)


def gigabytes_per_s(
    cpu: tuple[float, float], link: tuple[float, float]
) -> dict[str, float]:
    """Rates of expert products on the CPU and of gathered copies, each alone and while
    the other runs, as a profile's numbers.
    """
    return {
        paths.roofline(CPU.name).bytes_per_s: 1e9 * cpu[0],
        paths.link(H2D.name).bytes_per_s: 1e9 * link[0],
        paths.contention(CPU.name, H2D.name): cpu[0] / cpu[1],
        paths.contention(H2D.name, CPU.name): link[0] / link[1],
    }


ORDERS = (
    Order(
        name="D1",
        words={
            "cpu": "Threadripper PRO 5955WX",
            "ram": "8x32GB DDR4-3200",
            "gpu": "RTX 4090",
        },
        model=FLASH_NEXT,
        quant="nvfp4",
        first=Arm(FETCH, (14.9, 14.9), misses=0.6913),
        second=Arm(SPLIT, (12.75, 12.75), misses=0.4256),
        source="FlashML-org/FreeToken, pull request 232, 2026-08-28",
        stated=gigabytes_per_s(cpu=(63.8, 54.0), link=(24.9, 23.9)),
    ),
    Order(
        name="D2",
        words={
            "cpu": "EPYC 7302",
            "ram": "8x32GB DDR4-3200",
            "gpu": "RTX PRO 4000",
            "pcie": "3.0x16",
        },
        model=FLASH_NEXT,
        quant="nvfp4",
        first=Arm(FETCH, (23.07, 23.07)),
        second=Arm(SPLIT, (33.5, 33.5)),
        source="FlashML-org/FreeToken, issue 436, 2026-09-11",
        stated=gigabytes_per_s(cpu=(29.97, 21.89), link=(13.09, 8.41)),
    ),
    Order(
        name="D3",
        words={
            "cpu": "Ryzen 7 7800X3D",
            "ram": "2x32GB DDR5-6000",
            "gpu": "RTX 4090",
            "system": "wsl 63GB",
        },
        model="gemma-4-26b-a4b",
        quant="bf16",
        first=Arm(FETCH, (15.4, 16.0)),
        second=Arm(SPLIT, (13.8, 15.9)),
        source="FlashML-org/FreeToken, issue 151, 2026-08-24: products 2.27 x the link",
        stated=gigabytes_per_s(cpu=(58.1, 58.1), link=(25.6, 25.6)),
    ),
    Order(
        name="D6",
        words={
            "cpu": "i7-4790K",
            "ram": "32GB DDR3",
            "gpu": "GTX 1080 Ti + GTX 1070",
            "system": "wsl 24GB",
        },
        model="qwen3.6-35b-a3b",
        quant="Q4_K_M",
        first=Arm(CACHED, (25.1, 25.1), misses=1 - 0.9845),
        second=Arm(SEVEN_WHOLE, (29.4, 29.4), misses=1 - 0.9760),
        source="the field's case D6",
    ),
)


class Bench:
    """One order's machine and routing."""

    def __init__(self, order: Order, folder: Path) -> None:
        self.order = order
        self.trace = folder / f"{order.name}.parquet"
        shape = model_shape(order.model, order.quant)
        if order.model in ROUTING:
            source = SHARED / f"{ROUTING[order.model]}.parquet"
            import_trace(source, self.trace, shape=shape)
        else:
            synth(
                self.trace,
                shape=order.model,
                quant=order.quant,
                tokens=DRAWN_TOKENS,
                new_tokens=DRAWN_TOKENS,
            )
        advice = advise(order.model, quant=order.quant, **order.words)
        self.profile: HardwareProfile = profile_of_advice(advice)
        for path, value in order.stated.items():
            self.profile.numbers[path] = Quantity(value, "published", order.source)
        self._ratios: dict[Arm, float] = {}

    def metrics(
        self, arm: Arm, ratio: float, numbers: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Replay one policy with some of the profile's numbers replaced."""
        own = self.profile.numbers
        changed = {
            path: replace(own[path], value=value)
            for path, value in (numbers or {}).items()
        }
        whole = replace(systems.SYSTEMS[CACHED], whole_layers=7)
        with patch.dict(systems.SYSTEMS, {SEVEN_WHOLE: whole}):
            run = replay(
                self.trace,
                arm.policy,
                hw=replace(self.profile, numbers={**own, **changed}),
                cache_ratio=ratio,
                warm=self.trace,
                keep=False,
            )
        return run.metrics

    def ratio(self, arm: Arm) -> float:
        """The cache with which a policy misses as often as was stated, or the first one
        is as fast as measured, within one thousandth of all experts.
        """
        judged = self.order.first if arm.misses is None else arm
        if judged not in self._ratios:
            low, high = 0.0, 1.0
            while high - low > 1e-3:
                middle = (low + high) / 2
                large = self._is_enough(judged, self.metrics(judged, middle))
                low, high = (low, middle) if large else (middle, high)
            self._ratios[judged] = high
        return self._ratios[judged]

    def _is_enough(self, arm: Arm, metrics: dict[str, Any]) -> bool:
        if arm.misses is None:
            return bool(metrics["tpot_s"] <= measured_s(arm))
        return bool(metrics["hit_rate_active"] >= 1 - arm.misses)

    def token_s(self, arm: Arm, numbers: Mapping[str, float] | None = None) -> float:
        """Seconds of a generated token."""
        return float(self.metrics(arm, self.ratio(arm), numbers)["tpot_s"])

    def with_cause(self, cause: Cause, amount: float) -> dict[str, float]:
        """The numbers that a cause changes: so many seconds more, or rates so many
        times lower.
        """
        own = self.profile.numbers
        added = {path: own[path].value + amount for path in cause.seconds}
        lower = {path: own[path].value / (1.0 + amount) for path in cause.rates}
        return added | lower

    def explained(self, cause: Cause) -> float | None:
        """How much of a cause makes the first policy as fast as it was measured: 0
        where it is no slower than predicted, None where no amount does.
        """
        first = self.order.first

        def missing_s(amount: float) -> float:
            numbers = self.with_cause(cause, amount)
            return measured_s(first) - self.token_s(first, numbers)

        most = 0.01 if cause.seconds else 20.0
        if missing_s(0.0) <= 0.0:
            return 0.0
        if missing_s(most) > 0.0:
            return None
        return float(brentq(missing_s, 0.0, most, xtol=1e-7))

    def differ_s(self, split_s: float) -> float:
        """By how much the second policy's token takes longer."""
        numbers = {paths.SPLIT_S: split_s}
        first, second = self.order.first, self.order.second
        return self.token_s(second, numbers) - self.token_s(first, numbers)

    def split_s_of(self, difference_s: float) -> float | None:
        """The cost of a shared layer with which the second policy's token takes so much
        longer; None where no cost up to 10 ms does.
        """
        low, high = self.differ_s(0.0), self.differ_s(0.01)
        if (low - difference_s) * (high - difference_s) > 0.0:
            return None
        return float(
            brentq(lambda s: self.differ_s(s) - difference_s, 0, 0.01, xtol=1e-7)
        )


def measured_s(arm: Arm) -> float:
    """Seconds of a token, at the middle of the stated speeds."""
    return 2.0 / sum(arm.measured)


def measured_difference_s(order: Order) -> tuple[float, float]:
    """Least and most by which the second policy's token took longer."""
    least = 1 / order.second.measured[1] - 1 / order.first.measured[0]
    most = 1 / order.second.measured[0] - 1 / order.first.measured[1]
    return least, most


def main() -> None:
    """Print a row for each order and cost of a shared layer, and for each cause."""
    print("| case | policies | measured | what is added | tokens/s |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for order in ORDERS:
            bench = Bench(order, Path(name))
            arms = order.first, order.second
            measured = " / ".join(
                f"{low}" if low == high else f"{low}-{high}"
                for low, high in (arm.measured for arm in arms)
            )
            shown = " / ".join(arm.policy for arm in arms)
            head = f"| {order.name} | {shown} | {measured}"
            for split_s in PUBLISHED_S:
                numbers = {paths.SPLIT_S: split_s}
                speeds = [1 / bench.token_s(arm, numbers) for arm in arms]
                print(f"{head} | {_us(split_s)} | {speeds[0]:.1f} / {speeds[1]:.1f} |")
            for cause in CAUSES if order.name == UNEXPLAINED else ():
                amount = bench.explained(cause)
                if not amount:
                    print(f"{head} | {cause.name}: {amount} | |")
                    continue
                speed = 1 / bench.token_s(order.second, bench.with_cause(cause, amount))
                words = _us(amount) if cause.seconds else f"{1 + amount:.1f} times"
                print(f"{head} | {cause.name}: {words} | - / {speed:.1f} |")
                if cause is CHAIN:
                    most_s = PUBLISHED_S[-1]
                    numbers = {paths.SPLIT_S: most_s + amount}
                    numbers = bench.with_cause(cause, amount) | numbers
                    speed = 1 / bench.token_s(order.second, numbers)
                    words += f", a shared layer {_us(most_s)}"
                    print(f"{head} | {cause.name}: {words} | - / {speed:.1f} |")
            turning = bench.split_s_of(0.0)
            implied = [bench.split_s_of(each) for each in measured_difference_s(order)]
            print(f"{order.name}: caches of {[round(bench.ratio(a), 3) for a in arms]}")
            print(
                f"{order.name}: equal at {_us(turning)}, as measured at {_us(*implied)}"
            )


def _us(*seconds: float | None) -> str:
    words = ["none" if each is None else f"{1e6 * each:.0f} us" for each in seconds]
    return " to ".join(dict.fromkeys(words))


if __name__ == "__main__":
    main()
