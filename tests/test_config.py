"""ModelConfig: one meaning from three spellings, and nothing ignored."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from support import model_files

from rksc.model.config import ModelConfig

TINY = model_files.TINY
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def of(**changes: Any) -> ModelConfig:
    return ModelConfig.of(TINY | changes)


def test_a_plain_config() -> None:
    config = ModelConfig.of(TINY)
    assert (config.architecture, config.vocab_size, config.n_layers) == ("llama", 97, 4)
    assert (config.width, config.ffn_width, config.head_dim) == (64, 128, 16)
    assert (config.n_heads, config.n_kv_heads, config.max_positions) == (4, 2, 512)
    assert (config.eos, config.bos, config.tied, config.window) == ((2,), 1, False, 0)
    assert config.inv_freq == tuple(10000 ** (-i / 8) for i in range(8))
    assert not config.rope_interleaved
    assert ModelConfig.of(config) is config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 1  # type: ignore[misc]


def test_several_end_tokens() -> None:
    assert of(eos_token_id=[2, 5, 9, 5]).eos == (2, 5, 9)
    assert of(eos_token_id=None).eos == ()


def test_head_dim_given_or_derived() -> None:
    assert of(num_attention_heads=6, num_key_value_heads=2, head_dim=16).head_dim == 16
    assert of(head_dim=None).head_dim == 16
    with pytest.raises(ValueError, match="hidden_size 64 is not a multiple"):
        of(num_attention_heads=6, num_key_value_heads=2, head_dim=None)


def test_kv_heads_default_to_heads() -> None:
    assert of(num_key_value_heads=None).n_kv_heads == 4


# ---- RoPE ---------------------------------------------------------------------------------


def frequencies_by_paper(factor: float, low: float, high: float, context: int) -> list[float]:
    """Llama 3.1's rule by wavelength."""
    result = []
    for i in range(8):
        frequency = 10000.0 ** (-2 * i / 16)
        length = 2 * math.pi / frequency
        if length > context / low:
            frequency /= factor
        elif length >= context / high:
            smooth = (context / length - low) / (high - low)
            frequency *= (1 - smooth) / factor + smooth
        result.append(frequency)
    return result


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_scaling_in_both_spellings(key: str) -> None:
    scaling = {key: "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    expected = frequencies_by_paper(8, 1, 4, 64)
    config = of(rope_scaling=scaling)
    np.testing.assert_allclose(config.inv_freq, expected, rtol=1e-14)
    plain = ModelConfig.of(TINY).inv_freq
    assert config.inv_freq[0] == plain[0]
    assert config.inv_freq[-1] == plain[-1] / 8
    assert any(a not in (b, b / 8) for a, b in zip(config.inv_freq, plain, strict=True))


def test_scaling_in_the_form_of_transformers_5() -> None:
    new = {k: v for k, v in TINY.items() if k != "rope_theta"}
    old = of(rope_scaling=LLAMA3, rope_theta=5e5)
    config = ModelConfig.of(new | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert config == old
    plain = ModelConfig.of(
        new | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    )
    assert plain == ModelConfig.of(TINY)


def test_linear_scaling() -> None:
    config = of(rope_scaling={"type": "linear", "factor": 4.0})
    assert config.inv_freq == tuple(f / 4 for f in ModelConfig.of(TINY).inv_freq)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ({"type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"type": "su", "long_factor": [1.0]}, "su"),
        ({"type": "linear", "rope_type": "llama3", "factor": 2.0}, "disagree"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": float("nan")}, "factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
        ({"type": "default", "factor": 2.0}, "factor"),
        ({k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}, "low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "layer type"),
        ("linear", "rope_scaling"),
    ],
)
def test_other_scalings_are_named(scaling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(rope_scaling=scaling)


def test_contradictory_thetas() -> None:
    with pytest.raises(ValueError, match="disagree"):
        of(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


# ---- windows ------------------------------------------------------------------------------


def test_mistral_window() -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert of(**mistral, sliding_window=32).window == 32
    assert of(**mistral, sliding_window=None).window == 0
    assert of(**mistral).window == 4096  # the class's default, where a file is silent


def test_qwen2_window_starts_at_a_layer() -> None:
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    config = of(**qwen2, use_sliding_window=True, sliding_window=32, max_window_layers=3)
    assert (config.window, config.window_from) == (32, 3)
    config = of(**qwen2, use_sliding_window=True, sliding_window=32, max_window_layers=4)
    assert (config.window, config.window_from) == (0, 0)
    config = of(**qwen2, use_sliding_window=False, sliding_window=32, max_window_layers=1)
    assert config.window == 0
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    config = of(**qwen2, use_sliding_window=True, sliding_window=32, layer_types=kinds)
    assert (config.window, config.window_from) == (32, 1)
    for wrong in (kinds[::-1], kinds[:3], ["full_attention", "chunked_attention"] * 2):
        with pytest.raises(ValueError, match="layer_types"):
            of(**qwen2, use_sliding_window=True, sliding_window=32, layer_types=wrong)


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 32}, "sliding_window"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**40}, "n_layers"),
        ({"num_key_value_heads": 3}, "n_heads 4 is not a multiple"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"eos_token_id": 97}, "eos_token_id 97 is outside the vocabulary of 97"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rms_norm_eps": "1e-5"}, "norm_eps"),
        ({"rms_norm_eps": -1.0}, "norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_what_is_not_supported_is_named(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(**changes)


def test_dense_weights_that_came_from_a_gguf() -> None:
    """transformers unpacks a GGUF, but its config goes on to name it."""
    assert of(quantization_config={"quant_method": "gguf", "gguf_file": "x.gguf"}) == of()


def test_attention_bias_is_llamas() -> None:
    assert of(attention_bias=True).qkv_bias
    assert of(attention_bias=True).output_bias
    for config in (of(), of(attention_bias=None), of(attention_bias=False)):
        assert (config.qkv_bias, config.output_bias) == (False, False)
    with pytest.raises(ValueError, match="attention_bias"):
        of(model_type="mistral", architectures=None, attention_bias=True)


def test_not_a_config() -> None:
    with pytest.raises(TypeError, match="int"):
        ModelConfig.of(3)


# ---- transformers as the oracle -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_frequencies_as_transformers_computes_them(kind: str, scaling: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    settings = {k: v for k, v in TINY.items() if k not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(kind, **settings, rope_scaling=scaling)
    model = transformers.AutoModelForCausalLM.from_config(config)
    reference = model.model.rotary_emb.inv_freq.double().numpy()
    np.testing.assert_allclose(ModelConfig.of(config).inv_freq, reference, rtol=3e-7)
    assert ModelConfig.of(config) == ModelConfig.of(config.to_dict())


# ---- GGUF ---------------------------------------------------------------------------------


def gguf_of(config: dict[str, Any], **changes: Any) -> ModelConfig:
    metadata = model_files.gguf_metadata(config)
    for key, value in changes.items():
        metadata["llama." + key.replace("__", ".")] = value
    return ModelConfig.from_gguf({k: v for k, v in metadata.items() if v is not None})


def test_gguf_says_the_same() -> None:
    config = gguf_of(TINY)
    expected = dataclasses.replace(
        ModelConfig.of(TINY), rope_interleaved=True, qkv_bias=None, output_bias=None
    )  # the tensors tell
    assert dataclasses.replace(config, norm_eps=expected.norm_eps) == expected
    qwen2 = TINY | {"model_type": "qwen2"}
    assert not gguf_of(qwen2).rope_interleaved
    assert gguf_of(qwen2).qkv_bias


def test_gguf_head_dim() -> None:
    wide = TINY | {"num_attention_heads": 6, "num_key_value_heads": 2}
    assert gguf_of(wide).head_dim == 16
    assert gguf_of(TINY, attention__key_length=None).head_dim == 16
    none = {"attention__key_length": None, "rope__dimension_count": None}
    assert gguf_of(TINY, **none).head_dim == 16
    none["attention__value_length"] = None
    with pytest.raises(ValueError, match="embedding_length 64 is not a multiple"):
        gguf_of(wide, **none)


def test_gguf_counts_for_each_layer() -> None:
    assert gguf_of(TINY, attention__head_count=np.full(4, 4, np.int32)).n_heads == 4
    with pytest.raises(ValueError, match="differs between layers"):
        gguf_of(TINY, attention__head_count=np.array([4, 4, 2, 4], np.int32))


def test_gguf_rope() -> None:
    plain = gguf_of(TINY).inv_freq
    halved = tuple(f / 2 for f in plain)
    assert gguf_of(TINY, rope__scaling__type="linear", rope__scaling__factor=2.0).inv_freq == halved
    assert gguf_of(TINY, rope__scale_linear=2.0).inv_freq == halved
    metadata = model_files.gguf_metadata(TINY)
    factors = [1.0] * 4 + [8.0] * 4
    scaled = ModelConfig.from_gguf(metadata, factors).inv_freq
    assert scaled == tuple(f / by for f, by in zip(plain, factors, strict=True))
    for wrong in ([1.0] * 7, [0.0] * 8, [float("nan")] * 8):
        with pytest.raises(ValueError, match="rope_freqs"):
            ModelConfig.from_gguf(metadata, wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope__scaling__type": "yarn"}, "yarn"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention__value_length": 32}, "value_length"),
        ({"rope__dimension_count": 8}, "dimension_count"),
        ({"attention__scale": 1.0}, "attention.scale"),
        ({"something_new": 1}, "something_new"),
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": "4"}, "llama.block_count must be an integer from 1"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention__head_count": 0}, "head_count"),
    ],
)
def test_gguf_refusals(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_of(TINY, **changes)


def test_gguf_architectures() -> None:
    with pytest.raises(ValueError, match="phi3"):
        ModelConfig.from_gguf(model_files.gguf_metadata(TINY) | {"general.architecture": "phi3"})
    with pytest.raises(ValueError, match="None"):
        ModelConfig.from_gguf({})


def test_gguf_end_tokens() -> None:
    """eos, eot, and control tokens that end a turn; a plain token of that spelling does not."""
    tokens = [f"t{i}" for i in range(97)]
    kinds = np.ones(97, np.int32)
    tokens[10], tokens[11], tokens[12] = "<|im_end|>", "<|endoftext|>", "<|eot_id|>"
    kinds[10] = kinds[11] = 3
    metadata = model_files.gguf_metadata(TINY) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eot_token_id": 7,
    }
    assert ModelConfig.from_gguf(metadata).eos == (2, 7, 10, 11)
    outside = r"^GGUF: tokenizer\.ggml\.eos_token_id 97 is outside the vocabulary of 97"
    with pytest.raises(ValueError, match=outside):
        ModelConfig.from_gguf(metadata | {"tokenizer.ggml.eos_token_id": 97})
