"""`moesim trace import`, `export`, `synth`, `predict` and `widths` make traces, and
other tools' files of them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moesim.base.options import (
    REQUIRED,
    ConfigError,
    JsonOptions,
    Options,
    file_option,
    input_option,
    option,
    seed_option,
    target_argument,
    trace_argument,
)
from moesim.cli import output
from moesim.cli.options import from_dataclass

SHAPE = "layers=1,experts=6,top_k=1,expert_bytes=1MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(JsonOptions):
    """What a foreign file does not say itself."""

    sources: tuple[Path, ...] = input_option(
        "A foreign routing trace; or tables, one for each MoE layer.",
        REQUIRED,
        metavar="SRC…",
        argument=True,
    )
    target: Path = target_argument("The trace to write.")
    shape: str | None = option(
        None, f"The model: a name (see: list models), or {SHAPE}.", metavar="NAME|WORDS"
    )
    quant: str | None = option(
        None,
        "Weight format that decides the bytes. Default: what the model is published in.",
        metavar="FORMAT",
    )
    map: str | None = option(
        None,
        "Columns of a table, or keys of JSON lines, such as pos=position,experts=e*.",
        metavar="OURS=THEIRS,…",
    )
    prompt_tokens: int | None = option(
        None,
        "First tokens of every sequence that are prompt, where the file does not say.",
        minimum=0,
    )
    batch: int | None = option(
        None,
        "Sequences that ran together, where a file holds router logits alone.",
        metavar="B",
        minimum=1,
    )
    others: tuple[str, ...] = option(
        (),
        "What else the importer of this layout asks for.",
        metavar="NAME=VALUE",
        flag="--option",
    )
    drop_incomplete: bool = option(
        False, "Leave out a last line or token that was cut off."
    )
    drop_profiling: bool = option(
        False,
        "Leave out tokens in a row that all have the same experts: a profiling run.",
    )

    def __post_init__(self) -> None:
        """Refuse two statements of the bytes, and words that are no options."""
        Options.__post_init__(self)
        if self.quant is not None and "expert_bytes" in (self.shape or ""):
            raise ConfigError(
                f"quant: expected one of both, got {self.quant} beside expert_bytes in"
                " --shape, which says the bytes already"
            )
        if not all(name and value for name, value in self._pairs()):
            raise ConfigError(f"others: expected NAME=VALUE, got {self.others[0]!r}")

    def for_importer(self) -> dict[str, str]:
        """What `moesim.traces.importers.import_trace` takes as options: texts, since
        files name some of them too.
        """
        stated = {
            "map": self.map,
            "prompt_tokens": self.prompt_tokens,
            "batch": self.batch,
        }
        given = {
            name: str(value) for name, value in stated.items() if value is not None
        }
        return given | dict(self._pairs())

    def _pairs(self) -> list[tuple[str, str]]:
        split = [word.partition("=") for word in self.others]
        return [(name, value) for name, _, value in split]


@from_dataclass(from_file=False)
def import_(options: ImportOptions) -> None:
    """Make a trace of a foreign file. The file does not tell the sizes of its model, so
    --shape does.

    A moesim trace whose rows are out of order is sorted; it needs no --shape.

    \b
    Examples:
      moesim trace import routing.parquet q.parquet --shape qwen3-30b-a3b --quant q4_k_m
      moesim trace import toy.parquet t.parquet --shape layers=1,experts=6,top_k=1,expert_bytes=1MiB
      moesim trace import layer*.parquet q.parquet --shape qwen3-30b-a3b --map experts=topk
      moesim trace import unsorted.parquet sorted.parquet
    """
    from moesim.base.units import format_sizes
    from moesim.traces.importers import import_trace
    from moesim.traces.models import model_shape

    # A sorted moesim trace keeps its own shape.
    model = None
    if options.shape is not None:
        model = model_shape(options.shape, options.quant)
    with output.bar("importing") as show:
        imported = import_trace(
            list(options.sources),
            options.target,
            options=options.for_importer(),
            progress=show,
            **options.arguments(import_trace) | {"shape": model},
        )
    shape = imported.shape
    facts = {
        "trace": str(imported.path),
        "importer": imported.importer,
        "rows": imported.rows,
        "sequences": imported.sequences,
        "model": shape.name,
        "expert_bytes": list(shape.expert_sizes),
        "columns": imported.columns,
        "notes": imported.notes,
    }
    # Bytes that the file or the shape itself tells are of no format.
    is_own = model is None or shape.expert_bytes != model.expert_bytes
    weights = f"; taken as {shape.dtype}, --quant says otherwise"
    if is_own or "expert_bytes" in str(options.shape):
        weights = ""
    elif options.quant:
        weights = f" ({shape.dtype})"
    # Layers of mixed quantisation have experts of several sizes.
    sizes = format_sizes(shape.expert_sizes)
    line = (
        f"{imported.rows:,} rows of {imported.sequences:,}"
        f" sequence{'s' * (imported.sequences != 1)}; {shape.name}: {shape.layers} MoE"
        f" layers x {shape.experts} experts, top {shape.top_k}, {sizes} each{weights}"
    )
    output.tell(options, facts, [line], imported.path, notes=imported.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(Options):
    """Which trace, in which layout."""

    trace: Path = trace_argument()
    target: Path = target_argument("The file to write.")
    layout: str = option(
        REQUIRED,
        "csv, oracle-general (libCacheSim), statistics, or moe-cache-profile and"
        " moe-cache-slots (llama.cpp's expert-cache forks).",
        metavar="LAYOUT",
        flag="--to",
    )
    cache_size: str | None = option(
        None,
        "Of moe-cache-slots: memory of each card for cached experts.",
        metavar="SIZE,…",
    )
    tensor_split: str | None = option(
        None,
        "Of moe-cache-slots: shares of layers of each card, as -ts of llama.cpp.",
        metavar="N,…",
    )
    n_cpu_moe: int | None = option(
        None,
        "Of moe-cache-slots: layers whose experts are in host memory. Default: all.",
        metavar="N",
        minimum=0,
    )


@from_dataclass(from_file=False)
def export(options: ExportOptions) -> None:
    """Write a trace in the layout of another tool.

    \b
    Examples:
      moesim trace export trace.parquet trace.oracleGeneral --to oracle-general
      moesim trace export trace.parquet trace.csv --to csv
      moesim trace export trace.parquet slots.csv --to moe-cache-slots --cache-size 9GiB,4GiB
    """
    from moesim.traces.exporters import export_trace
    from moesim.traces.format.reader import open_trace

    names = ("cache_size", "tensor_split", "n_cpu_moe")
    stated = {name: getattr(options, name) for name in names}
    remarks: list[str] = []
    with output.bar("exporting") as show:
        records = export_trace(
            open_trace(options.trace),
            options.target,
            options.layout,
            progress=show,
            tell=remarks.append,
            **{name: value for name, value in stated.items() if value is not None},
        )
    print(*remarks, f"wrote {options.target}: {records:,} records", sep="\n")


def _habit(text: str, maximum: float) -> Any:
    return option(None, text, minimum=0, maximum=maximum, needs=("shape",))


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions(JsonOptions):
    """What a drawn trace is like."""

    target: Path = target_argument("The trace to write.")
    tokens: float = option(
        REQUIRED, "Tokens in all, such as 1e6.", metavar="N", minimum=1, maximum=1e12
    )
    like: str | None = option(
        None,
        "A trace to resemble, saved statistics of one, or those that ship:"
        " deepseek-v2-lite, gpt-oss-20b, kimi-linear-48b-a3b, mixtral-8x7b,"
        " olmoe-1b-7b, qwen3-30b-a3b, qwen3.6-35b-a3b, qwen3.8-flash-next.",
        metavar="TRACE|FILE|NAME",
        place="input",
        excludes=("shape",),
    )
    save_stats: Path | None = file_option(
        "Save the statistics; --like takes them.", needs=("like",)
    )
    shape: str | None = option(
        None, "A model instead (see: list models).", metavar="NAME|WORDS"
    )
    quant: str | None = option(
        None,
        "Weight format. Default: as published, or with --like that of the trace.",
        metavar="FORMAT",
    )
    skew: float | None = _habit("Zipf exponent of popularity.", 5)
    topic: float | None = _habit("Share of popularity that is a sequence's own.", 1)
    reuse: float | None = _habit("Overlap of adjacent tokens.", 0.99)
    memory: float | None = _habit("Exponent by which earlier use is forgotten.", 10)
    dependence: float | None = _habit("What ties layers, by kinds of tokens.", 5)
    drift: float | None = _habit("Wandering popularity.", 5)
    prompt_tokens: int | None = option(
        None, "Prompt tokens of each sequence. Default: 0, or as in --like.", minimum=0
    )
    new_tokens: int | None = option(
        None,
        "Generated tokens of each sequence. Default: 512, or as in --like.",
        minimum=0,
    )
    seed: int = seed_option()


@from_dataclass(from_file=False)
def synth(options: SynthOptions) -> None:
    """Draw a trace with the statistics of a real one (--like), or with stated ones
    (--shape), and compare its curves with those of real routing: drawn (real).

    \b
    Examples:
      moesim trace synth long.parquet --like real.parquet --tokens 1e6 --save-stats real.npz
      moesim trace synth mixtral.parquet --like mixtral-8x7b --quant q4_k_m --tokens 1e4
      moesim trace synth new.parquet --shape qwen3-235b-a22b --tokens 1e4 --skew 1 --reuse 0.4
    """
    from moesim.traces.synthetic.generate import synth as draw

    tokens = int(options.tokens)
    stated = options.options()
    del stated["as_json"]
    compared: list[Any] = []
    with output.bar("drawing") as show:
        trace = draw(
            progress=show,
            comparison=compared.append,
            # Zero is a statement too, so only what was left out is dropped.
            **{name: each for name, each in stated.items() if each is not None},
        )
    likeness = compared[0]
    facts = {
        "trace": str(options.target),
        "rows": trace.rows,
        "tokens": tokens,
        "model": trace.shape.name,
        "synthetic": True,
        "seed": options.seed,
        "likeness": None if likeness is None else asdict(likeness),
    }
    likeness_text = (
        f"not compared: no real routing of {trace.shape.name} is known here; drawn"
        " are habits of other models"
    )
    if likeness is not None:
        likeness_text = "\n".join(likeness.lines())
    made = (
        f"wrote {options.target}: {trace.rows:,} rows, {tokens:,} tokens; synthetic"
        " (marked in its header)"
    )
    output.tell(options, facts, [likeness_text, made], options.save_stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions(JsonOptions):
    """How accurate predictions are, and how their errors depend on each other."""

    trace: Path = trace_argument()
    target: Path = target_argument("The trace to write.")
    recall: tuple[float, ...] = option(
        (),
        "Recall of pred1_raw, pred2_raw, pred3_raw: used experts among the K best"
        " predicted.",
        metavar="R",
    )
    residual: float | None = option(
        None,
        "Recall of pred1_res, which DALI needs.",
        metavar="R",
        flag="--residual-recall",
    )
    at: int | None = option(
        None,
        "Measure recalls at N: a token's N best experts, among the N best predicted."
        " Default: all K.",
        minimum=1,
    )
    scores: bool = option(False, "Also draw the gate's scores, and weights.")
    seed: int = seed_option()


@from_dataclass(from_file=False)
def predict(options: PredictOptions) -> None:
    """Add predictions of stated accuracy to a trace, and scores where it has none.

    They are drawn: the header says so, and so does every result of a replay.

    \b
    Examples:
      moesim trace predict q.parquet p.parquet --recall 0.8,0.7,0.62 --scores
      moesim trace predict q.parquet p.parquet --recall 0.8 --residual-recall 0.86
      moesim trace predict q.parquet p.parquet --recall 0.82 --at 1 --scores
    """
    from moesim.traces.synthetic.predict import predict as draw_predictions

    with output.bar("predicting") as show:
        predicted = draw_predictions(
            options.trace, progress=show, **options.arguments(draw_predictions)
        )
    facts = {
        "trace": str(predicted.path),
        "rows": predicted.rows,
        "scores": predicted.scores,
        "predictors": [asdict(predictor) for predictor in predicted.predictors],
        "at": options.at,
        "seed": options.seed,
    }
    recall = "recall" if options.at is None else f"recall at {options.at}"
    lines = [
        f"{each.column}: {recall} {each.measured:.3f}, asked {each.asked:g}"
        for each in predicted.predictors
    ]
    if predicted.scores:
        lines.append("scores: drawn consistent with the experts")
    lines.append(
        f"wrote {options.target}: {predicted.rows:,} rows; synthetic (marked in its"
        " header)"
    )
    output.tell(options, facts, lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthsOptions(JsonOptions):
    """Which experts get which bit-widths."""

    trace: Path = trace_argument()
    target: Path = target_argument("The trace to write.")
    bits: tuple[float, ...] = option(
        (),
        "Bits per weight, scales included; the first experts get the first.",
        metavar="B",
    )
    shares: tuple[float, ...] | None = option(
        None,
        "Share of each layer's experts with each width. Default: equal shares.",
        metavar="S",
    )
    by: str = option(
        "random",
        "Which experts of a layer come first: random, or popularity (used most often in"
        " this trace).",
        metavar="RULE",
    )
    table: Path | None = input_option(
        "Instead of --bits: a CSV file with the columns layer, expert, bits.",
        flag="--widths",
        excludes=("bits", "shares", "by"),
    )
    seed: int = seed_option()


@from_dataclass(from_file=False)
def widths(options: WidthsOptions) -> None:
    """Give the experts of one layer bit-widths, and so sizes, of their own.

    Routing stays. The header says how widths were given, and so does every result of a
    replay.

    \b
    Examples:
      moesim trace widths q.parquet w.parquet --bits 8,4,2 --shares 0.25,0.5,0.25
      moesim trace widths q.parquet w.parquet --bits 8,4 --by popularity
      moesim trace widths q.parquet w.parquet --widths widths.csv
    """
    from moesim.base.units import format_sizes
    from moesim.traces.synthetic.marks import WIDTHS, widths_text
    from moesim.traces.synthetic.widths import set_widths

    widened = set_widths(options.trace, **options.arguments(set_widths))
    mean_bits = float(widened.bits.mean())
    facts = {
        "trace": str(widened.path),
        "rows": widened.rows,
        "mean_bits": mean_bits,
        "expert_bytes": list(widened.shape.expert_sizes),
        WIDTHS: widened.mark,
    }
    lines = [
        f"{widths_text(widened.mark)}; {mean_bits:.3g} bits in the mean",
        f"one expert: {format_sizes(widened.shape.expert_sizes)}",
        f"wrote {options.target}: {widened.rows:,} rows; widths marked in its header",
    ]
    output.tell(options, facts, lines)
