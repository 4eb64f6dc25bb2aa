"""A Mixture-of-Experts model small enough to ship, and the training that made it.

Recording and running need a model whose gates were *learned*: random gates spread
tokens like dice, and every cache looks equally bad. So the project carries one of its
own, a large model's anatomy at a thousandth of its size: a Hugging Face
`Qwen3MoeForCausalLM` reading bytes (token id = byte, no special tokens), trained for
some minutes on two CPU cores with the standard library's sources
(`runtime/models/corpus.py`). It writes plausible Python at best; its routing is what we
are after. `training.json` beside it tells its making and its merit.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any, Final, NamedTuple

import torch
import transformers
from moesim.runtime.models import corpus
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

CURVE_STEPS: Final = 25  # training losses averaged into one point of the curve
SAVE_EVERY_S: Final = 120.0
HELD_OUT_WINDOWS: Final = 512
HELD_OUT_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of the training; every one stands in `training.json`."""

    batch: int = (
        6  # windows per step: small, because on two cores many steps beat large ones
    )
    window_bytes: int = (
        384  # context the model learns; it does not know later positions
    )
    peak_learning_rate: float = 3e-3
    last_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    # of the balance term: enough against collapse, too weak to dictate routing
    balance_weight: float = 0.01


RECIPE: Final = Recipe()


class LossPoint(NamedTuple):
    """One point of the loss curve: the mean over the `CURVE_STEPS` steps up to
    `step`.
    """

    step: int
    seconds_s: float
    train_nats_per_byte: float


class HeldOut(NamedTuple):
    """What a model does on text it never saw. L = number of MoE layers."""

    nats_per_byte: float
    # [L] share of a token's experts that the token before it also had.
    adjacent_overlap: list[float]
    # [L] share of all selections that went to the layer's most used expert.
    busiest_expert_share: list[float]


def tiny_dir() -> Path:
    """Return the folder of the checkpoint that ships with the project."""
    return Path(__file__).parents[1] / "data" / "tiny"


def tiny_config() -> Qwen3MoeConfig:
    """Describe the model: 6 layers of 32 experts, 4 active per token, 4.5 million
    parameters.
    """
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,  # of dense layers; there are none
        moe_intermediate_size=56,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=RECIPE.balance_weight,
        initializer_range=0.05,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )


def load_tiny(
    directory: Path | None = None, dtype: torch.dtype = torch.float32
) -> Qwen3MoeForCausalLM:
    """Load a checkpoint of `train_tiny`, the shipped one when `directory` is None,
    ready for inference.

    It computes in float32 unless told otherwise: the weights are bfloat16, which many
    CPUs can only emulate. Raise `FileNotFoundError` when there is none.
    """
    source = tiny_dir() if directory is None else directory
    if not (source / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{source}: expected model.safetensors; make one with `moesim train-tiny`"
        )
    return Qwen3MoeForCausalLM.from_pretrained(
        source, dtype=dtype, local_files_only=True
    ).eval()


