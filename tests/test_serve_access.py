"""Who may use `rksc serve`: names of hosts, origins of web pages, API keys, addresses."""

from __future__ import annotations

import hmac
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.asking import ASK

from rksc.cli import command as cli
from rksc.clients._engine import Engine

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from support.serving import Server, events

from rksc.server import app
from rksc.server.access import Access

BODY = {"prompt": "abc", "max_tokens": 1}
Serve = Callable[[Access], Server]


@pytest.fixture
def serve(engine: Engine) -> Iterator[Serve]:
    """serve(access): a server to which it applies."""
    made: list[Server] = []

    def start(access: Access) -> Server:
        made.append(Server(engine, access))
        return made[-1]

    yield start
    for server in made:
        server.stop()


# ---- hosts and origins -------------------------------------------------------------------------

FOREIGN = (
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost", "10.0.0.7",
    "0.0.0.0", "[::2]", "[", "", "127.0.0.1:80:90", "localhost, evil.example", "evil@localhost",
    "localhost/", "localhost:http",
)  # fmt: skip


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_other_host_names_are_refused(serve: Serve, keys: tuple[str, ...]) -> None:
    """With a key, too, and on every path."""
    server = serve(Access(keys=keys))
    own = {"Authorization": "Bearer secret"}
    for host in FOREIGN:
        for path in ("/v1/models", "/health"):
            status, answer = server.request("GET", path, Host=host, **own)
            assert status == 400
            assert answer["error"]["code"] == "host_not_allowed"
    for host in ("localhost", "127.0.0.1", "127.8.0.9", "[::1]", "LOCALHOST"):
        for port in ("", f":{server.port}", ":1"):
            assert server.request("GET", "/v1/models", Host=host + port, **own)[0] == 200


def test_hosts_may_be_allowed(serve: Serve) -> None:
    server = serve(Access(frozenset({"Model.Example", "10.0.0.7", "[FE80::1]", "a_b"})))
    for host in ("model.example", "MODEL.example:80", "10.0.0.7", "[fe80:0::1]:8", "a_b"):
        assert server.request("GET", "/v1/models", Host=host)[0] == 200
    for host in ("evil.model.example", "model.example.evil", "example", "10.0.0.8", "fe80::1"):
        assert server.request("GET", "/v1/models", Host=host)[0] == 400


@pytest.mark.parametrize("name", ["*", "*.example", "a:80", "http://a", "a/b", "", "a b", "a."])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        Access(frozenset({name}))


@pytest.mark.parametrize("hosts", [(), ("model.example",)])
def test_web_pages_from_elsewhere_are_refused(
    serve: Serve, engine: Engine, hosts: Collection[str]
) -> None:
    """A browser sends a page's POST across origins without asking, if it looks like a form's."""
    server = serve(Access(frozenset(hosts)))
    for origin in (
        "https://evil.example",
        "http://127.0.0.1.evil.example",
        "null",
        "",
        "//[",
        "http://a@localhost",
    ):
        status, answer = server.request("POST", "/v1/completions", BODY, Origin=origin)
        assert status == 403
        assert origin in answer["error"]["message"]
    for origin in ("http://localhost:3000", "http://[::1]", f"http://127.0.0.1:{server.port}"):
        assert server.request("POST", "/v1/completions", BODY, Origin=origin)[0] == 200
    allowed = server.request("POST", "/v1/completions", BODY, Origin="https://model.example")[0]
    assert allowed == (200 if hosts else 403)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": kind}
        status, answer = server.request("POST", "/v1/completions", BODY, **headers)
        assert status == 415
        assert "application/json" in answer["error"]["message"]
    assert engine.session.stats().steps == 3 + len(hosts)


# ---- keys --------------------------------------------------------------------------------------


