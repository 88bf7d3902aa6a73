"""Crafted files: a quick ValueError that names file and field, whatever a stranger put there."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_files
from support.letters import Letters
from support.model_files import TINY, gguf_bytes
from test_gguf import info, key, one, raw_gguf

from rksc import BranchSession, load
from rksc.formats.fields import Fields
from rksc.formats.files import plain, read_bytes, read_json, reading, shown, what_is
from rksc.model.config import ModelConfig
from rksc.model.names import check_wrapped
from rksc.model.rope import rope_frequencies

MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
HUGE = 10**400


@pytest.fixture(scope="module")
def weights() -> model_files.Weights:
    return model_files.random_weights(TINY)


@pytest.fixture
def folder(tmp_path: Path, weights: model_files.Weights) -> Path:
    model_files.write_hf(tmp_path / "m", weights, TINY)
    return tmp_path / "m"


def configured(folder: Path, changes: dict[str, Any]) -> Path:
    kept = {k: v for k, v in (TINY | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def refused(path: Path, *named: str, file: str = "") -> str:
    """The text of the ValueError that loading ends in: it names the file and all these."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        load(path, tokenizer=False)
    text = str(caught.value)
    assert text.startswith(str(path / file if file else path)), text
    for name in named:
        assert name in text, text
    assert len(text) < 700
    assert text.isprintable()
    return text


# ---- what it costs ------------------------------------------------------------------------

_COSTS = """
import json, pathlib, resource, sys, time
from rksc import load
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024
told = []
for path in sys.argv[1:]:
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before, began = status("VmRSS"), time.process_time()
    try:
        load(path, tokenizer=False)
        error = "loaded"
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    told.append((error, time.process_time() - began, status("VmHWM") - before))
print(json.dumps(told))
"""


