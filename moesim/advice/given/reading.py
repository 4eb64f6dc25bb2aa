"""What a line means here: where it puts every layer, and what in it does not hold."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moesim.advice.bench_rows import overridden_layers
from moesim.advice.given.options import (
    AUTO,
    IK,
    LLAMA,
    LM_STUDIO,
    OLLAMA,
    Finding,
    Given,
    stated,
)
from moesim.advice.model.catalogue import shape_named
from moesim.advice.plan.commands import LAZY_FROM_BYTES, layers_in_words
from moesim.advice.plan.memory import (
    MIB,
    PROGRAM_BYTES,
    Candidate,
    Job,
    bill_of,
    candidates,
    even_split,
)
from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    HELD,
    KV_SHARES,
    LAZY,
    Setting,
)
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moesim.advice.given.options import Settings
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.memory import MemoryBill

# What `--fit` leaves free on every card without `--fit-target`.
FIT_MARGIN_BYTES = 1024 * MIB
# Prompts of this length are never computed on the CPU's experts by upload.
NEVER = 1 << 30


@dataclass(frozen=True)
class Reading:
    """A line on a machine.

    Attributes:
        given: as written.
        machine: with the cards that the line uses.
        setting: where it puts layers, and the rest that times depend on.
        job: with the context of one request, and what runs beside the model.
        bill: of memory.
        findings: what is ignored, contradicts, stops, or means something else.
    """

    given: Given
    machine: Machine
    setting: Setting
    job: Job
    bill: MemoryBill
    findings: tuple[Finding, ...]

    @property
    def candidate(self) -> Candidate:
        """The setting with its bill."""
        return Candidate(self.setting, self.bill)


class _Line(NamedTuple):
    """What placing and loading depend on, and what is found on the way."""

    given: Given
    model: ModelContents
    machine: Machine
    job: Job
    findings: list[Finding]

    def say(self, kind: str, words: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, words))


def reading_of(
    given: Given, model: ModelContents, machine: Machine, job: Job
) -> Reading:
    """Say what a line means for a model on a machine.

    Args:
        given: the line.
        model: that it loads.
        machine: with all its cards.
        job: prompt, answer and requests; its context counts where the line states none.

    Raises:
        AdviceError: cards that the machine lacks, or an override that parts experts.
    """
    findings = list(given.findings)
    if given.unread:
        words = f"not known here, read as without effect: {', '.join(given.unread)}"
        findings.append(Finding("note", words))
    machine = _with_its_cards(given, machine)
    job = _job(given.settings, job, findings)
    setting = _sizes(given, findings, job)
    line = _Line(given, model, machine, job, findings)
    setting = _placed(line, setting)
    setting = _loaded(line, setting)
    findings += _contradictions(given, model, machine, setting)
    bill = bill_of(model, machine, setting, job)
    return Reading(given, machine, setting, job, bill, tuple(findings))


def _with_its_cards(given: Given, machine: Machine) -> Machine:
    """Leave out the cards that a line does not use."""
    settings = given.settings
    devices = tuple(range(machine.gpu_count))
    for words in (settings.visible, settings.device):
        if not words or words.lower() == "none":
            devices = () if words else devices
            continue
        numbers = re.findall(r"(?:^|,)\s*(?:[A-Za-z]+)?(\d+)\b", words)
        missing = [each for each in numbers if int(each) >= len(devices)]
        if missing and machine.graphics:
            raise AdviceError(
                f"--flags: card {missing[0]} of {words!r}: {machine.name} has"
                f" {machine.gpu_count}, counted from 0"
            )
        devices = tuple(devices[int(each)] for each in numbers) if numbers else devices
    if settings.split_mode == "none" and len(devices) > 1:
        devices = (devices[min(settings.main_gpu or 0, len(devices) - 1)],)
    if machine.unified:
        return machine if devices else replace(machine, graphics=())
    return machine.with_cards(devices)


def _job(settings: Settings, job: Job, findings: list[Finding]) -> Job:
    """Take context and micro-batch from the line, per request."""
    context = settings.context
    if not context:
        words = f"no context is stated: read with {job.context:,} tokens"
        findings.append(Finding("note", words))
        context = job.context * max(job.sequences, 1)
    parallel = settings.parallel or 1
    shared = settings.unified or settings.parallel is None
    if parallel > 1 and not shared:
        words = (
            f"{parallel} slots divide the context: {context // parallel:,} tokens for"
            " each request"
        )
        findings.append(Finding("means", words))
    if job.sequences > parallel and settings.parallel is not None:
        words = (
            f"{job.sequences} requests are asked about, {parallel} run at the same time"
        )
        findings.append(Finding("contradicts", words))
    # The whole context is kept, whoever uses it.
    per_request = max(1, context // job.sequences)
    needed = job.prompt + job.answer
    if needed > per_request:
        words = (
            f"a context of {per_request:,} tokens does not hold a prompt of"
            f" {job.prompt:,} and an answer of {job.answer:,}"
        )
        findings.append(Finding("contradicts", words))
    beside = dict(job.beside)
    for name, path, where in (
        ("mmproj", settings.mmproj, settings.mmproj_on_host),
        ("draft", settings.draft, False),
    ):
        if not path or name in beside or where:
            continue
        file = Path(path).expanduser()
        if file.is_file():
            beside[name] = float(file.stat().st_size)
        else:
            option = "--mmproj" if name == "mmproj" else "--draft"
            words = f"the bill is without {path}: say its size with {option}"
            findings.append(Finding("note", words))
    if settings.cache_mib:
        beside["expert cache"] = float(settings.cache_mib * MIB)
    keep = settings.keep_bytes or job.keep_vram_bytes
    return replace(job, context=per_request, beside=beside, keep_vram_bytes=keep)


def _sizes(given: Given, findings: list[Finding], job: Job) -> Setting:
    """Batches, threads, formats."""
    settings = given.settings
    micro = settings.micro_batch or DEFAULT_MICRO_BATCH
    # ollama and LM Studio have one number for both batches.
    alone = given.engine in {OLLAMA, LM_STUDIO}
    batch = settings.batch or max(micro if alone else 0, DEFAULT_BATCH)
    if micro > batch:
        words = f"-ub {micro} is above -b {batch}: {batch} counts"
        findings.append(Finding("contradicts", words))
    keys = settings.key_format or settings.kv_formats or "f16"
    values = settings.value_format or settings.kv_formats or "f16"
    if keys != values:
        words = (
            f"keys in {keys} and values in {values}: builds without"
            " GGML_CUDA_FA_ALL_QUANTS compute attention of such pairs on the CPU"
        )
        findings.append(Finding("note", words))
    return Setting(
        threads=settings.threads,
        micro_batch=min(micro, batch),
        batch=batch,
        flash=settings.flash is not False,
        kv_format=max(keys, values, key=lambda name: KV_SHARES[name]),
        kv_on_host=settings.kv_on_host or settings.kv_offload is False,
        sequences=job.sequences,
        random_tokens=False,
    )


PLACING = {"gpu_layers", "cpu_moe", "cpu_layers", "overrides", "tensor_split"}


def _placed(line: _Line, setting: Setting) -> Setting:
    """Read where layers and experts lie."""
    settings = line.given.settings
    placing = PLACING & set(stated(settings))
    if not line.machine.graphics:
        if placing:
            line.say("ignored", "there is no card to place layers on")
        return replace(setting, gpu_layers=0)
    fits_itself = line.given.engine != IK and settings.fit is not False
    if (
        fits_itself
        and (not placing or placing == {"gpu_layers"})
        and (settings.gpu_layers in {None, AUTO})
    ):
        return _fitted(line, setting)
    if fits_itself and placing and line.given.engine == LLAMA:
        words = "--fit moves nothing once layers are placed by hand"
        line.say("note", words)

    setting = replace(
        setting, gpu_layers=_whole_layers(line.given, line.model, line.findings)
    )
    setting = _experts_placed(line, setting)
    return _split(settings, line.model, line.machine, setting)


def _experts_placed(line: _Line, setting: Setting) -> Setting:
    """Read which layers' experts stay on the CPU."""
    settings = line.given.settings
    chosen: set[int] = set()
    if settings.overrides:
        chosen = set(overridden_layers(",".join(settings.overrides)) or ())
        if any(re.search(r"=\s*(?!CPU)\w+\d", each) for each in settings.overrides):
            words = "experts sent to another card are counted on that of their layer"
            line.say("note", words)
    count = settings.cpu_layers
    if settings.cpu_moe:
        if count is not None:
            words = f"--cpu-moe moves all experts: {count} layers add none"
            line.say("ignored", words)
        return replace(setting, cpu_layers=ALL_LAYERS)
    if count is not None and line.given.engine == IK:
        layers = spread_layers(count, line.model, line.machine, settings)
        line.findings.append(_ik_layers(count, layers, line.machine))
        chosen |= layers
    elif count is not None and not settings.overrides:
        return replace(setting, cpu_layers=count)
    elif count is not None:
        chosen |= set(range(count))
    if not settings.overrides and not chosen:
        return setting
    kept = frozenset(at for at in chosen if at < len(line.model.layers))
    return replace(setting, chosen_layers=kept)


