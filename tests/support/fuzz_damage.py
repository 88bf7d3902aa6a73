"""Ways to damage the files of a model, for the loaders' fuzzer.

All chance comes from the generator that is given, so that a seed and a number name an input for
ever (as long as this file is what it was).
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from support import model_files
from support.fuzz_models import CHAT, Seed

Chance = random.Random

# ---- values that readers stumble over -----------------------------------------------------


class Raw(str):
    """JSON that the json module would not write."""


def _deep(n: int) -> Raw:
    return Raw("[" * n + "]" * n)


NUMBERS: list[Any] = [
    0, -1, 1, 2, 3, 7, 8, 63, 64, 65, 2**15, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63,
    2**64, -(2**63), 10**25, 0.0, -0.0, 0.5, 1.5, 1e-320, 5e-324, 1e308, -1e308, 1e38, 20_000_000,
    float("nan"), float("inf"), float("-inf"), Raw("9" * 400), Raw("1e999"), Raw("-" + "9" * 5000),
    Raw("1" + "0" * 100 + ".5"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", "a", "2", "\0", "\x1b[2J", "\u2028", "\U0001f600", "e\u0301", "<|im_end|>", "<s>", " ",
    "x" * 300, "../config.json", "/dev/zero", "a" * 1000, "default", "linear", "llama", "gpt2",
    Raw('"\\ud800"'), Raw('"\\udc00a"'), Raw('"\\u0000"'), "\u2581" * 9, "ab" * 50, "(a+)+$",
]  # fmt: skip
OTHERS: list[Any] = [
    True, False, None, [], {}, [0], [[]], {"a": 1}, ["a", "b"], [1] * 100, [None], [True, 2],
    {"content": "<s>"}, {"content": 5}, {"type": "linear", "factor": 2}, _deep(5000), _deep(50),
    Raw('{"a":' * 3000 + "1" + "}" * 3000), Raw("[1,]"), Raw("'a'"), Raw("NaN"),
]  # fmt: skip
VALUES = NUMBERS + TEXTS + OTHERS

HF_FIELDS = [
    "head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "rope_scaling", "rope_parameters", "rope_theta", "original_max_position_embeddings",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config", "hidden_act",
    "partial_rotary_factor", "rms_norm_eps", "num_key_value_heads", "bos_token_id",
    "eos_token_id", "pad_token_id", "attn_logit_softcapping", "num_experts", "architectures",
    "add_bos_token", "add_eos_token", "chat_template", "extra_special_tokens", "unk_token",
    "additional_special_tokens", "model_max_length", "normalizer", "pre_tokenizer", "decoder",
    "post_processor", "added_tokens", "merges", "vocab", "content", "special", "id", "ids",
    "type", "pattern", "behavior", "replacement", "normalizers", "weight_map", "metadata",
]  # fmt: skip
GGUF_FIELDS = [
    "general.alignment", "general.architecture", "split.count", "split.no", "split.tensors.count",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.attention.value_length", "llama.rope.dimension_count", "llama.rope.freq_base",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.attention.sliding_window", "llama.attention.scale", "llama.vocab_size",
    "llama.context_length", "llama.block_count", "llama.feed_forward_length",
    "llama.expert_count", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template",
]  # fmt: skip
TEMPLATES = [
    "{{ 1/0 }}", "{{ messages[9] }}", "{{ messages[0]['content']['x'] }}", "{% if %}", "{{",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ '%d'|format(1e400) }}", "{{ cycler() }}",
    "{{ 'a' * 10**12 }}", "{{ range(10**9)|list }}", "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('x') }}", "{{ messages|tojson(indent=2) }}", "{{ lipsum() }}",
    "{{ strftime_now('%Y') }}", "{{ 10**10**6 }}", "{% include 'x' %}", "{% import 'x' as y %}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}", "{{ bos_token * 3 }}", "{{ eos_token }}", "{{ x.y.z }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% generation %}a{% endgeneration %}", "{{ '\\ud800' }}", "{{ '\x00' }}", "{{ tools }}",
    "{{ self }}",
]  # fmt: skip


# ---- JSON ---------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    todo = [value] if isinstance(value, (dict, list)) else []
    while todo:
        inner = todo.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            yield inner, key
            if isinstance(inner[key], (dict, list)):
                todo.append(inner[key])


def to_json(value: Any) -> bytes:
    """json.dumps, with Raw parts and repeated keys as they are."""
    parts: list[str] = []

    def hide(inner: Any) -> Any:
        if isinstance(inner, Raw):
            parts.append(inner)
            return f"@raw{len(parts) - 1}@"
        if isinstance(inner, dict):
            return {str(key): hide(each) for key, each in inner.items()}
        return [hide(each) for each in inner] if isinstance(inner, list) else inner

    text = json.dumps(hide(value))
    for i, part in enumerate(parts):
        text = text.replace(f'"@raw{i}@"', part)
    return text.replace("@twice@", "").encode()


def change_json(chance: Chance, value: Any) -> Any:
    """The value, with one thing not as it should be."""
    if chance.random() < 0.02:
        return chance.choice(VALUES)
    if isinstance(value, dict) and "chat_template" in value and chance.random() < 0.2:
        return value | {"chat_template": chat_template(chance)}
    places = list(_places(value))
    if not places:
        return chance.choice(VALUES)
    container, key = chance.choice(places)
    way = chance.randrange(9)
    if way <= 2:
        container[key] = chance.choice(VALUES)
    elif way == 3:
        del container[key]
    elif way == 4 and isinstance(container, dict):
        container[f"@twice@{key}"] = chance.choice([container[key], chance.choice(VALUES)])
    elif way == 5 and isinstance(container, dict):
        container[chance.choice(HF_FIELDS)] = container.pop(key)
    elif way == 6:
        other, there = chance.choice(places)
        container[key] = copy.deepcopy(other[there])
    elif way == 7:
        container[key] = vary(chance, container[key])
    elif isinstance(container, dict):
        container[chance.choice(HF_FIELDS)] = chance.choice(VALUES)
    else:
        container.extend(container[: chance.randrange(1, 9)] * chance.choice((1, 2, 50)))
    return value


def chat_template(chance: Chance) -> str:
    """A bad one, or a good one with something bad in it."""
    at = chance.randrange(len(CHAT) + 1)
    bad = chance.choice(TEMPLATES)
    return bad if chance.random() < 0.3 else CHAT[:at] + bad + CHAT[at:]


def vary(chance: Chance, value: Any) -> Any:
    """Something of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, value * 2, -value, float(value), str(value)))
    if isinstance(value, float):
        return chance.choice((value * 1e10, -value, value / 1e10, int(value), str(value)))
    if isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        more = chance.choice((chance.choice(TEXTS), chance.choice(TEMPLATES), value))
        return value[:at] + str(more) * chance.choice((1, 1, 1, 20)) + value[at:]
    if isinstance(value, list):
        return (value * chance.choice((0, 2, 30)))[:5000]
    return value


