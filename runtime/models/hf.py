"""Where the experts of a Hugging Face model are, and what its gates mean.

Every MoE model of Transformers 5 has the same joint in each MoE layer: a module called
`gate` or `router` looks at a token's hidden state and names experts, and a sibling
called `experts` receives the hidden states with the chosen ids and weights. This module
finds that joint by name and reads tensors by what they are (integers are ids, a float
for every expert is a gate output), so no model needs code of its own.

How a gate turns its output into scores (softmax, sigmoid, already done) is not declared
anywhere uniform. So it is measured: the gate is asked about a few random states, and
the scoring is the function of its output to which the weights it hands out are
proportional.

T tokens, E routed experts, K chosen per token, H hidden, F expert intermediate, L MoE
layers.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from moesim.traces.errors import TraceError
from moesim.traces.format.schema import ModelShape
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GATE_NAMES: Final = ("gate", "router")
BYTE_VOCABULARY: Final = 258
"""A model without a tokenizer whose vocabulary is at most 256 bytes and two specials
reads bytes.
"""

SCORINGS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),  # DeepSeek-V4
}
"""Gate output [T, E] -> scores [T, E]; every gate of Transformers 5.23 uses one of
them.
"""

_PROBE_TOKENS: Final = 64
_MAX_SPREAD: Final = (
    0.02  # bfloat16 weights scatter by 0.4 %; a wrong scoring by tens of per cent
)
_DIGEST_BYTES: Final = 4096
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of dtypes in recorded shapes."""


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """One MoE layer. `layer` is the decoder layer it sits in (dense layers counted),
    `count` its routed experts E.
    """

    layer: int
    name: str
    owner: nn.Module
    gate: nn.Module
    experts: nn.Module
    count: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one routed expert as loaded."""
        return tensor_bytes(self.experts) // self.count


class GateFacts(NamedTuple):
    """How the gates of a model choose. `assumed` names what could not be measured."""

    top_k: int
    scoring: str
    already_scored: bool  # the gate's output is scores, not logits
    norm_topk: bool
    assumed: tuple[str, ...] = ()

    def scores(self, output: torch.Tensor) -> torch.Tensor:
        """Turn a gate's output [T, E] into float32 scores [T, E]."""
        logits = output.float()
        return logits if self.already_scored else SCORINGS[self.scoring](logits)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that is here, with its way of reading text; without a tokenizer, tokens
    are bytes.
    """

    name: str
    model: nn.Module
    tokenizer: Any = None

    def encode(self, text: str | bytes) -> list[int]:
        """Turn text into token ids."""
        if self.tokenizer is None:
            return list(text.encode() if isinstance(text, str) else text)
        words = text if isinstance(text, str) else text.decode(errors="replace")
        return list(self.tokenizer(words)["input_ids"])

    @property
    def device(self) -> torch.device:
        """Where tokens enter the model."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device


