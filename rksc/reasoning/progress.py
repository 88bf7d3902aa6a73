"""A progress bar for long work, where tqdm is installed (extra [hf]).

Shown on a terminal only, unless asked for; or a line for each step, for a log.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any, Literal, TextIO

Shown = bool | Literal["lines"] | None


class Progress:
    """Phases of a piece of work, one bar at a time, on stderr.

    enabled: None shows it when the stream is a terminal. "lines": a bar on a terminal, elsewhere
    a line whenever something is done.
    """

    def __init__(self, enabled: Shown = None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        terminal = self._stream.isatty()
        self._lines = enabled == "lines" and not terminal
        wanted = terminal if enabled is None else bool(enabled)
        self.enabled = wanted and (self._lines or importlib.util.find_spec("tqdm") is not None)
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def phase(self, name: str, total: int | None = None, unit: str = "tok") -> None:
        """Begin a phase of `total` units (None: not known); ends the one before."""
        self.close()
        if self.enabled:
            self._bar = (_Log if self._lines else _tqdm)(name, total, unit, self._stream)

    def advance(self, n: int) -> None:
        """n more units are done."""
        if self._bar is not None:
            self._bar.update(n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Log:
    """`name  12/34 item  56 s`, a line each time."""

    def __init__(self, name: str, total: int | None, unit: str, stream: TextIO) -> None:
        self._name, self._unit, self._stream = name, unit, stream
        self._of = "" if total is None else f"/{total}"
        self._done, self._start = 0, time.monotonic()

    def update(self, n: int) -> None:
        self._done += n
        seconds = time.monotonic() - self._start
        done = f"{self._done}{self._of} {self._unit}"
        print(f"{self._name}  {done}  {seconds:.0f} s", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is redrawn, nothing to take away."""


def _tqdm(name: str, total: int | None, unit: str, stream: TextIO) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    return tqdm(desc=name, total=total, unit=unit, leave=False, file=stream, dynamic_ncols=True)
