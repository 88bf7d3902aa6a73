"""Crafted tokenizers: a quick ValueError that names file and field, whatever the libraries do."""

from __future__ import annotations

import base64
import functools
import json
import random
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rksc.text import regexes, tokenizer_json
from rksc.text.regexes import check_pattern
from rksc.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("sentencepiece")

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
MODEL: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
FILE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": LEVEL,
    "post_processor": None,
    "decoder": LEVEL,
    "model": MODEL,
}


def added(content: Any, i: Any = 3, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": True, **flags, **more}


def split(pattern: Any) -> dict[str, Any]:
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [step, LEVEL]}}


def replace(pattern: Any, content: Any) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def nested(n: int) -> Any:
    step: Any = {"type": "NFC"}
    return functools.reduce(lambda s, _: {"type": "Sequence", "normalizers": [s]}, range(n), step)


Open = Callable[..., Tokenizer]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def make(**changes: Any) -> Tokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**FILE, **changes}))
        return Tokenizer.from_folder(tmp_path)

    return make


DOUBLE = replace({"String": "a"}, "aa")

REFUSED: list[tuple[dict[str, Any], str]] = [
    # ids
    ({"model": {**MODEL, "vocab": {"a": 0, "b": 4_000_000_000}}}, r"model\.vocab: the id of 'b'"),
    ({"model": {**MODEL, "vocab": {"a": 0, "b": 50_000_000}}}, r"model\.vocab: the id of 'b'"),
    ({"model": {**MODEL, "vocab": {"a": 0, "b": 10**30}}}, "30|31 digits"),
    ({"model": {**MODEL, "vocab": {"a": 0, "b": -1}}}, r"model\.vocab: the id of 'b' is -1"),
    ({"model": {**MODEL, "vocab": {"a": 0, "b": 1.5}}}, r"model\.vocab: the id of 'b' is 1\.5"),
    ({"model": {**MODEL, "vocab": {"a": 0, "b": True}}}, r"model\.vocab: the id of 'b' is True"),
    ({"added_tokens": [added("<x>", 4_000_000_000)]}, r"added_tokens\[0\]: id"),
    ({"added_tokens": [added("<x>", 2_000_000_000)]}, r"added_tokens\[0\]: id 2000000000"),
    ({"added_tokens": [added("<x>", 500)]}, r"added_tokens\[0\]: id 500 leaves a gap"),
    ({"added_tokens": [added("<x>", 1)]}, r"added_tokens\[0\]: id 1 leaves a gap or is another"),
    ({"added_tokens": [added("<x>", "3")]}, r"added_tokens\[0\]: id"),
    ({"added_tokens": [added(5)]}, r"added_tokens\[0\]: it must be an object with a content"),
    ({"added_tokens": {"<x>": 3}}, "added_tokens must be a list"),
    # models
    ({"model": None}, "model must be an object"),
    ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "model.type 'WordPiece'"),
    ({"model": {**MODEL, "vocab": [["a", 0.0]]}}, r"model\.vocab must be an object for BPE"),
    ({"model": {**MODEL, "merges": None}}, r"model\.merges must be a list"),
    ({"model": {**MODEL, "merges": ["a c"]}}, "Token `c` out of vocabulary"),
    ({"model": {**MODEL, "merges": ["ab a", "a ab"]}}, "tokenizer.json: "),
    ({"model": {**MODEL, "merges": [5]}}, "tokenizer.json: "),
    ({"model": {**MODEL, "dropout": 0.5}}, r"model\.dropout"),
    ({"model": {**MODEL, "end_of_word_suffix": "</w>"}}, r"model\.end_of_word_suffix"),
    ({"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}}, r"model\.unk_id 5"),
    ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a"]]}}, r"model\.vocab\[0\] must be"),
    # steps that grow, nest or run wild
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}}, "times as long"),
    ({"normalizer": replace({"String": "a"}, "a" * 100)}, "100 times as long"),
    ({"normalizer": replace({"Regex": "a?"}, "a" * 100)}, "101 times as long"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKD"}] * 3}}, "times as long"),
    ({"normalizer": replace({"String": ""}, "a")}, "normalizer: pattern must be"),
    ({"normalizer": replace({"Regex": "(a+)+$"}, "a")}, "normalizer: pattern: regular expression"),
    ({"normalizer": replace({"String": "a"}, 5)}, "normalizer: content must be a string"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 100}}, "normalizer: prepend has more"),
    ({"normalizer": {"type": "Fold"}}, "normalizer: type 'Fold'"),
    ({"normalizer": nested(80)}, "normalizer has more than 64 steps"),
    ({"normalizer": nested(400)}, "normalizer has more than 64 steps"),
    ({"normalizer": [5]}, "normalizer must be an object"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    (split({"Regex": "(a+)+$"}), r"pre_tokenizer\.pretokenizers\[0\]: pattern: regular expression"),
    (split({"Regex": "(a|a)*b"}), "regular expression"),
    (split({"Regex": "("}), "an unclosed group"),
    (split({"Regex": "[z-a]"}), "tokenizer.json: "),
    (split({"Glob": "a"}), r"pretokenizers\[0\]: pattern must be"),
    (split(None), r"pretokenizers\[0\]: pattern must be"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 65}}, "more than 64 steps"),
    ({"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}}, "decoder of"),
    ({"decoder": None}, "decoder of"),
    ({"post_processor": {"type": "TemplateProcessing"}}, "tokenizer.json: "),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_a_crafted_tokenizer_json_is_refused(opened: Open, i: int) -> None:
    changes, told = REFUSED[i]
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=told) as error:
        opened(**changes)
    assert "tokenizer.json" in str(error.value)
    assert time.process_time() - began < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_what_is_like_them_and_fine(opened: Open) -> None:
    for changes in (
        {},
        {"added_tokens": [added("<x>")]},
        {"added_tokens": [added("<x>"), added("<y>", 4, special=False)]},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, DOUBLE]}},
        {"normalizer": replace({"Regex": " {2,}"}, "b")},
        {"model": {**MODEL, "dropout": 0.0, "continuing_subword_prefix": ""}},
        {"model": {k: v for k, v in MODEL.items() if k != "type"}},
        {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_id": 0,
                     "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "a"}},
        split({"Regex": r"\p{L}+|\s+(?!\S)"}),
        split({"String": "b"}),
    ):  # fmt: skip
        assert opened(**changes).encode("ab")


