"""Text to token ids and back, over the `tokenizers` library.

A Hugging Face folder brings its tokenizer.json. A GGUF describes its tokenizer in a few
keys: a vocabulary, merges or scores, and the name of the rule that splits text before
merging; from these the same pipeline is built here.
"""

from __future__ import annotations

import codecs
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat import Message, render
from .ends import gguf_ends, tokenizer_ends
from .special import (
    eos_tokens,
    folder_templates,
    gguf_named_tokens,
    gguf_templates,
    named_tokens,
    read_tokenizer_config,
)
from .template import ChatTemplate
from .text import check_text

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"  # how SentencePiece spells a space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> the regular expression that cuts text into words; None: GPT-2's.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,  # every digit by itself before
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# Of these, a word that is a token is taken whole, whatever the merges say, and BOS is added
# unless the file says otherwise.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "text needs the tokenizers library: pip install rksc[hf] (token ids work without)"
        ) from None
    return tokenizers


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A vocabulary with its rules. Made by `from_folder` and `from_gguf`.

    `bos_id` and `eos_id` are ids or None; `adds_bos` tells whether the model wants its BOS
    before a text. Instances do not change and may be used from several threads.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        pieces: list[bytes],
        special: Mapping[int, str],
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        ends: Iterable[int | None] = (),
        adds_bos: bool = False,
        strips_space: bool = False,
        templates: Mapping[str, ChatTemplate] | None = None,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """`pieces` are the bytes that each id adds to a text, `special` ids and their texts, `ends`
        ids that end a turn besides eos_id (None: a token that is not there).

        `strips_space`: encoding puts a space before a text, which decoding takes away.
        `templates` are chat templates by name, `names` their variables such as bos_token.
        """
        self._pipeline = pipeline
        self._variants: dict[tuple[frozenset[str] | None, bool], tokenizers.Tokenizer] = {}
        added = pipeline.get_added_tokens_decoder().values()
        self._marks = tuple(t.content for t in added if not t.special and _is_mark(t.content))
        self._pieces = pieces
        self._special = dict(special)
        self.bos_id, self.eos_id = bos_id, eos_id
        self._named_ends = tuple(i for i in (eos_id, *ends) if i is not None)
        self.adds_bos = adds_bos and bos_id is not None
        self._strips_space = strips_space
        self._templates = dict(templates or {})
        self._names = dict(names or {})
        self._ends: tuple[int, ...] | None = None

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and what stands beside it: tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja and additional_chat_templates."""
        return _from_folder(cls, Path(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], file: str | Path = "") -> Tokenizer:
        """Build what the `tokenizer.ggml.` keys describe (gpt2 and llama models). file: where
        they are from, for errors of its chat template."""
        return _from_gguf(cls, metadata, str(file))

    def __repr__(self) -> str:
        return f"<rksc.Tokenizer of {len(self._pieces)} tokens>"

    @property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's matrix may have more rows."""
        return len(self._pieces)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self._pipeline.token_to_id(token)
        return found

    def encode(
        self, text: str, bos: bool | None = None, special: bool = True, start: bool = True
    ) -> list[int]:
        """The ids of `text`.

        bos: None puts the BOS first where the model wants one, True and False decide; a text
        that already begins with it gets no second one. special: are spellings of special
        tokens in the text (such as <|im_end|>) these tokens, or plain text? The chat template's
        own marks count as special, whatever the tokenizer calls them. start: does the text
        begin here? If it goes on after other tokens, there is no BOS unless bos=True, and
        none of the space that SentencePiece models put before a text.
        """
        check_text("text", text)
        pipeline = self._variant(special, start or not self._strips_space)
        ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
        if bos and self.bos_id is None:
            raise ValueError("bos=True, but this tokenizer has no BOS token")
        wanted = self.adds_bos and start if bos is None else bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def offsets(self, text: str) -> list[int]:
        """Where each token of `encode(text, bos=False)` begins in the text, in characters; tokens
        inside one character begin with it. What lies between two tokens, such as a space that a
        special token takes with it, is the next one's."""
        begins, last = [], 0
        for begin, end in self._pipeline.encode(text, add_special_tokens=False).offsets:
            begins.append(min(begin, last))
            last = max(last, end)
        return begins

    def _variant(self, special: bool, start: bool) -> tokenizers.Tokenizer:
        """The pipeline, or a copy that differs in what the settings ask for."""
        if special and start:
            return self._pipeline
        marks = None if special else self.template_marks()
        if (marks, start) not in self._variants:
            described = json.loads(self._pipeline.to_str())
            if not start:
                _drop_first_space(described)
            if marks:
                _make_special(described, marks)
            variant = _library().Tokenizer.from_str(json.dumps(described))
            variant.encode_special_tokens = not special
            self._variants[marks, start] = variant
        return self._variants[marks, start]

    def template_marks(self) -> frozenset[str]:
        """The added tokens that are not special to the tokenizer, but that the chat template
        writes: <｜User｜> of DeepSeek's, <think> of Qwen's."""
        return _written(self._marks, tuple(t.text for t in self._templates.values()))

    def decode(self, ids: Iterable[int], special: bool = False, start: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        special: write special tokens out? start: do the ids begin a text? Then the space
        that SentencePiece models put before it is dropped.
        """
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise TypeError(f"ids must be a sequence of token ids, got {ids!r}")
        text = b"".join(self._bytes_of(i, special) for i in ids).decode(errors="replace")
        return text[1:] if start and self._strips_space and text.startswith(" ") else text

    def _bytes_of(self, token: int, special: bool = False) -> bytes:
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"token {token} is outside the vocabulary of {len(self._pieces)}")
        return (
            self._special[token].encode()
            if special and token in self._special
            else (self._pieces[token])
        )

    @property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by id, as a text spells them. They add nothing to a decoded text."""
        return dict(self._special)

    def token_bytes(self, vocab_size: int | None = None, special: bool = False) -> list[bytes]:
        """What each id adds to the bytes of a text: special tokens their spelling with
        special=True and nothing without, gaps nothing.

        With `vocab_size` exactly so many entries: a model may have more rows than tokens.
        """
        pieces = list(self._pieces)
        if special:
            for token, text in self._special.items():
                pieces[token] = text.encode()
        return pieces if vocab_size is None else (pieces + [b""] * vocab_size)[:vocab_size]

    def decoder(self) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render the model's chat template, in a sandbox; encode the result as any text.

        With `continue_final` the text ends inside the last message, to be gone on with.
        """
        named = self._templates
        use = (
            "tool_use"
            if template_kwargs.get("tools") is not None and "tool_use" in named
            else "default"
        )
        if use not in named:
            known = f", only {', '.join(sorted(named))}: with_template(name)" if named else ""
            raise ValueError(f"this tokenizer has no chat template{known}")
        defaults = {"tools": None, "documents": None} | self._names
        return render(
            named[use],
            messages,
            add_generation_prompt,
            continue_final,
            **(defaults | template_kwargs),
        )

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, or None. Where a model has several by name, of the one
        called default; `chat` takes tool_use where tools are given."""
        default = self._templates.get("default")
        return None if default is None else default.text

    @chat_template.setter
    def chat_template(self, text: str | None) -> None:
        self._templates = {} if text is None else {"default": ChatTemplate(text)}
        self._ends = None

    def with_template(self, template: str) -> Tokenizer:
        """This tokenizer with another chat template: a name of the model's own, or a text."""
        other = copy(self)
        other.chat_template = template
        if template in self._templates:
            other._templates = {"default": self._templates[template]}
        return other

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn as far as a tokenizer knows: those that its files name, those
        of well-known texts, and what the chat template writes after what the assistant says."""
        if self._ends is None:
            self._ends = tuple(dict.fromkeys((*self._named_ends, *tokenizer_ends(self))))
        return self._ends


@lru_cache(maxsize=16)
def _written(marks: tuple[str, ...], templates: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark for mark in marks if any(mark in text for text in templates))


def _is_mark(token: str) -> bool:
    """Is it neither a word nor white space nor signs alone?"""
    return bool(re.search(r"\w", token) and re.search(r"[^\w\s]", token))


def _make_special(described: dict[str, Any], marks: frozenset[str]) -> None:
    """Edit a tokenizer.json so that these added tokens are special, and no merge makes one."""
    for token in described["added_tokens"]:
        token["special"] |= token["content"] in marks
    model = described["model"]
    if "merges" in model:
        model["merges"] = [
            merge
            for merge in model["merges"]
            if (merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)) not in marks
        ]


def _drop_first_space(described: dict[str, Any]) -> None:
    """Edit a tokenizer.json so that no space is put before a text."""
    for part in ("normalizer", "pre_tokenizer"):
        step = described[part] or {}
        inner = step.get("normalizers", step.get("pretokenizers", [step]))
        for each in inner:
            if each.get("type") == "Metaspace":
                each["prepend_scheme"] = "never"
        if step.get("type") == "Prepend":
            described[part] = None
        inner[:] = [each for each in inner if each.get("type") != "Prepend"]


class StreamDecoder:
    """Text from ids as they come; a character appears once all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: int | Iterable[int]) -> str:
        """The characters that `ids` complete, maybe none."""
        ids = ids if isinstance(ids, Iterable) else (ids,)
        return self._text.decode(b"".join(self._tokenizer._bytes_of(int(i)) for i in ids))

    def finish(self) -> str:
        """What is left: U+FFFD where the ids ended inside a character. Starts anew."""
        rest = self._text.decode(b"", final=True)
        self._text.reset()
        return rest


