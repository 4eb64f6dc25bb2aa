"""What `advise` and `model` say, as answers: text, JSON, frame, page and figures are
made of them by `moesim.reporting.answers`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from moesim.advice.given.reading import need_words
from moesim.advice.plan.commands import flags_of, layers_in_words, server_command
from moesim.advice.plan.memory import TABLES
from moesim.advice.times.latents import NINETY, Interval
from moesim.advice.times.work import DEFAULT_MICRO_BATCH
from moesim.base.units import format_bytes, ms, number, percent
from moesim.reporting.answers import Answer
from moesim.reporting.figures import LIMIT, Axis, Figure
from moesim.reporting.parts import HEADS, Column, Listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moesim.advice.given.options import Finding
    from moesim.advice.given.reading import Reading
    from moesim.advice.machine import Grade, Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.observed import Explanation, ObservedRows
    from moesim.advice.plan.bound import ByteBound
    from moesim.advice.plan.memory import Job, MemoryBill
    from moesim.advice.plan.ranking import Forecast, Prospect, Question
    from moesim.advice.plan.what_if import WhatIf
    from moesim.advice.times.work import Setting
    from moesim.runs.bound import RoutingBound

OLDER_BUILDS = (
    "llama.cpp from before June 2026: --no-mmap for --load-mode none, -mmp 0 for"
    " -lm none"
)
UNLOCKED = (
    "refused beyond a share of memory by the driver under {}: set"
    " GGML_CUDA_NO_PINNED=1; uploads are then slower, and counted so"
)
TERMS = {
    "step": "start of a step",
    "gpu weights": "GPU reads weights",
    "gpu kernels": "GPU starts kernels",
    "gpu keys and values": "GPU reads keys and values",
    "gpu products": "GPU multiplies",
    "attention": "attention",
    "upload": "upload of experts",
    "ssd": "SSD reads experts",
    "look-up tables": "look-up tables from the file",
    "sampling": "sampling, request by request",
    "cpu experts": "CPU reads experts",
    "cpu floor": "start of CPU layers",
    "cpu other layers": "CPU runs whole layers",
    "cpu keys and values": "CPU reads keys and values",
}
GRADES = {
    "spec": "specification alone",
    "probed": "probes on the machine",
    "observed": "{} measured rows",
}
FINDINGS = {
    "stops": "stops here",
    "ignored": "ignored",
    "contradicts": "contradicts itself",
    "means": "means",
    "note": "note",
}
VERDICTS = {
    "normal": "is normal here",
    "faster": "is faster than expected",
    "slower": "is slow",
}

DECODE = Column("decode_tokens_per_s", HEADS["decode_tokens_per_s"], "tokens/s")
PREFILL = Column("prefill_tokens_per_s", HEADS["prefill_tokens_per_s"], "tokens/s")
INTERVALS = [
    DECODE,
    Column("decode_interval", "90 %"),
    PREFILL,
    Column("prefill_interval", "90 %"),
]


# What was found out.


@dataclass(frozen=True)
class Advice:
    """Everything that was found out.

    Attributes:
        model: contents of the file.
        machine: what is known of it.
        grade: what the speeds rest on.
        job: what shall be done.
        prospects: settings, fastest first.
        curve: speed over layers on the CPU, with the best micro-batch.
        questions: measurements that would tell most.
        what_ifs: what other parts would change.
        observed: rows that were learned from.
        bound: what no schedule beats with the weights where `best` puts them.
        rounded: the fastest setting with rounded keys and values, if that buys speed.
        faster: one nearer to spilling than the bill is sure, if that buys speed.
        routing: what no schedule of a trace beats; None without one.
        forecast: predicts any other setting.
    """

    model: ModelContents
    machine: Machine
    grade: Grade
    job: Job
    prospects: tuple[Prospect, ...]
    curve: tuple[Prospect, ...]
    questions: tuple[Question, ...]
    what_ifs: tuple[WhatIf, ...]
    observed: ObservedRows
    bound: ByteBound
    rounded: Prospect | None
    faster: Prospect | None
    routing: RoutingBound | None
    forecast: Forecast = field(repr=False)

    @property
    def best(self) -> Prospect:
        """The fastest setting."""
        return self.prospects[0]

    def answer(self) -> Answer:
        """Which settings are fastest, as text, page, JSON and figures."""
        return advice_answer(self)

    def _repr_markdown_(self) -> str:
        return self.answer()._repr_markdown_()


@dataclass(frozen=True)
class Verdict:
    """What a measured speed says.

    Attributes:
        measured: tokens per second.
        expected: for the same line.
        causes: states that would give it, the likeliest first; empty where it is
            normal.
    """

    measured: float
    expected: Interval
    causes: tuple[Explanation, ...]

    @property
    def word(self) -> str:
        """``normal``, ``slower`` or ``faster``."""
        if self.measured < self.expected.low:
            return "slower"
        return "faster" if self.measured > self.expected.high else "normal"


@dataclass(frozen=True)
class FlagsAnswer:
    """What is known of a line.

    Attributes:
        reading: what it means.
        prospect: its speeds.
        deep: decode at the end of its context.
        most_context: tokens of the largest context that fits, for each request; 0 where
            none does.
        findings: what people should know.
        changes: settings that are faster, those that gain most first.
        verdict: on a measured speed.
        target: tokens per second that are wished for.
        ways: to reach them, the smallest first.
    """

    reading: Reading
    prospect: Prospect
    deep: Interval
    most_context: int
    findings: tuple[Finding, ...]
    changes: tuple[WhatIf, ...]
    verdict: Verdict | None
    target: float | None
    ways: tuple[WhatIf, ...]

    def answer(self) -> Answer:
        """What the line does, as text, page and JSON."""
        return flags_answer(self)

    def _repr_markdown_(self) -> str:
        return self.answer()._repr_markdown_()


# Words.


def speed_words(interval: Interval, unit: str = "tokens/s") -> str:
    """Write ``12.3 tokens/s (90 %: 10.1 to 15.0)``."""
    return f"{number(interval.value)} {unit} (90 %: {_ends(interval)})"


def _ends(interval: Interval, between: str = " to ") -> str:
    return f"{number(interval.low)}{between}{number(interval.high)}"


def _speed_cells(prospect: Prospect) -> list[Any]:
    """Cells of `INTERVALS`."""
    return [
        cell
        for speed in (prospect.decode, prospect.prefill)
        for cell in (speed.value, _ends(speed, "-"))
    ]


def _limited(interval: Interval, terms: Mapping[str, float], more: str = "") -> str:
    """A speed, and which term takes most of the time."""
    name = max(terms, key=lambda each: terms[each])
    share = terms[name] / sum(terms.values())
    words = TERMS.get(name, name)
    return f"{speed_words(interval)}{more}; {100 * share:.0f} % of it: {words}"


def _model_words(model: ModelContents) -> str:
    """Name, format, size, experts."""
    layer = model.layers[model.moe_layers[0]]
    # File names often hold the format already.
    name = model.name if model.quant in model.name else f"{model.name} {model.quant}"
    return (
        f"{name.strip()}, {format_bytes(model.file_bytes)};"
        f" {len(model.moe_layers)} MoE layers with {layer.experts} experts,"
        f" {layer.top_k} per token ({model.source})"
    )


def _machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """The machine as far as it is known, and what was assumed."""
    memory = machine.memory
    parts = []
    if memory.size_bytes:
        parts.append(format_bytes(memory.size_bytes))
    if memory.generation:
        rate = f"-{memory.rate}" if memory.rate else ""
        parts.append(f"DDR{memory.generation}{rate}")
    # Assumed channels are among the assumptions, not here.
    if memory.channels and memory.rate:
        parts.append(f"{memory.channels} channels")
    words = f"{machine.name}, {' '.join(parts)}" if parts else machine.name
    if machine.link_bytes_per_s and not machine.unified:
        words += f", link {machine.link_bytes_per_s / 1e9:.1f} GB/s"
    facts = [("machine", words)]
    if machine.assumed:
        facts.append(("assumed", "; ".join(machine.assumed)))
    return facts


def place_words(setting: Setting, model: ModelContents, machine: Machine) -> str:
    """Say what of a model a setting leaves to the CPU."""
    if not machine.graphics or not setting.gpu_layers:
        return "everything"
    on_host = setting.on_host(model)
    words = []
    if first := setting.first_gpu_layer(model):
        words.append(f"layers {layers_in_words(range(first))} whole")
    if len(on_host) == len(model.moe_layers):
        words.append("all experts")
    elif on_host:
        words.append(f"experts of layers {layers_in_words(on_host)}")
    elif not words:
        words.append("no experts")
    if setting.kv_on_host:
        words.append("keys and values")
    return ", ".join(words)


def _job_words(job: Job) -> str:
    words = (
        f"prompt of {job.prompt:,} and answer of {job.answer:,} tokens, context"
        f" {job.context:,}"
    )
    return f"{words}{_together(job, ', {} requests at the same time')}"


def _together(job: Job, words: str) -> str:
    return words.format(job.sequences) if job.sequences > 1 else ""


def _memory_facts(bill: MemoryBill, machine: Machine) -> list[tuple[str, str]]:
    """What lies where: either memory, each card, the file."""
    facts = []
    if machine.graphics:
        words = format_bytes(bill.gpu_bytes)
        if math.isfinite(bill.gpu_free):
            words += f" of {format_bytes(bill.gpu_free)}"
            if bill.gpu_left >= 0:
                left = format_bytes(bill.gpu_left)
                words += f"; {left} of headroom before it spills into host memory"
        facts.append(("GPU memory", words))
    if len(bill.cards) > 1:
        for card in bill.cards:
            sizes = f"{format_bytes(card.needed)} of {format_bytes(card.free)}"
            facts.append((card.name, f"{card.layers} layers, {sizes}"))
    host = format_bytes(bill.host_bytes)
    if TABLES in bill.host:
        host += f", {format_bytes(bill.host[TABLES])} of it {TABLES}"
    if bill.host_left is not None:
        spare = "to spare" if bill.host_left >= 0 else "more than there is"
        host += f"; {format_bytes(abs(bill.host_left))} {spare}"
    facts.append(("host memory", host))
    if bill.pages:
        facts.append(("SSD", "experts that memory cannot hold are read from the file"))
    for item, stored in bill.file.items():
        words = f"{format_bytes(stored)} stay in the file, read row by row"
        facts.append((item, words))
    return facts


# Plain values.

_UNITS = {
    "decode": "decode_tokens_per_s",
    "prefill": "prefill_tokens_per_s",
    "job": "job_s",
}


def plain(value: Any) -> Any:
    """A value for JSON: intervals as median and ends, under names with their units."""
    if isinstance(value, Interval):
        ends = {"low_90": value.low, "high_90": value.high}
        return {"median": value.value, **ends}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            _UNITS.get(each.name, each.name): plain(getattr(value, each.name))
            for each in fields(value)
        }
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _model_data(model: ModelContents) -> dict[str, Any]:
    stored = ("file", "expert", "dense", "embed", "head", "unused", "table")
    return {
        "name": model.name,
        "architecture": model.architecture,
        "quant": model.quant,
        "source": model.source,
        "layers": len(model.layers),
        "moe_layers": len(model.moe_layers),
        **{f"{part}_bytes": getattr(model, f"{part}_bytes") for part in stored},
        "assumed": list(model.assumed),
    }


def _prospect_data(advice: Advice, prospect: Prospect | None) -> dict[str, Any] | None:
    if prospect is None:
        return None
    setting, bill = prospect.candidate.setting, prospect.candidate.bill
    return {
        "command": server_command(setting, advice.model, advice.machine, advice.job),
        "cpu_layers": list(setting.on_host(advice.model)),
        "micro_batch": setting.micro_batch,
        "kv_format": setting.kv_format,
        "tied_with_first": prospect.tied,
        "decode_tokens_per_s": plain(prospect.decode),
        "prefill_tokens_per_s": plain(prospect.prefill),
        "job_s": plain(prospect.job),
        "decode_terms_s": dict(prospect.decode_terms),
        "prefill_terms_s": dict(prospect.prefill_terms),
        "gpu_bytes": dict(bill.gpu),
        "gpu_left_bytes": bill.gpu_left if math.isfinite(bill.gpu_left) else None,
        "safe": bill.safe,
        "cards": plain(bill.cards),
        "reads_from_ssd": bill.pages,
        "host_bytes": dict(bill.host),
        "host_left_bytes": bill.host_left,
    }


def _advice_data(advice: Advice) -> dict[str, Any]:
    """All figures of an advice, the whole curve among them."""
    machine, observed, routing = advice.machine, advice.observed, advice.routing

    def row(each: Any) -> dict[str, Any]:
        return {
            "row": each.words,
            "measured_tokens_per_s": each.row.tokens_per_s,
            "expected_tokens_per_s": each.expected,
        }

    return {
        "model": _model_data(advice.model),
        "machine": {
            "name": machine.name,
            "grade": advice.grade.value,
            "assumed": list(machine.assumed),
            "host_peak_bytes_per_s": machine.host_peak_bytes_per_s,
            "host_memory_bytes": machine.memory.size_bytes,
            "graphics": [asdict(card) for card in machine.graphics],
            "link_bytes_per_s": machine.link_bytes_per_s,
            "unified": machine.unified,
        },
        "job": asdict(advice.job),
        "settings": [_prospect_data(advice, each) for each in advice.prospects],
        "rounded_keys_and_values": _prospect_data(advice, advice.rounded),
        "faster_but_near_spilling": _prospect_data(advice, advice.faster),
        "bound": asdict(advice.bound) | {"tokens_per_s": advice.bound.tokens_per_s},
        "routing": None
        if routing is None
        else {"bound": asdict(routing) | {"steps_per_s": routing.steps_per_s}},
        "curve": [
            {
                "cpu_layers": each.candidate.setting.cpu_layers,
                "decode_tokens_per_s": plain(each.decode),
                "prefill_tokens_per_s": plain(each.prefill),
                "gpu_bytes": each.candidate.bill.gpu_bytes,
                "fits": each.candidate.bill.fits,
            }
            for each in advice.curve
        ],
        "what_if": [
            plain(each) | ({} if each.factor else {"decode_tokens_per_s": None})
            for each in advice.what_ifs
        ],
        "observed": {
            "rows": len(observed.rows),
            "used": [row(each) for each in observed.used],
            "slower_than_expected": [
                row(each) | {"explanations": plain(each.explanations)}
                for each in observed.surprises
            ],
            "contradicting": [
                {"row": each.words, "reason": reason}
                for each, reason in observed.contradicting
            ],
            "foreign": [each.place for each in observed.foreign],
        },
        "measure_next": plain(advice.questions),
    }


# Which settings are fastest.


def advice_answer(advice: Advice, *, explain: bool = False) -> Answer:
    """Say which settings are fastest, how fast, and what would change it.

    Args:
        advice: what was found out.
        explain: print the seconds of every term, too.
    """
    best, machine = advice.best, advice.machine
    grade = GRADES[advice.grade.value].format(len(advice.observed.used))
    facts = _memory_facts(best.candidate.bill, machine)
    setting = best.candidate.setting
    if setting.on_host(advice.model) and not (setting.page_locked or setting.mapped):
        facts.append(("page-locking", UNLOCKED.format(machine.system)))
    kinds = ("decode", "prefill") if advice.curve else ()
    figures = {kind: lambda kind=kind: _curve_figure(advice, kind) for kind in kinds}
    return Answer(
        question="which settings are fastest?",
        subject=f"{advice.model.name} on {machine.name}",
        setting=[
            ("model", _model_words(advice.model)),
            *_machine_facts(machine),
            ("known from", grade),
            ("job", _job_words(advice.job)),
        ],
        facts=[
            *_speed_facts(best, advice.job),
            ("the job", speed_words(best.job, "s")),
            *facts,
            *_bound_facts(advice),
        ],
        tables=[
            _settings_table(advice),
            _terms_table(best, printed=explain),
            _changes_table(advice.what_ifs, "What would change it"),
        ],
        notes=[*_trades(advice), *_row_notes(advice)],
        figures=figures,
        data=_advice_data(advice),
        commands=_commands(advice),
    )


def _speed_facts(
    prospect: Prospect, job: Job, depth: str = ""
) -> list[tuple[str, str]]:
    more = depth + _together(job, " of all {} requests together")
    return [
        ("decode", _limited(prospect.decode, prospect.decode_terms, more)),
        ("prefill", _limited(prospect.prefill, prospect.prefill_terms)),
    ]


def _bound_facts(advice: Advice) -> list[tuple[str, str]]:
    """How far the advised setting is from what bytes over bandwidth allow."""
    sequences = advice.best.candidate.setting.sequences

    def words(steps_per_s: float, given: str, resource: str) -> str:
        share = advice.best.decode.value / (steps_per_s * sequences)
        return (
            f"decode at {100 * share:.0f} % of what this machine can do at best with"
            f" {given}: {number(steps_per_s)} steps/s, set by {resource}"
        )

    bound = advice.bound
    places = words(bound.tokens_per_s, "the weights in these places", bound.resource)
    facts = [("bound", places)]
    if advice.routing is not None:
        of = advice.routing
        given = "this routing, wherever experts lie"
        line = words(of.steps_per_s, given, of.resource)
        reads = f"{of.reads:,} of {of.accesses:,} expert reads of {of.steps:,} steps"
        facts.append(("any schedule", f"{line} ({reads} happen under any schedule)"))
    return facts


def _settings_table(advice: Advice) -> Listing:
    formats = {each.candidate.setting.kv_format for each in advice.prospects}
    rows = [
        [
            _short_place(each.candidate.setting, advice.model, advice.machine)
            + (" =" if each.tied else ""),
            str(each.candidate.setting.micro_batch),
            *([each.candidate.setting.kv_format] if len(formats) > 1 else []),
            *_speed_cells(each),
            each.job.value,
            each.candidate.bill.gpu_bytes,
        ]
        for each in advice.prospects
    ]
    columns = [
        Column("on_cpu", "layers on the CPU"),
        Column("micro_batch", "-ub"),
        *([Column("kv_format", "KV")] if len(formats) > 1 else []),
        *INTERVALS,
        Column("job_s", "job", "s"),
        Column("gpu_bytes", HEADS["gpu_memory_bytes"], "bytes"),
    ]
    return Listing(rows, columns, title="Settings, the fastest first")


def _short_place(setting: Setting, model: ModelContents, machine: Machine) -> str:
    """Which layers' experts a setting leaves to the CPU."""
    words = place_words(setting, model, machine)
    return words.removeprefix("experts of layers ").removesuffix(" experts")


