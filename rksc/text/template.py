"""Chat templates in a process of their own: one that takes too long or too much ends there.

The process is started by the first render and kept; a render then costs what jinja2 costs and two
messages over a socket. It is a new interpreter, no fork: a parent with threads, CUDA or gigabytes
of mapped weights makes no difference. template_worker.py is what runs there.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from . import template_worker as worker

SECONDS = 2.0  # of processor time for one render, compilation included
_PATIENCE = 60.0  # seconds by the clock, where a process neither computes nor answers
_MAX_TEMPLATE = 1 << 20  # characters
_MAX_PROCESSES = 4  # that render at once; more threads wait


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a template and the file that it is from, for errors."""

    text: str
    file: str = ""

    def fault(self, what: str) -> ValueError:
        return ValueError(f"{self.file}: chat template: {what}".removeprefix(": "))


def render_template(template: ChatTemplate, variables: dict[str, Any]) -> str:
    """The text that a template makes of variables (plain data: dicts, lists, texts, numbers).

    Any thread may call it. ValueError: what the template raises by raise_exception, or what is
    wrong with it, its limits of time, memory and length included. ImportError: no jinja2.
    """
    if len(template.text) > _MAX_TEMPLATE:
        raise template.fault(f"is longer than {_MAX_TEMPLATE:,} characters")
    now = datetime.now()
    moment = (now.year, now.month, now.day, now.hour, now.minute, now.second, now.microsecond)
    request = marshal.dumps((template.text, variables, moment, SECONDS))
    if len(request) > worker.MAX_REQUEST:
        raise template.fault(f"is given more than {worker.MAX_REQUEST >> 20} MiB")
    kind, text = _pool.ask(template, request)
    if kind == worker.REFUSED:  # what the messages are to blame for
        raise ValueError(f"chat template: {text}")
    if kind != worker.TEXT:
        raise template.fault(text)
    return text


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError("chat templates need jinja2: pip install 'rksc[hf]'")
    return str(Path(found.origin).parents[1])


class _Process:
    """A running template_worker.py and this side of the socket to it."""

    def __init__(self, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._end, self._process = end, process

    @classmethod
    def start(cls) -> _Process:
        folders = [_folder_of(name) for name in ("jinja2", "markupsafe")]
        kept = {"LD_LIBRARY_PATH"} & os.environ.keys()  # no secrets, no preloaded library
        mine, theirs = socket.socketpair()
        mine.settimeout(_PATIENCE)
        process = None
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", worker.__file__, *folders],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={name: os.environ[name] for name in kept},
                    start_new_session=True,  # Ctrl-C is for this process alone
                )
            started = cls(mine, process)
            kind, text = started._reply()
            if kind != worker.READY:
                raise ImportError(
                    f"chat templates need jinja2>=3.1.6 (pip install 'rksc[hf]'): {text}"
                )
        except BaseException as error:
            mine.close()
            if process is not None:
                process.kill()
                process.wait()
            if not isinstance(error, (EOFError, OSError)):
                raise
            raise RuntimeError(
                "chat templates run in a process of their own, which sys.executable "
                f"({sys.executable!r}) does not start: {error or 'it ends at once'}"
            ) from None
        return started

    def ask(self, request: bytes) -> tuple[bytes, str]:
        """Kind and text of the reply. EOFError or OSError: it has ended or says nothing."""
        worker.send(self._end, request)
        return self._reply()

    def _reply(self) -> tuple[bytes, str]:
        (n,) = worker.LENGTH.unpack(worker.receive(self._end, worker.LENGTH.size))
        if not 0 < n <= 4 * worker.MAX_CHARACTERS + 1:
            raise EOFError
        reply = worker.receive(self._end, n)
        return bytes(reply[:1]), reply[1:].decode()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, grace: float = 0.0) -> int | None:
        """End it. What it ended with (minus the signal) if it has by itself, at once or within
        the grace in seconds."""
        self._end.close()
        ended: int | None = None
        with suppress(subprocess.TimeoutExpired):
            ended = self._process.wait(grace)
        self._process.kill()
        self._process.wait()
        return ended

    def leave(self) -> None:
        """In a forked child: the process is the parent's."""
        self._end.close()
        self._process.returncode = 0


class _Pool:
    """Processes that wait for work. What a thread has taken out is its own until it is put back."""

    def __init__(self) -> None:
        self._empty()

    def _empty(self) -> None:
        self._idle: list[_Process] = []
        # Locks, not a semaphore: Ctrl-C inside of that, which is Python, would lose a place.
        self._places = [threading.Lock() for _ in range(_MAX_PROCESSES)]
        self._turns = itertools.count()

    def _place(self) -> threading.Lock:
        """A free one, or one to wait for."""
        waiting = self._places[next(self._turns) % len(self._places)]
        return next((place for place in self._places if not place.locked()), waiting)

    def ask(self, template: ChatTemplate, request: bytes) -> tuple[bytes, str]:
        with self._place():
            process = self._take()
            try:
                kind, text = process.ask(request)
            except (EOFError, OSError) as error:
                raise template.fault(_reason(process.end(1.0), error)) from None
            except BaseException:  # Ctrl-C: the reply is still to come
                process.end()
                raise
            if kind == worker.LIMIT:
                process.end()
            else:
                self._idle.append(process)
        return kind, text

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.end()
        return _Process.start()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def after_fork(self) -> None:
        """In the child, where the semaphore may be a thread's that is not there."""
        for process in self._idle:
            process.leave()
        self._empty()


def _reason(ended: int | None, error: Exception) -> str:
    if ended == -signal.SIGPROF:
        return f"takes more than {SECONDS:g} s of processor time"
    if isinstance(error, TimeoutError):
        return f"is not done after {_PATIENCE:g} s"
    return f"ends the process that renders it (status {ended})"


_pool = _Pool()
atexit.register(_pool.close)
os.register_at_fork(after_in_child=_pool.after_fork)
