"""Whole sessions on the CUDA backend, on the host runtime: numbers, interchange, failures.

`pytest --device cuda-host` runs the other tests of sessions there. These compare the two devices,
which none of the others does, and look at what only a GPU has: its memory lent by DLPack, its
stream, its ways to break.
"""

from __future__ import annotations

import ctypes as c
import gc
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import native
from support import producer as p
from support.cudarig import library, set_order
from support.models import ARCHITECTURES, SHARP, T4, Small, make
from support.sessions import assert_books, block_bytes, open_session

import rksc
from rksc import BranchSession, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parent / "cuda_host"))
from build import build

GATE = "model.layers.1.mlp.gate_proj.weight"
TO_DEVICE, TO_HOST = 1, 2


@pytest.fixture(autouse=True)
def on_host_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """device="cuda" is the host runtime; each test leaves it in order, and its memory empty."""
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", str(build()))
    runtime = library()[0]
    runtime.rk_host_used.restype = c.c_size_t
    gc.collect()
    before = runtime.rk_host_used(0)
    yield
    runtime.rk_host_reset()
    runtime.rk_host_set_devices(1, 8, 0, c.c_size_t(32 << 30))
    set_order("forward")
    gc.collect()
    assert runtime.rk_host_used(0) == before, "device memory was leaked"


def both(model: Small | str, **options: Any) -> tuple[BranchSession, BranchSession]:
    """The same session on the CPU and on the GPU."""
    return open_session(model, device="cpu", **options), open_session(
        model, device="cuda", **options
    )


def near(a: Any, b: Any, tolerance: float) -> bool:
    return bool(np.abs(np.asarray(a) - b).max() <= tolerance * np.abs(b).max())


# ---- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("model", ARCHITECTURES, ids=lambda m: m.name)
def test_every_architecture_computes_what_the_cpu_computes(model: Small) -> None:
    """Logits and hidden states after a prefill in three chunks, a fork and a suffix."""
    cpu, gpu = both(model, step_tokens=24)
    found = []
    for session in (cpu, gpu):
        root = session.prefill(model.tokens(60))
        kid = root.fork([model.tokens(5, seed=1)])[0]
        found.append((root.logits, kid.logits, kid.hidden))
    for ours, reference in zip(found[1], found[0], strict=True):
        assert near(ours, reference, 2e-5)
    assert (gpu.device, gpu.isa, cpu.isa) == ("cuda:0", "sm_80", rksc._core.isas[-1])
    assert "float32 on cuda:0 (sm_80), 0 " not in repr(gpu)
    assert "float32 on cuda:0 (sm_80), 2 branches" in repr(gpu)
    assert_books(gpu)


LONG_HEADS = make("long-heads", 24, num_attention_heads=2, num_key_value_heads=1, head_dim=128)


@pytest.mark.parametrize("model", [T4, LONG_HEADS], ids=lambda m: m.name)
def test_bfloat16_is_as_near_as_the_cpus(model: Small) -> None:
    """Both round inputs of products to bfloat16; the sums differ in order alone. A prompt's rows,
    and the rows of forks: units of many pairs and of few."""
    tokens, tails = model.tokens(70), [model.tokens(3, seed=1), model.tokens(2, seed=2)]
    found = []
    for session in both(model, dtype="bfloat16"):
        root = session.prefill(tokens)
        found.append([root.logits, *(kid.logits for kid in root.fork(tails))])
    for theirs, ours, tail in zip(*found, ([], *tails), strict=True):
        exact = model.rounded.reference.logits([*tokens, *tail])
        assert near(ours, exact, 2e-2)
        assert np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max()


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_generation_draws_the_cpus_tokens(order: str) -> None:
    """Seven branches of one prompt, sampled; they finish one after the other, so steps of every
    size are recorded, captured and replayed. Whatever the order in which threads run."""
    set_order(order, seed=5)
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11)
    results = []
    for session in both(SHARP):
        kids = session.prefill(SHARP.tokens(40)).fork(7)
        stop = [int(t) for t in range(0, SHARP.vocab, 9)]
        results.append(session.generate(kids, 12, sampling=sampling, stop_ids=stop))
        assert_books(session)
    for cpu, gpu in zip(*results, strict=True):
        assert list(gpu.tokens) == list(cpu.tokens)
        assert gpu.finish_reason == cpu.finish_reason
        if len(cpu.tokens):
            assert np.allclose(gpu.logprobs, cpu.logprobs, atol=1e-4)


