"""What a routing trace is: its columns, its header, and the shape of the model it came
from.

One row is one token at one MoE layer. The header travels in the Parquet metadata, so a
trace says by itself which model, which prompts and which tool it came from.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from moesim.traces.errors import TraceError

SCHEMA_VERSION = 1
METADATA_KEY = b"moesim"


class Phase(enum.IntEnum):
    """Which kind of forward pass a step is."""

    PREFILL = 0
    DECODE = 1

    @property
    def label(self) -> str:
        """The name used in files: ``prefill`` or ``decode``."""
        return self.name.lower()


# In the order in which files have them.
REQUIRED_COLUMNS = ("seq", "pos", "phase", "layer", "experts")
# The digit is the depth: how many layers on the predicted one lies.
PREDICTION_COLUMNS = ("pred1_raw", "pred2_raw", "pred3_raw", "pred1_res")
OPTIONAL_COLUMNS = ("weights", "scores", *PREDICTION_COLUMNS, "token")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one MoE model that decide bytes and FLOPs.

    L MoE layers, E routed experts per layer, K chosen per token, H hidden, F expert
    intermediate. `expert_bytes` has one entry per MoE layer, because quantised layers
    of one model differ. `assumed` names the fields that were not known and hold stated
    defaults.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_intermediate: int
    expert_bytes: tuple[int, ...]
    other_bytes: int
    dense_layers: tuple[int, ...] = ()
    shared_experts: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    dtype: str = "bf16"
    scoring: str = "softmax"
    norm_topk: bool = True
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        # A header is read from a file, so this is no matter of our own bugs.
        for name in ("layers", "experts", "top_k", "hidden", "expert_intermediate"):
            if getattr(self, name) < 1:
                raise TraceError(
                    f"model shape {self.name!r}: {name}: expected >= 1, got"
                    f" {getattr(self, name)}"
                )
        if self.top_k > self.experts:
            raise TraceError(
                f"model shape {self.name!r}: top_k {self.top_k} exceeds experts"
                f" {self.experts}"
            )
        if len(self.expert_bytes) != self.layers:
            raise TraceError(
                f"model shape {self.name!r}: expert_bytes: expected {self.layers}"
                f" entries (one per MoE layer), got {len(self.expert_bytes)}"
            )
        if min(self.expert_bytes) < 1:
            raise TraceError(
                f"model shape {self.name!r}: expert_bytes: expected >= 1 byte in every"
                " layer"
            )

    @property
    def max_expert_bytes(self) -> int:
        """Bytes of the largest expert: what a staging slot must hold."""
        return max(self.expert_bytes)

    @property
    def expert_flops_per_token(self) -> int:
        """Multiply-adds count twice: gate, up and down projections, ``6 H F``."""
        # Three matrices of H x F, two operations per weight.
        return 6 * self.hidden * self.expert_intermediate


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The JSON object under Parquet key ``moesim``.

    `provenance` holds model, revision, prompts digest, tool and date; `calibration`
    identifies the artefacts (residual vectors) that optional columns depend on; `split`
    is ``calibration`` or ``evaluation``.
    """

    shape: ModelShape
    provenance: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    split: str = "evaluation"
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Serialise with sorted keys, so equal headers are equal bytes."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(
        cls,
        text: str | bytes,
        *,
        where: str,
    ) -> TraceHeader:
        """Parse a header.

        Raises:
            TraceError: not JSON, nested too deep, another schema version, or fields
                missing or of a wrong type.
        """
        try:
            raw = json.loads(text)

            version = raw["schema_version"]
            if version != SCHEMA_VERSION:
                raise TraceError(  # noqa: TRY301 - one place for all that a header can lack
                    f"{where}: trace schema version: expected {SCHEMA_VERSION}, found"
                    f" {version}; record it again"
                )

            # JSON has lists only.
            shape = dict(raw["shape"])
            for name in ("expert_bytes", "dense_layers", "assumed"):
                shape[name] = tuple(shape.get(name, ()))

            header = cls(
                shape=ModelShape(**shape),
                provenance=dict(raw.get("provenance", {})),
                calibration=dict(raw.get("calibration", {})),
                split=str(raw.get("split", "evaluation")),
            )
            header.to_json()  # what nests too deep to be written again ends here
        except TraceError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError(
                f"{where}: header 'moesim': {type(error).__name__}: {error}; is this a"
                " moesim trace? `moesim trace import` makes one"
            ) from None
        return header