def _whole_layers(given: Given, model: ModelContents, findings: list[Finding]) -> int:
    count = given.settings.gpu_layers
    if count is None and given.engine == IK:
        words = "without -ngl ik_llama.cpp computes every layer on the CPU"
        findings.append(Finding("means", words))
        return 0
    if count is None or count == AUTO:
        return ALL_LAYERS
    if 0 < count < 1:
        return round(count * len(model.layers))
    return int(count)


def spread_layers(
    count: int, model: ModelContents, machine: Machine, settings: Settings
) -> set[int]:
    """Return the layers whose experts ik_llama.cpp's ``--n-cpu-moe`` leaves to the CPU.

    With several cards they are spread over these since March 2026, the last ones of
    each; with one card they are the last ones of all since August.
    """
    layers = len(model.layers)
    cards = machine.single_cards
    shares = settings.tensor_split or [float(card.vram_bytes) for card in cards]
    ends = list(accumulate(even_split(layers, shares[: len(cards)])))
    chosen: set[int] = set()
    start = 0
    for number, end in enumerate(ends):
        share = count // len(ends) + (number < count % len(ends))
        chosen |= set(range(max(start, end - share), end))
        start = end
    return chosen


def _ik_layers(count: int, layers: set[int], machine: Machine) -> Finding:
    where = "the last of each card" if machine.gpu_count > 1 else "the last ones"
    since = "March" if machine.gpu_count > 1 else "August"
    return Finding(
        "means",
        f"--n-cpu-moe {count} means layers {layers_in_words(layers)} in ik_llama.cpp"
        f" since {since} 2026 ({where}), the first {count} in older builds and in"
        " llama.cpp",
    )


