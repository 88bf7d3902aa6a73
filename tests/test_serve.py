"""`rksc serve` over real sockets: answers, streams, errors, disconnects."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.asking import ANSWER
from support.letters import Letters

from rksc import BranchSession
from rksc.clients import OpenAI

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from support.serving import Server, events, eventually, slowly

from rksc.server import app as module


def expected(make_session: Callable[..., BranchSession], **fields: Any) -> list[str]:
    client = OpenAI(make_session("T4", tokenizer=Letters(chat=True)))
    answer = client.chat.completions.create(**fields)
    return [choice.message.content for choice in answer.choices]


def test_an_answer_is_that_of_the_client(
    server: Server, make_session: Callable[..., BranchSession]
) -> None:
    status, answer = server.chat(**ANSWER)
    assert status == 200
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == expected(make_session, **ANSWER)
    assert answer["usage"]["completion_tokens"] == 36
    _, again = server.chat(**ANSWER)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    status, answer = server.request(
        "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    )
    assert status == 200
    assert answer["choices"][0]["text"].startswith("abc")
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4


def test_a_stream_adds_up(server: Server, make_session: Callable[..., BranchSession]) -> None:
    connection = server.post(**ANSWER, stream=True, stream_options={"include_usage": True})
    reply = connection.getresponse()
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(reply)
    connection.close()
    assert done == b"[DONE]"
    assert last["usage"]["completion_tokens"] == 36
    texts = [""] * 3
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == expected(make_session, **ANSWER)


def test_concurrent_requests_share_steps(
    server: Server, make_session: Callable[..., BranchSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take at least 20 ms, so that they overlap."""
    slowly(server.engine, monkeypatch)

    def ask(i: int) -> dict[str, Any]:
        return {**ANSWER, "messages": [{"role": "user", "content": f"{i} abc"}], "max_tokens": 40}

    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda i: server.chat(**ask(i)), range(6)))
    for i, (status, answer) in enumerate(replies):
        assert status == 200
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == expected(make_session, **ask(i))
    assert server.engine.session.stats().steps < 6 * 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_branches(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    slowly(server.engine, monkeypatch)
    connection = server.post(**{**ANSWER, "max_tokens": 400}, stream=stream)
    eventually(lambda: server.engine.session.stats().branches == 3)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: server.engine.session.stats().branches == 0)
    assert not server.engine.busy
    assert server.engine.session.stats().steps < 350
    assert server.chat(**ANSWER)[0] == 200


def test_errors_name_the_field(server: Server) -> None:
    for field, change in (
        ("temperature", {"temperature": 1000}),
        ("messages", {"messages": "hi"}),
        ("logit_bias", {"logit_bias": {"3": 5}}),
        ("max_tokens", {"max_tokens": "all"}),
        ("n", {"n": 0}),
    ):
        status, answer = server.chat(**{**ANSWER, **change})
        assert status == 400
        assert answer["error"]["param"] == field
        assert field in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
    assert server.request("POST", "/v1/chat/completions", b"{not json")[0] == 400
    assert server.request("POST", "/v1/chat/completions", b"[1]")[0] == 400
    assert server.request("POST", "/v1/chat/completions", b"[" * 100000)[0] == 400
    assert server.request("POST", "/v1/completions", b"\xff\xfe")[0] == 400
    for path, expected in (("/v1/nothing", 404), ("/v1/completions", 405), ("/v1/models/x/y", 404)):
        status, answer = server.request("GET", path)
        assert status == expected
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"]
    assert not server.engine.busy


def test_a_long_body_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)
    status, answer = server.request("POST", "/v1/completions", b" " * 1001)
    assert status == 413
    assert "1000 bytes" in answer["error"]["message"]


def test_a_full_queue_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    assert server.chat(**ANSWER)[0] == 503
    assert server.chat(**{**ANSWER, "n": 2})[0] == 200


def test_a_failed_step_is_a_500(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no step today")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.session, "step", fail)
        status, answer = server.chat(**ANSWER)
        assert status == 500
        assert answer["error"]["message"] == "no step today"
        connection = server.post(**ANSWER, stream=True)
        *_, error, done = events(connection.getresponse())
        connection.close()
        assert error["error"]["message"] == "no step today"
        assert done == b"[DONE]"
    assert server.chat(**ANSWER)[0] == 200


def test_models_and_health(server: Server) -> None:
    status, answer = server.request("GET", "/v1/models")
    assert status == 200
    assert [card["id"] for card in answer["data"]] == [server.engine.name]
    assert server.request("GET", f"/v1/models/{server.engine.name}") == (200, answer["data"][0])
    assert server.request("GET", "/health") == (200, {"status": "ok"})


def test_an_error_outside_a_step_ends_what_waits_and_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no start today")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "step", fail)
        status, answer = server.chat(**ANSWER)
        assert (status, answer["error"]["message"]) == (500, "no start today")
    assert server.request("GET", "/health")[0] == 200
    assert server.chat(**ANSWER)[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_tells_that_the_thread_has_ended(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise SystemExit

    monkeypatch.setattr(server.engine, "step", end)
    connection = server.post(**ANSWER)
    eventually(lambda: server.request("GET", "/health")[0] == 503)
    connection.close()
    status, answer = server.chat(**ANSWER)
    assert status == 500
    assert "thread has ended" in answer["error"]["message"]
    server.engine.cancel_all()
