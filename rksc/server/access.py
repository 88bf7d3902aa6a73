"""Who may use `rksc serve`: hosts by which it is called, origins of web pages, API keys.

A web page can make its reader's browser send requests here: across origins, which the browser
names, or by a host name of its own that it has led to this address. So names are checked on every
address, and whoever may come from elsewhere needs a key.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from ..clients._errors import RequestError
from ..clients._fields import shown

OPEN = {"/health"}  # paths that need no key


@dataclass(frozen=True)
class Access:
    """hosts: names beyond those of the loopback; keys: one of them is needed, none: nobody is asked
    for one. ValueError tells what is no name of a host, or no key."""

    hosts: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", frozenset(map(_host, self.hosts)))
        for key in self.keys:
            if not re.fullmatch(r"[!-~]+", key):
                raise ValueError("an API key must be printable ASCII characters, without spaces")

    def at(self, host: str, *, no_key: bool = False) -> Access:
        """The same for a server that listens on `host`, which is one of its names. ValueError: it
        can be reached from elsewhere and asks for no key."""
        if no_key and self.keys:
            raise ValueError(
                "--no-api-key and an API key contradict each other: leave one of them out"
            )
        if not (self.keys or no_key or is_loopback(host)):
            raise ValueError(
                f"host {host!r} can be reached from other machines: set an API key (RKSC_API_KEY "
                "or --api-key), or let everybody in (--no-api-key)"
            )
        return Access(self.hosts | ({host} - {"", "0.0.0.0", "::"}), self.keys)

    def check(self, path: str, headers: Headers) -> None:
        """RequestError: the request is refused."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._knows(_host_of(host)):
            raise RequestError(
                f"the host {shown(host)} is not allowed here: start the server with --allowed-host "
                "and its name",
                code="host_not_allowed",
            )
        if origin is not None and not self._knows(_host_of(origin)):
            raise RequestError(
                f"web pages of {shown(origin)} may not use this server: start it with "
                "--allowed-host and their host",
                code="origin_not_allowed",
                status_code=403,
            )
        if self.keys and path not in OPEN:
            self._check_key(headers.get("authorization", ""))

    def _knows(self, name: str | None) -> bool:
        return name is not None and (name in self.hosts or is_loopback(name))

    def _check_key(self, authorization: str) -> None:
        scheme, _, given = authorization.partition(" ")
        found = [  # all of them, so that the time tells nothing
            hmac.compare_digest(key.encode(), given.strip().encode()) for key in self.keys
        ]
        if scheme.lower() != "bearer" or not any(found):
            raise RequestError(
                ("this API key is not one of the server's" if given else "an API key is needed")
                + ": send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                status_code=401,
            )


def is_loopback(name: str) -> bool:
    """Whether a name or an address means this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _host(name: str) -> str:
    """A host's name as it is compared: in small letters, an address without brackets."""
    bare = name.lower().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        if re.fullmatch(r"[\w-]+(\.[\w-]+)*", bare):
            return bare
        raise ValueError(
            f"{name!r} is not a host name or an address (no port, no wildcards)"
        ) from None


def _host_of(text: str) -> str | None:
    """The host of a header Host or Origin; None where it is not of that form."""
    found = re.fullmatch(r"(?:[a-z][a-z0-9+.-]*://)?(\[[^\[\]]*\]|[^:/]*)(?::\d*)?", text, re.I)
    try:
        return _host(found[1]) if found else None
    except ValueError:
        return None
