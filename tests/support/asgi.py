"""Requests to the server's application without a socket: what an ASGI server would hand it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rksc.clients._engine import Engine
from rksc.server.app import application


def ask(
    engine: Engine, path: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, Any]:
    """Status and answer of one request: JSON, or the list of a stream's events."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(k.encode(), v.encode()) for k, v in named.items()],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": data}]

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()  # the connection stays open
        return incoming.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def run() -> None:
        app = application(engine)
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 60)

    asyncio.run(run())
    text = b"".join(message.get("body", b"") for message in sent).decode()
    if text.startswith("data: "):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return sent[0]["status"], [json.loads(event) for event in events]
    return sent[0]["status"], json.loads(text)
