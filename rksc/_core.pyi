"""The C extension: sessions and branches over shared KV blocks.

`rksc.BranchSession` (session.py) is this module's `Session` plus text, units and
policies' dataclasses; everything that computes is here. Token sequences may be any
sequence of ints or integer array; ids are checked against the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from .engine.types import Tokens
from .model.config import ModelConfig

isas: tuple[str, ...]
"""Instruction sets that this machine and build support, weakest first."""

tensor_types: dict[str, tuple[int, int]]
"""Elements and bytes of a block of each type of tensor, by its name."""

gguf_names: dict[str, str]
"""Hugging Face's name of each tensor of a model of one layer, by GGUF's."""

derived_names: tuple[str, ...]
"""How names of buffers end that old checkpoints carry and that a configuration implies."""

def check_weights(weights: Mapping[str, Any], config: ModelConfig) -> None:
    """ValueError unless names and shapes are those that the configuration wants."""

def default_threads() -> int:
    """Threads that this process may use: CPU affinity, cgroup quota, RKSC_NUM_THREADS."""

class CapacityError(RuntimeError):
    """The KV budget cannot hold what one call needs at once; nothing was changed."""

class Tensor:
    """A weight over borrowed memory: F32, F16, BF16 or a GGUF block type."""

    name: str | None
    def __init__(self, buffer: Any, type: str, shape: tuple[int, ...], offset: int = 0) -> None: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def numpy(self) -> NDArray[np.float32]: ...
    def equals(self, other: Tensor) -> bool:
        """Are type, shape and all bytes the same?"""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class DeviceArray:
    """float32 numbers in the memory of a GPU, made by `Branch.device_logits` and `device_hidden`.

    A DLPack producer: `torch.from_dlpack(array)` (cupy, jax, ...) uses the memory where it lies,
    row-major, dense and writable, and its stream waits until the numbers are there. The memory
    goes back when this object and all that was made of it are gone; neither needs the session.
    Whoever hands such a tensor to another stream than the one that it was imported on orders the
    two.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> str:
        """The GPU, such as "cuda:0"."""
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """BufferError: a copy, another device, or a stream that is none (0, below -1)."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, n): CUDA, the GPU's number."""
    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """TypeError: the memory is the GPU's."""