# ---- Hugging Face -------------------------------------------------------------------------


def _from_folder(cls: type[Tokenizer], folder: Path) -> Tokenizer:
    library = _library()
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; save the tokenizer as a fast one, or pass tokenizer=False "
            "and work with token ids"
        )
    try:
        pipeline = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{path}: {error}") from None
    pipeline.no_truncation()
    pipeline.no_padding()
    config = read_tokenizer_config(folder)
    names = {name: named.value for name, named in named_tokens(folder, config).items()}
    bos_id, eos_id = (
        pipeline.token_to_id(names[key]) if key in names else None
        for key in ("bos_token", "eos_token")
    )
    template = _sequence_template(pipeline)
    if bos_id is None and template and template[0] in pipeline.get_added_tokens_decoder():
        bos_id = template[0]
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos_id is not None and template[:1] == [bos_id]
    pieces, special, strips_space = _pieces(path, pipeline)
    return cls(
        pipeline,
        pieces,
        special,
        bos_id=bos_id,
        eos_id=eos_id,
        ends=[pipeline.token_to_id(eos.value) for eos in eos_tokens(folder, config)],
        adds_bos=adds_bos,
        strips_space=strips_space,
        templates=folder_templates(folder, config),
        names=names,
    )


def _sequence_template(pipeline: tokenizers.Tokenizer) -> list[int]:
    """Ids that the pipeline's own template puts before a text."""
    plain = pipeline.encode("a", add_special_tokens=False).ids
    full = pipeline.encode("a", add_special_tokens=True).ids
    for n in range(len(full) - len(plain) + 1):
        if full[n : n + len(plain)] == plain:
            return list(full[:n])
    return []


