"""tokenizer.json, looked at before the tokenizers library sees it.

The library trusts the file: it fills the holes between ids, runs any regular expression and any
chain of steps, and ends the process where memory does not suffice. So the parts that decide about
time and memory are checked here; what remains and goes wrong in the library is a ValueError, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..formats.fields import Fields
from ..formats.files import parse_json, read_bytes, reading, shown
from ..scalars import as_float, as_int
from .pipeline import Pipeline, byte_level_table, from_byte_level, from_sentencepiece, library
from .regexes import check_pattern

_FILE_BYTES = 64 << 20  # twice the largest that we know
_HOLES = 1 << 16  # ids without a token
_STEPS = 64  # in a normalizer or pre-tokenizer
_GROWTH = 64  # times as many characters after all steps
_PREPENDED = 16  # characters

# How many characters one may become, at most. Replace is reckoned by its content.
_NORMALIZERS = {
    "BertNormalizer": 3, "ByteLevel": 4, "Lowercase": 3, "NFC": 3, "NFD": 4, "NFKC": 18,
    "NFKD": 18, "Nmt": 1, "Precompiled": 18, "Prepend": 1, "Strip": 1, "StripAccents": 1,
}  # fmt: skip


def read_tokenizer_json(path: Path) -> tuple[Pipeline, dict[str, Any]]:
    """The pipeline that a file describes, and the description; ValueError names file and field."""
    tokenizers = library()
    with reading(path):
        data = read_bytes(path, _FILE_BYTES)
        described = parse_json(data, strict=True)
        check(described)
        pipeline = tokenizers.Tokenizer.from_buffer(data)
        pipeline.no_truncation()
        pipeline.no_padding()
        for i, token in enumerate(described.get("added_tokens") or ()):
            found = pipeline.token_to_id(token["content"])
            if found != token["id"]:
                raise ValueError(
                    f"added_tokens[{i}]: id {token['id']} leaves a gap or is another token's; "
                    f"the library takes {found}"
                )
        return Pipeline(pipeline, str(path)), described


# ---- checks -------------------------------------------------------------------------------


def check(described: Mapping[str, Any]) -> None:
    """ValueError for a tokenizer.json that could take much time or memory, or ids to nowhere."""
    n = _check_model(described.get("model"))
    _check_added(described.get("added_tokens"), n)
    growth = 1
    for where, step in _steps(described, "normalizer", "normalizers"):
        with reading(where):
            growth *= _growth(step)
            if growth > _GROWTH:
                raise ValueError(f"these steps could make a text {growth} times as long")
    for where, step in _steps(described, "pre_tokenizer", "pretokenizers"):
        with reading(where):
            if step.get("type") == "Split":
                _check_split(step.get("pattern"))


def _check_model(model: Any) -> int:
    """How many tokens the model has."""
    if not isinstance(model, dict):
        raise ValueError(f"model must be an object, got {shown(model)}")
    kind = model.get("type", "BPE" if "merges" in model else None)
    vocabulary = model.get("vocab")
    if kind == "BPE" and isinstance(vocabulary, dict):
        most = 2 * len(vocabulary) + _HOLES
        for token, i in vocabulary.items():
            if as_int(i) is None or not 0 <= i < most:
                raise ValueError(
                    f"model.vocab: the id of {shown(token)} is {shown(i)}, but the "
                    f"{len(vocabulary)} tokens need no id beyond {most - 1}"
                )
        if not isinstance(model.get("merges"), list):
            raise ValueError(f"model.merges must be a list, got {shown(model.get('merges'))}")
    elif kind == "Unigram" and isinstance(vocabulary, list):
        for i, piece in enumerate(vocabulary):
            pair = isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str)
            if not pair or as_float(piece[1]) is None:
                raise ValueError(f"model.vocab[{i}] must be [text, score], got {shown(piece)}")
        unknown = model.get("unk_id")
        if unknown is not None and not 0 <= (as_int(unknown) or 0) < len(vocabulary):
            raise ValueError(f"model.unk_id {shown(unknown)} is outside the vocabulary")
    elif kind in ("BPE", "Unigram"):
        form = "an object" if kind == "BPE" else "a list"
        raise ValueError(f"model.vocab must be {form} for {kind}, got {shown(vocabulary)}")
    else:
        raise ValueError(f"model.type {shown(kind)} is not supported (BPE, Unigram)")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise ValueError(f"model.{field} = {shown(model[field])} is not supported")
    return len(vocabulary)


def _check_added(added: Any, n: int) -> None:
    if added is not None and not isinstance(added, list):
        raise ValueError(f"added_tokens must be a list, got {shown(added)}")
    most = 2 * (n + len(added or ())) + _HOLES
    for i, token in enumerate(added or ()):
        with reading(f"added_tokens[{i}]"):
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                raise ValueError(f"it must be an object with a content, got {shown(token)}")
            Fields(token).integer("id")
            if token["id"] >= most:
                raise ValueError(f"id {token['id']} is far beyond the number of tokens")


def _steps(
    described: Mapping[str, Any], part: str, several: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The steps of a part, sequences taken apart, with their names in the file."""
    waiting, n = [(part, described.get(part))], 0
    while waiting:
        where, step = waiting.pop(0)
        if step is None:
            continue
        if not isinstance(step, dict):
            raise ValueError(f"{where} must be an object, got {shown(step)}")
        n += 1
        if n > _STEPS:
            raise ValueError(f"{part} has more than {_STEPS} steps")
        if step.get("type") != "Sequence":
            yield where, step
        elif not isinstance(step.get(several), list):
            raise ValueError(f"{where}.{several} must be a list")
        else:
            inner = enumerate(step[several])
            waiting = [(f"{where}.{several}[{i}]", each) for i, each in inner] + waiting


