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

_INT32_MAX = 2**31 - 1

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

_GGUF_TEXT = {"rope.scaling.type", "tensor_data_layout"}

# Numbers that a file may give once, or once for each layer.
_GGUF_PER_LAYER = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window",
    "feed_forward_length",
}

# Control tokens that end a turn or a text, whatever eos_token_id says.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of a Llama-like transformer.

    `inv_freq` holds the head_dim / 2 RoPE frequencies in radians per position, scaling
    applied. `rope_interleaved` tells how q and k rows are ordered: False rotates halves
    (i, i + head_dim / 2) as Hugging Face weights want, True adjacent pairs (2i, 2i + 1)
    as llama-architecture GGUF files do. `window` is the number of keys that a query sees,
    itself included (0: all), in layers `window_from` and up. `qkv_bias` and `output_bias` tell
    whether the attention's matrices have biases (None: as the weights have them). ValueError
    names the field.
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
        object.__setattr__(self, "inv_freq", tuple(float(f) for f in self.inv_freq))
        object.__setattr__(self, "eos", tuple(int(i) for i in self.eos))
        if not isinstance(self.norm_eps, (int, float)):
            raise ValueError(f"norm_eps must be a number, got {self.norm_eps!r}")
        object.__setattr__(self, "norm_eps", float(self.norm_eps))
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if len(self.inv_freq) != self.head_dim // 2:
            raise ValueError(
                f"inv_freq must have head_dim / 2 = {self.head_dim // 2} frequencies, "
                f"got {len(self.inv_freq)}"
            )
        if not all(math.isfinite(f) and f > 0 for f in self.inv_freq):
            raise ValueError("inv_freq must be positive and finite")
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ValueError(f"norm_eps must be finite and not negative, got {self.norm_eps}")
        for field, ids in (("eos", self.eos), ("bos", () if self.bos is None else (self.bos,))):
            for i in ids:
                if not 0 <= i < self.vocab_size:
                    raise ValueError(f"{field} {i} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def of(cls, config: ModelConfig | Mapping[str, Any] | Any) -> ModelConfig:
        """Read a ModelConfig, a config.json's dict, or an object with `to_dict()`."""
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            to_dict = getattr(config, "to_dict", None)
            if to_dict is None:
                raise TypeError(
                    "config must be a ModelConfig, a dict or a Hugging Face config, "
                    f"not {type(config).__name__}"
                )
            config = to_dict()
        return _from_hf(config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], rope_factors: Sequence[float] | None = None
    ) -> ModelConfig:
        """Read GGUF metadata; `rope_factors` are the values of `rope_freqs.weight`."""
        return _from_gguf(metadata, rope_factors)


def _integer(config: ModelConfig, field: str, least: int) -> None:
    value = getattr(config, field)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if number != value or isinstance(value, bool) or not least <= number <= _INT32_MAX:
        raise ValueError(f"{field} must be an integer from {least} to 2**31 - 1, got {value!r}")
    object.__setattr__(config, field, number)


# ---- RoPE ---------------------------------------------------------------------------------


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[float, ...]:
    """theta**(-2i / head_dim), i < head_dim / 2, under a Hugging Face scaling dict.

    Kinds: "default", "linear" (all divided by factor) and "llama3", which divides the slow
    ones by factor, keeps the fast ones, and interpolates between. Any other is a ValueError.
    """
    if not (isinstance(theta, (int, float)) and math.isfinite(theta) and theta > 0):
        raise ValueError(f"rope_theta must be positive and finite, got {theta!r}")
    base = tuple(float(theta) ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
    kinds = {str(scaling[key]) for key in ("rope_type", "type") if scaling.get(key) is not None}
    if len(kinds) > 1:
        raise ValueError(f"rope_scaling: type and rope_type disagree: {sorted(kinds)}")
    kind = kinds.pop() if kinds else "default"
    # What neither changes the frequencies nor says anything new.
    given = {
        key: value
        for key, value in scaling.items()
        if key not in ("rope_type", "type", "rope_theta") and value is not None
    }
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        value = scaling["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor {value!r} is not supported")
    if kind == "default":
        if given.pop("factor", 1.0) != 1.0:
            raise ValueError(f"rope_scaling: kind default with factor {scaling['factor']!r}")
        given.pop("original_max_position_embeddings", None)
        scaled = base
    elif kind == "linear":
        factor = _positive(given, "factor")
        given.pop("original_max_position_embeddings", None)
        scaled = tuple(f / factor for f in base)
    elif kind == "llama3":
        given.setdefault("original_max_position_embeddings", max_positions)
        scaled = _llama3(base, given)
    else:
        raise ValueError(f"rope_scaling: kind {kind!r} is not supported (default, linear, llama3)")
    if given:
        key, value = next(iter(given.items()))
        raise ValueError(f"rope_scaling: {key} = {value!r} is not supported for kind {kind}")
    return scaled


def _positive(given: dict[str, Any], key: str) -> float:
    value = given.pop(key, None)
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"rope_scaling: {key} must be a positive number, got {value!r}")
    return float(value)


