"""Systems: named compositions of four policies that stand for a paper or a program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from moesim.base.text import did_you_mean, one_expected
from moesim.hwprofiles.costs import Kernels
from moesim.policies.base import PolicyError
from moesim.policies.registry import KINDS, knows, name_in, names, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moesim.policies.base import (
        AssignmentPolicy,
        CachePolicy,
        Policy,
        PrefetchPolicy,
        RoutingPolicy,
    )
    from moesim.traces.format.schema import ModelShape


@dataclass(slots=True)
class Policies:
    """One instance of each policy that a run needs; one cache policy per memory.

    `writes_back`: experts that leave a GPU's cache are copied to host memory, as their
    system does it; see `System`, for `fixed_graph` and `draft_experts` too.
    """

    assignment: AssignmentPolicy
    prefetch: PrefetchPolicy
    caches: list[CachePolicy]
    routing: RoutingPolicy
    host_cache: CachePolicy | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    writes_back: bool = False
    fixed_graph: bool = False
    draft_experts: int = 1

    def all(self) -> list[Policy]:
        """Every instance."""
        policies: list[Policy] = [
            self.assignment,
            self.prefetch,
            *self.caches,
            self.routing,
        ]
        if self.host_cache is not None:
            policies.append(self.host_cache)
        return policies

    def remarks(self) -> list[str]:
        """What the policies have to say about a run that has ended, without repeats."""
        lines = [line for policy in self.all() for line in policy.remarks()]
        return list(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True)
class System:
    """Four policy specifications, and where they depart from their source.

    Attributes:
        assignment, cache, prefetch, routing: registered names with parameters, as on
            the command line: ``lfu:variant=perfect``.
        staging: slots beside the cache; None takes the profile's.
        staging_layers: the same in whole layers, for systems that buffer layers;
            `staging` wins.
        scope: ``layer`` or ``global`` where the source fixes it; None leaves it to the
            user.
        divides_slots: whether layers get slots by their use, where a calibration says
            how (`moesim.policies.cache._slot_shares`).
        whole_layers: first layers that get slots for all their experts before the
            others get any.
        writes_back: whether what leaves a GPU's cache is copied back to host memory,
            though weights never change; the link to the host is charged for it.
        pageable: whether experts lie in pageable host memory, from which copies take
            longer; real runs have page-locked memory all the same.
        kernels: what its own kernels take, with the source; None for the machine's.
            Real runs have those of the runtime all the same.
        fixed_graph: whether a layer that a GPU holds in part runs a chain on either
            device in every step, and a merge, whether or not it misses: its graph is
            built once. An empty chain on the CPU takes what waking it does.
        polls: whether its helpers poll for work (a mailbox), so that a layer which CPU
            and GPU share costs no more to join.
        micro_batch: most prompt tokens of a forward pass; None for whole prompts.
        draft_tokens: tokens that a draft proposes for each decode pass to verify.
        draft_experts: experts of each layer, by what they compute, that drafting a
            token takes beside the dense parts; 0 for as many as a token has.
        note: where the composition departs from its source, and what it needs.
    """

    assignment: str
    cache: str = "lru"
    prefetch: str = "none"
    routing: str = "as-recorded"
    staging: int | None = None
    staging_layers: int = 0
    scope: str | None = None
    divides_slots: bool = False
    whole_layers: int = 0
    writes_back: bool = False
    pageable: bool = False
    kernels: Kernels | None = None
    fixed_graph: bool = False
    polls: bool = False
    micro_batch: int | None = None
    draft_tokens: int = 0
    draft_experts: int = 1
    note: str = ""

    @property
    def keeps_residents(self) -> bool:
        """Whether what a GPU holds from the start stays there for good, so that host
        memory need not hold it too.
        """
        return self.cache.partition(":")[0] == "static"

    @property
    def keeps_work(self) -> bool:
        """Whether it does the work that the model asks for on the machine as it is: its
        own routing and results, kernels of the machine, no drafts of its own.
        """
        if self.kernels is not None or self.draft_tokens:
            return False
        policies = self.build(gpus=1, host_cache=None)
        return not (policies.routing.alters or policies.assignment.approximates)

    def staging_slots(self, shape: ModelShape) -> int | None:
        """Staging slots this system asks for; None takes the profile's."""
        whole_layers = self.staging_layers * shape.experts
        # 0 slots, of either kind, is no request.
        return self.staging or whole_layers or None

    def buffer_slots(self) -> int:
        """Staging slots that its prefetch policy needs beside those.

        Raises:
            PolicyError: an unknown name or parameter.
        """
        return cast("PrefetchPolicy", resolve(self.prefetch, "prefetch")).buffer_slots

    def build(self, *, gpus: int, host_cache: str | None) -> Policies:
        """Make fresh instances: one cache policy per GPU, and one for host memory if it
        is limited.

        Raises:
            PolicyError: an unknown name or parameter.
        """
        host = None
        if host_cache is not None:
            host = cast("CachePolicy", resolve(host_cache, "cache"))

        return Policies(
            assignment=cast("AssignmentPolicy", resolve(self.assignment, "assignment")),
            prefetch=cast("PrefetchPolicy", resolve(self.prefetch, "prefetch")),
            # One each: a cache policy's state belongs to one memory.
            caches=[
                cast("CachePolicy", resolve(self.cache, "cache")) for _ in range(gpus)
            ],
            routing=cast("RoutingPolicy", resolve(self.routing, "routing")),
            host_cache=host,
            names={kind: getattr(self, kind) for kind in KINDS},
            writes_back=self.writes_back,
            fixed_graph=self.fixed_graph,
            draft_experts=self.draft_experts,
        )


