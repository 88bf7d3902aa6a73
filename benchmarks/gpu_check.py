"""The first run on a real GPU, in two parts that can run apart; no network is needed.

    python benchmarks/gpu_check.py correct [--json FILE]    # builds, tests, compares: 4 minutes
    python benchmarks/gpu_check.py speed [--json FILE]      # measures: 4 minutes

correct  builds rksc for this GPU alone (RKSC_CUDA_ARCHS), runs the tests of sessions with
         --device cuda, compares logits with transformers on the same GPU, times ASKS, CGEE, RSBCM.
speed    W1 and W2 on random models of 1B and 7B shape in bfloat16 beside transformers with a shared
         cache; attention as a fraction of measured bandwidth and matrix rate; launch gaps.

Needs nvcc, torch with CUDA, pytest and hypothesis; transformers where it is installed. Results are
printed and written as one JSON, to which the other part adds. --device cpu --models tiny tries the
script itself, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
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
    config: dict[str, Any], weights: dict[str, Any], options: argparse.Namespace
) -> Any:
    """transformers' model over the same weights, or None where it is not installed."""
    try:
        import transformers
    except ImportError:
        return None
    torch = torch_of(options)
    fields = {k: v for k, v in {**COMMON, **config}.items() if k not in ("architectures",)}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    half = {name: w.to(torch.bfloat16) for name, w in weights.items()}
    if config["tie_word_embeddings"]:
        half["lm_head.weight"] = half["model.embed_tokens.weight"]
    model.load_state_dict(half, assign=True)
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
    environment = dict(os.environ)
    if options.device != "cpu":
        major, minor = torch_of(options).cuda.get_device_capability()
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


def run_tests(options: argparse.Namespace) -> dict[str, Any]:
    """The tests of sessions on the device; the last line and what failed."""
    device = "cpu" if options.device == "cpu" else "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "--device", device, "-m",
               "not oracle and not slow", "tests/test_session.py", "tests/test_mechanisms.py",
               "tests/test_identities.py"]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"timeout": True, "output": text[-500:]}
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    return {"summary": done.stdout.strip().splitlines()[-1], "failed": failed}


def against_transformers(options: argparse.Namespace) -> dict[str, Any]:
    """Logits of a prompt, of a forked branch, and the mean KL divergence, beside transformers."""
    torch, config = torch_of(options), MODELS[options.models[0]]
    weights = random_weights(config, options)
    model = hugging_face(config, weights, options)
    if model is None:
        return {"skipped": "transformers is not installed"}
    import numpy as np

    rng = np.random.default_rng(5)
    tokens = [int(t) for t in rng.integers(0, config["vocab_size"], 200)]
    session = session_of(config, weights, options)
    kid = session.prefill(tokens[:150]).fork([tokens[150:]])[0]
    with torch.no_grad():
        ids = torch.tensor([tokens], device=options.device)
        theirs = model(ids).logits[0, -1].float().cpu().numpy().astype(np.float64)
    ours = kid.logits.astype(np.float64)
    p, q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (theirs, ours))
    return {
        "copied_bytes": session.copied_bytes,
        "largest_difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        "kl_nats": float((np.exp(p) * (p - q)).sum()),
        "same_top": int(ours.argmax()) == int(theirs.argmax()),
    }


