"""`rksc serve`: OpenAI's HTTP API over one engine (extra `[serve]`).

One thread steps the engine and serves all requests in each step. The event loop moves bytes and
nothing else: bodies are read into requests, and answers written, in threads of their own, large
ones one at a time, so that no request holds up another one or `/health`. A connection that closes,
or that nobody reads from, ends its samples, and their KV is free with the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..clients._engine import Engine, Sample
from ..clients._errors import RequestError, error_of
from ..clients._wire import Chunks, Request, read_chat, read_completion, read_model
from ..clients.openai import model_card, no_model
from ..engine.results import Token
from .access import Access
from .json_bodies import dumps, read_json, written
from .metering import Meter, Metered, log, remember

MAX_BODY = 4 << 20  # bytes of a request
MAX_WAITING = 4096  # samples in the queue; more is a 503
LARGE = 64 << 10  # bytes: such bodies are read one at a time
MAX_LARGE = 16  # of these that wait; more is a 503
MAX_UNREAD = 1 << 14  # tokens of a stream that wait for its reader; more ends it
HEADER_SECONDS = 30.0  # until the headers of a request have come
BODY_SECONDS = 60.0  # until a body has come
WRITE_SECONDS = 60.0  # until the reader of a stream takes a piece of it
GRACE_SECONDS = 3

Read = Callable[[Engine, Mapping[str, Any], str], Request]
T = TypeVar("T")


class Worker:
    """The thread that steps the engine while there is something to do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._unwanted: deque[Sample] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._lock = threading.Lock()  # of _ended
        self._ended = False  # nothing that is submitted would run
        self._thread = threading.Thread(target=self._run, name="rksc-serve", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, samples: list[Sample]) -> None:
        with self._lock:
            if self._ended:
                raise RequestError("the server is stopping", status_code=503)
            if not self.alive:
                raise RuntimeError("the engine's thread has ended: restart the server")
            self.engine.submit(samples)
        self._wake.set()

    def abandon(self, samples: list[Sample]) -> None:
        """Cancel before the next step; does not wait."""
        self._unwanted.extend(samples)
        self._wake.set()

    def end(self) -> None:
        """After the present step; does not wait."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                self.engine.fail_all(error)
        with self._lock:
            self._ended = True
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
        self._news: deque[tuple[Sample, Token | None]] = deque()
        self._came = asyncio.Event()
        self._told = False  # the loop knows that something has come
        self._loop = asyncio.get_running_loop()
        for sample in request.samples:
            sample.on_token = self._tell
        worker.submit(request.samples)

    def _tell(self, sample: Sample, token: Token | None) -> None:
        """From the engine's thread."""
        if token is not None and token.finish_reason is None and not self.request.stream:
            return  # the whole answer is written at the end
        unread = len(self._news) >= MAX_UNREAD
        self._news.append((sample, None if unread else token))
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop has gone: nobody waits
                self._loop.call_soon_threadsafe(self._came.set)
        if unread:
            raise RequestError(
                f"the client does not read the answer: {MAX_UNREAD} tokens are waiting"
            )

    async def tokens(self) -> AsyncGenerator[list[tuple[Sample, Token]], None]:
        """What has come, until all samples have ended; the error of one that failed."""
        left = len(self.request.samples)
        while left:
            await self._came.wait()
            self._came.clear()
            self._told = False
            news: list[tuple[Sample, Token]] = []
            while self._news:
                sample, token = self._news.popleft()
                if token is None:
                    if news:
                        yield news
                    raise sample.error or RequestError("the server is stopping", status_code=503)
                left -= token.finish_reason is not None
                news.append((sample, token))
            yield news

    async def end(self) -> None:
        async for _ in self.tokens():
            pass

    def close(self) -> None:
        """Cancel what has not ended."""
        left = [sample for sample in self.request.samples if not sample.ended]
        if left:
            self._worker.abandon(left)


