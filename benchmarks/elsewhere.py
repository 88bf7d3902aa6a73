"""The other comparisons of `branching.py --elsewhere`.

float32, Q8_0, Q4_1  W1 in other numbers, a quantised file as it is, against llama.cpp (and
                     transformers in float32)
W2                   prefix 4,096, 32 branches, against vLLM and llama.cpp
samples              8 greedy samples of one prompt against 1: nothing differs, one row serves all
fork                 of a branch of 1,024 tokens: time, and KV blocks copied
threads              rksc's default number of threads against every other, under `taskset -c 0` and
                     under a CPU quota of one processor (a cgroup, which needs root)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import contest
import engines
import machine

from rksc import BranchSession, Model, load
from rksc.experiments.workload import Shape, kv_bytes

CONTESTS = {
    "float32": ["rksc", "llama.cpp", "transformers"],
    "Q8_0": ["rksc", "llama.cpp"],
    "Q4_1": ["rksc", "llama.cpp"],
    "W2": ["rksc", "vLLM", "llama.cpp"],
}
CHECKS = ("samples", "fork", "threads")
NAMES = (*CONTESTS, *CHECKS)
Result = dict[str, Any]


def run(
    options: argparse.Namespace,
    setting: engines.Setting,
    side_by_side: Callable[..., dict[str, Any]],
    w2: Shape,
) -> Result:
    """{"contests": [JSON of each], "failed": [why, for those that broke off],
    "rows": [{"what", "value", "text", "must", "most"}]}."""
    names = options.elsewhere or NAMES
    contests, failed = [], []
    for name, field in CONTESTS.items():
        if name in names:
            changed = replace(setting, shape=w2) if name == "W2" else replace(setting, numbers=name)
            workload = "W2" if name == "W2" else "W1"
            try:
                contests.append(side_by_side(options, changed, workload, field, options.repeat))
            except RuntimeError as error:  # a contestant fell over: the others go on
                failed.append(f"{name}: {error}")
    rows: list[Result] = []
    model = load(setting.gguf, tokenizer=False)
    exact = {
        "tokenizer": None, "asks": None, "cgee": None, "dtype": setting.dtype,
        "n_threads": setting.threads, "isa": options.isa[0] if options.isa else None,
        "kv_bytes": kv_bytes(model.config, 4096),
    }  # fmt: skip
    if "samples" in names:
        rows += samples(model, exact, options.repeat)
    if "fork" in names:
        rows.append(fork(model, exact))
    if "threads" in names:
        rows += threads(setting, options.repeat)
    return {"contests": contests, "failed": failed, "rows": rows}


def row(what: str, value: float, text: str, must: float | None = None, most: bool = True) -> Result:
    """most: `value` should be at most `must`, else at least."""
    return {"what": what, "value": value, "text": text, "must": must, "most": most}


def _prompt(model: Model, n: int = 1024) -> list[int]:
    return list(contest.work(Shape(prefix=n), 0, model.config.vocab_size)["prefix"])


def samples(model: Model, exact: Mapping[str, Any], repeat: int, new: int = 32) -> list[Result]:
    """Time of 8 equal continuations over that of 1, alternating; sessions made outside."""
    prompt = _prompt(model)
    prefill: dict[int, list[float]] = {1: [], 8: []}
    decode: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(max(repeat, 5)):
        for n in (1, 8):
            session = model.session(**exact)
            start = time.perf_counter()
            root = session.prefill(prompt)
            middle = time.perf_counter()
            session.generate(root.fork(n), new, stop_ids=())
            prefill[n].append(middle - start)
            decode[n].append(time.perf_counter() - middle)
    median = statistics.median
    whole = {n: median(a + b for a, b in zip(prefill[n], decode[n], strict=True)) for n in (1, 8)}
    steps = {n: median(decode[n]) for n in (1, 8)}
    return [
        row("8 greedy samples of one prompt / 1", whole[8] / whole[1],
            f"{whole[8]:.3f} s / {whole[1]:.3f} s", 1.1),
        row("the same without the prefill", steps[8] / steps[1],
            f"{steps[8]:.3f} s / {steps[1]:.3f} s"),
    ]  # fmt: skip


def fork(model: Model, exact: Mapping[str, Any], times: int = 500) -> Result:
    """Microseconds of one fork, and KV blocks in use more than before while the fork lives."""
    session: BranchSession = model.session(**exact)
    root = session.prefill(_prompt(model))
    used, most, taken = session.stats().blocks_used, 0, []
    for _ in range(times):
        start = time.perf_counter()
        kids = root.fork(1)
        taken.append(time.perf_counter() - start)
        most = max(most, session.stats().blocks_used - used)
        kids[0].drop()
    value = statistics.median(taken) * 1e6
    copied = f"{most} KV blocks copied, median of {times}"
    return row("fork of 1,024 tokens, microseconds", value, copied, 10.0)


# ---- threads -----------------------------------------------------------------------------------


def threads(setting: engines.Setting, repeat: int) -> list[Result]:
    """Speed with the default number of threads, as a fraction of the best number's."""
    rows = []
    if shutil.which("taskset"):
        first = min(os.sched_getaffinity(0))
        what = f"default threads under taskset -c {first} / best"
        rows.append(_default_threads(setting, repeat, what, ["taskset", "-c", str(first)]))
    else:
        rows.append(row("default threads under taskset / best", 0.0, "not run: no taskset"))
    what = "default threads under a quota of 1 CPU / best"
    with cpu_quota() as group:
        if group is None:
            rows.append(row(what, 0.0, "not run: no right to make a cgroup with a CPU quota"))
        else:
            into = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
            rows.append(_default_threads(setting, repeat, what, into))
    return rows


