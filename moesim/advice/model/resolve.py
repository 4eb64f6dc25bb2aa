"""A model by whatever names it: a GGUF file, a Hugging Face folder, a table entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moesim.advice.errors import AdviceError
from moesim.advice.model.catalogue import named_contents
from moesim.advice.model.gguf_model import gguf_contents
from moesim.advice.model.hf_folder import hf_contents, is_hf_folder

if TYPE_CHECKING:
    from moesim.advice.model.contents import ModelContents


def model_contents(model: str, quant: str = "") -> ModelContents:
    """Read a file or folder, or compute the contents of a model by name.

    Args:
        model: a path to a GGUF file, a Hugging Face folder, or a name that
            ``moesim list models`` prints.
        quant: label of the weight formats; for names only, because files know theirs.

    Raises:
        AdviceError: nothing of the kind, a broken header, or no experts.
    """
    path = Path(model).expanduser()
    # Folders first: a folder may be named like a model.
    if path.is_dir():
        if not is_hf_folder(path):
            raise AdviceError(
                f"{path}: a folder without config.json; give a GGUF file or the folder"
                " of a Hugging Face model"
            )
        _refuse_quant(quant, path)
        return hf_contents(path)

    # A wrong path should be called that, not an unknown model.
    if path.suffix.lower() == ".gguf" or path.is_file():
        _refuse_quant(quant, path)
        try:
            return gguf_contents(path)
        except FileNotFoundError:
            raise AdviceError(f"{path}: no such file") from None
    return named_contents(model, quant)


def _refuse_quant(quant: str, path: Path) -> None:
    if quant:
        raise AdviceError(
            f"--quant {quant}: {path} says its own formats; leave the option out, or"
            " name the model instead of a file"
        )
