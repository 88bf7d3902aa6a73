"""Special tokens and chat templates as a model's files name them, read as transformers does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..formats.files import read_bytes, read_json, reading, shown
from .template import ChatTemplate

_USUAL = {
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
}  # fmt: skip
_GGUF_NAMES = {  # as the keys spell them
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token",
    "padding": "pad_token", "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip


class Named(NamedTuple):
    """The text of a token (a list of texts for additional_special_tokens) and who says so."""

    value: Any
    file: Path


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Named]:
    """Special tokens by the names that chat templates know them by. config: what
    tokenizer_config.json holds.

    That file names them. special_tokens_map.json goes before it, but is not read where config has
    added_tokens_decoder: then it is a copy for older versions. Other names than the seven usual
    ones (image_token, or what extra_special_tokens holds) go the other way round. ValueError names
    the file and the field that is no token.
    """
    sources = {folder / "tokenizer_config.json": config}
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and path.is_file():
        sources[path] = read_json(path)
    found: dict[str, Named] = {}
    for file, values in sources.items():
        with reading(file):
            for name in _USUAL & values.keys():
                found[name] = Named(_text(name, values[name]), file)
            for name, value in _unusual(values).items():
                found.setdefault(name, Named(_text(name, value), file))
            for name in ("extra_special_tokens", "additional_special_tokens"):
                if isinstance(values.get(name), list):
                    texts = [_text(name, value) for value in values[name]]
                    found["additional_special_tokens"] = Named(texts, file)
    return {name: named for name, named in found.items() if named.value}


def eos_tokens(folder: Path, config: Mapping[str, Any]) -> list[Named]:
    """The eos_token of each file: the name is of one of them, the end of a turn are both."""
    map_ = folder / "special_tokens_map.json"
    sources = {folder / "tokenizer_config.json": config}
    if map_.is_file():
        sources[map_] = read_json(map_)
    found = []
    for file, values in sources.items():
        with reading(file):
            found.append(Named(_text("eos_token", values.get("eos_token")), file))
    return [eos for eos in found if eos.value]


def _unusual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens under names of a model's own; add_bos_token and num_image_token are none."""
    groups = (
        values,
        *(values.get(f"{kind}_special_tokens") for kind in ("extra", "model_specific")),
    )
    return {
        name: value
        for group in groups
        if isinstance(group, Mapping)
        for name, value in group.items()
        if (group is not values or name.endswith("_token"))
        and name not in _USUAL
        and isinstance(value, (str, dict))
    }


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or {} where there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _text(name: str, value: Any) -> str | None:
    """Of a token that is written as a text, or as a dict with the text as its content."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} must be a token's text, got {shown(value)}")
    return text


def gguf_named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The same of a GGUF, whose keys name ids."""
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _GGUF_NAMES.items()
    }
    return {
        name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)
    }


# ---- chat templates ----------------------------------------------------------------------------


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Chat templates by name; "default" is the one that is used unless another is asked for.

    chat_template.jinja and additional_chat_templates/NAME.jinja, or else config's.
    """
    paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found = {path.stem: _read_template(path) for path in paths}
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = _read_template(path)
    if found:
        return found
    given = config.get("chat_template")
    pairs: list[tuple[Any, Any]] = [("default", given)]
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list):
        pairs = [(t.get("name"), t.get("template")) for t in given if isinstance(t, dict)]
    file = str(folder / "tokenizer_config.json")
    return {
        name: ChatTemplate(text, file)
        for name, text in pairs
        if isinstance(name, str) and isinstance(text, str)
    }


def _read_template(path: Path) -> ChatTemplate:
    with reading(path):
        return ChatTemplate(read_bytes(path).decode(), str(path))


def gguf_templates(metadata: Mapping[str, Any], file: str) -> dict[str, ChatTemplate]:
    """Those of a GGUF: tokenizer.chat_template, and tokenizer.chat_template.NAME."""
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).removeprefix(".") or "default": ChatTemplate(text, file)
        for name, text in metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)
    }
