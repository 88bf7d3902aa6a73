"""The first run on a real GPU, in two halves that can run apart; no network is needed.

    python benchmarks/gpu_check.py correct speed [--budget SECONDS] [--json FILE]

correct  builds rksc for this GPU alone (RKSC_CUDA_ARCHS), runs small sessions beside the CPU's,
         plainly and under compute-sanitizer where it is installed, and the tests of sessions with
         --device cuda; compares logits with transformers on the same GPU; times ASKS, CGEE, RSBCM.
speed    rates of the machine; attention alone as a fraction of them; decode steps, and how much of
         one no kernel runs; W1 and W2 on random models of 1B and 7B shape in bfloat16, and
         transformers with a shared cache.

Each part is a process of its own with a time limit, so none takes another along; any can be named
alone: "steps:7B", or "steps" for all --models. All parts of one JSON have --budget seconds
together, also those of an earlier call: the most telling come first, one gets at most what is left,
and "not_run" names those for which nothing was. Results are printed and written as one JSON, to
which later parts add; what a part prints, a traceback or the tests' output, is in the .log beside
it. Both lie in $OUT where that is set, else in build/.

Needs nvcc, torch with CUDA, setuptools, pytest and hypothesis; transformers where it is installed.
dlpack.h is torch's where neither apache-tvm-ffi nor RKSC_DLPACK_INCLUDE brings it. --device cpu
--models tiny tries the script itself, without a GPU: attention is the host runtime's then.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MODELS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
           "vocab_size": 128256, "tie_word_embeddings": True},
    "7B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "vocab_size": 32000, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "vocab_size": 512, "tie_word_embeddings": False},
}  # fmt: skip
COMMON = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 8192, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


# ---- what both parts use -----------------------------------------------------------------------


def torch_of(options: argparse.Namespace) -> Any:
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --device cpu --models tiny tries the script itself")
    return torch


def random_weights(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Random bfloat16 weights on the device, by Hugging Face name; norms are ones."""
    torch = torch_of(options)
    generator = torch.Generator(device=options.device).manual_seed(1)
    width, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, cols: int) -> Any:
        made = torch.empty(rows, cols, dtype=torch.bfloat16, device=options.device)
        return made.normal_(0, cols**-0.5, generator=generator)

    def ones(dtype: Any) -> Any:
        return torch.ones(width, dtype=dtype, device=options.device)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], width)}
    weights["model.norm.weight"] = ones(torch.float32)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = ones(torch.float32)
        for name, rows, cols in (
            ("self_attn.q_proj", q, width), ("self_attn.k_proj", kv, width),
            ("self_attn.v_proj", kv, width), ("self_attn.o_proj", width, q),
            ("mlp.gate_proj", ffn, width), ("mlp.up_proj", ffn, width),
            ("mlp.down_proj", width, ffn),
        ):  # fmt: skip
            weights[f"{layer}{name}.weight"] = matrix(rows, cols)
    return weights


def session_of(
    config: dict[str, Any], weights: Any, options: argparse.Namespace, **more: Any
) -> Any:
    from rksc import BranchSession

    more = {"kv_bytes": "4GiB" if options.device != "cpu" else "64MiB", **more}
    return BranchSession(
        weights, {**COMMON, **config}, device=options.device, dtype="bfloat16", **more
    )


def hugging_face(
    config: dict[str, Any], weights: dict[str, Any], options: argparse.Namespace, dtype: Any
) -> Any:
    """transformers' model of the same numbers; in bfloat16 its matrices are those of `weights`."""
    import transformers

    torch = torch_of(options)
    fields = {k: v for k, v in {**COMMON, **config}.items() if k not in ("architectures",)}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    theirs = {name: w.to(dtype) for name, w in weights.items()}
    if config["tie_word_embeddings"]:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    model.load_state_dict(theirs, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(options.device)
    return model.eval()


def timed(options: argparse.Namespace, work: Callable[[], Any], least: int = 3) -> float:
    """Seconds of the quickest run after one that does not count."""
    torch = torch_of(options)

    def once() -> float:
        start = time.perf_counter()
        work()
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(least))


