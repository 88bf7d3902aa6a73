"""ModelConfig: what the engine must know about a model, read from whoever describes it.

Hugging Face configurations (transformers 4 and 5) and GGUF metadata say the same things
in three spellings. Each field here has one meaning, checked when it is made; a setting
that rksc does not compute is a ValueError that names it, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.fields import Fields, token_ids
from ..formats.files import reading, shown
from ..text.ends import gguf_ends
from .rope import check_frequencies, check_head_dim, rope_frequencies

Factors = Sequence[float] | NDArray[np.float32]

# model_type -> the class whose forward pass it names
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

# Settings of relatives that change the computation, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "attention_multiplier": (None, 1, 1.0),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_norm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
}

# GGUF keys below "<architecture>." that change the computation, likewise.
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}

# GGUF keys that are read below, or that only describe the file.
_GGUF_KNOWN = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of a Llama-like transformer.

    `inv_freq` holds the head_dim / 2 RoPE frequencies in radians per position, scaling
    applied. `rope_interleaved` tells how q and k rows are ordered: False rotates halves
    (i, i + head_dim / 2) as Hugging Face weights want, True adjacent pairs (2i, 2i + 1)
    as llama-architecture GGUF files do. `window` is the number of keys that a query sees,
    itself included (0: all), in layers `window_from` and up. `qkv_bias` and `output_bias` tell
    whether the attention's matrices have biases (None: as the weights have them). `eos` are the
    tokens that end a turn (ends.py). ValueError names the field.
    """

    architecture: str
    vocab_size: int
    n_layers: int
    width: int
    ffn_width: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    inv_freq: tuple[float, ...]
    rope_interleaved: bool = False
    window: int = 0
    window_from: int = 0
    tied: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None

    def __post_init__(self) -> None:
        for field in ("vocab_size", "n_layers", "width", "ffn_width", "n_heads", "n_kv_heads"):
            _integer(self, field, 1)
        for field in ("head_dim", "max_positions"):
            _integer(self, field, 1)
        for field in ("window", "window_from"):
            _integer(self, field, 0)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        check_head_dim(self.head_dim)
        if len(self.inv_freq) != self.head_dim // 2:
            raise ValueError(
                f"inv_freq must have head_dim / 2 = {self.head_dim // 2} frequencies, "
                f"got {len(self.inv_freq)}"
            )
        object.__setattr__(self, "inv_freq", check_frequencies(self.inv_freq, "inv_freq"))
        object.__setattr__(self, "norm_eps", Fields(vars(self)).number("norm_eps", most=1.0))
        object.__setattr__(self, "eos", token_ids(tuple(self.eos), "eos", self.vocab_size))
        token_ids(() if self.bos is None else (self.bos,), "bos", self.vocab_size)

    @classmethod
    def of(cls, config: ModelConfig | Mapping[str, Any] | Any) -> ModelConfig:
        """Read a ModelConfig, a config.json's dict, or an object with `to_dict()`."""
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            to_dict = getattr(config, "to_dict", None)
            if to_dict is None or isinstance(config, type):
                raise TypeError(
                    "config must be a ModelConfig, a dict or a Hugging Face config, "
                    f"not {type(config).__name__}"
                )
            config = to_dict()
        with reading("config"):
            return from_hf(config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], rope_factors: Sequence[float] | None = None
    ) -> ModelConfig:
        """Read GGUF metadata; `rope_factors` are the values of `rope_freqs.weight`."""
        with reading("GGUF"):
            return from_gguf(metadata, rope_factors)


def _integer(config: ModelConfig, field: str, least: int) -> None:
    object.__setattr__(config, field, Fields(vars(config)).integer(field, least))


