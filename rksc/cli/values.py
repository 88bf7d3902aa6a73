"""Values of options: what argparse calls, so that its error names the option."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ..engine.arguments import parse_bytes, parse_dtype


def whole(least: int, most: int | None = None, shown: str = "") -> Callable[[str], int]:
    """A whole number within bounds. shown: the upper one as errors write it."""
    bounds = f"in {least} .. {shown or most}" if most else f"a whole number, at least {least}"

    def read(text: str) -> int:
        fits = re.fullmatch(r"\s*\d{1,20}\s*", text) and int(text) >= least
        if not fits or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text!r}")
        return int(text)

    return read


count, sample = whole(1), whole(2)
threads, port, seed = whole(1, 1024), whole(0, 65535), whole(0, 2**64 - 1, "2**64 - 1")


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


def dtype(text: str) -> str | None:
    try:
        return parse_dtype(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be float32 or bfloat16, got {text!r}") from None


def kv(text: str) -> int:
    """A number of bytes: 512MiB, 2GiB."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 512MiB or 2GiB, got {text!r}") from None


def problem(value: str) -> str:
    """A problem as given, the contents of the file that it names, or standard input ("-"). What
    begins like a path or ends like the name of a text, without a blank, and is not there, is no
    problem but a slip."""
    if value == "-":
        try:
            value = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise argparse.ArgumentTypeError(f"standard input: {error}") from None
    elif os.path.isdir(value):
        raise argparse.ArgumentTypeError(f"{value!r} is a folder")
    elif os.path.exists(value):
        try:
            value = Path(value).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{value!r}: {error}") from None
    elif re.fullmatch(r"(~|\.{0,2})/\S*|\S+\.(txt|md)", value):
        raise argparse.ArgumentTypeError(f"{value!r}: no such file")
    if not value.strip():
        raise argparse.ArgumentTypeError("the problem is empty")
    return value


def new_file(text: str) -> Path:
    """A file to write, refused before any work is done for it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return path


def folder(text: str) -> Path:
    """A folder to write to, which may be made."""
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a file, not a folder")
    return Path(text)