def _trades(advice: Advice) -> list[str]:
    """Ties, and what a setting that is not advised would give."""
    lines = []
    if ties := sum(prospect.tied for prospect in advice.prospects):
        lines.append(
            f"= {ties} of these cannot be told from the first: noise, or what is not"
            " known of the machine, could turn the order"
        )
    trades = {
        "faster, but memory may overflow: its prediction is not so certain": (
            advice.faster
        ),
        "rounded keys and values change answers a little": advice.rounded,
    }
    for words, prospect in trades.items():
        if prospect is not None:
            flags = flags_of(prospect.candidate.setting, advice.model, advice.machine)
            speed = speed_words(prospect.decode)
            lines.append(f"{words}; decode {speed} with {' '.join(flags)}")
    return lines


def _terms_table(prospect: Prospect, *, printed: bool) -> Listing:
    """Seconds by term, of one decode step and of the prompt."""
    terms = (prospect.decode_terms, prospect.prefill_terms)
    # Decode and prompt share most terms; each gets one line.
    rows = [
        [TERMS.get(name, name), *(cell for part in terms for cell in _term(part, name))]
        for name in dict.fromkeys([*terms[0], *terms[1]])
    ]
    heads = ("term", "a decode step", "share", "the prompt", "share")
    return Listing.of(heads, rows, title="Where the time goes", printed=printed)


