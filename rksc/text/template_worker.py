"""The process that renders chat templates: jinja2 as transformers sets it up, under limits.

A template comes with a model, so from strangers. jinja2's sandbox keeps it from the machine; that
it ends, and in how much memory, only a process of its own can promise. template.py starts this file
as a script, with the folders of jinja2 and markupsafe as arguments, and talks to it over its
standard input, a socket. Nothing of rksc is imported here.

A request is a frame (length, then bytes) of marshal: template, variables, the time for
strftime_now, seconds of processor time. A timer's signal ends the process where these are over. The
reply is a frame whose first byte is one of the kinds below and whose rest is UTF-8.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

MAX_BYTES = 256 << 20  # address space beyond what the process has when it starts
MAX_REQUEST = 64 << 20  # bytes of a template and its variables
MAX_CHARACTERS = 16 << 20  # of a rendered text
MAX_MESSAGE = 4000  # characters of an error's text
_NO_MEMORY = f"takes more than {MAX_BYTES >> 20} MiB of memory".encode()

READY, TEXT, REFUSED, FAULT, LIMIT, MISSING = (kind.encode() for kind in "+trfl-")
"""+ ready for requests; t the text; r the template's own raise_exception; f a fault of the
template; l a limit, after which the process is not used again; - jinja2 is missing or too old."""

LENGTH = struct.Struct("<Q")

# What loads modules and codecs on its first use: that has to be while files can be opened.
_WARM = "{% set x = namespace(a='\\n') %}{{ [x.a, 1.5] | tojson }}{{ strftime_now('%d %b %Y') }}"

Now = tuple[int, int, int, int, int, int, int]


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """The template in an environment with the filters and globals that templates expect."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote: a block of its own scope."""

        tags = {"generation"}  # noqa: RUF012 (the base class's own way)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Callable[[], str]) -> str:
            return caller()

    class Dict:
        """`dict` without the attributes of a class."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """`namespace` that takes no name with an underscore in front."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, given = args[0], dict(*args[1:], **kwargs)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def refuse(message: object) -> None:
        raise Refused(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment.from_string(source)


class Refused(Exception):
    """The template called raise_exception."""


def render(source: str, variables: dict[str, Any], now: Now) -> tuple[bytes, bytes]:
    """The kind of the reply and its text. Whatever a template raises is a reply, too."""
    try:
        clock = {"strftime_now": lambda layout: datetime(*now).strftime(layout)}
        text = compiled(source).render(clock | variables)
        if len(text) > MAX_CHARACTERS:
            return LIMIT, f"writes more than {MAX_CHARACTERS:,} characters".encode()
        return TEXT, text.encode()
    except Refused as error:
        return REFUSED, _shown(str(error))
    except UnicodeEncodeError:
        return FAULT, b"holds half a character (a lone surrogate)"
    except MemoryError:
        compiled.cache_clear()
        return LIMIT, _NO_MEMORY
    except RecursionError:
        return FAULT, b"nests or calls itself too deeply"
    except Exception as error:
        return FAULT, _shown(_told(error))


def _told(error: Exception) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    own = isinstance(error, TemplateError)
    return str(error) if own else f"{type(error).__name__}: {error}"


def _shown(text: str) -> bytes:
    cut = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
    return cut.encode(errors="backslashreplace")


# ---- the process -------------------------------------------------------------------------------


def receive(end: socket.socket, n: int) -> bytearray:
    """Exactly n bytes; EOFError where the other side is gone."""
    data = bytearray(n)
    at = 0
    while at < n:
        got = end.recv_into(memoryview(data)[at:])
        if not got:
            raise EOFError
        at += got
    return data


def send(end: socket.socket, *parts: bytes) -> None:
    """A frame of these parts."""
    end.sendall(b"".join((LENGTH.pack(sum(map(len, parts))), *parts)))


def _main(folders: list[str]) -> None:
    end = socket.socket(fileno=os.dup(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.path += folders
    try:
        for late in ("jinja2.constants", "jinja2.debug", "pprint", "textwrap"):
            import_module(late)
        import jinja2

        version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
        if version < (3, 1, 6):
            raise ImportError(f"this is {jinja2.__version__}, whose sandbox can be left")
    except ImportError as error:
        send(end, MISSING, str(error).encode())
        return
    render(_WARM, {}, (1, 1, 1, 0, 0, 0, 0))
    _limit()
    send(end, READY)
    with suppress(EOFError, ConnectionError):
        while True:
            _serve(end)


def _serve(end: socket.socket) -> None:
    (n,) = LENGTH.unpack(receive(end, LENGTH.size))
    request = receive(end, n)
    try:
        source, variables, now, seconds = marshal.loads(request)
    except MemoryError:
        send(end, LIMIT, _NO_MEMORY)
        return
    del request
    signal.setitimer(signal.ITIMER_PROF, seconds)
    kind, text = render(source, variables, now)
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(end, kind, text)


def _limit() -> None:
    """No more memory than the limit, and no file or connection that is not open yet."""
    used = 0
    with suppress(OSError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for what, most in (
        (resource.RLIMIT_AS, used + MAX_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(OSError, ValueError):  # a system without this limit
            resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    _main(sys.argv[1:])
