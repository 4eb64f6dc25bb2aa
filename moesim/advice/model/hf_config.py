"""Reads ``config.json``: the shape of every layer, by the keys that makers use.

Each key is one of three: a size that is read here, one that changes no figure, or
unknown; the last are named, never skipped. What keys are called stands in one table,
``advice/data/config_keys.yaml``; kinds of layers come from whichever key says them, and
a kind that is not known is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesim.advice.model.contents import (
    MOST_EXPERTS,
    ModelContents,
    shaped_contents,
)
from moesim.advice.tables import table
from moesim.base.errors import AdviceError
from moesim.base.inputs import load_json, read_text
from moesim.base.text import did_you_mean
from moesim.traces.layer_kinds import LayerKind, LayerShape, repeated
from moesim.traces.weight_formats import Recipe, bytes_per_weight, recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Far above every real size, far below what lists of layers would not fit into memory.
LARGEST_SIZE = 1 << 40
MOST_LAYERS = 10_000

# What entries of lists of layers mean, as the table of keys calls it.
_FULL = "full"
_WINDOW = "window"
_RECURRENT = "recurrent"
_CONV = "conv"
_EXPERTS_ALONE = "experts alone"
_DENSE_ALONE = "dense alone"
_KIND_LISTS = ("layer_types", "layers_block_type", "layer_block_types")
_LETTERS = "hybrid_override_pattern"


# What a folder's name says of formats that its config.json does not have.
NAMED = re.compile(r"[-_](fp8|nvfp4|mxfp4|bf16|int4|awq|gptq)(?![a-z0-9])")
# The formats of GGUF files nearest to packed integers.
PACKED = {"int4": "q4_0", "awq": "q4_0", "gptq": "q4_0"}


def hf_contents(folder: Path, quant: str = "") -> ModelContents:
    """Compute what weights of a Hugging Face folder's shape hold, by its config.json.

    Args:
        folder: of the model; weights in it are not read.
        quant: label of the formats that the weights shall have; default: those that the
            config states, or the folder's name.

    Raises:
        AdviceError: not JSON, sizes that no model has, a missing size, a kind of layer
            or a label that is not known, or no experts.
    """
    path = folder / "config.json"
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
    return _Reader(path, config).contents(quant)


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

    def named(self, size: str, default: int | None = None) -> int:
        """Return a size that the table of keys names."""
        return self._of_row(table("config_keys")["sizes"][size], default)

    def kind(self, name: str, **sizes: int) -> LayerKind:
        """Return a kind of layer with the sizes that the table names, and these."""
        row = table("config_keys")["kinds"][name]
        read = {size: self._of_row(names) for size, names in row.items()}
        return LayerKind(name, {**read, **sizes})

    def _of_row(self, row: list[Any], default: int | None = None) -> int:
        names = [name for name in row if isinstance(name, str)]
        if len(names) < len(row):
            default = row[-1]
        return self.size(*names, default=default)

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

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.outer = config
        nested = table("config_keys")["nested"]
        # Models that also see keep their language part in a table of its own.
        inner: dict[str, Any] = next(
            (config[name] for name in nested if isinstance(config.get(name), dict)), {}
        )
        if isinstance(inner.get("text_config"), dict):
            inner = inner["text_config"]
        flat = {key: v for key, v in config.items() if key not in nested}
        self.keys = _Keys(path, {**flat, **inner})
        self.model = str(self.keys.raw("model_type"))
        self.hidden = self.keys.size("hidden_size", "d_model")
        self.count = self._count()
        if not 0 < self.count <= MOST_LAYERS:
            raise AdviceError(
                f"{path}: layers: expected 1 to {MOST_LAYERS}, found {self.count};"
                " download the file again"
            )

    def contents(self, quant: str) -> ModelContents:
        """Read everything, unknown keys last."""
        keys = self.keys
        experts = keys.named("experts")
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
        vocab = keys.size("vocab_size")
        table_weights, table_rows = self._tables(vocab)
        stated = self._quantisation()
        formats = self._formats(stated)
        tied = keys.raw("tie_word_embeddings", "tie_embedding")
        if tied is None:
            # Transformers ties these families unless they say otherwise.
            tied = self.model.startswith(("lfm2", "gemma"))
        names = keys.raw("architectures")
        is_named = isinstance(names, list) and names
        architecture = str(keys.raw("model_type") or (names[0] if is_named else "?"))
        remarks = ["bytes follow from config.json", *self._remarks()]

        folder = self.path.parent
        named = NAMED.search(folder.resolve().name.lower())
        label = quant or ("" if stated or named is None else named.group(1))
        if label:
            known = recipe(PACKED.get(label, label))
            if known is None:
                raise AdviceError(
                    f"quantisation {label!r}: unknown; expected a label such as Q4_K_M,"
                    " FP8, MXFP4 or BF16"
                )
            formats = known
            if not quant:
                remarks.append(f"formats by the folder's name, {label.upper()}")
        computed = shaped_contents(
            layers,
            formats,
            name=folder.name,
            hidden=self.hidden,
            vocab=vocab,
            tied=bool(tied),
        )
        return replace(
            computed,
            architecture=architecture,
            source="config.json",
            quant=label.upper() or formats.up.upper(),
            table_bytes=round(table_weights * bytes_per_weight(formats.embed)),
            table_weights=table_weights,
            table_rows=table_rows,
            assumed=tuple(remarks),
        )

    def _count(self) -> int:
        """Layers; some hybrids state nothing but what each of them is."""
        keys = self.keys
        if keys.raw(*table("config_keys")["sizes"]["layers"]) is None:
            for name in _KIND_LISTS:
                if stated := keys.list_of(name):
                    return len(stated)
        return keys.named("layers")

    # -- kinds -------------------------------------------------------------------------

    def _kinds(self) -> list[str]:
        """What each layer is, by whichever key says it."""
        keys = self.keys
        names = _meanings("names")
        lists: dict[str, dict[Any, str]] = {
            **dict.fromkeys((*_KIND_LISTS, _LETTERS), names),
            "hybrid_layer_pattern": {0: _FULL, 1: _WINDOW},
            "attn_type_list": {0: _RECURRENT, 1: _FULL},
        }
        for name, meanings in lists.items():
            letters = keys.raw(name)
            is_text = name == _LETTERS and letters is not None
            stated = list(str(letters)) if is_text else keys.list_of(name)
            if stated is not None:
                return self._of_list(name, meanings, stated)
        linear = keys.raw("linear_attn_config")
        if isinstance(linear, dict):
            # Numbered from one.
            full = {number - 1 for number in linear.get("full_attn_layers", ())}
            return [_FULL if at in full else _RECURRENT for at in range(self.count)]
        return self._of_intervals()

    def _of_list(
        self, key: str, meanings: Mapping[Any, str], stated: list[Any]
    ) -> list[str]:
        return [self._known(key, meanings, each) for each in self._cut(stated)]

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
        window = keys.named("window", 0)
        # Every so manieth layer sees everything; the others are something else.
        every, other = 1, _WINDOW
        for name, between in (
            ("full_attention_interval", _RECURRENT),
            ("global_attn_every_n_layers", _WINDOW),
            ("sliding_window_pattern", _WINDOW),
        ):
            stated = keys.raw(name)
            if isinstance(stated, int) and stated > 0:
                every, other = stated, between
                break
        else:
            if self.model.startswith("llama4"):
                every = keys.size("no_rope_layer_interval", default=4)
            elif self.model.startswith("gpt_oss"):
                every = 2
            elif window and keys.raw("use_sliding_window") is not False:
                every = self.count + 1
        return [other if (at + 1) % every else _FULL for at in range(self.count)]

    # -- mixers ------------------------------------------------------------------------

    def _mixer(self, kind: str, at: int) -> LayerKind:
        if kind in (_EXPERTS_ALONE, _DENSE_ALONE):
            return LayerKind("none")
        if kind == _CONV:
            return self.keys.kind("conv")
        if kind == _RECURRENT:
            return self._recurrence()
        return self._attention(kind, at)

    def _recurrence(self) -> LayerKind:
        """The recurrence whose sizes the file has."""
        keys = self.keys
        if keys.raw("linear_num_value_heads") is not None:
            return keys.kind("delta")
        linear = keys.raw("linear_attn_config")
        if isinstance(linear, dict):
            inside = _Keys(self.path, linear)
            return keys.kind(
                "kda",
                heads=inside.size("num_heads"),
                key=inside.size("head_dim"),
                conv=inside.size("short_conv_kernel_size", default=4),
                full_gate=int(inside.flag("use_full_rank_gate")),
            )
        is_lightning = self.model.startswith("minimax")
        if is_lightning or keys.raw("linear_num_heads") is not None:
            heads = keys.size("linear_num_heads", "num_attention_heads")
            size = self.hidden // max(1, heads)
            key = keys.size("linear_head_dim", "head_dim", default=size)
            kind = "lightning" if is_lightning else "kda"
            return keys.kind(kind, heads=heads, key=key)
        if keys.raw("mamba_dt_rank") is not None:
            return keys.kind("mamba1", inner=keys.named("expand") * self.hidden)
        heads = keys.size("mamba_num_heads", "mamba_n_heads")
        key = keys.raw("mamba_head_dim", "mamba_d_head")
        if not isinstance(key, int):
            # What is left to the library follows from how much wider it is.
            key = keys.named("expand") * self.hidden // heads
        return keys.kind("ssm", heads=heads, key=key)

    def _attention(self, kind: str, at: int) -> LayerKind:
        keys = self.keys
        heads = keys.named("heads")
        by_layer = keys.list_of("num_attention_heads_per_layer")
        if by_layer is not None:
            heads = keys.whole("num_attention_heads_per_layer", self._cut(by_layer)[at])
        sizes = {"heads": heads, **keys.kind("index").sizes}
        ratio = self._ratio(at)
        if ratio is not None:
            keys.raw("num_key_value_heads", "qk_rope_head_dim")
            return keys.kind("compressed", ratio=ratio, **sizes)
        if keys.size("kv_lora_rank", default=0):
            keys.raw("num_key_value_heads", "head_dim")
            gated = int(keys.flag("mla_use_output_gate"))
            return keys.kind("latent", gated=gated, **sizes)
        return LayerKind("attention", {**sizes, **self._heads(kind, heads)})

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

    def _heads(self, kind: str, heads: int) -> dict[str, int]:
        """Keys and values of one's own, which may differ by kind."""
        keys = self.keys
        kv_heads = keys.size(
            "num_key_value_heads", "num_attention_groups", default=heads
        )
        key = keys.size("head_dim", "attention_head_dim", default=0)
        key = key or (self.hidden // heads if heads else 0)
        value = keys.size("v_head_dim", default=key)
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
            size = setting.size("head_dim", default=windowed["key"])
            windowed = {
                "heads": setting.size("num_attention_heads", default=windowed["heads"]),
                "kv_heads": setting.size(
                    "num_attention_groups", default=windowed["kv_heads"]
                ),
                "key": size,
                "value": size,
            }
        sizes = {"heads": heads, "kv_heads": kv_heads, "key": key, "value": value}
        global_heads = keys.size("num_global_key_value_heads", default=kv_heads)
        wide = keys.size("global_head_dim", default=0)
        same = keys.flag("attention_k_eq_v")
        if kind == _WINDOW:
            sizes = {**windowed, "window": keys.named("window")}
        elif wide:
            sizes |= {"kv_heads": global_heads, "key": wide, "value": wide}
            sizes["same"] = int(same)
        index_heads = keys.size("indexer_kv_heads", default=0)
        return sizes | {"index_kv_heads": index_heads, "gated": self._gated()}

    def _gated(self) -> int:
        """Whether attention's outputs are gated by as many values as queries have."""
        stated = self.keys.raw(
            "attn_output_gate", "output_gate_type", "use_head_wise_attn_gate"
        )
        families = ("qwen3_next", "qwen3_5", "afmoe")
        return int(bool(stated) or self.model.startswith(families))

    # -- feed-forward ------------------------------------------------------------------

    def _layers(self, experts: int) -> tuple[LayerShape, ...]:
        keys = self.keys
        kinds = self._kinds()
        # Said twice by files that have a list of kinds.
        keys.raw("full_attention_interval", "global_attn_every_n_layers")
        keys.raw("sliding_window_pattern", "attn_type_list")
        keys.raw("num_attention_heads", "num_key_value_heads")
        keys.named("window", 0)
        routed = self._routed(kinds)
        hidden = self.hidden
        top_k = keys.named("top_k")
        plain = keys.size("intermediate_size", default=0)
        intermediate = keys.named("expert_width", plain or None)
        width = keys.named("expert_hidden") or hidden
        # Nemotron's experts square a ReLU, and have no gate.
        act = str(keys.raw("mlp_hidden_act", "hidden_act", "hidden_activation"))
        matrices = 2 if act == "relu2" else 3
        beside = matrices * hidden * self._beside(intermediate)
        if width != hidden:
            beside += 2 * hidden * width
        dense = matrices * hidden * keys.named("dense_width", intermediate)
        attentions = 1
        if keys.raw("ffn_hidden_size") is not None and keys.raw("moe_topk") is not None:
            # LongCat's layers are two, and experts run across both.
            attentions = 2
            beside += 2 * dense
        connections = self._connections()
        are_apart = _EXPERTS_ALONE in kinds or _DENSE_ALONE in kinds
        zero = keys.named("zero_experts")

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
        first = keys.named("first_moe_layer")
        last = keys.size("moe_layer_end_index", default=self.count)
        stated = keys.list_of("mlp_layer_types")
        if stated is not None:
            meanings = _meanings("feed_forward_names")
            parts = self._of_list("mlp_layer_types", meanings, stated)
            return [each == _EXPERTS_ALONE for each in parts]
        layers = range(self.count)
        enumerated = keys.raw("moe_layers_enum")
        if enumerated is not None:
            numbers = {int(word) for word in re.findall(r"\d+", str(enumerated))}
            return [at in numbers for at in layers]
        period = keys.size("expert_layer_period", default=0)
        if period:
            offset = keys.size("expert_layer_offset", default=0)
            return [at % period == offset for at in layers]
        frequency = keys.raw("moe_layer_freq")
        if isinstance(frequency, list):
            return [bool(each) for each in self._cut(frequency)]
        # All but Llama 4 and Ernie count the step from the first layer on.
        step = max(1, keys.named("moe_step"))
        only_dense = keys.list_of("mlp_only_layers") or []
        return [
            first <= at <= last and at not in only_dense and (at + 1) % step == 0
            for at in layers
        ]

    def _beside(self, intermediate: int) -> int:
        """Width of what every token is multiplied with beside routed experts."""
        keys = self.keys
        if self.model.startswith("llama4"):
            return intermediate
        if keys.flag("enable_moe_block"):
            # Gemma 4 runs its dense part in every layer, too.
            return keys.size("intermediate_size")
        width = keys.named("shared_width")
        count = keys.named("shared_count", int(width > 0))
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
        for values in (self.outer, self.keys.values):
            stated = values.get("quantization_config")
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
        kind = str(self.keys.raw("expert_dtype"))
        experts = {"fp4": "mxfp4", "fp8": "fp8"}.get(kind, experts)
        left = str(stated.get("ignore") or stated.get("modules_to_not_convert") or "")
        is_left = re.search(r"attn|attention", left) is not None
        others = {"mxfp4": "bf16", "nvfp4": "fp8"}.get(experts, experts)
        dense = "fp8" if str(stated.get("quant_method")) == "fp8" else others
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
        names = table("config_keys")
        values = self.keys.values
        remarks = []
        outer = self.outer
        towers = [name for name in names["towers"] if isinstance(outer.get(name), dict)]
        if towers:
            remarks.append(f"{', '.join(towers)}: not counted, a tower of its own")
        heads = [key for key in values if re.fullmatch(names["multi_token"], key)]
        if any(values[key] for key in heads):
            remarks.append("heads for several tokens: stored, not counted")
        known = {*self.keys.asked, *heads, *names["towers"], *names["nested"]}
        harmless = re.compile("|".join(names["harmless"]))
        unknown = [
            key
            for key, value in values.items()
            # What is off changes nothing.
            if value
            and key not in known | {"quantization_config"}
            and not harmless.fullmatch(key)
        ]
        if unknown:
            remarks.append(
                "keys that moesim does not know, and that may change its figures:"
                f" {', '.join(sorted(unknown))}"
            )
        return tuple(remarks)


def _meanings(names: str) -> dict[Any, str]:
    """Entry of a list of layers -> what it is."""
    rows = table("config_keys")[names]
    return {entry: kind for kind, entries in rows.items() for entry in entries}
