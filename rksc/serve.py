"""`rksc serve`: OpenAI's HTTP API over one engine (extra `[serve]`: starlette and uvicorn).

One thread steps the engine and serves all requests in each step; handlers read bodies, queue
samples and wait for their tokens on the event loop. A connection that closes ends its samples, and
their KV is free with the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .clients._engine import Engine, Sample
from .clients._errors import RequestError, error_of
from .clients._wire import Chunks, Request, lean, read_chat, read_completion, response
from .clients.openai import model_card, no_model
from .results import Token

MAX_BODY = 8 << 20  # bytes of a request
MAX_WAITING = 4096  # samples in the queue; more is a 503
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Read = Callable[[Engine, Mapping[str, Any], str], Request]


class Worker:
    """The thread that steps the engine while there is something to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._unwanted: deque[Sample] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rksc-serve", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, samples: list[Sample]) -> None:
        if not self.alive:
            raise RuntimeError("the engine's thread has ended: start the server again")
        self.engine.submit(samples)
        self._wake.set()

    def abandon(self, samples: list[Sample]) -> None:
        """Cancel before the next step; does not wait."""
        self._unwanted.extend(samples)
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                self.engine.fail_all(error)
        self.engine.cancel_all()

    def _turn(self) -> None:
        self._wake.clear()
        while self._unwanted:
            self.engine.cancel([self._unwanted.popleft()])
        if self.engine.busy:
            self.engine.step()
        elif not self._unwanted and not self._stopping:
            self._wake.wait()


class Answer:
    """A request under way: its tokens as they come to the event loop."""

    def __init__(self, worker: Worker, request: Request) -> None:
        self.request = request
        self._worker = worker
        self._news: asyncio.Queue[tuple[Sample, Token | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(sample: Sample, token: Token | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has gone: nobody waits
                loop.call_soon_threadsafe(self._news.put_nowait, (sample, token))

        for sample in request.samples:
            sample.on_token = tell
        worker.submit(request.samples)

    async def tokens(self) -> AsyncGenerator[tuple[Sample, Token], None]:
        """Until all samples have ended; the error of one that failed. Left early, it cancels."""
        left = len(self.request.samples)
        try:
            while left:
                sample, token = await self._news.get()
                if token is None:
                    raise sample.error or RuntimeError("the server stops")
                left -= token.finish_reason is not None
                yield sample, token
        finally:
            if left:
                self._worker.abandon(self.request.samples)

    async def wait(self, connection: HTTPRequest) -> bool:
        """To the end; False when the connection closed before."""

        async def all_tokens() -> None:
            async with contextlib.aclosing(self.tokens()) as tokens:
                async for _ in tokens:
                    pass

        work = asyncio.create_task(all_tokens())
        watch = asyncio.create_task(_closed(connection))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            return work.done()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)


async def _closed(connection: HTTPRequest) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: Exception) -> JSONResponse:
    """The answer to a request that ends with this."""
    found = error_of(error)
    return JSONResponse({"error": found.body}, found.status_code)


async def _body(connection: HTTPRequest) -> Mapping[str, Any]:
    kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a web page may send anywhere is of other types
        raise RequestError(
            f"the content type must be application/json, got {kind or 'none'}",
            code="unsupported_content_type",
            status_code=415,
        )
    data = bytearray()
    async for piece in connection.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise RequestError(f"the body has more than {MAX_BODY} bytes", status_code=413)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


class Service:
    """The handlers, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker: Worker | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker = Worker(self._engine)
        try:
            yield
        finally:
            await run_in_threadpool(self._worker.stop)

    async def chat(self, connection: HTTPRequest) -> Response:
        return await self._complete(connection, read_chat)

    async def completion(self, connection: HTTPRequest) -> Response:
        return await self._complete(connection, read_completion)

    async def models(self, _: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model_card(self._engine.name)]})

    async def model(self, connection: HTTPRequest) -> Response:
        name, known = connection.path_params["model"], self._engine.name
        if name != known:
            return _refusal(no_model(name, known))
        return JSONResponse(model_card(known))

    async def health(self, _: HTTPRequest) -> Response:
        if self._worker is None or not self._worker.alive:
            return _refusal(RequestError("the engine's thread has ended", status_code=503))
        return JSONResponse({"status": "ok"})

    async def _complete(self, connection: HTTPRequest, read: Read) -> Response:
        try:
            body = await _body(connection)
            name = body.get("model") or self._engine.name
            request = await run_in_threadpool(read, self._engine, body, str(name))
            if self._engine.n_waiting + len(request.samples) > MAX_WAITING:
                waiting = f"{self._engine.n_waiting} samples wait already"
                raise RequestError(waiting, status_code=503)
            assert self._worker is not None
            answer = Answer(self._worker, request)
            if request.stream:
                return StreamingResponse(self._events(answer), media_type="text/event-stream")
            if not await answer.wait(connection):
                return Response(status_code=499)  # nobody reads it
            made = await run_in_threadpool(response, self._engine, request)
            return JSONResponse(lean(made))
        except Exception as error:
            return _refusal(error)

    async def _events(self, answer: Answer) -> AsyncIterator[str]:
        chunks = Chunks(self._engine, answer.request)
        async with contextlib.aclosing(answer.tokens()) as tokens:
            try:
                for chunk in await run_in_threadpool(list, chunks.opening()):
                    yield _event(chunk)
                async for sample, token in tokens:
                    for chunk in chunks.of(sample, token):
                        yield _event(chunk)
                for chunk in chunks.closing():
                    yield _event(chunk)
            except Exception as error:
                yield _event({"error": error_of(error).body})
        yield "data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(lean(value))}\n\n"


class Guard:
    """Refuses what a web page from elsewhere sends through its reader's browser: by a host name of
    its own that leads to this address, or across origins, which a browser lets pass and names."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        own = _host_name(f"//{host}")
        if self._hosts is not None and own not in self._hosts:
            return _refusal(RequestError(f"this server is not called {host!r}"))
        if origin is not None and (_host_name(origin) or origin) not in (own, *LOOPBACK):
            return _refusal(RequestError(f"web pages of {origin} are refused", status_code=403))
        return None


def _host_name(url: str) -> str | None:
    """In lower case, without port and brackets; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _no_route(connection: HTTPRequest, error: Exception) -> Response:
    """A path or a method that is not served."""
    assert isinstance(error, HTTPException)
    said = f"{connection.method} {connection.url.path}: {error.detail}"
    code = {404: "unknown_url", 405: "method_not_supported"}.get(error.status_code)
    found = RequestError(said, code=code, status_code=error.status_code)
    return JSONResponse({"error": found.body}, found.status_code, error.headers)


def application(engine: Engine, hosts: Collection[str] | None = None) -> Starlette:
    """The ASGI application. hosts: names under which it may be called; None: any."""
    service = Service(engine)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completion, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{model:path}", service.model),
            Route("/health", service.health),
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
        exception_handlers={HTTPException: _no_route},
        lifespan=service.lifespan,
    )


def serve(engine: Engine, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until Ctrl-C or SIGTERM; what still runs then gets three seconds. OSError: the
    address is taken."""
    import uvicorn

    hosts = LOOPBACK if host in LOOPBACK else None
    config = uvicorn.Config(
        application(engine, hosts), log_level="warning", timeout_graceful_shutdown=3
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=128) as listener:
        name = f"[{host}]" if ":" in host else host
        print(
            f"{engine.name} on http://{name}:{listener.getsockname()[1]}/v1 (Ctrl-C ends)",
            flush=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