def _pieces(path: Path, pipeline: tokenizers.Tokenizer) -> tuple[list[bytes], dict[int, str], bool]:
    """Bytes of each id, special tokens, and whether decoding drops a first space."""
    decoder = json.loads(pipeline.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(
            f"{path}: a tokenizer that decodes by {sorted(map(str, kinds))} is unknown"
        )
    byte_level = "ByteLevel" in kinds
    vocabulary = pipeline.get_vocab(with_added_tokens=True)
    added = pipeline.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = _byte_alphabet()
    for token, i in vocabulary.items():
        if i not in added:
            pieces[i] = _from_byte_level(token, alphabet) if byte_level else _from_spm(token)
        elif not added[i].special:
            pieces[i] = added[i].content.encode()
    strips = any(step.get("type") == "Strip" and step.get("start") for step in steps) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps
    )
    special = {i: token.content for i, token in added.items() if token.special}
    return pieces, special, strips


def _from_byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # spelled plainly
        return token.encode()


def _from_spm(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


# ---- GGUF ---------------------------------------------------------------------------------


def _from_gguf(cls: type[Tokenizer], metadata: Mapping[str, Any], file: str) -> Tokenizer:
    library = _library()
    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    tokens = keys.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("GGUF: tokenizer.ggml.tokens is missing")
    kinds = _token_kinds(keys, len(tokens))
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        found = ids[name] = _token_id(keys, f"{name}_token_id", len(tokens))
        if found is not None and kinds[found] == _NORMAL:
            kinds[found] = _CONTROL
    model, pre = keys.get("model"), keys.get("pre")
    if model == "gpt2":
        pipeline = _byte_level(library, keys, tokens, kinds, pre)
        alphabet = _byte_alphabet()
        pieces = [_from_byte_level(token, alphabet) for token in tokens]
        adds_bos, strips_space = pre in _WHOLE_WORDS, False
    elif model == "llama":
        strips_space = bool(keys.get("add_space_prefix", True))
        pipeline = _sentencepiece(library, keys, tokens, kinds, strips_space)
        pieces = [_from_spm(token) for token in tokens]
        adds_bos = True
    else:
        raise ValueError(f"GGUF: tokenizer.ggml.model {model!r} is not supported (gpt2, llama)")
    special = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_UNKNOWN, _CONTROL, _UNUSED):
            pieces[i] = b""
        elif kind == _USER:
            pieces[i] = token.encode()
        if kind in (_UNKNOWN, _CONTROL):
            special[i] = token
    return cls(
        pipeline,
        pieces,
        special,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        ends=gguf_ends(metadata, len(tokens)),
        adds_bos=bool(keys.get("add_bos_token", adds_bos)),
        strips_space=strips_space,
        templates=gguf_templates(metadata, file),
        names=gguf_named_tokens(metadata, tokens),
    )