def _growth(step: Mapping[str, Any]) -> int:
    """How many characters of the next step one of a text may become."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Prepend" and len(str(step.get("prepend"))) > _PREPENDED:
        raise ValueError(f"prepend has more than {_PREPENDED} characters")
    if kind != "Replace":
        if kind not in _NORMALIZERS:
            raise ValueError(f"type {shown(kind)} is not supported")
        return _NORMALIZERS[kind]
    if not isinstance(content, str):
        raise ValueError(f"content must be a string, got {shown(content)}")
    text = _check_split(step.get("pattern"))
    if text is None:
        return 1 + len(content)
    return max(1, -(-len(content) // len(text)))


def _check_split(pattern: Any) -> str | None:
    """The text that a pattern is, None for a regular expression."""
    if not isinstance(pattern, dict) or len(pattern) != 1:
        raise ValueError(f"pattern must be a String or a Regex, got {shown(pattern)}")
    text, regex = pattern.get("String"), pattern.get("Regex")
    if isinstance(regex, str):
        with reading("pattern"):
            check_pattern(regex)
        return None
    if not isinstance(text, str) or not text:
        raise ValueError(f"pattern must be a String or a Regex, got {shown(pattern)}")
    return text


# ---- what a description says --------------------------------------------------------------


def pieces_of(
    pipeline: Pipeline, described: Mapping[str, Any]
) -> tuple[list[bytes], dict[int, str], bool]:
    """Bytes of each id, special tokens, and whether decoding drops a first space."""
    steps = [step for _, step in _steps(described, "decoder", "decoders")]
    kinds = {step.get("type") for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(f"decoder of {sorted(map(str, kinds))} is not supported")
    byte_level = "ByteLevel" in kinds
    vocabulary, added = pipeline.vocabulary(), pipeline.added()
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    table = byte_level_table()
    for token, i in vocabulary.items():
        if i not in added:
            spelled = from_byte_level(token, table) if byte_level else from_sentencepiece(token)
            pieces[i] = spelled
        elif not added[i].special:
            pieces[i] = added[i].content.encode()
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps
    )
    return pieces, {i: token.content for i, token in added.items() if token.special}, strips


def first_ids_of(described: Mapping[str, Any]) -> list[int]:
    """The ids that the post-processor puts before a text."""
    for where, step in _steps(described, "post_processor", "processors"):
        with reading(where):
            kind = step.get("type")
            if kind in ("BertProcessing", "RobertaProcessing"):
                return [int(step["cls"][1])]
            if kind == "TemplateProcessing":
                ids: list[int] = []
                for each in step["single"]:
                    if "SpecialToken" not in each:
                        return ids
                    ids += step["special_tokens"][each["SpecialToken"]["id"]]["ids"]
    return []
