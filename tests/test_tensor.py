"""rksc.Tensor: bounds, lifetime, and what it gives to other libraries."""

from __future__ import annotations

import gc
import itertools
import mmap
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rksc._core import Tensor


def test_describes_itself() -> None:
    tensor = Tensor(bytes(2 * 144), "Q4_K", (2, 256))
    assert (tensor.type, tensor.shape, tensor.nbytes, tensor.name) == ("Q4_K", (2, 256), 288, None)
    tensor.name = "model.norm.weight"
    assert repr(tensor) == "<rksc.Tensor model.norm.weight Q4_K (2, 256)>"
    tensor.name = None
    assert repr(tensor) == "<rksc.Tensor Q4_K (2, 256)>"
    with pytest.raises(TypeError, match="name"):
        tensor.name = 3  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((bytes(8), "F33", (2,)), "unknown type F33"),
        ((bytes(8), "f32", (2,)), "unknown type f32"),
        ((bytes(8), "F32", (3,)), "12 bytes of F32 at offset 0 reach past the buffer's 8"),
        ((bytes(8), "F32", (2,), 4), "8 bytes of F32 at offset 4"),
        ((bytes(8), "F32", (1,), 2**62), "reach past"),
        ((bytes(8), "F32", (1,), 2**70), "offset"),
        ((bytes(8), "F32", (1,), -4), "offset is negative"),
        ((bytes(8), "F32", (1,), 2), "unaligned"),
        ((bytes(8), "F32", (-1,)), "dimension is negative"),
        ((bytes(8), "F32", (2**64,)), "dimension is negative or above"),
        ((bytes(8), "F32", (2**62,)), "64 bits"),
        ((bytes(8), "F32", (2**32, 2**32)), "64 bits"),
        ((bytes(8), "F32", (2**31, 2**31, 4)), "64 bits"),
        ((bytes(18), "Q4_0", (31,)), "blocks of 32 elements"),
        ((bytes(18), "Q4_0", (32, 1)), "blocks of 32 elements"),
        ((bytes(18), "Q4_0", ()), "blocks of 32 elements"),
        ((bytes(17), "Q4_0", (32,)), "18 bytes of Q4_0"),
        ((bytes(8), "F32", (1,) * 9), "9 dimensions"),
    ],
)
def test_what_does_not_fit_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tensor(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [(3, "F32", (1,)), (bytes(4), "F32", 1), (bytes(4), "F32", (1.0,)), (bytes(4), 1, (1,)), ()],
)
def test_wrong_kinds_are_type_errors(arguments: Any) -> None:
    with pytest.raises(TypeError):
        Tensor(*arguments)


def test_memory_that_is_not_dense_is_refused() -> None:
    for array in (np.zeros((4, 4), np.float32).T, np.zeros(8, np.float32)[::2]):
        with pytest.raises((ValueError, BufferError)):
            Tensor(array, "F32", (2,))


def test_empty_and_scalar_shapes() -> None:
    assert Tensor(b"", "F32", (0,)).numpy().shape == (0,)
    assert Tensor(b"", "F32", (0, 2**40, 2**40)).shape == (0, 2**40, 2**40)
    assert Tensor(b"", "Q4_0", (3, 0)).numpy().shape == (3, 0)
    scalar = Tensor(np.float32(2.5).tobytes(), "F32", ()).numpy()
    assert scalar.shape == ()
    assert scalar == 2.5


def test_f32_is_a_view_and_the_rest_copies() -> None:
    array = np.arange(6, dtype=np.float32)
    tensor = Tensor(array, "F32", (2, 3))
    view = tensor.numpy()
    array[5] = 50
    assert view[1, 2] == 50
    assert view.flags.writeable
    view[0, 0] = 7
    assert array[0] == 7
    assert not Tensor(array.tobytes(), "F32", (6,)).numpy().flags.writeable
    halves = array.astype(np.float16)
    copy = Tensor(halves, "F16", (6,)).numpy()
    halves[0] = 1
    assert copy[0] == 7
    assert copy.dtype == np.float32