def train_tiny(
    out_dir: Path | str,
    minutes: float,
    seed: int = 0,
    progress: Callable[[LossPoint], None] | None = None,
    *,
    max_steps: int | None = None,
) -> dict[str, Any]:
    """Train the tiny model from scratch, write it as a Hugging Face folder and return
    its `training.json`.

    The learning rate warms up, then falls along a cosine that ends with the time
    allowed: any budget ends with a settled model, and a faster machine gets a better
    one. The folder is rewritten every two minutes, each time beside itself and then
    renamed, so stopping early leaves a model that loads.

    Args:
        out_dir: folder to write; an earlier checkpoint of ours there is replaced.
        minutes: training time, > 0; the final measurement comes on top.
        seed: of the first weights and of the order of the text. The clock decides how
            many steps are taken, so equal seeds give equal weights only together with
            `max_steps`.
        progress: called with every point of the loss curve.
        max_steps: take at most so many steps and end the cosine there; no limit when
            None.

    Raises:
        ValueError: `minutes` or `max_steps` is not positive.
        FileExistsError: `out_dir` holds something else than such a checkpoint.
    """
    if minutes <= 0 or (max_steps is not None and max_steps < 1):
        raise ValueError(
            f"expected minutes > 0 and max_steps >= 1, got {minutes} and {max_steps}"
        )
    target = Path(out_dir)
    if target.exists() and not (target / "training.json").is_file():
        raise FileExistsError(
            f"{target}: expected nothing, or an earlier checkpoint with training.json"
        )
    text = torch.frombuffer(bytearray(corpus.load_bytes("training")), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(seed)
    model = _new_model(seed)
    decay = RECIPE.weight_decay
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=decay, fused=True
    )
    facts = _provenance(minutes, seed, max_steps) | {
        "parameters": model.num_parameters()
    }
    curve = list[LossPoint]()
    recent = list[float]()
    step = 0
    seconds_s = 0.0
    saved_s = 0.0
    finished = False
    begin_s = time.perf_counter()
    while not finished:
        done = seconds_s / (60 * minutes) if max_steps is None else step / max_steps
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, done)
        recent.append(_train_step(model, optimizer, _windows(text, draws)))
        step += 1
        seconds_s = round(time.perf_counter() - begin_s, 2)
        finished = seconds_s >= 60 * minutes or step == max_steps
        if step % CURVE_STEPS == 0 or finished:
            curve.append(
                LossPoint(step, seconds_s, round(math.fsum(recent) / len(recent), 4))
            )
            recent.clear()
            if progress is not None:
                progress(curve[-1])
        if seconds_s - saved_s > SAVE_EVERY_S or finished:
            facts |= {
                "finished": finished,
                "steps": step,
                "seconds_s": seconds_s,
                "curve": [*curve],
            }
            _save(model, target, facts)
            saved_s = seconds_s
    facts |= _verdict(held_out(load_tiny(target), HELD_OUT_WINDOWS))
    _save(model, target, facts)
    return facts


def held_out(model: Qwen3MoeForCausalLM, windows: int = HELD_OUT_WINDOWS) -> HeldOut:
    """Measure a model on windows of the evaluation part, each begun afresh; fewer are
    the first of more.
    """
    texts = corpus.prompts("evaluation", windows, RECIPE.window_bytes, HELD_OUT_SEED)
    layers = model.config.num_hidden_layers
    top_k = model.config.num_experts_per_tok
    nats = 0.0
    shared = torch.zeros(layers, dtype=torch.float64)
    used = torch.zeros(layers, model.config.num_experts, dtype=torch.float64)
    for at in range(0, windows, 16):
        batch = torch.tensor([list(text) for text in texts[at : at + 16]])  # [B, T]
        with torch.inference_mode():
            out = model(input_ids=batch, use_cache=False, output_router_logits=True)
        nats += float(_nats(out.logits, batch, "sum"))
        for layer, logits in enumerate(out.router_logits):
            chosen = torch.zeros_like(logits).scatter_(
                1, logits.topk(top_k).indices, 1.0
            )
            chosen = chosen.view(*batch.shape, -1)  # [B, T, E]
            used[layer] += chosen.sum((0, 1))
            shared[layer] += (chosen[:, 1:] * chosen[:, :-1]).sum()
    predicted = windows * (RECIPE.window_bytes - 1)
    shared /= predicted * top_k
    return HeldOut(
        nats / predicted, shared.tolist(), (used.amax(1) / used.sum(1)).tolist()
    )


