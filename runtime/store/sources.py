"""Where the experts of a store come from: a checkpoint on disk, a model in memory, or a
random draw.

Checkpoints name their tensors as their authors liked (``experts.7.w1.weight``,
``experts.gate_up_proj``), and the library knows for each model how these become the
parameters of its experts modules. A source borrows that knowledge, but applies it to
one expert at a time: it builds the model without memory (on the ``meta`` device), asks
the library which checkpoint tensors feed which parameter, and runs the library's own
conversion on the tensors of one expert. So nothing here knows a model by name, and
memory holds one expert, not sixty gigabytes.

Only a conversion that mixes experts (none of the common ones does) needs a whole
layer's parameter at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch
from moesim.runtime.errors import StoreError
from moesim.runtime.models.expert_math import (
    ACTIVATIONS,
    ALPHA_SWIGLU,
    MODULE_GATING,
    ExpertLayout,
    Gating,
    pack_layout,
    swiglu_layout,
    torch_dtype,
)
from moesim.runtime.models.hf import MoeBlock, find_blocks, weights_digest
from moesim.traces.errors import TraceError
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moesim.traces.format.schema import ModelShape
    from torch import nn

_SAMPLED_PAGES: Final = 64
_PAGE_BYTES: Final = 4096
_PROBE_ROWS: Final = 16
_PROBE_REACH: Final = (
    12.0  # beyond every clamp in use (7 in gpt-oss); doubled limits reach further
)


class ExpertSource(Protocol):
    """Experts, one after the other.

    `layouts` and `experts` have one entry per MoE layer: the record's map and the
    number of experts. `distinct` is the number of different records where some experts
    share one, else None.
    """

    name: str
    digest: str
    layouts: tuple[ExpertLayout, ...]
    experts: tuple[int, ...]
    distinct: int | None

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Tensors of one expert on the CPU, in the order and shape of the layer's
        layout, in any float dtype.
        """


class RandomSource:
    """Experts of a model's shape with random weights: the size and the work are real,
    the answers are not.

    Every expert is ``3 H F`` weights in `dtype`, whatever bytes per expert the shape
    was quantised to. Weights are uniform with the variance 1 / inputs, so that
    activations keep their size.

    Args:
        shape: the model.
        seed: >= 0; with the same seed every expert is the same, in whatever order they
            are made.
        dtype: of the weights.
        distinct: make only so many different records, used in turn; None for one per
            expert.

    Raises:
        StoreError: `distinct` is out of range.
    """

    def __init__(
        self, shape: ModelShape, seed: int, dtype: str, distinct: int | None = None
    ) -> None:
        total = shape.layers * shape.experts
        if distinct is not None and not 1 <= distinct <= total:
            raise StoreError(
                f"distinct: expected 1 to {total} (layers x experts of {shape.name}),"
                f" got {distinct}"
            )
        layout = swiglu_layout(
            shape.hidden, shape.expert_intermediate, torch_dtype(dtype)
        )
        self.name = f"{shape.name} (random)"
        self.layouts = (layout,) * shape.layers
        self.experts = (shape.experts,) * shape.layers
        self.distinct = distinct
        self._seed = seed
        facts = [
            shape.layers,
            shape.experts,
            shape.hidden,
            shape.expert_intermediate,
            seed,
            dtype,
            distinct,
        ]
        self.digest = hashlib.blake2b(
            json.dumps(facts).encode(), digest_size=16
        ).hexdigest()

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Draw one expert."""
        draws = np.random.default_rng((self._seed, layer, expert))
        drawn = []
        for spec in self.layouts[layer].tensors:
            bound = math.sqrt(3 / spec.shape[-1])
            uniform = torch.from_numpy(draws.random(spec.shape, dtype=np.float32))
            drawn.append(uniform.mul_(2 * bound).sub_(bound))
        return drawn


class ModuleSource:
    """Experts of a model that is in memory already.

    Args:
        model: with its experts.
        dtype: of the store; that of the model's experts when None.

    Raises:
        StoreError: the model has no experts that the library's experts interface
            serves.
    """

    distinct: int | None = None

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._blocks = moe_blocks(model)
        chosen = dtype or next(self._blocks[0].experts.parameters()).dtype
        self.name = type(model).__name__
        self.digest = weights_digest(model)
        self.layouts = tuple(layout_of(block.experts, chosen) for block in self._blocks)
        self.experts = tuple(block.count for block in self._blocks)

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Look at one expert's parameters."""
        module = self._blocks[layer].experts
        return [
            getattr(module, spec.name)[expert].detach().cpu()
            for spec in self.layouts[layer].tensors
        ]