def test_a_panic_of_the_library_is_a_value_error(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a pattern run wild that passed: the library's panic is no Exception."""
    monkeypatch.setattr(tokenizer_json, "check_pattern", lambda pattern: None)
    wild = {"Regex": "(a+)+$"}
    for changes in (split(wild), {"normalizer": replace(wild, "b")}):
        tokenizer = opened(**changes)
        for call in (tokenizer.encode, tokenizer.offsets):
            with pytest.raises(ValueError, match=r"tokenizer\.json: the text cannot be split"):
                call("a" * 40 + "b")
        assert tokenizer.encode("b") == [1]
    unigram = {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True}
    with pytest.raises(ValueError, match="the text cannot be split"):
        opened(model=unigram, pre_tokenizer=space, decoder=space).encode("b")


def test_special_tokens_are_text_where_they_are_not_asked_for(opened: Open) -> None:
    """Even where a word is taken whole, a merge would make one, or it is the unknown token."""
    vocabulary = {"<u>": 0, "<": 1, "u": 2, ">": 3, "<u": 4, "b": 5, "ub": 6}
    merges = ["< u", "<u >", "u b"]
    model = {**MODEL, "vocab": vocabulary, "merges": merges, "unk_token": "<u>"}
    space = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "never",
        "split": False,
    }
    for whole in (False, True):
        tokenizer = opened(
            model={**model, "ignore_merges": whole},
            added_tokens=[added("<u>", 0), added("b", 5)],
            pre_tokenizer=space,
            decoder=space,
        )
        assert tokenizer.encode("u<u>b") == [2, 0, 5]
        assert tokenizer.encode("u<u>", special=False) == [2, 4, 3]
        assert tokenizer.encode("<u>", special=False) == [4, 3]
        assert tokenizer.encode("x<ub", special=False) == [0, 4, 0]  # 0: unknown
        assert tokenizer.encode("u<u>b") == [2, 0, 5]


@pytest.mark.parametrize("seed", range(40))
def test_damaged_charsmaps(opened: Open, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((4, 40, 400))
    table = (size // 8 * 4).to_bytes(4, "little") + rng.randbytes(size)
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    try:
        ids = opened(normalizer=step).encode("a b \ufb01 \u00e9")
    except ValueError as error:
        assert "tokenizer.json" in str(error)
    else:
        assert set(ids) <= {0, 1, 2}


def test_repeated_names_are_refused(tmp_path: Path) -> None:
    """The library would read both, we the last."""
    text = json.dumps(FILE)
    twice = f'{text[:-1]}, "model": {json.dumps({**MODEL, "vocab": {"a": 0}, "merges": []})}}}'
    (tmp_path / "tokenizer.json").write_text(twice)
    with pytest.raises(ValueError, match="model appears twice"):
        Tokenizer.from_folder(tmp_path)


# ---- regular expressions ------------------------------------------------------------------

LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
USED = [  # by models, or as some do
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[\p{L}&&[^\p{Han}]]+|[^\r\n\p{L}\p{N}]?+\p{L}++",
    r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", "[0-9][0-9][0-9]", " {2,}", r"[^\n]+|[\n]+", "[]a]+",
    r"\s{512}(?!\S)|\s{1,2}(?!\S)", r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)",
    "{", "a{,3}", r"(?<=\d)x|(?i)y",
]  # fmt: skip
WILD = [
    "(a+)+$", "(a*)*", "(a|a)*b", "(a|ab)*c", "(a?b?)*c", "a*a*b", ".*.*x", "(a*)(a*)b", "(?>a*)*b",
    "((a+)b?)+c", r"(a)\1", r"(?<x>a\g<x>?)", "(?R)", "(?(1)a|b)", "a?" * 30 + "a" * 30,
    "(a?){30}a{30}", "(a{1,1000}){1,1000}", "(a|b)" * 30, "(" * 30, "(a", "a)", "[a", "\\", r"\X+",
    "(?x) a", "(?~a)", "x" * 10_001,
]  # fmt: skip


