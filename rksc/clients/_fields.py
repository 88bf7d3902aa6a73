"""Fields of a request: those that say nothing about the answer, those that are not supported, and a
reader of the others.

One table serves OpenAI's client, the server, vLLM's class and the harness: a setting that asks for
nothing is taken by all of them, one that asks for what is not there is refused by its name.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Collection, Mapping, Sized
from typing import Any, NoReturn

import numpy as np

from ..engine.arguments import nearest
from ..scalars import as_float, as_int
from ..text.decoding import check_text
from ._errors import FieldError, printable

SEEDS = (-(2**63), 2**64 - 1)

# Fields that say nothing about the text.
ASIDE = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "prediction", "request_id", "session_id",
    "output_kind", "skip_clone",
}  # fmt: skip

# Bytes of their texts at most; a prediction has what a prompt may have.
_LONGEST = {"model": 256, "metadata": 16_384, "prediction": 1 << 30}
_LONG = 1024

_EMPTY: tuple[Any, ...] = ([],)  # and any other container with nothing in it
_NONE: tuple[Any, ...] = ()  # nothing but None, which every field may be

# Why a field is not supported: its names, each with the values that ask for nothing.
_ROWS: dict[str, dict[str, tuple[Any, ...]]] = {
    "sampling knows temperature, top_k, top_p and min_p alone": {
        "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
        "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "logit_bias": _EMPTY,
        "bad_words": _EMPTY, "allowed_token_ids": _NONE, "logits_processors": _EMPTY,
        "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "watermarking": (False,),
        "trace_decode_token_ids": _NONE,
    },
    "there is no beam search": {
        "use_beam_search": (False,), "num_beams": (1,), "num_beam_groups": (1,),
        "num_return_sequences": (1,), "length_penalty": (1,), "diversity_penalty": (0,),
        "early_stopping": (False,), "best_of": (1,),
    },
    "a text ends where the model ends it, at a stop or at its limit": {
        "min_tokens": (0,), "min_new_tokens": (0,), "min_length": (0,),
        "repetition_detection": _NONE, "thinking_token_budget": (-1,),
    },
    "answers cannot be held to a format": {
        "response_format": ({"type": "text"},), "structured_outputs": _NONE,
        "guided_decoding": _NONE, "guided_json": _NONE, "guided_regex": _NONE,
        "guided_choice": _NONE, "guided_grammar": _NONE, "guided_decoding_backend": _NONE,
        "guided_whitespace_pattern": _NONE, "structural_tag": _NONE, "verbosity": ("medium",),
        "reasoning_effort": _NONE, "include_reasoning": (True,),
    },
    "tools cannot be called": {
        "tools": _EMPTY, "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
        "functions": _EMPTY, "function_call": ("none", "auto"), "web_search_options": _NONE,
    },
    "prompts and answers are text, special tokens left out": {
        "modalities": (["text"],), "audio": _NONE, "detokenize": (True,),
        "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False),
        "add_special_tokens": (False,), "prompt_embeds": _NONE, "mm_processor_kwargs": _EMPTY,
        "media_io_kwargs": _EMPTY, "chat_template_content_format": ("auto", "string"),
    },
    "a prompt is taken as it is": {
        "suffix": ("",), "documents": _EMPTY, "chat_template": _NONE,
        "truncate_prompt_tokens": _NONE, "truncation_side": ("left", "right"),
        "tokenization_kwargs": _EMPTY, "echo": (False,), "chat_template_kwargs": _EMPTY,
        "add_generation_prompt": (True, False), "continue_final_message": (False,),
    },
    "answers do not hold it": {
        "top_logprobs": (0,), "prompt_logprobs": _NONE, "prompt_logprob_token_ids": _NONE,
        "prompt_logprob_start": (0,), "logprob_token_ids": _NONE, "flat_logprobs": (False,),
        "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
        "return_token_offsets": (False,), "return_prompt_text": (False,),
        "return_mm_kwargs": (True,), "routed_experts_prompt_start": (0,), "moderation": _NONE,
        "continuous_usage_stats": (False,),
    },
    "all requests run alike, on one model with one cache": {
        "priority": (0, []), "lora_request": _NONE, "cache_salt": _NONE,
        "skip_reading_prefix_cache": (False,), "stream_interval": (1,),
        "kv_transfer_params": _NONE, "ec_transfer_params": _NONE, "vllm_xargs": _EMPTY,
        "extra_args": _EMPTY,
    },
}  # fmt: skip

NEUTRAL = {name: values for row in _ROWS.values() for name, values in row.items()}
_WHY = {name: why for why, row in _ROWS.items() for name in row}

_SEVERAL = (list, tuple, set, frozenset)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """A value as errors show it, however long it is."""
    return _short.repr(value)


def check_whole(body: Mapping[str, Any]) -> None:
    """FieldError: a field has half a character (a lone surrogate), which no text may have."""
    for name, value in body.items():
        try:
            json.dumps(
                [name, value], ensure_ascii=False, skipkeys=True, default=lambda _: None
            ).encode()
        except UnicodeEncodeError:
            try:
                check_text("a field's name", name)
                _check_texts(name, value)
            except ValueError as error:
                raise FieldError(name, str(error)) from None
        except (RecursionError, ValueError):
            raise FieldError(name, f"{shown(name)} is nested too deep") from None


def _check_texts(where: str, value: Any) -> None:
    """ValueError: a text in the value has half a character; it says where."""
    if isinstance(value, str):
        check_text(where, value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _check_texts(f"{where}: a key", key)
            _check_texts(f"{where}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            _check_texts(f"{where}[{i}]", each)


def check_settings(settings: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """FieldError: a setting that is not known asks for something. None never does."""
    for name, value in settings.items():
        if name in ASIDE:
            _check_length(str(name), value)
        if name in known or name in ASIDE or value is None:
            continue
        neutral = NEUTRAL.get(name, ())
        if name == "best_of" and settings.get("n") is not None:
            neutral = (*neutral, settings["n"])  # the best n of n are all of them
        if not any(_same(value, other) for other in neutral):
            said, why = (
                f"{printable(str(name), 64)}={shown(value)} is not supported",
                _WHY.get(name),
            )
            code = "unsupported_parameter" if why else "unknown_parameter"
            hint = f": {why}" if why else nearest(str(name), [*known, *NEUTRAL])
            raise FieldError(str(name), said + hint, code)


def _check_length(name: str, value: Any) -> None:
    n, most = n_bytes(value), _LONGEST.get(name, _LONG)
    if n > most:
        said = f"{name} has {n} bytes, at most {most}"
        raise FieldError(name, said, "string_above_max_length")


def n_bytes(value: Any) -> int:
    """Bytes of all texts in a value, keys among them. ValueError: it is nested too deep."""
    try:
        return _n_bytes(value)
    except RecursionError:
        raise ValueError("a value is nested too deep") from None


def _n_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        return sum(_n_bytes(key) + _n_bytes(each) for key, each in value.items())
    return sum(map(_n_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and of one kind: True is no 1; what is empty is alike."""
    if isinstance(neutral, bool):
        return isinstance(value, (bool, np.bool_)) and value == neutral
    number = as_float(neutral)
    if number is not None:
        return as_float(value) == number
    if neutral == []:
        return isinstance(value, Sized) and not isinstance(value, str) and len(value) == 0
    return isinstance(value, (str, list, Mapping)) and value == neutral


