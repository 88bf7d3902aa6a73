"""What calls return: plain records over NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._core import Branch


@dataclass(frozen=True, eq=False)
class Generation:
    """One branch's continuation.

    tokens: int32 (n,), without a closing stop id. top_probs, logprobs, entropies: float32 (n,),
    probability of the most likely token, natural log-probability of the chosen one, entropy in
    nats, all of the raw distribution softmax(logits). confidence: mean of top_probs (of the
    stop id's step when no token came), None when no step ran. finish_reason: "length", "eos",
    "stop", "early" (CGEE) or "cancelled".
    """

    branch: Branch
    tokens: NDArray[np.int32]
    top_probs: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    confidence: float | None
    finish_reason: str
    stop: str | int | None = None
    """The stop string or stop id that ended it."""
    text: str | None = None
    """Decoded tokens, without the stop string; None in a session without a tokenizer."""

    def __repr__(self) -> str:
        confidence = "None" if self.confidence is None else f"{self.confidence:.3f}"
        return (
            f"<rksc.Generation of branch {self.branch.id}: {len(self.tokens)} tokens, "
            f"{self.finish_reason!r}, confidence {confidence}, text {self.text!r}>"
        )


@dataclass(frozen=True)
class Token:
    """One event of a stream. token -1: the request ended without a new token.

    finish_reason: None while it goes on; those of a Generation; or "failed", with the `error`.
    """

    branch: Branch
    token: int
    logprob: float
    top_prob: float
    entropy: float
    finish_reason: str | None = None
    text: str | None = None
    """Text that became final with this token: whole characters, never part of a stop string."""
    error: Exception | None = None
    """Why this request could not go on (a CapacityError, for one); a stream raises it."""
    stop: str | int | None = None
    """With the last one: the stop string or stop id that ended it."""


@dataclass(frozen=True)
class Verdict:
    """A verification of one branch.

    outcome: "verified", or why it was spared: "not a contender", "bound", "skipped: lead",
    "skipped: relative lead", "skipped: one contender". score: p(YES) / (p(YES) + p(NO)).
    mass: p(YES) + p(NO); a small one means that the model does not answer the question. None
    after an exit under the answer lens. yes_logit, no_logit: the two logits, of the last layer that
    was run. All four are None for a branch that was spared. layers: run for this branch, of
    n_layers.
    """

    branch: Branch
    outcome: str
    score: float | None
    mass: float | None
    yes_logit: float | None
    no_logit: float | None
    layers: int
    n_layers: int


@dataclass(frozen=True, eq=False)
class Gate:
    """ASKS' decision on one pair of wordings.

    reason: "accepted", "equal" (same tokens: shared exactly), "guard", "rejected" (sigma < tau),
    "unreachable" (no remaining cosine could reach tau) or "undefined" (a cosine is NaN).
    cosines: float32 (layers compared,). own_token_layers, root_token_layers: tokens x layers run
    for the decision on this branch and again on the root.
    """

    accepted: bool
    reason: str
    sigma: float | None
    tau: float
    cosines: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    own_token_layers: int = 0
    root_token_layers: int = 0


@dataclass(frozen=True)
class Stats:
    """A session's books. Blocks: total = used + free; free includes cached (indexed, referenced
    by nobody); shared: used by two branches or more. Bytes: blocks * block_bytes.

    Tokens are rows that went through the model or did not have to: computed the first time;
    reused, found by the exact index; forked, shared by a fork; recomputed, run again: KV after an
    eviction, and the last row of a branch whose KV is there when its distribution is wanted
    (`logits`, `hidden`, `score`, the first token of a generation), because none is stored.
    What ASKS' probes run is in `Gate`.
    """

    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    blocks_shared: int
    blocks_peak: int
    blocks_reclaimed: int
    block_bytes: int
    block_tokens: int
    branches: int
    tokens_computed: int
    tokens_recomputed: int
    tokens_reused: int
    tokens_forked: int
    steps: int
    evictions: int
    layers_run: int
    layers_saved: int
    verifications: int
    verifications_skipped: int
    exits: int
    gate_accepted: int
    gate_rejected: int

    @property
    def bytes_total(self) -> int:
        return self.blocks_total * self.block_bytes

    @property
    def bytes_used(self) -> int:
        return self.blocks_used * self.block_bytes

    @property
    def bytes_peak(self) -> int:
        return self.blocks_peak * self.block_bytes