def _term(terms: Mapping[str, float], name: str) -> tuple[str, str]:
    seconds = terms.get(name)
    if not seconds:
        return "", ""
    return ms(seconds), percent(seconds / sum(terms.values()), 0)


def _changes_table(changes: Iterable[WhatIf], title: str) -> Listing:
    """A row for each change, with its prompts where any is known."""
    changes = list(changes)
    has_prompts = any(each.prefill for each in changes)
    rows = [
        [
            f"{each.change} ({each.note})" if each.note else each.change,
            each.decode.value if each.factor else None,
            *([each.prefill.value if each.prefill else None] if has_prompts else []),
            each.factor or None,
        ]
        for each in changes
    ]
    columns = [
        Column("change", "change"),
        DECODE,
        *([PREFILL] if has_prompts else []),
        Column("gain", "job as fast" if has_prompts else "as fast", "times"),
    ]
    return Listing(rows, columns, title=title)


def _row_notes(advice: Advice) -> list[str]:
    """Which measured rows were used, and which contradict the rest."""
    observed = advice.observed
    if not observed.rows:
        return []
    lines = [f"learned from {len(observed.used)} of {len(observed.rows)} rows"]
    lines += [
        f"slower than expected: {slow.words}, {number(slow.row.tokens_per_s)}"
        f" tokens/s where {number(slow.expected)} were expected"
        for slow in observed.surprises
    ]
    lines += [f"set aside: {row.words}: {why}" for row, why in observed.contradicting]
    # Many rows of one file are one line.
    foreign = sorted({row.text("model_filename") for row in observed.foreign})
    return lines + [f"of a model that is not at hand: {name}" for name in foreign]


