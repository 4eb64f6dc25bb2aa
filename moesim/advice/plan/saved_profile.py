"""An advised machine as a hardware profile, so that replays use the same terms.

`moesim advise` predicts llama.cpp; a replay predicts any policy. Both start from the
rates and floors that specification, probes and measured rows leave: what one layer step
takes there, it takes here. Every number of the file says which latents it was made of
and where these come from.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moesim.advice.times.cache_engine import HostRates
from moesim.advice.times.step_times import (
    busy_cores,
    device_seconds,
    family,
    host_seconds,
    kernels_s,
)
from moesim.advice.times.work import ALL_LAYERS, Setting, decode_work
from moesim.base.errors import AdviceError
from moesim.hwprofiles import paths
from moesim.hwprofiles.lanes import CPU, D2H, GPU, H2D, SSD
from moesim.hwprofiles.profile import HardwareProfile
from moesim.hwprofiles.schema import NumberKind, Quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moesim.advice.answer import Advice
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.times.latents import Predict

# Quartiles of a normal distribution are so many standard deviations apart.
QUARTILES = 1.349
# A row has told something of a latent if it narrowed it to this share.
LEARNED_SHARE = 0.8

# Hidden states there and back. Source: DAOP Table I, 0.02 ms per layer.
ACTIVATION_S = 20e-6
# Intercept of page-locked copies of 1 and 27 MB. Source: crankysmh47/Expertflow.
COPY_LATENCY_S = 1.8e-6
# A layer that both processors share: what a hand-over that waits for nobody saves of
# it, median, least and most of 11 settings on two machines.
SPLIT_S = 44e-6
SPLIT_SPREAD_S = (26e-6, 115e-6)
# Planning of one layer by policies that decide at run time: a line through moesim's own
# limits, 25 us at 8 active experts and 120 us at 128.
PLANNING_S = 18.7e-6
PLANNING_PER_EXPERT_S = 0.79e-6
# Placed once at the start, so nothing is decided in a layer step.
STATIC_POLICIES = ("layer-wise", "fixed-mapping", "all-cpu")

WORKERS = {
    "control": ("control",),
    CPU.name: (CPU.name,),
    GPU.lane(): (GPU.lane(),),
    H2D.lane(): (H2D.lane(),),
    D2H.lane(): (D2H.lane(),),
    SSD.name: (SSD.name,),
}
BUSY_WORKERS = 3
"""Planning, computing and reading keep a core busy each."""

STAGING_EXPERTS = 2


def profile_of_advice(advice: Advice) -> HardwareProfile:
    """Describe the advised machine as a profile for replays of the advised model.

    Args:
        advice: with its best setting, whose threads and formats the rates are for.

    Raises:
        AdviceError: a machine without a card that has memory of its own.
    """
    machine = advice.machine
    if not machine.graphics or machine.unified:
        raise AdviceError(
            f"--save-profile: {machine.name} has no graphics card with memory of its"
            " own, and replays place experts on one; `moesim profile` describes"
            " machines that compute on the CPU alone"
        )

    numbers = _Numbers(advice)
    grade = advice.grade.value
    return HardwareProfile(
        name=machine.name,
        kind="datasheet" if grade == "spec" else "measured",
        description=(
            f"{machine.name}, as moesim advise knows it ({grade}) for"
            f" {advice.model.name} under llama.cpp"
        ),
        date=numbers.date,
        accelerator="cuda",
        workers=WORKERS,
        numbers=numbers.all(),
    )


def replay_command(advice: Advice, file: str) -> str:
    """Return the line that replays the advised placement with a saved profile."""
    ratio = cache_ratio(advice.model, advice.best.candidate.setting)
    return (
        f"moesim replay TRACE --hw {file} --policy llama.cpp --cache-ratio {ratio:.4g}"
    )


def cache_ratio(model: ModelContents, setting: Setting) -> float:
    """Return the share of all experts' bytes that holds the setting's GPU layers."""
    on_host = set(setting.on_host(model))
    sizes = {at: model.layers[at].expert_bytes for at in model.moe_layers}
    pool = sum(size for at, size in sizes.items() if at not in on_host)
    # Rounded up: a byte too few would put a whole layer on the CPU.
    return min(1.0, math.ceil(1e4 * pool / sum(sizes.values())) / 1e4)


@dataclass(frozen=True)
class _Source:
    """Where a latent's value comes from, as provenance of a profile's number."""

    kind: NumberKind
    words: str
    samples: int | None = None


def _families(prefix: str, formats: Iterable[str]) -> list[str]:
    """Name the latents of weight formats, each family once."""
    return list(dict.fromkeys(f"{prefix}:{family(name)}" for name in formats))


class _Numbers:
    """Builds the numbers of one profile."""

    def __init__(self, advice: Advice) -> None:
        self.advice = advice
        self.beliefs = advice.forecast.beliefs
        self.date = dt.datetime.now(tz=dt.UTC).date().isoformat()
        self.setting = advice.best.candidate.setting

    def all(self) -> dict[str, Quantity]:
        """Return path -> number."""
        return {
            **self._memories(),
            **self._compute_lanes(),
            **self._links(),
            **self._control(),
            **self._contention(),
            **self._probes(),
        }

    # --- provenance

    def _source(self, latent: str) -> _Source:
        prior = self.beliefs.priors[latent]
        rows = len(self.advice.observed.used)
        narrowed = self.beliefs.spread(latent) < LEARNED_SHARE * prior.spread
        if rows and narrowed:
            words = f"{latent} learned from {rows} rows of llama-bench"
            return _Source("measured", words, rows)

        words = f"{latent}: {prior.why}"
        if "probed" in prior.why:
            return _Source("published", words)
        rated = latent in {"host_read", "device_read", "upload"}
        return _Source("datasheet" if rated else "assumed", words)

    def _number(self, predict: Predict, latents: Sequence[str], words: str) -> Quantity:
        """State a number made of latents; it is as good as the first of them."""
        sources = [self._source(latent) for latent in latents]
        text = "; ".join([words, *dict.fromkeys(source.words for source in sources)])
        # Rows tie latents together, so the product is known better than its factors.
        known = self.beliefs.predict(predict, latents)
        first = sources[0]
        if first.kind != "measured":
            return Quantity(known.value, first.kind, text)
        return Quantity(
            known.value,
            first.kind,
            text,
            samples=first.samples,
            spread=QUARTILES * known.spread * known.value,
            date=self.date,
        )

    # --- numbers by part of the machine

    def _memories(self) -> dict[str, Quantity]:
        bill = self.advice.best.candidate.bill
        processor = self.advice.machine.processor
        cores = processor.cores + processor.small_cores
        gpu_bytes = int(bill.gpu["experts"] + max(0.0, bill.gpu_left))
        host_bytes = self.advice.model.expert_bytes
        host_words = "room for every expert; the size of host memory was not given"
        if bill.host_left is not None:
            host_bytes = int(bill.host["experts"] + max(0.0, bill.host_left))
            host_words = "what system and program leave of host memory"
        return {
            paths.CORES: Quantity(
                max(BUSY_WORKERS, cores), "datasheet", f"cores of {processor.name}"
            ),
            paths.GPU_BYTES: Quantity(
                gpu_bytes, "assumed", "what the advised setting leaves to experts"
            ),
            paths.HOST_BYTES: Quantity(host_bytes, "assumed", host_words),
            paths.STAGING_EXPERTS: Quantity(
                STAGING_EXPERTS,
                "assumed",
                "one expert computing while the next arrives",
            ),
        }

    def _compute_lanes(self) -> dict[str, Quantity]:
        model = self.advice.model
        machine = self.advice.machine
        experts: Counter[str] = Counter()
        other: Counter[str] = Counter({model.head_format: model.head_bytes})
        for layer in model.layers:
            experts.update(layer.expert_formats)
            other.update(layer.dense_formats)
        cpu = paths.roofline(CPU.name)
        gpu = paths.roofline(GPU.name)
        dense = paths.roofline(paths.DENSE)

        cores = _families("core", experts)
        reading = ("device_read", "device_reach")
        cpu_rate = self._number(
            lambda rates: (
                experts.total() / host_seconds(experts, machine, self.setting, rates)
            ),
            ("host_read", "host_reach", *cores),
            f"experts in {' '.join(experts)} on {machine.processor.name}",
        )
        gpu_rate = self._number(
            lambda rates: experts.total() / device_seconds(experts, rates),
            (*reading, *_families("reach", experts)),
            f"experts in {' '.join(experts)} on the card",
        )
        dense_rate = self._number(
            lambda rates: other.total() / device_seconds(other, rates),
            (*reading, *_families("reach", other)),
            f"other weights in {' '.join(other)} on the card",
        )

        cores_busy = busy_cores(machine, self.setting.threads)
        cpu_flops = self._number(
            lambda rates: cores_busy * rates["core_flops"],
            ("core_flops",),
            f"products on {cores_busy:g} cores",
        )
        gpu_flops = self._number(
            lambda rates: machine.device_flops * rates["flops_reach"],
            ("flops_reach",),
            "products on the card",
        )
        together = "all experts of a layer are one product: see dense.overhead_s"
        return {
            cpu.bytes_per_s: cpu_rate,
            cpu.flops_per_s: cpu_flops,
            cpu.overhead_s: Quantity(0.0, "assumed", "contained in cpu.first_s"),
            paths.first_s(CPU.name): self._number(
                # A latent may be learned to be less; no time is below zero.
                lambda rates: max(1e-9, rates["floor_s"] - ACTIVATION_S),
                ("floor_s",),
                "floor of a layer on the CPU without the hidden states' way",
            ),
            gpu.bytes_per_s: gpu_rate,
            gpu.flops_per_s: gpu_flops,
            gpu.overhead_s: Quantity(0.0, "assumed", together),
            dense.bytes_per_s: dense_rate,
            dense.flops_per_s: gpu_flops,
            dense.overhead_s: self._kernels(),
        }

    def _kernels(self) -> Quantity:
        """Kernels of a layer, with what a step takes once shared out."""
        model = self.advice.model
        on_card = replace(self.setting, gpu_layers=ALL_LAYERS)
        work = decode_work(model, on_card)
        # A replay charges it for every MoE layer and once for the head.
        times = len(model.moe_layers) + 1
        latents = ["layer_s", "step_s"]
        if work.device_recurrent:
            latents.append("recurrent_ratio")
        if work.device_latent:
            latents.append("latent_ratio")

        def seconds(rates: Mapping[str, float]) -> float:
            return (kernels_s(work, rates) + rates["step_s"]) / times

        words = f"kernels of {len(model.layers)} layers and of a step, over {times}"
        return self._number(seconds, latents, words)

    def _links(self) -> dict[str, Quantity]:
        latency = Quantity(
            COPY_LATENCY_S,
            "published",
            "intercept of page-locked copies on RTX 5060 Ti,"
            " crankysmh47/Expertflow docs/evidence/q4-expert-transfer.md (MIT)",
        )
        rate = self._number(
            lambda rates: rates["upload"], ("upload",), "copies between the memories"
        )
        numbers: dict[str, Quantity] = {}
        for lane in (H2D.name, D2H.name):
            link = paths.link(lane)
            numbers |= {link.latency_s: latency, link.bytes_per_s: rate}

        activation = paths.link(paths.ACTIVATION)
        numbers[activation.latency_s] = Quantity(
            min(ACTIVATION_S, self.beliefs.median("floor_s")),
            "published",
            "DAOP Table I: expert IO transition 0.02 ms per layer, both ways",
        )
        numbers[activation.bytes_per_s] = rate
        return numbers

    def _control(self) -> dict[str, Quantity]:
        contained = "contained in dense.overhead_s and cpu.first_s: whole-layer kernels"
        limits = "line through moesim's own limits for planning one layer, 25 us at 8"
        limits += " active experts and 120 us at 128; measure to know"
        planning = paths.planning(paths.DEFAULT_POLICY)
        numbers = {
            paths.PER_OPERATION_S: Quantity(0.0, "assumed", contained),
            paths.FIRST_OPERATION.base_s: Quantity(0.0, "assumed", contained),
            paths.JOIN.base_s: Quantity(0.0, "assumed", contained),
            paths.SPLIT_S: Quantity(
                SPLIT_S,
                "published",
                "decode with a split graph against a mailbox (A10, nine settings) and"
                " with helpers that the host signals against the GPU's signals (RTX"
                " 5090, two), per layer, harshithkantamneni/moe-speed-of-light"
                " prereg/a10_mb/scored.json, ablation_outcome_087.md (MIT)",
                interval=SPLIT_SPREAD_S,
            ),
            planning.base_s: Quantity(PLANNING_S, "assumed", limits),
            planning.per_expert_s: Quantity(PLANNING_PER_EXPERT_S, "assumed", limits),
        }
        static = "placed once at the start: nothing is decided in a layer step"
        for policy in STATIC_POLICIES:
            base = paths.planning(policy).base_s
            numbers[base] = Quantity(0.0, "assumed", static)
        return numbers

    def _contention(self) -> dict[str, Quantity]:
        """How much reads and copies slow each other down."""
        probes = self.advice.machine.probes
        read = self.beliefs.median("host_read") * self.beliefs.median("host_reach")
        beside = probes.host_beside_link
        both = None
        words = "assumed: both together read a quarter of the smaller rate more"
        kind: NumberKind = "assumed"
        if beside is not None and probes.link_beside_host is not None:
            both = beside + probes.link_beside_host
            words = "probed: reads and copies at the same time"
            kind = "published"
        host = HostRates.of(read, self.beliefs.median("upload"), both, beside)
        slower = {
            (CPU.name, H2D.name): host.cpu / host.cpu_beside,
            (H2D.name, CPU.name): host.link / host.link_beside,
        }
        return {
            paths.contention(*lanes): Quantity(max(1.0, factor), kind, words)
            for lanes, factor in slower.items()
        }

    def _probes(self) -> dict[str, Quantity]:
        """Keep what was probed, so that advice from this file starts where it began."""
        probes = self.advice.machine.probes
        rates: Mapping[str, float | None] = {
            **{
                paths.host_read(threads): rate
                for threads, rate in probes.host_read.items()
            },
            paths.LINK_PAGE_LOCKED: probes.link,
            paths.LINK_PAGEABLE: probes.pageable,
            paths.DEVICE_READ: probes.device_read,
            paths.HOST_BESIDE_LINK: probes.host_beside_link,
            paths.LINK_BESIDE_HOST: probes.link_beside_host,
        }
        return {
            path: Quantity(rate, "published", "probed on the machine")
            for path, rate in rates.items()
            if rate is not None
        }