def _llama3(base: tuple[float, ...], given: dict[str, Any]) -> tuple[float, ...]:
    factor = _positive(given, "factor")
    low = _positive(given, "low_freq_factor")
    high = _positive(given, "high_freq_factor")
    context = _positive(given, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(
            f"rope_scaling: high_freq_factor {high} must be above low_freq_factor {low}"
        )

    def scale(frequency: float) -> float:
        turns = context * frequency / (2 * math.pi)  # within the original context
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        smooth = (turns - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return tuple(scale(f) for f in base)


# ---- Hugging Face -------------------------------------------------------------------------


def _from_hf(config: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(config)
    for field, neutral in _NEUTRAL.items():
        if config.get(field) not in neutral:
            raise ValueError(f"config: {field} = {config[field]!r} is not supported")
    packed = config.get("quantization_config")
    if packed is not None and not (  # transformers unpacks a GGUF, and goes on to name it
        isinstance(packed, Mapping) and packed.get("quant_method") == "gguf"
    ):
        raise ValueError(f"config: quantization_config = {packed!r} is not supported")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config: hidden_act = {config['hidden_act']!r} is not supported (silu)")
    if config.get("attention_bias") not in (None, False) and architecture != "llama":
        raise ValueError(
            f"config: attention_bias = {config['attention_bias']!r} is not supported "
            f"for {architecture}"
        )
    heads = _field(config, "num_attention_heads")
    if architecture == "llama":
        kv_heads = config.get("num_key_value_heads")
    else:  # their defaults are no rule, so the file must say it
        kv_heads = _field(config, "num_key_value_heads", null=True)
    max_positions = _field(config, "max_position_embeddings")
    head_dim = _head_dim(config, heads)
    n_layers = _field(config, "num_hidden_layers")
    theta, scaling = _rope(config)
    attention_bias = bool(config.get("attention_bias"))
    window, window_from = _window(config, architecture, n_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_field(config, "vocab_size"),
        n_layers=n_layers,
        width=_field(config, "hidden_size"),
        ffn_width=_field(config, "intermediate_size"),
        n_heads=heads,
        n_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        inv_freq=rope_frequencies(head_dim, theta, scaling, max_positions),
        rope_interleaved=False,
        window=window,
        window_from=window_from,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        eos=token_ids(config.get("eos_token_id"), "eos_token_id"),
        bos=next(iter(token_ids(config.get("bos_token_id"), "bos_token_id")), None),
    )


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """One id, a list of ids or None, as a tuple without repetitions."""
    ids = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool):
            raise ValueError(f"config: {field} must be token ids, got {value!r}")
    return tuple(dict.fromkeys(ids))


def _field(config: Mapping[str, Any], field: str, null: bool = False) -> Any:
    value = config.get(field)
    if value is None and not (null and field in config):
        raise ValueError(f"config: {field} is missing")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"config: {field} must be a positive integer, got {value!r}")
    return value


def _count(config: Mapping[str, Any], field: str, default: int) -> int:
    """A number that may be missing (the default) or null (0)."""
    value = config.get(field, default)
    value = 0 if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"config: {field} must be a number of at least 0, got {value!r}")
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    names = {name: kind for kind, name in ARCHITECTURES.items()}
    classes = config.get("architectures") or []
    if not isinstance(classes, (list, tuple)) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"config: architectures must be a list of names, got {classes!r}")
    kind = config.get("model_type") or (names.get(classes[0]) if classes else None)
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        named = f"model_type {kind!r}" if kind or not classes else f"architectures {classes!r}"
        raise ValueError(f"config: {named} is not supported ({supported})")
    expected = {ARCHITECTURES[kind], ARCHITECTURES[kind].replace("ForCausalLM", "Model")}
    for name in classes:
        if name not in expected:
            raise ValueError(f"config: architectures {classes!r} is not supported for {kind}")
    return kind


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    if config.get("head_dim") is not None:
        return int(_field(config, "head_dim"))
    width = _field(config, "hidden_size")
    if width % heads:
        raise ValueError(
            f"config: hidden_size {width} is no multiple of num_attention_heads {heads} "
            "and head_dim is not given"
        )
    return int(width // heads)


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Theta and the scaling dict from the spelling of transformers 4 or 5."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for field, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"config: {field} must be a dict or null, got {value!r}")
        if any(isinstance(inner, Mapping) for inner in (value or {}).values()):
            raise ValueError(f"config: {field} = {value!r}: RoPE by layer type is not supported")
    scaling = dict(new or {})
    for key, value in (old or {}).items():
        if scaling.setdefault(key, value) != value:
            raise ValueError(f"config: rope_scaling and rope_parameters disagree on {key}")
    theta = scaling.get("rope_theta")
    outer = config.get("rope_theta")
    if theta is not None and outer is not None and theta != outer:
        raise ValueError(f"config: rope_theta {outer!r} and rope_parameters' {theta!r} disagree")
    if theta is None:
        theta = 10000.0 if outer is None else outer
    context = config.get("original_max_position_embeddings")
    if context is not None:
        scaling.setdefault("original_max_position_embeddings", context)
    return theta, scaling


def _window(config: Mapping[str, Any], architecture: str, n_layers: int) -> tuple[int, int]:
    """Keys in the window and the first layer that has it, as the reference decides them."""
    window, first = 0, 0
    if architecture == "mistral":
        window = _count(config, "sliding_window", 4096)
    elif architecture == "qwen2" and config.get("use_sliding_window"):
        window = _count(config, "sliding_window", 4096)
        first = _count(config, "max_window_layers", 28)
    elif architecture == "llama" and config.get("sliding_window"):
        raise ValueError(
            f"config: sliding_window = {config['sliding_window']!r} is not supported for llama"
        )
    kinds = config.get("layer_types")
    if kinds is not None:
        first = _window_from(kinds, architecture, window, n_layers)
    return (window, first) if window and first < n_layers else (0, 0)


def _window_from(kinds: Any, architecture: str, window: int, n_layers: int) -> int:
    """The first windowed layer by an explicit list; it must be full ones, then windowed."""
    if not isinstance(kinds, (list, tuple)) or len(kinds) != n_layers:
        raise ValueError(f"config: layer_types must list {n_layers} layers")
    first = next((i for i, kind in enumerate(kinds) if kind != "full_attention"), n_layers)
    possible = (0,) if architecture == "mistral" and window else range(n_layers + 1)
    if (
        any(kind != "sliding_attention" for kind in kinds[first:])
        or first not in possible
        or (first < n_layers and not window)
    ):
        raise ValueError(f"config: layer_types = {list(kinds)!r} is not supported")
    return first


# ---- GGUF ---------------------------------------------------------------------------------


def _from_gguf(metadata: Mapping[str, Any], factors: Sequence[float] | None) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2"):
        raise ValueError(
            f"GGUF: general.architecture {architecture!r} is not supported (llama, qwen2)"
        )
    prefix = f"{architecture}."
    keys = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
    for key, value in keys.items():
        if key in _GGUF_NEUTRAL and value in _GGUF_NEUTRAL[key]:
            continue
        if key not in _GGUF_KNOWN:
            raise ValueError(f"GGUF: {prefix}{key} = {value!r} is not supported")
        kind = str if key in _GGUF_TEXT else (int, float)
        if not isinstance(value, kind) and (isinstance(value, str) or key not in _GGUF_PER_LAYER):
            raise ValueError(f"GGUF: {prefix}{key} has the wrong type: {value!r}")

    def need(key: str) -> int:
        if key not in keys:
            raise ValueError(f"GGUF: {prefix}{key} is missing")
        return _same_for_all_layers(prefix + key, keys[key])

    heads, width = need("attention.head_count"), need("embedding_length")
    kv_heads = need("attention.head_count_kv") if "attention.head_count_kv" in keys else heads
    head_dim = _gguf_head_dim(keys, prefix, heads, width)
    context = need("context_length")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ValueError(f"GGUF: tokenizer.ggml.tokens must be a list, got {tokens!r}")
    window = need("attention.sliding_window") if "attention.sliding_window" in keys else 0
    if "attention.layer_norm_rms_epsilon" not in keys:
        raise ValueError(f"GGUF: {prefix}attention.layer_norm_rms_epsilon is missing")
    return ModelConfig(
        architecture=architecture,
        vocab_size=need("vocab_size") if tokens is None else len(tokens),
        n_layers=need("block_count"),
        width=width,
        ffn_width=need("feed_forward_length"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=context,
        norm_eps=keys["attention.layer_norm_rms_epsilon"],
        inv_freq=_gguf_frequencies(keys, prefix, head_dim, context, factors),
        rope_interleaved=architecture == "llama",
        window=window,
        tied=False,  # load() knows whether output.weight is there, and biases
        qkv_bias=True if architecture == "qwen2" else None,
        eos=_gguf_end_tokens(metadata),
        bos=next(
            iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "bos_token_id")), None
        ),
    )


