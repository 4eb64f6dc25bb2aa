"""What a line means here: where it puts every layer, and what in it does not hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from moesim.advice.plan.commands import (
    LAZY_FROM_BYTES,
    layers_in_words,
    overridden_layers,
)
from moesim.advice.plan.memory import (
    GIB,
    MIB,
    PROGRAM_BYTES,
    Candidate,
    Job,
    bill_of,
    candidates,
    even_split,
    placed_as,
)
from moesim.advice.times.work import (
    ALL_LAYERS,
    DEFAULT_BATCH,
    DEFAULT_MICRO_BATCH,
    HELD,
    KV_SHARES,
    LAZY,
    NEVER,
    Setting,
    has_iqk_products,
)
from moesim.base.errors import AdviceError

if TYPE_CHECKING:
    from moesim.advice.machine import Machine
    from moesim.advice.model.contents import ModelContents
    from moesim.advice.plan.memory import MemoryBill

# What `--fit` leaves free on every card without `--fit-target`.
FIT_MARGIN_BYTES = 1024 * MIB

PLACING = {"gpu_layers", "cpu_moe", "cpu_layers", "overrides", "tensor_split"}


class Reading:
    """What a line means for a model on a machine, and what was found on the way.

    Args:
        given: the line.
        model: that it loads.
        machine: with all its cards.
        job: prompt, answer and requests; its context counts where the line states none.

    Attributes:
        engine: whose line it is.
        settings: what it states.
        model: that it loads.
        machine: with the cards that the line uses.
        job: with the context of one request, and what runs beside the model.
        setting: where it puts layers, and the rest that times depend on.
        findings: what is ignored, contradicts, stops, or means something else.

    Raises:
        AdviceError: cards that the machine lacks, or an override that parts experts.
    """

    def __init__(
        self, given: Given, model: ModelContents, machine: Machine, job: Job
    ) -> None:
        self.engine = given.engine
        self.settings = given.settings
        self.model = model
        self.findings = list(given.findings)
        if given.unread:
            names = ", ".join(given.unread)
            self.say("note", f"not known here, read as without effect: {names}")
        self.machine = self._with_its_cards(machine)
        self.job = self._with_its_context(job)
        self.setting = self._sizes()
        self._place()
        self._load()
        self._contradictions()

    @property
    def bill(self) -> MemoryBill:
        """The memory that the setting needs."""
        return bill_of(self.model, self.machine, self.setting, self.job)

    @property
    def candidate(self) -> Candidate:
        """The setting with its bill."""
        return Candidate(self.setting, self.bill)

    def say(self, kind: str, words: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, words))

    def change(self, **changes: Any) -> None:
        """Change the setting."""
        self.setting = replace(self.setting, **changes)

    def _with_its_cards(self, machine: Machine) -> Machine:
        """Leave out the cards that the line does not use."""
        settings = self.settings
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
            if numbers:
                devices = tuple(devices[int(each)] for each in numbers)
        if settings.split_mode == "none" and len(devices) > 1:
            devices = (devices[min(settings.main_gpu or 0, len(devices) - 1)],)
        if machine.unified:
            return machine if devices else replace(machine, graphics=())
        return machine.with_cards(devices)

    def _with_its_context(self, job: Job) -> Job:
        """Take the context from the line, per request, and what runs beside."""
        settings = self.settings
        context = settings.context
        if not context:
            words = f"no context is stated: read with {job.context:,} tokens"
            self.say("note", words)
            context = job.context * max(job.sequences, 1)
        parallel = settings.parallel or 1
        if parallel > 1 and not settings.unified:
            self.say(
                "means",
                f"{parallel} slots divide the context: {context // parallel:,} tokens"
                " for each request",
            )
        if job.sequences > parallel and settings.parallel is not None:
            self.say(
                "contradicts",
                f"{job.sequences} requests are asked about, {parallel} run at the same"
                " time",
            )
        # The whole context is kept, whoever uses it.
        per_request = max(1, context // job.sequences)
        if job.prompt + job.answer > per_request:
            self.say(
                "contradicts",
                f"a context of {per_request:,} tokens does not hold a prompt of"
                f" {job.prompt:,} and an answer of {job.answer:,}",
            )
        beside = dict(job.beside)
        files = {"draft": settings.draft}
        if not settings.mmproj_on_host:
            files = {"mmproj": settings.mmproj, **files}
        for name, path in files.items():
            file = Path(path).expanduser()
            if not path or name in beside:
                continue
            if file.is_file():
                beside[name] = float(file.stat().st_size)
            else:
                words = f"the bill is without {path}: say its size with --{name}"
                self.say("note", words)
        if settings.cache_mib:
            beside["expert cache"] = float(settings.cache_mib * MIB)
        keep = settings.keep_bytes or job.keep_vram_bytes
        return replace(job, context=per_request, beside=beside, keep_vram_bytes=keep)

    def _sizes(self) -> Setting:
        """Batches, threads, formats."""
        settings = self.settings
        micro = settings.micro_batch or DEFAULT_MICRO_BATCH
        # ollama and LM Studio have one number for both batches.
        alone = self.engine in {OLLAMA, LM_STUDIO}
        batch = settings.batch or max(micro if alone else 0, DEFAULT_BATCH)
        if micro > batch:
            self.say("contradicts", f"-ub {micro} is above -b {batch}: {batch} counts")
        keys = settings.key_format or settings.kv_formats or "f16"
        values = settings.value_format or settings.kv_formats or "f16"
        if keys != values:
            self.say(
                "note",
                f"keys in {keys} and values in {values}: builds without"
                " GGML_CUDA_FA_ALL_QUANTS compute attention of such pairs on the CPU",
            )
        return Setting(
            threads=settings.threads,
            micro_batch=min(micro, batch),
            batch=batch,
            flash=settings.flash is not False,
            kv_format=max(keys, values, key=lambda name: KV_SHARES[name]),
            kv_on_host=settings.kv_on_host,
            sequences=self.job.sequences,
            random_tokens=False,
        )

    def _place(self) -> None:
        """Read where layers and experts lie."""
        settings = self.settings
        placing = PLACING & set(stated(settings))
        if not self.machine.graphics:
            if placing:
                self.say("ignored", "there is no card to place layers on")
            self.change(gpu_layers=0)
            return
        fits_itself = self.engine != IK and settings.fit is not False
        open_layers = settings.gpu_layers in {None, AUTO}
        if fits_itself and open_layers and placing <= {"gpu_layers"}:
            self._fit()
            return
        if fits_itself and placing and self.engine == LLAMA:
            self.say("note", "--fit moves nothing once layers are placed by hand")
        self.change(gpu_layers=self._whole_layers())
        self._place_experts()
        cards = self.machine.gpu_count
        if settings.tensor_split and cards > 1:
            shares = settings.tensor_split[:cards]
            layers = len(self.model.layers) - self.setting.first_gpu_layer(self.model)
            shares = (*shares, *[0.0] * (cards - len(shares)))
            self.change(split=even_split(layers + self.setting.head_on_gpu, shares))

    def _place_experts(self) -> None:
        """Read which layers' experts stay on the CPU."""
        settings = self.settings
        count = settings.cpu_layers
        if settings.cpu_moe:
            if count is not None:
                words = f"--cpu-moe moves all experts: {count} layers add none"
                self.say("ignored", words)
            self.change(cpu_layers=ALL_LAYERS)
            return
        chosen: set[int] = set()
        if settings.overrides:
            chosen = set(overridden_layers(",".join(settings.overrides)) or ())
            elsewhere = re.compile(r"=\s*(?!CPU)\w+\d")
            if any(map(elsewhere.search, settings.overrides)):
                words = "experts sent to another card count on that of their layer"
                self.say("note", words)
        elif count is not None and self.engine != IK:
            self.change(cpu_layers=count)
            return
        if count is not None and self.engine == IK:
            chosen |= self._spread(count)
        elif count is not None:
            chosen |= set(range(count))
        if settings.overrides or chosen:
            kept = frozenset(at for at in chosen if at < len(self.model.layers))
            self.change(chosen_layers=kept)

    def _whole_layers(self) -> int:
        count = self.settings.gpu_layers
        if count is None and self.engine == IK:
            words = "without -ngl ik_llama.cpp computes every layer on the CPU"
            self.say("means", words)
            return 0
        if count is None or count == AUTO:
            return ALL_LAYERS
        if 0 < count < 1:
            return round(count * len(self.model.layers))
        return int(count)

    def _spread(self, count: int) -> set[int]:
        """Layers whose experts ik_llama.cpp's ``--n-cpu-moe`` leaves to the CPU.

        With several cards they are spread over these since March 2026, the last ones of
        each; with one card they are the last ones of all since August.
        """
        cards = self.machine.single_cards
        sizes = [float(card.vram_bytes) for card in cards]
        shares = self.settings.tensor_split or sizes
        layers = even_split(len(self.model.layers), shares[: len(cards)])
        chosen: set[int] = set()
        end = 0
        for number, held in enumerate(layers):
            end += held
            share = count // len(layers) + (number < count % len(layers))
            chosen |= set(range(max(end - held, end - share), end))
        several = len(cards) > 1
        where = "the last of each card" if several else "the last ones"
        since = "March" if several else "August"
        self.say(
            "means",
            f"--n-cpu-moe {count} means layers {layers_in_words(chosen)} in"
            f" ik_llama.cpp since {since} 2026 ({where}), the first {count} in older"
            " builds and in llama.cpp",
        )
        return chosen

    def _fit(self) -> None:
        """Place layers as the engine does that is left to fit them itself."""
        margin = FIT_MARGIN_BYTES
        if target := re.match(r"\d+", self.settings.fit_target):
            margin = int(target.group()) * MIB
        micro = self.setting.micro_batch
        job = replace(self.job, micro_batch=micro, keep_vram_bytes=margin)
        fitting = candidates(self.model, self.machine, job)
        if not fitting:
            self.change(cpu_layers=ALL_LAYERS)
            return
        # Fewest experts on the processor first.
        fitted = min(
            (each.setting for each in fitting if each.setting.chosen_layers is None),
            key=lambda each: (-each.gpu_layers, each.cpu_layers),
            default=fitting[0].setting,
        )
        on_host = layers_in_words(fitted.on_host(self.model))
        self.say(
            "note",
            f"{self.engine} places layers itself: experts of layers {on_host} on the"
            f" CPU, with {margin // MIB:,} MiB left free",
        )
        self.setting = placed_as(self.setting, fitted)

    def _load(self) -> None:
        """Read how weights come into memory: mapped, page-locked, uploaded when."""
        settings = self.settings
        mapped = settings.load_mode in {None, "auto", "mmap", "mmap+mlock"}
        mapped = mapped and not settings.repacked
        tables = HELD
        large = self.model.table_bytes > LAZY_FROM_BYTES
        wanted = settings.lazy == "on" or (settings.lazy != "off" and large)
        if self.model.table_bytes and wanted and mapped and self.engine != IK:
            tables = LAZY
        elif settings.lazy == "on":
            self.say(
                "contradicts",
                "--lazy-mode on wants a mapped file: look-up tables are held in memory",
            )
        self.change(mapped=mapped, tables=tables)
        buffers = self.bill.host_bytes - PROGRAM_BYTES
        unlocked = settings.unpinned or settings.repacked
        locked = not mapped and buffers <= self.machine.most_page_locked_bytes
        if not (unlocked or mapped or locked):
            self.say(
                "note",
                f"{buffers / GIB:.1f} GiB cannot be page-locked under"
                f" {self.machine.system}: set GGML_CUDA_NO_PINNED=1 if loading stops",
            )
        self.change(page_locked=locked and not unlocked)
        if settings.no_uploads or settings.repacked:
            self.change(gpu_from_tokens=NEVER)
        elif self.engine == IK:
            layer = self.model.layers[self.model.moe_layers[0]]
            rows = 32 * layer.experts // layer.top_k
            self.change(gpu_from_tokens=rows)
        if self.engine == IK:
            iqk = has_iqk_products(self.model)
            self.change(iqk=iqk, used_only=not settings.all_uploaded)

    def _contradictions(self) -> None:
        """Tell what does not go together, or does not do what its words promise."""
        settings, setting = self.settings, self.setting
        model, machine = self.model, self.machine
        layers = len(model.layers)
        rounded = (settings.value_format or settings.kv_formats or "f16") != "f16"
        if rounded and not setting.flash:
            words = "rounded values want flash attention (-fa on): loading stops"
            self.say("stops", words)
        if machine.unified and machine.graphics and setting.on_host(model):
            self.say(
                "contradicts",
                "CPU and GPU share one memory: experts on the CPU free nothing, and"
                " each such layer pays for handing over",
            )
        first = setting.first_gpu_layer(model)
        if machine.graphics and first:
            self.say(
                "means",
                f"{first} whole layers run on the CPU, attention and keys with them;"
                f" {layers - first} on the card: experts alone cost less (--n-cpu-moe)",
            )
        count = setting.cpu_layers
        inside = min(count, layers) - sum(at < count for at in model.moe_layers)
        if setting.chosen_layers is None and inside and count < ALL_LAYERS:
            words = f"{inside} of the {count} layers are dense and have no experts"
            self.say("means", words)
        if layers < count < ALL_LAYERS:
            self.say("means", f"{count} layers are all of them: as --cpu-moe")
        cards = machine.gpu_count
        shares = len(settings.tensor_split)
        if shares and shares != cards:
            self.say("contradicts", f"-ts has {shares} shares for {cards} cards")
        if settings.split_mode in {"row", "tensor", "graph"} and cards > 1:
            self.say(
                "note",
                f"-sm {settings.split_mode} parts every matrix among the cards; memory"
                " and speed are predicted for whole layers",
            )
        processor = machine.processor
        cores = processor.cores + processor.small_cores
        if settings.threads and settings.threads > cores and processor.known:
            self.say(
                "contradicts",
                f"{settings.threads} threads on {cores} cores: two share one core's"
                " units, and each layer waits for the slowest",
            )
        named = shape_named(Path(settings.model.replace("\\", "/")).name)
        asked = shape_named(model.name)
        if named and asked and named["name"] != asked["name"]:
            words = f"the line loads {named['name']}, asked about {asked['name']}"
            self.say("contradicts", words)


def need_words(reading: Reading) -> str:
    """Say in one line whether the setting fits; ``fits`` where it does."""
    bill = reading.bill
    if bill.gpu_left < 0:
        tight = min(bill.cards, key=lambda card: card.left)
        name = tight.name if len(bill.cards) > 1 else "the card"
        end = "it spills into host memory, several times slower"
        if not reading.machine.windows:
            end = "loading stops, out of memory"
        return (
            f"does not fit: {tight.needed / MIB:,.0f} MiB wanted of"
            f" {tight.free / MIB:,.0f} free on {name}; {end}"
        )
    left = bill.host_left
    if left is not None and left < 0:
        if bill.pages and reading.setting.mapped:
            return (
                f"{-left / GIB:.1f} GiB of the experts do not fit into host memory"
                " and are read from the file again and again"
            )
        return f"does not fit: {-left / GIB:.1f} GiB more host memory than there is"
    return "fits"
