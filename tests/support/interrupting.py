"""Signals before any instruction of a call: what opcode_signals.c does, for tests.

A signal that comes at such a moment is what Ctrl-C is; the interpreter itself decides where its
handler runs. `moments` goes over all of them, so nothing depends on time.
"""

from __future__ import annotations

import ctypes as c
import gc
import hashlib
import os
import shlex
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support import native

SOURCE = Path(__file__).with_suffix("").parent / "opcode_signals.c"


@cache
def library() -> c.PyDLL:
    """opcode_signals.c, compiled for this Python."""
    include = sysconfig.get_path("include")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command = [*shlex.split(os.environ.get("CC", "cc")), *flags, f"-I{include}", str(SOURCE)]
    key = hashlib.sha256(SOURCE.read_bytes() + "\0".join(command).encode()).hexdigest()[:16]
    target = native.BUILD / f"opcode_signals-{key}.so"
    if not target.exists():
        native.BUILD.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        done = subprocess.run(
            [*command, "-o", str(part)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        part.replace(target)
    loaded = c.PyDLL(str(target))
    loaded.signals_begin.argtypes = [c.c_long, c.c_long, c.c_long, c.c_int, c.py_object]
    loaded.signals_begin.restype = None
    loaded.signals_end.argtypes = []
    loaded.signals_end.restype = c.c_long
    return loaded


@dataclass
class Attempt:
    """A call during which signals came. results: (what it returned,), or () where it raised."""

    results: list[Any] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    fired: int = 0


@contextmanager
def handled_by(handler: Any, number: int = signal.SIGINT) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def attempt(
    call: Callable[[], Any],
    n: int,
    *,
    times: int = 1,
    gap: int = 1,
    raises: type[BaseException] = KeyboardInterrupt,
    number: int = signal.SIGINT,
) -> Attempt:
    """Call it; a signal comes before the n-th instruction of the call, and `times` in all."""
    begin, end = library().signals_begin, library().signals_end
    made = Attempt()
    collected = gc.isenabled()
    gc.disable()  # what a callback of the collector raises is lost: that is Python's
    try:
        try:
            begin(n, gap, times, number, attempt.__code__)
            made.results.append(call())
            end()
        except raises as error:
            made.errors.append(error)  # with it, the frames of the call live on
            end()
    except raises as error:  # one more may have been on its way
        made.errors.append(error)
    made.fired = end()
    if collected:
        gc.enable()
    return made


def moments(
    prepare: Callable[[], Callable[[], Any]], *, first: int = 1, every: int = 1, **options: Any
) -> Iterator[Attempt]:
    """An attempt for each moment of the call that `prepare` gets ready, until it is through."""
    n = first
    while True:
        made = attempt(prepare(), n, **options)
        if not made.fired:
            return
        yield made
        made.results.clear()
        made.errors.clear()  # their frames lead back here
        n += every