class Branch:
    """One continuation: tokens over KV blocks that it may share with others.

    Created by `Session.prefill` and `Branch.fork`. Dropping the last reference drops the
    branch; `drop()` does so at once. Using a dropped branch is a RuntimeError.
    """

    score: float | None
    """Verifier's p(YES) / (p(YES) + p(NO)), or what the caller set; None until then."""
    confidence: float | None
    """Mean probability of the most likely token over the generated ones; None before."""
    stream: int
    """Key of this branch's random numbers (uint64), fixed at the fork; can be set."""
    gate: Any
    """ASKS' report (`rksc.Gate`) where `similar_to` was given, else None."""
    verdict: Any
    """The last `rksc.Verdict`, or None."""
    prompt: Any
    """The branch's own wording (int32 array) where it was given to ASKS, else None."""
    @property
    def session(self) -> Session: ...
    @property
    def id(self) -> int: ...
    @property
    def parent_id(self) -> int | None: ...
    @property
    def tokens(self) -> NDArray[np.int32]:
        """A copy of the tokens that the KV holds or will hold, int32 (n,)."""
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_prompt(self) -> int:
        """Tokens it was born with; what follows was generated or appended."""
    @property
    def n_computed(self) -> int:
        """Leading positions whose KV is resident."""
    @property
    def depth(self) -> int: ...
    @property
    def resident(self) -> bool:
        """False when an eviction took KV that had been computed."""
    @property
    def approximate(self) -> bool: ...
    @property
    def dropped(self) -> bool: ...
    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of the next token, float32 (vocabulary,). Computed on each access."""
    @property
    def hidden(self) -> NDArray[np.float32]:
        """Residual stream of the last token after each layer, float32 (layers, width)."""
    @property
    def device_logits(self) -> DeviceArray | NDArray[np.float32]:
        """The logits where the session computes, for `torch.from_dlpack` and its like.

        On a GPU the array is the caller's alone, computed on each access; nothing is copied to
        the host, and the call does not wait for the numbers. (When 16 such arrays are gone, the
        next call waits once for all that is queued on the GPU: they may still be read there.) On
        the CPU these are `logits`.
        """
    @property
    def device_hidden(self) -> DeviceArray | NDArray[np.float32]:
        """`hidden` in the same way."""
    def fork(self, what: int | Sequence[Tokens] = 1, *, at: int | None = None) -> list[Branch]:
        """Children that share this branch's KV: `what` of them, or one for each suffix.

        `at`: keep only the first `at` tokens (1 .. n_tokens). No KV is computed or copied.
        ValueError: no children, `at` out of range, a bad token.
        """
    def extend(self, tokens: Tokens) -> None:
        """Append tokens; their KV is computed when it is needed."""
    def drop(self) -> None:
        """Release the KV now. Twice is fine; never waits for a running step."""

class Request:
    """A continuation of a branch, and what has come of it."""

    def __new__(cls, branch: Branch) -> Self: ...
    @property
    def branch(self) -> Branch: ...
    @property
    def number(self) -> int:
        """Never used twice in a session; 0 until it is submitted."""
    @property
    def over(self) -> bool:
        """Whether its end has been told, or it was ended."""

class Session:
    """A model on a device, a pool of KV blocks and a tree of branches."""

    def __new__(
        cls,
        weights: Mapping[str, Any],
        config: ModelConfig,
        *,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] | None = None,
        kv_bytes: int = 2 << 30,
        block_tokens: int = 16,
        n_threads: int | None = None,
        isa: str | None = None,
        step_tokens: int = 512,
        token_bytes: Sequence[bytes] | None = None,
        special_ids: Sequence[int] | None = None,
        share: bool = True,
        hash_bits: int = 64,
        poison: bool = False,
        activations: Literal["int16", "int8", "bfloat16"] | None = None,
    ) -> Self: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def activations(self) -> Literal["int16", "int8"] | None: ...
    @property
    def isa(self) -> str:
        """The instruction set in use: one of `rksc._core.isas`, or, on a GPU, such as "sm_90"."""
    @property
    def n_threads(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that could not be used in place and were converted."""
    def _tokens(self, tokens: Tokens, what: str) -> NDArray[np.int32]:
        """Token ids as an array of its own, int32 (n,), once they are of the vocabulary; errors
        call them `what`."""
    def _prefill(self, tokens: Tokens, suffix: Tokens = (), compute: bool = True) -> Branch: ...
    def _prefill_similar(
        self,
        root: Branch,
        tokens: Tokens,
        suffix: Tokens,
        probe: str,
        pool: str,
        probe_layers: int,
        tau: float,
        alpha: float,
        center: NDArray[np.float32] | None,
        allowed: bool,
    ) -> tuple[Branch, dict[str, Any]]:
        """Branch and report: gate ("accepted" | "rejected" | "unreachable" | "undefined" |
        "guard"), equal, sigma, cosines (float32 (layers probed,)), own_token_layers,
        root_token_layers."""
    def compute(self, branches: Sequence[Branch]) -> None:
        """Bring the KV of these branches up to date in as few steps as possible."""
    def _drop(self, branches: Sequence[Branch]) -> None:
        """Drop all of these branches, whatever signals come."""
    @property
    def _requests(self) -> Mapping[int, Any]:
        """By number, requests of `_submit` whose end was not told yet."""
    def _submit(
        self,
        requests: Sequence[Request],
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stop_ids: Sequence[int],
        stop_strings: Sequence[bytes],
        stop_top: float,
        stop_lead: float,
        min_steps: int,
        group: int = 0,
    ) -> None:
        """Queue continuations, all or none. group: those with the same number below 2**63 are one
        call, which CGEE may stop together; 0: these alone are one."""
    def _step(self, requests: Sequence[Request], events: list[Any]) -> None:
        """One step where none of these requests has news; what is new of them is appended to the
        list, which the caller has in hand whatever interrupts it.

        An event: request, index of the token, token (-1: the end alone), logprob, top_prob,
        entropy, finish reason or None, stop_bytes, stop_index, and with the finish reason
        "failed" why: such a request has ended, the others go on."""
    def _end(self, requests: Sequence[Request], events: list[Any], undo: bool = False) -> None:
        """Take back events that were not handed out: the next `_step` tells them again. Then end
        these requests, whose branches keep the tokens that were handed out; undo: none. Never
        submitted or over: nothing happens. Signals do not interrupt it."""
    def _generate(
        self,
        requests: Sequence[Request],
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stop_ids: Sequence[int],
        stop_strings: Sequence[bytes],
        stop_top: float,
        stop_lead: float,
        min_steps: int,
        progress: Callable[[int], object] | None = None,
    ) -> list[
        tuple[
            NDArray[np.int32],
            NDArray[np.float32],
            NDArray[np.float32],
            NDArray[np.float32],
            float | None,
            str,
            int,
            int,
        ]
    ]:
        """For each branch: tokens, top_probs, logprobs, entropies, confidence, finish reason,
        stop_bytes, stop_index. All steps run without the GIL; on an error or Ctrl-C the
        branches are as they were. progress is called after each step with the number of new
        tokens."""
    _verified: Sequence[Any]
    """Set it to rksc.Verdicts and all branches get theirs, and the scores, at once."""
    def _verify(
        self,
        branches: Sequence[Branch],
        prompt: Tokens,
        yes: int,
        no: int,
        shortcuts: Mapping[str, Any] | None,
    ) -> list[tuple[str, float | None, float | None, float | None, float | None, int]]:
        """Outcome, score, mass, yes_logit, no_logit, layers for each branch. `shortcuts`:
        CGEE's fields (options.CGEE.__dict__), None: verify all in full."""
    def _score(
        self, branch: Branch, continuations: Sequence[Tokens]
    ) -> list[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """(logprobs, tops) of each: tops are the tokens that would have been most likely."""
    def _logits_at(self, branch: Branch, begin: int, end: int) -> NDArray[np.float32]:
        """Logits after each of the branch's tokens [begin, end), which are cut to what is
        there: float32 (end - begin, vocabulary). In batches."""
    def _prompt_means(self, tokens: Tokens, begin: int, end: int) -> NDArray[np.float32]:
        """Mean residual stream after each layer over positions [begin, end)."""
    def invalidate(self) -> None:
        """Forget all KV (the lent weights changed); converted copies are made again."""
    def _stats(self) -> dict[str, int]: ...
    def check(self) -> None:
        """Recount the block books; RuntimeError names the first disagreement."""
