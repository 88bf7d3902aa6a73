"""What every contestant of branching.py does: load once, then run on demand.

A contestant is a process of its own, with its engine's own Python; it needs the standard library
and that engine alone. The driver writes one JSON object a line to its standard input,

    {"prefix": [ids], "suffixes": [[ids], ...], "question": [ids], "new": n}

and for each reads one back, {"seconds": {phase: s}, "tokens": n, "chosen": [[ids], ...]}: seconds
of each phase, tokens that went through the model (null where the engine does not tell), and
each branch's new tokens (null where the engine draws its own). Suffixes of one token have no
phase of their own, and an empty question asks for no verification. A contestant whose work is
done by processes that have ended adds their "peak_bytes". Before the first, {"ready": version}
says that the model is loaded. So all engines get the same ids, and runs of several engines can take
turns while the idle ones sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Work = dict[str, Any]
Answer = dict[str, Any]
Run = Callable[[Work], Answer]


def options(*extra: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """What the driver tells every contestant, and `extra` ones as (name, add_argument's own)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True, help="0: as many as it likes")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], required=True)
    parser.add_argument("--tokens", type=int, required=True, help="KV for so many at a time")
    parser.add_argument("--sequence", type=int, required=True, help="tokens of the longest one")
    parser.add_argument("--branches", type=int, required=True)
    parser.add_argument("--isa", help="use nothing beyond this instruction set")
    for name, settings in extra:
        parser.add_argument(name, **settings)
    return parser.parse_args()


def limit_onednn(isa: str | None) -> None:
    """Keep oneDNN (torch, vLLM) off the tiles; before torch is imported."""
    if isa == "avx512_bf16":
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


class Laps:
    """Seconds between calls, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._since = now - self._since, now


def serve(prepare: Callable[[], tuple[Run, str]]) -> None:
    """Answer every line of standard input until it ends. prepare loads the model and gives the
    function that does the work, and a version. Whatever they print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, version = prepare()
    print(json.dumps({"ready": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)