# ---- bytes --------------------------------------------------------------------------------

WORDS = [
    struct.pack(layout, number)
    for layout, number in (
        ("<Q", 0), ("<Q", 2**64 - 1), ("<Q", 2**63), ("<Q", 2**40), ("<Q", 65), ("<I", 2**32 - 1),
        ("<I", 0), ("<I", 9), ("<I", 8), ("<I", 1), ("<f", float("nan")), ("<f", float("inf")),
        ("<f", -1e30), ("<e", float("inf")), ("<H", 0xFFFF), ("<H", 0x7FC0), ("<B", 0x80),
    )
]  # fmt: skip


def change_bytes(chance: Chance, data: bytes, head: int = 1 << 20) -> bytes:
    """Bits, words and pieces, mostly within the first `head` bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        reach = len(changed) if chance.random() < 0.2 else min(head, len(changed))
        at = chance.randrange(reach + 1)
        way = chance.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif way == 2:
            word = chance.choice(WORDS)
            changed[at : at + len(word)] = word
        elif way == 3:
            changed[at:at] = chance.choice((chance.choice(WORDS), changed[at : at + 32] * 4))
        elif way == 4:
            del changed[at : at + chance.choice((1, 4, 8, 100))]
        else:
            other = chance.randrange(reach + 1)
            n = chance.choice((4, 8, 32))
            changed[at : at + n] = changed[other : other + n]
    if chance.random() < 0.1:
        changed = changed[: chance.randrange(len(changed) + 1)]
    return bytes(changed[: 1 << 20])


# ---- safetensors --------------------------------------------------------------------------


def change_safetensors(chance: Chance, data: bytes) -> bytes:
    """The header's JSON, its length, or the values."""
    n = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + n], data[8 + n :]
    way = chance.randrange(8)
    if way <= 3:
        header = to_json(change_json(chance, json.loads(header)))
        n = len(header)
    elif way == 4:
        entries = json.loads(header)
        names = list(entries)
        one, other = chance.choice(names), chance.choice(names)
        entries[one], entries[other] = entries[other], entries[one]
        header = to_json({chance.choice(PREFIXES) + name: e for name, e in entries.items()})
        n = len(header)
    elif way == 5:
        n = chance.choice((n + 1, n - 1, 0, 2**63, 2**32, len(data), 100 << 20))
    elif way == 6:
        body = change_bytes(chance, body)
    else:
        return change_bytes(chance, data, n + 8)
    return struct.pack("<Q", n % 2**64) + header + body