def _same_for_all_layers(key: str, value: Any) -> int:
    """GGUF may give one number for all layers, or one for each; ours are all alike."""
    values = [value] if isinstance(value, (str, int, float)) else [int(v) for v in value]
    if not values or any(v != values[0] for v in values):
        raise ValueError(f"GGUF: {key} differs between layers: {values!r} is not supported")
    if not isinstance(values[0], int) or isinstance(values[0], bool):
        raise ValueError(f"GGUF: {key} must be an integer, got {values[0]!r}")
    return values[0]


def _gguf_head_dim(keys: Mapping[str, Any], prefix: str, heads: int, width: int) -> int:
    if heads < 1:
        raise ValueError(f"GGUF: {prefix}attention.head_count must be positive, got {heads}")
    named = next((k for k in ("attention.key_length", "rope.dimension_count") if k in keys), None)
    if named is not None:
        head_dim = _same_for_all_layers(prefix + named, keys[named])
    else:
        if width % heads:
            raise ValueError(
                f"GGUF: {prefix}embedding_length {width} is no multiple of "
                f"{prefix}attention.head_count {heads} and {prefix}attention.key_length is missing"
            )
        head_dim = width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ValueError(
                f"GGUF: {prefix}{key} = {keys[key]} differs from the head dimension {head_dim}, "
                "which is not supported"
            )
    scale = keys.get("attention.scale", 0.0)
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise ValueError(f"GGUF: {prefix}attention.scale = {scale!r} is not supported")
    return head_dim


