"""Trains the Mixture-of-Experts model that ships with the project:
``python -m benchmarks.train_tiny DIR --minutes 17``.

Some minutes on two CPU cores with the standard library's sources
(`runtime/text.py`). The clock decides how many steps are taken; `training.json`
beside the weights records the constants, the loss curve, and how the result does on
text that it never saw.

B windows of a batch, T bytes of a window, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import transformers
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesim.base.files import ScratchFolder, write_text
from moesim.runtime import text as corpus
from moesim.runtime.models.local_model import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Training losses averaged into one point of the curve.
CURVE_STEPS: Final = 25
SAVE_EVERY_S: Final = 120.0
HELD_OUT_WINDOWS: Final = 512
HELD_OUT_SEED: Final = 1

BALANCE_WEIGHT: Final = 0.01
"""Of the balance term: enough against collapse, too weak to dictate routing."""

_HELD_OUT_BATCH: Final = 16
_EXPERTS_FUNCTION: Final = "moesim_split"


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
        router_aux_loss_coef=BALANCE_WEIGHT,
        initializer_range=0.05,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype="bfloat16",  # half the size of float32, and it ships
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of the training; all of them stand in `training.json`.

    Attributes:
        batch: windows per step; small, because on two cores many steps beat large ones.
        window_bytes: context that the model learns; it does not know later positions.
        peak_learning_rate: after the warm-up.
        last_learning_rate: at the end of the cosine.
        warmup_steps: over which the learning rate rises.
        weight_decay: of AdamW.
        balance_weight: of the balance term.
    """

    batch: int = 6
    window_bytes: int = 384
    peak_learning_rate: float = 3e-3
    last_learning_rate: float = 1e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    balance_weight: float = BALANCE_WEIGHT


RECIPE: Final = Recipe()


class LossPoint(NamedTuple):
    """One point of the loss curve: the mean over the `CURVE_STEPS` steps up to
    `step`.
    """

    step: int
    seconds_s: float
    train_nats_per_byte: float


class HeldOut(NamedTuple):
    """Results of a model on text it never saw. L = number of MoE layers.

    Attributes:
        nats_per_byte: mean loss.
        adjacent_overlap: [L] share of a token's experts that the token before it also
            had.
        busiest_expert_share: [L] share of all selections that went to the layer's most
            used expert.
    """

    nats_per_byte: float
    adjacent_overlap: list[float]
    busiest_expert_share: list[float]


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

    text = torch.frombuffer(bytearray(load_bytes("training")), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(seed)
    model = _new_model(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(0.9, 0.95),
        weight_decay=RECIPE.weight_decay,
        fused=True,
    )
    facts = _provenance(minutes, seed, max_steps)
    facts["parameters"] = model.num_parameters()

    curve: list[LossPoint] = []
    recent_losses: list[float] = []
    step = 0
    seconds_s = 0.0
    saved_s = 0.0
    finished = False
    begin_s = time.perf_counter()
    while not finished:
        done = seconds_s / (60 * minutes) if max_steps is None else step / max_steps
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, done)
        recent_losses.append(_train_step(model, optimizer, _windows(text, draws)))
        step += 1
        seconds_s = round(time.perf_counter() - begin_s, 2)
        finished = seconds_s >= 60 * minutes or step == max_steps

        if step % CURVE_STEPS == 0 or finished:
            loss = math.fsum(recent_losses) / len(recent_losses)
            curve.append(LossPoint(step, seconds_s, round(loss, 4)))
            recent_losses.clear()
            if progress is not None:
                progress(curve[-1])

        # Now and then, so that a training that is stopped leaves a model.
        if seconds_s - saved_s > SAVE_EVERY_S or finished:
            facts |= {
                "finished": finished,
                "steps": step,
                "seconds_s": seconds_s,
                "curve": [*curve],
            }
            _save(model, target, facts)
            saved_s = seconds_s

    # Measured on the file, whose weights were rounded to bfloat16.
    facts |= _evaluation(
        held_out(load_weights(target, "float32").eval(), HELD_OUT_WINDOWS)
    )
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

    for first in range(0, windows, _HELD_OUT_BATCH):
        batch_texts = texts[first : first + _HELD_OUT_BATCH]
        batch = torch.tensor([list(text) for text in batch_texts])  # [B, T]
        with torch.inference_mode():
            out = model(input_ids=batch, use_cache=False, output_router_logits=True)
        nats += float(_nats(out.logits, batch, "sum"))

        for layer, logits in enumerate(out.router_logits):
            top = logits.topk(top_k).indices
            chosen = torch.zeros_like(logits).scatter_(1, top, 1.0)
            chosen = chosen.view(*batch.shape, -1)  # [B, T, E]
            used[layer] += chosen.sum((0, 1))
            shared[layer] += (chosen[:, 1:] * chosen[:, :-1]).sum()

    # The first byte of a window has nothing before it.
    predicted = windows * (RECIPE.window_bytes - 1)
    shared /= predicted * top_k
    busiest = used.amax(1) / used.sum(1)
    return HeldOut(nats / predicted, shared.tolist(), busiest.tolist())


