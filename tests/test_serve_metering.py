"""Figures and log lines of `rksc serve`."""

from __future__ import annotations

import logging
import re
import socket

import pytest
from support.asking import ANSWER, ASK

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from prometheus_client import parser
from support.serving import Server, events, eventually, slowly

LINE = re.compile(
    r"(\w+) (\S+) id=(\S+) status=(\d+) prompt_tokens=(\d+) cached_tokens=(\d+) "
    r"generated_tokens=(\d+) seconds=(\d+\.\d{3})"
)


def figures(server: Server) -> dict[str, float]:
    status, answer = server.request("GET", "/metrics")
    assert status == 200
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(answer["text"])
        for sample in family.samples
    }


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    found = [LINE.fullmatch(r.message) for r in caplog.records if r.name == "rksc.serve"]
    assert all(found), [r.message for r in caplog.records]
    return [match.groups() for match in found if match]


def test_requests_are_counted_and_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rksc.serve")
    first = server.chat(**ANSWER)[1]
    again = server.chat(**ANSWER)[1]
    stream = server.post(**ANSWER, stream=True)
    assert list(events(stream.getresponse()))[-1] == b"[DONE]"
    stream.close()
    assert server.chat(**{**ANSWER, "n": 0})[0] == 400
    assert server.request("GET", "/v1/nothing")[0] == 404
    assert server.request("GET", "/health")[0] == 200
    eventually(lambda: len(lines(caplog)) == 5)
    prompt = first["usage"]["prompt_tokens"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    chat = ("POST", "/v1/chat/completions")
    told = [line[:-1] for line in lines(caplog)]
    assert told == [
        (*chat, first["id"], "200", str(prompt), "0", "36"),
        (*chat, again["id"], "200", str(prompt), str(cached), "36"),
        (*chat, told[2][2], "200", str(prompt), str(cached), "36"),
        (*chat, "-", "400", "0", "0", "0"),
        ("GET", "/v1/nothing", "-", "404", "0", "0", "0"),
    ]
    assert told[2][2].startswith("chatcmpl-")
    seen = figures(server)
    for name, value in (
        ("requests_total 200", 3),
        ("requests_total 400", 1),
        ("requests_total 404", 1),
        ("prompt_tokens_total", 3 * prompt),
        ("cached_tokens_total", 2 * cached),
        ("generated_tokens_total", 108),
        ("request_seconds_count", 5),
        ("samples running", 0),
        ("samples waiting", 0),
        ("kv_blocks used", 0),
    ):
        assert seen[f"rksc_{name}"] == value, name
    stats = server.engine.session.stats()
    assert seen["rksc_kv_blocks cached"] == stats.blocks_cached > 0
    assert seen["rksc_kv_blocks free"] == stats.blocks_free - stats.blocks_cached
    assert seen["process_resident_memory_bytes"] > 0


def test_what_runs_and_waits_is_seen(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(server.engine, monkeypatch)
    server.engine.max_rows = 2
    stream = server.post(**{**ANSWER, "n": 5, "max_tokens": 400}, stream=True)
    eventually(lambda: server.engine.n_running == 2)
    seen = figures(server)
    assert (seen["rksc_samples running"], seen["rksc_samples waiting"]) == (2, 3)
    assert seen["rksc_kv_blocks used"] > 0
    stream.close()


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_before_the_end_is_a_499(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    slowly(server.engine, monkeypatch)
    caplog.set_level(logging.INFO, "rksc.serve")
    connection = server.post(**{**ANSWER, "max_tokens": 400}, stream=stream)
    eventually(lambda: server.engine.n_running == 3)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: bool(lines(caplog)))
    ((*_, status, prompt, _, made, _),) = lines(caplog)
    assert status == "499"
    assert int(prompt) > 0
    assert int(made) < 3 * 400
    assert figures(server)["rksc_requests_total 499"] == 1


def test_the_level_turns_lines_off(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rksc.serve")
    assert server.chat(messages=ASK, max_tokens=1)[0] == 200
    assert figures(server)["rksc_requests_total 200"] == 1
    assert not caplog.records


def test_a_failure_is_logged_with_its_traceback(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no step today")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.session, "step", fail)
        assert server.chat(**ANSWER)[0] == 500
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no step today"
    assert figures(server)["rksc_requests_total 500"] == 1


def test_no_path_breaks_a_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rksc.serve")
    for path in ("/v1/a%0Ab", "/v1/%1b[31m", "/v1/" + "x" * 10_000, "/v1/%C3%A9", "/v1/%ff"):
        assert server.request("GET", path)[0] == 404
    eventually(lambda: len(caplog.records) == 5)
    for record in caplog.records:
        assert re.fullmatch(r"[ -~]{1,300}", record.message), record.message