def _causes(row: str, causes: Iterable[Explanation]) -> list[tuple[str, str]]:
    """States of the machine that would give what was measured, and what tells."""
    slow = f"why {row} may be slow"
    return [
        (f"{slow}: {each.words}, {number(each.tokens_per_s)} tokens/s", each.command)
        for each in causes
    ]


def _commands(advice: Advice) -> list[tuple[str, str]]:
    """What to type: why rows are slow, what to measure next, the advised setting."""
    commands = [
        cause
        for slow in advice.observed.surprises
        for cause in _causes(slow.words, slow.explanations)
    ]
    for each in advice.questions:
        before, after = (
            f"±{100 * NINETY * spread:.1f} %"
            for spread in (each.spread_before, each.spread_after)
        )
        why = f"to know more, for --bench rows.jsonl: {each.reason}"
        words = f"{why}; the job is then known to {after} instead of {before}"
        commands.append((words, each.command))
    setting = advice.best.candidate.setting
    line = server_command(setting, advice.model, advice.machine, advice.job)
    words = f"fastest ({OLDER_BUILDS})" if "--load-mode" in line else "fastest"
    return [*commands, (words, line)]


# Figures.


def _curve_figure(advice: Advice, kind: str) -> Figure:
    """A speed over layers on the CPU, with its 90 % interval, and what was measured."""
    import pandas as pd  # noqa: PLC0415 - half a second that only figures should cost

    rows = []
    for point in advice.curve:
        speed = getattr(point, kind)
        ends = {"low": speed.low, "high": speed.high}
        fits = point.candidate.bill.fits
        series = "predicted" if fits else "predicted, does not fit"
        layers = point.candidate.setting.cpu_layers
        rows.append({"layers": layers, "speed": speed.value, "what": series} | ends)
    last = rows[-1]["layers"]
    best = advice.best.candidate.setting
    for row in advice.observed.used:
        if row.row.kind != kind:
            continue
        setting = row.target.setting
        # A prompt measured at another micro-batch does not lie on this curve.
        same = kind == "decode" or setting.micro_batch == best.micro_batch
        series = "measured" if same else "measured with another -ub"
        # The curve ends at the last layer; measured rows may name a larger number.
        at = {"layers": min(setting.cpu_layers, last), "what": series}
        rows.append(at | {"speed": row.row.tokens_per_s})
    return Figure(
        pd.DataFrame(rows),
        Axis("layers", "layers with experts on the CPU (--n-cpu-moe)", integer=True),
        Axis("speed", f"{kind}, tokens/s", zero=True),
        f"Speed of the {kind} over layers on the CPU, with 90 % intervals",
        mark="point",
        series="what",
        colours={"predicted, does not fit": LIMIT},
        dashed=frozenset({"predicted, does not fit", "measured with another -ub"}),
        low="low",
        high="high",
    )