PARTS = ("cache", "prefetch")
"""What may follow the name of a policy, each behind a plus sign."""

# Notes are printed by `moesim list systems`: they say what a user must know before
# comparing a figure with the source's.
SYSTEMS = {
    # Published systems that divide experts between GPU and CPU.
    "dali": System(
        assignment="greedy",
        cache="workload-window:window=4,swaps=8",
        prefetch="residual:size=4",
        # For demand; prefetched experts wait in as many more as are asked for.
        staging=4,
        note=(
            "published for DeepSeek and Qwen; Mixtral has swaps=1, size=1. Prefetched"
            " experts wait in a buffer of their own, beside the cache"
        ),
    ),
    "dali-ktransformers": System(
        assignment="layer-wise",
        cache="static:fill=last",
        scope="global",
        kernels=Kernels(
            cpu=1 / 1.25,
            source=(
                "KTransformers (SOSP 2025): decode 1.25 to 4.09 times as fast as"
                " others, with AMX and AVX-512; the least of them, as few machines have"
                " either"
            ),
        ),
        note=(
            "KTransformers as DALI reads it and compares with: whole layers, the first"
            " ones on the CPU, with processor kernels 1.25 times as fast"
        ),
    ),
    "dali-hybrimoe": System(
        assignment="static-threshold",
        cache="mrs:fill=lowest",
        prefetch="next-gate:size=4",
        note=(
            "HybriMoE as DALI reads it and compares with: every expert goes where it"
            " alone is sooner, prefetched by the next gate on this layer's input. How"
            " many DALI lets it prefetch is not stated: 4, as DALI itself"
        ),
    ),
    "hybrimoe": System(
        assignment="hybrimoe-schedule",
        cache="mrs:fill=lowest",
        prefetch="impact",
        note=(
            "as the paper describes it, the operation that ends first next; prefetches"
            " that have not started are chosen anew at every layer; starts with the"
            " lowest ids, as the code"
        ),
    ),
    "hybrimoe-released": System(
        assignment="hybrimoe-released",
        cache="mrs:first-row=true,tie=touched,fill=lowest",
        note=(
            "as the code does it, its prefetch off as in its own example; --prefetch"
            " hybrimoe-released turns it on"
        ),
    ),
    "daop": System(
        assignment="daop",
        cache="prefill-swap",
        routing="graceful-degradation",
        # Slots that do not divide evenly go to the most frequent experts of all.
        scope="global",
        writes_back=True,
        note=(
            "later layers keep the recorded routing. --warm gives the calibrated"
            " placement"
        ),
    ),
    "smoe": System(
        assignment="smoe-balancer",
        cache="score-window",
        prefetch="partial-hidden",
        routing="expert-cache-router:alpha=0.3",
        # Prefill loads a layer while the one before computes.
        staging_layers=1,
        note=(
            "alpha is 0.35, 0.30, 0.25 in settings S1, S2, S3. The next gate on this"
            " layer's input stands in for the partial hidden state, whose attention and"
            " gate are charged. Predictions should foresee the best expert as often as"
            " published (moesim trace predict --recall 0.82 --at 1 --scores); on"
            " Mixtral-like routing what they prefetch is then active as often as"
            " published, too"
        ),
    ),
    "flashmoe": System(
        assignment="on-demand",
        cache="flashmoe",
        note=(
            "its network must be trained first: moesim train-cache TRACE --out DIR,"
            " then --artefacts DIR. Experts live on the SSD: limit --host-memory to"
            " see it"
        ),
    ),
    "fiddler": System(
        assignment="fiddler",
        cache="static",
        scope="global",
        note=(
            "its constants are replaced by this machine's costs. --warm gives the"
            " popular experts"
        ),
    ),
    # Systems and baselines that compute every expert on the GPU.
    "mixtral-offloading": System(
        assignment="on-demand",
        cache="lru",
        # Its four copy buffers.
        staging=4,
        scope="layer",
        writes_back=True,
        note=(
            "as released, without speculative loading (--prefetch next-gate adds the"
            " paper's); evicted experts are copied back, as its code swaps both ways"
        ),
    ),
    "moe-on-demand": System(
        assignment="on-demand",
        cache="static",
        note=(
            "DAOP's baseline: static residents, every miss is copied to staging and"
            " dropped"
        ),
    ),
    "pre-gated": System(
        assignment="on-demand",
        cache="none",
        prefetch="pre-gated",
        # One layer is computed while the next arrives.
        staging_layers=2,
        note=(
            "an oracle, as its gate was retrained to decide one layer early; no cache,"
            " buffers for two layers"
        ),
    ),
    "moe-infinity": System(
        assignment="on-demand",
        cache="moe-infinity",
        prefetch="activation-matrix",
        scope="global",
        note=(
            "its prefetch queue is sorted anew at every layer, and its first eight"
            " stand for all: 0.3 % of time at most. A batch counts as one sequence,"
            " which costs 1.9 % at most: no guess could save more"
        ),
    ),
    "adapmoe": System(
        assignment="on-demand",
        cache="lru",
        prefetch="first-missing",
        routing="adaptive-gating",
        scope="layer",
        divides_slots=True,
        note=(
            "slots are divided by what prefetching and gating leave to each layer where"
            " --artefacts holds prefetch_accuracy and single_share (moesim record"
            " --calibration counts them); layers differ in sensitivity only where it"
            " holds that too"
        ),
    ),
    "finemoe": System(
        assignment="on-demand",
        cache="finemoe",
        prefetch="finemoe",
        scope="global",
        note=(
            "iterations with similar gate probabilities so far foretell the layer three"
            " ahead; finemoe:distance=6 as published for Qwen1.5-MoE, 4 for Phi-3.5."
            " What token embeddings foretell of the first layers is left out, as no"
            " trace holds them"
        ),
    ),
    "fate": System(
        assignment="on-demand",
        cache="arc:fill=lowest",
        prefetch="fate",
        scope="layer",
        whole_layers=4,
        note=(
            "the first four layers are cached whole, as published for Qwen1.5-MoE, the"
            " others alike; the next gate's best experts are prefetched, as many as the"
            " link copies in a layer. Two-bit copies of what few tokens of a prompt"
            " want are left out"
        ),
    ),
    "edgemoe": System(
        assignment="on-demand",
        cache="edgemoe",
        prefetch="statistical:preceding=2",
        # One buffer for all layers, as eviction compares them.
        scope="global",
        note=(
            "the two preceding layers predict. Experts have the bit-widths of the"
            " trace: moesim trace widths gives those of one layer several, by a table"
            " of what narrowing costs, as the paper does, or by rules of ours"
        ),
    ),
    "moe-lightning": System(
        assignment="moe-lightning",
        cache="static",
        prefetch="moe-lightning",
        # One layer's stream is computed while the next arrives.
        staging_layers=2,
        note=(
            "the split of experts and their stream one layer ahead; the batch is the"
            " replay's. What else it searches is bounded: keys and values take 1.2 % of"
            " a pass at 128 tokens of context, and from batch 32 on the link works 95 %"
            " of the time or more, so that micro-batches can save 5.3 % at most"
        ),
    ),
    # Programs in use.
    "llama.cpp": System(
        assignment="layer-wise:upload_tokens=32",
        cache="static:fill=last",
        scope="global",
        # The used experts of one uploaded layer.
        staging_layers=1,
        pageable=True,
        micro_batch=512,
        note=(
            "the last layers that fit, whole and from the start, as -ngl; from 32"
            " tokens on the other layers' used experts are uploaded, from pageable"
            " memory, once per micro-batch of a prompt: 512 tokens, or --micro-batch"
            " as its -ub"
        ),
    ),
    "llama.cpp-no-mmap": System(
        assignment="layer-wise:upload_tokens=32",
        cache="static:fill=last",
        scope="global",
        staging_layers=1,
        micro_batch=512,
        note="as llama.cpp, with --no-mmap and page-locked buffers",
    ),
    "ik_llama.cpp": System(
        assignment="layer-wise:upload_tokens=32,counted=expert",
        cache="static:fill=last",
        scope="global",
        staging_layers=1,
        pageable=True,
        micro_batch=512,
        note=(
            "as llama.cpp, but uploads from 32 tokens per expert in the mean, 32 E / K"
            " of a step"
        ),
    ),
    "freetoken": System(
        assignment="fetch-split",
        cache="lru",
        note=(
            "its hybrid mode: each step's misses are split between link and CPU by"
            " their speeds beside each other, which the profile's contention tells"
        ),
    ),
    "krasis": System(
        assignment="fixed-mapping:prefill=gpu",
        cache="static",
        prefetch="whole-layer:phase=prefill",
        # One layer is computed while the next arrives.
        staging_layers=2,
        note=(
            "prefill streams every layer whole through the GPU, whatever the prompt's"
            " length; decode computes the popular experts there (--warm) and the others"
            " on the CPU"
        ),
    ),
    "ktransformers": System(
        assignment="fixed-mapping",
        cache="static",
        scope="layer",
        note=(
            "kt-kernel's masks with as many experts on the GPU in each layer, the"
            " popular ones with --warm; its faster CPU kernels belong in the hardware"
            " profile. DALI models it as layer-wise"
        ),
    ),
    "ktransformers-deferral": System(
        assignment="fixed-mapping:defer=2",
        cache="static",
        scope="layer",
        note=(
            "ktransformers with expert deferral: in decode the results of each token's"
            " two lowest-scored experts join one layer later, where the CPU computes"
            " them; fixed-mapping:defer=N+static for another number. It alters answers:"
            " moesim quality says by how much"
        ),
    ),
    "dfa-cache": System(
        assignment="fixed-mapping",
        cache="decayed-frequency",
        scope="layer",
        polls=True,
        note=(
            "moe-speed-of-light's cache for llama.cpp: misses on the CPU beside the"
            " GPU's hits, frequent ones copied later. Its table by machine of how many"
            " misses to copy at once: fetch-split:table=0/1/1/2/3+decayed-frequency"
        ),
    ),
    "llama.cpp-moe-cache": System(
        assignment="fixed-mapping:prefill=gpu",
        cache="static",
        scope="layer",
        fixed_graph=True,
        micro_batch=512,
        note=(
            "llama.cpp's expert-cache forks (--moe-cache-slots): each layer's most used"
            " experts on the GPU from the start, by a profile (--warm), misses on the"
            " CPU. Its graph is built once, so a layer that is cached in part runs both"
            " chains and merges them in every step, a layer held whole one"
        ),
    ),
    # Ours.
    "recall": System(
        assignment="hybrimoe-schedule:contention=true",
        cache="recall",
        prefetch="recall",
        note=(
            "ours: the routing of this token so far is compared with that of the last"
            " ones, whose deeper layers and next tokens say what is streamed and what"
            " stays; no gate is evaluated, nothing is trained; docs/explanation/"
            "recall.md"
        ),
    ),
    "clairvoyant": System(
        assignment="hybrimoe-schedule:contention=true",
        cache="foresight",
        prefetch="foresight",
        note=(
            "ours, an oracle: knows the whole routing, and copies behind the work what"
            " is used soon and often. A replay tries some twenty settings of its rules"
            " and keeps the fastest, unless a part is given: the ceiling that `moesim"
            " gap` measures against; docs/explanation/gap.md"
        ),
    ),
    # Systems that speculate: a draft proposes tokens, one pass verifies them.
    "sp-moe": System(
        assignment="on-demand",
        cache="lru",
        prefetch="sp-moe",
        draft_tokens=4,
        note=(
            "speculative decoding, 4 drafted tokens unless --draft-tokens says"
            " otherwise, kept with --acceptance; what the draft knows of the experts is"
            " drawn with a stated accuracy; tokens that are not kept have the routing"
            " of those in their place; the draft costs dense parts and one expert a"
            " layer, and no memory"
        ),
    ),
    "moe-speq": System(
        assignment="on-demand",
        cache="lru",
        prefetch="moe-speq",
        draft_tokens=4,
        draft_experts=0,
        note=(
            "as sp-moe, but the draft is the model itself in few bits, so it knows all"
            " layers; its governor is --draft-tokens swept by hand; the draft costs"
            " what the model's resident experts would, and no memory"
        ),
    ),
    "deepspeed": System(
        assignment="on-demand",
        cache="none",
        prefetch="whole-layer",
        # One layer is computed while the next arrives.
        staging_layers=2,
        note=(
            "every layer is moved complete while the one before computes, and its"
            " products wait for all of it; dense parts stay on the GPU"
        ),
    ),
}