def load_model(
    spec: str | Path, *, device: str = "cpu", dtype: str = "auto"
) -> LocalModel:
    """Load ``tiny`` (the shipped model) or a local Hugging Face directory. Nothing is
    downloaded.

    Args:
        spec: ``tiny``, or a directory with `config.json` and weights.
        device: ``cpu``, ``cuda``, …
        dtype: ``auto`` keeps that of the checkpoint (``tiny`` then computes in float32,
            as CPUs like it).

    Raises:
        TraceError: no such directory, or neither a tokenizer nor a byte-sized
            vocabulary.
        FileNotFoundError: the shipped checkpoint is missing.
    """
    if str(spec) == "tiny":
        from moesim.runtime.models import (  # noqa: PLC0415 - it imports the training code
            tiny,
        )

        small = (
            tiny.load_tiny()
            if dtype == "auto"
            else tiny.load_tiny(dtype=getattr(torch, dtype))
        )
        return LocalModel("tiny", small.to(device))
    from transformers import (  # noqa: PLC0415 - seconds to import
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    folder = Path(spec)
    if not (folder / "config.json").is_file():
        raise TraceError(
            f"{folder}: expected a Hugging Face model directory with config.json, or"
            " 'tiny'; found none"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TraceError(
            f"{folder}: not a loadable causal language model:"
            f" {str(error).splitlines()[0]}"
        ) from error
    tokenizer = None
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    elif _text_config(model).vocab_size > BYTE_VOCABULARY:
        raise TraceError(
            f"{folder}: expected a tokenizer ({', '.join(_TOKENIZER_FILES)}) or a"
            f" byte-level vocabulary of at most {BYTE_VOCABULARY}, found neither; copy"
            " the model's tokenizer files there"
        )
    return LocalModel(folder.resolve().name, model.eval().to(device), tokenizer)


def find_blocks(model: nn.Module) -> list[MoeBlock]:
    """List the MoE layers of a model in the order of its layers.

    Raises:
        TraceError: there are none, or they differ in their number of experts.
    """
    blocks = [
        block
        for name, owner in model.named_modules()
        if (block := _block(name, owner)) is not None
    ]
    if not blocks:
        raise TraceError(
            f"{type(model).__name__}: expected MoE layers (a module named 'experts'"
            " beside a 'gate' or 'router'), found none; this needs a"
            " Mixture-of-Experts model of transformers >= 5"
        )
    counts = sorted({block.count for block in blocks})
    if len(counts) > 1:
        raise TraceError(
            f"{type(model).__name__}: expected equally many experts in every layer,"
            f" found {counts}"
        )
    return blocks


def read_gate(
    output: Any, count: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Read what a gate returned by what it is, whatever its order.

    Args:
        output: a tensor or a tuple with tensors.
        count: routed experts E.

    Returns:
        Output for every expert [T, E] (logits, or scores), combine weights [T, K] and
        ids [T, K]; None where absent.
    """
    parts = [
        part
        for part in (output if isinstance(output, tuple) else (output,))
        if isinstance(part, torch.Tensor)
    ]
    floats = [part for part in parts if part.is_floating_point()]
    index = next((part for part in parts if not part.is_floating_point()), None)
    every = next((part for part in floats if part.shape[-1] == count), None)
    weights = None
    if index is not None:
        weights = next(
            (
                part
                for part in floats
                if part is not every and part.shape == index.shape
            ),
            None,
        )
    return None if every is None else every.reshape(-1, count), weights, index


def gate_facts(model: nn.Module, blocks: list[MoeBlock]) -> GateFacts:
    """Measure how the gates score and whether top-k weights are renormalised.

    The last gate is asked about random hidden states; no expert is computed. Where
    weights are proportional to no known function of the output (Phi-3.5-MoE's
    sparsemixer), or the gate cannot be asked, the configuration answers and the field
    is listed in `assumed`.
    """
    config = _text_config(model)
    declared = str(
        _first(
            config,
            ("scoring_func", "score_function", "moe_router_activation_func"),
            "softmax",
        )
    )
    declared = declared if declared in SCORINGS else "softmax"
    asked = _ask(blocks[-1], int(config.hidden_size))
    if asked is None:
        top_k = int(
            _first(config, ("num_experts_per_tok", "moe_topk", "top_k_experts"), 1)
        )
        norm = bool(_first(config, ("norm_topk_prob",), default=True))
        return GateFacts(
            top_k,
            declared,
            already_scored=False,
            norm_topk=norm,
            assumed=("scoring", "norm_topk"),
        )
    output, weights, index = asked
    spreads: dict[str, float] = {}
    is_distribution = bool((output >= 0).all()) and torch.allclose(
        output.sum(-1), torch.ones(()).to(output), atol=1e-2
    )
    if is_distribution:
        spreads["given"] = _spread(weights, output.gather(1, index))
    for name in sorted(SCORINGS, key=lambda name: name != declared):
        spreads[name] = _spread(weights, SCORINGS[name](output).gather(1, index))
    best = min(spreads, key=lambda name: spreads[name])
    certain = spreads[best] < _MAX_SPREAD
    best = best if certain else declared
    scoring = "softmax" if best == "given" else best
    facts = GateFacts(
        index.shape[1],
        scoring,
        best == "given",
        norm_topk=True,
        assumed=() if certain else ("scoring",),
    )
    totals = weights.sum(-1)
    if not certain:
        return facts._replace(norm_topk=bool(((totals - 1).abs() < _MAX_SPREAD).all()))
    share = totals / facts.scores(output).gather(1, index).sum(-1)
    return facts._replace(norm_topk=_variation(totals) <= _variation(share))


def model_shape(
    model: nn.Module,
    name: str,
    blocks: list[MoeBlock] | None = None,
    facts: GateFacts | None = None,
) -> ModelShape:
    """Describe a loaded model. Bytes are those of the loaded tensors, so they follow
    the dtype of loading.

    `dense_layers` are the decoder layers without experts; `other_bytes` is everything
    but the routed experts.

    Raises:
        TraceError: the model has no MoE layers that we know how to find.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    facts = gate_facts(model, blocks) if facts is None else facts
    config = _text_config(model)
    experts = blocks[0].experts
    hidden = int(config.hidden_size)
    with_experts = {block.layer for block in blocks}
    dense = tuple(
        layer
        for layer in range(int(config.num_hidden_layers))
        if layer not in with_experts
    )
    heads = int(_first(config, ("num_attention_heads",), 0))
    shared_width = _shared_intermediate(blocks[0].owner)
    declared_shared = _first(
        config, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1
    )
    expert_bytes = tuple(block.expert_bytes for block in blocks)
    return ModelShape(
        name=name,
        layers=len(blocks),
        experts=blocks[0].count,
        top_k=facts.top_k,
        hidden=hidden,
        expert_intermediate=_expert_intermediate(
            experts, blocks[0].count, hidden, config
        ),
        expert_bytes=expert_bytes,
        other_bytes=tensor_bytes(model) - sum(expert_bytes) * blocks[0].count,
        dense_layers=dense,
        shared_experts=int(declared_shared) if shared_width else 0,
        shared_intermediate=shared_width,
        dense_intermediate=(
            int(_first(config, ("intermediate_size",), 0)) if dense else 0
        ),
        heads=heads,
        kv_heads=int(_first(config, ("num_key_value_heads",), heads)),
        head_dim=int(_first(config, ("head_dim",), hidden // max(heads, 1))),
        vocab=int(config.vocab_size),
        dtype=_dtype(experts),
        scoring=facts.scoring,
        norm_topk=facts.norm_topk,
        assumed=facts.assumed,
    )


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared tensors count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(module))


def weights_digest(model: nn.Module) -> str:
    """Name the weights: SHA-256 over name, dtype, shape and both ends (4 KiB) of every
    tensor, in hexadecimal.

    Ends instead of everything, so that a model of 60 GB is named in a moment; training
    moves every tensor's ends.
    """
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.device.type != "meta":
            flat = tensor.detach().reshape(-1)
            ends = _DIGEST_BYTES // tensor.element_size()
            for piece in (flat[:ends], flat[-ends:]):
                total.update(
                    piece.cpu().contiguous().view(torch.uint8).numpy().tobytes()
                )
    return total.hexdigest()


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """List parameters and buffers, each once."""
    yield from module.parameters()
    yield from module.buffers()


def _block(name: str, owner: nn.Module) -> MoeBlock | None:
    """Recognise an MoE layer by its children."""
    children = dict(owner.named_children())
    gate = next((children[key] for key in GATE_NAMES if key in children), None)
    experts = children.get("experts")
    if gate is None or experts is None or isinstance(experts, nn.ModuleList):
        return None
    declared = getattr(experts, "num_experts", None)
    stacked = next(
        (len(tensor) for tensor in experts.parameters() if tensor.dim() == 3), None
    )
    count = declared if isinstance(declared, int) else stacked
    place = re.search(r"\.(\d+)(?:\.|$)", name)
    if count is None or place is None:
        return None
    if stacked not in (None, count):
        raise TraceError(
            f"{name}.experts: expected weights of {count} experts, found {stacked};"
            " zero-computation experts and other models whose experts differ in kind"
            " are not supported"
        )
    return MoeBlock(int(place.group(1)), name, owner, gate, experts, count)


def _text_config(model: nn.Module) -> Any:
    """Return the language part of a configuration."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first(config: Any, names: Iterable[str], default: Any) -> Any:
    """Return the first of these settings that a configuration has."""
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None),
        default,
    )


def _ask(
    block: MoeBlock, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Ask a gate about random states: output [T, E], weights [T, K] in float32, ids;
    None where it cannot be asked.

    Further arguments of a gate (a correction bias) are attributes of its owner with the
    same name.
    """
    weight = next(iter(block.gate.parameters()), None)
    if weight is None or weight.is_meta:
        return None
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(_PROBE_TOKENS, hidden, generator=draws).to(weight)
    _, *further = inspect.signature(block.gate.forward).parameters.values()
    extra = {
        one.name: value
        for one in further
        if (value := getattr(block.owner, one.name, None)) is not None
    }
    if any(one.default is one.empty and one.name not in extra for one in further):
        return None
    with torch.inference_mode():
        output, weights, index = read_gate(
            block.gate.forward(states, **extra), block.count
        )
    if output is None or weights is None or index is None:
        return None
    return output.float(), weights.float(), index.long()


def _variation(values: torch.Tensor) -> float:
    """Return standard deviation over mean."""
    return (
        float(values.std() / values.mean().abs().clamp(min=1e-12))
        if values.numel() > 1
        else 0.0
    )


def _spread(weights: torch.Tensor, scores: torch.Tensor) -> float:
    """Tell how far weights [T, K] are from proportional to scores [T, K], per token or
    over all of them.
    """
    ratio = weights / scores.clamp(min=1e-12)
    over_all = _variation(ratio)
    if ratio.shape[1] == 1:
        return over_all
    within = float((ratio.std(-1) / ratio.mean(-1).abs().clamp(min=1e-12)).mean())
    return min(over_all, within)


def _shared_intermediate(owner: nn.Module) -> int:
    """Return the total width of a block's always-on experts, 0 if it has none."""
    for name, child in owner.named_children():
        if (
            name.startswith("shared_")
            and (down := getattr(child, "down_proj", None)) is not None
        ):
            return int(down.weight.shape[-1])
    return 0


def _expert_intermediate(
    experts: nn.Module, count: int, hidden: int, config: Any
) -> int:
    """Return F: as the experts module says, else from its down projection [E, H, F],
    else from the configuration.
    """
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if isinstance(value := getattr(experts, name, None), int):
            return value
    if isinstance(down := getattr(experts, "down_proj", None), torch.Tensor):
        return int(down.numel() // (count * hidden))
    return int(_first(config, ("moe_intermediate_size", "intermediate_size"), 1))


def _dtype(module: nn.Module) -> str:
    """Name the type that most bytes of a module have."""
    sizes: dict[str, int] = {}
    for tensor in _tensors(module):
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    largest = max(sizes, key=lambda name: sizes[name], default="float32")
    return DTYPES.get(largest, largest)
