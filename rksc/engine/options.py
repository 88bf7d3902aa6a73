"""Settings: sampling and the three mechanisms. Frozen, validated when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..scalars import as_float, as_int

Guard = Callable[[str, str], bool]


def _check(condition: bool, field: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{field} must be {expected}, got {value!r}")


def _is_int(value: object) -> bool:
    return as_int(value) is not None


def _number(field: str, value: object, expected: str) -> None:
    number = as_float(value)
    _check(number is not None and math.isfinite(number), field, value, expected)


def _unit(field: str, value: float) -> None:
    _check(as_float(value) is not None and 0 <= value <= 1, field, value, "in [0, 1]")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature 0 takes the most likely token (the lowest id on a tie). Otherwise
    softmax(logits / temperature) is cut by top_k (0: off), top_p (1: off) and min_p
    (0: off), in this order. Random numbers come from a counter-based generator keyed by
    (seed, branch.stream, position), so a branch draws the same whatever runs beside it;
    seed None draws fresh entropy for each call.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, "a finite number >= 0")
        _check(self.temperature >= 0, "temperature", self.temperature, "a finite number >= 0")
        _check(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an int >= 0")
        _unit("top_p", self.top_p)
        _unit("min_p", self.min_p)
        _check(
            self.seed is None
            or (_is_int(self.seed) and 0 <= self.seed < 2**64),
            "seed", self.seed, "None or an int in [0, 2**64)",
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ASKS:
    """Share KV between different wordings when their hidden states agree (arXiv 2606.09937).

    sigma = sum_l w_l cos_l, w_l proportional to exp(alpha l / L) over the probed layers;
    accepted when sigma >= tau: a *larger* tau shares less, tau > 1 nothing at all.

    center: float32 (layers, width), the mean hidden state of each layer
    (`BranchSession.layer_means`); without it every pair of prompts looks alike, so it is
    required here and absent only in `ASKS.paper()`.
    probe "prefix" runs the branch's own wording through `probe_layers` layers (None: an
    eighth of them) and goes on from there when it is rejected; "suffix" (the paper's) runs
    the suffix over the root's KV through all layers.
    pool: "mean" over the tokens that differ, or the "last" token.
    guard: "numbers" rejects pairs whose numbers differ, before anything is computed; "reworded"
    also near-copies (`rksc.is_rewording`); None; or a callable (own text, root's text) -> bool,
    True to go on.
    What no setting notices: one word turned round ("more" / "fewer") within a rewording.
    `rksc.calibrate` finds settings on the user's own pairs. See docs/method.md.
    """

    center: NDArray[np.float32] | None = None
    tau: float = 0.5
    alpha: float = 1.5
    probe: Literal["prefix", "suffix"] = "prefix"
    probe_layers: int | None = None
    pool: Literal["mean", "last"] = "mean"
    guard: Literal["numbers", "reworded"] | Guard | None = "numbers"
    uncentered: bool = False

    def __post_init__(self) -> None:
        _number("tau", self.tau, "a finite number")
        _number("alpha", self.alpha, "a finite number")
        _check(self.probe in ("prefix", "suffix"), "probe", self.probe, '"prefix" or "suffix"')
        _check(self.pool in ("mean", "last"), "pool", self.pool, '"mean" or "last"')
        _check(
            self.probe_layers is None
            or (_is_int(self.probe_layers) and self.probe_layers >= 1),
            "probe_layers", self.probe_layers, "None or an int >= 1",
        )  # fmt: skip
        _check(
            self.guard in (None, "numbers", "reworded") or callable(self.guard),
            "guard", self.guard, '"numbers", "reworded", None or a callable',
        )  # fmt: skip
        if self.probe == "suffix" and self.pool == "mean":
            raise ValueError('probe="suffix" compares last tokens: it needs pool="last"')
        if self.center is None and not self.uncentered:
            raise ValueError(
                "ASKS without center accepts any two prompts at the usual tau: pass "
                "center=session.layer_means(prompts), or take ASKS.paper() knowingly"
            )
        if self.center is not None:
            try:
                center = np.ascontiguousarray(self.center, np.float32)
            except (TypeError, ValueError) as error:
                raise ValueError(f"center must be an array (layers, width): {error}") from None
            _check(
                center.ndim == 2 and bool(np.isfinite(center).all()),
                "center", self.center, "a finite array (layers, width)",
            )  # fmt: skip
            object.__setattr__(self, "center", center)

    @classmethod
    def paper(cls, tau: float = 0.82, alpha: float = 1.5) -> ASKS:
        """The paper's gate: suffix probe, last token, no centre, no guard."""
        return cls(tau=tau, alpha=alpha, probe="suffix", pool="last", guard=None, uncentered=True)


@dataclass(frozen=True)
class CGEE:
    """Verify only as much as needed (arXiv 2606.09937); the default is the safe preset.

    While generating: all branches stop when the best mean confidence >= stop_top and its
    relative lead >= stop_lead after min_steps (stop_top None: off).
    Level 1 skips verification when top >= skip_top and the absolute lead >= skip_lead, or
    top >= skip_top_relative and the relative lead >= skip_lead_relative (None: off).
    kappa: only branches with confidence >= kappa * top are verified; one alone needs no
    verification. verify_batch: branches verified at a time, most confident first; after each
    batch those that cannot win any more (sqrt(confidence) < best mark) are dropped, exactly.
    Level 2, lens "answer" (YES and NO rows; theta in units of ln 2) or "full" (nats): a branch
    leaves the pass after layer l >= min_layer, looked at every lens_every layers, when its
    entropy < theta and changed by less than epsilon. norm: apply the final norm in the lens.
    """

    kappa: float = 0.60
    verify_batch: int = 8
    stop_top: float | None = None
    stop_lead: float = 0.10
    min_steps: int = 3
    skip_top: float | None = None
    skip_lead: float = 0.06
    skip_top_relative: float | None = None
    skip_lead_relative: float = 0.08
    lens: Literal["answer", "full"] | None = None
    norm: bool = True
    theta: float = 0.5
    epsilon: float = 0.1
    min_layer: int = 2
    lens_every: int = 1

    def __post_init__(self) -> None:
        for field in ("kappa", "stop_lead", "skip_lead", "skip_lead_relative"):
            _unit(field, getattr(self, field))
        for field in ("stop_top", "skip_top", "skip_top_relative"):
            value = getattr(self, field)
            if value is not None:
                _unit(field, value)
        for field in ("verify_batch", "min_steps", "min_layer", "lens_every"):
            value = getattr(self, field)
            _check(_is_int(value) and value >= 1, field, value, "an int >= 1")
        for field in ("theta", "epsilon"):
            value = getattr(self, field)
            real = as_float(value) is not None
            _check(real and value >= 0, field, value, "a number >= 0")  # NaN fails
        _check(self.lens in (None, "answer", "full"), "lens", self.lens, '"answer", "full" or None')

    @classmethod
    def fast(cls, **changes: Any) -> CGEE:
        """Adds the paper's level 1 and kappa 0.70: faster, some winners change."""
        return cls(**{"kappa": 0.70, "skip_top": 0.70, "skip_top_relative": 0.63, **changes})

    @classmethod
    def paper(cls, theta: float = 8.0, **changes: Any) -> CGEE:
        """The paper's settings: level 1, early stop, level 2 with the full lens (theta in nats;
        0.5 for Mistral), no norm; no contenders."""
        settings: dict[str, Any] = {
            "kappa": 0.0, "stop_top": 0.72, "skip_top": 0.70, "skip_top_relative": 0.63,
            "lens": "full", "norm": False, "theta": theta, "epsilon": 3.0, "min_layer": 2,
        }  # fmt: skip
        return cls(**{**settings, **changes})


@dataclass(frozen=True)
class RSBCM:
    """Free KV blocks in order of omega = value / (depth + 1), lowest first.

    value: the branch's score, else its confidence, else 1. Has no settings of its own: the
    budget is the session's kv_bytes.
    """
