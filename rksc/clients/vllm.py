"""`LLM.generate(prompts, SamplingParams)` and `LLM.chat` in the shape of vLLM's offline class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load import Model
from ..options import Sampling
from ..scalars import as_int
from ..session import BranchSession
from ..text import check_text
from ._engine import Alternatives, Engine, Sample, copies
from ._tokenizer import TransformersTokenizer
from ._wire import check_template_variables, not_supported, read_messages
from .openai import OpenAI, engine_of

Prompt = str | Sequence[int] | Mapping[str, Any]

# Settings of vLLM's that are not supported, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "best_of": (None, 1), "min_tokens": (0,), "bad_words": (None, []), "logit_bias": (None, {}),
    "logits_processors": (None, []), "allowed_token_ids": (None,), "guided_decoding": (None,),
    "structured_outputs": (None,), "truncate_prompt_tokens": (None,), "detokenize": (True,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
}  # fmt: skip

# Arguments of apply_chat_template that are no variables of a template.
_OWN = {"conversation", "chat_template", "tokenize", "return_dict"}


@dataclass
class SamplingParams:
    """vLLM's settings of one request, checked when they are made: an unknown one is a TypeError, a
    wrong value or one that asks for what rksc does not do a ValueError that names it."""

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
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    best_of: int | None = None
    min_tokens: int = 0
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[Any] | None = None
    allowed_token_ids: None = None
    guided_decoding: None = None
    structured_outputs: None = None
    truncate_prompt_tokens: None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, values in _NEUTRAL.items():
            value = getattr(self, name)
            if value not in values:
                raise ValueError(not_supported(name, value))
        self._integer("n", 1)
        for name, least, most in (
            ("max_tokens", 1, 2**31 - 1), ("logprobs", 0, 20), ("prompt_logprobs", 0, 20),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                self._integer(name, least, most)
        self._integer("top_k", -1)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**64 - 1)
        _ = self.sampling
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Collection):
                raise ValueError(f"{name} must be a list, got {value!r}")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
            check_text("stop", text)
        for token in self.stop_ids:
            if as_int(token) is None:
                raise ValueError(f"stop_token_ids must be token ids, got {token!r}")

    def _integer(self, name: str, least: int, most: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        number = as_int(value)
        if number is None or not least <= number <= most:
            raise ValueError(f"{name} must be an int in {least} .. {most}, got {value!r}")

    @property
    def sampling(self) -> Sampling:
        seed = None if self.seed in (None, -1) else int(self.seed) % 2**64
        return Sampling(self.temperature, max(0, self.top_k), self.top_p, self.min_p, seed)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)


@dataclass(frozen=True)
class Logprob:
    """rank: 1 is the most likely token; None where it is not among the alternatives asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    """The new tokens; not the end token or stop id, which vLLM puts at their end."""
    cumulative_logprob: float
    """Of token_ids."""
    logprobs: list[Logprobs] | None
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
    prompt_logprobs: list[Logprobs | None] | None = None
    """Of each of its tokens; None for the first, before which nothing stands."""
    finished: bool = True
    metrics: None = None