@dataclass(slots=True)
class _Recipe:
    """How one parameter [E, …] is made: checkpoint tensors by pattern, and the
    conversion (None: as it is).
    """

    converter: Any
    keys: dict[str, list[str]] = field(default_factory=dict)

    def one_by_one(self, count: int) -> bool:
        """Whether expert e needs nothing but the e-th tensor of each pattern.

        True for a stack over experts followed by operations inside each expert.
        """
        first, *rest = self.converter.operations
        stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0
        inside = all(
            type(one).__name__ == "Concatenate" and one.dim >= 1 for one in rest
        )
        return (
            stacks and inside and all(len(keys) == count for keys in self.keys.values())
        )


class CheckpointSource:
    """Experts of a Hugging Face directory, read tensor by tensor.

    Args:
        model_dir: a directory with config.json and safetensors, in one file or sharded.
        dtype: of the store; the checkpoint's own when None.

    Raises:
        StoreError: the directory is no Mixture-of-Experts checkpoint that can be read
            without its library's help, is quantised, or lacks expert tensors.
    """

    distinct: int | None = None

    def __init__(self, model_dir: Path | str, dtype: torch.dtype | None = None) -> None:
        self.directory = Path(model_dir)
        self._skeleton = skeleton(self.directory)
        self._blocks = moe_blocks(self._skeleton)
        self._files = _tensor_files(self.directory)
        self._open: dict[Path, Any] = {}
        chosen = dtype or self._skeleton.config.dtype or torch.float32
        self.name = self.directory.resolve().name
        self.digest = checkpoint_digest(self.directory)
        self.layouts = tuple(layout_of(block.experts, chosen) for block in self._blocks)
        self.experts = tuple(block.count for block in self._blocks)
        self._recipes = self._plan()
        self._layer: dict[
            str, torch.Tensor
        ] = {}  # converted parameters of one layer, where that cannot be avoided
        self._layer_of = -1

    def expert(self, layer: int, expert: int) -> Sequence[torch.Tensor]:
        """Read and convert one expert."""
        block = self._blocks[layer]
        return [
            self._one(layer, self._target(block, spec.name), expert)[0]
            for spec in self.layouts[layer].tensors
        ]

    def _plan(self) -> dict[str, _Recipe]:
        """Ask the library which checkpoint tensors feed which expert parameter."""
        from transformers.conversion_mapping import (  # noqa: PLC0415 - seconds to import
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._skeleton)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {
            pattern: one for one in converters for pattern in one.source_patterns
        }
        parameters = self._skeleton.state_dict()
        prefix = self._skeleton.base_model_prefix
        wanted = {
            self._target(block, spec.name)
            for block, layout in zip(self._blocks, self.layouts, strict=True)
            for spec in layout.tensors
        }
        recipes: dict[str, _Recipe] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, prefix, parameters
            )
            if name not in parameters and key in parameters:
                name = key
                pattern = None
            if name in wanted:
                recipe = recipes.setdefault(name, _Recipe(by_pattern.get(pattern)))
                recipe.keys.setdefault(pattern or key, []).append(key)
        if missing := sorted(wanted - recipes.keys()):
            raise StoreError(
                f"{self.directory}: {missing[0]}: no tensor in the checkpoint feeds it;"
                " is it complete?"
            )
        return recipes

    def _one(self, layer: int, target: str, expert: int) -> torch.Tensor:
        """Make one expert's part [1, …] of a parameter."""
        recipe = self._recipes[target]
        count = self.experts[layer]
        if recipe.converter is None:
            (key,) = next(iter(recipe.keys.values()))
            part = self._tensor(key, slice(expert, expert + 1))
        elif recipe.one_by_one(count):
            part = self._convert(
                target, {p: [keys[expert]] for p, keys in recipe.keys.items()}
            )
        else:
            part = self._whole(layer, target)[expert : expert + 1]
        expected = (1, *self._skeleton.get_parameter(target).shape[1:])
        if tuple(part.shape) != expected:
            raise StoreError(
                f"{self.directory}: {target}: expected shape {expected} per expert, got"
                f" {tuple(part.shape)}"
            )
        return part

    def _whole(self, layer: int, target: str) -> torch.Tensor:
        """Convert a whole parameter [E, …]; those of one layer are kept."""
        if self._layer_of != layer:
            self._layer.clear()
            self._layer_of = layer
        if target not in self._layer:
            self._layer[target] = self._convert(target, self._recipes[target].keys)
        return self._layer[target]

    def _convert(self, target: str, keys: dict[str, list[str]]) -> torch.Tensor:
        """Run the library's conversion on some tensors."""
        converter = deepcopy(self._recipes[target].converter)
        for pattern, names in keys.items():
            for name in names:
                converter.add_tensor(target, name, pattern, self._tensor(name))
        made = converter.convert(
            target, model=self._skeleton, config=self._skeleton.config
        )[target]
        return made[0] if isinstance(made, list) else made

    def _tensor(self, key: str, part: slice | None = None) -> torch.Tensor:
        """Read a tensor, or a part of its first axis."""
        path = self._files[key]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            found = self._open[path].get_slice(key)
            return cast("torch.Tensor", found[:] if part is None else found[part])
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{path}: tensor {key}: cannot read: {error}; fetch the checkpoint"
                " again"
            ) from None

    @staticmethod
    def _target(block: MoeBlock, tensor: str) -> str:
        return f"{block.name}.experts.{tensor}"