# ---- Hugging Face -------------------------------------------------------------------------


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Of a config.json's dict; errors name the field alone."""
    fields = Fields(config)
    architecture = _architecture(fields)
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) not in neutral:
            raise fields.unsupported(name)
    packed = fields.get("quantization_config")
    if packed is not None and not (  # transformers unpacks a GGUF, and goes on to name it
        isinstance(packed, Mapping) and packed.get("quant_method") == "gguf"
    ):
        raise fields.unsupported("quantization_config")
    if "hidden_act" in fields and fields.get("hidden_act") not in ("silu", "swish"):
        raise ValueError(f"hidden_act = {shown(fields.get('hidden_act'))} is not supported (silu)")
    vocab_size = fields.integer("vocab_size", 1)
    attention_bias = fields.flag("attention_bias")
    if attention_bias and architecture != "llama":
        raise ValueError(f"attention_bias = True is not supported for {architecture}")
    heads = fields.integer("num_attention_heads", 1)
    if architecture != "llama" and "num_key_value_heads" not in fields:
        # Their defaults are no rule, so the file must say it.
        raise ValueError("num_key_value_heads is missing")
    max_positions = fields.integer("max_position_embeddings", 1)
    width = fields.integer("hidden_size", 1)
    head_dim = _head_dim(fields, width, heads)
    n_layers = fields.integer("num_hidden_layers", 1)
    theta, scaling = _rope(fields)
    window, window_from = _window(fields, architecture, n_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        n_layers=n_layers,
        width=width,
        ffn_width=fields.integer("intermediate_size", 1),
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, default=heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6, most=1.0),
        inv_freq=rope_frequencies(head_dim, theta, scaling, max_positions),
        rope_interleaved=False,
        window=window,
        window_from=window_from,
        tied=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        eos=token_ids(fields.get("eos_token_id"), "eos_token_id", vocab_size),
        bos=next(iter(token_ids(fields.get("bos_token_id"), "bos_token_id", vocab_size)), None),
    )


def _architecture(fields: Fields) -> str:
    names = {name: kind for kind, name in ARCHITECTURES.items()}
    classes = fields.get("architectures") or []
    if not isinstance(classes, (list, tuple)) or not all(isinstance(c, str) for c in classes):
        raise fields.wrong("architectures", "a list of names")
    kind = fields.get("model_type") or (names.get(classes[0]) if classes else None)
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        name = "model_type" if kind or not classes else "architectures"
        raise ValueError(f"{name} {shown(fields.get(name))} is not supported ({supported})")
    expected = {ARCHITECTURES[kind], ARCHITECTURES[kind].replace("ForCausalLM", "Model")}
    if not expected.issuperset(classes):
        raise ValueError(f"architectures {shown(classes)} is not supported for {kind}")
    return kind


def _head_dim(fields: Fields, width: int, heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim", 1)
    if width % heads:
        raise ValueError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads} "
            "and head_dim is not given"
        )
    return width // heads


def _rope(fields: Fields) -> tuple[Any, Mapping[str, Any]]:
    """Theta and the scaling dict from the spelling of transformers 4 or 5."""
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise fields.wrong(name, "a dict or null")
        if any(isinstance(inner, Mapping) for inner in (value or {}).values()):
            raise ValueError(f"{name} = {shown(value)}: RoPE by layer type is not supported")
    scaling = dict(new or {})
    for key, value in (old or {}).items():
        if scaling.setdefault(key, value) != value:
            raise ValueError(f"rope_scaling and rope_parameters disagree on {key}")
    theta = scaling.get("rope_theta")
    outer = fields.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise ValueError(f"rope_theta {shown(outer)} and rope_parameters' {shown(theta)} disagree")
    if theta is None:
        theta = 10000.0 if outer is None else outer
    context = fields.get("original_max_position_embeddings")
    if context is not None:
        scaling.setdefault("original_max_position_embeddings", context)
    return theta, scaling


def _window(fields: Fields, architecture: str, n_layers: int) -> tuple[int, int]:
    """Keys in the window and the first layer that has it, as the reference decides them."""
    window, first = 0, 0
    if architecture == "mistral":
        window = _count(fields, "sliding_window", 4096)
    elif architecture == "qwen2" and fields.flag("use_sliding_window"):
        window = _count(fields, "sliding_window", 4096)
        first = _count(fields, "max_window_layers", 28)
    elif architecture == "llama" and fields.get("sliding_window"):
        raise ValueError(
            f"sliding_window = {shown(fields.get('sliding_window'))} is not supported for llama"
        )
    kinds = fields.get("layer_types")
    if kinds is not None:
        first = _window_from(kinds, architecture, window, n_layers)
    return (window, first) if window and first < n_layers else (0, 0)


def _count(fields: Fields, name: str, default: int) -> int:
    """A number that may be missing (the default) or null (0)."""
    return fields.integer(name, default=0 if name in fields else default)


def _window_from(kinds: Any, architecture: str, window: int, n_layers: int) -> int:
    """The first windowed layer by an explicit list; it must be full ones, then windowed."""
    if not isinstance(kinds, (list, tuple)) or len(kinds) != n_layers:
        raise ValueError(f"layer_types must list {n_layers} layers")
    first = next((i for i, kind in enumerate(kinds) if kind != "full_attention"), n_layers)
    possible = (0,) if architecture == "mistral" and window else range(n_layers + 1)
    if (
        any(kind != "sliding_attention" for kind in kinds[first:])
        or first not in possible
        or (first < n_layers and not window)
    ):
        raise ValueError(f"layer_types = {shown(list(kinds))} is not supported")
    return first


