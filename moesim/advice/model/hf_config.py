"""Reads ``config.json``: the shape of every layer, by the keys that makers use.

Each key is one of three: a size that is read here, one that changes no figure, or
unknown; the last are named, never skipped. Kinds of layers come from whichever key says
them, and a kind that is not known is refused by name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from moesim.advice.model.contents import MOST_EXPERTS
from moesim.base.errors import AdviceError
from moesim.base.inputs import load_json, read_text
from moesim.base.text import did_you_mean
from moesim.traces.layer_kinds import LayerKind, LayerShape, repeated
from moesim.traces.weight_formats import Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "top_k",
)
LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
# Far above every real size, far below what lists of layers would not fit into memory.
LARGEST_SIZE = 1 << 40
MOST_LAYERS = 10_000

_EXPERT_WIDTH = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "expert_intermediate_size",
)
_DENSE_WIDTH = (
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "ffn_hidden_size",
    "intermediate_size",
)
_SHARED_COUNT = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "share_expert_dims",
    "shared_experts_intermediate_size",
)
_ZERO_EXPERTS = ("zero_expert_num", "num_zero_experts")
_EXPERT_HIDDEN = ("moe_latent_size", "routed_expert_hidden_size")

# What the entries of lists of layers mean. Attention is of whichever sort the sizes of
# the file describe.
_FULL = "full"
_WINDOW = "window"
_RECURRENT = "recurrent"
_CONV = "conv"
_EXPERTS_ALONE = "experts alone"
_DENSE_ALONE = "dense alone"
KIND_NAMES = {
    "full_attention": _FULL,
    "attention": _FULL,
    "global_attention": _FULL,
    "global": _FULL,
    "full": _FULL,
    "indexed_attention": _FULL,
    "minimax_m3_sparse": _FULL,
    "sparse_attention": _FULL,
    "deepseek_sparse_attention": _FULL,
    "hybrid": _FULL,
    "compressed_sparse_attention": _FULL,
    "heavily_compressed_attention": _FULL,
    "*": _FULL,
    "sliding_attention": _WINDOW,
    "sliding_window": _WINDOW,
    "local_attention": _WINDOW,
    "local": _WINDOW,
    "chunked_attention": _WINDOW,
    "linear_attention": _RECURRENT,
    "gated_deltanet": _RECURRENT,
    "kda": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "ssm": _RECURRENT,
    "M": _RECURRENT,
    "conv": _CONV,
    "short_conv": _CONV,
    "moe": _EXPERTS_ALONE,
    "E": _EXPERTS_ALONE,
    "mlp": _DENSE_ALONE,
    "-": _DENSE_ALONE,
}
"""Name of a layer's kind -> what it is."""

_MLP_KINDS = {
    "sparse": _EXPERTS_ALONE,
    "moe": _EXPERTS_ALONE,
    "hash_moe": _EXPERTS_ALONE,
    "dense": _DENSE_ALONE,
}
_KIND_LISTS = ("layer_types", "layers_block_type", "layer_block_types")