class Threads:
    """Threads for what would hold up the event loop: small work side by side, large work one piece
    after the other, so that it never holds up the small."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(4, "rksc-small")
        self._large = ThreadPoolExecutor(1, "rksc-large")
        self.n_large = 0  # pieces of large work that wait or run

    async def run(self, large: bool, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        if not large:
            return await loop.run_in_executor(self._small, work)
        self.n_large += 1
        try:
            return await loop.run_in_executor(self._large, work)
        finally:
            self.n_large -= 1

    def close(self) -> None:
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)


async def _within(seconds: float, work: Awaitable[T]) -> T:
    """The result of the work, or TimeoutError. (Before Python 3.12 asyncio.wait_for loses a
    cancellation that comes in the moment in which the work ends.)"""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


async def _unless_closed(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work; False when the connection closed before its end, and then it is cancelled."""

    async def closed() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(closed())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream:
    """A response of pieces as they come. It ends when its reader goes, or does not take a piece
    for a while: then the connection is closed. close: called when it ends."""

    _HEADERS = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    )

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._pieces, self._close = pieces, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_closed(receive, self._write(send))
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._HEADERS})
        async for piece in self._pieces:
            body = {"type": "http.response.body", "body": piece, "more_body": True}
            try:
                await _within(WRITE_SECONDS, send(body))
            except TimeoutError:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _refusal(error: Exception) -> JSONResponse:
    """The answer to a request that ends with this."""
    found = error_of(error)
    if found.status_code == 500:
        log.error("a request failed", exc_info=error)
    headers = {"WWW-Authenticate": "Bearer"} if found.status_code == 401 else None
    return JSONResponse({"error": found.body}, found.status_code, headers)


async def _body(connection: HTTPRequest) -> bytes:
    kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a web page may send anywhere is of other types
        raise RequestError(
            "the content type must be application/json (curl: -H 'Content-Type: "
            f"application/json'), got {kind or 'none'}",
            code="unsupported_content_type",
            status_code=415,
        )
    data = bytearray()
    async for piece in connection.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise RequestError(f"the body has more than {MAX_BODY} bytes", status_code=413)
    return bytes(data)


class Service:
    """The handlers, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker: Worker | None = None
        self._threads = Threads()
        self.meter = Meter(engine)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker = Worker(self._engine)
        await run_in_threadpool(self._warm_up)
        try:
            yield
        finally:
            await run_in_threadpool(self._worker.join)
            self._threads.close()

    def _warm_up(self) -> None:
        """What the first chat would build: it takes seconds, and holds up everybody."""
        special = next(iter(self._engine.special.values()), b"").decode()
        with contextlib.suppress(ValueError, ImportError):  # a model without chats
            for text in ("a", f"a {special}"):
                read_chat(self._engine, {"messages": [{"role": "user", "content": text}]}, "")

    def end(self) -> None:
        """Tell whoever still waits for an answer that there will be none."""
        if self._worker is not None:
            self._worker.end()

    async def chat(self, connection: HTTPRequest) -> Response | EventStream:
        return await self._complete(connection, read_chat)

    async def completion(self, connection: HTTPRequest) -> Response | EventStream:
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

    async def metrics(self, _: HTTPRequest) -> Response:
        figures = await self._threads.run(False, self.meter.figures)
        return Response(figures, media_type=CONTENT_TYPE_LATEST)

    async def _complete(self, connection: HTTPRequest, read: Read) -> Response | EventStream:
        try:
            request = await self._request(connection, read)
            remember(connection.scope, request)
            assert self._worker is not None
            answer = Answer(self._worker, request)
            if request.stream:
                return EventStream(self._events(answer), answer.close)
            try:
                if not await _unless_closed(connection.receive, answer.end()):
                    return Response(status_code=499)  # nobody reads it
            finally:
                answer.close()
            text = await self._threads.run(
                request.costly, lambda: b"".join(written(self._engine, request))
            )
            return Response(text, media_type="application/json")
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return _refusal(error)

    async def _request(self, connection: HTTPRequest, read: Read) -> Request:
        """What the connection asks for, if there is room in the queue."""
        try:
            data = await _within(BODY_SECONDS, _body(connection))
        except TimeoutError:
            said = f"the body has not come within {BODY_SECONDS:g} s"
            raise RequestError(said, status_code=408) from None

        def work() -> Request:
            body = read_json(data)
            return read(self._engine, body, read_model(body, self._engine.name))

        large = len(data) > LARGE
        if large and self._threads.n_large >= MAX_LARGE:
            raise RequestError(
                f"{MAX_LARGE} large requests are waiting already: try again later", status_code=503
            )
        request = await self._threads.run(large, work)
        waiting = self._engine.n_waiting
        if waiting + len(request.samples) > MAX_WAITING:
            raise RequestError(
                f"{waiting} samples are waiting already: try again later", status_code=503
            )
        return request

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        chunks = Chunks(self._engine, answer.request)
        try:
            yield await self._threads.run(answer.request.costly, lambda: _events(chunks.opening()))
            async for news in answer.tokens():
                made = [chunk for sample, token in news for chunk in chunks.of(sample, token)]
                if made:
                    yield _events(made)
            yield _events(chunks.closing())
        except Exception as error:
            yield _events([{"error": error_of(error).body}])
        yield b"data: [DONE]\n\n"


def _events(values: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + dumps(value) + b"\n\n" for value in values)


class Guard:
    """ASGI middleware: lets in what the access allows."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                self._access.check(scope["path"], Headers(scope=scope))
            except RequestError as error:
                app = _refusal(error)
        await app(scope, receive, send)


