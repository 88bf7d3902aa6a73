"""Which token ends a turn, and the names of special tokens: all sources of a model, together.

The model here says token 0 and nothing else, so a source that is not read makes it go on for ever.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import model_files
from support.model_files import TINY

import rksc
import rksc.text.chat
from rksc.clients import LLM, OpenAI, SamplingParams
from rksc.clients._engine import Engine
from rksc.formats.gguf import read_gguf
from rksc.model.config import ModelConfig
from rksc.text import template
from rksc.text.ends import folder_ends
from rksc.text.special import folder_templates, named_tokens, read_tokenizer_config
from rksc.text.tokenizer import Tokenizer, template_ends

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

ASK = [{"role": "user", "content": "hi"}]
TURN = "<|turn|>"
MARKS = [TURN, "<s>", "</s>", "<|user|>", "<unk>"]  # ids 0 to 4; config.json says bos 1, eos 2
LETTERS = [chr(c) for c in range(0x21, 0x7F) if chr(c) not in "`~"] + ["\u0120", "\u010a"]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
ENDED = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>\n{% endfor %}"


def vocabulary(first: str = TURN) -> list[str]:
    tokens = [first, *MARKS[1:], *LETTERS]
    return tokens[:97]


def weights() -> model_files.Weights:
    """Of a model whose logits are all equal: greedily it takes token 0."""
    made = model_files.random_weights(TINY)
    made["model.norm.weight"][:] = 0
    return made


def hf(
    path: Path,
    first: str = TURN,
    tokenizer: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    special: bool = True,
    **config: Any,
) -> Path:
    """A folder with these contents of tokenizer_config.json and of other files."""
    model_files.write_hf(path, weights(), TINY | config)
    tokens = vocabulary(first)
    pipeline = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[])
    )
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    pipeline.add_special_tokens(tokens[1:5])
    (pipeline.add_special_tokens if special else pipeline.add_tokens)(tokens[:1])
    pipeline.save(str(path / "tokenizer.json"))
    given = {"chat_template": PLAIN, **(tokenizer or {})}
    for name, value in {"tokenizer_config.json": given, **(files or {})}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def gguf(path: Path, first: str = TURN, kind: int = 3, **keys: Any) -> Path:
    tokens = vocabulary(first)
    types = np.ones(len(tokens), np.int32)
    types[1:5], types[0] = 3, kind
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens[:-1], "th"], "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.token_type": types, "tokenizer.chat_template": PLAIN,
    }  # fmt: skip
    metadata |= {key.replace("__", "."): value for key, value in keys.items()}
    path.mkdir()
    model_files.write_gguf(path / "x.gguf", weights(), TINY, metadata=metadata)
    return path / "x.gguf"


ADDED = {"0": {"content": TURN, "special": True}, "2": {"content": "</s>", "special": True}}
IM_END = "<|im_end|>"
SOURCES: dict[str, Callable[[Path], Path]] = {
    "config.json": lambda p: hf(p, eos_token_id=0),
    "config.json, several": lambda p: hf(p, eos_token_id=[2, 0]),
    "generation_config.json": lambda p: hf(
        p, files={"generation_config.json": {"eos_token_id": 0}}
    ),
    "generation_config.json, several": lambda p: hf(
        p, files={"generation_config.json": {"eos_token_id": [5, 0]}}
    ),
    "generation_config.json agrees with config.json, tokenizer_config.json does not": lambda p: hf(
        p, tokenizer={"eos_token": TURN}, files={"generation_config.json": {"eos_token_id": 2}}
    ),
    "tokenizer_config.json": lambda p: hf(p, tokenizer={"eos_token": TURN}),
    "tokenizer_config.json, a dict": lambda p: hf(
        p, tokenizer={"eos_token": {"__type": "AddedToken", "content": TURN, "lstrip": False}}
    ),
    "tokenizer_config.json with added_tokens_decoder": lambda p: hf(
        p, tokenizer={"eos_token": TURN, "added_tokens_decoder": ADDED}
    ),
    "special_tokens_map.json": lambda p: hf(
        p, files={"special_tokens_map.json": {"eos_token": TURN}}
    ),
    "special_tokens_map.json, a dict, against tokenizer_config.json": lambda p: hf(
        p,
        tokenizer={"eos_token": "</s>"},
        files={"special_tokens_map.json": {"eos_token": {"content": TURN}}},
    ),
    "special_tokens_map.json beside added_tokens_decoder": lambda p: hf(
        p,
        tokenizer={"eos_token": "</s>", "added_tokens_decoder": ADDED},
        files={"special_tokens_map.json": {"eos_token": TURN}},
    ),
    "tokenizer_config.json, against special_tokens_map.json": lambda p: hf(
        p,
        tokenizer={"eos_token": TURN},
        files={"special_tokens_map.json": {"eos_token": "</s>"}},
    ),
    "an added token of a known text": lambda p: hf(p, IM_END),
    "an added token of a known text that is not special": lambda p: hf(p, IM_END, special=False),
    "one that added_tokens_decoder lists": lambda p: hf(
        p, "<|eot_id|>", tokenizer={"added_tokens_decoder": {"0": {"content": "<|eot_id|>"}}}
    ),
    "a token of the vocabulary that was not added": lambda p: unlisted(p),  # noqa: PLW0108 (below)
    "the chat template": lambda p: hf(p, tokenizer={"chat_template": ENDED}),
    "the chat template, by eos_token": lambda p: hf(
        p, tokenizer={"chat_template": ENDED.replace(TURN, "{{ eos_token }}"), "eos_token": TURN}
    ),
    "chat_template.jinja": lambda p: hf(p, files={"chat_template.jinja": ENDED}),
    "nothing in config.json": lambda p: hf(p, tokenizer={"eos_token": TURN}, eos_token_id=None),
    "GGUF, eos": lambda p: gguf(p, tokenizer__ggml__eos_token_id=0),
    "GGUF, eot": lambda p: gguf(p, tokenizer__ggml__eot_token_id=0),
    "GGUF, eom": lambda p: gguf(p, tokenizer__ggml__eom_token_id=0),
    "GGUF, a control token of a known text": lambda p: gguf(p, IM_END),
    "GGUF, a user-defined token of a known text": lambda p: gguf(p, IM_END, kind=4),
    "GGUF, the chat template": lambda p: gguf(p, tokenizer__chat_template=ENDED),
}  # fmt: skip
NONE: dict[str, Callable[[Path], Path]] = {
    "folder": hf,
    "folder without a chat template": lambda p: hf(p, tokenizer={"chat_template": None}),
    "GGUF": gguf,
    "GGUF, a plain token of a known text": lambda p: gguf(p, IM_END, kind=1),
    "GGUF, a plain token that the template writes": lambda p: gguf(
        p, kind=1, tokenizer__chat_template=ENDED
    ),
}  # fmt: skip


def unlisted(path: Path) -> Path:
    """TURN is in the vocabulary alone."""
    hf(path, tokenizer={"eos_token": TURN})
    described = json.loads((path / "tokenizer.json").read_text())
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] != TURN]
    (path / "tokenizer.json").write_text(json.dumps(described))
    return path


def answers(path: Path) -> list[tuple[str, int]]:
    """How an answer ended and how many tokens it had, of every way to ask for one."""
    model = rksc.load(path)
    session = model.session(dtype="float32", kv_bytes="4MiB")
    root = session.prefill("hi")
    kids = root.fork(3)
    (made,) = session.generate(kids[0], 5)
    found = [(made.finish_reason, len(made.tokens))]
    streamed = list(session.stream(kids[1], 5))
    assert streamed[-1].finish_reason is not None
    found.append((streamed[-1].finish_reason, sum(t.token >= 0 for t in streamed)))
    session.submit(kids[2], 5)
    tokens = []
    while session.n_requests:
        tokens += session.step()
    assert tokens[-1].finish_reason is not None
    found.append((tokens[-1].finish_reason, sum(t.token >= 0 for t in tokens)))
    client = OpenAI(model, dtype="float32", kv_bytes="4MiB")
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    for answer in (
        client.completions.create(prompt="hi", **ask),
        client.chat.completions.create(messages=ASK, **ask),
    ):
        found.append((answer.choices[0].finish_reason, answer.usage.completion_tokens))
    llm = LLM(client)
    params = SamplingParams(temperature=0, max_tokens=5)
    for outputs in (llm.generate("hi", params), llm.chat(ASK, params)):
        (output,) = outputs[0].outputs
        found.append((output.finish_reason, len(output.token_ids)))
    ignored = llm.generate("hi", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(ignored[0].outputs[0].token_ids) == 5
    assert len(session.generate(root, 5, stop_ids=())[0].tokens) == 5
    return found


def with_chat(path: Path) -> Path:
    """Clients chat with every model here, those without a chat template aside."""
    config = path / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text())["chat_template"] is None:
        (path / "chat_template.jinja").write_text(PLAIN)
    return path


@pytest.mark.parametrize("source", SOURCES)
def test_a_turn_ends_wherever_one_source_says_so(source: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = answers(SOURCES[source](tmp_path / "m"))
    assert set(found) <= {("eos", 0), ("stop", 0)}, found
    assert len(found) == 7


@pytest.mark.parametrize("source", NONE)
def test_it_goes_on_where_none_does(source: str, tmp_path: Path) -> None:
    """So that the test above can fail; and a base model is not ended by what it may write."""
    assert set(answers(with_chat(NONE[source](tmp_path / "m")))) == {("length", 5)}


@pytest.mark.skipif(find_spec("uvicorn") is None, reason="rksc[serve] is not installed")
@pytest.mark.parametrize("source", ["tokenizer_config.json", "GGUF, the chat template", "none"])
def test_the_server_ends_there_too(source: str, tmp_path: Path) -> None:
    from support.serving import Server

    model = rksc.load(SOURCES.get(source, hf)(tmp_path / "m"))
    server = Server(Engine(model, dtype="float32", kv_bytes="4MiB"))
    try:
        status, answer = server.chat(messages=ASK, temperature=0, max_tokens=5)
    finally:
        server.stop()
    ended = (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"])
    assert (status, ended) == (200, ("length", 5) if source == "none" else ("stop", 0))


def test_solve_ends_there_too(tmp_path: Path) -> None:
    for i, (name, tokens) in enumerate((("the chat template", 0), ("none", 6))):
        make = SOURCES.get(name, NONE["folder"])
        model = rksc.load(make(tmp_path / str(i)))
        session = model.session(dtype="float32", kv_bytes="4MiB", cgee=None)
        solution = rksc.solve(
            session, "hi", 2, max_new_tokens=6, sampling=rksc.Sampling(), yes=5, no=6
        )
        assert {len(node.tokens) for node in solution.nodes[1:]} == {tokens}


def test_without_a_tokenizer_the_files_still_count(tmp_path: Path) -> None:
    for i, source in enumerate(SOURCES):
        path = SOURCES[source](tmp_path / str(i))
        eos = rksc.load(path, tokenizer=False).config.eos
        assert (0 in eos) == ("template" not in source or "eos_token" in source), source
        assert len(set(eos)) == len(eos)


def test_lent_weights_end_where_their_tokenizer_says(tmp_path: Path) -> None:
    path = hf(tmp_path / "m", tokenizer={"eos_token": TURN})
    config = {**TINY, "eos_token_id": 2}
    session = rksc.BranchSession(
        weights(), config, tokenizer=Tokenizer.from_folder(path), dtype="float32", kv_bytes="1MiB"
    )
    assert session.config.eos == (2, 0)
    path = hf(
        tmp_path / "both",
        tokenizer={"eos_token": TURN},
        files={"special_tokens_map.json": {"eos_token": "<unk>"}},
    )
    assert Tokenizer.from_folder(path).eos_id == 4
    assert Tokenizer.from_folder(path).end_ids == (4, 0)
    keys = read_gguf(gguf(tmp_path / "gguf", tokenizer__ggml__eot_token_id=0)).metadata
    assert Tokenizer.from_gguf(keys).end_ids == (2, 0)
    small = {name: w[:4] if len(w) == 97 else w for name, w in weights().items()}
    path = hf(tmp_path / "n", tokenizer={"eos_token": "<unk>"})
    with pytest.raises(ValueError, match="eos_id 4 is outside the model's vocabulary of 4"):
        rksc.BranchSession(
            small, {**config, "vocab_size": 4}, tokenizer=Tokenizer.from_folder(path)
        )


def test_ids_outside_of_the_vocabulary_name_file_and_field(tmp_path: Path) -> None:
    beyond = {"97": {"content": "<|new|>"}}
    cases: dict[str, tuple[Callable[[Path], Path], str]] = {
        "a": (lambda p: hf(p, eos_token_id=97), r"config\.json: eos_token_id 97 is outside"),
        "b": (lambda p: hf(p, eos_token_id=[2, -1]), r"config\.json: eos_token_id -1 is outside"),
        "c": (
            lambda p: hf(p, files={"generation_config.json": {"eos_token_id": [2, 99]}}),
            r"generation_config\.json: eos_token_id 99 is outside the vocabulary of 97",
        ),
        "d": (
            lambda p: hf(p, files={"generation_config.json": {"eos_token_id": "2"}}),
            r"generation_config\.json: eos_token_id must be token ids, got '2'",
        ),
        "e": (
            lambda p: hf(p, tokenizer={"eos_token": "<|new|>", "added_tokens_decoder": beyond}),
            r"tokenizer_config\.json: eos_token '<\|new\|>' is token 97, outside",
        ),
        "f": (
            lambda p: hf(p, files={"special_tokens_map.json": {"eos_token": {"content": 3}}}),
            r"special_tokens_map\.json: eos_token must be a token's text, got \{'content': 3\}",
        ),
        "g": (
            lambda p: gguf(p, tokenizer__ggml__eot_token_id=97),
            r"x\.gguf: tokenizer\.ggml\.eot_token_id 97 is outside the vocabulary of 97",
        ),
        "h": (
            lambda p: gguf(p, tokenizer__ggml__eom_token_id=2**31),
            r"x\.gguf: tokenizer\.ggml\.eom_token_id 2147483648 is outside",
        ),
    }  # fmt: skip
    for name, (make, message) in cases.items():
        with pytest.raises(ValueError, match=message):
            rksc.load(make(tmp_path / name), tokenizer=False)


def test_an_end_token_that_nobody_knows_is_told(tmp_path: Path) -> None:
    path = hf(tmp_path / "m", tokenizer={"eos_token": "<|gone|>"})
    with pytest.warns(
        UserWarning, match=r"tokenizer_config\.json: eos_token '<\|gone\|>' is not in"
    ):
        assert rksc.load(path).config.eos == (2,)


def test_files_that_are_odd_are_no_end(tmp_path: Path) -> None:
    """What cannot be read as a token is left to Tokenizer; ids go by added_tokens' own."""
    odd: list[Any] = [3, {"content": 3}, {"content": TURN, "id": True}, {"content": "x", "id": "0"}]
    for i, described in enumerate(
        ({"added_tokens": odd}, {"added_tokens": 3, "model": 4}, [], "{")
    ):
        path = hf(tmp_path / str(i), files={"tokenizer.json": described})
        assert rksc.load(path, tokenizer=False).config.eos == (2,)
    unigram = {"model": {"vocab": [["a", 0.0], 3, [], ["<e>", -1.0]]}}
    path = hf(tmp_path / "u", tokenizer={"eos_token": "<e>"}, files={"tokenizer.json": unigram})
    assert rksc.load(path, tokenizer=False).config.eos == (2, 3)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.sampled_from([TURN, "</s>", "content", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "id", "name", "template", "0", "97"]), inner)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["eos_token", "bos_token", "image_token", "added_tokens_decoder", "extra_special_tokens",
     "additional_special_tokens", "chat_template", "model_specific_special_tokens"]
)  # fmt: skip
READABLE = st.fixed_dictionaries(
    {"tokenizer_config.json": st.dictionaries(NAMES, JSON, max_size=4)},
    optional={
        "special_tokens_map.json": st.dictionaries(NAMES, JSON, max_size=4),
        "generation_config.json": st.dictionaries(st.just("eos_token_id"), JSON),
        "tokenizer.json": st.dictionaries(st.sampled_from(["added_tokens", "model"]), JSON),
    },
)


