"""What `rksc serve` has served: a line in the log for each request, and figures for Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..clients._engine import Engine
from ..clients._wire import Request, usage

log = logging.getLogger("rksc.serve")

_UNCOUNTED = {"/health", "/metrics"}  # asked again and again by programs that watch
_KEY = "rksc.request"  # in the scope: what the handler has read
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Meter:
    """The figures of one server."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter("rksc_requests", "Requests", ["status"], registry=registry)
        self._prompt = Counter("rksc_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached = Counter(
            "rksc_cached_tokens", "Of these, tokens whose KV was there", registry=registry
        )
        self._made = Counter("rksc_generated_tokens", "Tokens of answers", registry=registry)
        self._seconds = Histogram(
            "rksc_request_seconds",
            "From a request's arrival to the end of its answer",
            registry=registry,
            buckets=_SECONDS,
        )
        ProcessCollector(registry=registry)
        registry.register(_Gauges(engine))

    def figures(self) -> bytes:
        """In Prometheus' format; may wait for a step's end."""
        return generate_latest(self._registry)

    def note(
        self, method: str, path: str, status: int, seconds: float, request: Request | None
    ) -> None:
        """A request has ended. Status 499: its connection closed before."""
        used = None if request is None else usage(request)
        prompt = used["prompt_tokens"] if used else 0
        cached = used["prompt_tokens_details"]["cached_tokens"] if used else 0
        made = used["completion_tokens"] if used else 0
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        for counter, n in ((self._prompt, prompt), (self._cached, cached), (self._made, made)):
            counter.inc(n)
        log.info(
            "%s %.80s id=%s status=%d prompt_tokens=%d cached_tokens=%d generated_tokens=%d "
            "seconds=%.3f",
            method, ascii(path)[1:-1], request.id if request else "-", status, prompt, cached, made,
            seconds,
        )  # fmt: skip


class _Gauges(Collector):
    """How things stand when somebody asks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        engine, stats = self._engine, self._engine.session.stats()
        samples = GaugeMetricFamily("rksc_samples", "Samples of requests", labels=["state"])
        samples.add_metric(["running"], engine.n_running)
        samples.add_metric(["waiting"], engine.n_waiting)
        blocks = GaugeMetricFamily("rksc_kv_blocks", "Blocks of KV", labels=["state"])
        blocks.add_metric(["used"], stats.blocks_used)
        blocks.add_metric(["cached"], stats.blocks_cached)
        blocks.add_metric(["free"], stats.blocks_free - stats.blocks_cached)
        yield samples
        yield blocks


class Metered:
    """ASGI middleware: tells a meter of every request."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        status, whole, began = 500, False, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status, whole = 500, True
            raise
        finally:
            seconds = time.perf_counter() - began
            self._meter.note(
                scope["method"], scope["path"], status if whole else 499, seconds, scope.get(_KEY)
            )


def remember(scope: Scope, request: Request) -> None:
    """For the meter: what this connection asked for."""
    scope[_KEY] = request
