"""A server over real sockets, in a thread of the test's process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rksc.clients._engine import Engine
from rksc.server.access import Access
from rksc.server.app import application, server_config


class Server:
    """The application under uvicorn in a thread of this process."""

    def __init__(self, engine: Engine, access: Access | None = None) -> None:
        import uvicorn

        self.engine = engine
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        config = server_config(application(engine, access or Access()))
        config.timeout_graceful_shutdown = 1
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)

    @property
    def connections(self) -> set[Any]:
        """Those that are open."""
        return self._server.server_state.connections

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._listener.close()
        assert not self._thread.is_alive()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, json.loads(text) if text[:1] == b"{" else {"text": text.decode()}

    def post(self, **fields: Any) -> http.client.HTTPConnection:
        """A chat whose reply is still to come."""
        connection = self.connect()
        kind = {"Content-Type": "application/json; charset=utf-8"}
        connection.request("POST", "/v1/chat/completions", json.dumps(fields), kind)
        return connection

    def chat(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        return self.request("POST", "/v1/chat/completions", fields)


def events(reply: http.client.HTTPResponse) -> Iterator[Any]:
    """What a stream brings, its end included."""
    for line in reply:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield data if data == b"[DONE]" else json.loads(data)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def slowly(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Steps take at least so long: hundreds of them outlast what a test does meanwhile."""
    step = engine.session.step
    monkeypatch.setattr(engine.session, "step", lambda: (time.sleep(seconds), step())[1])