def _new_model(seed: int) -> Qwen3MoeForCausalLM:
    """Build an untrained model in float32, in training mode, without touching the
    process's random state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(tiny_config())
    ALL_EXPERTS_FUNCTIONS.register("moesim_split", _split_experts)
    model.set_experts_implementation("moesim_split")
    return model.train()


def _train_step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, batch: Tensor
) -> float:
    """Take one step on `batch` [B, T]; return its nats per byte, without the balance
    term.
    """
    out = model(input_ids=batch, use_cache=False, output_router_logits=True)
    nats = _nats(out.logits, batch, "mean")
    top_k = model.config.num_experts_per_tok
    balance = torch.stack(
        [_imbalance(logits, top_k) for logits in out.router_logits]
    ).mean()
    (nats + RECIPE.balance_weight * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(nats.detach())


def _nats(logits: Tensor, batch: Tensor, reduction: str) -> Tensor:
    """Score the prediction of every byte but the first: `logits` [B, T, 256] against
    `batch` [B, T].
    """
    return functional.cross_entropy(
        logits[:, :-1].float().mT, batch[:, 1:], reduction=reduction
    )


def _imbalance(logits: Tensor, top_k: int) -> Tensor:
    """Return 1 for a layer that uses its E experts equally, up to E / K for one that
    always uses the same K.

    Per layer: Transformers pools the layers, and so lets one layer's excess hide
    another's. Source: Fedus et al., Switch Transformers (2021), equations 4-6, divided
    by K for top-K gates.
    """
    shares = (
        torch.bincount(logits.topk(top_k).indices.flatten(), minlength=logits.shape[1])
        / logits.shape[0]
    )
    return logits.shape[1] / top_k * (shares * logits.softmax(-1).mean(0)).sum()


def _split_experts(
    experts: torch.nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Let each expert compute its own tokens; `hidden` [T, H], `index` and `weights`
    [T, K].

    On two cores this trained faster than each of Transformers' own ways.
    """
    flat = index.flatten()
    order = flat.argsort()
    token = order // index.shape[1]
    counts = torch.bincount(flat, minlength=len(experts.gate_up_proj)).tolist()
    done: list[Tensor] = []
    for expert, rows in enumerate(hidden[token].split(counts)):
        gate, up = functional.linear(rows, experts.gate_up_proj[expert]).chunk(
            2, dim=-1
        )
        done.append(
            functional.linear(functional.silu(gate) * up, experts.down_proj[expert])
        )
    weighted = torch.cat(done) * weights.flatten()[order, None].to(hidden.dtype)
    return torch.zeros_like(hidden).index_add(0, token, weighted)


def _windows(text: Tensor, draws: torch.Generator) -> Tensor:
    """Draw a batch [B, T] of windows anywhere in the text."""
    starts = torch.randint(
        len(text) - RECIPE.window_bytes, (RECIPE.batch, 1), generator=draws
    )
    return text[starts + torch.arange(RECIPE.window_bytes)].long()


def _learning_rate(step: int, done: float) -> float:
    """Warm up over the first steps, then follow a cosine as `done` goes from 0 to 1."""
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    rate = (
        RECIPE.last_learning_rate
        + (RECIPE.peak_learning_rate - RECIPE.last_learning_rate) * cosine
    )
    return rate * min(1.0, (step + 1) / RECIPE.warmup_steps)


def _provenance(minutes: float, seed: int, max_steps: int | None) -> dict[str, Any]:
    """Say what will be trained, how and on what."""
    limit = "" if max_steps is None else f", max_steps={max_steps}"
    texts = {
        p: {"digest": corpus.digest(p), "bytes": len(corpus.load_bytes(p))}
        for p in corpus.PARTS[1:]
    }
    return asdict(RECIPE) | {
        "command": (
            f"runtime.tiny.train_tiny(out_dir, minutes={minutes:g}, seed={seed}{limit})"
        ),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": (
            {m.__name__: m.__version__ for m in (torch, transformers)}
            | {"python": python_version()}
        ),
        "threads": torch.get_num_threads(),
        "corpus": texts,
    }


def _verdict(held: HeldOut) -> dict[str, Any]:
    """Say how the saved checkpoint does on the evaluation part."""
    config = tiny_config()
    draw = {
        "windows": HELD_OUT_WINDOWS,
        "window_bytes": RECIPE.window_bytes,
        "seed": HELD_OUT_SEED,
    }
    return {
        "held_out": {"nats_per_byte": round(held.nats_per_byte, 4)} | draw,
        "adjacent_overlap": [round(share, 4) for share in held.adjacent_overlap],
        "adjacent_overlap_by_chance": config.num_experts_per_tok / config.num_experts,
        "busiest_expert_share": [
            round(share, 4) for share in held.busiest_expert_share
        ],
    }


def _save(model: Qwen3MoeForCausalLM, target: Path, training: dict[str, Any]) -> None:
    """Write the model in bfloat16 with its `training.json`: beside the target, then
    renamed onto it.
    """
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    before = target.with_name(f".{target.name}.{os.getpid()}.old")
    saved = Qwen3MoeForCausalLM(tiny_config()).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())
    try:
        saved.save_pretrained(beside)
        (beside / "training.json").write_text(
            json.dumps(training, indent=1) + "\n", encoding="utf-8"
        )
        if target.exists():
            target.rename(before)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)
