"""Strangers at `rksc serve`: what one client sends never holds up, or costs, the others.

Each kind of request that did is refused at once by the name of its field, or gives way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.asking import ANSWER, ASK

from rksc import Model
from rksc.clients._engine import Engine
from rksc.clients._errors import RequestError
from rksc.server import json_bodies as _json

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from support.serving import Server, events, eventually, slowly

from rksc.server import app as module

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


# ---- fields have bounds ------------------------------------------------------------------------

MANY = [f"q{i}z" for i in range(100_000)]
TOO_LONG: list[tuple[str, str, dict[str, Any]]] = [
    ("model", CHAT, {"model": "M" * 1_000_000}),
    ("model", COMPLETION, {"model": "é" * 129}),
    ("model", CHAT, {"model": ["M"] * 1000}),
    ("user", CHAT, {"user": "u" * 1_000_000}),
    ("metadata", CHAT, {"metadata": {f"key{i}": "" for i in range(5000)}}),
    ("safety_identifier", COMPLETION, {"safety_identifier": "s" * 1025}),
    ("stop", CHAT, {"stop": MANY}),
    ("stop", CHAT, {"stop": MANY[:17]}),
    ("stop", COMPLETION, {"stop": ["ok", "s" * 257]}),
    ("stop", COMPLETION, {"stop": "s" * 1_000_000}),
    ("stop_token_ids", CHAT, {"stop_token_ids": [5] * 257}),
    ("stop_token_ids", COMPLETION, {"stop_token_ids": list(range(97)) * 1000}),
    ("n", CHAT, {"n": 1025}),
    ("n", COMPLETION, {"n": 2, "prompt": ["a"] * 600}),
    ("prompt", COMPLETION, {"prompt": ["a"] * 1025}),
    ("top_logprobs", CHAT, {"logprobs": True, "top_logprobs": 10**9}),
    ("logit_bias", CHAT, {"logit_bias": {str(i): 1 for i in range(20_000)}}),
    ("tools", CHAT, {"tools": [{"type": "function"}] * 10_000}),
    ("messages", CHAT, {"messages": [{"role": "user", "content": ""}] * 2049}),
    ("seed", CHAT, {"seed": 10**4000}),
    ("x" * 100 + "...", CHAT, {"x" * 1_000_000: 1}),
    ("echo", COMPLETION, {"prompt": "a" * 400, "n": 1024, "echo": True, "logprobs": 20}),
]


@pytest.mark.parametrize(("field", "path", "change"), TOO_LONG)
def test_a_field_that_is_too_long_is_refused_by_its_name(
    server: Server, field: str, path: str, change: dict[str, Any]
) -> None:
    own: dict[str, Any] = {"messages": ASK} if path == CHAT else {"prompt": "abc"}
    status, answer = server.request("POST", path, {**own, "max_tokens": 2, **change})
    assert status == 400
    assert answer["error"]["param"] == field
    assert len(json.dumps(answer)) < 4000
    assert server.engine.session.stats().steps == 0


def test_what_is_just_short_enough_is_taken(server: Server) -> None:
    full = {
        "model": "M" * 256, "user": "u" * 1024, "stop": ["s" * 256] * 16, "max_tokens": 2,
        "stop_token_ids": [5] * 256, "metadata": {f"k{i}": "v" * 500 for i in range(16)},
        "prediction": {"type": "content", "content": "p" * 10_000}, "ignore_eos": True,
    }  # fmt: skip
    status, answer = server.chat(messages=ASK, **full)
    assert status == 200
    assert answer["model"] == "M" * 256


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPLETION, {"prompt": "ab c" * 1_000_000}),
        (COMPLETION, {"prompt": ["ab", "c" * 6000]}),
        (COMPLETION, {"prompt": "漢" * 2000}),
        (CHAT, {"messages": [{"role": "user", "content": "ab c" * 500_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 30}] * 200}),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "ab c" * 5000}]}]}),
        (CHAT, {"messages": ASK, "chat_template_kwargs": {"documents": ["d" * 3000] * 2}}),
    ],
)
def test_a_prompt_is_refused_by_its_bytes_before_it_is_made_into_tokens(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, change: dict[str, Any]
) -> None:
    seen: list[int] = []
    encode = type(server.engine.tokenizer).encode

    def noted(self: Any, text: str, *args: Any, **options: Any) -> Any:
        seen.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(type(server.engine.tokenizer), "encode", noted)
    status, answer = server.request("POST", path, {**change, "max_tokens": 2})
    assert status in (400, 413)
    assert max(seen, default=0) < 100
    if status == 400:
        assert answer["error"]["param"] in ("prompt", "messages")
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "maximum context length" in answer["error"]["message"]
    assert status == 400 or len(json.dumps(change)) > module.MAX_BODY - 100


def test_no_prompt_that_fits_is_refused_by_its_bytes(engine: Engine) -> None:
    """The longest token, over and over."""
    config, table = engine.session.config, engine.token_bytes
    longest = max(table, key=len).decode()
    text = longest * (config.max_positions - 2)
    assert len(engine.encode(text)) == config.max_positions - 1
    engine.check_prompt(engine.encode(text), "prompt")


# ---- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"a": [' + b"{}," * 1_000_000 + b"{}]}",
        b'{"a": [' + b'"",' * 1_000_000 + b'""]}',
        b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b"}",
        b'{"\\"": [' + b'[],"\\\\",' * 70_000 + b"0]}",
        b'{"a": ' + b"[" * 60_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"prompt": "\xff"}',
        b'{"prompt": "a',
        b"[1]",
        b"",
    ],
    ids=range(11),
)
def test_a_body_of_too_much_or_of_none_is_refused(server: Server, body: bytes) -> None:
    status, answer = server.request("POST", COMPLETION, body)
    assert status == 400
    assert "the body" in answer["error"]["message"]
    assert len(json.dumps(answer)) < 4000


def test_texts_may_hold_as_many_brackets_as_they_like() -> None:
    text = '[{"' * 50_000 + "\\" * 50_001 + "\\\\"
    assert _json.read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    body = b'{"prompt": [' + b"1," * 300_000 + b"1]}"
    assert len(_json.read_json(body)["prompt"]) == 300_001


HALVES: list[tuple[str, bytes]] = [
    ("\\ud800", b'{"\\ud800":1}'),
    ("\\udfff", b'{"prompt": "a", "\\uDFFF": null}'),
    ("model", b'{"model": "\\ud800", "prompt": "a", "max_tokens": 2}'),
    ("prompt", b'{"prompt": "a\\udc00b", "max_tokens": 2}'),
    ("prompt", b'{"prompt": ["a", "\\ud83d\\ud83d\\ude00"], "max_tokens": 2}'),
    ("metadata", b'{"prompt": "a", "metadata": {"a": {"\\ud800": 1}}}'),
    ("stop", b'{"prompt": "a", "stop": ["\\ud800"]}'),
    ("user", b'{"prompt": "a", "user": "\\uD800"}'),
]


@pytest.mark.parametrize(("field", "body"), HALVES)
def test_half_a_character_is_refused_by_its_field(
    server: Server, caplog: pytest.LogCaptureFixture, field: str, body: bytes
) -> None:
    """Before anything is computed, and without a traceback."""
    for path in (COMPLETION, CHAT):
        own = body if path == COMPLETION else body.replace(b'"prompt": "a"', b'"messages": []')
        status, answer = server.request("POST", path, own)
        assert status == 400
        if path == COMPLETION:
            assert answer["error"]["param"] == field
            assert "half a character" in answer["error"]["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert server.engine.session.stats().steps == 0


def test_half_a_character_in_a_message(server: Server) -> None:
    for message in (
        b'"content": "\\ud800"',
        b'"content": "a", "\\ud800": 1',
        b'"content": "a", "name": "\\ude00"',
    ):
        body = b'{"messages": [{"role": "user", ' + message + b'}], "max_tokens": 1}'
        status, answer = server.request("POST", CHAT, body)
        assert status == 400
        assert answer["error"]["param"] == "messages"
    whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\\\ud800"}], "n": 1}'
    assert server.request("POST", CHAT, whole)[0] == 200


def test_bytes_of_half_a_character_are_no_utf8(server: Server) -> None:
    for data in (b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xc0\x80"):
        status, answer = server.request("POST", COMPLETION, b'{"prompt": "' + data + b'"}')
        assert status == 400
        assert "UTF-8" in answer["error"]["message"] or "utf-8" in answer["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BODY_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b'Content-Length: 1000\r\n\r\n{"prompt"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_who_hangs_up_in_a_body_is_forgotten(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rksc.serve")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b'Content-Length: 1000\r\n\r\n{"prompt"')
        time.sleep(0.1)
    eventually(lambda: any("status=499" in record.message for record in caplog.records))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ---- large work gives way ----------------------------------------------------------------------


def test_large_bodies_hold_up_no_small_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that large prompts do stands still; chats, /health and /metrics go on."""
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "MAX_LARGE", 5)
    begun, go = threading.Event(), threading.Event()
    encode = server.engine.encode

    def slow(text: str, *args: Any) -> Any:
        if len(text) > 1000:
            begun.set()
            assert go.wait(60)
        return encode(text, *args)

    monkeypatch.setattr(server.engine, "encode", slow)
    large = {"prompt": "a " * 800, "max_tokens": 1}
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(server.request, "POST", COMPLETION, large) for _ in range(5)]
        assert begun.wait(60)
        for _ in range(20):
            assert server.chat(messages=ASK, max_tokens=2)[0] == 200
            assert server.request("GET", "/health")[0] == 200
            assert server.request("GET", "/metrics")[0] == 200
        eventually(lambda: server.request("POST", COMPLETION, large)[0] == 503)
        assert not any(reply.done() for reply in replies)
        go.set()
        assert [reply.result()[0] for reply in replies] == [400] * 5