def test_a_key_is_needed_where_one_is_set(
    serve: Serve, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request's key is compared with all of them, by a comparison in constant time."""
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def noted(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    server = serve(Access(keys=("first-key", "second-key")))
    wrong = (
        None, "", "Bearer", "Bearer ", "Bearer first", "Bearer first-key2", "Bearer FIRST-KEY",
        "Basic first-key", "first-key", "Bearer first-key second-key", "Bearer \xe9",
    )  # fmt: skip
    for given in wrong:
        headers = {} if given is None else {"Authorization": given}
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            status, answer = server.request("GET", path, **headers)
            assert status == 401
        status, answer = server.request("POST", "/v1/completions", BODY, **headers)
        assert status == 401
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["code"] == "invalid_api_key"
        assert "Authorization: Bearer" in answer["error"]["message"]
        assert "-key" not in json.dumps(answer)
    assert engine.session.stats().steps == 0
    assert server.request("GET", "/health")[0] == 200
    compared.clear()
    for given in ("Bearer first-key", "bearer second-key", "BEARER  second-key "):
        headers = {"Authorization": given}
        assert server.request("POST", "/v1/completions", BODY, **headers)[0] == 200
        assert server.request("GET", "/metrics", **headers)[0] == 200
    assert compared == [b"first-key", b"second-key"] * 6


def test_a_refusal_says_how_to_come_in(serve: Serve) -> None:
    connection = serve(Access(keys=("k",))).connect()
    connection.request("GET", "/v1/models")
    reply = connection.getresponse()
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "headers", "said"),
    [
        ("GET", "/v1/models", {"Authorization": ""}, "an API key is needed: send the header Auth"),
        ("GET", "/v1/models", {"Authorization": "Bearer x"}, "not one of the server's: send the h"),
        ("GET", "/v1/models", {"Host": "box"}, "start the server with --allowed-host and its name"),
        ("GET", "/v1/models", {"Origin": "http://box"}, "start it with --allowed-host and their"),
        ("GET", "/v1/chat", {}, "there are /v1/chat/completions, /v1/completions, /v1/models"),
        ("GET", "/v1/completions", {}, "Method Not Allowed; use POST"),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, "'Content-Type: application/j"),
    ],
)
def test_a_refusal_tells_the_way_out(
    serve: Serve, method: str, path: str, headers: dict[str, str], said: str
) -> None:
    server = serve(Access(keys=("k",)))
    sent = {"Authorization": "Bearer k", **headers}
    status, answer = server.request(method, path, BODY if method == "POST" else None, **sent)
    assert 400 <= status < 500
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", r"port \d+ of 127\.0\.0\.1 is in use: take another"),
        ("192.0.2.1", r"192\.0\.2\.1 is not an address of this machine; 0\.0\.0\.0 is all"),
        ("nowhere.invalid", r"host 'nowhere\.invalid' has no address"),
    ],
)
def test_an_address_that_cannot_be_had_is_told(engine: Engine, host: str, said: str) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises((OSError, ValueError), match=said):
        app.serve(engine, host, taken.getsockname()[1], no_key=True)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\x7f", "schlüssel"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        Access(keys=("good", key))


# ---- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_the_loopback_needs_no_key(host: str) -> None:
    assert Access().at(host).keys == ()


BEYOND = ("0.0.0.0", "::", "", "192.168.1.5", "10.1.1.1", "2001:db8::1", "model.example", "127.1")


@pytest.mark.parametrize("host", BEYOND)
def test_other_addresses_need_a_key_or_the_word_that_none_is_needed(host: str) -> None:
    with pytest.raises(ValueError, match="RKSC_API_KEY"):
        Access(frozenset({"model.example"})).at(host)
    with pytest.raises(ValueError, match="contradict"):
        Access(keys=("k",)).at(host, no_key=True)
    wild = host in ("0.0.0.0", "::", "")
    for access in (Access().at(host, no_key=True), Access(keys=("k",)).at(host)):
        assert access.hosts == (frozenset() if wild else {host})
        assert access.at(host, no_key=not access.keys) == access


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        (["--host", "0.0.0.0"], None, "--no-api-key"),
        (["--host", "::"], "", "RKSC_API_KEY"),
        (["--host", "0.0.0.0", "--no-api-key"], "k", "contradict"),
        (["--host", "0.0.0.0", "--no-api-key", "--api-key", "k"], None, "contradict"),
        (["--api-key", "a b"], None, "API key"),
        ([], "a b", "API key"),
        (["--allowed-host", "*"], None, "'*'"),
        (["--host", "0.0.0.0", "--api-key", "k"], None, "nowhere"),
        (["--host", "0.0.0.0"], "k", "nowhere"),
    ],
)
def test_the_command_says_what_is_missing_before_it_loads_a_model(
    options: list[str],
    key: str | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RKSC_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("RKSC_API_KEY", key)
    assert cli.main(["serve", "nowhere.gguf", *options]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert ("nowhere" in printed.err) == (said == "nowhere")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("sent", "code", "options"),
    [
        (signal.SIGINT, 0, ["--log-level", "warning"]),
        (signal.SIGTERM, -signal.SIGTERM, ["--host", "0.0.0.0", "--no-api-key"]),
    ],
)
def test_the_command_serves_until_it_is_told_to_end(
    smollm2: Any, sent: signal.Signals, code: int, options: list[str]
) -> None:
    """While it answers; beyond the loopback it also has only names that it was given."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "rksc.cli", "serve", str(smollm2.path), "--port", "0"]
    restored = "import signal, os, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    launch = [sys.executable, "-c", f"{restored}; os.execv(sys.argv[1], sys.argv[1:])"]
    launch += [*command, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(launch, text=True, cwd=root, **pipes) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            address = re.search(r"http://(127\.0\.0\.1|0\.0\.0\.0):(\d+)/v1", line)
            assert address is not None, line
            connection = http.client.HTTPConnection("127.0.0.1", int(address[2]), timeout=60)
            for host in ("evil.example", f"evil.example:{address[2]}"):
                headers = {"Host": host, "Origin": f"http://{host}"}
                kind = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(BODY), headers | kind)
                reply = connection.getresponse()
                assert reply.status == 400
                assert json.loads(reply.read())["error"]["code"] == "host_not_allowed"
            body = {"messages": ASK, "max_tokens": 500, "stream": True, "n": 8, "ignore_eos": True}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), kind)
            reply = connection.getresponse()
            assert next(events(reply))["choices"][0]["delta"]["role"] == "assistant"
            process.send_signal(sent)
            assert process.wait(60) == code
            lines = process.stderr.read()
            assert "Traceback" not in lines
            assert ("status=400" in lines) == ("--host" in options)
        finally:
            process.kill()
