"""Real packages of other people on rksc: openai, optillm, tree-of-thoughts-llm, llm-reasoners.

CI installs them in a stage of its own; elsewhere what is missing is skipped.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rksc import Model
from rksc.clients import OpenAI

ROOT = Path(__file__).resolve().parent.parent
HI = [{"role": "user", "content": "Name a colour of the rainbow."}]


@pytest.fixture(scope="module")
def client(smollm2: Model) -> OpenAI:
    return OpenAI(smollm2, dtype="float32", kv_bytes="1GiB")


# ---- openai against `rksc serve` -----------------------------------------------------------------


@pytest.fixture(scope="module")
def url(smollm2: Model) -> Iterator[str]:
    """A served model, in a process of its own."""
    command = [sys.executable, "-m", "rksc.cli", "serve", str(smollm2.path), "--port", "0"]
    with subprocess.Popen(
        [*command, "--dtype", "float32"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.terminate()
        process.wait(60)


def test_openai(url: str, client: OpenAI) -> None:
    """The real client reads the server's answers as the client in the process gives them."""
    openai = pytest.importorskip("openai")
    real = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": client.name, "messages": HI, "n": 3, "temperature": 0.8, "seed": 5,
        "max_tokens": 12, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    got, expected = real.chat.completions.create(**ask), client.chat.completions.create(**ask)
    assert [c.message.content for c in got.choices] == [c.message.content for c in expected.choices]
    assert [c.finish_reason for c in got.choices] == [c.finish_reason for c in expected.choices]
    for ours, theirs in zip(expected.choices, got.choices, strict=True):
        assert [t.token for t in theirs.logprobs.content] == [
            t.token for t in ours.logprobs.content
        ]
        assert len(theirs.logprobs.content[0].top_logprobs) == 2
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    again = real.chat.completions.create(**ask)
    assert again.usage.prompt_tokens_details.cached_tokens >= got.usage.prompt_tokens - 8

    del ask["top_logprobs"]
    texts = [""] * 3
    for chunk in real.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in got.choices]

    whole = real.completions.create(
        model="any", prompt=["The capital of France is", "One, two,"], max_tokens=3, temperature=0,
        echo=True, logprobs=1, extra_body={"top_k": 5},
    )  # fmt: skip
    assert whole.choices[0].text.startswith("The capital of France is Paris")
    assert len(whole.choices[1].logprobs.tokens) == len(whole.choices[1].logprobs.token_logprobs)
    assert real.models.list().data[0].id == client.name
    with pytest.raises(openai.BadRequestError, match="logit_bias") as refused:
        real.chat.completions.create(model="any", messages=HI, logit_bias={"3": 1})
    assert refused.value.param == "logit_bias"
    assert isinstance(got, openai.types.chat.ChatCompletion)


# ---- optillm -------------------------------------------------------------------------------------


