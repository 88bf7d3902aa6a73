"""`LLM.generate(prompts, SamplingParams)` in the shape of vLLM's offline class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load import Model
from ..options import Sampling
from ..session import BranchSession
from ..tokenizer import Tokenizer
from ._engine import Engine, Sample, copies
from .openai import OpenAI, engine_of

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class SamplingParams:
    """vLLM's settings of one request, those that rksc can keep; an unknown one is a TypeError,
    an unsupported value a ValueError that names it."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported")
        if not self.skip_special_tokens:
            raise ValueError("skip_special_tokens=False is not supported")
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n must be an int of at least 1, got {self.n!r}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs must be None or in 0 .. 20, got {self.logprobs!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens!r}")


@dataclass(frozen=True)
class Logprob:
    """rank: 1 is the most likely token; None where alternatives were not asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    """The new tokens; not the end token or stop id, which vLLM puts at their end."""
    cumulative_logprob: float
    """Of token_ids."""
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    """ "stop" or "length"."""
    stop_reason: int | str | None
    """The stop string or stop id that ended it; None at the model's end token."""


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class LLM:
    """A model behind vLLM's calls. model: as for `OpenAI`."""

    def __init__(self, model: Model | BranchSession | OpenAI, **options: Any) -> None:
        self.engine: Engine = engine_of(model, **options)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts (texts, tokens or {"prompt_token_ids": ...}), all in one batch; an
        output for each, in order. use_tqdm is there for its callers; no bar is shown."""
        single = isinstance(prompts, (str, Mapping)) or (
            len(prompts) > 0 and isinstance(prompts[0], int)
        )
        rows: list[Any] = [prompts] if single else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(rows)
        else:
            params = list(sampling_params)
        if len(params) != len(rows):
            raise ValueError(f"sampling_params: {len(params)} of them for {len(rows)} prompts")
        tokens = [self._tokens(i, row) for i, row in enumerate(rows)]
        groups = [copies(self._sample(t, p), p.n) for t, p in zip(tokens, params, strict=True)]
        self.engine.run([sample for group in groups for sample in group])
        return [
            RequestOutput(
                request_id=str(i),
                prompt=row if isinstance(row, str) else None,
                prompt_token_ids=group[0].prompt.tolist(),
                outputs=[self._output(sample, p) for sample in group],
                num_cached_tokens=group[0].cached_tokens,
            )
            for i, (row, p, group) in enumerate(zip(rows, params, groups, strict=True))
        ]

    def _tokens(self, i: int, prompt: Any) -> NDArray[np.int32]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if not isinstance(prompt, (str, Sequence)):
            raise ValueError(f"prompts[{i}] must be text or tokens, got {prompt!r}")
        tokens = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
        return self.engine.check_prompt(tokens, f"prompts[{i}]")

    def _sample(self, prompt: NDArray[np.int32], p: SamplingParams) -> Sample:
        stop = (p.stop,) if isinstance(p.stop, str) else tuple(p.stop or ())
        eos = () if p.ignore_eos else self.engine.session.config.eos
        sampling = Sampling(p.temperature, max(0, p.top_k), p.top_p, p.min_p, p.seed)
        stop_ids = (*eos, *(p.stop_token_ids or ()))
        k = p.logprobs or 0
        return Sample(prompt, p.max_tokens, sampling, stop, stop_ids, n_alternatives=k)

    def _output(self, sample: Sample, p: SamplingParams) -> CompletionOutput:
        stop = sample.stopped_by
        kept = stop if p.include_stop_str_in_output and isinstance(stop, str) else ""
        own = isinstance(stop, str) or stop in (p.stop_token_ids or ())
        return CompletionOutput(
            index=sample.index,
            text=sample.text + kept,
            token_ids=list(sample.tokens),
            cumulative_logprob=float(sum(sample.logprobs)),
            logprobs=None if p.logprobs is None else self._logprobs(sample),
            finish_reason="length" if sample.finish_reason == "length" else "stop",
            stop_reason=stop if own else None,
        )

    def _logprobs(self, sample: Sample) -> list[dict[int, Logprob]]:
        found = []
        for i, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
            row: dict[int, Logprob] = {token: self._logprob(token, logprob, None)}
            if sample.alternatives:
                for rank, (other, value) in enumerate(zip(*sample.alternatives[i], strict=True)):
                    row[int(other)] = self._logprob(int(other), float(value), rank + 1)
            found.append(row)
        return found

    def _logprob(self, token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, self.engine.token_bytes[token].decode(errors="replace"))
