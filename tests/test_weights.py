"""Weights come in by name: in place where they fit, converted where not, refused by name.

The measure is always the logits of a contiguous float32 copy (equal to the bit: conversion is no
computation), and those are compared with the float64 reference once.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import producer as p
from support.model_files import TINY, Weights, random_weights
from support.reference import Reference

from rksc import _core
from rksc.model.config import ModelConfig

CONFIG: dict[str, Any] = {**TINY, "num_hidden_layers": 2}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
GATE = "model.layers.1.mlp.gate_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
QWEN2: dict[str, Any] = {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN2.pop("head_dim")


def session(weights: Any, config: dict[str, Any] = CONFIG, **options: Any) -> _core.Session:
    return _core.Session(weights, ModelConfig.of(config), kv_bytes=1 << 20, n_threads=1, **options)


def logits(weights: Any, config: dict[str, Any] = CONFIG, **options: Any) -> NDArray[np.float32]:
    return session(weights, config, **options)._prefill(TOKENS).logits


@pytest.fixture
def weights() -> Weights:
    return random_weights(CONFIG, seed=3)


@pytest.fixture(scope="module")
def expected() -> NDArray[np.float32]:
    return logits(random_weights(CONFIG, seed=3))


def test_matches_the_reference(weights: Weights, expected: NDArray[np.float32]) -> None:
    reference = Reference(weights, ModelConfig.of(CONFIG)).logits(TOKENS)
    assert np.abs(expected - reference).max() < 1e-4 * np.abs(reference).max()


# ---- layouts -----------------------------------------------------------------------------------


def fortran(w: NDArray[Any]) -> NDArray[Any]:
    return np.asfortranarray(w)


def every_other_column(w: NDArray[Any]) -> NDArray[Any]:
    room = np.full((w.shape[0], 2 * w.shape[1]), np.nan, w.dtype)
    room[:, ::2] = w
    return room[:, ::2]


def padded_rows(w: NDArray[Any]) -> NDArray[Any]:
    room = np.full((w.shape[0], w.shape[1] + 3), np.nan, w.dtype)
    room[:, : w.shape[1]] = w
    return room[:, : w.shape[1]]


def upside_down(w: NDArray[Any]) -> NDArray[Any]:
    return np.flip(np.flip(w, 0).copy(), 0)


def mirrored(w: NDArray[Any]) -> NDArray[Any]:
    return np.flip(np.flip(w, 1).copy(), 1)


def unaligned(w: NDArray[Any]) -> NDArray[Any]:
    room = np.zeros(w.nbytes + 1, np.uint8)
    room[1:] = np.frombuffer(w.tobytes(), np.uint8)
    return room[1:].view(w.dtype).reshape(w.shape)


def read_only(w: NDArray[Any]) -> NDArray[Any]:
    w = w.copy()
    w.flags.writeable = False
    return w


read_only_lends = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="this NumPy lends no read-only array"
)
LAYOUTS = [fortran, every_other_column, padded_rows, upside_down, mirrored, unaligned]


@pytest.mark.parametrize("layout", [*LAYOUTS, pytest.param(read_only, marks=read_only_lends)])
@pytest.mark.parametrize("name", [GATE, EMBEDDING])
def test_any_layout_gives_the_same_bits(
    weights: Weights, expected: NDArray[np.float32], layout: Callable[..., Any], name: str
) -> None:
    weights[name] = layout(weights[name])
    s = session(weights)
    assert s.copied_bytes == (0 if layout is read_only else weights[name].nbytes)
    assert np.array_equal(s._prefill(TOKENS).logits, expected)


@read_only_lends
def test_a_stride_of_zero_repeats_the_element(weights: Weights) -> None:
    name = "model.layers.0.input_layernorm.weight"
    weights[name] = np.full_like(weights[name], 0.75)
    expected = logits(weights)
    weights[name] = np.broadcast_to(np.float32(0.75), weights[name].shape)
    assert weights[name].strides == (0,)
    assert np.array_equal(logits(weights), expected)
    weights[GATE][:] = weights[GATE][:1]
    expected = logits(weights)
    weights[GATE] = np.broadcast_to(weights[GATE][0].copy(), weights[GATE].shape)
    assert np.array_equal(logits(weights), expected)


def test_strides_of_dimensions_of_one_mean_nothing(weights: Weights) -> None:
    config = {**CONFIG, "intermediate_size": 1}
    weights = random_weights(config, seed=5)
    expected = logits(weights, config)
    gate, down = GATE, "model.layers.1.mlp.down_proj.weight"
    assert weights[gate].shape == (1, 64)
    assert weights[down].shape == (64, 1)
    weights[gate] = p.Producer(weights[gate], strides=(999, 1))  # type: ignore[assignment]
    weights[down] = p.Producer(weights[down], strides=(1, 999))  # type: ignore[assignment]
    s = session(weights, config)
    assert s.copied_bytes == 0
    assert np.array_equal(s._prefill(TOKENS).logits, expected)


@read_only_lends
def test_memory_map_is_used_in_place(
    weights: Weights, expected: NDArray[np.float32], tmp_path: Any
) -> None:
    weights[GATE].tofile(tmp_path / "gate")
    weights[GATE] = np.memmap(tmp_path / "gate", np.float32, "r", shape=weights[GATE].shape)
    s = session(weights)
    assert s.copied_bytes == 0
    assert np.array_equal(s._prefill(TOKENS).logits, expected)


# ---- dtypes ------------------------------------------------------------------------------------


def test_float16_in_a_float32_session_is_exact(weights: Weights) -> None:
    halves = {name: w.astype(np.float16) for name, w in weights.items()}
    wide = {name: w.astype(np.float32) for name, w in halves.items()}
    s = session(halves)
    assert s.dtype == "float32"
    assert s.copied_bytes == sum(w.nbytes for w in wide.values())
    assert np.array_equal(s._prefill(TOKENS).logits, logits(wide))


def bf16_values(w: NDArray[np.float32]) -> NDArray[np.float32]:
    """w rounded to bfloat16, as float32."""
    bits = w.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_bfloat16_is_the_default_where_the_embedding_is(weights: Weights) -> None:
    rounded = {name: bf16_values(w) for name, w in weights.items()}
    lent = {name: p.bfloat16(w) for name, w in weights.items()}
    s = session(lent)
    assert s.dtype == "bfloat16"
    vectors = sum(w.size for w in weights.values() if w.ndim == 1)
    assert s.copied_bytes == 4 * vectors  # norms compute in float32, matrices in place
    narrow = s._prefill(TOKENS).logits
    assert np.array_equal(narrow, logits(rounded, dtype="bfloat16"))
    assert np.array_equal(logits(lent, dtype="float32"), logits(rounded))
    exact = Reference(rounded, ModelConfig.of(CONFIG)).logits(TOKENS)
    assert np.abs(narrow - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("layout", [fortran, every_other_column, upside_down])
def test_strided_bfloat16(weights: Weights, layout: Callable[..., Any]) -> None:
    expected = logits(weights, dtype="bfloat16")
    bits = (bf16_values(weights[GATE]).view(np.uint32) >> 16).astype(np.uint16)
    if layout is every_other_column:
        room = np.zeros((bits.shape[0], 2 * bits.shape[1]), np.uint16)
        room[:, ::2] = bits
        bits = room[:, ::2]
    else:
        bits = layout(bits)
    weights[GATE] = p.Producer(bits, code=p.BFLOAT)  # type: ignore[assignment]
    assert np.array_equal(logits(weights, dtype="bfloat16"), expected)


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (np.float64, {}),
        (np.int8, {}),
        (np.int32, {}),
        (np.uint16, {}),
        (np.bool_, {}),
        (np.complex64, {}),
        (np.uint8, {"code": p.FLOAT8_E4M3FN}),
        (np.float32, {"code": 3}),
        (np.float32, {"code": 200}),
        (np.float32, {"lanes": 2}),
        (np.float32, {"lanes": 0}),
        (np.float32, {"code": p.BFLOAT}),
    ],
)
def test_other_dtypes_are_refused_by_name(
    weights: Weights, dtype: Any, fields: dict[str, Any]
) -> None:
    lent = p.Producer(weights[GATE].astype(dtype), **fields)
    weights[GATE] = lent  # type: ignore[assignment]
    told = rf"{re.escape(GATE)} has dtype [a-z ]+\d+( in vectors)?; weights must be float32, bfloat"
    with pytest.raises(TypeError, match=told):
        session(weights)
    assert (lent.exports, lent.deleted) == (1, 1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "BF16", "F16"])
def test_tensors_of_files_are_dequantised(weights: Weights, kind: str) -> None:
    rng = np.random.default_rng(8)
    sizes = {"Q4_0": (32, 18), "Q8_0": (32, 34), "BF16": (1, 2), "F16": (1, 2)}
    elements, size = sizes[kind]
    raw = rng.integers(0, 256, weights[GATE].size // elements * size, np.uint8)
    if size > 2:
        raw.reshape(-1, size)[:, :2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    else:
        raw = np.ascontiguousarray(weights[GATE].astype(np.float16)).view(np.uint8).reshape(-1)
    tensor = _core.Tensor(raw.tobytes(), kind, weights[GATE].shape)
    values = tensor.numpy()
    weights[GATE] = tensor  # type: ignore[assignment]
    got = logits(weights)
    weights[GATE] = values
    assert np.isfinite(got).all()
    assert np.array_equal(got, logits(weights))


# ---- names -------------------------------------------------------------------------------------


def test_names_of_a_bare_model(weights: Weights) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    del weights["lm_head.weight"]
    bare = {name.removeprefix("model."): w for name, w in weights.items()}
    assert np.array_equal(logits(bare, config), logits(weights, config))


def test_missing_tensor(weights: Weights) -> None:
    shape = weights.pop(GATE).shape
    with pytest.raises(ValueError, match=re.escape(f"{GATE} is missing, expected shape {shape}")):
        session(weights)


def test_wrong_shape_names_both(weights: Weights) -> None:
    weights[GATE] = weights[GATE].T.copy()
    with pytest.raises(ValueError, match=r"gate_proj.*\(64, 128\).*\(128, 64\)"):
        session(weights)
    weights[GATE] = weights[GATE].reshape(-1)
    with pytest.raises(ValueError, match=r"gate_proj.*\(8192,\).*\(128, 64\)"):
        session(weights)
    weights[GATE] = np.zeros((0, 64), np.float32)
    with pytest.raises(ValueError, match=r"gate_proj.*\(0, 64\).*\(128, 64\)"):
        session(weights)


@pytest.mark.parametrize("name", ["extra", "model.layers.2.mlp.up_proj.weight", GATE[:-6] + "bias"])
def test_what_nobody_uses_is_refused(weights: Weights, name: str) -> None:
    weights[name] = np.zeros(0, np.float32)
    with pytest.raises(ValueError, match=re.escape(name)):
        session(weights)


def test_the_same_tensor_under_both_names_is_refused(weights: Weights) -> None:
    weights[GATE.removeprefix("model.")] = weights[GATE]
    with pytest.raises(ValueError, match="has no place"):
        session(weights)


def test_buffers_of_old_checkpoints_are_no_weights(
    weights: Weights, expected: NDArray[np.float32]
) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    weights["model.rotary_emb.inv_freq"] = None  # type: ignore[assignment]  # never looked at
    assert np.array_equal(logits(weights), expected)


def test_heads(weights: Weights) -> None:
    """Tied: the embedding, unless another head is there (as transformers does)."""
    tied = {**CONFIG, "tie_word_embeddings": True}
    untied = logits(weights)
    assert np.array_equal(logits(weights, tied), untied)
    weights["lm_head.weight"] = weights[EMBEDDING]
    shared = logits(weights, tied)
    weights["lm_head.weight"] = weights[EMBEDDING].copy()
    assert np.array_equal(logits(weights, tied), shared)
    assert not np.array_equal(shared, untied)
    del weights["lm_head.weight"]
    assert np.array_equal(logits(weights, tied), shared)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing.*shape \(97, 64\)"):
        session(weights)


def test_a_head_in_the_same_memory_is_copied_once(weights: Weights) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    weights[EMBEDDING] = weights["lm_head.weight"] = fortran(weights[EMBEDDING])
    assert session(weights, tied).copied_bytes == weights[EMBEDDING].nbytes


def test_biases(weights: Weights) -> None:
    qwen2 = random_weights(QWEN2, seed=6)
    reference = Reference(qwen2, ModelConfig.of(QWEN2)).logits(TOKENS)
    got = logits(qwen2, QWEN2)
    assert np.abs(got - reference).max() < 1e-4 * np.abs(reference).max()
    name = "model.layers.1.self_attn.k_proj.bias"
    del qwen2[name]
    with pytest.raises(ValueError, match=re.escape(name)):
        session(qwen2, QWEN2)
    for key in [key for key in qwen2 if key.endswith(".bias")]:
        del qwen2[key]
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        session(qwen2, QWEN2)  # a Qwen2 without them would compute something else


def test_biases_are_as_attention_bias_says(weights: Weights) -> None:
    """Absent is false; a ModelConfig may leave it to the weights."""
    biased = {**CONFIG, "attention_bias": True}
    with pytest.raises(ValueError, match=r"tensor .*layers\.0\.self_attn\.q_proj\.bias is missing"):
        session(weights, biased)
    as_held: Any = replace(ModelConfig.of(CONFIG), qkv_bias=None, output_bias=None)
    names = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in (1, 0)]
    weights[names[0]] = np.zeros(CONFIG["hidden_size"], np.float32)
    told = "tensor {} has no place in this model (attention_bias is false)"
    for config in (CONFIG, as_held):  # the second: of some layers alone
        with pytest.raises(ValueError, match=re.escape(told.format(names[0]))):
            session(weights, config)
    weights[names[1]] = weights[names[0]]
    assert session(weights, as_held).config is as_held
    with pytest.raises(ValueError, match=re.escape(told.format(names[1]))):
        session(weights, CONFIG)


def test_more_layers_than_tensors_cost_nothing(weights: Weights) -> None:
    told = r"^21 tensors cannot be 1000000000 layers \(num_hidden_layers\)$"
    with pytest.raises(ValueError, match=told):
        session(weights, {**CONFIG, "num_hidden_layers": 10**9})


@pytest.mark.parametrize("mapping", [None, 5, [("a", 1)], "weights", object()])
def test_not_a_mapping(mapping: Any) -> None:
    with pytest.raises(TypeError, match="weights"):
        session(mapping)


def test_names_must_be_strings(weights: Weights) -> None:
    weights[5] = weights[GATE]  # type: ignore[index]
    with pytest.raises(TypeError, match="name"):
        session(weights)


# ---- producers ---------------------------------------------------------------------------------


def test_old_producers_are_asked_again_without_the_keyword(
    weights: Weights, expected: NDArray[np.float32]
) -> None:
    lent = p.legacy(weights[GATE])
    weights[GATE] = lent  # type: ignore[assignment]
    assert np.array_equal(logits(weights), expected)
    assert lent.asked == [{}]
    gc.collect()
    assert (lent.exports, lent.deleted) == (1, 1)


@pytest.mark.parametrize("version", [(1, 0), (1, 99), None])
@pytest.mark.parametrize("strides", ["own", None])
def test_capsules_of_any_understood_version(
    weights: Weights, expected: NDArray[np.float32], version: Any, strides: Any
) -> None:
    room = np.concatenate([np.full(5, np.nan, np.float32), weights[GATE].reshape(-1)])
    lent = p.Producer(
        room,
        shape=weights[GATE].shape,
        strides=None if strides is None else (64, 1),
        byte_offset=20,
        version=version,
        flags=p.READ_ONLY,
    )
    weights[GATE] = lent  # type: ignore[assignment]
    s = session(weights)
    assert s.copied_bytes == 0
    assert np.array_equal(s._prefill(TOKENS).logits, expected)
    assert lent.alive == 1  # lent as long as the session lives
    assert lent.asked[0]["max_version"][0] == 1
    del s
    gc.collect()
    assert (lent.exports, lent.deleted) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"version": (2, 0)}, BufferError),
        ({"device": (p.CUDA, 1)}, BufferError),
        ({"device": (8, 0)}, BufferError),
        ({"data": 0}, BufferError),
        ({"shape": (-1, 64)}, BufferError),
        ({"ndim": -1}, BufferError),
        ({"shape": (1,) * 9}, ValueError),
        ({"error": RuntimeError("no")}, BufferError),
        ({"error": BufferError("no")}, BufferError),
        ({"error": TypeError("no")}, BufferError),
        ({"error": MemoryError("no")}, MemoryError),
    ],
)
def test_what_a_producer_can_do_wrong(
    weights: Weights, fields: dict[str, Any], error: type[Exception]
) -> None:
    lent = p.Producer(weights[GATE], **fields)
    weights[GATE] = lent  # type: ignore[assignment]
    with pytest.raises(error, match="no" if error is MemoryError else re.escape(GATE)):
        session(weights)
    gc.collect()
    assert lent.exports == lent.deleted == (0 if "error" in fields else 1)


def test_the_cuda_error_says_where_the_tensor_is(weights: Weights) -> None:
    weights[GATE] = p.Producer(weights[GATE], device=(p.CUDA, 1))  # type: ignore[assignment]
    with pytest.raises(BufferError, match=r"gate_proj.*CUDA.*2:1.*cpu"):
        session(weights)


class Raises:
    def __init__(self, error: BaseException | None, answer: Any = None, grad: bool = False) -> None:
        self.error, self.answer, self.requires_grad = error, answer, grad

    def __dlpack__(self, **_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer


def test_a_producer_that_raises_is_the_cause(weights: Weights) -> None:
    weights[GATE] = Raises(LookupError("lost it"))  # type: ignore[assignment]
    with pytest.raises(BufferError, match=r"gate_proj.*lost it") as info:
        session(weights)
    assert isinstance(info.value.__cause__, LookupError)
    weights[GATE] = Raises(KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        session(weights)


@pytest.mark.parametrize("answer", [None, 5, "capsule"])
def test_a_producer_that_gives_no_capsule(weights: Weights, answer: Any) -> None:
    weights[GATE] = Raises(None, answer)  # type: ignore[assignment]
    with pytest.raises(BufferError, match=r"gate_proj.*capsule"):
        session(weights)


def test_a_capsule_can_be_used_once(weights: Weights) -> None:
    lent = p.Producer(weights[GATE])
    capsule = lent.__dlpack__(max_version=(1, 0))
    weights[GATE] = Raises(None, capsule)  # type: ignore[assignment]
    first = session(weights)
    with pytest.raises(BufferError, match="unused"):
        session(weights)
    assert lent.alive == 1
    del first
    gc.collect()
    assert (lent.exports, lent.deleted) == (1, 1)


@pytest.mark.parametrize("thing", [None, [[1.0]], object()])
def test_not_a_tensor(weights: Weights, thing: Any) -> None:
    weights[GATE] = thing
    with pytest.raises(TypeError, match=r"gate_proj.*__dlpack__"):
        session(weights)


def test_a_failure_gives_everything_back(weights: Weights) -> None:
    lent = {name: p.Producer(w) for name, w in weights.items()}
    lent["surplus"] = p.Producer(weights[GATE])
    with pytest.raises(ValueError, match="surplus"):
        session(lent)
    gc.collect()
    assert lent.pop("surplus").exports == 0
    assert {x.exports for x in lent.values()} == {x.deleted for x in lent.values()} == {1}


def test_parameters_that_need_gradients(weights: Weights) -> None:
    weights[GATE] = Raises(BufferError("needs grad"), grad=True)  # type: ignore[assignment]
    with pytest.raises(BufferError, match=re.escape(f"{GATE}.detach()")):
        session(weights)


# ---- life --------------------------------------------------------------------------------------


def test_the_session_keeps_what_it_borrowed(weights: Weights) -> None:
    s = session(weights)
    expected = s._prefill(TOKENS).logits
    arrays = [weakref.ref(w) for w in weights.values()]
    weights.clear()
    gc.collect()
    assert all(ref() is not None for ref in arrays)
    noise = [np.full(1 << 16, np.nan, np.float32) for _ in range(50)]
    s.invalidate()
    assert np.array_equal(s._prefill(TOKENS).logits, expected)
    del s, noise
    gc.collect()
    assert all(ref() is None for ref in arrays)


def test_weights_trained_in_place(weights: Weights) -> None:
    lent: dict[str, Any] = {**weights, EMBEDDING: fortran(weights[EMBEDDING])}
    s = session(lent)
    branch = s._prefill(TOKENS)
    before = branch.logits
    for name in (GATE, EMBEDDING):  # one in place, one a copy
        lent[name] *= 1.5
    s.invalidate()
    assert branch.n_computed == 0
    after = branch.logits
    assert not np.array_equal(before, after)
    assert np.array_equal(after, logits({n: np.ascontiguousarray(w) for n, w in lent.items()}))
    s.check()


# ---- libraries ---------------------------------------------------------------------------------


def test_torch(weights: Weights, expected: NDArray[np.float32]) -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(w.copy()) for name, w in weights.items()}
    s = session(tensors)
    assert s.copied_bytes == 0
    assert np.array_equal(s._prefill(TOKENS).logits, expected)
    turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in tensors.items()}
    assert np.array_equal(logits(turned), expected)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {name: t.to(dtype) for name, t in tensors.items()}
        wide = {name: t.to(torch.float32).numpy() for name, t in narrow.items()}
        assert np.array_equal(logits(narrow, dtype="float32"), logits(wide))
    tensors[GATE] = torch.nn.Parameter(tensors[GATE])
    with pytest.raises(BufferError, match=re.escape(f"{GATE}.detach()")):
        session(tensors)
    tensors[GATE] = tensors[GATE].detach().to("meta")
    with pytest.raises(BufferError, match=re.escape(GATE)):
        session(tensors)
    tensors[GATE] = torch.zeros(weights[GATE].shape, dtype=torch.float64)
    with pytest.raises(TypeError, match=rf"{re.escape(GATE)} has dtype float64; weights must be"):
        session(tensors)


def test_jax(weights: Weights, expected: NDArray[np.float32]) -> None:
    jnp = pytest.importorskip("jax.numpy")
    arrays = {name: jnp.asarray(w) for name, w in weights.items()}
    assert np.array_equal(logits(arrays), expected)


# ---- arguments of the session ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device": "gpu"}, ValueError, "gpu"),
        ({"dtype": "float16"}, ValueError, "float16"),
        ({"isa": "mmx"}, ValueError, "mmx"),
        ({"isa": 3}, TypeError, "isa"),
        ({"kv_bytes": 0}, ValueError, "kv_bytes"),
        ({"kv_bytes": -5}, ValueError, "kv_bytes"),
        ({"kv_bytes": 2**70}, ValueError, "kv_bytes"),
        ({"kv_bytes": 100}, ValueError, "kv_bytes"),
        ({"kv_bytes": 1e6}, TypeError, "kv_bytes"),
        ({"block_tokens": 0}, ValueError, "block_tokens"),
        ({"block_tokens": 3}, ValueError, "block_tokens"),
        ({"block_tokens": 512}, ValueError, "block_tokens"),
        ({"n_threads": 0}, ValueError, "n_threads"),
        ({"n_threads": 2**31}, ValueError, "n_threads"),
        ({"step_tokens": 0}, ValueError, "step_tokens"),
        ({"hash_bits": 65}, ValueError, "hash_bits"),
        ({"token_bytes": ["text"]}, TypeError, r"token_bytes\[0\]"),
        ({"token_bytes": 5}, TypeError, "iterable"),
        ({"token_bytes": [b"a"], "special_ids": [97]}, ValueError, "special_ids"),
        ({"token_bytes": [b"a"], "special_ids": [-1]}, ValueError, "special_ids"),
        ({"token_bytes": [b"a"], "special_ids": ["a"]}, TypeError, "special_ids"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_bad_options(
    weights: Weights, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    options = {"kv_bytes": 1 << 20, **options}
    with pytest.raises(error, match=match):
        _core.Session(weights, ModelConfig.of(CONFIG), **options)


@pytest.mark.parametrize("isa", _core.isas)
def test_every_instruction_set(weights: Weights, isa: str) -> None:
    s = session(weights, isa=isa)
    assert (s.isa, s.device, s.n_threads, s.block_tokens) == (isa, "cpu", 1, 16)
    reference = Reference(weights, ModelConfig.of(CONFIG)).logits(TOKENS)
    got = s._prefill(TOKENS).logits
    assert np.abs(got - reference).max() < 1e-4 * np.abs(reference).max()