def _new_model(seed: int) -> Qwen3MoeForCausalLM:
    """Build an untrained model in float32, in training mode, without touching the
    process's random state.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(tiny_config())
    # By name, which is how the library picks a function for experts.
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_FUNCTION, _split_experts)
    model.set_experts_implementation(_EXPERTS_FUNCTION)
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
    imbalances = [_imbalance(logits, top_k) for logits in out.router_logits]
    balance = torch.stack(imbalances).mean()

    (nats + RECIPE.balance_weight * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(nats.detach())


def _nats(logits: Tensor, batch: Tensor, reduction: str) -> Tensor:
    """Score the prediction of every byte but the first: `logits` [B, T, 256] against
    `batch` [B, T].
    """
    predictions = logits[:, :-1].float().mT
    return functional.cross_entropy(predictions, batch[:, 1:], reduction=reduction)


def _imbalance(logits: Tensor, top_k: int) -> Tensor:
    """Return 1 for a layer that uses its E experts equally, up to E / K for one that
    always uses the same K.

    Per layer: Transformers pools the layers, and so lets one layer's excess hide
    another's. Source: Fedus et al., Switch Transformers (2021), equations 4-6, divided
    by K for top-K gates.
    """
    tokens, experts = logits.shape
    chosen = logits.topk(top_k).indices.flatten()
    shares = torch.bincount(chosen, minlength=experts) / tokens
    # Only the mean scores have a gradient; counts have none.
    mean_scores = logits.softmax(-1).mean(0)
    return experts / top_k * (shares * mean_scores).sum()


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

    results: list[Tensor] = []
    for expert, rows in enumerate(hidden[token].split(counts)):
        features = functional.linear(rows, experts.gate_up_proj[expert])
        gate, up = features.chunk(2, dim=-1)
        activated = functional.silu(gate) * up
        results.append(functional.linear(activated, experts.down_proj[expert]))

    shares = weights.flatten()[order, None].to(hidden.dtype)
    return torch.zeros_like(hidden).index_add(0, token, torch.cat(results) * shares)


def _windows(text: Tensor, draws: torch.Generator) -> Tensor:
    """Draw a batch [B, T] of windows anywhere in the text."""
    starts = torch.randint(
        len(text) - RECIPE.window_bytes, (RECIPE.batch, 1), generator=draws
    )
    return text[starts + torch.arange(RECIPE.window_bytes)].long()


def _learning_rate(step: int, done: float) -> float:
    """Warm up over the first steps, then follow a cosine as `done` goes from 0 to 1."""
    cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
    fall = RECIPE.peak_learning_rate - RECIPE.last_learning_rate
    rate = RECIPE.last_learning_rate + fall * cosine
    return rate * min(1.0, (step + 1) / RECIPE.warmup_steps)


def load_bytes(part: corpus.Part, limit_bytes: int | None = None) -> bytes:
    """Read a part as one string of bytes, file after file in the order of their names.

    Args:
        part: which part.
        limit_bytes: stop after so many bytes; all of them when None.

    Raises:
        ValueError: `limit_bytes` is negative, or `part` is unknown.
    """
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes: expected >= 0, got {limit_bytes}")

    text = bytearray()
    for name in corpus.files(part):
        if limit_bytes is not None and len(text) >= limit_bytes:
            break
        text += (corpus.root() / name).read_bytes()
    return bytes(text[:limit_bytes])


def digest(part: corpus.Part) -> str:
    """Name the exact text of a part: SHA-256 over the path, size and bytes of every
    file, in hexadecimal.
    """
    total = hashlib.sha256()
    for name in corpus.files(part):
        piece = (corpus.root() / name).read_bytes()
        # With its size, so that bytes cannot move from one file to the next unseen.
        total.update(f"{name}\0{len(piece)}\0".encode())
        total.update(piece)
    return total.hexdigest()


def _provenance(minutes: float, seed: int, max_steps: int | None) -> dict[str, Any]:
    """Describe what will be trained, how and on what."""
    limit = "" if max_steps is None else f", max_steps={max_steps}"
    # Calibration text trains nothing, so it is not named.
    texts = {
        part: {"digest": digest(part), "bytes": len(load_bytes(part))}
        for part in corpus.PARTS[1:]
    }
    return asdict(RECIPE) | {
        "command": (
            "benchmarks.train_tiny.train_tiny(out_dir,"
            f" minutes={minutes:g}, seed={seed}{limit})"
        ),
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": python_version(),
        },
        "threads": torch.get_num_threads(),
        "corpus": texts,
    }


def _evaluation(held: HeldOut) -> dict[str, Any]:
    """Describe how the saved checkpoint does on the evaluation part."""
    config = tiny_config()
    overlap = [round(share, 4) for share in held.adjacent_overlap]
    busiest = [round(share, 4) for share in held.busiest_expert_share]
    return {
        "held_out": {
            "nats_per_byte": round(held.nats_per_byte, 4),
            "windows": HELD_OUT_WINDOWS,
            "window_bytes": RECIPE.window_bytes,
            "seed": HELD_OUT_SEED,
        },
        "adjacent_overlap": overlap,
        "adjacent_overlap_by_chance": config.num_experts_per_tok / config.num_experts,
        "busiest_expert_share": busiest,
    }


def _save(model: Qwen3MoeForCausalLM, target: Path, training: dict[str, Any]) -> None:
    """Write the model in bfloat16 with its `training.json`: beside the target, then
    renamed onto it.
    """
    saved = Qwen3MoeForCausalLM(tiny_config()).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())

    target.parent.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(target.parent) as scratch:
        new = scratch / "new"
        saved.save_pretrained(new)
        write_text(new / "training.json", json.dumps(training, indent=1) + "\n")
        # A folder cannot be replaced in one step: the old one is moved away first.
        if target.exists():
            target.rename(scratch / "old")
        new.rename(target)


def main() -> None:
    """Train one, and say how it does on text that it never saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    facts = train_tiny(given.out, given.minutes, given.seed, print)
    print(f"{facts['steps']:,} steps; held out: {facts['held_out']}")


if __name__ == "__main__":
    main()