def _token_kinds(keys: Mapping[str, Any], n: int) -> list[int]:
    kinds = keys.get("token_type")
    if kinds is None:
        return [_NORMAL] * n
    if not hasattr(kinds, "__len__") or len(kinds) != n:
        raise ValueError(f"GGUF: tokenizer.ggml.token_type must have {n} entries")
    return [int(kind) for kind in kinds]


def _token_id(keys: Mapping[str, Any], key: str, n: int) -> int | None:
    value = keys.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < n):
        raise ValueError(f"GGUF: tokenizer.ggml.{key} {value!r} is outside the {n} tokens")
    return value


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; the first of equal ones."""
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    return vocabulary


def _given_merges(keys: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    merges = keys.get("merges")
    if merges is None:
        return None
    if not isinstance(merges, list):
        raise ValueError("GGUF: tokenizer.ggml.merges must be a list of strings")
    pairs = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not (left and separator and right) or " " in right:
            raise ValueError(f"GGUF: tokenizer.ggml.merges: {merge!r} is no pair")
        pairs.append((left, right))
    return pairs


def _pipeline(
    library: Any, tokens: Sequence[str], kinds: Sequence[int], merges: Any, **options: Any
) -> Any:
    """A BPE model with the tokens that are matched whole, before anything else."""
    try:
        bpe = library.models.BPE(vocab=_vocabulary(tokens), merges=merges, **options)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"GGUF: tokenizer.ggml.merges: {error}") from None
    pipeline = library.Tokenizer(bpe)
    whole = [
        library.AddedToken(token, normalized=False, special=kind != _USER)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER) and token
    ]
    pipeline.add_special_tokens([token for token in whole if token.special])
    pipeline.add_tokens([token for token in whole if not token.special])
    return pipeline


def _byte_level(
    library: Any, keys: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], pre: Any
) -> Any:
    if pre is None:
        warnings.warn(
            "GGUF: tokenizer.ggml.pre is missing, GPT-2's rule is taken: ids may be wrong",
            stacklevel=5,
        )
        pre = "default"
    if pre not in _SPLITS:
        raise ValueError(
            f"GGUF: tokenizer.ggml.pre {pre!r} is not supported; pass tokenizer=False and work "
            "with token ids"
        )
    merges = _given_merges(keys)
    if merges is None:
        raise ValueError("GGUF: tokenizer.ggml.merges is missing")
    pipeline = _pipeline(library, tokens, kinds, merges, ignore_merges=pre in _WHOLE_WORDS)
    steps, split = library.pre_tokenizers, _SPLITS[pre]
    before: list[Any] = []
    if pre == "smollm":
        before = [steps.Digits(individual_digits=True)]
    elif split is not None:
        before = [steps.Split(library.Regex(split), behavior="isolated")]
    level = steps.ByteLevel(add_prefix_space=False, use_regex=split is None)
    pipeline.pre_tokenizer = steps.Sequence([*before, level])
    pipeline.decoder = library.decoders.ByteLevel()
    return pipeline


def _sentencepiece(
    library: Any, keys: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], prefix: bool
) -> Any:
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if key in keys and not (isinstance(keys[key], bool) and not keys[key]):
            raise ValueError(f"GGUF: tokenizer.ggml.{key} is not supported")
    merges = _given_merges(keys)
    if merges is None:
        merges = _merges_by_score(keys, tokens, kinds)
    unknown = next((t for t, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    pipeline = _pipeline(
        library, tokens, kinds, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    pipeline.pre_tokenizer = library.pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    return pipeline


def _merges_by_score(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """All ways to make a token of two others, best score first.

    SentencePiece always joins the neighbours whose token scores best; as a list of merges
    this is the order of scores, of equal ones the longer left part first.
    """
    scores = keys.get("scores")
    if scores is None or not hasattr(scores, "__len__") or len(scores) != len(tokens):
        raise ValueError(f"GGUF: tokenizer.ggml.scores must have {len(tokens)} entries")
    parts = {
        token: i
        for token, i in _vocabulary(tokens).items()
        if kinds[i] in (_NORMAL, _USER, _UNUSED)
    }
    found = []
    for token, i in parts.items():
        score = float(scores[i])
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(parts[a], parts[b], a, b) for a, b in pairs if a in parts and b in parts]
        found += [(score, len(a), len(b), a, b) for _, _, a, b in sorted(known)]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(a, b) for _, _, _, a, b in found]
