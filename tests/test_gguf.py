"""GGUF as data: values, names, crafted files, split files, types that the gguf library reads."""

from __future__ import annotations

import itertools
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_files
from support.model_files import TINY

from rksc._core import gguf_names
from rksc.engine.load import load
from rksc.formats.gguf import _read_one, read_gguf
from rksc.model.names import from_gguf_name

WIDE = TINY | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def raw(tensor: Any) -> bytes:
    """The bytes as the file has them."""
    return b"".join([tensor])


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
