"""The safetensors files of a Hugging Face directory, and a digest that names them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError, safe_open

from moesim.runtime.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLED_PAGES: Final = 64
_PAGE_BYTES: Final = 4096


def checkpoint_digest(model_dir: Path) -> str:
    """Name a checkpoint: config, and of every safetensors file its size, its table of
    tensors and 64 sampled pages.

    Samples instead of everything, so that 60 GB are named in a moment; training moves
    every page.
    """
    total = hashlib.blake2b(digest_size=16)
    # Sorted keys, so that a file that was merely reformatted keeps its name.
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    total.update(json.dumps(config, sort_keys=True).encode())

    for path in sorted(set(tensor_files(model_dir).values())):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            # A safetensors file begins with the length of its table. The digest takes
            # 8 bytes more than the table: the stores that exist were named so.
            table_bytes = int.from_bytes(file.read(8), "little")
            total.update(file.read(8 + table_bytes))

            last_page = max(size - _PAGE_BYTES, 0)
            for page in range(_SAMPLED_PAGES):
                file.seek(page * last_page // (_SAMPLED_PAGES - 1))
                total.update(file.read(_PAGE_BYTES))
    return total.hexdigest()


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Map every tensor of a checkpoint to its file.

    Raises:
        StoreError: there is no safetensors file, or one is missing or damaged.
    """
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.is_file():
        return _sharded(model_dir, index)
    if not single.is_file():
        raise StoreError(
            f"{model_dir}: expected model.safetensors or {index.name}, found neither"
        )

    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{single}: not a safetensors file: {error}; fetch the checkpoint again"
        ) from None


def _sharded(model_dir: Path, index: Path) -> dict[str, Path]:
    """Map tensors as an index file does."""
    body = json.loads(index.read_text(encoding="utf-8"))
    weight_map: dict[str, str] = body["weight_map"]
    files = {key: model_dir / name for key, name in weight_map.items()}

    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise StoreError(
            f"{model_dir}: {missing[0]}: named in {index.name}, but not there; fetch it"
            " again"
        )
    return files