PREFIXES = ("", "module.", "_orig_mod.", "base_model.model.", "\x1b[1m")


# ---- GGUF ---------------------------------------------------------------------------------


class Pieces:
    """A GGUF cut into what it consists of, to be put together wrongly."""

    @classmethod
    def of(cls, data: bytes) -> Pieces:
        """Of its own for each caller."""
        return copy.deepcopy(_cut(data))

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 4
        self.version = self._take("<I")
        n_tensors, n_keys = self._count(), self._count()
        self.keys = [self._key() for _ in range(n_keys)]
        self.infos = [self._info() for _ in range(n_tensors)]
        self.body = data[-(-self.at // 32) * 32 :]
        self.counts = [n_tensors, n_keys]
        self.magic = b"GGUF"

    def _count(self) -> int:
        n: int = self._take("<Q")
        if n > len(self.data):
            raise ValueError("damaged already")
        return n

    def _take(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def _bytes(self, n: int) -> bytes:
        self.at += n
        return self.data[self.at - n : self.at]

    def _string(self) -> bytes:
        return self._bytes(self._count())

    def _key(self) -> list[Any]:
        """[name, type, payload]"""
        name, kind = self._string(), self._take("<I")
        start = self.at
        self._skip(kind)
        return [name, kind, self.data[start : self.at]]

    def _skip(self, kind: int) -> None:
        if kind == 8:
            self._string()
        elif kind == 9:
            inner, n = self._take("<I"), self._count()
            for _ in range(n):
                self._skip(inner)
        else:
            self.at += {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)

    def _info(self) -> list[Any]:
        """[name, dimensions, type, offset, number of dimensions]"""
        name, n = self._string(), min(self._take("<I"), 64)
        return [name, [self._take("<Q") for _ in range(n)], self._take("<I"), self._take("<Q"), n]

    def whole(self) -> bytes:
        def string(text: bytes) -> bytes:
            return struct.pack("<Q", len(text)) + text

        head = self.magic + struct.pack(
            "<I2Q", self.version % 2**32, *(n % 2**64 for n in self.counts)
        )
        for name, kind, payload in self.keys:
            head += string(name) + struct.pack("<I", kind) + payload
        for name, dims, kind, offset, n in self.infos:
            head += string(name) + struct.pack("<I", n % 2**32)
            head += b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
            head += struct.pack("<IQ", kind % 2**32, offset % 2**64)
        return head + bytes(-len(head) % 32) + self.body


ODD_VALUES = [
    (9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0)), (9, struct.pack("<IQ", 4, 2**60)),
    (9, struct.pack("<IQ", 8, 2**40)), (8, struct.pack("<Q", 2**63)), (7, b"\x05"), (13, b""),
]  # fmt: skip


@lru_cache(maxsize=64)
def _cut(data: bytes) -> Pieces:
    return Pieces(data)


def gguf_value(chance: Chance) -> tuple[int, bytes]:
    """Type and payload of anything."""
    way = chance.randrange(6)
    if way == 0:
        number = chance.choice([n for n in NUMBERS if isinstance(n, int)])
        kind = chance.choice((0, 2, 4, 10, 11, 5, 7))
        n = {0: 1, 7: 1, 2: 2, 10: 8, 11: 8}.get(kind, 4)
        return kind, (number % 256**n).to_bytes(n, "little")
    if way == 1:
        number = chance.choice([n for n in NUMBERS if isinstance(n, float)])
        if chance.random() < 0.5 or abs(number) > 3e38:
            return 12, struct.pack("<d", number)
        return 6, struct.pack("<f", number)
    if way == 2:
        text = str(chance.choice(TEXTS + TEMPLATES)).encode()
        return 8, model_files._string(chance.choice((text, text, b"\xff\xfe", b"\xed\xa0\x80")))
    if way == 3:
        kind = chance.choice((0, 1, 4, 5, 6, 7, 10, 12))
        size = {0: 1, 1: 1, 7: 1, 10: 8, 12: 8}.get(kind, 4)
        n = chance.choice((0, 1, 2, 63, 64, 65, 1000))
        word = chance.choice([w for w in WORDS if len(w) == size] or [bytes(size)])
        return 9, struct.pack("<IQ", kind, n) + word * n
    if way == 4:
        texts = [
            str(chance.choice(TEXTS)).encode() for _ in range(chance.choice((0, 1, 64, 64, 200)))
        ]
        return 9, struct.pack("<IQ", 8, len(texts)) + b"".join(map(model_files._string, texts))
    return chance.choice(ODD_VALUES)


def _change_strings(chance: Chance, payload: bytes) -> bytes:
    """An array of strings with some of them changed, or many more."""
    n = struct.unpack_from("<Q", payload, 4)[0]
    at, texts = 12, []
    for _ in range(n):
        size = struct.unpack_from("<Q", payload, at)[0]
        texts.append(payload[at + 8 : at + 8 + size])
        at += 8 + size
    for _ in range(chance.choice((1, 1, 3, 20))):
        i = chance.randrange(len(texts))
        other = chance.choice(texts)
        new = (
            str(chance.choice(TEXTS)).encode(),
            other,
            texts[i] + other,
            texts[i] + b" ",
            b"\xff",
        )
        texts[i] = chance.choice(new)
    if chance.random() < 0.1:
        texts.insert(chance.randrange(len(texts)), chance.choice(texts))
    if chance.random() < 0.02:
        texts += [b"a" * i for i in range(chance.choice((50, 400)))]
    return payload[:4] + struct.pack("<Q", len(texts)) + b"".join(map(model_files._string, texts))


def change_gguf(chance: Chance, data: bytes) -> bytes:
    """A key, a tensor's description, a count, or the values."""
    p = Pieces.of(data)
    way = chance.randrange(14)
    if way <= 5 and p.keys:
        _change_key(chance, p)
    elif way <= 9 and p.infos:
        _change_info(chance, p)
    elif way == 10:
        i = chance.randrange(2)
        p.counts[i] = chance.choice((p.counts[i] + 1, p.counts[i] - 1, 0, 2**63, 2**60, 2**32))
    elif way == 11:
        p.version = chance.choice((0, 1, 2, 3, 4, 3 << 24))
        p.magic = chance.choice((b"GGUF", b"GGML", b"FUGG"))
    elif way == 12:
        p.body = change_bytes(chance, p.body)
    else:
        return change_bytes(chance, data, len(data) - len(p.body))
    return p.whole()


def _change_key(chance: Chance, p: Pieces) -> None:
    key = chance.choice(p.keys)
    way = chance.randrange(9)
    strings = [
        k for k in p.keys if k[1] == 9 and k[2][:4] == struct.pack("<I", 8) and len(k[2]) > 12
    ]
    if way <= 2:
        key[1], key[2] = gguf_value(chance)
    elif way == 3:
        p.keys.remove(key)
        p.counts[1] -= 1
    elif way == 4:
        name = chance.choice((chance.choice(GGUF_FIELDS).encode(), key[0], b"\xff", b"a" * 3000))
        p.keys.append([name, *gguf_value(chance)])
        p.counts[1] += 1
    elif way == 5:
        key[0] = chance.choice(GGUF_FIELDS).encode()
    elif way == 6 and strings:
        key = chance.choice(strings)
        key[2] = _change_strings(chance, key[2])
    elif way == 7:
        text = chat_template(chance).encode("utf-8", "replace")
        p.keys = [k for k in p.keys if k[0] != b"tokenizer.chat_template"]
        p.keys.append([b"tokenizer.chat_template", 8, model_files._string(text)])
        p.counts[1] = len(p.keys)
    elif key[1] == 9 and len(key[2]) > 16:  # within an array of numbers
        key[2] = key[2][:12] + change_bytes(chance, key[2][12:])
    elif key[1] not in (8, 9):
        key[2] = chance.choice(WORDS)[: len(key[2])].ljust(len(key[2]), b"\0")


def _change_info(chance: Chance, p: Pieces) -> None:
    info = chance.choice(p.infos)
    way = chance.randrange(7)
    if way == 0:
        i = chance.randrange(len(info[1]))
        size = info[1][i]
        info[1][i] = chance.choice((0, size + 1, size - 1, size * 2, 2**32, 2**63, 2**64 - 1, 1))
    elif way == 1:
        info[1] = info[1][::-1] if chance.random() < 0.5 else [*info[1], chance.choice((0, 1, 2))]
        info[4] = len(info[1])
    elif way == 2:
        info[2] = chance.randrange(42)
    elif way == 3:
        info[3] = chance.choice((0, info[3] + 32, info[3] - 32, 1, 2**63, 2**64 - 32))
    elif way == 4:
        names = [other[0] for other in p.infos]
        info[0] = chance.choice(
            (*names, b"blk.1.attn_q.weight", b"x", b"\xff", b"blk.0.attn_q.bias")
        )
    elif way == 5:
        p.infos.remove(info)
        p.counts[0] -= 1
    else:
        info[4] = chance.choice((0, 1, 3, 5, 2**32 - 1))


# ---- whole models -------------------------------------------------------------------------


def change_file(chance: Chance, name: str, data: bytes) -> bytes:
    if name.endswith(".gguf"):
        return change_gguf(chance, data)
    if name.endswith(".safetensors"):
        return change_safetensors(chance, data)
    if name.endswith(".json") and chance.random() < 0.9:
        return to_json(change_json(chance, json.loads(data)))
    if name.endswith(".jinja"):
        return chat_template(chance).encode("utf-8", "replace")
    return change_bytes(chance, data)


SPECIAL_FILES: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/null": lambda path: path.symlink_to("/dev/null"),
    "empty": lambda path: path.touch(),
}


def write_damaged(chance: Chance, seed: Seed, folder: Path) -> str:
    """The seed's files, damaged, in a new folder; returns what rksc.load is to be given."""
    files = dict(seed.files)
    names = [n for n in files if n.endswith(".json") or n.endswith(".jinja")] * 2 + list(files)
    odd: dict[str, str] = {}
    for _ in range(chance.choice((1, 1, 1, 1, 2, 3))):
        name = chance.choice(names)
        if chance.random() < 0.03:
            odd[name] = chance.choice([*SPECIAL_FILES, "missing", chance.choice(names)])
            continue
        try:
            files[name] = change_file(chance, name, files[name])
        except Exception:
            files[name] = change_bytes(chance, files[name])  # it was damaged already
    folder.mkdir()
    for name, data in files.items():
        what = odd.get(name)
        if what in SPECIAL_FILES:
            SPECIAL_FILES[what](folder / name)
        elif what != "missing":
            (folder / name).write_bytes(files.get(what, data) if what else data)
    if seed.entry and chance.random() < 0.05 and (folder / seed.entry).exists():
        (folder / seed.entry).rename(folder / "blob")
        return "blob"
    return seed.entry