class LLM:
    """A model behind vLLM's calls. model: as for `OpenAI`."""

    def __init__(self, model: Model | BranchSession | OpenAI, **options: Any) -> None:
        self.engine: Engine = engine_of(model, **options)
        self._tokenizer = TransformersTokenizer(self.engine.tokenizer)

    def get_tokenizer(self) -> TransformersTokenizer:
        """The model's tokenizer in transformers' shape; a chat_template set there is chat's."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Continue prompts (texts, tokens or {"prompt_token_ids": ...}), all in one batch; an
        output for each, in order. use_tqdm is there for its callers; no bar is shown."""
        if lora_request is not None:
            raise ValueError(f"lora_request={lora_request!r} is not supported")
        single = isinstance(prompts, (str, Mapping)) or (
            len(prompts) > 0 and as_int(prompts[0]) is not None
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
                prompt=_text_of(row),
                prompt_token_ids=group[0].prompt.tolist(),
                outputs=[self._output(sample, p) for sample in group],
                num_cached_tokens=group[0].cached_tokens,
                prompt_logprobs=self._prompt_logprobs(group[0].prompt, p.prompt_logprobs),
            )
            for i, (row, p, group) in enumerate(zip(rows, params, groups, strict=True))
        ]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        lora_request: None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for a conversation or a list of them, rendered by the chat template. Special
        tokens that a message spells are text."""
        variables = chat_template_kwargs or {}
        if not isinstance(variables, Mapping):
            raise ValueError(f"chat_template_kwargs must be a dict, got {variables!r}")
        check_template_variables(variables, _OWN)
        single = len(messages) == 0 or isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        names = ["messages"] if single else [f"messages[{i}]" for i in range(len(messages))]
        prompts = self._tokenizer.apply_chat_template(
            [read_messages(*each) for each in zip(conversations, names, strict=True)],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **variables,
        )
        rows = [
            {"prompt_token_ids": self.engine.check_prompt(tokens, name)}
            for tokens, name in zip(prompts, names, strict=True)
        ]
        return self.generate(rows, sampling_params, use_tqdm, lora_request)

    def _tokens(self, i: int, prompt: Any) -> NDArray[np.int32]:
        if isinstance(prompt, Mapping):
            tokens = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if tokens is None else tokens
        where = f"prompts[{i}]"
        if not isinstance(prompt, (str, Sequence, np.ndarray)):
            raise ValueError(f"{where} must be text or tokens, got {prompt!r}")
        tokens = self.engine.encode(prompt, where) if isinstance(prompt, str) else prompt
        return self.engine.check_prompt(tokens, where)

    def _sample(self, prompt: NDArray[np.int32], p: SamplingParams) -> Sample:
        eos = () if p.ignore_eos else self.engine.session.config.eos
        k = p.logprobs or 0
        return Sample(
            prompt, p.max_tokens, p.sampling, p.stops, (*eos, *p.stop_ids), n_alternatives=k
        )

    def _output(self, sample: Sample, p: SamplingParams) -> CompletionOutput:
        stop = sample.stopped_by
        kept = stop if p.include_stop_str_in_output and isinstance(stop, str) else ""
        own = isinstance(stop, str) or stop in p.stop_ids
        return CompletionOutput(
            index=sample.index,
            text=sample.text + kept,
            token_ids=list(sample.tokens),
            cumulative_logprob=float(sum(sample.logprobs)),
            logprobs=None if p.logprobs is None else self._logprobs(sample),
            finish_reason="length" if sample.finish_reason == "length" else "stop",
            stop_reason=stop if own else None,
        )

    def _logprobs(self, sample: Sample) -> list[Logprobs]:
        none: list[Alternatives | None] = [None] * len(sample.tokens)
        rows = zip(sample.tokens, sample.logprobs, sample.alternatives or none, strict=True)
        return [self._row(*row) for row in rows]

    def _prompt_logprobs(
        self, prompt: NDArray[np.int32], k: int | None
    ) -> list[Logprobs | None] | None:
        if k is None:
            return None
        logprobs, alternatives = self.engine.score_prompt(prompt, k)
        none: list[Alternatives | None] = [None] * len(logprobs)
        rows = zip(prompt[1:].tolist(), logprobs, alternatives or none, strict=True)
        return [None, *(self._row(*row) for row in rows)]

    def _row(self, token: int, logprob: float, alternatives: Alternatives | None) -> Logprobs:
        """The token that came, and the most likely ones."""
        row = {token: self._logprob(token, logprob, None)}
        if alternatives is not None:
            for rank, (other, value) in enumerate(zip(*alternatives, strict=True)):
                row[int(other)] = self._logprob(int(other), float(value), rank + 1)
        return row

    def _logprob(self, token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, self.engine.token_bytes[token].decode(errors="replace"))


def _text_of(prompt: Any) -> str | None:
    """The text of a prompt that came as one."""
    found = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return found if isinstance(found, str) else None