def test_the_work_of_an_answer_holds_up_no_small_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a prompt that is scored, whether its answer is streamed or not."""
    begun, go = threading.Event(), threading.Event()
    score = server.engine.score_prompt

    def slow(*args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return score(*args)

    monkeypatch.setattr(server.engine, "score_prompt", slow)
    scored = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 2}
    streamed = {**scored, "logprobs": 0, "stream": True}
    with ThreadPoolExecutor(8) as pool:
        replies = [
            pool.submit(server.request, "POST", COMPLETION, body) for body in [scored, streamed] * 4
        ]
        assert begun.wait(60)
        for _ in range(10):
            assert server.chat(messages=ASK, max_tokens=2)[0] == 200
            assert server.request("GET", "/health")[0] == 200
        assert not any(reply.done() for reply in replies)
        go.set()
        assert [reply.result()[0] for reply in replies] == [200] * 8


def test_a_long_text_is_made_into_tokens_without_the_gil(smollm2: Model) -> None:
    """Another thread goes on meanwhile."""
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = "ab c, 12 " * 100_000
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    ids = tokenizer.encode(text)
    done.set()
    thread.join()
    assert counted > 50
    assert tokenizer.decode(ids) == text
    assert ids[:1000] == tokenizer.encode(text[:9000])[:1000]


# ---- streams that nobody reads -----------------------------------------------------------------


def stalled(server: Server, **fields: Any) -> socket.socket:
    """A stream whose reader has read its head and no more."""
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({**ANSWER, "stream": True, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    assert connection.recv(15).startswith(b"HTTP/1.1 200")
    return connection


def test_a_stream_that_nobody_reads_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up when nobody takes a piece, long before its last token."""
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.2)
    slowly(server.engine, monkeypatch)
    model = "M" * 256  # in every chunk
    with stalled(server, n=8, max_tokens=400, model=model) as connection:
        eventually(lambda: server.engine.session.stats().branches == 8)
        eventually(lambda: server.engine.session.stats().branches == 0)
        assert server.engine.session.stats().steps < 390
        assert server.chat(**ANSWER)[0] == 200
        while connection.recv(1 << 16):  # what had been written before, then the end
            pass


