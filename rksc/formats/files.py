"""Files from strangers: opened as data, bounded, and every fault a ValueError that names the file.

`reading` is the one place where whatever a reader or a library raises becomes that ValueError.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_JSON_LIMIT = 32 << 20  # bytes; the largest tokenizer_config.json that we know has 6 MB
_DIGITS = 20  # of an integer below 2**64
_MESSAGE = 400  # characters behind the name of the file

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

CUT_SHORT = "the file may be truncated, download it again"

# What else people pass for a model, by its first bytes.
_KINDS = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it; convert it to safetensors"),
    *(
        (bytes([0x80, n]), "a pickle, which is never read; convert it to safetensors")
        for n in range(6)
    ),
    (b"version https://git-lfs", "a Git LFS pointer; git lfs pull fetches the file"),
)


# ---- errors -------------------------------------------------------------------------------


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Whatever goes wrong inside is a ValueError that begins with `what`: a path, or a field.

    Ctrl-C, a lack of memory, a library that is not installed and warnings pass as they are. A
    panic of a library in Rust is no Exception, and caught all the same.
    """
    try:
        yield
    except (MemoryError, ImportError, Warning):
        raise
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"
        if not (panic or isinstance(error, Exception)):
            raise
        where, told = str(what), _told(error)
        if not told.startswith(where):
            told = f"{where}: {told}"
        told = plain(told, len(where) + _MESSAGE)
        if type(error) is ValueError and told == str(error):
            raise
        raise ValueError(told) from None if isinstance(error, ValueError) else error


def _told(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "nested too deep"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def plain(text: str, limit: int = _MESSAGE) -> str:
    """The text for a message: printable, on one line, its middle left out where it is long."""
    if len(text) > limit:
        text = f"{text[: limit - limit // 3]} ... {text[-(limit // 3) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def shown(value: object) -> str:
    """repr, short whatever a file put there."""
    return plain(_short.repr(value), 200)


# ---- files --------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, for reading; nothing that could make us wait."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with reading(path), open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        yield file


def map_file(path: Path) -> memoryview:
    """The whole file, mapped read-only; unmapped with the last view of it.

    ValueError where `path` is no regular file or is empty. A file that another process
    truncates while it is mapped ends this one with SIGBUS: replace files, don't rewrite them.
    """
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError("the file is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_bytes(path: Path, limit: int = _JSON_LIMIT) -> bytes:
    """All of a file; ValueError where it has more than `limit` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"more than {limit >> 20} MiB, which no file of this kind needs")
        return file.read(size)


def what_is(head: bytes) -> str | None:
    """What a file that begins so seems to be; None: nothing that we know."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file; pass the folder that holds it and config.json"
    return next((kind for magic, kind in _KINDS if head.startswith(magic)), None)


def contents(folder: Path) -> str:
    """The first few names in a folder, for a message."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry, _ in zip(entries, range(50), strict=False))
    more = ", ..." if len(names) > 8 else ""
    return plain(", ".join(names[:8]), 200) + more if names else "nothing"


# ---- JSON ---------------------------------------------------------------------------------


def read_json(path: Path, strict: bool = False) -> dict[str, Any]:
    """The object in a file; ValueError where there is no such file or it holds anything else."""
    with reading(path):
        return parse_json(read_bytes(path), strict)


def parse_json(data: bytes, strict: bool = False) -> dict[str, Any]:
    """The object that the text is.

    Integers of more than 20 digits are floats, so that a field that wants an integer says so.
    strict: they are errors, and so are repeated names.
    """
    hooks: dict[str, Any] = {"parse_int": _integer}
    if strict:
        hooks = {"parse_int": _strict_integer, "object_pairs_hook": _unique}
    try:
        value = json.loads(data.decode(), **hooks)
        if _SURROGATE.search(data):  # "\ud83d\ude00" is one character, "\ud83d" alone is none
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("malformed JSON: a lone surrogate") from None
    except ValueError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS else float(digits)


def _strict_integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number with {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{plain(key)} appears twice")
        result[key] = value
    return result