def _no_route(connection: HTTPRequest, error: Exception) -> Response:
    """A path or a method that is not served."""
    assert isinstance(error, HTTPException)
    said = f"{connection.method} {connection.url.path}: {error.detail}"
    if error.status_code == 404:
        paths = (route.path for route in connection.app.routes if "{" not in route.path)
        said += f"; there are {', '.join(paths)}"
    elif error.status_code == 405 and error.headers:
        said += f"; use {error.headers['Allow']}"
    code = {404: "unknown_url", 405: "method_not_supported"}.get(error.status_code)
    found = RequestError(said, code=code, status_code=error.status_code)
    return JSONResponse({"error": found.body}, found.status_code, error.headers)


def application(engine: Engine, access: Access | None = None) -> Starlette:
    """The ASGI application. access: who may use it, by what host and with what key (`serve` always
    gives one); None: everybody whom the server or the application around it lets in."""
    service = Service(engine)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completion, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{model:path}", service.model),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        middleware=[
            Middleware(Metered, meter=service.meter),
            *([Middleware(Guard, access=access)] if access else []),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=service.lifespan,
    )
    app.state.end = service.end
    return app


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """A connection over which nothing more goes once its client has closed it. asyncio would first
    wait until what had been written is read, and the client may never read it: then the request
    would run on for nobody."""

    _patience: asyncio.TimerHandle | None = None

    def eof_received(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Refused where there are as many as files allow: a process that has none to spare cannot
        accept, and says so without end."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Who begins a request has a while for its headers."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None


def most_connections() -> int:
    """What the process' limit of open files leaves for connections, some kept for itself."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64, 16)


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=_Connection,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS + 2,
    )


class _Server(uvicorn.Server):
    """When it is told to end, it ends what still runs after some seconds."""

    def __init__(self, config: uvicorn.Config, end: Callable[[], None]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end)
        await super().shutdown(sockets)


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    access: Access | None = None,
    *,
    no_key: bool = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; what still runs then has GRACE_SECONDS to end.

    access: who may use it. ValueError: the address can be reached from other machines, and there
    is neither a key nor `no_key`, or the host has no address. OSError: the port is in use.
    """
    access = (access or Access()).at(host, no_key=no_key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if isinstance(error.__context__, socket.gaierror):
            raise ValueError(
                f"host {host!r} has no address; 127.0.0.1 is for this machine alone, 0.0.0.0 for "
                "all of its addresses"
            ) from None
        whys = {
            errno.EADDRINUSE: f"port {port} of {host} is in use: take another (0 is any free one)",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine; 0.0.0.0 is all",
            errno.EACCES: f"port {port} needs root: take one from 1024 on",
        }
        if error.errno not in whys:
            raise
        raise OSError(error.errno, whys[error.errno]) from None
    with listener:
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: connections inherit it
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * WRITE_SECONDS)
            )
        app = application(engine, access)
        name = f"[{host}]" if ":" in host else host
        bound = listener.getsockname()[1]
        print(f"{engine.name} on http://{name}:{bound}/v1 (Ctrl-C ends)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _Server(server_config(app), app.state.end).run(sockets=[listener])