def test_a_stream_that_is_read_too_slowly_says_so_and_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD", 500)
    slowly(server.engine, monkeypatch)
    with stalled(server, n=8, max_tokens=400, model="M" * 256) as connection:
        eventually(lambda: server.engine.session.stats().branches == 8)
        eventually(lambda: server.engine.session.stats().branches == 0)
        assert server.engine.session.stats().steps < 390
        assert server.chat(**ANSWER)[0] == 200
        read = b""
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = connection.recv(1 << 16)
            assert piece
            read += piece
        assert b"does not read the answer" in read


def test_a_stream_that_its_reader_closes_unread_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the time of a write is over."""
    slowly(server.engine, monkeypatch)
    with stalled(server, n=8, max_tokens=400, model="M" * 256) as connection:
        written = server.engine.session.stats().steps + 20  # more than its buffers hold
        eventually(lambda: server.engine.session.stats().steps > written)
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: server.engine.session.stats().branches == 0)
        assert server.engine.session.stats().steps < 390


@pytest.mark.parametrize("later", range(6))
def test_a_stream_ends_whose_reader_goes_as_a_piece_is_taken(later: int) -> None:
    """In the same turn of the event loop, or some turns apart."""
    taken: list[bytes] = []

    async def run() -> None:
        gone = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            while len(taken) < 1000:
                yield b"piece"

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] != "http.response.body":
                return
            taken.append(message["body"])
            if len(taken) == 10:
                asyncio.get_running_loop().call_soon(gone.set)
                await gone.wait()
                for _ in range(later):
                    await asyncio.sleep(0)

        stream = module.EventStream(pieces(), lambda: None)
        await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert 10 <= len(taken) < 20


def test_a_slow_reader_gets_all(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that come together are written together; none is lost."""
    slowly(server.engine, monkeypatch)
    fields = {"n": 4, "max_tokens": 100}
    with stalled(server, **fields) as connection:
        eventually(lambda: server.engine.session.stats().branches == 4)
        eventually(lambda: server.engine.session.stats().branches == 0)
        read = b""
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = connection.recv(100_000)
            assert piece
            read += piece
    texts = [""] * 4
    for line in read.split(b"\n"):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    _, answer = server.chat(**{**ANSWER, **fields})
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b"[" * 100_000, "nested too deep"),
        (json.dumps({**ANSWER, "q" * 1_000_000: 1}).encode(), "qqq...=1 is not supported"),
        (
            b'{"prompt": [[1, [2]]], "max_tokens": 1}',
            "prompt[0]: tokens must be a sequence of ints",
        ),
    ],
)
def test_a_body_that_is_wrong_is_told_in_our_words(server: Server, body: bytes, told: str) -> None:
    path = COMPLETION if b"prompt" in body else CHAT
    status, answer = server.request("POST", path, body, **{"Content-Type": "application/json"})
    assert status == 400
    assert told in answer["error"]["message"], answer["error"]["message"][:300]
    assert len(answer["error"]["message"]) < 2500


