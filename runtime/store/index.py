"""The index of an expert store: where each expert's record lies, and its checksum.

`store.json` is written last and carries its own digest; without it there is no store,
so a build that was killed leaves nothing that could be mistaken for one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_layout import ExpertLayout, round_up
from moesim.runtime.store.direct_io import BLOCK_BYTES
from moesim.traces.checked import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT: Final = "moesim-experts"
VERSION: Final = 1
INDEX_NAME: Final = "store.json"


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """The contents of `store.json`. R records, L MoE layers.

    Attributes:
        model: the model's name.
        model_digest: the checkpoint (or the draw) the experts came from.
        layouts: the different layouts of a record.
        layer_layouts: [L] which of them each layer uses.
        records: per layer, the record of each expert.
        offsets: [R] where each record begins, a multiple of `BLOCK_BYTES`.
        checksums: [R] CRC-32 of each record, padding included.
        data_bytes: size of `experts.bin`.
        distinct: fewer records than experts on purpose: how many; None where every
            expert has its own.
    """

    model: str
    model_digest: str
    layouts: tuple[ExpertLayout, ...]
    layer_layouts: tuple[int, ...]
    records: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    checksums: tuple[int, ...]
    data_bytes: int
    distinct: int | None = None

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self) -> None:
        """Refuse records that lie outside the file, and names of records that are not
        there.
        """
        if not self.layouts or not self.records:
            raise StoreError("expected layers and layouts, found none")
        if len(self.layer_layouts) != len(self.records):
            raise StoreError(
                f"layer_layouts: expected one of each of {len(self.records)} layers,"
                f" found {len(self.layer_layouts)}"
            )
        if len(self.checksums) != len(self.offsets):
            raise StoreError(
                f"checksums: expected one of each of {len(self.offsets)} records, found"
                f" {len(self.checksums)}"
            )
        used = [record for row in self.records for record in row]
        if self.distinct is None and len(set(used)) < len(used):
            raise StoreError("records: expected one of its own for each expert")
        _check_below("layer_layouts", self.layer_layouts, len(self.layouts))
        for layer, row in enumerate(self.records):
            _check_below(f"records of layer {layer}", row, len(self.offsets))
            last = self.data_bytes - record_stride(self.per_layer[layer])
            places = [self.offsets[record] for record in row]
            _check_below(f"offsets of layer {layer}", places, last + 1)
            if not row or any(place % BLOCK_BYTES for place in places):
                raise StoreError(
                    f"layer {layer}: expected experts on multiples of {BLOCK_BYTES}"
                    f" bytes, found {places}"
                )

    @property
    def per_layer(self) -> tuple[ExpertLayout, ...]:
        """[L] the layout of each layer's records."""
        return tuple(self.layouts[layout] for layout in self.layer_layouts)

    def to_json(self) -> str:
        """Serialise, sealed with a digest; equal stores are equal bytes."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "model_digest": self.model_digest,
            "layouts": [layout.to_json() for layout in self.layouts],
            "layer_layouts": list(self.layer_layouts),
            "records": [list(row) for row in self.records],
            "offsets": list(self.offsets),
            "checksums": list(self.checksums),
            "data_bytes": self.data_bytes,
            "distinct": self.distinct,
        }
        return json.dumps(body | {"digest": digest_of(body)}, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> StoreIndex:
        """Read and check an index.

        Raises:
            StoreError: not an index, of another version, or altered.
        """
        body = _read_json(path)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise StoreError(
                f"{path}: expected the index of an expert store, found something else"
            )
        # Before the digest: another version may seal itself in another way.
        if body.get("version") != VERSION:
            raise StoreError(
                f"{path}: store version: expected {VERSION}, found"
                f" {body.get('version')}; remove the folder and build the store again"
            )

        sealed = body.pop("digest", None)
        if sealed != digest_of(body):
            raise StoreError(
                f"{path}: its digest does not match: it was altered; remove the folder"
                " and build the store again"
            )

        facts = {key: body[key] for key in body if key not in ("format", "version")}
        return parse_json(
            json.dumps(facts),
            cls,
            where=str(path),
            error=StoreError,
            way_out="remove the folder and build the store again",
        )


def _check_below(name: str, values: Iterable[int], limit: int) -> None:
    outside = [value for value in values if not 0 <= value < limit]
    if outside:
        raise StoreError(f"{name}: expected 0..{limit - 1}, found {outside[0]}")


def record_stride(layout: ExpertLayout) -> int:
    """Bytes from one record to the next, in full blocks: a direct read moves those."""
    return round_up(layout.expert_bytes, BLOCK_BYTES)


def digest_of(body: Mapping[str, Any]) -> str:
    """Name a JSON object: BLAKE2b of its canonical text, in hexadecimal."""
    text = json.dumps(body, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_json(path: Path) -> Any:
    """Read a JSON file; None where it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
