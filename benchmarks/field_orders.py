"""Orders of policies that other people's cards showed, replayed on profiles of their
machines: ``python -m benchmarks.field_orders``.

A profile is what `moesim advise` makes of a machine's words, with the rates that the
source states in the place of its own; nothing is fitted to the order. Caches have the
sizes with which their policy misses as often as was stated. The turning point is the
cost of a shared layer (`costs.dispatch.split_s`) at which both policies are equal, the
implied one that with which they differ by as much as measured. The last row takes what
the first policy's speed leaves unexplained in a layer for the cost of submitting one
chain, and charges it for both chains where there are two.
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
from moesim.hwprofiles.lanes import CPU, H2D
from moesim.hwprofiles.schema import Quantity
from moesim.policies import systems
from moesim.runs.replay import replay
from moesim.traces.importers import import_trace
from moesim.traces.models import model_shape
from moesim.traces.synthetic.generate import synth

if TYPE_CHECKING:
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

PUBLISHED_S = (0.0, 26e-6, 44e-6, 115e-6)
"""None, least, median and most that shared layers were measured to cost elsewhere; see
`moesim.advice.plan.saved_profile`.
"""


class Arm(NamedTuple):
    """A policy, its tokens/s, and its share of misses or the cache's of experts."""

    policy: str
    measured: tuple[float, float]
    misses: float | None = None
    cache_ratio: float = 0.2


@dataclass(frozen=True)
class Order:
    """Two policies on one machine.

    Attributes:
        name: of the field's case.
        words: the machine, as `moesim advise` takes it.
        model, quant: its file.
        first, second: what was compared.
        stated: path of a profile's number -> what the source states of it.
        warm: whether the cache holds the most used experts.
    """

    name: str
    words: dict[str, str]
    model: str
    quant: str
    first: Arm
    second: Arm
    stated: dict[str, float] = field(default_factory=dict)
    warm: bool = False


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
        first=Arm(FETCH, (14.9, 14.9), misses=0.69),
        second=Arm(SPLIT, (12.8, 12.8), cache_ratio=0.1),
        stated={
            paths.roofline(CPU.name).bytes_per_s: 63.8e9,
            paths.link(H2D.name).bytes_per_s: 24.9e9,
            paths.contention(CPU.name, H2D.name): 63.8 / 54.0,
            paths.contention(H2D.name, CPU.name): 24.9 / 23.9,
        },
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
        quant="UD-Q4_K_XL",
        first=Arm(FETCH, (23.1, 23.1), cache_ratio=0.1),
        second=Arm(SPLIT, (33.5, 33.5), cache_ratio=0.1),
    ),
    Order(
        name="D3",
        words={"cpu": "Ryzen 7 7800X3D", "ram": "2x32GB DDR5-6000", "gpu": "RTX 4090"},
        model="gemma-4-26b-a4b",
        quant="bf16",
        first=Arm(FETCH, (15.4, 16.0), cache_ratio=0.3),
        second=Arm(SPLIT, (13.8, 15.9), cache_ratio=0.3),
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
        warm=True,
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
            source = f"stated with the field's case {order.name}"
            self.profile.numbers[path] = Quantity(value, "published", source)
        self._ratios: dict[Arm, float] = {}

    @property
    def own_split_s(self) -> float:
        """What the profile says that a shared layer costs."""
        return self.profile.numbers[paths.SPLIT_S].value

    def metrics(
        self, arm: Arm, split_s: float, ratio: float, chain_s: float = 0.0
    ) -> dict[str, Any]:
        """Replay one policy; `chain_s` is more for each chain of a layer."""
        own = self.profile.numbers
        layer_s = paths.roofline(paths.DENSE).overhead_s
        numbers = {
            **own,
            paths.SPLIT_S: replace(own[paths.SPLIT_S], value=split_s + chain_s),
            layer_s: replace(own[layer_s], value=own[layer_s].value + chain_s),
        }
        whole = replace(systems.SYSTEMS[CACHED], whole_layers=7)
        with patch.dict(systems.SYSTEMS, {SEVEN_WHOLE: whole}):
            run = replay(
                self.trace,
                arm.policy,
                hw=replace(self.profile, numbers=numbers),
                cache_ratio=ratio,
                warm=self.trace if self.order.warm else None,
                keep=False,
            )
        return run.metrics

    def ratio(self, arm: Arm) -> float:
        """The cache with which a policy misses as often as was stated, within one
        thousandth of all experts.
        """
        if arm.misses is None:
            return arm.cache_ratio
        if arm not in self._ratios:
            low, high = 0.0, 1.0
            while high - low > 1e-3:
                middle = (low + high) / 2
                hits = self.metrics(arm, 0.0, middle)["hit_rate_active"]
                low, high = (middle, high) if hits < 1 - arm.misses else (low, middle)
            self._ratios[arm] = high
        return self._ratios[arm]

    def token_s(self, arm: Arm, split_s: float, chain_s: float = 0.0) -> float:
        """Seconds of a generated token."""
        metrics = self.metrics(arm, split_s, self.ratio(arm), chain_s)
        return float(metrics["tpot_s"])

    def chain_s(self) -> float:
        """What the first policy's speed leaves unexplained, by layer."""
        first = self.order.first
        measured_s = 2.0 / sum(first.measured)
        layers = model_shape(self.order.model).layers
        rest_s = measured_s - self.token_s(first, self.own_split_s)
        return max(0.0, rest_s / layers)

    def differ_s(self, split_s: float) -> float:
        """By how much the second policy's token takes longer."""
        first, second = self.order.first, self.order.second
        return self.token_s(second, split_s) - self.token_s(first, split_s)

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


def measured_difference_s(order: Order) -> tuple[float, float]:
    """Least and most by which the second policy's token took longer."""
    least = 1 / order.second.measured[1] - 1 / order.first.measured[0]
    most = 1 / order.second.measured[0] - 1 / order.first.measured[1]
    return least, most


def main() -> None:
    """Print a row for each order and cost of a shared layer."""
    print("| case | policies | measured | split_s | tokens/s | |")
    print("|---|---|---|--:|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for order in ORDERS:
            bench = Bench(order, Path(name))
            arms = order.first, order.second
            shown = " / ".join(arm.policy for arm in arms)
            measured = " / ".join(
                f"{low}" if low == high else f"{low}-{high}"
                for low, high in (arm.measured for arm in arms)
            )
            chain_s = bench.chain_s()
            costs = [(split_s, 0.0) for split_s in PUBLISHED_S]
            for split_s, more_s in (*costs, (bench.own_split_s, chain_s)):
                speeds = [1 / bench.token_s(arm, split_s, more_s) for arm in arms]
                predicted = " / ".join(f"{speed:.1f}" for speed in speeds)
                words = f"and {_us(more_s)} a chain" if more_s else ""
                print(
                    f"| {order.name} | {shown} | {measured} | {_us(split_s)} |"
                    f" {predicted} | {words} |"
                )
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