# ---- connections ---------------------------------------------------------------------------------


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended it; what it had sent is read."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_who_does_not_finish_headers_is_left(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new connection and on one that has had an answer; not who waits for a long one."""
    monkeypatch.setattr(module, "HEADER_SECONDS", 0.5)
    slowly(server.engine, monkeypatch)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    long = server.post(**{**ANSWER, "max_tokens": 60})  # of more than a second
    for sent in (b"", b"GET /hea", whole, whole + b"\r\n" + whole):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(sent)
            began = time.monotonic()
            assert is_closed(connection), sent
            assert time.monotonic() - began > 0.3
    reply = long.getresponse()
    assert reply.status == 200
    assert json.loads(reply.read())["usage"]["completion_tokens"] == 180
    long.close()


def test_more_connections_than_files_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "most_connections", lambda: 3)
    places = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
    eventually(lambda: len(server.connections) == 3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        assert is_closed(connection)
    for place in places:
        place.close()
    eventually(lambda: not server.connections)
    assert server.request("GET", "/health")[0] == 200


def test_what_comes_when_the_server_has_stopped_is_a_503(engine: Engine) -> None:
    worker = module.Worker(engine)
    worker.join()
    with pytest.raises(RequestError, match="stopping") as told:
        worker.submit([])
    assert told.value.status_code == 503


# ---- turns -------------------------------------------------------------------------------------

SMALL = {"messages": [{"role": "user", "content": "abc 12"}], "max_tokens": 4, "seed": 1}


@pytest.fixture
def large_server(smollm2: Model) -> Any:
    """On the demo's model."""
    server = Server(Engine(smollm2, kv_bytes="512MiB"))
    yield server
    server.stop()


def test_a_small_chat_beside_64_samples(large_server: Server) -> None:
    """It takes less than 3 times the steps that it takes beside a single sample, and its answer is
    the same."""
    engine, taken, texts = large_server.engine, [], []
    for n in (1, 64):
        stream = large_server.post(
            messages=[{"role": "user", "content": "abc 12"}], max_tokens=2000, n=n,
            ignore_eos=True, temperature=1, stream=True,
        )  # fmt: skip
        reply = events(stream.getresponse())
        while not any(next(reply)["choices"][0]["delta"].get("content", "") for _ in range(n)):
            pass
        assert engine.n_running == n
        before = engine.session.stats().steps
        status, answer = large_server.chat(**SMALL, ignore_eos=True)
        taken.append(engine.session.stats().steps - before)
        assert status == 200
        texts.append(answer["choices"][0]["message"]["content"])
        assert engine.n_running == n
        assert stream.sock is not None
        stream.sock.shutdown(socket.SHUT_RDWR)
        stream.close()
        eventually(lambda: not engine.busy)
    assert texts[0] == texts[1]
    assert taken[1] < 3 * taken[0]