# ---- GGUF ---------------------------------------------------------------------------------


def from_gguf(metadata: Mapping[str, Any], factors: Factors | None) -> ModelConfig:
    """Of a GGUF's metadata; errors name the key alone."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ("llama", "qwen2"):
        raise ValueError(
            f"general.architecture {shown(architecture)} is not supported (llama, qwen2)"
        )
    prefix = f"{architecture}."
    keys = Fields(metadata, prefix)
    for key in (k.removeprefix(prefix) for k in metadata if k.startswith(prefix)):
        value = keys.get(key)
        neutral = isinstance(value, (int, float)) and value in _GGUF_NEUTRAL.get(key, ())
        if not neutral and key not in _GGUF_KNOWN:
            raise keys.unsupported(key)
    heads = _for_all_layers(keys, "attention.head_count")
    width = keys.integer("embedding_length", 1)
    head_dim = _gguf_head_dim(keys, heads, width)
    context = keys.integer("context_length", 1)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ValueError(f"tokenizer.ggml.tokens must be a list, got {shown(tokens)}")
    vocab_size = keys.integer("vocab_size", 1) if tokens is None else len(tokens)
    field = "tokenizer.ggml.bos_token_id"
    bos = token_ids(metadata.get(field), field, vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        n_layers=keys.integer("block_count", 1),
        width=width,
        ffn_width=_for_all_layers(keys, "feed_forward_length"),
        n_heads=heads,
        n_kv_heads=_for_all_layers(keys, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", most=1.0),
        inv_freq=_gguf_frequencies(keys, head_dim, context, factors),
        rope_interleaved=architecture == "llama",
        window=_for_all_layers(keys, "attention.sliding_window", 0),
        tied=False,  # load() knows whether output.weight is there, and biases
        qkv_bias=True if architecture == "qwen2" else None,
        eos=gguf_ends(metadata, vocab_size),
        bos=next(iter(bos), None),
    )


def _for_all_layers(keys: Fields, key: str, default: int | None = None) -> int:
    """GGUF may give one number for all layers, or one for each; ours are all alike."""
    least = 0 if default == 0 else 1
    if not isinstance(keys.get(key), (list, tuple, np.ndarray)):
        return keys.integer(key, least, default=default)
    values = keys.integers(key)
    if (values != values[0]).any():
        raise ValueError(f"{keys.full(key)} differs between layers, which is not supported")
    return Fields({keys.full(key): values[0]}).integer(keys.full(key), least)


def _gguf_head_dim(keys: Fields, heads: int, width: int) -> int:
    named = next((k for k in ("attention.key_length", "rope.dimension_count") if k in keys), None)
    if named is not None:
        head_dim = keys.integer(named, 1)
    else:
        if width % heads:
            raise ValueError(
                f"{keys.full('embedding_length')} {width} is not a multiple of "
                f"attention.head_count {heads} and attention.key_length is missing"
            )
        head_dim = width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, default=head_dim) != head_dim:
            raise ValueError(
                f"{keys.full(key)} = {keys.get(key)} differs from the head dimension {head_dim}, "
                "which is not supported"
            )
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise keys.unsupported("attention.scale")
    return head_dim


def _gguf_frequencies(
    keys: Fields, head_dim: int, context: int, factors: Factors | None
) -> tuple[float, ...]:
    kind = keys.get("rope.scaling.type") if "rope.scaling.type" in keys else "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope.scaling.type" not in keys and factor not in (0.0, 1.0):
        kind = "linear"  # files from before the type was written
    if not isinstance(kind, str) or kind not in ("none", "linear"):
        raise keys.unsupported("rope.scaling.type")
    scaling = {"rope_type": "linear", "factor": factor} if kind == "linear" else {}
    theta = keys.number("rope.freq_base", 10000.0, positive=True)
    frequencies = rope_frequencies(head_dim, theta, scaling, context)
    if factors is None:
        return frequencies
    if len(factors) != len(frequencies):
        raise ValueError(
            f"rope_freqs.weight has {len(factors)} factors, expected {len(frequencies)}"
        )
    divided = check_frequencies(factors, "rope_freqs.weight")
    return tuple(f / by for f, by in zip(frequencies, divided, strict=True))