def optillm_module(name: str) -> Any:
    """A module of optillm without the package's own __init__, which starts a Flask server and
    wants clients of four clouds."""
    spec = importlib.util.find_spec("optillm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("optillm is not installed")
    if "optillm" not in sys.modules:
        package = ModuleType("optillm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["optillm"] = package
    return importlib.import_module(f"optillm.{name}")


def test_optillm_best_of_n(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers in one call, then a rating of each. optillm would hide a call that fails and
    ask three times, so what counts is what was asked and answered."""
    bon = optillm_module("bon")
    made: list[tuple[int | None, Any]] = []
    create = client.chat.completions.create

    def recorded(**request: Any) -> Any:
        answer = create(**request)
        made.append((request.get("n"), answer))
        return answer

    monkeypatch.setattr(client.chat.completions, "create", recorded)
    text, tokens = bon.best_of_n_sampling(
        "You answer in one word.", "Name a colour.", client, "rksc", 3, {"max_tokens": 8}
    )
    assert [n for n, _ in made] == [3, 1, 1, 1]
    assert text in [choice.message.content for choice in made[0][1].choices]
    assert tokens == sum(answer.usage.completion_tokens for _, answer in made)
    # A rating's prompt begins like the others, up to the answer that it rates.
    usages = [answer.usage for _, answer in made[2:]]
    assert all(u.prompt_tokens_details.cached_tokens > u.prompt_tokens // 2 for u in usages)


# ---- tree-of-thoughts-llm ------------------------------------------------------------------------


def test_tree_of_thoughts_bfs(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is on PyPI runs its breadth-first search; only the answers' length is
    bounded, because a small model rambles."""
    if importlib.util.find_spec("tot") is None:
        pytest.skip("tree-of-thoughts-llm is not installed")
    from rksc.clients import tot

    prompts: list[tuple[int, ...]] = []
    samples: list[int] = []

    def recorded(**request: Any) -> Any:
        text = client.engine.tokenizer.chat(request["messages"], add_generation_prompt=True)
        prompts.append(tuple(client.engine.tokenizer.encode(text)))
        samples.append(request["n"])
        return create(**request)

    real = sys.modules.get("openai")
    connected = tot.connect(client)
    create = connected.chat.completions.create
    monkeypatch.setattr(connected.chat.completions, "create", recorded)
    assert sys.modules.get("openai") is real
    models = importlib.import_module("tot.models")
    bfs = importlib.import_module("tot.methods.bfs")
    monkeypatch.setattr(bfs, "gpt", functools.partial(models.gpt, max_tokens=24))
    task = importlib.import_module("tot.tasks.game24").Game24Task()
    task.steps = 2
    settings = argparse.Namespace(
        backend="gpt-4", temperature=0.7, method_generate="propose", method_evaluate="value",
        method_select="greedy", n_generate_sample=1, n_evaluate_sample=3, n_select_sample=2,
    )  # fmt: skip
    before = client.engine.session.stats()
    answers, log = bfs.solve(settings, task, 900, to_print=False)
    after = client.engine.session.stats()
    assert connected.engine is client.engine
    assert 1 <= len(answers) <= 2
    assert [step["step"] for step in log["steps"]] == [0, 1]
    usage = models.gpt_usage("gpt-4")
    assert usage["prompt_tokens"] > 1000
    # What begins alike is computed once, however often it is sent. (Where a prompt is known whole,
    # its last token may be run again for a sample.)
    unique = len({prompt[: i + 1] for prompt in prompts for i in range(len(prompt))})
    assert unique < usage["prompt_tokens"]
    computed = after.tokens_computed - before.tokens_computed
    assert computed <= unique + sum(samples) + usage["completion_tokens"]


# ---- llm-reasoners -------------------------------------------------------------------------------


def test_reasoners_language_model(client: OpenAI) -> None:
    reasoners = pytest.importorskip("reasoners")
    from rksc.clients.reasoners import RKSC

    model = RKSC(client, max_new_tokens=8)
    assert isinstance(model, reasoners.LanguageModel)
    prompt = "The capital of France is"
    greedy = model.generate([prompt, prompt], output_log_probs=True)
    assert greedy.text[0] == greedy.text[1]
    assert greedy.text[0].startswith(" Paris")
    assert len(greedy.log_prob[0]) == 8
    stopped = model.generate([prompt], eos_token_id=["."], hide_input=False)
    assert stopped.text[0].startswith(prompt)
    assert not stopped.text[0].endswith(".")
    several = model.generate([prompt], do_sample=True, num_return_sequences=3, seed=1)
    assert len(several.text) == 3
    (logits,) = model.get_next_token_logits(prompt, [" Paris", " Rome"], "log_softmax")
    assert logits[0] > logits[1]
    contents = [f"{prompt} Paris", f"{prompt} Rome, Italy"]
    scores = model.get_loglikelihood(prompt, contents)
    assert scores[0] == pytest.approx(logits[0], abs=1e-4)
    assert scores[0] > scores[1]
    assert np.isfinite(scores).all()
    with pytest.raises(ValueError, match="stopping_criteria"):
        model.generate([prompt], stopping_criteria=[1])
    aside = model.generate([prompt, prompt], retry=3, stop=None)
    assert aside.text == greedy.text
    drawn = [
        model.generate([prompt], do_sample=True, temperature=1.5, seed=seed).text
        for seed in (-1, -1, None, -2, 2**64 - 2)
    ]
    assert drawn[0] != drawn[1] != drawn[2]
    assert drawn[3] == drawn[4]
    with pytest.raises(ValueError, match="seed must be an integer"):
        model.generate([prompt], seed=2**64)
    neutral = model.generate([prompt, prompt], repetition_penalty=1.0, num_beams=1)
    assert neutral.text == greedy.text
    with pytest.raises(ValueError, match="additional_prompt='ANSWER'"):
        model.generate([prompt], additional_prompt="ANSWER")
    with pytest.raises(ValueError, match="temperature=2"):
        model.get_next_token_logits(prompt, [" Paris"], temperature=2)
    with pytest.raises(ValueError, match="temperature=2"):
        model.get_loglikelihood(prompt, contents, temperature=2)


# ---- lm-evaluation-harness -----------------------------------------------------------------------


GSM8K_LENGTH = "max_gen_toks=24"  # because hf takes its time


def close(ours: list[Any], theirs: list[Any]) -> bool:
    """Log-likelihoods to 1e-3 and the same greedy marks."""
    return all(
        abs(a[0] - b[0]) < 1e-3 and a[1] == b[1]
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def harness() -> Any:
    """benchmarks/harness.py, which runs the tasks in examples/lm_eval."""
    pytest.importorskip("lm_eval")
    spec = importlib.util.spec_from_file_location("harness", ROOT / "benchmarks" / "harness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hf(harness: Any, smollm2: Model) -> Any:
    return harness.hf_model(Path(str(smollm2.path)), 1)


@pytest.fixture(scope="module")
def hf_answers(harness: Any, hf: Any) -> dict[str, list[Any]]:
    """Of the first items of both tasks, with 25 and 5 examples, in float32."""
    limits = {harness.ARC: 1, harness.GSM8K: 2}
    return {task: harness.evaluate(hf, task, n, GSM8K_LENGTH) for task, n in limits.items()}


def test_harness_equals_hf(
    harness: Any, hf: Any, hf_answers: dict[str, list[Any]], smollm2: Model
) -> None:
    ours = harness.rksc_model(Path(str(smollm2.path)))
    arc, gsm8k = (
        harness.evaluate(ours, task, len(theirs), GSM8K_LENGTH)
        for task, theirs in hf_answers.items()
    )
    assert close(arc, hf_answers[harness.ARC])
    assert gsm8k == hf_answers[harness.GSM8K]
    reused = ours.engine.session.stats().tokens_reused
    assert reused > 500  # GSM8K's second item finds the examples

    from lm_eval.api.instance import Instance

    text = (ROOT / "README.md").read_text("utf-8")[:900]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    ours.max_length = hf._max_length = 64
    got, expected = (lm.loglikelihood_rolling(rolling)[0] for lm in (ours, hf))
    assert got == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("command", ["lm_eval", "rksc lm-eval"])
def test_the_harness_commands(
    harness: Any, hf_answers: dict[str, list[Any]], smollm2: Model, tmp_path: Path, command: str
) -> None:
    """The harness's own command knows the model from the task files in examples/lm_eval, ours from
    the start. The answers that either writes down are hf's."""
    if command == "lm_eval":
        call = ["-m", "lm_eval", "--tasks", str(harness.TASKS)]
    else:
        tasks = f"{harness.ARC},{harness.GSM8K}"
        call = ["-m", "rksc.cli", "lm-eval", "--include_path", str(harness.TASKS), "--tasks", tasks]
    done = subprocess.run(
        [
            sys.executable, *call, "--model", "rksc", "--model_args",
            f"pretrained={smollm2.path},dtype=float32", "--limit", "1", "--gen_kwargs",
            GSM8K_LENGTH, "--log_samples", "--output_path", str(tmp_path / "answers"),
        ],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
                          "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"local_arc_challenge\s*\|.*acc_norm", done.stdout, re.S), done.stdout
    written = {
        task: [json.loads(line)["resps"] for line in file.read_text("utf-8").splitlines()]
        for task in hf_answers
        for file in tmp_path.glob(f"answers/*/samples_{task}_*.jsonl")
    }
    (gsm8k,) = written[harness.GSM8K]
    assert [answer for (answer,) in gsm8k] == hf_answers[harness.GSM8K][0]
    (arc,) = written[harness.ARC]
    choices = [(float(logprob), str(greedy) == "True") for ((logprob, greedy),) in arc]
    assert close([choices], hf_answers[harness.ARC])


def test_the_harness_may_find_the_model_by_its_entry_point(harness: Any) -> None:
    """Versions after 0.4.13 look for models in this group. They load the entry point when the model
    is asked for, and want the class that then registers itself to be the one it names."""
    from rksc.clients.lm_eval import RKSC

    group = '[project.entry-points."lm_eval.models"]\n'
    _, found, rest = (ROOT / "pyproject.toml").read_text("utf-8").partition(group)
    name, value = re.match(r'(\w+) = "(.*)"\n', rest).groups()  # type: ignore[union-attr]
    assert found and importlib.metadata.EntryPoint(name, value, "lm_eval.models").load() is RKSC
    assert (name, value) == ("rksc", f"{RKSC.__module__}:{RKSC.__name__}")


def test_settings_that_the_harness_model_cannot_keep(harness: Any, client: OpenAI) -> None:
    from rksc.clients.lm_eval import RKSC

    lm = RKSC(client)
    sample = lm._sample("Hi", {"until": ["x", ""], "max_gen_toks": 5, "do_sample": False})
    assert (sample.stop, sample.max_new_tokens, sample.sampling.temperature) == (("x",), 5, 0.0)
    assert lm._sample("Hi", {"do_sample": True, "temperature": 0.5}).sampling.temperature == 0.5
    with pytest.raises(ValueError, match="num_beams=4"):
        lm._sample("Hi", {"num_beams": 4})
    with pytest.raises(ValueError, match="max_gen_toks"):
        lm._sample("Hi", {"max_gen_toks": 10**6})
    with pytest.raises(ValueError, match="quantize"):
        RKSC(client, quantize=True)
    with pytest.raises(ValueError, match="batch_size"):
        RKSC(client, batch_size="many")


@pytest.mark.parametrize("given, rows", [("8", 8), (8, 8), ("1", 64), ("auto:4", 64), (None, 64)])
def test_the_harness_batch_size(
    harness: Any, smollm2: Model, given: str | int | None, rows: int
) -> None:
    from rksc.clients.lm_eval import RKSC

    lm = RKSC(smollm2, batch_size=given, kv_bytes="64MiB")
    assert lm.engine.max_rows == rows


def test_the_harness_model_samples_from_its_seed(harness: Any, client: OpenAI) -> None:
    """Runs repeat, a request that comes again draws anew, and each answer is cached as it ends,
    before one that fails."""
    from lm_eval.api.instance import Instance

    from rksc.clients.lm_eval import RKSC

    class Hook:
        def __init__(self) -> None:
            self.fed: list[tuple[str, Any, Any]] = []

        def add_partial(self, kind: str, request: Any, result: Any) -> None:
            self.fed.append((kind, request, result))

    def ask(seed: int, *n_new: int) -> tuple[list[str], Hook]:
        lm = RKSC(client, seed=seed)
        lm.cache_hook = hook = Hook()
        settings = {"do_sample": True, "temperature": 1.5}
        requests = [
            Instance("generate_until", {}, ("Once", {**settings, "max_gen_toks": n}), i)
            for i, n in enumerate(n_new)
        ]
        return lm.generate_until(requests, disable_tqdm=True), hook

    first, hook = ask(1, 8, 8, 8)
    assert len(set(first)) == 3
    assert sorted(result for _, _, result in hook.fed) == sorted(first)
    assert ask(1, 8, 8, 8)[0] == first
    assert not set(ask(2, 8, 8, 8)[0]) & set(first)
    lengths: list[int] = []
    create = Hook.add_partial

    def short_first(hook: Hook, kind: str, request: Any, result: Any) -> None:
        lengths.append(request[1]["max_gen_toks"])
        create(hook, kind, request, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hook, "add_partial", short_first)
        ask(1, 12, 3, 6)
    assert lengths == [3, 6, 12]


# ---- imports -------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported_with_the_clients() -> None:
    """`import rksc.clients` needs none of the packages whose shapes it has."""
    code = (
        "import sys, rksc.clients, rksc.clients.tot\n"
        "heavy = {'openai', 'torch', 'transformers', 'lm_eval', 'starlette', 'reasoners', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"