# A line that somebody has.


def flags_answer(answer: FlagsAnswer) -> Answer:
    """Say what a line does, whether a speed is normal, and what to change first."""
    reading = answer.reading
    machine, job = reading.machine, reading.job
    places = f"{place_words(reading.setting, reading.model, machine)} on the CPU"
    context = "no context fits"
    if answer.most_context:
        context = f"the largest context is {answer.most_context:,} tokens"
    deep = f"{speed_words(answer.deep)} at the end of {job.context:,} tokens"
    speeds = _speed_facts(
        answer.prospect, job, f" at {job.mean_depth:,.0f} tokens deep"
    )
    fits = need_words(reading)
    verdict = answer.verdict
    sentences: list[str] = []
    causes: list[tuple[str, str]] = []
    if verdict is not None:
        words = VERDICTS[verdict.word]
        expected = speed_words(verdict.expected)
        measured = f"{number(verdict.measured)} tokens/s"
        sentences.append(f"{measured} {words}: {expected} are expected")
        causes = _causes("it", verdict.causes)
    if not answer.changes and reading.bill.fits:
        sentences.append("nothing to change: no flag gains more than 3 % of the job")
    order = list(FINDINGS)
    findings = sorted(answer.findings, key=lambda each: order.index(each.kind))
    changes = "What to change first" if fits == "fits" else "What fits instead"
    tables = [_changes_table(answer.changes, changes)]
    if answer.target is not None:
        sentences.append(_target_words(answer))
        wished = f"To reach {number(answer.target)} tokens/s"
        tables.append(_changes_table(answer.ways, wished))
    return Answer(
        question="what does this line do here?",
        subject=f"{reading.model.name} on {machine.name}",
        setting=[
            ("model", _model_words(reading.model)),
            *_machine_facts(machine),
            ("read as", f"{reading.engine}; {places}"),
            ("job", _job_words(job)),
        ],
        facts=[
            ("memory", f"{fits}; {context}"),
            *_memory_facts(reading.bill, machine),
            speeds[0],
            ("decode, deep", deep),
            speeds[1],
        ],
        tables=tables,
        commands=causes,
        sentences=sentences,
        notes=[f"{FINDINGS[each.kind]}: {each.words}" for each in findings],
        data={
            "engine": reading.engine,
            "machine": machine.name,
            "placement": places,
            "experts_on_cpu_layers": list(reading.setting.on_host(reading.model)),
            "fits": fits,
            "gpu_bytes": reading.bill.gpu,
            "host_bytes": reading.bill.host,
            "file_bytes": reading.bill.file,
            "cards": plain(reading.bill.cards),
            "context_tokens": job.context,
            "most_context_tokens": answer.most_context,
            "decode_tokens_per_s": plain(answer.prospect.decode),
            "decode_at_full_context_tokens_per_s": plain(answer.deep),
            "prefill_tokens_per_s": plain(answer.prospect.prefill),
            "findings": plain(answer.findings),
            "changes": plain(answer.changes),
            "verdict": None
            if verdict is None
            else {
                "measured_tokens_per_s": verdict.measured,
                "word": verdict.word,
                "causes": plain(verdict.causes),
            },
            "target_tokens_per_s": answer.target,
            "ways": plain(answer.ways),
        },
    )