# ---- correct -------------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> dict[str, Any]:
    """The extension in place, for this GPU alone."""
    torch, environment = torch_of(options), dict(os.environ)
    if not importlib.util.find_spec("tvm_ffi") and "RKSC_DLPACK_INCLUDE" not in environment:
        header = ROOT / "build" / "include" / "dlpack" / "dlpack.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h", header)
        environment["RKSC_DLPACK_INCLUDE"] = str(header.parent.parent)
    if options.device != "cpu":
        major, minor = torch.cuda.get_device_capability()
        arch = f"{major}{minor}"
        known = re.findall(r'"(\d+)"', (ROOT / "setup.py").read_text("utf-8").split("ARCHS = ")[1])
        environment["RKSC_CUDA"] = "on"
        environment["RKSC_CUDA_ARCHS"] = arch if arch in known else "80"
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    return {"seconds": time.perf_counter() - start, "archs": environment.get("RKSC_CUDA_ARCHS")}


def small(options: argparse.Namespace) -> dict[str, Any]:
    """A prefill, forks and a replayed generation with each kind of head; weights from the host.

    By head: the largest difference from the CPU's logits, as a fraction of the largest of those.
    """
    import numpy as np

    found: dict[str, Any] = {"sound": True}
    host = argparse.Namespace(**{**vars(options), "device": "cpu"})
    for head in (64, 128, 20):  # 20: the plain kernel
        config = {**MODELS["tiny"], "head_dim": head}
        weights, rows = random_weights(config, host), []
        for where in (options, host):
            session = session_of(config, weights, where, kv_bytes="64MiB")
            kids = session.prefill(list(range(300))).fork([[i] for i in range(8)])
            rows.append(np.stack([kid.logits for kid in kids]))
            session.generate(kids, 5, stop_ids=())
            found["sound"] &= bool(all(np.isfinite(kid.logits).all() for kid in kids))
        off = float(np.abs(rows[0] - rows[1]).max() / np.abs(rows[1]).max())
        found[f"head {head}"] = off
        found["sound"] &= off <= 0.05
    return found


def memcheck(options: argparse.Namespace) -> dict[str, Any]:
    """`small` under compute-sanitizer; the log has what it says."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).is_file():
        return {"skipped": "compute-sanitizer is not installed"}
    target = options.result.with_suffix(".small")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__,
               "small", "--device", options.device, "--result", str(target)]  # fmt: skip
    done = subprocess.run(command, check=False)
    finished = target.exists()
    target.unlink(missing_ok=True)
    return {"returncode": done.returncode, "finished": finished}


def tests(options: argparse.Namespace) -> dict[str, Any]:
    """The tests of sessions on the device, as far as the time goes: how many passed, what failed,
    the closing line; "cut" where that was not all."""
    device = "cpu" if options.device == "cpu" else "cuda"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short",
               "--device", device, "-m", "not oracle and not slow", "-p", "no:cacheprovider",
               "tests/test_session.py", "tests/test_mechanisms.py",
               "tests/test_identities.py"]  # fmt: skip
    return watched(command, options.limit - LEAST)


def watched(command: list[str], seconds: float) -> dict[str, Any]:
    """The outcome of a pytest that is ended after `seconds`; only then its status is no failure."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        end = threading.Timer(seconds, running.terminate)
        end.start()
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
        end.cancel()
    cut = running.returncode == -signal.SIGTERM
    return {**outcome(lines), "cut": cut, "returncode": 0 if cut else running.returncode}


def outcome(lines: list[str]) -> dict[str, Any]:
    """What `pytest -v` printed, wherever it ended."""
    found = [re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR)\b", line) for line in lines]
    results = [(match[1], match[2]) for match in found if match]
    failed = [name for name, result in results if result != "PASSED"]
    return {
        "sound": bool(results) and not failed, "passed": len(results) - len(failed),
        "failed": failed, "summary": lines[-1] if lines else "",
    }  # fmt: skip


