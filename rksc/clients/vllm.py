"""`LLM.generate(prompts, SamplingParams)` and `LLM.chat` in the shape of vLLM's offline class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.arguments import check_options
from ..engine.load import Model
from ..engine.options import Sampling
from ..engine.session import BranchSession
from ..scalars import as_int
from ._engine import Alternatives, Engine, Sample, copies
from ._fields import NEUTRAL, Fields, check_settings, read_seed
from ._tokenizer import TransformersTokenizer
from ._wire import check_template_variables, read_messages
from .openai import OpenAI, engine_of

Prompt = str | Sequence[int] | Mapping[str, Any]

# Arguments of apply_chat_template that are no variables of a template.
_OWN = {"conversation", "chat_template", "tokenize", "return_dict"}


@dataclass
class SamplingParams:
    """vLLM's settings of one request, checked when they are made: an unknown one is a TypeError, a
    wrong value or one that asks for what rksc does not do a ValueError that names it. None is the
    default of each."""

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
    # What follows is there for its callers: these values ask for nothing, others are refused.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    min_tokens: int = 0
    bad_words: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[Any] | None = None
    allowed_token_ids: None = None
    guided_decoding: None = None
    structured_outputs: None = None
    thinking_token_budget: int | None = None
    repetition_detection: None = None
    truncate_prompt_tokens: None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprob_token_ids: None = None
    prompt_logprob_token_ids: None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    trace_decode_token_ids: None = None
    watermarking: bool | None = None
    routed_experts_prompt_start: int = 0
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None
    extra_args: Mapping[str, Any] | None = None
    output_kind: Any = None
    skip_clone: bool = False

    def __post_init__(self) -> None:
        for setting in fields(self):
            if getattr(self, setting.name) is None and setting.name not in _NO_LIMIT:
                setattr(self, setting.name, setting.default)
        f = Fields(vars(self), _SUPPORTED)
        f.integer("n", None, 1, 2**31 - 1)
        f.integer("max_tokens", None, 1, 2**31 - 1)
        f.integer("logprobs", None, 0, 20)
        f.integer("prompt_logprobs", None, 0, 20)
        f.integer("top_k", None, -1, 2**31 - 1)
        f.flag("ignore_eos")
        f.flag("include_stop_str_in_output")
        f.strings("stop")
        f.token_ids("stop_token_ids")
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        seed = read_seed(self.seed)
        return Sampling(self.temperature, max(0, self.top_k), self.top_p, self.min_p, seed)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)


_NO_LIMIT = {"max_tokens"}  # None is a value of its own there
_SUPPORTED = {setting.name for setting in fields(SamplingParams)} - NEUTRAL.keys()
_SUPPORTED.add("prompt_logprobs")


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
        self.engine: Engine = engine_of("LLM", model, options)
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
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue prompts (texts, tokens or {"prompt_token_ids": ...}), all in one batch; an
        output for each, in order. use_tqdm is there for its callers; no bar is shown. others:
        vLLM's further arguments, as far as they ask for nothing (ValueError)."""
        _check_others("generate", {"lora_request": lora_request, **others})
        single = isinstance(prompts, (str, Mapping)) or (
            len(prompts) > 0 and as_int(prompts[0]) is not None
        )
        rows: list[Any] = [prompts] if single else list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(rows)
        else:
            params = list(sampling_params)
        if len(params) != len(rows):
            raise ValueError(f"sampling_params: there are {len(params)} for {len(rows)} prompts")
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
        **others: Any,
    ) -> list[RequestOutput]:
        """`generate` for a conversation or a list of them, rendered by the chat template. Special
        tokens that a message spells are text."""
        _check_others("chat", others)
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
        others = sample.alternatives[: len(none)] or none
        rows = zip(sample.tokens, sample.logprobs, others, strict=True)
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
        data = self.engine.special.get(token) or self.engine.token_bytes[token]
        return Logprob(logprob, rank, data.decode(errors="replace"))


def _check_others(call: str, others: Mapping[str, Any]) -> None:
    check_options(f"{call}()", others, ["sampling_params", "use_tqdm", *NEUTRAL])
    check_settings(others)


def _text_of(prompt: Any) -> str | None:
    """The text of a prompt that came as one."""
    found = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return found if isinstance(found, str) else None