def _target_words(answer: FlagsAnswer) -> str:
    assert answer.target is not None
    wished = f"{number(answer.target)} tokens/s"
    if answer.prospect.decode.value >= answer.target:
        return f"{wished} are reached as it is"
    if any(each.decode.value >= answer.target for each in answer.ways):
        return f"{wished} can be reached"
    return f"nothing known reaches {wished}; the table says what comes nearest"


# What a model file holds.


def model_answer(model: ModelContents) -> Answer:
    """Say what a model file holds, layer by layer."""
    together = DEFAULT_MICRO_BATCH
    kept = int(model.kv_cache_bytes(1024, together).sum())
    windows = ""
    if any(layer.window_tokens for layer in model.layers):
        windows = f"; windows hold the {together} tokens of a micro-batch, too"
    active = f"{model.active_weights / 1e9:.2f} billion per token"
    weights = f"{model.weights / 1e9:.2f} billion, {active}"
    head = f"{format_bytes(model.head_bytes)} {model.head_format}"
    facts = [
        ("architecture", model.architecture),
        ("weights", weights),
        ("embeddings", format_bytes(model.embed_bytes)),
        ("head", f"{head} (the embeddings)" if model.tied else head),
        ("keys and values", f"{format_bytes(kept)} per 1,024 tokens in f16{windows}"),
    ]
    if model.table_bytes:
        tables = f"{format_bytes(model.table_bytes)}, {model.table_rows} rows per token"
        facts.append(("look-up tables", tables))
    if model.unused_bytes:
        facts.append(("not run", format_bytes(model.unused_bytes)))
    if model.assumed:
        facts.append(("assumed", "; ".join(model.assumed)))
    return Answer(
        question="what does the file hold?",
        subject=model.name,
        setting=[("model", _model_words(model))],
        facts=facts,
        tables=[_layers_table(model)],
        data=_model_data(model)
        | {"kv_bytes_1024_tokens": kept}
        | {"by_layer": [asdict(layer) for layer in model.layers]},
    )


def _layers_table(model: ModelContents) -> Listing:
    """A row for each run of equal layers; models have up to 94."""
    rows = []
    start = 0
    for at in range(1, len(model.layers) + 1):
        if at < len(model.layers) and model.layers[at] == model.layers[start]:
            continue
        layer = model.layers[start]
        rows.append(
            [
                str(start) if start == at - 1 else f"{start}-{at - 1}",
                layer.dense_bytes,
                layer.expert_bytes if layer.experts else None,
                layer.dense_bytes + layer.active_bytes,
                " ".join(layer.expert_formats) or "-",
            ]
        )
        start = at
    columns = [
        Column("layers", "layers"),
        Column("dense_bytes", "dense", "bytes"),
        Column("expert_bytes", "experts", "bytes"),
        Column("token_bytes", "per token", "bytes"),
        Column("expert_formats", "expert formats"),
    ]
    return Listing(rows, columns)
