"""benchmarks/serve_load.py: what it calls wrong, and that it really runs."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import serve_load
from serve_load import CHAT, COMPLETION, Tally

from rksc import Model
from rksc.engine.defaults import best_dtype

MIB = 1024  # KiB, as the series has them


def lines(*events: Any) -> Iterator[bytes]:
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        yield from (f"data: {data}\n".encode(), b"\n")


def test_a_stream_is_put_together() -> None:
    def piece(i: int, text: str, reason: str | None = None, logprob: float | None = None) -> Any:
        told = None if logprob is None else {"content": [{"token": text, "logprob": logprob}]}
        delta = {"index": i, "delta": {"content": text}, "logprobs": told, "finish_reason": reason}
        return {"choices": [delta]}

    events = [piece(1, "a", None, -1.5), piece(0, "b"), piece(1, "c", "stop", -2.0), piece(0, "")]
    found = [("b", None, None), ("ac", "stop", [-1.5, -2.0])]
    assert serve_load.assembled(lines(*events, "[DONE]"), chat=True) == (found, True)
    assert serve_load.assembled(lines(*events), chat=True) == ([], False)


def test_memory_is_judged_by_the_second_half() -> None:
    rising = [100 * MIB + i * 30 for i in range(1000)]
    assert serve_load.spread([i * MIB for i in range(1, 501)] + [500 * MIB] * 500) == 0
    assert serve_load.spread(rising) > serve_load.FLAT
    assert serve_load.spread([50 * MIB] * 500 + rising[:500]) > serve_load.FLAT
    assert len(serve_load.windows(rising)) == 20


OPTIONS = argparse.Namespace(connections=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"faults": ["whole: another answer"]}, "another answer"),
        ({"seen": {"200": 4.0}}, "status 200"),
        ({"seen": {"200": 8.0}}, "status 200"),
        ({"seen": {"running": 1.0}}, "samples are left"),
        ({"left": 1}, "does not come"),
        ({"memory": [MIB + i for i in range(200)]}, "not flat"),
        ({"memory": [MIB + i for i in range(100)]}, None),
    ],
)
def test_what_is_wrong_is_told(change: dict[str, Any], said: str | None) -> None:
    tally = Tally(counts=Counter(cancelled=2), statuses=Counter({200: 5, 0: 2}), seconds=[1.0] * 7)
    tally.faults = change.get("faults", [])
    watch: Any = argparse.Namespace(memory=change.get("memory", [MIB] * 200), health=[0.1])
    seen = {"200": 6.0, "running": 0.0, "waiting": 0.0, **change.get("seen", {})}
    wrong = serve_load.report(OPTIONS, tally, watch, seen, change.get("left", 0))
    assert (not wrong) if said is None else (len(wrong) == 1 and said in wrong[0])


def test_the_catalogue_has_every_kind() -> None:
    found = serve_load.catalogue(60, random.Random(0))
    assert {request["path"] for request in found} == {CHAT, COMPLETION}
    for key in ("stop", "echo", "logprobs", "top_logprobs"):
        assert any(key in request["body"] for request in found)
    rng = random.Random(0)
    assert {serve_load.wrong(rng)[3] for _ in range(200)} == {400, 403, 404, 415}


def test_a_short_run(smollm2: Model) -> None:
    """Half of the answers are not what the catalogue says: those are told, and no others."""
    assert smollm2.path is not None
    options = serve_load.parser().parse_args(
        ["--minutes", "0.08", "--connections", "12", "--kv", "64MiB", "--dtype", best_dtype()]
    )
    known = serve_load.catalogue(6, random.Random(1))
    for request in known:
        request["body"] |= {"max_tokens": 4, "n": min(2, request["body"]["n"])}
    serve_load.answers(smollm2, known, kv_bytes=options.kv, dtype=options.dtype)
    for request in known[::2]:
        request["choices"][0]["finish_reason"] = "other"
    wrong = serve_load.load(options, smollm2.path, known)
    assert wrong
    altered = [str(request["body"]) for request in known[::2]]
    for fault in wrong:
        assert any(body in fault for body in altered), fault