def moe_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model, which the library's experts interface must serve.

    Raises:
        StoreError: there are none, or their experts bypass that interface.
    """
    try:
        blocks = find_blocks(model)
    except TraceError as error:
        raise StoreError(str(error)) from None
    for block in blocks:
        if not hasattr(block.experts, "_apply_gate"):
            raise StoreError(
                f"{block.name}.experts ({type(block.experts).__name__}): expected"
                " experts served by the library's experts interface, found a module of"
                " its own kind; this model cannot be offloaded"
            )
    return blocks


def layout_of(experts: nn.Module, dtype: torch.dtype) -> ExpertLayout:
    """Describe the experts of a module: shapes from its parameters, flags from the
    library, gating by trial.

    Args:
        experts: an experts module; its parameters may be on ``meta``.
        dtype: in which they will be stored.

    Raises:
        StoreError: it has parameters that no known kind of expert has.
    """
    module: Any = experts
    names = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    found = {
        name: tuple(parameter.shape) for name, parameter in experts.named_parameters()
    }
    if set(found) != set(names):
        raise StoreError(
            f"{type(experts).__name__}: expected parameters {', '.join(names)}, found"
            f" {', '.join(sorted(found))}"
        )
    shapes = {name: found[name][1:] for name in names}
    return pack_layout(
        shapes,
        dtype=dtype,
        transposed=bool(module.is_transposed),
        gating=_gating(module),
    )


def skeleton(model_dir: Path) -> Any:
    """Build a directory's model without memory for its weights (on ``meta``).

    Raises:
        StoreError: no such directory, no config.json, a quantised model, or not a
            causal language model.
    """
    config, kind = read_config(model_dir)
    with torch.device("meta"):
        return kind(config)


def read_config(model_dir: Path) -> tuple[Any, Any]:
    """Read a directory's configuration; return it with the model's class.

    Raises:
        StoreError: as in `skeleton`.
    """
    from transformers import (  # noqa: PLC0415 - seconds to import
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
    )

    if not (model_dir / "config.json").is_file():
        raise StoreError(
            f"{model_dir}: expected a Hugging Face model directory with config.json,"
            " found none"
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(
            f"{model_dir}: not a causal language model: {str(error).splitlines()[0]}"
        ) from None
    if getattr(config, "quantization_config", None) is not None:
        raise StoreError(
            f"{model_dir}: expected float weights, found a quantised checkpoint; load"
            " it dequantised with transformers and save it with save_pretrained first"
        )
    return config, kind


def checkpoint_digest(model_dir: Path) -> str:
    """Name a checkpoint: config, and of every safetensors file its size, its table of
    tensors and 64 sampled pages.

    Samples instead of everything, so that 60 GB are named in a moment; training moves
    every page.
    """
    total = hashlib.blake2b(digest_size=16)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    total.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(set(_tensor_files(model_dir).values())):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            total.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for page in range(_SAMPLED_PAGES):
                file.seek(page * max(size - _PAGE_BYTES, 0) // (_SAMPLED_PAGES - 1))
                total.update(file.read(_PAGE_BYTES))
    return total.hexdigest()


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Map every tensor of a checkpoint to its file."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.is_file():
        named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))[
            "weight_map"
        ]
        files = {key: model_dir / file for key, file in named.items()}
        if missing := sorted(
            {path.name for path in files.values() if not path.is_file()}
        ):
            raise StoreError(
                f"{model_dir}: {missing[0]}: named in {index.name}, but not there;"
                " fetch it again"
            )
        return files
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, SafetensorError) as error:
            raise StoreError(
                f"{single}: not a safetensors file: {error}; fetch the checkpoint again"
            ) from None
    raise StoreError(
        f"{model_dir}: expected model.safetensors or {index.name}, found neither"
    )


def _gating(experts: Any) -> Gating:
    """Find the gating that computes what the module's own function computes, on numbers
    that tell them apart.
    """
    limits = [None, *_numbers(experts, ("limit", "swiglu_limit"))]
    reach = max(
        [_PROBE_REACH, *(2 * abs(limit) for limit in limits if limit is not None)]
    )
    own = experts._apply_gate if experts.has_gate else experts.act_fn  # noqa: SLF001 - the library's joint
    with torch.device("cpu"):  # models are described while their frame is built on meta
        draws = torch.Generator().manual_seed(0)
        features = torch.empty(_PROBE_ROWS, _PROBE_ROWS).uniform_(
            -reach, reach, generator=draws
        )
        expected = own(features)
        for candidate in _candidates(experts, limits):
            if torch.allclose(candidate(features), expected, rtol=1e-5, atol=1e-6):
                return candidate
    return Gating(MODULE_GATING, gated=bool(experts.has_gate))


def _candidates(experts: Any, limits: list[float | None]) -> Iterable[Gating]:
    """List every gating that a module with these numbers could mean, simplest first."""
    if not experts.has_gate:
        yield from (Gating(act, gated=False) for act in ACTIVATIONS)
        return
    for limit in limits:
        for interleaved in (False, True):
            for act in ACTIVATIONS:
                yield Gating(act, interleaved=interleaved, limit=limit)
            for alpha in _numbers(experts, ("alpha", "swiglu_alpha")):
                yield Gating(
                    ALPHA_SWIGLU, interleaved=interleaved, limit=limit, alpha=alpha
                )


def _numbers(experts: Any, names: Iterable[str]) -> list[float]:
    return [
        float(value)
        for name in names
        if isinstance(value := getattr(experts, name, None), int | float)
    ]