def _split(
    settings: Settings, model: ModelContents, machine: Machine, setting: Setting
) -> Setting:
    if not settings.tensor_split or machine.gpu_count < 2:
        return setting
    shares = settings.tensor_split[: machine.gpu_count]
    total = len(model.layers) - setting.first_gpu_layer(model) + setting.head_on_gpu
    counts = even_split(total, [*shares, *[0.0] * (machine.gpu_count - len(shares))])
    return replace(setting, split=counts)


def _fitted(line: _Line, setting: Setting) -> Setting:
    """Place layers as the engine does that is left to fit them itself."""
    margin = FIT_MARGIN_BYTES
    if target := re.match(r"\d+", line.given.settings.fit_target):
        margin = int(target.group()) * MIB
    fitting = candidates(
        line.model,
        line.machine,
        replace(line.job, micro_batch=setting.micro_batch, keep_vram_bytes=margin),
    )
    if not fitting:
        return replace(setting, cpu_layers=ALL_LAYERS)
    # Fewest experts on the processor first.
    place = min(
        (each.setting for each in fitting if each.setting.chosen_layers is None),
        key=lambda each: (-each.gpu_layers, each.cpu_layers),
        default=fitting[0].setting,
    )
    on_host = layers_in_words(place.on_host(line.model))
    words = (
        f"{line.given.engine} places layers itself: experts of layers {on_host} on the"
        f" CPU, with {margin // MIB:,} MiB left free"
    )
    line.say("note", words)
    return replace(
        setting,
        gpu_layers=place.gpu_layers,
        cpu_layers=place.cpu_layers,
        chosen_layers=place.chosen_layers,
        split=place.split,
    )


def _loaded(line: _Line, setting: Setting) -> Setting:
    """Read how weights come into memory: mapped, page-locked, uploaded when."""
    settings = line.given.settings
    mode = settings.load_mode or "auto"
    mapped = settings.mmap is not False and mode in {"auto", "mmap", "mmap+mlock"}
    mapped = mapped and not settings.repacked
    tables = HELD
    large = line.model.table_bytes > LAZY_FROM_BYTES
    wanted = settings.lazy == "on" or (settings.lazy != "off" and large)
    if line.model.table_bytes and wanted and mapped and line.given.engine != IK:
        tables = LAZY
    elif settings.lazy == "on":
        words = "--lazy-mode on wants a mapped file: look-up tables are held in memory"
        line.say("contradicts", words)
    setting = replace(setting, mapped=mapped, tables=tables)
    bill = bill_of(line.model, line.machine, setting, line.job)
    buffers = bill.host_bytes - PROGRAM_BYTES
    locked = not mapped and buffers <= line.machine.most_page_locked_bytes
    if settings.unpinned or settings.repacked:
        locked = False
    elif not mapped and not locked:
        words = (
            f"{buffers / 1024**3:.1f} GiB cannot be page-locked under"
            f" {line.machine.system}: set GGML_CUDA_NO_PINNED=1 if loading stops"
        )
        line.say("note", words)
    setting = replace(setting, page_locked=locked)
    if settings.no_uploads or settings.repacked:
        return replace(setting, gpu_from_tokens=NEVER)
    if line.given.engine == IK:
        layer = line.model.layers[line.model.moe_layers[0]]
        rows = 32 * layer.experts // layer.top_k
        return replace(setting, used_only=settings.used_only, gpu_from_tokens=rows)
    return setting