def assert_quick(paths: dict[str, Path]) -> None:
    """Each is a ValueError that names what its key says, within 0.5 s and 64 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _COSTS, *map(str, paths.values())],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    for (named, path), (error, seconds, mib) in zip(
        paths.items(), json.loads(done.stdout), strict=True
    ):
        assert error.startswith(f"ValueError: {path}"), (named, error)
        assert named.split("#")[0] in error, (named, error)
        assert seconds < 0.5, (named, seconds)
        assert mib < 64, (named, mib)


def test_sizes_are_judged_before_anything_is_made_of_them(
    tmp_path: Path, weights: model_files.Weights
) -> None:
    """From a few hundred bytes of config.json, and of keys."""
    wide = {"hidden_size": 2**31 - 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    changes: dict[str, dict[str, Any]] = {
        "head_dim": {"head_dim": 20_000_000},
        "head_dim#2": {"head_dim": 2_000_000_000},
        "head_dim#3": {"head_dim": 2**31 - 2, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "head_dim#derived": {**wide, "head_dim": None},
        "2147483647 layers": {"num_hidden_layers": 2**31 - 1},
        "embed_tokens.weight has shape": {"vocab_size": 2**31 - 1},
        "mlp.gate_proj.weight has shape": {"intermediate_size": 2**31 - 1},
        "n_heads 2147483646 times head_dim": {"num_attention_heads": 2**31 - 2},
        "max_position_embeddings": {"max_position_embeddings": 2**31},
        "layer_types": {"layer_types": ["full_attention"] * 200_000},
    }
    paths = {}
    for i, (named, change) in enumerate(changes.items()):
        model_files.write_hf(tmp_path / f"{i}", weights, TINY)
        paths[named] = configured(tmp_path / f"{i}", change)
    lengths = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    keys: dict[str, dict[str, Any]] = {
        "head_dim#gguf": dict.fromkeys(lengths, 20_000_000),
        "head_dim#gguf 2": dict.fromkeys(lengths, 2_000_000_000),
        "llama.attention.value_length": {"attention.key_length": 2_000_000_000},
        "2147483647 layers#gguf": {"block_count": 2**31 - 1},
        "llama.attention.head_count ": {"attention.head_count": np.arange(250_000)},
        "token_embd.weight has shape": {"vocab_size": 2**31 - 1},
        "llama.context_length": {"context_length": 2**32 - 1},
    }
    for i, (named, change) in enumerate(keys.items()):
        metadata = {
            f"llama.{k}": v.astype(np.int32) if isinstance(v, np.ndarray) else v
            for k, v in change.items()
        }
        path = tmp_path / f"{i}.gguf"
        model_files.write_gguf(path, weights, TINY, metadata=metadata)
        paths[named] = path
    assert_quick(paths)


def test_big_files_of_nothing_are_refused_unread(folder: Path, tmp_path: Path) -> None:
    """Sparse ones, which cost their maker nothing."""
    paths = {}
    for i, name in enumerate(("config.json", "generation_config.json", "model.safetensors")):
        copy = tmp_path / f"{i}"
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        with open(copy / name, "wb") as file:
            file.truncate(20 << 30)
        paths["/" + name] = copy
    with open(tmp_path / "x.gguf", "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 2**34, 1))
        file.truncate(20 << 30)
    paths["count of 17179869184"] = tmp_path / "x.gguf"
    assert_quick(paths)


def test_a_split_of_99999_shards_costs_nothing(
    tmp_path: Path, weights: model_files.Weights
) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    split = {"split.no": 0, "split.count": 99999}
    path.write_bytes(gguf_bytes(model_files.gguf_metadata(TINY) | split, {}))
    os.link(path, tmp_path / "m-00002-of-99999.gguf")
    with pytest.raises(ValueError, match=r"m-00002-of-99999\.gguf: split\.no is 0, expected 1"):
        load(path)
    (tmp_path / "m-00002-of-99999.gguf").unlink()
    with pytest.raises(
        ValueError, match=r"m-00002-of-99999\.gguf: this shard is missing; the model has 99999"
    ):
        load(path)


# ---- every field of config.json -----------------------------------------------------------

NO_SIZE = (True, 0, -1, 1.5, "4", [4], {"a": 4}, 2**31, 2**64, HUGE, float("nan"), float("inf"))
NO_NUMBER = (True, "1", [1], {}, -1.0, HUGE, float("nan"), float("inf"), float("-inf"))
NO_TOKEN = (True, [True], 1.0, "1", [[1]], {"id": 1}, -1, 97, 2**40, HUGE, [1, float("nan")])
FIELDS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "vocab_size": (NO_SIZE, {}),
    "hidden_size": (NO_SIZE, {}),
    "intermediate_size": (NO_SIZE, {}),
    "num_hidden_layers": (NO_SIZE, {}),
    "num_attention_heads": (NO_SIZE, {}),
    "num_key_value_heads": (NO_SIZE, {}),
    "head_dim": ((*NO_SIZE, 15, 65538), {}),
    "max_position_embeddings": (NO_SIZE, {}),
    "sliding_window": ([v for v in NO_SIZE if v != 0 or v is False], MISTRAL),
    "max_window_layers": ([v for v in NO_SIZE if v != 0 or v is False], QWEN2),
    "use_sliding_window": ((1, "true", [], {}), QWEN2),
    "rms_norm_eps": ((*NO_NUMBER, 2.0), {}),
    "rope_theta": ((*NO_NUMBER, 0), {}),
    "tie_word_embeddings": ((1, 0.0, "false", [], {}), {}),
    "attention_bias": ((1, "no", [False]), {}),
    "architectures": (("LlamaForCausalLM", [1], [[]], {"a": 1}, ["x"] * 1000), {}),
    "model_type": ((1, True, ["llama"], {"a": 1}, "gpt9", "x" * 100_000), {}),
    "hidden_act": ((None, 1, ["silu"], "relu"), {}),
    "layer_types": (({}, "full_attention", [1, 2, 3, 4], ["full_attention"], [[]] * 4), {}),
    "rope_scaling": ((1, "linear", [1], {"type": 5}, {"type": "linear", "factor": HUGE}), {}),
    "quantization_config": ((1, [], {"quant_method": ["gguf"]}, "x" * 100_000), {}),
    "num_local_experts": ((8, "8", [], {}, HUGE), {}),
    "bos": (NO_TOKEN, {}),
    "eos": (NO_TOKEN, {}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_config_json(folder: Path, field: str) -> None:
    values, others = FIELDS[field]
    for value in values:
        name = f"{field}_token_id" if field in ("bos", "eos") else field
        changed = TINY | others | {name: value}
        (folder / "config.json").write_text(json.dumps(changed))
        refused(folder, field, file="config.json")


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_numbers_of_rope_scaling(folder: Path, key: str) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for value in (*NO_NUMBER, 0, None):
        refused(configured(folder, {"rope_scaling": llama3 | {key: value}}), key, "rope_scaling")
    refused(configured(folder, {"rope_scaling": llama3 | {"factor": 5e-324}}), "rope_scaling")
    with pytest.raises(ValueError, match="rope_theta: OverflowError"):
        rope_frequencies(512, 5e-324, {}, 512)


def test_end_tokens_of_generation_config(folder: Path) -> None:
    for value in NO_TOKEN:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        refused(folder, "eos", file="generation_config.json")


# ---- every key of a GGUF ------------------------------------------------------------------

NO_KEY_SIZE = (
    *(True, 0, -1, 2**31, 2**63 - 1, 1.5, float("inf"), "4", ["4"], ["4", "4"], []),
    *(np.array([np.inf], np.float32), np.array([4.0], np.float32), np.array([4, 5], np.int32)),
    np.array([0, 0], np.int32),
)
NO_KEY_NUMBER = (True, -1.0, float("nan"), float("inf"), "1", ["1"], np.array([1.0], np.float32))
KEYS: dict[str, tuple[Any, ...]] = {
    "llama.vocab_size": NO_KEY_SIZE,
    "llama.context_length": NO_KEY_SIZE,
    "llama.embedding_length": NO_KEY_SIZE,
    "llama.block_count": NO_KEY_SIZE,
    "llama.feed_forward_length": NO_KEY_SIZE,
    "llama.attention.head_count": NO_KEY_SIZE,
    "llama.attention.head_count_kv": NO_KEY_SIZE,
    "llama.attention.key_length": NO_KEY_SIZE,
    "llama.attention.value_length": NO_KEY_SIZE,
    "llama.rope.dimension_count": NO_KEY_SIZE,
    "llama.attention.sliding_window": (True, -1, "4", 1.5, [], np.array([1, 2], np.int32)),
    "llama.attention.layer_norm_rms_epsilon": (*NO_KEY_NUMBER, 2.0),
    "llama.attention.scale": (*NO_KEY_NUMBER, 1.0),
    "llama.rope.freq_base": (*NO_KEY_NUMBER, 0.0),
    "llama.rope.scaling.factor": NO_KEY_NUMBER,
    "llama.rope.scaling.type": (1, True, 0.5, ["linear"], "yarn", np.array([1], np.int32)),
    "llama.expert_count": (1, "0", [], np.array([0, 0], np.int32)),
    "llama.something_new": (0, "x" * 100_000, np.zeros(100_000, np.int32)),
    "general.architecture": (1, True, ["llama"], np.array([1], np.int32), "l" * 100_000),
    "general.alignment": (0, 1, 3, 2**31, 2**40, -32, True, 32.0, [], np.array([32], np.int32)),
    "split.count": (True, -1, 2**40, "1", 1.5, ["1"], np.array([1], np.int32)),
    "split.tensors.count": (True, 1, -1, "39", [], np.array([39], np.int32)),
    "tokenizer.ggml.tokens": (1, "abc", np.zeros(97, np.int32)),
    "tokenizer.ggml.token_type": (5, "a", [], ["1"] * 97, np.ones(96, np.int32), np.ones(97, "f4")),
    "tokenizer.ggml.eos_token_id": (True, "2", 1.0, ["2"], np.array([2], np.int32)),
    "tokenizer.ggml.eot_token_id": (True, "2", 1.0),
    "tokenizer.ggml.bos_token_id": (True, "1", 1.0, ["1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_a_gguf(tmp_path: Path, name: str, weights: model_files.Weights) -> None:
    tensors = {n: (0, w.shape, w.tobytes()) for n, w in weights.items()}
    tensors = {model_files.gguf_name(n): t for n, t in tensors.items()}
    plain_keys = model_files.gguf_metadata(TINY)
    if name.startswith("tokenizer.ggml.token_type"):
        plain_keys["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(97)]
    for i, value in enumerate(KEYS[name]):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(gguf_bytes(plain_keys | {name: value}, tensors))
        # A size that is a number may be named by what it disagrees with.
        named = "" if type(value) is int and name.startswith("llama.") else name
        refused(path, named)


@pytest.mark.parametrize("value", [[[1], [1, 2]], [1, 10**400], [1, None], [], (), "ab", b"ab"])
def test_lists_of_integers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^k\b"):
        Fields({"k": value}).integers("k")
    assert Fields({"k": [1, 2]}).integers("k").tolist() == [1, 2]


@pytest.mark.parametrize("token", ["eos", "eot", "eom", "bos"])
@pytest.mark.parametrize("value", [97, 2**31, 2**32 - 1, -1])
def test_ids_beyond_the_vocabulary(
    tmp_path: Path, weights: model_files.Weights, token: str, value: int
) -> None:
    metadata = {f"tokenizer.ggml.{token}_token_id": value}
    model_files.write_gguf(tmp_path / "x.gguf", weights, TINY, metadata=metadata)
    refused(tmp_path / "x.gguf", str(value), "outside the vocabulary of 97")


def test_rope_factors_are_as_many_as_frequencies(
    tmp_path: Path, weights: model_files.Weights
) -> None:
    """A whole tensor of them is not made a list of numbers first."""
    for values in (np.ones(7), np.zeros(8), np.full(8, np.nan), np.full(8, -1.0), np.ones(1 << 18)):
        metadata = model_files.gguf_metadata(TINY)
        stored = {"rope_freqs.weight": (0, values.shape, values.astype(np.float32).tobytes())}
        (tmp_path / "x.gguf").write_bytes(gguf_bytes(metadata, stored))
        refused(tmp_path / "x.gguf", "rope_freqs.weight")


# ---- GGUF headers of public reports -------------------------------------------------------

_TEXT = struct.pack("<Q", 1) + b"a"
HEADERS = {
    "73 bytes: a dimension of 0 behind another": (one((4, 0, 0, 0), 0, 0), "dimension of 0"),
    "a shape that wraps to 1": (one((2**64 - 1, 2**64 - 1), 0, 0), "tensor t"),
    "a shape that wraps to 1 in blocks": (one((2**64 - 32, 2), 8, 0), "tensor t"),
    "2^42 + 1 rows": (one((1152, 2**42 + 1), 8, 0), "tensor t"),
    "a million dimensions": (one((1,), 0, 0, n_dims=10**6), "1000000 dimensions"),
    "a negative type": (one((4,), 2**32 - 1, 0), "tensor type 4294967295"),
    "57 bytes: alignment 0": (
        raw_gguf(key("general.alignment", 4, struct.pack("<I", 0)), 1), "general.alignment 0"
    ),
    "alignment 0x80000000": (
        raw_gguf(key("general.alignment", 4, struct.pack("<I", 2**31)), 1), "general.alignment"
    ),
    "alignment of 8 bytes": (
        raw_gguf(key("general.alignment", 10, struct.pack("<Q", 2**63)), 1), "general.alignment"
    ),
    "a string of 1 GiB": (raw_gguf(key("k", 8, struct.pack("<Q", 2**30)), 1), "key k"),
    "a name of 2^64 - 1": (raw_gguf(struct.pack("<Q", 2**64 - 1) + b"a" * 64, 1), "past the end"),
    "arrays in arrays in arrays": (
        raw_gguf(key("k", 9, struct.pack("<IQ", 9, 1) * 5000), 1), "key k: unknown array type 9"
    ),
    "an array of 2^64 - 1 bytes": (
        raw_gguf(key("k", 9, struct.pack("<IQ", 0, 2**64 - 1)), 1), "key k: a count"
    ),
    "an array of a type that is none": (
        raw_gguf(key("k", 9, struct.pack("<IQ", 77, 1)), 1), "key k: unknown array type 77"
    ),
    "an array whose strings end late": (
        raw_gguf(key("k", 9, struct.pack("<IQ", 8, 2) + _TEXT + struct.pack("<Q", 2**62)), 1),
        "key k: strings reach past the end",
    ),
    "half a surrogate pair": (
        raw_gguf(key("k", 8, struct.pack("<Q", 3) + b"\xed\xa0\x80"), 1), "key k: .*not UTF-8"
    ),
    "a name that steers the terminal": (
        raw_gguf(tensors=info("\x1b[2J", (0,), 0, 0), n_tensors=1), r"tensor \\x1b\[2J"
    ),
    "a name of 100 kB": (
        raw_gguf(tensors=info("n" * 100_000, (0,), 0, 0), n_tensors=1), "dimension of 0"
    ),
    "as many tensors as bytes": (raw_gguf(n_tensors=24), "a count of 24 cannot fit"),
    "data that begin in the header": (one((4,), 0, 2**64 - 32), "tensor t"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_public_reports(tmp_path: Path, name: str) -> None:
    data, message = HEADERS[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    text = refused(tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "bad.gguf")
    assert "bad.gguf" in text


# ---- JSON ---------------------------------------------------------------------------------

TEXTS = {
    "deep lists": (b'{"a": ' + b"[" * 200_000, "nested too deep"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
    "not UTF-8": (b'{"a": "\xff"}', "malformed JSON: 'utf-8'"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "malformed JSON"),
    "half a surrogate pair": (b'{"a": "\\ud800"}', "lone surrogate"),
    "half of one as a name": (b'{"\\uDFFF": 1}', "lone surrogate"),
    "no object": (b"[1]", "not a JSON object"),
    "a number": (b"1", "not a JSON object"),
    "empty": (b"", "malformed JSON"),
    "text behind": (b"{} {}", "malformed JSON"),
    "a GGUF": (b"GGUF\3\0\0\0", "malformed JSON"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "index"])
@pytest.mark.parametrize("name", TEXTS)
def test_json_that_is_none(folder: Path, file: str, name: str) -> None:
    if file == "index":
        file = "model.safetensors.index.json"
        (folder / "model.safetensors").unlink()
    data, message = TEXTS[name]
    (folder / file).write_bytes(data)
    refused(folder, message, file=file)


def test_json_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "' + b"x" * 200 + b'"}')
    assert len(read_json(tmp_path / "x.json")["a"]) == 200
    with pytest.raises(ValueError, match=r"x\.json: more than 0 MiB"):
        read_bytes(tmp_path / "x.json", 100)


def test_whole_surrogate_pairs_and_long_numbers_are_fine(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": "\\ud83d\\ude00", "b": 1' + "0" * 30 + ', "b": 7}')
    assert read_json(tmp_path / "x.json") == {"a": "\U0001f600", "b": 7}
    with pytest.raises(ValueError, match="31 digits"):
        read_json(tmp_path / "x.json", strict=True)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "b" * 1000}, "tensor a: 'bbb"),
        ({"a": "\u65e5" * 90}, "not a file in this folder"),
        ({"a": "model-00001-of-00002.safetensors/"}, "not a file in this folder"),
        ({"a": "."}, "not a file in this folder"),
        ({"a": "sub/x.safetensors"}, "not a file in this folder"),
        ({"a": ["x"]}, "not a file in this folder"),
        ({"a": None}, "not a file in this folder"),
        ({"a": True}, "not a file in this folder"),
        ([], "weight_map must map"),
        ({}, "weight_map must map"),
        ("x", "weight_map must map"),
        (None, "weight_map must map"),
    ],
)
def test_maps_of_an_index(folder: Path, where: Any, message: str) -> None:
    (folder / "model.safetensors").unlink()
    index = "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"weight_map": where}))
    refused(folder, message, file=index)
    (folder / index).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    refused(folder, "a appears twice", file=index)


# ---- what is no regular file, and what is another one -------------------------------------

ODD: dict[str, Callable[[Path], Any]] = {
    "folder": lambda path: path.mkdir(),
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.touch(),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_files_in_a_folder(folder: Path, file: str, kind: str) -> None:
    (folder / file).unlink(missing_ok=True)
    ODD[kind](folder / file)
    if kind == "loop" and file == "generation_config.json":  # as if it were not there
        assert load(folder, tokenizer=False).config.eos == (2,)
        return
    named = {"folder": "Is a directory", "FIFO": "not a regular", "device": "not a regular"}
    refused(folder, named.get(kind, ""))


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_instead_of_a_gguf(tmp_path: Path, kind: str) -> None:
    ODD[kind](tmp_path / "x.gguf")
    refused(tmp_path / "x.gguf", "not a regular" if kind in ("FIFO", "device") else "")


def test_a_gguf_is_known_by_its_first_bytes(tmp_path: Path, weights: model_files.Weights) -> None:
    """The blobs of ollama and of the Hugging Face cache have no extension."""
    blob = tmp_path / "sha256-8934d96d"
    model_files.write_gguf(blob, weights, TINY)
    (tmp_path / "link").symlink_to(blob)
    (tmp_path / "model.safetensors").symlink_to(blob)
    for name in ("sha256-8934d96d", "link", "model.safetensors"):
        assert load(tmp_path / name, tokenizer=False).config.n_layers == 4


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x80\x02}q\x00", "a pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        (b"GGML\3\0\0\0", "begins with b'GGML"),
        (b"", "empty"),
        (model_files.safetensors_bytes({"a": ("F32", (1,), bytes(4))}), "a safetensors file"),
        (struct.pack("<Q", 0x280) + b"{" + b" " * 0x27E + b"}", "a safetensors file"),
    ],
)
def test_what_is_no_model_says_what_was_found(
    tmp_path: Path, folder: Path, data: bytes, what: str
) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    refused(tmp_path / "x.gguf", what)
    if data.startswith((b"PK", b"version")):
        (folder / "model.safetensors").write_bytes(data)
        refused(folder, what, file="model.safetensors")
    assert what_is(b"GGUF\3") == "a GGUF file"


def test_a_folder_of_something_else_says_what_it_holds(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "g").mkdir()
    refused(tmp_path / "g", "config.json: no such file; the folder has nothing")
    (tmp_path / "g" / "model-q4.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "g", "give one of them, like")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor", "config.json, pytorch_model.bin")
    for i in range(100):
        (folder / f"\x1b[2J{i}").touch()
    refused(folder, "...")


# ---- names that a wrapper changed ---------------------------------------------------------

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "module._orig_mod.", "model.language_")


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_prefixes_are_named(tmp_path: Path, weights: model_files.Weights, prefix: str) -> None:
    """In files and in lent weights, with what takes them away."""
    wrapped = {prefix + name: w for name, w in weights.items()}
    model_files.write_hf(tmp_path / "m", wrapped, TINY)
    text = refused(tmp_path / "m", "as those of a wrapped model")
    with pytest.raises(ValueError, match="as those of a wrapped model") as caught:
        BranchSession(wrapped, TINY)
    assert str(caught.value) in text
    advice = text[text.index("{name.") :]
    unwrapped = eval(advice, {"weights": wrapped})  # what the error says to do
    assert unwrapped.keys() == weights.keys()
    assert BranchSession(unwrapped, TINY, n_threads=1).prefill([1, 2]).tokens.tolist() == [1, 2]


def test_other_wrappers(weights: model_files.Weights) -> None:
    within = {name.replace("layers.0.", "layers.0._orig_mod."): 0 for name in weights}
    with pytest.raises(ValueError, match=r"have \['_orig_mod\.'\] in them.*replace\('_orig_mod\.'"):
        check_wrapped(within)
    adapter = {f"base_model.model.{name}": 0 for name in weights}
    adapter["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = 0
    with pytest.raises(ValueError, match="merge_and_unload"):
        check_wrapped(adapter)
    check_wrapped(weights)
    check_wrapped([name.removeprefix("model.") for name in weights])
    check_wrapped(["something.else", 3])


# ---- sessions of given weights and configurations -----------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 2_000_000_000}, "config: head_dim"),
        ({"vocab_size": 2**31 - 1}, r"embed_tokens\.weight has shape \(97, 64\).*vocab_size"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"intermediate_size": 2**31 - 1}, r"gate_proj\.weight has shape"),
        ({"num_attention_heads": 2**31 - 2}, "2\\*\\*31"),
        ({"rms_norm_eps": float("nan")}, "config: rms_norm_eps"),
        ({"rope_theta": HUGE}, "config: rope_theta"),
        ({"bos_token_id": True}, "config: bos_token_id"),
        ({"eos_token_id": [2, 97]}, "config: eos_token_id 97"),
    ],
)
def test_sessions_of_given_weights(
    weights: model_files.Weights, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BranchSession(weights, TINY | changes, tokenizer=Letters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 2**31 - 2}, "head_dim must be at most"),
        ({"norm_eps": float("inf")}, "norm_eps"),
        ({"norm_eps": True}, "norm_eps"),
        ({"inv_freq": (1.0,) * 7 + (True,)}, "inv_freq"),
        ({"inv_freq": (1.0,) * 7 + (HUGE,)}, "inv_freq"),
        ({"inv_freq": ("1",) * 8}, "inv_freq"),
        ({"eos": (1.0,)}, "eos must be token ids"),
        ({"bos": True}, "bos must be token ids"),
        ({"window": float("inf")}, "window must be an integer"),
        ({"n_layers": np.float32(4)}, "n_layers must be an integer"),
    ],
)
def test_configurations_that_are_made(changes: dict[str, Any], message: str) -> None:
    fields = vars(ModelConfig.of(TINY)) | changes
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def test_numpy_integers_are_integers() -> None:
    fields = vars(ModelConfig.of(TINY)) | {"n_layers": np.int64(4), "eos": (np.int32(2),)}
    config = ModelConfig(**fields)
    assert (type(config.n_layers), type(config.eos[0])) == (int, int)


# ---- the guard ----------------------------------------------------------------------------


def test_what_a_reader_raises_becomes_a_value_error() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for error, told in (
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (OverflowError("too large"), "OverflowError: too large"),
        (RecursionError("deep"), "nested too deep"),
        (FileNotFoundError(2, "x"), "no such file"),
        (PermissionError(13, "Permission denied", "x"), "Permission denied"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "'utf-8' codec can't"),
        (ValueError("bad\x1b[2J\n"), "bad\\x1b[2J\\n"),
        (panic("range end"), "PanicException: range end"),
    ):
        with pytest.raises(ValueError, match=r"a\.json: ") as caught, reading("a.json"):
            raise error
        assert type(caught.value) is ValueError
        assert str(caught.value).startswith(f"a.json: {told}")
    with pytest.raises(ValueError, match=r"^a: b$"), reading("a"), reading("a: b"):
        raise ValueError("a: b")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, MemoryError, ImportError, UserWarning, GeneratorExit]
)
def test_what_is_no_fault_of_the_file_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), reading("a.json"):
        raise error


def test_messages_are_short_and_plain() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    values = ("x" * 10**6, [1] * 10**6, {i: i for i in range(1000)}, deep, 10**4000, np.ones(10**6))
    for value in values:
        assert len(shown(value)) < 250
    assert shown("\x1b\ud800") == "'\\x1b\\ud800'"
    assert plain("a\nb\u202e\ud800") == "a\\nb\\u202e\\ud800"
    assert plain("x" * 1000 + "end").endswith("end")
    assert len(plain("x" * 1000)) < 420


def test_warnings_can_be_made_errors(tmp_path: Path) -> None:
    tied = TINY | {"tie_word_embeddings": True}
    model_files.write_hf(tmp_path, model_files.random_weights(TINY), tied)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match=r"lm_head\.weight is used"):
        warnings.simplefilter("error")
        load(tmp_path)