# Keys that change neither bytes nor what is kept or computed, by what they are about.
_HARMLESS = re.compile(
    r"""architectures|model_type|auto_map|transformers_version|_name_or_path|_attn\w*
    |(torch_)?dtype|\w*_dtype|use_cache|\w*token_?\w*_?(id|index)|\w*_token_index
    |\w*dropout\w*|\w*initializer\w*|init_\w+|hidden_act\w*|\w*_act|activation_\w+
    |\w*(norm|rms|layernorm|hc)_(eps|epsilon)|\w*eps(ilon)?|\w*rope_\w+|rope\w*
    |rotary\w*|partial_rotary\w*|qk_norm\w*|use_qk_norm|\w*bias|bias\w*
    |max_position\w*|model_max_length|\w*context_length|original_max\w*|seq_length
    |attention_(value_scale|multiplier)|\w*_multiplier|logits_scaling|\w*softcap\w*
    |\w*(scoring|score)_func\w*|moe_router\w*|router_\w+|route_\w+|\w*router_logits
    |norm_topk_prob|\w*renormalize|topk_(group|method)|n_group|num_expert_group\w*
    |num_limited_groups|routed_scaling\w*|\w*scaling_factor|swiglu\w*|\w*aux_loss\w*
    |seq_aux|pretraining_tp|ep_size|tp_\w+|pp_\w+|mup_\w+|time_step_\w+|chunk_size
    |residual_in_fp32|rescale_\w+|mamba_(hidden_act|ssm_dtype|chunk_size)|use_mamba\w*
    |num_logits_to_keep|index_topk\w*|index_(kpool|block|local)\w*|indexer_(budget|rope\w*|types)
    |indexer_compress_ratio|hc_(sinkhorn|eps)\w*|num_hash_layers|latent_moe\w*
    |attn_res_block_size|normalization\w*|use_(cache|bias|conv_bias|routing_bias|expert_bias)
    |use_bidirectional\w*|use_unified_vision\w*|\w*position_embedding\w*|query_pre_attn\w*
    |expand|mamba_(expand|proj_bias|conv_bias|dtype)|linear_lower_bound|gate_lower_bound
    |output_(attentions|hidden_states|scores)|seed|make_ngram\w*|split_ngram_parts
    |moe_shared_expert_overlap|use_grouped\w*|emb_neighbor_num|emb_split_num
    |add_\w+_sink_bias|qk_head_dim|kv_cache_scheme|tokenizer_class|return_dict\w*
    |\w*(loss|_id2label|label2id)|id2label|task_specific_params|problem_type|prefix
    |finetuning_task|pruned_heads|torchscript|use_bfloat16|do_sample|num_beams|num_beam_\w+
    |num_return_sequences|diversity_penalty|early_stopping|\w*_penalty|temperature
    |top_p|typical_p|top_k|min_length|max_length|bad_words_ids|\w*suppress_tokens
    |no_repeat_\w+|encoder_no_repeat\w*|chunk_size_feed_forward|cross_attention_\w+
    |add_cross_attention|is_(decoder|encoder_decoder)|tie_encoder_decoder
    |remove_invalid_values|exponential_decay\w*|forced_\w+|decoder_start\w*|\w*_placeholder
    |vocab_size_per_layer_input|language|license|\w*_version|sliding_window_size
    |max_window_layers|use_sliding_window|no_rope_\w+|original_vocab\w*
    |attn_temperature\w*|floor_scale|attn_scale|for_llm_compressor|qk_layernorm
    |num_key_value_heads_per_layer|ignore_index|norm_type|qk_norm_type|\w*_per_image
    |mm_\w+|audio_config|video_config|disable_\w+|mlp_only_layers|boi_\w+|eoi_\w+
    |logit_scale|\w*_(alpha|beta)_factor|kda_\w+|gating|block_size
    |short_conv_kernel_size|conv_L_cache|expert_selection_fn|use_associative_scan|moe_norm_min
    |enable_moe_fp32\w*|qk_scale\w*|moe_layers|number_of_conv_states
    |mtp_use_dedicated_embeddings|indexer_rope_interleave|kv_lora_scaling|q_lora_scaling""",
    re.VERBOSE,
)
# Heads for several tokens: stored, not run.
_MULTI_TOKEN = re.compile(
    r"num_nextn_predict_layers|mtp_\w+|num_mtp\w*|use_mtp|num_mtp_modules|mtp\w*"
)
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
# Towers of their own beside the language part.
_TOWERS = ("vision_config", "audio_config", "video_config", "visual_config")