@pytest.mark.parametrize("spoiled", [1, 1000])
def test_a_spoiled_capture_breaks_nothing(spoiled: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Another thread may synchronise the device while we capture: the step runs all the same. A
    second capture is tried; once that is spoiled, too, none is until the record is forgotten."""
    runtime, found = library()[0], []
    for session in both(SHARP):
        root = session.prefill(SHARP.tokens(20))
        left = [spoiled]
        runtime.rk_host_spoil_captures(spoiled)
        for _ in range(4):
            kids = root.fork([[1], [2]])
            found.append([list(g.tokens) for g in session.generate(kids, 9, stop_ids=())])
            left.append(runtime.rk_host_spoil_captures(0))
            runtime.rk_host_spoil_captures(left[-1])
        assert_books(session)
    assert found[:4] == found[4:]
    assert left[-1] < spoiled
    assert left[-1] == left[-2]
    capfd.readouterr()


def test_an_error_that_others_left_is_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """Another library's failed call is what the runtime tells as the last error."""
    runtime, session = library()[0], open_session(T4, device="cuda")
    for _ in range(2):
        assert runtime.cudaStreamDestroy(c.c_void_p(8)) != 0
        root = session.prefill(T4.tokens(20))
        assert runtime.cudaStreamDestroy(c.c_void_p(8)) != 0
        assert np.isfinite(root.logits).all()
        root.drop()
    capfd.readouterr()


def test_verdicts_scores_and_evictions_are_the_cpus() -> None:
    """A budget too small for all: branches are evicted and computed again on the way."""
    found = []
    for session in both(T4, kv_bytes=10 * block_bytes(T4)):
        root = session.prefill(T4.tokens(48))
        kids = root.fork([T4.tokens(20, seed=i) for i in range(6)])
        for kid in kids:
            assert kid.logits is not None  # its KV is computed, and somebody else's goes
        marks = session.verify(kids, prompt=[1, 2, 3], yes=5, no=6)
        scores = session.score(root, [T4.tokens(4, seed=9), T4.tokens(7, seed=8)])
        best = session.select(kids)
        evictions = session.stats().evictions
        found.append(([m.score for m in marks], scores, kids.index(best), evictions))
        assert_books(session)
    (cpu_marks, cpu_scores, cpu_best, evicted), (marks, scores, chosen, _) = found
    assert evicted > 0
    assert np.allclose(marks, cpu_marks, atol=1e-5)
    assert chosen == cpu_best
    for ours, theirs in zip(scores, cpu_scores, strict=True):
        assert np.allclose(ours, theirs, atol=1e-4)


def test_invalidate_uploads_again() -> None:
    """Weights that were uploaded follow the lender after invalidate(), and not before."""
    weights = {name: w.copy() for name, w in T4.weights.items()}
    session = BranchSession(
        weights, T4.model_config, device="cuda", kv_bytes="1MiB", dtype="float32"
    )
    before = session.prefill(T4.tokens(9)).logits
    weights["lm_head.weight"] *= np.float32(2)
    assert np.array_equal(session.prefill(T4.tokens(9)).logits, before)
    session.invalidate()
    assert near(session.prefill(T4.tokens(9)).logits, 2 * before, 1e-6)


# ---- lent weights -----------------------------------------------------------------------------


class OnGpu(p.Producer):
    """Exports a copy of the array in device memory that is still under way."""

    def __init__(self, array: NDArray[Any], offset: int = 0, **fields: Any) -> None:
        self.runtime = library()[0]
        address = c.c_void_p()
        whole = array if array.base is None else array.base
        self._bytes = whole.nbytes + offset
        assert self.runtime.cudaMalloc(c.byref(address), c.c_size_t(self._bytes)) == 0
        self.address = address
        host = c.c_void_p(whole.ctypes.data)
        to = c.c_void_p((address.value or 0) + offset)
        assert (
            self.runtime.cudaMemcpyAsync(to, host, c.c_size_t(whole.nbytes), TO_DEVICE, None) == 0
        )
        first = array.ctypes.data - whole.ctypes.data + offset
        fields = {"device": (p.CUDA, 0), "data": (address.value or 0) + first, **fields}
        super().__init__(array, **fields)

    def __dlpack__(self, **keywords: Any) -> Any:
        """As the protocol wants it: the consumer's stream waits for ours."""
        stream, event = keywords.get("stream"), c.c_void_p()
        if stream:
            assert self.runtime.cudaEventCreateWithFlags(c.byref(event), 2) == 0
            assert self.runtime.cudaEventRecord(event, None) == 0
            assert self.runtime.cudaStreamWaitEvent(c.c_void_p(stream), event, 0) == 0
        return super().__dlpack__(**keywords)

    def free(self) -> None:
        assert self.runtime.cudaFree(self.address) == 0


def lend(wrap: Any = OnGpu, **fields: Any) -> dict[str, Any]:
    return {name: wrap(w, **fields) for name, w in T4.weights.items()}


def close(lent: dict[str, Any]) -> None:
    """All were given back once; their memory goes."""
    gc.collect()
    for name, producer in lent.items():
        if isinstance(producer, OnGpu):
            assert producer.exports == producer.deleted == 1, name
            producer.free()


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("version", [(1, 0), None])
def test_weights_on_the_gpu_are_used_in_place(version: Any, order: str) -> None:
    """Nothing is copied, the producer learns our stream, and what it has queued comes first."""
    set_order(order)
    tokens = T4.tokens(12)
    expected = open_session(T4, device="cpu").prefill(tokens).logits
    lent = lend(version=version, max_version=version is not None)
    session = BranchSession(lent, T4.model_config, device="cuda", kv_bytes="1MiB")
    assert session.copied_bytes == 0
    assert all(isinstance(w.asked[-1]["stream"], int) and w.asked[-1]["stream"] > 2
               for w in lent.values())  # fmt: skip
    assert near(session.prefill(tokens).logits, expected, 2e-5)
    del session
    close(lent)


def test_weights_on_the_gpu_that_do_not_fit_are_converted() -> None:
    """Other strides, another dtype, an address between 16-byte borders: by way of the host."""
    expected = open_session(T4, device="cpu").prefill([1, 2, 3]).logits
    lent = lend()
    changed = {
        "model.norm.weight": OnGpu(T4.weights["model.norm.weight"], offset=4),
        "lm_head.weight": OnGpu(np.asfortranarray(T4.weights["lm_head.weight"])),
        GATE: OnGpu(np.ascontiguousarray(T4.weights[GATE][::-1])[::-1]),
    }
    for name, other in changed.items():
        lent[name].free()
        lent[name] = other
    session = BranchSession(lent, T4.model_config, device="cuda", kv_bytes="1MiB")
    assert session.copied_bytes == sum(T4.weights[name].nbytes for name in changed)
    assert near(session.prefill([1, 2, 3]).logits, expected, 2e-5)
    del session
    close(lent)


def test_memory_of_another_gpu_is_refused() -> None:
    library()[0].rk_host_set_devices(2, 8, 0, c.c_size_t(32 << 30))
    weights: dict[str, Any] = {**T4.weights, GATE: OnGpu(T4.weights[GATE], device=(p.CUDA, 1))}
    message = r"gate_proj.*CUDA.*2:1.*cuda:0"
    with pytest.raises(BufferError, match=message):
        BranchSession(weights, T4.model_config, device="cuda", kv_bytes="1MiB")
    close({GATE: weights[GATE]})


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_invalidate_waits_for_the_lenders_stream(order: str) -> None:
    """What the lender has queued on a stream of its own comes before the next prefill."""
    set_order(order)
    tokens, name, runtime = T4.tokens(12), "lm_head.weight", library()[0]
    lent, stream = lend(), c.c_void_p()
    session = BranchSession(lent, T4.model_config, device="cuda", kv_bytes="1MiB")
    before = session.prefill(tokens).logits
    assert runtime.cudaStreamCreateWithFlags(c.byref(stream), 1) == 0
    doubled = 2 * T4.weights[name]
    host, size = c.c_void_p(doubled.ctypes.data), c.c_size_t(doubled.nbytes)
    assert runtime.cudaMemcpyAsync(lent[name].address, host, size, TO_DEVICE, stream) == 0
    session.invalidate()
    assert near(session.prefill(tokens).logits, 2 * before, 1e-6)
    runtime.rk_host_fail_at(b"cudaDeviceSynchronize", 1)
    with pytest.raises(RuntimeError, match="cudaDeviceSynchronize"):
        session.invalidate()
    assert near(session.prefill(tokens).logits, 2 * before, 1e-6)
    assert runtime.cudaStreamDestroy(stream) == 0
    del session
    close(lent)


# ---- what is missing --------------------------------------------------------------------------


def test_no_gpu_no_such_gpu_an_old_one() -> None:
    """Each says what is wrong and what to do."""
    runtime = library()[0]
    for (n, major), device, error, text in (
        ((0, 8), "cuda", RuntimeError, "finds no GPU.*CUDA_VISIBLE_DEVICES"),
        ((2, 8), "cuda:2", ValueError, "cuda:2.*there are 2"),
        ((1, 7), "cuda", RuntimeError, "capability 7.*needs 8.0"),
    ):
        runtime.rk_host_set_devices(n, major, 5, c.c_size_t(32 << 30))
        with pytest.raises(error, match=text):
            open_session(T4, device=device)
    runtime.rk_host_set_devices(2, 8, 0, c.c_size_t(32 << 30))
    session = open_session(T4, device="cuda:1")
    assert session.device == "cuda:1"
    assert session.prefill([1, 2, 3]).logits.shape == (T4.vocab,)


@pytest.mark.parametrize("memory, text", [(200 << 20, "kv_bytes.*free"), (1 << 20, "memory")])
def test_out_of_memory_says_for_what(memory: int, text: str) -> None:
    runtime = library()[0]
    memory += runtime.rk_host_used(0)  # what other tests hold
    runtime.rk_host_set_devices(1, 8, 0, c.c_size_t(memory))
    with pytest.raises(MemoryError, match=text):
        open_session(T4, device="cuda", kv_bytes=1 << 30)


def test_a_library_that_is_not_there_or_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(RuntimeError, match=r"none\.so.*rksc\[cuda\]"):
        open_session(T4, device="cuda")
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", rksc._core.__file__)
    with pytest.raises(RuntimeError, match="another version"):
        open_session(T4, device="cuda")
    monkeypatch.delenv("RKSC_CUDA_LIBRARY")
    monkeypatch.setattr("rksc.cuda.Path", lambda _: tmp_path / "cuda.py")
    (tmp_path / "_cuda.cpython-310-of-another.so").touch()  # sorts before any
    with pytest.raises(RuntimeError, match="built without CUDA"):
        open_session(T4, device="cuda")
    (tmp_path / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    with pytest.raises(RuntimeError, match=r"file too short.*rksc\[cuda\]"):
        open_session(T4, device="cuda")


def test_a_library_of_other_headers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sizes say little: a field that fills a gap changes none. The headers' text says it."""
    abi = runpy.run_path(str(native.SOURCE / "abi.py"))
    assert {"backend.h", "rksc.h"} <= {path.name for path in abi["headers"](native.SOURCE)}
    for path in abi["headers"](native.SOURCE):
        shutil.copy(path, tmp_path)
    assert abi["flag"](tmp_path) == abi["flag"](native.SOURCE)
    header = tmp_path / "rksc.h"
    header.write_text(
        header.read_text("utf-8").replace("bool rope_interleaved;", "bool rope_interleaved, odd;")
    )
    source, target = tmp_path / "library.c", tmp_path / "library.so"
    source.write_text(
        '#include "backend.h"\n__attribute__((visibility("default")))\n'
        "const rk_cuda_calls rk_cuda_library = {.abi = RK_ABI};\n"
    )
    flags = ["-shared", "-fPIC", f"-I{tmp_path}", abi["flag"](tmp_path)]
    subprocess.run(["cc", *flags, str(source), "-o", str(target)], check=True)
    monkeypatch.setenv("RKSC_CUDA_LIBRARY", str(target))
    with pytest.raises(RuntimeError, match=r"library\.so belongs to another version"):
        open_session(T4, device="cuda")


@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "launch", "cudaStreamSynchronize"])
def test_a_device_that_breaks_says_which_call(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Never a silent wrong answer: the failure comes up in the call during which it happened, the
    books balance, and later calls fail with the same reason."""
    runtime = library()[0]
    session = open_session(T4, device="cuda")
    root = session.prefill(T4.tokens(20))
    for at in range(1, 40):
        runtime.rk_host_fail_at(call.encode(), at)
        try:
            root.logits  # noqa: B018
        except RuntimeError as error:
            text = "cuda|launch|rk_cuda" if call == "launch" else call
            assert re.search(text, str(error)), error
            break
        runtime.rk_host_fail_at(call.encode(), 0)
    else:
        pytest.fail(f"{call} was not reached")
    assert_books(session)
    with pytest.raises(RuntimeError):
        session.generate([root], 2)
    assert_books(session)
    capfd.readouterr()


def test_a_session_outlives_nothing(tmp_path: Path) -> None:
    """A process that ends with a session on the GPU ends well."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from support.sessions import open_session
session = open_session("T4", device="cuda")
print(len(session.generate(session.prefill([1, 2, 3]).fork(2), 4, stop_ids=())[0].tokens))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