@pytest.mark.parametrize("pattern", USED)
def test_patterns_of_models_pass_and_are_quick(opened: Open, pattern: str) -> None:
    check_pattern(pattern)
    tokenizer = opened(**split({"Regex": pattern}))
    began = time.process_time()
    for text in ("ab" * 5000, " " * 5000 + "b", "1" * 5000 + "a", "'" * 5000, "a b1'\n" * 1000):
        assert tokenizer.encode(text) is not None
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pattern", WILD)
def test_patterns_that_may_run_wild_are_refused(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="regular expression"):
        check_pattern(pattern)
    assert time.process_time() - began < 0.5


def test_bounds_of_a_quantifier() -> None:
    for text, bounds in {
        "*": (0, None), "+?": (1, None), "?+": (0, 1), "{3}": (3, 3), "{2,}": (2, None),
        "{,4}": (0, 4), "{1,2}": (1, 2), "{,}": (None, None),
    }.items():  # fmt: skip
        found = regexes._QUANTIFIER.match(text)
        assert found is not None
        assert regexes._bounds(found) == bounds


# ---- GGUF ---------------------------------------------------------------------------------


def gguf(tokens: list[str], **keys: Any) -> Tokenizer:
    kinds = [2] + [1] * len(tokens)
    keys = {"model": "llama", "tokens": ["<unk>", *tokens], "token_type": kinds, **keys}
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def scores(n: int, step: float = 1.0) -> Any:
    return -np.arange(n + 1, dtype=np.float32) * step


@pytest.mark.parametrize("step", [1.0, 0.37])
def test_time_and_memory_grow_with_the_vocabulary(step: float) -> None:
    """BPE and unigram: long tokens, and tokens that are prefixes of each other."""
    gguf(["a", "b"], scores=scores(2, step))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for tokens in (
        ["a", "x" * 160_000],
        ["a" * i for i in range(1, 1500)],
        ["a" * i for i in range(1, 1500)][::-1],
        [f"{i}" for i in range(50_000)],
    ):
        began = time.process_time()
        try:
            tokenizer = gguf(tokens, scores=scores(len(tokens), step))
            assert tokenizer.decode(tokenizer.encode(tokens[0])) == tokens[0]
        except ValueError as error:
            assert "tokenizer.ggml.tokens" in str(error)
        assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("kind", [3, 4])
def test_tokens_that_are_found_whole_cost_in_proportion(kind: int) -> None:
    """Control and user-defined ones, of one letter that a text has everywhere."""
    tokens = ["b" * i for i in range(1, 1000)]
    kinds = [2] + [kind] * len(tokens)
    tokenizer = gguf([*tokens, "c"], token_type=[*kinds, 1], scores=scores(1000))
    began = time.process_time()
    ids = tokenizer.encode("b" * 5000 + "c" * 10)
    assert ids[:5] == [999] * 5
    assert tokenizer.decode(ids, special=True).count("b") == 5000
    assert time.process_time() - began < 2


def test_repeated_and_empty_tokens_are_never_made() -> None:
    tokens = ["\u2581", "a", "b", "ab", "a", "", "", "<5>", "<6>"]
    tokenizer = gguf(tokens, scores=np.array([0, -9, -8, -7, -1, -2, -3, -4, -5, -6], np.float32))
    assert tokenizer.encode("ab a") == [1, 4, 1, 2]
    assert tokenizer.decode([5, 6, 7]) == "a"
    assert tokenizer.token_bytes()[:6] == [b"", b" ", b"a", b"b", b"ab", b"a"]


def test_a_character_without_a_token_is_said() -> None:
    """A vocabulary that has no unknown token, and not all bytes."""
    tokenizer = gguf(["\u2581", "a"], token_type=[1, 1, 1], scores=scores(2))
    assert tokenizer.encode("a") == [1, 2]
    with pytest.raises(ValueError, match="text: it has a character"):
        tokenizer.encode("b")


def test_no_id_of_a_file_ends_the_process(tmp_path: Path) -> None:
    """As the library did, in a process with little memory."""
    model = {**MODEL, "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**FILE, "model": model}))
    program = textwrap.dedent(
        f"""
        import resource
        from rksc.text.tokenizer import Tokenizer
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)
        try:
            Tokenizer.from_folder({str(tmp_path)!r})
        except ValueError as error:
            print(error)
        """
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "4000000000" in run.stdout