@settings(max_examples=int(150 * float(os.environ.get("RKSC_EXAMPLES", "1"))), deadline=None)
@given(files=READABLE)
def test_files_of_any_kind_are_read_or_a_value_error(files: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, config = Path(name), ModelConfig.of(TINY)
        for file, value in files.items():
            (path / file).write_text(json.dumps(value))
        try:
            eos = folder_ends(path, config.eos, config.vocab_size)
            folder_templates(path, read_tokenizer_config(path))
        except ValueError as error:
            assert any(file in str(error) for file in files), error
        else:
            assert all(0 <= i < config.vocab_size for i in eos)


# ---- the token that a template writes ------------------------------------------------------------

BODIES = {
    "{{ m.content }}<|turn|>": [0],
    "{{ m.content | trim }} <|turn|>\n": [0],
    "{{ m.content }}{{ eos_token }}\n": [2],
    "{{ m.content }}\n\n": [],
    "{{ m.content }}. <|turn|>": [],
    "{{ '<|user|>' if m.role == 'user' }}{{ m.content }}": [3],
    "{{ m.content }}{{ '</s>' if loop.last }}": [2],
    "{{ m.content }}{{ '<|turn|>' if loop.last else '</s>' }}": [2, 0],
    "{{ bos_token }}{{ m.content }}</s>": [2],
    "{{ m.content }}<|turn|></s>": [0],
    "{{ m.role }}": [],
    "{{ raise_exception('only tools') }}": [],
    "{{ m.content.nothing.at_all }}": [],
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": [],
    "{% endwhile %}": [],
}


@pytest.mark.parametrize("body", BODIES)
def test_the_end_that_a_template_writes(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.3)
    source = f"{{% for m in messages %}}{body}{{% endfor %}}"
    path = hf(
        tmp_path / "m",
        tokenizer={"chat_template": source, "eos_token": "</s>", "bos_token": "<s>"},
    )
    tokenizer = Tokenizer.from_folder(path)
    assert list(template_ends(tokenizer)) == BODIES[body]
    assert set(tokenizer.end_ids) == {2, *BODIES[body]}
    tokenizer.chat_template = None
    assert tokenizer.end_ids == (2,)


def test_a_template_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never ends; what asks for a chat hears of it, what takes tokens does not."""
    asked = []
    real = rksc.text.chat.render_template

    def counted(*arguments: Any) -> str:
        asked.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(rksc.text.chat, "render_template", counted)
    monkeypatch.setattr(template, "SECONDS", 0.3)
    model = rksc.load(hf(tmp_path / "m", tokenizer={"chat_template": "{{ lipsum(n=10**9) }}"}))
    for _ in range(3):
        session = model.session(dtype="float32", kv_bytes="1MiB")
    assert len(asked) == 1
    assert session.config.eos == (2,)
    assert session.tokenizer is not None
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat template: takes more than"):
        session.tokenizer.chat(ASK)


def test_a_real_model(smollm2: rksc.Model) -> None:
    assert smollm2.tokenizer is not None
    assert smollm2.config.eos == (2, 0)
    assert template_ends(smollm2.tokenizer) == (2,)
    assert smollm2.session(kv_bytes="4MiB").config is smollm2.config


# ---- clients of others ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["tokenizer_config.json", "the chat template", "GGUF, eot"])
def test_the_harness_ends_there(source: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from rksc.clients.lm_eval import RKSC

    model = RKSC(rksc.load(SOURCES[source](tmp_path / "m")), dtype="float32", kv_bytes="4MiB")
    settings = {"until": ["zz"], "max_gen_toks": 5}
    ask = Instance("generate_until", {}, ("hi", settings), 0)
    sample = model._sample(*ask.args)
    model.engine.run([sample])
    assert (sample.finish_reason, sample.tokens) == ("eos", [])
    assert model.eot_token_id == (0 if "config" in source else 2)


def test_reasoners_end_there(tmp_path: Path) -> None:
    pytest.importorskip("reasoners")
    from rksc.clients.reasoners import RKSC

    client = OpenAI(
        rksc.load(SOURCES["the chat template"](tmp_path / "m")), dtype="float32", kv_bytes="4MiB"
    )
    assert RKSC(client, max_new_tokens=5).generate(["hi"]).text == [""]


def test_a_model_without_any_end(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from rksc.clients.lm_eval import RKSC

    path = hf(tmp_path / "m", eos_token_id=None, bos_token_id=None)
    model = RKSC(rksc.load(path), dtype="float32", kv_bytes="4MiB")
    assert model.engine.session.config.eos == ()
    assert len(model.engine.session.generate(model.engine.session.prefill([5]), 5)[0].tokens) == 5
    with pytest.raises(ValueError, match="no end token"):
        _ = model.eot_token_id


# ---- names of special tokens ---------------------------------------------------------------------

USUAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SHOW = "|".join(f"{name}={{{{ {name} }}}}" for name in (*USUAL, "image_token", "boi_token"))
FILES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "tokenizer_config.json": ({"bos_token": "<s>", "eos_token": "</s>"}, None),
    "special_tokens_map.json": ({}, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": TURN}),
    "both, and they disagree": ({"eos_token": "</s>", "bos_token": "<s>"}, {"eos_token": TURN}),
    "dicts": (
        {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
        {"bos_token": {"content": "<s>", "lstrip": False, "rstrip": False}},
    ),
    "the map takes a name away": ({"eos_token": "</s>", "bos_token": "<s>"}, {"eos_token": None}),
    "added_tokens_decoder: the map is not read": (
        {"eos_token": "</s>", "added_tokens_decoder": ADDED},
        {"eos_token": TURN, "bos_token": "<s>"},
    ),
    "names of its own": ({"image_token": "<|user|>", "eos_token": "</s>"}, {"boi_token": TURN}),
    "names of its own in both": ({"image_token": "<|user|>"}, {"image_token": TURN}),
    "extra_special_tokens": ({"extra_special_tokens": {"image_token": "<|user|>"}}, None),
    "additional_special_tokens": (
        {"additional_special_tokens": ["<|user|>"], "unk_token": "<unk>"},
        {"additional_special_tokens": [TURN], "sep_token": "</s>", "cls_token": "<s>"},
    ),
    "model_specific_special_tokens": (
        {"model_specific_special_tokens": {"boi_token": "<|user|>"}},
        {"extra_special_tokens": {"image_token": TURN}},
    ),
    "none": ({"model_max_length": 7, "add_bos_token": True, "num_image_token": 256}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_named_tokens_as_transformers_reads_them(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, listed = FILES[case]
    files = {} if listed is None else {"special_tokens_map.json": listed}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": SHOW, **config}
    path = hf(tmp_path / "m", tokenizer=config, files=files)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.from_folder(path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat(ASK) == theirs.apply_chat_template(ASK, tokenize=False)
    texts = {name: named.value for name, named in named_tokens(path, config).items()}
    texts.pop("additional_special_tokens", None)
    assert texts == theirs.special_tokens_map


def test_additional_special_tokens_as_older_transformers_gave_them(tmp_path: Path) -> None:
    """Version 5 gives templates no such variable; those written for version 4 may use it."""
    shown = "{{ additional_special_tokens | join(',') }}"
    path = hf(
        tmp_path / "m",
        tokenizer={"chat_template": shown, "additional_special_tokens": [TURN, {"content": "<s>"}]},
    )
    assert Tokenizer.from_folder(path).chat(ASK) == "<|turn|>,<s>"


def test_names_of_a_gguf(tmp_path: Path) -> None:
    keys = {"bos": 1, "eos": 2, "unknown": 4, "padding": 0, "seperator": 3, "cls": 1, "mask": 6}
    metadata = {f"tokenizer__ggml__{key}_token_id": i for key, i in keys.items()}
    model = rksc.load(gguf(tmp_path / "m", tokenizer__chat_template=SHOW, **metadata))
    assert model.tokenizer is not None
    assert model.tokenizer.chat(ASK) == (
        "bos_token=<s>|eos_token=</s>|unk_token=<unk>|sep_token=<|user|>|pad_token=<|turn|>|"
        'cls_token=<s>|mask_token="|image_token=|boi_token='
    )


# ---- several templates ---------------------------------------------------------------------------

SEVERAL = [
    {"name": "default", "template": "default {{ messages[0].content }}"},
    {"name": "tool_use", "template": "tools {{ tools | length }}"},
    {"name": "rag", "template": "rag {{ documents | length }}"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("where", ["tokenizer_config.json", "files", "both", "one file"])
def test_several_templates_as_transformers_takes_them(where: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files: dict[str, Any] = {}
    if where in ("tokenizer_config.json", "both"):
        config["chat_template"] = SEVERAL
    if where in ("files", "both"):
        files["chat_template.jinja"] = "file {{ messages[0].content }}"
        files["additional_chat_templates/tool_use.jinja"] = "file tools {{ tools | tojson }}"
        files["additional_chat_templates/rag.jinja"] = "file rag"
    if where == "one file":
        files["chat_template.jinja"] = "alone\r\n{{ messages[0].content }}\n"
    path = hf(tmp_path / "m", tokenizer=config, files=files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path), Tokenizer.from_folder(path)
    for tools in (None, [], TOOLS):
        expected = theirs.apply_chat_template(ASK, tools=tools, tokenize=False)
        assert ours.chat(ASK, tools=tools) == expected
    if where != "one file":
        expected = theirs.apply_chat_template(
            ASK, documents=[{"a": "b"}], chat_template="rag", tokenize=False
        )
        assert ours.with_template("rag").chat(ASK, documents=[{"a": "b"}]) == expected
    assert ours.with_template("text {{ bos_token }}").chat(ASK) == "text "


def test_several_templates_of_a_gguf_and_none_called_default(tmp_path: Path) -> None:
    model = rksc.load(
        gguf(
            tmp_path / "a",
            tokenizer__chat_template="one",
            tokenizer__chat_template__tool_use="tools {{ tools | length }}",
            tokenizer__chat_templates=["tool_use"],
        )
    )
    assert model.tokenizer is not None
    assert model.tokenizer.chat(ASK) == "one"
    assert model.tokenizer.chat(ASK, tools=TOOLS) == "tools 1"
    path = hf(tmp_path / "b", tokenizer={"chat_template": SEVERAL[1:]})
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.chat_template is None
    assert tokenizer.chat(ASK, tools=TOOLS) == "tools 1"
    with pytest.raises(ValueError, match="no chat template, only rag, tool_use"):
        tokenizer.chat(ASK)


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    path = hf(tmp_path / "m")
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: UnicodeDecodeError|utf-8"):
        Tokenizer.from_folder(path)