def logits(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The last logits of 8 forks of a long prefix, before and after a generation in which graphs
    are captured and replayed, beside transformers in float32.

    `ours` and `theirs` (transformers in bfloat16) are the largest differences from float32, as a
    fraction of the largest logit; ours may be twice theirs.
    """
    import numpy as np

    torch, config = torch_of(options), MODELS[name]
    weights = random_weights(config, options)
    rng = np.random.default_rng(5)
    n_prefix, n_kids, n_new = (100, 3, 5) if options.device == "cpu" else (1500, 8, 6)
    prefix, *suffixes = (
        rng.integers(0, config["vocab_size"], n).tolist() for n in [n_prefix, *[16] * n_kids]
    )
    session = session_of(config, weights, options)
    kids = session.prefill(prefix).fork(suffixes)
    texts, ours = [], []
    for new in (0, n_new):
        if new:
            session.generate(kids, new, stop_ids=())
        session.compute(kids)
        texts.append([kid.tokens.tolist() for kid in kids])
        ours.append(np.stack([kid.logits for kid in kids]).astype(np.float64))

    def peer_logits(dtype: Any) -> list[Any]:
        model = hugging_face(config, weights, options, dtype)
        with torch.no_grad():
            return [
                model(torch.tensor(rows, device=options.device), logits_to_keep=1)
                .logits[:, -1].double().cpu().numpy()
                for rows in texts
            ]  # fmt: skip

    def normed(x: Any) -> Any:
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    found: dict[str, Any] = {"copied_bytes": session.copied_bytes, "sound": True}
    both = zip(("forked", "generated"), ours, peer_logits(torch.float32),
               peer_logits(torch.bfloat16), strict=True)  # fmt: skip
    for when, mine, exact, half in both:
        largest = np.abs(exact).max()
        off, allowed = (float(np.abs(x - exact).max() / largest) for x in (mine, half))
        p, q = normed(exact), normed(mine)
        found[when] = {
            "ours": off, "theirs": allowed, "rows": len(mine),
            "kl_nats": float((np.exp(p) * (p - q)).sum(-1).max()),
            "same_top": int((mine.argmax(-1) == exact.argmax(-1)).sum()),
            "same_top_theirs": int((half.argmax(-1) == exact.argmax(-1)).sum()),
        }  # fmt: skip
        found["sound"] &= bool(off <= 2 * allowed + 1e-3)  # NaN is not
    return found


def mechanisms(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a similar prefill (ASKS), and of a verification with shortcuts and without
    (CGEE); and RSBCM."""
    from rksc import ASKS, CGEE
    from rksc.experiments.workload import Shape, workload

    config = MODELS[name]
    tiny = options.device == "cpu"
    work = workload(config["vocab_size"], Shape(prefix=64, branches=4) if tiny else Shape())
    weights = random_weights(config, options)
    session = session_of(config, weights, options)
    session.asks = ASKS.paper()
    root = session.prefill(work.prefix)
    other = [*work.prefix[:-2], *work.prefix[-1:], *work.prefix[-2:-1]]
    kids = root.fork(list(work.suffixes))
    session.generate(kids, 4, stop_ids=())

    def verify(cgee: CGEE | None) -> Any:
        return session.verify(kids, work.question, work.yes, work.no, cgee=cgee)

    return {
        "asks": timed(options, lambda: session.prefill(other, similar_to=root, suffix=[1, 2])),
        "verify_all": timed(options, lambda: verify(None)),
        "verify_cgee": timed(options, lambda: verify(CGEE())),
        "rsbcm": evictions(config, weights, options),
    }


def evictions(
    config: dict[str, Any], weights: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """RSBCM: eight branches with scores go on in turn, with all the KV that they need and with
    half of what they need for themselves; blocks go by omega, and what is missed is recomputed."""
    from rksc.experiments.workload import Shape, workload
    from rksc.model.config import ModelConfig

    parsed = ModelConfig.of({**COMMON, **config})
    tiny = options.device == "cpu"
    shape = Shape(prefix=64, suffix=32) if tiny else Shape(suffix=256)
    work = workload(config["vocab_size"], shape)
    token = 4 * parsed.n_layers * parsed.n_kv_heads * parsed.head_dim  # bf16, K and V
    own = shape.branches * (shape.suffix + 8 + 16)  # generated, the rest of a block
    found: dict[str, Any] = {}
    for what, tokens in (("all", shape.prefix + own), ("half", shape.prefix + own // 2)):
        session = session_of(config, weights, options, kv_bytes=token * (tokens + 16))
        kids = session.prefill(work.prefix).fork(list(work.suffixes))
        for i, kid in enumerate(kids):
            kid.score = i / len(kids)

        def once(session: Any = session, kids: Any = kids) -> None:
            for kid in kids:
                session.generate(kid, 1, stop_ids=())

        seconds, stats = timed(options, once, 2), session.stats()
        found[what] = {
            "seconds": seconds, "evictions": stats.evictions,
            "tokens_recomputed": stats.tokens_recomputed,
        }  # fmt: skip
    return {**found, "sound": found["half"]["evictions"] > found["all"]["evictions"]}


# ---- speed ---------------------------------------------------------------------------------------


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """The GPU, its measured bandwidths (copying 2 GiB, adding up 2 GiB) and bf16 matrix rate
    (8192 cubed)."""
    torch = torch_of(options)
    if options.device == "cpu":
        return {"name": "cpu", "bytes_per_second": 1.0, "flop_per_second": 1.0}
    a = torch.ones(1 << 29, device=options.device)
    b = torch.empty_like(a)
    copy = timed(options, lambda: b.copy_(a))
    read = timed(options, a.sum)
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=options.device)
    product = timed(options, lambda: x @ x)
    return {
        "name": torch.cuda.get_device_name(), "torch": torch.__version__,
        "copied_bytes_per_second": 2 * a.nbytes / copy, "read_bytes_per_second": a.nbytes / read,
        "bytes_per_second": max(2 * a.nbytes / copy, a.nbytes / read),
        "flop_per_second": 2 * 8192**3 / product,
    }  # fmt: skip


def attention(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Attention alone, a layer at a time: its bytes and operations over its seconds, and as
    fractions of the measured rates.

    Bytes are those of keys and values that some row uses, once, and of queries and results. The
    layers are more than a cache holds. Batches of decoding are recorded, so all of their layers
    are one graph: gaps between its kernels count, the host's work does not.
    """
    import numpy as np
    from support import cudarig
    from support.native import RK_BF16
    from support.oprig import Plan, Row, Shape

    from rksc.cuda import library

    tiny, config = options.device == "cpu", MODELS[name]
    heads, groups, dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    trunk, own, prompt, layers, repeat = (64, 16, 80, 2, 2) if tiny else (4096, 32, 2048, 16, 64)
    batches = {"prefill": [Row(list(range(prompt // 16)), p, write=False) for p in range(prompt)]}
    for n in (1, 8, 32):
        stem, step = list(range(trunk // 16)), own // 16
        ends = [[trunk // 16 + step * i + j for j in range(step)] for i in range(n)]
        batches[f"decode {n}"] = [Row(stem + e, trunk + own - 1, write=False) for e in ends]
    shape = Shape(
        n_layers=layers, n_heads=heads, n_kv_heads=groups, head_dim=dim, max_rows=prompt,
        n_blocks=max(prompt, trunk + 32 * own) // 16,
    )  # fmt: skip
    where = None if tiny else cudarig.opened(library(), int(options.device[5:] or 0))
    measured, found = written(options).get("machine", {}), {}
    with cudarig.CudaRig(shape, RK_BF16, where) as rig:
        for block in range(shape.n_blocks):
            rig.kv_fill(block, 0x3C + block % 4)
        size = prompt * heads * dim
        query = rig.send(np.full(size, 0x3C3C, np.uint16))
        out = rig.send(np.zeros(size, np.uint16))
        for what, rows in batches.items():
            plan = Plan(rows, shape.block_tokens)
            plan.batch.roomy = len(rows) <= 64

            def once(n: int, plan: Any = plan) -> None:
                rig.start(plan)
                for i in range(n):
                    rig.attention(out, query, i % layers)
                rig.fetch(out, np.empty(8, np.uint16))

            more, one = (timed(options, lambda n=n: once(n), 5) for n in (repeat + 1, 1))
            seconds = (more - one) / repeat
            keys = {(row.table[p // 16], p % 16) for row in rows for p in range(row.position + 1)}
            moved = 4 * len(keys) * groups * dim + 4 * len(rows) * heads * dim
            done = 4 * sum(row.position + 1 for row in rows) * heads * dim
            found[what] = rates(seconds, moved, done, measured)
    return found


def rates(seconds: float, moved: int, done: int, measured: dict[str, Any]) -> dict[str, float]:
    """Bytes and operations over seconds, and as fractions of what was measured."""
    bandwidth, rate = moved / seconds, done / seconds
    return {
        "seconds": seconds, "bytes_per_second": bandwidth, "flop_per_second": rate,
        "bandwidth_fraction": bandwidth / measured.get("bytes_per_second", math.nan),
        "matrix_rate_fraction": rate / measured.get("flop_per_second", math.nan),
    }  # fmt: skip


def gaps(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Decode steps of 8 branches: the time in which some kernel runs, by torch's profiler, beside
    the time that steps take without it; and the kernels that take most."""
    from rksc.experiments.workload import Shape, workload

    torch, config = torch_of(options), MODELS[name]
    tiny = options.device == "cpu"
    new = 4 if tiny else 32
    session = session_of(config, random_weights(config, options), options)
    work = workload(config["vocab_size"], Shape(prefix=64 if tiny else 2048))
    root = session.prefill(work.prefix)

    def decode() -> None:
        session.generate(root.fork([[i] for i in range(8)]), new, stop_ids=())

    wall = timed(options, decode)
    with torch.profiler.profile(
        activities=[getattr(torch.profiler.ProfilerActivity, "CPU" if tiny else "CUDA")]
    ) as profile:
        decode()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not kernels:
        return {"wall_seconds_per_step": wall / new, "skipped": "the profiler saw no kernel"}
    return {"wall_seconds_per_step": wall / new, **busy(kernels, wall, new)}


def busy(kernels: list[tuple[str, float, float]], wall: float, steps: int) -> dict[str, Any]:
    """Of kernels (name, begin, end in microseconds): time in which some runs, by step, the share
    of `wall` seconds that is left, and microseconds a step by name, the largest first."""
    some, until = 0.0, -math.inf
    by_name: dict[str, float] = {}
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        some += max(end - max(begin, until), 0.0)
        until = max(until, end)
        by_name[name] = by_name.get(name, 0.0) + (end - begin) / steps
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:16]
    return {
        "kernels_per_step": len(kernels) / steps,
        "kernel_seconds_per_step": some / 1e6 / steps,
        "idle_fraction": 1 - some / 1e6 / wall,
        "microseconds_per_step": dict(largest),
    }


def shapes(options: argparse.Namespace) -> dict[str, Any]:
    from rksc.experiments.workload import Shape

    if options.device == "cpu":
        return {"W1": Shape(prefix=64, branches=2, suffix=4, new=4, verify=3)}
    return {"W1": Shape(), "W2": Shape(prefix=4096, branches=32)}


def branching(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of W1's and W2's phases: the quicker of two runs behind one that records and
    captures, and that one."""
    from rksc.experiments.workload import shared, workload

    config = MODELS[name]
    weights = random_weights(config, options)
    found: dict[str, Any] = {}
    for workload_name, shape in shapes(options).items():
        work = workload(config["vocab_size"], shape)
        session, runs = session_of(config, weights, options), []
        for _ in range(3):
            clock = shared(session, work).clock  # the branches are gone
            runs.append({k: v.seconds for k, v in clock.phases.items()})
            session.invalidate()  # KV, not what was captured
        del session, clock
        best = min(runs[1:], key=lambda phases: sum(phases.values()))
        found[workload_name] = {"best": best, "first": runs[0]}
    return found


def transformers_branching(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the same phases by transformers; "copy" is its copying of the cache."""
    from rksc.experiments.workload import workload

    config, torch = MODELS[name], torch_of(options)
    model = hugging_face(config, random_weights(config, options), options, torch.bfloat16)
    return {
        workload_name: peer(model, workload(config["vocab_size"], shape), options)
        for workload_name, shape in shapes(options).items()
    }


def peer(model: Any, work: Any, options: argparse.Namespace) -> dict[str, float]:
    """transformers: the prefix once, its cache repeated for the branches, greedy."""
    import copy

    import transformers

    torch = torch_of(options)
    phases: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        if options.device != "cpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        phases[name], clock = now - clock, now

    def ids(rows: Any) -> Any:
        return torch.tensor(rows, device=options.device)

    for _ in range(2):  # the first warms up
        with torch.no_grad():
            clock = time.perf_counter()
            cache = transformers.DynamicCache()
            model(ids([work.prefix]), past_key_values=cache, logits_to_keep=1)
            lap("prefill")
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(work.suffixes))
            lap("copy")
            out = model(ids(work.suffixes), past_key_values=cache, logits_to_keep=1)
            lap("suffix")
            for _ in range(work.max_new_tokens):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = model(token, past_key_values=cache)
            lap("decode")
            question = ids([work.question] * len(work.suffixes))
            model(question, past_key_values=cache, logits_to_keep=1)
            lap("verify")
            del cache, out
    return phases


def step_bytes(config: dict[str, Any], weights: dict[str, Any]) -> int:
    """Bytes of weights that a decode step reads; of an embedding that is not the head, some rows
    alone, which do not count."""
    unread = set() if config["tie_word_embeddings"] else {"model.embed_tokens.weight"}
    return sum(w.nbytes for name, w in weights.items() if name not in unread)


def steps(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One decode step for several numbers of branches and lengths of the shared prefix.

    The slope over the prefix is attention: bytes of shared K and V over it is a fraction of the
    bandwidth; what is left at no prefix beyond the weights' bytes is launches and gaps.
    """
    from rksc.experiments.workload import Shape, flop, workload
    from rksc.model.config import ModelConfig

    measured = written(options).get("machine", {})
    bandwidth = measured.get("bytes_per_second", math.nan)
    config = MODELS[name]
    parsed = ModelConfig.of({**COMMON, **config})
    weights = random_weights(config, options)
    kv_bytes = 4 * parsed.n_layers * parsed.n_kv_heads * parsed.head_dim  # bf16, K and V
    tiny = options.device == "cpu"
    lengths, new = ((32, 64), 4) if tiny else ((64, 2048, 7000), 32)
    session = session_of(config, weights, options)
    rows = []
    for branches in (1, 8) if tiny else (1, 8, 32):
        seconds = {}
        for length in lengths:
            work = workload(config["vocab_size"], Shape(prefix=length))
            root = session.prefill(work.prefix)

            def decode(root: Any = root, branches: int = branches) -> None:
                # Different tokens: equal rows would be computed once.
                kids = root.fork([[i] for i in range(branches)])
                session.generate(kids, new, stop_ids=())

            seconds[length] = timed(options, decode, 2) / new
            root.drop()
        low, high = lengths[0], lengths[-1]
        slope = (seconds[high] - seconds[low]) / (high - low)
        floor = step_bytes(config, weights) / bandwidth
        rows.append({
            "branches": branches, "seconds_per_step": seconds,
            "attention_bandwidth_fraction":
                kv_bytes / slope / bandwidth if slope > 0 else None,
            "seconds_beyond_weights": seconds[low] - floor,
        })  # fmt: skip
    length = lengths[-1]
    work = workload(config["vocab_size"], Shape(prefix=length))

    def prefill() -> None:
        session.invalidate()
        session.prefill(work.prefix)

    took = timed(options, prefill, 2)
    rate = flop(parsed, 0, length) / took
    return {
        "decode": rows, "prefill_tokens": length, "prefill_seconds": took,
        "prefill_matrix_rate_fraction": rate / measured.get("flop_per_second", math.nan),
    }  # fmt: skip


# ---- the command ---------------------------------------------------------------------------------

PARTS: dict[str, tuple[int, Callable[..., dict[str, Any]]]] = {
    "build": (200, build),
    "small": (60, small),
    "machine": (60, machine),
    "logits": (60, logits),
    "attention": (60, attention),
    "steps": (60, steps),
    "gaps": (60, gaps),
    "rksc": (60, branching),
    "mechanisms": (60, mechanisms),
    "transformers": (60, transformers_branching),
    "tests": (150, tests),
    "memcheck": (60, memcheck),
}
"""In the order in which they run: seconds that a part may take, and what it does: of one model
where it takes one, as "logits:7B" does."""

LEAST = 5
"""Seconds with which it makes no sense to begin."""


def written(options: argparse.Namespace) -> dict[str, Any]:
    """What earlier parts found."""
    text = options.json.read_text("utf-8") if options.json.exists() else ""
    results: dict[str, Any] = json.loads(text or "{}")
    return results


def chosen(options: argparse.Namespace) -> list[str]:
    """The parts by name, in order, each once; ValueError names what is none."""
    halves = {
        "correct": [
            *([] if options.no_build else ["build"]), "small", "memcheck", "tests",
            *(f"logits:{m}" for m in options.models), f"mechanisms:{options.models[0]}",
        ],
        "speed": [
            "machine",
            *(
                f"{part}:{m}" for part in ("attention", "steps", "gaps", "rksc", "transformers")
                for m in options.models
            ),
        ],
    }  # fmt: skip
    named = [
        part
        for name in options.parts
        for part in halves.get(name) or of_models(name, options.models)
    ]
    order = list(PARTS)
    return sorted(dict.fromkeys(named), key=lambda name: order.index(name.partition(":")[0]))


def of_models(name: str, models: list[str]) -> list[str]:
    """The part, or where it is of a model and names none, that of each of the models."""
    part, colon, model = name.partition(":")
    if part not in PARTS:
        raise ValueError(f"{name}: PART is correct, speed, or one of {', '.join(PARTS)}")
    takes_model = "name" in inspect.signature(PARTS[part][1]).parameters
    if colon and not takes_model:
        raise ValueError(f"{name}: {part} takes no model")
    if colon and model not in MODELS:
        raise ValueError(f"{name}: its model is one of {', '.join(MODELS)}")
    return [f"{part}:{m}" for m in models] if takes_model and not colon else [name]


def left(budget: float, seconds: dict[str, float], names: list[str]) -> float:
    """What of the budget earlier parts have left; those that will run again do not count."""
    return budget - sum(took for name, took in seconds.items() if name not in names)


def apart(name: str, options: argparse.Namespace, limit: float) -> Any:
    """What one part found, in a process of its own; a failure is a result too."""
    result, log = options.json.with_suffix(".part"), options.json.with_suffix(".log")
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, name, "--device", options.device,
               "--json", str(options.json), "--result", str(result),
               "--limit", str(limit)]  # fmt: skip
    with log.open("ab") as out:
        out.write(f"\n== {name}\n".encode())
        out.flush()
        begin = out.tell()
        running = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            reason = f"exit status {running.wait(limit)}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit:.0f} s"
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)  # and what it has started
                running.wait()
    if result.exists():
        found = json.loads(result.read_text("utf-8"))
        result.unlink()
        return found
    with log.open("rb") as text:
        text.seek(begin)
        return {"error": reason, "output": text.read().decode(errors="replace")[-2000:]}


def is_bad(found: dict[str, Any]) -> bool:
    """A part that failed, or one within it that is not sound."""
    inner = any(is_bad(part) for part in found.values() if isinstance(part, dict))
    failed = "error" in found or found.get("returncode", 0) != 0
    return inner or failed or not found.get("sound", True)


def run(options: argparse.Namespace, names: list[str]) -> int:
    """The parts, one after the other, into the JSON; 1 where one is bad or none had time."""
    results = written(options)
    seconds = results.setdefault("seconds", {})
    budget = left(options.budget, seconds, names)
    ran, late = [], []
    earlier = [name for name in results.get("not_run", []) if name not in names]
    for name in names:
        start = time.perf_counter()
        limit = min(PARTS[name.partition(":")[0]][0], budget)
        if limit < LEAST:
            late.append(name)  # what an earlier call found stays
        else:
            ran.append(name)
            found = results[name] = apart(name, options, limit)
            print(f"{name}: {json.dumps(found)}", flush=True)
            seconds[name] = time.perf_counter() - start
            budget -= seconds[name]
        results["not_run"] = earlier + late
        options.json.write_text(json.dumps(results, indent=1), "utf-8")
    if late:
        print(f"no time was left for: {', '.join(late)}", flush=True)
    return int(not ran or any(is_bad(results[name]) for name in ran))


def main() -> int:
    folder = Path(os.environ.get("OUT") or ROOT / "build")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="+", metavar="PART", help=f"correct, speed, or one of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--budget", type=float, default=450.0, metavar="SECONDS",
        help="of all parts of the JSON together (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=folder / "gpu_check.json")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["1B", "7B"])
    parser.add_argument("--no-build", action="store_true", help="rksc is built already")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # one part, in this process
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)  # seconds
    options = parser.parse_args()
    try:
        names = chosen(options)
    except ValueError as error:
        parser.error(str(error))
    if options.result:
        part, *model = names[0].split(":")
        found = PARTS[part][1](*model, options)
        options.result.write_text(json.dumps(found), "utf-8")
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    return run(options, names)


if __name__ == "__main__":
    sys.exit(main())