def _contradictions(
    given: Given, model: ModelContents, machine: Machine, setting: Setting
) -> Iterator[Finding]:
    """What does not go together, or does not do what its words promise."""
    settings = given.settings
    rounded = (settings.value_format or settings.kv_formats or "f16") != "f16"
    if rounded and not setting.flash:
        words = "rounded values want flash attention (-fa on): loading stops"
        yield Finding("stops", words)
    if machine.unified and machine.graphics and setting.on_host(model):
        words = (
            "CPU and GPU share one memory: experts on the CPU free nothing, and each"
            " such layer pays for handing over"
        )
        yield Finding("contradicts", words)
    first = setting.first_gpu_layer(model)
    if machine.graphics and first:
        count = len(model.layers) - first
        words = (
            f"{first} whole layers run on the CPU, attention and keys with them;"
            f" {count} on the card: experts alone cost less (--n-cpu-moe)"
        )
        yield Finding("means", words)
    dense = [at for at in range(len(model.layers)) if at not in model.moe_layers]
    count = setting.cpu_layers
    if setting.chosen_layers is None and dense and 0 < count < ALL_LAYERS:
        inside = sum(at < count for at in dense)
        if inside:
            words = f"{inside} of the {count} layers are dense and have no experts"
            yield Finding("means", words)
    if len(model.layers) < count < ALL_LAYERS:
        yield Finding("means", f"{count} layers are all of them: as --cpu-moe")
    if settings.tensor_split and len(settings.tensor_split) != machine.gpu_count:
        words = (
            f"-ts has {len(settings.tensor_split)} shares for {machine.gpu_count} cards"
        )
        yield Finding("contradicts", words)
    if settings.split_mode in {"row", "tensor", "graph"} and machine.gpu_count > 1:
        words = (
            f"-sm {settings.split_mode} parts every matrix among the cards; memory and"
            " speed are predicted for whole layers"
        )
        yield Finding("note", words)
    processor = machine.processor
    cores = processor.cores + processor.small_cores
    if settings.threads and settings.threads > cores and processor.known:
        words = (
            f"{settings.threads} threads on {cores} cores: two share one core's units,"
            " and each layer waits for the slowest"
        )
        yield Finding("contradicts", words)
    yield from _about_the_model(settings, model)


def _about_the_model(settings: Settings, model: ModelContents) -> Iterator[Finding]:
    """Tell whether the line loads the model that is asked about."""
    named = shape_named(Path(settings.model.replace("\\", "/")).name)
    asked = shape_named(model.name)
    if named and asked and named["name"] != asked["name"]:
        words = f"the line loads {named['name']}, asked about {asked['name']}"
        yield Finding("contradicts", words)


def need_words(reading: Reading) -> str:
    """Say in one line whether the setting fits; ``fits`` where it does."""
    bill = reading.bill
    tight = min(bill.cards, key=lambda card: card.left, default=None)
    needed, free = bill.gpu_bytes, bill.gpu_free
    name = "the card"
    if tight is not None:
        needed, free, name = tight.needed, tight.free, tight.name
    if reading.machine.graphics and bill.gpu_left < 0 and math.isfinite(free):
        end = "it spills into host memory, several times slower"
        if not reading.machine.windows:
            end = "loading stops, out of memory"
        return (
            f"does not fit: {needed / MIB:,.0f} MiB wanted of {free / MIB:,.0f} free on"
            f" {name}; {end}"
        )
    left = bill.host_left
    if left is not None and left < 0:
        if bill.pages and reading.setting.mapped:
            return (
                f"{-left / 1024**3:.1f} GiB of the experts do not fit into host memory"
                " and are read from the file again and again"
            )
        return f"does not fit: {-left / 1024**3:.1f} GiB more host memory than there is"
    return "fits"