def _default_threads(setting: engines.Setting, repeat: int, what: str, wrap: list[str]) -> Result:
    numbers = {"default": 0} | {str(n): n for n in range(1, (os.cpu_count() or 1) + 1)}
    contestants = [
        engines.rksc(setting, f"rksc {name}", wrap=wrap, threads=n) for name, n in numbers.items()
    ]
    vocabulary = load(setting.gguf, tokenizer=False).config.vocab_size
    logs = machine.ROOT / "build" / "peers"
    _, (rounds,) = contest.run(
        contestants, [setting.shape], repeat, vocabulary, setting.threads, logs
    )
    seconds = {
        name: statistics.median(compare.total(r["runs"][f"rksc {name}"]) for r in rounds)
        for name in numbers
    }
    best = min(seconds[name] for name in numbers if name != "default")
    text = ", ".join(f"{name}: {value:.2f} s" for name, value in seconds.items())
    return row(what, best / seconds["default"], text, 0.9, most=False)


@contextmanager
def cpu_quota(period_us: int = 100_000) -> Iterator[Path | None]:
    """A cgroup (version 1 or 2) with the time of one processor, removed afterwards; None where
    none can be made."""
    root = Path("/sys/fs/cgroup")
    group = None
    for parent, file, text in (
        (root / "cpu", "cpu.cfs_quota_us", str(period_us)),
        (root, "cpu.max", f"{period_us} {period_us}"),
    ):
        made = parent / f"rksc-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / file).write_text(text)
            group = made
            break
        except OSError:
            made.rmdir()
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


# ---- text --------------------------------------------------------------------------------------


def table(result: Result) -> str:
    """All of it as text."""
    parts = [compare.table(data) for data in result["contests"]] + result["failed"]
    lines = []
    for r in result["rows"]:
        must = "" if r["must"] is None else f"{'<=' if r['most'] else '>='} {r['must']:g}"
        reached = compare.verdict(r["value"], r["must"], None, r["most"])
        lines.append(f"{r['what']:48}{r['value']:>8.3f}  {must:8}{reached:9}{r['text']}")
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)