def _gguf_frequencies(
    keys: Mapping[str, Any],
    prefix: str,
    head_dim: int,
    context: int,
    factors: Sequence[float] | None,
) -> tuple[float, ...]:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if "rope.scaling.type" not in keys and factor not in (0.0, 1.0):
        kind = "linear"  # files from before the type was written
    if kind not in ("none", "linear"):
        raise ValueError(f"GGUF: {prefix}rope.scaling.type = {kind!r} is not supported")
    scaling = {"rope_type": "linear", "factor": factor} if kind == "linear" else {}
    theta = keys.get("rope.freq_base", 10000.0)
    frequencies = rope_frequencies(head_dim, theta, scaling, context)
    if factors is None:
        return frequencies
    if len(factors) != len(frequencies):
        raise ValueError(
            f"GGUF: rope_freqs.weight has {len(factors)} factors, expected {len(frequencies)}"
        )
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise ValueError("GGUF: rope_freqs.weight must be positive and finite")
    return tuple(f / float(by) for f, by in zip(frequencies, factors, strict=True))


def _gguf_end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """eos, eot and eom ids, and the control tokens that always end a turn or a text."""
    ids = [
        metadata[f"tokenizer.ggml.{key}_token_id"]
        for key in ("eos", "eot", "eom")
        if metadata.get(f"tokenizer.ggml.{key}_token_id") is not None
    ]
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if tokens is not None and kinds is not None and len(kinds) == len(tokens):
        control = 3
        ids += [i for i, text in enumerate(tokens) if text in _END_TOKENS and kinds[i] == control]
    return token_ids(ids, "tokenizer.ggml.eos_token_id")