def mechanisms(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a similar prefill (ASKS), a verification with shortcuts and without (CGEE), a
    generation after an eviction (RSBCM)."""
    from rksc import ASKS, CGEE
    from rksc.bench import Shape, workload

    config = MODELS[options.models[0]]
    small = options.device == "cpu"
    work = workload(config["vocab_size"], Shape(prefix=64, branches=4) if small else Shape())
    session = session_of(config, random_weights(config, options), options)
    session.asks = ASKS.paper()
    root = session.prefill(work.prefix)
    other = [*work.prefix[:-2], *work.prefix[-1:], *work.prefix[-2:-1]]
    kids = root.fork(list(work.suffixes))
    session.generate(kids, 4, stop_ids=())

    def verify(cgee: CGEE | None) -> Any:
        return session.verify(kids, work.question, work.yes, work.no, cgee=cgee)

    def again() -> Any:
        session.invalidate()  # all KV goes, as after an eviction of everything
        return session.compute(kids)

    return {
        "asks": timed(options, lambda: session.prefill(other, similar_to=root, suffix=[1, 2])),
        "verify_all": timed(options, lambda: verify(None)),
        "verify_cgee": timed(options, lambda: verify(CGEE())),
        "recompute": timed(options, again),
    }


# ---- speed ---------------------------------------------------------------------------------------


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """The GPU, its measured bandwidth (a copy of 2 GiB) and bf16 matrix rate (8192 cubed)."""
    torch = torch_of(options)
    if options.device == "cpu":
        return {"name": "cpu", "bytes_per_second": 1.0, "flop_per_second": 1.0}
    a = torch.empty(1 << 30, dtype=torch.uint8, device=options.device)
    b = torch.empty_like(a)
    copy = timed(options, lambda: b.copy_(a))
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=options.device)
    product = timed(options, lambda: x @ x)
    return {
        "name": torch.cuda.get_device_name(), "torch": torch.__version__,
        "bytes_per_second": 2 * a.numel() / copy, "flop_per_second": 2 * 8192**3 / product,
    }  # fmt: skip


def branching(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """W1 and W2, the quicker of two runs by phase, and transformers with a shared cache."""
    from rksc.bench import Shape, shared, workload

    config = MODELS[name]
    weights = random_weights(config, options)
    model = hugging_face(config, weights, options)
    shapes = {"W1": Shape(), "W2": Shape(prefix=4096, branches=32)}
    if options.device == "cpu":
        shapes = {"W1": Shape(prefix=64, branches=2, suffix=4, new=4, verify=3)}
    found: dict[str, Any] = {}
    for workload_name, shape in shapes.items():
        work = workload(config["vocab_size"], shape)
        runs = []
        for _ in range(3):  # the first records and captures
            session = session_of(config, weights, options)
            outcome = shared(session, work)
            runs.append({k: v.seconds for k, v in outcome.clock.phases.items()})
            del session, outcome
        best = min(runs[1:], key=lambda phases: sum(phases.values()))
        found[workload_name] = {"rksc": best, "rksc_first": runs[0]}
        if model is not None:
            found[workload_name]["transformers"] = peer(model, work, options)
    return found


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


def steps(name: str, options: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """One decode step for several numbers of branches and lengths of the shared prefix.

    The slope over the prefix is attention: bytes of shared K and V over it is a fraction of the
    bandwidth; what is left at no prefix beyond the weights' bytes is launches and gaps.
    """
    from rksc.bench import Shape, flop, workload
    from rksc.config import ModelConfig

    config = MODELS[name]
    parsed = ModelConfig.of({**COMMON, **config})
    weights = random_weights(config, options)
    weight_bytes = sum(w.numel() * w.element_size() for w in weights.values())
    kv_bytes = 4 * parsed.n_layers * parsed.n_kv_heads * parsed.head_dim  # bf16, K and V
    small = options.device == "cpu"
    lengths, new = ((32, 64), 4) if small else ((64, 2048, 7000), 32)
    session = session_of(config, weights, options)
    rows = []
    for branches in (1, 8) if small else (1, 8, 32):
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
        floor = weight_bytes / measured["bytes_per_second"]
        rows.append({
            "branches": branches, "seconds_per_step": seconds,
            "attention_bandwidth_fraction":
                kv_bytes / slope / measured["bytes_per_second"] if slope > 0 else None,
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
        "prefill_matrix_rate_fraction": rate / measured["flop_per_second"],
    }  # fmt: skip


# ---- the command ---------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["correct", "speed"])
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_check.json")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the script")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["1B", "7B"])
    parser.add_argument("--no-build", action="store_true", help="rksc is built already")
    options = parser.parse_args()
    results = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def part(name: str, work: Callable[[], Any]) -> Any:
        """A failure is a result too; what was found is written at once."""
        start = time.perf_counter()
        try:
            found = work()
        except Exception as error:  # whatever breaks, the other parts still run
            found = {"error": f"{type(error).__name__}: {error}"}
        results[name] = found
        results.setdefault("seconds", {})[name] = time.perf_counter() - start
        print(f"{name}: {json.dumps(found)}", flush=True)
        options.json.write_text(json.dumps(results, indent=1), "utf-8")
        return found

    if options.part == "correct":
        if not options.no_build:
            part("build", lambda: build(options))
        part("tests", lambda: run_tests(options))
        part("against transformers", lambda: against_transformers(options))
        part("mechanisms", lambda: mechanisms(options))
    else:
        measured = part("machine", lambda: machine(options))
        for name in options.models:
            part(f"branching {name}", lambda name=name: branching(name, options))
            part(f"steps {name}", lambda name=name: steps(name, options, measured))
    bad = [name for name, found in results.items() if isinstance(found, dict) and "error" in found]
    return int(bool(bad or results.get("tests", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