def test_numpy_functions_see_values_not_bytes() -> None:
    values = np.array([1, -2, 0.5, 3], np.float32)
    bf16 = Tensor((values.view(np.uint32) >> 16).astype(np.uint16), "BF16", (2, 2))
    np.testing.assert_array_equal(np.asarray(bf16), values.reshape(2, 2))
    assert np.asarray(bf16, np.float64).dtype == np.float64
    with pytest.raises(BufferError, match="BF16"):
        memoryview(bf16)  # type: ignore[arg-type]
    halves = memoryview(Tensor(values.astype(np.float16), "F16", (4,)))  # type: ignore[arg-type]
    assert halves.format == "e"
    assert np.asarray(halves).tolist() == values.tolist()


def test_plain_bytes_are_those_of_every_type() -> None:
    """For who asks for bytes, not for numbers."""
    stored = bytes(range(36))
    assert b"".join([Tensor(stored, "Q4_0", (2, 32))]) == stored  # type: ignore[list-item]
    with pytest.raises(BufferError, match="Q4_0"):
        np.frombuffer(Tensor(stored, "Q4_0", (2, 32)), np.uint8)  # type: ignore[call-overload]


def test_equal_is_equal_to_the_byte() -> None:
    tensor = Tensor(bytes(8), "F16", (2, 2))
    assert tensor.equals(Tensor(bytearray(9), "F16", (2, 2), offset=0))
    others = [Tensor(bytes(8), "BF16", (2, 2)), Tensor(bytes(8), "F16", (4,))]
    others += [Tensor(bytes(8), "F16", (1, 4)), Tensor(bytes(7) + b"\1", "F16", (2, 2))]
    assert not any(tensor.equals(other) for other in others)
    assert Tensor(b"", "F16", (0,)).equals(Tensor(b"", "F16", (0,)))
    with pytest.raises(TypeError, match="bytes is not a Tensor"):
        tensor.equals(bytes(8))  # type: ignore[arg-type]


def test_memory_lives_as_long_as_any_user() -> None:
    """Through a chain: file mapping, Tensor, NumPy array, DLPack consumer."""

    class Exporter(bytearray):
        pass

    exporter = Exporter(np.arange(4, dtype=np.float32).tobytes())
    alive = weakref.ref(exporter)
    tensor = Tensor(exporter, "F32", (4,))
    view, lent = tensor.numpy(), np.from_dlpack(tensor)
    tensor_alive = weakref.ref(tensor)
    del exporter, tensor
    gc.collect()
    assert alive() is not None
    assert view[3] == lent[3] == 3
    with pytest.raises(BufferError):
        alive().append(1)  # type: ignore[union-attr]
    del view
    gc.collect()
    assert tensor_alive() is not None
    del lent
    gc.collect()
    assert alive() is None
    assert tensor_alive() is None


def test_a_failed_creation_releases_the_buffer() -> None:
    exporter = bytearray(8)
    with pytest.raises(ValueError, match="reach past"):
        Tensor(exporter, "F32", (3,))
    exporter.append(1)  # a held export would refuse


def test_a_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(16) + np.arange(1024, dtype=np.float32).tobytes())
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensor = Tensor(mapped, "F32", (1024,), 16)
    with pytest.raises(BufferError):
        mapped.close()
    del mapped
    assert tensor.numpy()[1023] == 1023
    assert not tensor.numpy().flags.writeable


# ---- DLPack -------------------------------------------------------------------------------


def capsule_name(capsule: Any) -> str:
    return repr(capsule).split('"')[1]


def test_capsules_by_version() -> None:
    tensor = Tensor(bytearray(8), "F32", (2,))
    assert tensor.__dlpack_device__() == (1, 0)
    assert capsule_name(tensor.__dlpack__()) == "dltensor"
    assert capsule_name(tensor.__dlpack__(max_version=(0, 8))) == "dltensor"
    for version in ((1, 0), (1, 3), (2, 0)):
        assert capsule_name(tensor.__dlpack__(max_version=version)) == "dltensor_versioned"