def compose(
    policy: str,
    *,
    cache: str | None = None,
    prefetch: str | None = None,
    routing: str | None = None,
) -> System:
    """Take a system or an assignment policy by name, and replace parts of it.

    Args:
        policy: the name; ``greedy+lru+residual`` names cache and prefetch, too.
        cache, prefetch, routing: what replaces the system's own, where given.

    Raises:
        PolicyError: `policy` is neither, or a part is given twice.
    """
    name, *parts = policy.split("+")
    given = {"cache": cache, "prefetch": prefetch, "routing": routing}
    if len(parts) > len(PARTS):
        raise PolicyError(
            f"policy {policy!r}: expected at most assignment+{'+'.join(PARTS)}"
        )
    # An empty part, as in ``greedy++residual``, leaves the system's own.
    for part, spec in zip(PARTS, parts, strict=False):
        if spec and given[part] not in {None, spec}:
            raise PolicyError(
                f"policy {policy!r}: expected its {part} said once, got {given[part]!r}"
                " too; drop one"
            )
        given[part] = spec or given[part]

    base = SYSTEMS.get(name) or _system_of(name)
    return replace(
        base,
        cache=given["cache"] or base.cache,
        prefetch=given["prefetch"] or base.prefetch,
        routing=given["routing"] or base.routing,
    )


def _system_of(assignment: str) -> System:
    """A system of an assignment policy and the defaults.

    Raises:
        PolicyError: there is no such policy, nor a system of that name.
    """
    plain = name_in(assignment)
    # A system takes no parameters: the registry refuses them with its own message.
    is_known = plain in SYSTEMS or knows(plain, "assignment")
    if not (is_known or plain.endswith(".py")):
        known = [*names("assignment"), *SYSTEMS]
        hint = did_you_mean(plain, known)
        raise PolicyError(
            f"unknown policy {plain!r}{hint}; `moesim list systems` and `moesim list"
            f" assignment` print all{one_expected(plain, 'policy')}"
        )
    return System(assignment=assignment)