class ConfigShape(NamedTuple):
    """What ``config.json`` says of a model.

    Attributes:
        layers: in order; only those that run when a token is made.
        hidden: H.
        vocab: tokens.
        tied: head and embeddings are one tensor.
        table_weights: look-up tables by n-gram.
        table_rows: rows of them that a token reads.
        formats: weight formats that the file states.
        is_quantised: whether it states any.
        architecture: ``model_type``, or the name of its class.
        remarks: what the file has and this does not count, and unknown keys.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    tied: bool
    table_weights: int
    table_rows: int
    formats: Recipe
    is_quantised: bool
    architecture: str
    remarks: tuple[str, ...]


def read_config(path: Path, *, has_weights: bool = False) -> ConfigShape:
    """Read the shape that a ``config.json`` describes.

    Args:
        path: the file.
        has_weights: headers beside it say the sizes of weights, so that what it does
            not say is no fault.

    Raises:
        AdviceError: not JSON, sizes that no model has, a missing size, a kind of layer
            that is not known, or no experts.
    """
    try:
        config = load_json(read_text(path))
    except ValueError as error:
        raise AdviceError(
            f"{path}: not JSON: {error}; download the file again"
        ) from None
    if not isinstance(config, dict):
        raise AdviceError(
            f"{path}: expected keys and values, found {config!r:.40}; download the file"
            " again"
        )
    return _Reader(path, config, has_weights=has_weights).shape()


class _Keys:
    """Sizes of a config, which remembers what was asked for.

    Args:
        path: the file, for errors.
        values: its keys; null counts as absent.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = {key: v for key, v in values.items() if v is not None}
        self.asked: set[str] = set()

    def raw(self, *names: str) -> Any:
        """Return the first of these keys that there is, as it is; None without."""
        self.asked.update(names)
        return next((self.values[name] for name in names if name in self.values), None)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the first of these keys as a size.

        Raises:
            AdviceError: no size, or none of the keys and no default.
        """
        value = self.raw(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise AdviceError(
                f"{self.path}: expected one of {', '.join(names)}, found none"
            )
        name = next(name for name in names if name in self.values)
        # Some models state a size for each layer.
        if isinstance(value, list) and value:
            value = max(self.whole(name, each) for each in value)
        return self.whole(name, value)

    def flag(self, name: str) -> bool:
        """Whether a key is there and true."""
        return bool(self.raw(name))

    def list_of(self, name: str) -> list[Any] | None:
        """Return a list with a value per layer; None where the key has none."""
        value = self.raw(name)
        if value is None or isinstance(value, list):
            return value
        raise self._wrong(name, "a list", value)

    def whole(self, name: str, value: Any) -> int:
        """Return a value of a key as a size, or refuse it."""
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if not is_size or not 0 <= value <= LARGEST_SIZE:
            raise self._wrong(name, "a whole number", value)
        return int(value)

    def _wrong(self, name: str, expected: str, value: Any) -> AdviceError:
        return AdviceError(
            f"{self.path}: {name}: expected {expected}, found {value!r:.40}; download"
            " the file again"
        )


class _Reader:
    """Makes layers of a config."""

    def __init__(
        self, path: Path, config: dict[str, Any], *, has_weights: bool
    ) -> None:
        self.path = path
        self.needed = 0 if has_weights else None
        self.outer = config
        # Models that also see keep their language part in a table of its own.
        inner: dict[str, Any] = next(
            (config[name] for name in _NESTED if isinstance(config.get(name), dict)), {}
        )
        if isinstance(inner.get("text_config"), dict):
            inner = inner["text_config"]
        flat = {key: v for key, v in config.items() if key not in _NESTED}
        self.keys = _Keys(path, {**flat, **inner})
        self.hidden = self.keys.size("hidden_size", "d_model", default=self.needed)
        self.count = self._count()
        if not 0 < self.count <= MOST_LAYERS:
            raise AdviceError(
                f"{path}: layers: expected 1 to {MOST_LAYERS}, found {self.count};"
                " download the file again"
            )

    def shape(self) -> ConfigShape:
        """Read everything, unknown keys last."""
        keys = self.keys
        experts = keys.size(*EXPERTS, default=0)
        if not experts:
            raise AdviceError(
                f"{self.path.parent}: {keys.raw('model_type') or 'this model'}: no"
                " routed experts; moesim advises on Mixture-of-Experts models only"
            )
        if experts > MOST_EXPERTS:
            raise AdviceError(
                f"{self.path}: experts: expected up to {MOST_EXPERTS:,} in a layer,"
                f" found {experts:,}; is the file damaged?"
            )
        layers = self._layers(experts)
        vocab = keys.size("vocab_size", default=self.needed)
        table_weights, table_rows = self._tables(vocab)
        stated = self._quantisation()
        tied = self._tied()
        return ConfigShape(
            layers=layers,
            hidden=self.hidden,
            vocab=vocab,
            tied=tied,
            table_weights=table_weights,
            table_rows=table_rows,
            formats=self._formats(stated),
            is_quantised=bool(stated),
            architecture=str(keys.raw("model_type") or self._architecture()),
            remarks=self._remarks(),
        )

    def _count(self) -> int:
        """Layers; some hybrids state nothing but what each of them is."""
        if self.keys.raw(*LAYERS) is None:
            for name in _KIND_LISTS:
                stated = self.keys.list_of(name)
                if stated:
                    return len(stated)
        return self.keys.size(*LAYERS)

    def _architecture(self) -> str:
        names = self.keys.raw("architectures")
        return str(names[0]) if isinstance(names, list) and names else "?"

    def _tied(self) -> bool:
        tied = self.keys.raw("tie_word_embeddings", "tie_embedding")
        # Transformers ties these families unless they say otherwise.
        default = str(self.keys.raw("model_type")).startswith(("lfm2", "gemma"))
        return default if tied is None else bool(tied)

    # -- kinds -------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """What each layer is, by whichever key says it."""
        for name in _KIND_LISTS:
            stated = self.keys.list_of(name)
            if stated is not None:
                return self._of_names(name, stated)
        pattern = self.keys.raw("hybrid_override_pattern")
        if pattern is not None:
            return self._of_names("hybrid_override_pattern", list(str(pattern)))
        for name, meanings in (
            ("hybrid_layer_pattern", {0: _FULL, 1: _WINDOW}),
            ("attn_type_list", {0: _RECURRENT, 1: _FULL}),
        ):
            stated = self.keys.list_of(name)
            if stated is not None:
                return [self._known(name, meanings, each) for each in self._cut(stated)]
        linear = self.keys.raw("linear_attn_config")
        if isinstance(linear, dict):
            full = set(linear.get("full_attn_layers", ()))
            return [
                # Numbered from one.
                _FULL if at + 1 in full else _RECURRENT
                for at in range(self.count)
            ]
        return self._of_intervals()

    def _of_names(self, key: str, stated: list[Any]) -> list[str]:
        return [self._known(key, KIND_NAMES, each) for each in self._cut(stated)]

    def _cut(self, stated: list[Any]) -> list[Any]:
        if len(stated) < self.count:
            raise AdviceError(
                f"{self.path}: expected a kind for each of {self.count} layers, found"
                f" {len(stated)}; download the file again"
            )
        # Heads for several tokens may stand behind the layers.
        return stated[: self.count]

    def _known(self, key: str, meanings: Mapping[Any, str], name: Any) -> str:
        try:
            return meanings[name]
        except (KeyError, TypeError):
            hint = did_you_mean(str(name), map(str, meanings))
            raise AdviceError(
                f"{self.path}: {key}: unknown kind of layer {name!r:.40}{hint}: what it"
                " keeps of a token is not known; a GGUF file of the model says so"
            ) from None

    def _of_intervals(self) -> list[str]:
        """Kinds of layers that are said by every how manieth attends to everything."""
        keys = self.keys
        period = keys.size("attn_layer_period", default=0)
        if period:
            offset = keys.size("attn_layer_offset", default=0)
            return [
                _RECURRENT if at % period != offset else _FULL
                for at in range(self.count)
            ]
        window = keys.size("sliding_window", "attention_chunk_size", default=0)
        for name, other in (
            ("full_attention_interval", _RECURRENT),
            ("global_attn_every_n_layers", _WINDOW),
            ("sliding_window_pattern", _WINDOW),
        ):
            every = keys.raw(name)
            if isinstance(every, int) and every > 0:
                return [
                    other if (at + 1) % every else _FULL for at in range(self.count)
                ]
        model = str(keys.raw("model_type"))
        if model.startswith("llama4"):
            # Every fourth layer is without positions, and sees everything.
            every = keys.size("no_rope_layer_interval", default=4)
            return [_WINDOW if (at + 1) % every else _FULL for at in range(self.count)]
        if model.startswith("gpt_oss"):
            return [_FULL if at % 2 else _WINDOW for at in range(self.count)]
        if window and keys.raw("use_sliding_window") is not False:
            return [_WINDOW] * self.count
        return [_FULL] * self.count

    # -- mixers ------------------------------------------------------------------------

    def _mixer(self, kind: str, at: int) -> LayerKind:
        if kind in (_EXPERTS_ALONE, _DENSE_ALONE):
            return LayerKind("none")
        if kind == _CONV:
            length = self.keys.size("conv_L_cache", "conv_kernel", default=3)
            return LayerKind("conv", {"conv": length})
        if kind == _RECURRENT:
            return self._recurrence()
        return self._attention(kind, at)

    def _recurrence(self) -> LayerKind:
        """The recurrence whose sizes the file has."""
        keys = self.keys
        conv = keys.size(
            "linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", default=4
        )
        if keys.raw("linear_num_value_heads") is not None:
            sizes = {
                "key_heads": keys.size("linear_num_key_heads"),
                "value_heads": keys.size("linear_num_value_heads"),
                "key": keys.size("linear_key_head_dim"),
                "value": keys.size("linear_value_head_dim"),
            }
            return LayerKind("delta", {**sizes, "conv": conv})
        linear = keys.raw("linear_attn_config")
        if isinstance(linear, dict):
            linear_keys = _Keys(self.path, linear)
            sizes = {
                "heads": linear_keys.size("num_heads"),
                "key": linear_keys.size("head_dim"),
                "conv": linear_keys.size("short_conv_kernel_size", default=4),
                "full_gate": int(linear_keys.flag("use_full_rank_gate")),
            }
            return LayerKind("kda", sizes)
        is_lightning = str(keys.raw("model_type")).startswith("minimax")
        if is_lightning or keys.raw("linear_num_heads") is not None:
            heads = keys.size("linear_num_heads", "num_attention_heads")
            key = keys.size(
                "linear_head_dim", "head_dim", default=self.hidden // max(1, heads)
            )
            kind = "lightning" if is_lightning else "kda"
            return LayerKind(kind, {"heads": heads, "key": key, "conv": conv})
        if keys.raw("mamba_dt_rank") is not None:
            sizes = {
                "inner": keys.size("mamba_expand", "expand", default=2) * self.hidden,
                "state": keys.size("mamba_d_state"),
                "rank": keys.size("mamba_dt_rank"),
                "conv": conv,
            }
            return LayerKind("mamba1", sizes)
        return self._state_space(conv)

    def _state_space(self, conv: int) -> LayerKind:
        keys = self.keys
        heads = keys.size("mamba_num_heads", "mamba_n_heads", default=self.needed)
        if not heads:
            return LayerKind("none")
        key = keys.raw("mamba_head_dim", "mamba_d_head")
        if not isinstance(key, int):
            # What is left to the library follows from how much wider it is.
            key = (
                keys.size("mamba_expand", "expand", default=2)
                * self.hidden
                // max(1, heads)
            )
        sizes = {
            "heads": heads,
            "key": key,
            "groups": keys.size("n_groups", "mamba_n_groups", default=1),
            "state": keys.size("ssm_state_size", "mamba_d_state"),
            "conv": conv,
        }
        return LayerKind("ssm", sizes)

    def _attention(self, kind: str, at: int) -> LayerKind:
        keys = self.keys
        heads = keys.size("num_attention_heads", "n_heads")
        by_layer = keys.list_of("num_attention_heads_per_layer")
        if by_layer is not None:
            heads = keys.whole("num_attention_heads_per_layer", self._cut(by_layer)[at])
        window = 0
        if kind == _WINDOW:
            window = keys.size("sliding_window", "attention_chunk_size")
        index = {
            "index": keys.size("index_head_dim", "indexer_head_dim", default=0),
            "index_heads": keys.size("index_n_heads", "indexer_n_heads", default=0),
        }
        ratio = self._ratio(at)
        if ratio is not None:
            sizes = {
                "heads": heads,
                "key": keys.size("head_dim"),
                "q": keys.size("q_lora_rank"),
                "o": keys.size("o_lora_rank"),
                "o_groups": keys.size("o_groups"),
                "window": keys.size("sliding_window"),
                "ratio": ratio,
            }
            keys.raw("num_key_value_heads", "qk_rope_head_dim")
            return LayerKind("compressed", {**sizes, **index})
        if keys.size("kv_lora_rank", default=0):
            sizes = {
                "heads": heads,
                "kv": keys.size("kv_lora_rank"),
                "q": keys.size("q_lora_rank", default=0),
                "nope": keys.size("qk_nope_head_dim"),
                "rope": keys.size("qk_rope_head_dim", default=0),
                "value": keys.size("v_head_dim"),
                "gated": int(keys.flag("mla_use_output_gate")),
            }
            keys.raw("num_key_value_heads", "head_dim")
            return LayerKind("latent", {**sizes, **index})
        return self._heads(kind, heads, window, index)

    def _ratio(self, at: int) -> int | None:
        """How many tokens are compressed to one entry; None where none ever are."""
        stated = self.keys.list_of("compress_ratios")
        if stated is not None:
            return self.keys.whole("compress_ratios", self._cut(stated)[at])
        rates = self.keys.raw("compress_rates")
        if not isinstance(rates, dict):
            return None
        kinds = self._cut(self.keys.list_of("layer_types") or [])
        return self.keys.whole("compress_rates", rates.get(str(kinds[at]), 0))

    def _heads(
        self, kind: str, heads: int, window: int, index: dict[str, int]
    ) -> LayerKind:
        """Attention with keys and values of its own, which may differ by kind."""
        keys = self.keys
        kv_heads = keys.size(
            "num_key_value_heads", "num_attention_groups", default=heads
        )
        key = keys.size("head_dim", "attention_head_dim", default=0)
        key = key or (self.hidden // heads if heads else 0)
        value = keys.size("v_head_dim", default=key)
        same = 0
        windowed = {
            "heads": keys.size(
                "swa_num_attention_heads", "num_sliding_attention_heads", default=heads
            ),
            "kv_heads": keys.size("swa_num_key_value_heads", default=kv_heads),
            "key": keys.size("swa_head_dim", default=key),
            "value": keys.size("swa_v_head_dim", default=value),
        }
        other = keys.raw("attention_other_setting")
        if isinstance(other, dict):
            setting = _Keys(self.path, other)
            windowed["heads"] = setting.size(
                "num_attention_heads", default=windowed["heads"]
            )
            windowed["kv_heads"] = setting.size(
                "num_attention_groups", default=windowed["kv_heads"]
            )
            windowed["key"] = windowed["value"] = setting.size(
                "head_dim", default=windowed["key"]
            )
        global_heads = keys.size("num_global_key_value_heads", default=kv_heads)
        global_key = keys.size("global_head_dim", default=0)
        same_values = keys.flag("attention_k_eq_v")
        sizes = {"heads": heads, "kv_heads": kv_heads, "key": key, "value": value}
        if kind == _WINDOW:
            sizes = {**windowed, "window": window}
        elif global_key:
            sizes |= {"kv_heads": global_heads, "key": global_key, "value": global_key}
            same = int(same_values)
        index["index_kv_heads"] = keys.size("indexer_kv_heads", default=0)
        return LayerKind(
            "attention", {**sizes, **index, "gated": self._gated(), "same": same}
        )

    def _gated(self) -> int:
        """Whether attention's outputs are gated by as many values as queries have."""
        keys = self.keys
        stated = keys.raw(
            "attn_output_gate", "output_gate_type", "use_head_wise_attn_gate"
        )
        model = str(keys.raw("model_type"))
        return int(bool(stated) or model.startswith(("qwen3_next", "qwen3_5", "afmoe")))

    # -- feed-forward ------------------------------------------------------------------

    def _layers(self, experts: int) -> tuple[LayerShape, ...]:
        keys = self.keys
        kinds = self._kinds()
        # Said twice by files that have a list of kinds.
        keys.raw("full_attention_interval", "global_attn_every_n_layers")
        keys.raw("sliding_window_pattern", "attn_type_list")
        keys.raw("num_attention_heads", "num_key_value_heads")
        keys.raw("sliding_window", "attention_chunk_size")
        routed = self._routed(kinds)
        hidden = self.hidden
        top_k = keys.size(*TOP_K)
        plain = keys.size("intermediate_size", default=0)
        intermediate = keys.size(*_EXPERT_WIDTH, default=plain or self.needed)
        width = keys.size(*_EXPERT_HIDDEN, default=0) or hidden
        # Nemotron's experts square a ReLU, and have no gate.
        act = str(keys.raw("mlp_hidden_act", "hidden_act", "hidden_activation"))
        matrices = 2 if act == "relu2" else 3
        beside = matrices * hidden * self._beside(intermediate)
        if width != hidden:
            beside += 2 * hidden * width
        dense = matrices * hidden * keys.size(*_DENSE_WIDTH, default=intermediate)
        attentions = 1
        if keys.raw("ffn_hidden_size") is not None and keys.raw("moe_topk") is not None:
            # LongCat's layers are two, and experts run across both.
            attentions = 2
            beside += 2 * dense
        connections = self._connections()
        are_apart = _EXPERTS_ALONE in kinds or _DENSE_ALONE in kinds

        shapes = []
        for at, kind in enumerate(kinds):
            mixer = self._mixer(kind, at).mixer(hidden=hidden)
            norms = hidden if kind in (_EXPERTS_ALONE, _DENSE_ALONE) else 2 * hidden
            if not routed[at]:
                # In some hybrids a layer is a mixer or a feed-forward.
                has_dense = kind == _DENSE_ALONE or not are_apart
                feed_forward = dense if has_dense else 0
                shapes.append(LayerShape(mixer, feed_forward + connections, norms))
                continue
            zero = keys.size(*_ZERO_EXPERTS, default=0)
            shapes.append(
                LayerShape(
                    mixer=repeated(mixer, attentions),
                    feed_forward=beside + connections,
                    exact=norms + hidden * (experts + zero),
                    experts=experts,
                    zero_experts=zero,
                    top_k=top_k,
                    expert_hidden=width,
                    expert_intermediate=intermediate,
                    matrices=matrices,
                )
            )
        return tuple(shapes)

    def _routed(self, kinds: list[str]) -> list[bool]:
        """Whether each layer has experts."""
        keys = self.keys
        if _EXPERTS_ALONE in kinds:
            return [kind == _EXPERTS_ALONE for kind in kinds]
        first = keys.size(
            "first_k_dense_replace",
            "num_dense_layers",
            "moe_layer_start_index",
            default=0,
        )
        last = keys.size("moe_layer_end_index", default=self.count)
        stated = keys.list_of("mlp_layer_types")
        if stated is not None:
            return [
                self._known("mlp_layer_types", _MLP_KINDS, each) == _EXPERTS_ALONE
                for each in self._cut(stated)
            ]
        enumerated = keys.raw("moe_layers_enum")
        if enumerated is not None:
            numbers = {int(word) for word in re.findall(r"\d+", str(enumerated))}
            return [at in numbers for at in range(self.count)]
        period = keys.size("expert_layer_period", default=0)
        if period:
            offset = keys.size("expert_layer_offset", default=0)
            return [at % period == offset for at in range(self.count)]
        frequency = keys.raw("moe_layer_freq")
        if isinstance(frequency, list):
            return [bool(each) for each in self._cut(frequency)]
        step = keys.size(
            "moe_layer_freq",
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_interval",
            default=1,
        )
        # All but Llama 4 and Ernie count the step from the first layer on.
        only_dense = keys.list_of("mlp_only_layers") or []
        return [
            first <= at <= last
            and at not in only_dense
            and (at + 1) % max(1, step) == 0
            for at in range(self.count)
        ]

    def _beside(self, intermediate: int) -> int:
        """Width of what every token is multiplied with beside routed experts."""
        keys = self.keys
        model = str(keys.raw("model_type"))
        if model.startswith("llama4"):
            return intermediate
        if keys.flag("enable_moe_block"):
            # Gemma 4 runs its dense part in every layer, too.
            return keys.size("intermediate_size")
        width = keys.size(*_SHARED_WIDTH, default=0)
        count = keys.size(*_SHARED_COUNT, default=int(width > 0))
        is_stated = keys.raw("moe_shared_expert_intermediate_size") is not None
        if width and (is_stated or not keys.raw("n_shared_experts")):
            return width if count else 0
        return count * (width or intermediate)

    def _connections(self) -> int:
        """Weights that mix the streams of a layer (hyper-connections)."""
        keys = self.keys
        streams = keys.size("hc_mult", default=0)
        if streams:
            # Each of two parts mixes into one, and back into all, of all streams.
            return 2 * streams * self.hidden * streams * (2 + streams)
        streams = keys.size("hc_count", default=0)
        rank = keys.size("hc_lowrank", default=0)
        wide = streams * self.hidden
        return 2 * (2 * rank * wide + wide * streams)

    def _tables(self, vocab: int) -> tuple[int, int]:
        """Weights of look-up tables by n-gram, and rows of them that a token reads."""
        keys = self.keys
        ratio = keys.size("ngram_vocab_size_ratio", default=0)
        if ratio:
            # (n - 1) lengths of n-grams, in so many parts each.
            neighbours = keys.size("emb_neighbor_num", default=2)
            parts = keys.size("emb_split_num", default=1)
            return ratio * vocab * self.hidden, max(1, (neighbours - 1) * parts)
        keys.raw("ngram_size", "heads_per_ngram", "ngram_vocab_size_base")
        keys.raw("ple_embed_dim", "ple_conv_kernel_size")
        layers = keys.list_of("ple_layer_ids")
        if layers:
            lengths = keys.size("ngram_size") - 1
            rows = max(1, keys.size("heads_per_ngram") * lengths)
            width = keys.size("ple_embed_dim") // rows
            entries = rows * keys.size("ngram_vocab_size_base")
            return len(layers) * entries * width, rows
        per_layer = keys.size("hidden_size_per_layer_input", default=0)
        return vocab * per_layer * self.count, 1

    # -- formats -----------------------------------------------------------------------

    def _quantisation(self) -> Mapping[str, Any]:
        for table in (self.outer, self.keys.values):
            stated = table.get("quantization_config")
            if isinstance(stated, dict) and stated:
                return stated
        return {}

    def _formats(self, stated: Mapping[str, Any]) -> Recipe:
        """Weight formats: of what the file says was quantised, bf16 of the rest."""
        if not stated:
            kind = str(self.keys.raw("dtype", "torch_dtype") or "bfloat16")
            plain = {"float16": "f16", "float32": "f32"}.get(kind, "bf16")
            return Recipe(plain, plain, plain, plain, plain, plain)

        experts = self._expert_format(stated)
        if self.keys.raw("expert_dtype") is not None:
            experts = {"fp4": "mxfp4", "fp8": "fp8"}.get(
                str(self.keys.raw("expert_dtype")), experts
            )
        left = str(stated.get("ignore") or stated.get("modules_to_not_convert") or "")
        is_left = re.search(r"attn|attention", left) is not None
        others = {"mxfp4": "bf16", "nvfp4": "fp8"}.get(experts, experts)
        method = str(stated.get("quant_method"))
        dense = "fp8" if method == "fp8" else others
        if is_left or experts == "q4_0":
            dense = "bf16"
        return Recipe(experts, experts, experts, dense, "bf16", "bf16")

    def _expert_format(self, stated: Mapping[str, Any]) -> str:
        """The format of routed experts, by the words of whoever quantised them."""
        text = str(stated.get("quant_method")) + str(stated.get("format", ""))
        by_layer = stated.get("quantized_layers")
        if isinstance(by_layer, dict):
            words = (str(v) for key, v in by_layer.items() if "experts" in key)
            text += next(words, "")
        text += str(stated.get("quant_algo", "")) + str(stated.get("fmt", ""))
        groups = stated.get("config_groups")
        weights: Mapping[str, Any] = {}
        if isinstance(groups, dict) and groups:
            first = next(iter(groups.values()))
            weights = first.get("weights") or {} if isinstance(first, dict) else {}
        text = text.lower()
        for word in ("nvfp4", "mxfp4"):
            if word in text:
                return word
        bits = weights.get("num_bits", stated.get("bits"))
        if bits == 4:
            # Four bits and a scale of sixteen for 32 weights, or about so.
            return "mxfp4" if weights.get("type") == "float" else "q4_0"
        if bits == 8 or "fp8" in text or "e4m3" in text:
            return "fp8"
        raise AdviceError(
            f"{self.path}: quantization_config: unknown quant_method"
            f" {stated.get('quant_method')!r:.40}; --quant says the format"
        )

    # -- what is left ------------------------------------------------------------------

    def _remarks(self) -> tuple[str, ...]:
        remarks = []
        towers = [name for name in _TOWERS if isinstance(self.outer.get(name), dict)]
        if towers:
            remarks.append(f"{', '.join(towers)}: not counted, a tower of its own")
        heads = [key for key in self.keys.values if _MULTI_TOKEN.fullmatch(key)]
        if any(self.keys.values[key] for key in heads):
            remarks.append("heads for several tokens: stored, not counted")
        known = {*self.keys.asked, *heads, *_TOWERS, *_NESTED, "quantization_config"}
        unknown = [
            key
            for key, value in self.keys.values.items()
            # What is off changes nothing.
            if value and key not in known and not _HARMLESS.fullmatch(key)
        ]
        if unknown:
            remarks.append(
                "keys that moesim does not know, and that may change its figures:"
                f" {', '.join(sorted(unknown))}"
            )
        return tuple(remarks)