def read_seed(value: Any, field: str = "seed") -> int | None:
    """The seed that every client takes: None and -1 draw afresh for each call, any other int is
    that seed (negative ones count from 2**64)."""
    number = None if value is None else as_int(value)
    if number is None and value is not None:
        raise FieldError(field, f"{field} must be an integer, got {shown(value)}", "invalid_type")
    if number is None or number == -1:
        return None
    if not SEEDS[0] <= number <= SEEDS[1]:
        said = f"{field} must be an integer from -2**63 to 2**64 - 1, got {shown(value)}"
        raise FieldError(field, said)
    return number % 2**64


class Fields:
    """A body's fields, each checked when it is read. None means that it was not given."""

    def __init__(self, body: Mapping[str, Any], known: set[str]) -> None:
        check_settings(body, known)
        self._body = body

    def get(self, name: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            self.refuse(name, expected, "invalid_type")
        return value

    def refuse(self, name: str, expected: str, code: str = "invalid_value") -> NoReturn:
        raise FieldError(
            name, f"{name} must be {expected}, got {shown(self._body.get(name))}", code
        )

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, (bool, np.bool_), "true or false", default))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        if self._body.get(name) is None:
            return default
        number = as_float(self._body[name])
        self._bounded(name, number, low, high, f"a number from {low:g} to {high:g}", "decimal")
        return number  # type: ignore[return-value]  # None was refused

    def integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        if self._body.get(name) is None:
            return default
        number = as_int(self._body[name])
        self._bounded(name, number, low, high, f"an integer from {low} to {high}", "integer")
        return number

    def _bounded(
        self, name: str, number: float | None, low: float, high: float, expected: str, kind: str
    ) -> None:
        if number is None:
            self.refuse(name, expected, "invalid_type")
        if not low <= number <= high:  # NaN fails
            beyond = "above_max" if number > high else "below_min"
            self.refuse(name, expected, f"{kind}_{beyond}_value")

    def seed(self) -> int | None:
        return read_seed(self._body.get("seed"))

    def strings(
        self, name: str, most: int = sys.maxsize, longest: int = sys.maxsize
    ) -> tuple[str, ...]:
        """One string or several: so many at most, of so many characters."""
        value = self.get(name, (str, *_SEVERAL), "a string or a list of strings", ())
        found = (value,) if isinstance(value, str) else tuple(value)
        if len(found) > most:
            self.refuse(name, f"at most {most} strings", "array_above_max_length")
        if any(isinstance(text, str) and len(text) > longest for text in found):
            expected = f"strings of at most {longest} characters"
            self.refuse(name, expected, "string_above_max_length")
        if not all(isinstance(text, str) and text for text in found):
            self.refuse(name, "a list of strings that are not empty")
        try:
            for text in found:
                check_text(name, text)
        except ValueError as error:
            raise FieldError(name, str(error)) from None
        return found

    def token_ids(
        self, name: str, vocab_size: int = 2**31, most: int = sys.maxsize
    ) -> tuple[int, ...]:
        given = self.get(name, (*_SEVERAL, np.ndarray), "a list of token ids", ())
        if len(given) > most:
            self.refuse(name, f"at most {most} token ids", "array_above_max_length")
        ids = [number for number in map(as_int, given) if number is not None]
        if len(ids) < len(given) or not all(0 <= i < vocab_size for i in ids):
            self.refuse(name, "token ids of the vocabulary")
        return tuple(ids)