def test_read_only_memory_is_flagged_or_refused() -> None:
    tensor = Tensor(bytes(8), "F32", (2,))
    assert not np.from_dlpack(tensor).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()
    assert capsule_name(tensor.__dlpack__(copy=True)) == "dltensor"


def test_copies_are_independent_and_writable() -> None:
    array = np.arange(4, dtype=np.float32)
    copy = np.from_dlpack(Tensor(array, "F32", (4,)), copy=True)
    array[0] = 9
    assert copy[0] == 0
    assert copy.flags.writeable


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stream": 1}, BufferError),
        ({"dl_device": (2, 0)}, BufferError),
        ({"dl_device": (1, 1)}, BufferError),
        ({"dl_device": "cpu"}, TypeError),
        ({"max_version": 1}, TypeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_requests_that_cannot_be_met(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Tensor(bytearray(8), "F32", (2,)).__dlpack__(**options)


def test_block_types_are_named() -> None:
    tensor = Tensor(bytes(34), "Q8_0", (32,))
    for options in ({}, {"max_version": (1, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match="Q8_0"):
            tensor.__dlpack__(**options)


def test_torch_reads_each_plain_type() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1.0, -2.5], [3.0, 0.125]])
    for type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        raw = bytearray(x.to(dtype).view(torch.uint8).numpy().tobytes())
        seen = torch.from_dlpack(Tensor(raw, type, (2, 2)))
        assert seen.dtype == dtype
        assert torch.equal(seen.float(), x)
        seen[0, 0] = 4  # the same memory
        assert Tensor(raw, type, (2, 2)).numpy()[0, 0] == 4


def test_unconsumed_and_consumed_capsules_free_the_tensor() -> None:
    tensor = Tensor(bytearray(8), "F32", (2,))
    before = sys.getrefcount(tensor)
    capsules = [tensor.__dlpack__(), tensor.__dlpack__(max_version=(1, 0))]
    assert sys.getrefcount(tensor) == before + 2
    del capsules
    arrays = [np.from_dlpack(tensor) for _ in range(3)]
    assert sys.getrefcount(tensor) == before + 3
    del arrays
    assert sys.getrefcount(tensor) == before


def test_a_consumer_may_end_in_another_thread() -> None:
    held = [np.from_dlpack(Tensor(bytearray(8), "F32", (2,)))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert held == []


def test_exports_alive_at_exit_do_no_harm() -> None:
    script = (
        "import sys, numpy as np\n"
        "from rksc._core import Tensor\n"
        "t = Tensor(bytearray(8), 'F32', (2,))\n"
        "sys.kept = [t, t.numpy(), np.from_dlpack(t), t.__dlpack__()]\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_cycles_that_lead_to_a_tensor_are_collected() -> None:
    """As the weights of a model that refers to itself."""

    class Holder:
        everything: list[Any]

    holder = Holder()
    tensor = Tensor(memoryview(bytearray(8))[:], "F32", (2,))
    holder.everything = [holder, tensor, tensor.numpy()]
    alive = weakref.ref(tensor)
    del holder, tensor
    gc.collect()
    assert alive() is None


def longest_pause(tensor: Tensor) -> float:
    """The share of a conversion's time that passed between two ticks of another thread."""
    spans: list[tuple[float, float]] = []

    def work() -> None:
        start = time.perf_counter()
        tensor.numpy()
        spans.append((start, time.perf_counter()))

    thread = threading.Thread(target=work)
    ticks = [time.perf_counter()]
    thread.start()
    while not spans:
        ticks.append(time.perf_counter())
    thread.join()
    start, end = spans[0]
    inside = [max(start, min(tick, end)) for tick in [*ticks, end]]
    return max(b - a for a, b in itertools.pairwise([start, *inside])) / (end - start)


def test_conversion_lets_other_threads_run() -> None:
    """With the GIL held the pause would be the whole conversion; a busy machine may need tries."""
    tensor = Tensor(bytes(34 * 500_000), "Q8_0", (500_000 * 32,))
    assert min(longest_pause(tensor) for _ in range(5)) < 0.5
