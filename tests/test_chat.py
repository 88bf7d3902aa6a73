"""Chat templates: what transformers gives them, and the process that keeps them within limits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rksc.text import template, template_worker
from rksc.text.chat import render
from rksc.text.template import ChatTemplate, render_template

pytest.importorskip("jinja2")

HI = [{"role": "user", "content": "Hi"}]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

# ---- what templates are given ------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <now> & \u201chere\u201d, caf\u00e9 \U0001f600",
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {"unit": {"enum": ["c", "f"]}, "city": {"type": "string"}},
            },
        },
    }
]
DOCUMENTS = [{"title": "One", "text": "1\n2"}, {"title": "\u00c9", "text": ""}]
CALL = {"name": "weather", "arguments": {"city": "K\u00f6ln", "b": [1, 2.5, None, True]}}
TALKS: dict[str, list[dict[str, Any]]] = {
    "short": HI,
    "long": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4 "},
        {"role": "user", "content": "\u00fc <b>&amp;</b> '\"\\ \t"},
        {"role": "assistant", "content": "The answer is "},
    ],
    "tools": [
        {"role": "user", "content": [{"type": "text", "text": "Where?"}, {"type": "image"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "rain?",
            "tool_calls": [{"type": "function", "id": "a1", "function": CALL}],
        },
        {"role": "tool", "name": "weather", "tool_call_id": "a1", "content": '{"t": 3}'},
    ],
}

LOOP = "{% for m in messages %}BODY{% endfor %}"
CONSTRUCTS = [
    # arguments of tojson, by position and by keyword
    "{{ tools | tojson }}",
    "{{ tools | tojson(indent=4) }}",
    "{{ tools | tojson(True) }}",
    "{{ tools | tojson(true, 2) }}",
    "{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{{ tools | tojson(False, none, (',', ':'), True) }}",
    "{{ tools | tojson(separators=[' ,', ' : '], sort_keys=true) }}",
    "{{ tools | tojson(indent='--') }}",
    "{{ tools | tojson(dumps=1) }}",
    "{{ '<a href=\"x\">' | tojson }}{{ none | tojson }}{{ 1.0 | tojson }}{{ [] | tojson }}",
    "{{ nothing | tojson }}",
    "{{ messages | tojson }}",
    "{{ messages | map('tojson') | join('|') }}",
    # names of tokens, and variables that are there or not
    "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}{{ cls_token }}",
    "{{ bos_token + eos_token }}|{{ mask_token is defined }}|{{ bos_token is defined }}",
    "{{ image_token }}{{ image_token is defined }}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ nothing is defined }}",
    "{{ date_string }}{{ date_string is defined }}{{ enable_thinking | default(true) }}",
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ date_string }}",
    "{% if add_generation_prompt %}go{% endif %}{{ add_generation_prompt }}",
    "{% for d in documents %}{{ loop.index }}:{{ d.title }}/{{ d['text'] }}|{% endfor %}",
    "{{ extra }}{{ extra.a.b }}{{ number + 1 }}{{ flag is true }}{{ pair }}",
    # globals
    "{{ raise_exception('roles must alternate') }}",
    "{{ raise_exception(3) }}",
    "{{ strftime_now('%Y-%m') }}{{ strftime_now is defined }}",
    "{{ range(3) | list }}{{ range(10, 0, -3) | join(',') }}",
    "{{ dict(a=1, b=2) }}{{ dict(a=1).items() | list }}{{ dict.fromkeys('ab', 1) }}",
    "{{ dict.__name__ }}",
    "{{ dict.mro() }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% set j = joiner('; ') %}{{ j() }}a{{ j() }}b",
    "{% set ns = namespace(n=0, system='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content | trim %}{% endif %}{% endfor %}"
    "{{ ns.n }}{{ ns.system }}{{ ns.nothing }}",
    "{% set ns = namespace(_hidden=1) %}{{ ns._hidden }}",
    "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    # blocks
    "{% generation %}a{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
    LOOP.replace("BODY", "{% generation %}{{ m.content }}{% endgeneration %}\n"),
    LOOP.replace("BODY", "{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.role }}"),
    LOOP.replace("BODY", "{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m.role }}"),
    LOOP.replace(
        "BODY",
        "{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex0 }}"
        "{{ loop.previtem.role if loop.previtem is defined }}"
        "{{ loop.nextitem.role if loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}",
    ),
    "{%- for m in messages -%}\n   {{- '<' ~ m['role'] ~ '>' }}\n\n  {%- if m.content is string %}"
    "  \n{{ m.content }}\n  {%- endif %}\n{% endfor %}\n",
    "    {% if true %}\n  a\n    {% endif %}\n  b {# gone #}\n c\n",
    "{% if true -%}   x   {%- endif +%}\n{%+ if true %}y{% endif %}\n",
    "{% raw %}{{ not this }}{% endraw %}",
    "{% filter upper %}abc{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}{{ a }}",
    "{% macro say(x, y='d') -%}[{{ x }}|{{ y }}|{{ varargs }}|{{ kwargs }}]{%- endmacro %}"
    "{{ say(1) }}{{ say(1, 2, 3) }}{{ say(1, z=3) }}",
    "{% macro wrap() %}<{{ caller(1) }}>{% endmacro %}{% call(n) wrap() %}{{ n }}{% endcall %}",
    "{% set text %}a{{ 1 + 1 }}{% endset %}{{ text }}{{ text | length }}",
    "{% for k, v in {'b': 1, 'a': 2}.items() recursive %}{{ k }}{{ v }}{% else %}e{% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}",
    "{% do messages.append(1) %}",
    "{% include 'x' %}",
    "{% block a %}in{% endblock %}{{ self.a() }}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% trans %}x{% endtrans %}",
    # filters, tests, operators, methods
    "{{ messages | length }}{{ messages[0].role }}{{ messages[-1]['role'] }}{{ messages[99] }}",
    "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | count }}",
    "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | join(', ') }}",
    "{{ messages | map(attribute='role') | unique | sort | join }}",
    "{{ messages | groupby('role') | length }}{{ messages | first | length }}",
    LOOP.replace("BODY", "{{ (m.content or '') | string | trim | length }},"),
    LOOP.replace("BODY", "{{ m.content is string }}{{ m.content is iterable }},{{ m is mapping }}"),
    LOOP.replace("BODY", "{{ m.tool_calls is defined }}{{ 'name' in m }}{{ m.content is none }}"),
    LOOP.replace("BODY", "{{ m.get('name', 'nobody') }}{{ m.keys() | list | sort }}{{ m }}"),
    LOOP.replace("BODY", "{{ m.reasoning_content }}{{ m['thinking'] }}{{ m.reasoning }}"),
    LOOP.replace(
        "BODY",
        "{% for call in m.tool_calls %}{{ call.function.name }}"
        "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
        "{{ call.function.arguments | dictsort }}{{ call['function'] | tojson(indent=2) }}"
        "{% endfor %}",
    ),
    LOOP.replace(
        "BODY",
        "{% if m.content is string %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
        "{{ m.content.strip().rstrip('.').startswith('B') }}{{ m.content.replace('a', 'b') }}"
        "{{ m.content[:3] }}{{ m.content.upper() }}{{ m.content.index('i') }}{% endif %}",
    ),
    LOOP.replace(
        "BODY",
        "{% if m.content is not string %}{% for p in m.content %}{{ p.type }}{{ p.text }}"
        "{% endfor %}{% endif %}",
    ),
    "{{ 'a' * 3 ~ 1 ~ none ~ [1] }}{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 5 }}{{ 1 / 4 }}{{ 1 == 1.0 }}",
    "{{ 'x' if nothing else 'y' }}{{ 'a' in 'abc' }}{{ not true or false }}{{ 1 < 2 <= 2 }}",
    "{{ '%s=%05.1f' | format('a', 2.55) }}{{ '{}-{x}'.format(1, x=2) }}{{ 'a%db' % 3 }}",
    "{{ 'a b c' | replace(' ', '_') | capitalize }}{{ 'abc' | center(9) }}|",
    "{{ 'ab\ncd' | indent(2) }}{{ 'abcdefgh' | truncate(4, true) }}",
    "{{ [3, 1, 2] | sort(reverse=true) }}{{ [1, 2] | sum }}{{ [[1, 2], [3]] | sum(start=[]) }}",
    "{{ '<b>' | e }}{{ '<b>' | safe }}{{ 'a,b' | list }}{{ 3.7 | int }}{{ '4' | int + 1 }}",
    "{{ 1234567 | filesizeformat }}{{ [1, 2, 3, 4] | batch(3) | list }}{{ {'a': 1} | pprint }}",
    "{{ 'the quick brown fox' | wordwrap(9) }}{{ 'a b' | title }}{{ [] is sequence }}",
    "{{ 5 is divisibleby 5 }}{{ 4 is odd }}{{ '' is none }}{{ nothing is undefined }}",
    "{{ True }}{{ true }}{{ None }}{{ none }}{{ 1e3 }}{{ 1_000 }}{{ 'a' 'b' }}{{ '\\u00e9\\n' }}",
    "{{ (1, 2) }}{{ {'a': [1, {'b': none}]} }}{{ [1, 'x', 1.5, true] }}",
    # what the sandbox refuses, and mistakes
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ (messages | attr('append'))(1) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages.__class__ }}",
    "{{ nothing.at_all }}",
    "{{ messages[0].content + 1 }}",
    "{{ nofilter | nosuchfilter }}",
    "{% for %}",
    "{{ range(10**9) | list }}",
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ '\\ud800' }}",
]  # fmt: skip
VARIABLES = {
    "image_token": "<image>", "extra": {"a": {"b": "c"}}, "number": np.int64(4), "flag": np.True_,
    "pair": (1, "b"), "path": Path("/x"),
}  # fmt: skip


@pytest.mark.parametrize("talk", TALKS)
def test_templates_are_given_what_transformers_gives(talk: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **NAMES)
    n_texts = 0
    for opened, given in ((True, {"tools": TOOLS, "documents": DOCUMENTS}), (False, VARIABLES)):
        for source in CONSTRUCTS:
            more: dict[str, Any] = {"tools": None, "documents": None, **given}
            expected: str | None
            try:
                expected = theirs.apply_chat_template(
                    TALKS[talk],
                    chat_template=source,
                    tokenize=False,
                    add_generation_prompt=opened,
                    **more,
                )
                expected.encode()
            except Exception:
                expected = None
            n_texts += expected is not None
            if expected is None:
                with pytest.raises(ValueError, match="chat template: "):
                    render(source, TALKS[talk], opened, **NAMES, **more)
            else:
                assert render(source, TALKS[talk], opened, **NAMES, **more) == expected, source
    assert n_texts > len(CONSTRUCTS)


@pytest.mark.parametrize("body", ["{{ m.content }}!", "{{ m.content | trim }}", "{{ m.content }}"])
def test_a_message_is_continued_as_by_transformers(body: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, "<unk>"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **NAMES)
    source = LOOP.replace("BODY", body + "\n")
    for content in ("The answer is ", " a\n", "x", "two\n\n"):
        talk = [*HI, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(
            talk, chat_template=source, tokenize=False, continue_final_message=True
        )
        assert render(source, talk, continue_final=True) == expected


@dataclass
class Said:
    role: str
    content: Any


class Model:
    """In the shape of pydantic's."""

    def model_dump(self) -> dict[str, Any]:
        return {"role": "user", "content": "dumped"}


def test_a_template_sees_plain_data_only() -> None:
    shown = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ x }}"
    talk: list[Any] = [Said("user", "a"), Model(), {"role": "user", "content": [np.float32(0.5)]}]
    assert render(shown, talk, x=object) == "user:a;user:dumped;user:[0.5];<type>"
    assert render("{{ x.real }}|{{ x.tofile }}", HI, x=np.ones(2)) == "|"
    assert render("{{ x }}", HI, x=Path("/x")) == f"<{type(Path()).__name__}>"


def test_errors_say_where() -> None:
    broken = ChatTemplate("{{ 'a' }}\n{% for %}", "m/chat_template.jinja")
    with pytest.raises(ValueError, match=r"^m/chat_template\.jinja: chat template: line 2: "):
        render(broken, HI)
    with pytest.raises(ValueError, match=r"^chat template: 'nothing' is undefined$"):
        render("{{ nothing.at_all }}", HI)
    refusing = ChatTemplate("{{ raise_exception('no system message') }}", "m/x.gguf")
    with pytest.raises(ValueError, match=r"^chat template: no system message$"):
        render(refusing, HI)
    with pytest.raises(ValueError, match=r"chat template: a{4000}\.\.\.$"):
        render("{{ raise_exception('a' * 9999) }}", HI)
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content: .* half a character"):
        render("x", [{"role": "user", "content": "\ud800"}])
    with pytest.raises(ValueError, match=r"^tools\[0\]: a key: .* half a character"):
        render("x", HI, tools=[{"\udfff": 1}])
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^tools is nested too deep"):
        render("x", HI, tools=deep)
    with pytest.raises(ValueError, match=r"^tools\[1\] must be a dict: a JSON schema, not '<func"):
        render("x", HI, tools=[{}, render])
    with pytest.raises(ValueError, match=r"^documents must be a list of dicts, not str"):
        render("x", HI, documents="text")


# ---- limits ------------------------------------------------------------------------------------

TIME, MEMORY = r"takes more than 0\.3 s of processor time", "takes more than 256 MiB of memory"
DEPTH, LENGTH = "nests or calls itself too deeply", "characters"
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": TIME,
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}": (
        f"{TIME}|{MEMORY}"
    ),
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}": MEMORY,
    "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}": MEMORY,
    "{{ lipsum(n=10**9) }}": TIME,
    "{{ (10**4000000) | string }}": TIME,
    "{{ n ** (n ** 9) }}": TIME,
    "{{ 'a' * n ** 12 }}": MEMORY,
    "{{ [0] * n ** 9 }}": MEMORY,
    "{{ 'a' | center(n ** 9) }}": MEMORY,
    "{{ '%1000000000d' | format(1) }}": MEMORY,
    "{{ '{:1000000000}'.format(1) }}": MEMORY,
    "{{ ('a' * n ** 5) | replace('a', 'b' * n ** 5) }}": MEMORY,
    "{{ (['x' * n ** 5] * n ** 6) | join('y') }}": MEMORY,
    "{{ messages | tojson(indent=n ** 9) }}": MEMORY,
    "{% for i in range(50000) %}{{ 'a' * n ** 4 }}{% endfor %}": MEMORY,
    "{{ ('aac' * n ** 7).split('c') | length }}": MEMORY,
    "{{ 'a' * 17 * n ** 6 }}": LENGTH,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": DEPTH,
    "{% macro f(x) %}{{ g(x ~ x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}"
    "{{ f('a') }}": f"{DEPTH}|{MEMORY}",
    "{% for x in [[1]] recursive %}{{ loop([x]) if x }}{% endfor %}": f"{DEPTH}|{MEMORY}",
    "{{" + "(" * 100_000 + "1" + ")" * 100_000 + "}}": DEPTH,
    ("{{" + "[" * 20 + "1" + "]" * 20 + "}}") * 20_000: f"{TIME}|{MEMORY}",
    "{% for i in x %}" * 30 + "{% endfor %}" * 30: "SyntaxError: too many statically nested blocks",
    "{% if 1 %}" * 5000: DEPTH,
    "{{ 1" + " + 1" * 100_000 + "}}": f"{DEPTH}|{TIME}",
    "{{ 1 }}" * 140_000: f"{TIME}|{MEMORY}",
    "{% set a = 1 %}" * 60_000: f"{TIME}|{MEMORY}",
    "x" * (2 << 20): LENGTH,
    "{{ cycler() }}": "RuntimeError",
    "{{ '%d' | format(1e400) }}": "NameError|OverflowError",
}


def in_pool() -> list[int]:
    return [process._process.pid for process in template._pool._idle]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:60])
def test_hostile_templates_end_with_an_error_that_says_why(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, depth and length are met first on a slow machine, too; time is not waited for."""
    monkeypatch.setattr(template, "SECONDS", 0.3 if TIME in HOSTILE[source] else 20.0)
    with pytest.raises(ValueError, match=f"^m/t: chat template: .*({HOSTILE[source]})"):
        render(ChatTemplate(source, "m/t"), HI, n=10)
    assert render("{{ messages[0].content }}", HI) == "Hi"


def test_large_values_are_refused_before_they_are_sent() -> None:
    with pytest.raises(ValueError, match="chat template: is given more than 64 MiB"):
        render("x", HI, long="a" * (65 << 20))
    assert render("{{ long | length }}", HI, long="a" * (10 << 20)) == str(10 << 20)


def test_the_limits_are_those_that_the_documents_name() -> None:
    text = " ".join((Path(__file__).parents[1] / "SECURITY.md").read_text().split())
    mib = 1 << 20
    for limit in (
        f"{template.SECONDS:g} s of processor time",
        f"{template_worker.MAX_BYTES // mib} MiB of memory",
        f"be {template._MAX_TEMPLATE // mib} Mi characters long",
        f"write {template_worker.MAX_CHARACTERS // mib} Mi",
        f"may be {template_worker.MAX_REQUEST // mib} MiB",
    ):
        assert limit in text, limit


def test_ordinary_chats_are_far_from_the_limits() -> None:
    """A thousand turns of a thousand characters, twice over in the text."""
    talk = [
        {"role": "user", "content": "word " * 200},
        {"role": "assistant", "content": "\u00e9" * 1000},
    ]
    text = render(LOOP.replace("BODY", "{{ m.content }}{{ m | tojson }}"), talk * 500)
    assert len(text) > 2_000_000


# ---- the process -------------------------------------------------------------------------------


def test_a_process_is_kept_and_replaced_when_it_has_gone() -> None:
    render("a", HI)
    first = in_pool()
    assert render("b", HI) == "b"
    assert in_pool() == first
    os.kill(first[-1], signal.SIGKILL)
    template._pool._idle[-1]._process.wait()
    assert render("c", HI) == "c"
    assert first[-1] not in in_pool()


def test_many_threads_at_once() -> None:
    wrong: list[Any] = []

    def work(i: int) -> None:
        for j in range(50):
            text = render("{{ x }}{% for i in range(50) %}{{ x }}{% endfor %}", HI, x=f"{i}.{j},")
            if text != f"{i}.{j}," * 51:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(in_pool()) <= template._MAX_PROCESSES


def test_an_interrupted_render_leaves_no_reply_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    render("a", HI)
    process = template._pool._idle[-1]
    real = process.ask

    def interrupted(request: bytes) -> Any:
        template_worker.send(process._end, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("first", HI)
    assert real.__self__ not in template._pool._idle
    assert render("second", HI) == "second"
    assert process._process.returncode is not None  # ended and reaped


def test_a_process_that_ends_in_the_middle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a crash of the interpreter, or the kernel's want of memory."""
    render("a", HI)
    real = template._Process.ask

    def killed(process: Any, request: bytes) -> Any:
        os.kill(process._process.pid, signal.SIGSEGV)
        return real(process, request)

    monkeypatch.setattr(template._Process, "ask", killed)
    with pytest.raises(ValueError, match=r"^f: chat template: ends the process .*\(status -11\)"):
        render(ChatTemplate("x", "f"), HI)
    monkeypatch.undo()
    assert render("b", HI) == "b"


def test_a_template_is_told_once_that_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    render("a", HI)
    monkeypatch.setattr(template, "_PATIENCE", 0.2)
    template._pool._idle[-1]._end.settimeout(0.2)
    os.kill(in_pool()[-1], signal.SIGSTOP)  # it computes nothing, and says nothing
    with pytest.raises(ValueError, match=r"^f: chat template: is not done after 0\.2 s"):
        render(ChatTemplate("x", "f"), HI)
    monkeypatch.undo()
    assert render("b", HI) == "b"


def run(script: str, *options: str, **more: Any) -> str:
    """What a Python of its own prints that reads the script from its standard input."""
    environment = {**os.environ, "SECRET": "s3cret", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *options, "-"],
        input=textwrap.dedent(script),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **more,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_process_ends_with_its_parent_and_leaves_no_zombie() -> None:
    printed = run(
        """
        from rksc.text.chat import render
        from rksc.text import template
        hi = [{"role": "user", "content": "Hi"}]
        print(render("{{ messages[0].content }}", hi))
        process = template._pool._idle[-1]._process
        print(process.pid)
        """,
        "-W", "error",
    ).split()  # fmt: skip
    assert printed[0] == "Hi"
    with pytest.raises(ProcessLookupError):
        os.kill(int(printed[1]), 0)


def test_a_parent_that_is_killed_takes_it_along() -> None:
    script = (
        "import sys, os, time\nfrom rksc.text.chat import render\nfrom rksc.text import template\n"
        "render('a', [{'role': 'user', 'content': 'Hi'}])\n"
        "print(template._pool._idle[-1]._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=-1, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or "Z (zombie)" in status(pid):
            return
        time.sleep(0.02)
    raise AssertionError("it still runs")


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "Z (zombie)"


def test_forked_children_have_processes_of_their_own() -> None:
    printed = run(
        """
        import os
        from rksc.text.chat import render
        hi = [{"role": "user", "content": "Hi"}]
        render("a", hi)
        kids = []
        for i in range(3):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                for j in range(100):
                    assert render("{{ x }}", hi, x=i * 1000 + j) == str(i * 1000 + j)
                os.write(write, b"fine")
                os._exit(0)
            kids.append((pid, read))
        for j in range(300):
            assert render("{{ x }}", hi, x=j) == str(j)
        for pid, read in kids:
            print(os.read(read, 9).decode(), os.waitpid(pid, 0)[1])
        """,
        "-W", "ignore::DeprecationWarning",
    )  # fmt: skip
    assert printed == "fine 0\n" * 3


def test_ctrl_c_is_for_the_parent_alone() -> None:
    printed = run(
        """
        import os, signal, time
        from rksc.text.chat import render
        hi = [{"role": "user", "content": "Hi"}]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & may ignore it
        render("a", hi)
        try:
            os.killpg(os.getpgrp(), signal.SIGINT)  # what a terminal does
            time.sleep(10)
        except KeyboardInterrupt:
            print("interrupted", render("b", hi))
        """,
        start_new_session=True,
    )
    assert printed == "interrupted b\n"


def test_a_parent_with_much_memory_and_few_rights() -> None:
    """A terabyte of address space, thousands of files, a folder that is gone, SIGCHLD ignored."""
    printed = run(
        """
        import mmap, os, resource, signal, tempfile
        from rksc.text.chat import render
        from rksc.text import template
        hi = [{"role": "user", "content": "Hi"}]
        no_reserve = 0x4000
        held = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | no_reserve)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        files = [os.open("/dev/null", 0) for _ in range(min(hard, 4096) - 40)]
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        print(render("{{ 'a' * 3 }}", hi))
        try:
            render("{{ lipsum(n=10**9) }}", hi)
        except ValueError as error:
            print("ValueError")
        print(render("b", hi))
        """
    )
    assert printed == "aaa\nValueError\nb\n"


def test_whoever_leaves_the_sandbox_finds_little() -> None:
    """In the process: no file or connection can be opened, no memory beyond the limit, and none of
    the parent's environment is there."""
    render("a", HI)
    pid = in_pool()[-1]
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert {name.split(b"=")[0] for name in environment.split(b"\0")} <= {b"", b"LD_LIBRARY_PATH"}
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max open files            0                    0" in limits
    printed = run(
        """
        import socket, sys
        from rksc.text import template_worker as worker
        worker._limit()
        for call in (lambda: open("/etc/passwd"), socket.socket, lambda: bytearray(300 << 20)):
            try:
                call()
                print("done")
            except (OSError, MemoryError) as error:
                print(type(error).__name__)
        """
    )
    assert printed.split() == ["OSError", "OSError", "MemoryError"]


def test_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    template._pool.close()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'rksc\[hf\]'"):
        render("a", HI)


def test_an_interpreter_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    template._pool.close()
    for executable in ("/bin/true", "/nowhere/python", ""):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(RuntimeError, match=r"sys\.executable .* does not start: "):
            render("a", HI)


def test_an_old_jinja2_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template._pool.close()
    old = tmp_path / "jinja2"
    old.mkdir()
    (old / "__init__.py").write_text("__version__ = '3.1.4'\n")
    for name in ("constants", "debug"):
        (old / f"{name}.py").write_text("")
    monkeypatch.setattr(template, "_folder_of", lambda name: str(tmp_path))
    with pytest.raises(ImportError, match=r"jinja2>=3\.1\.6.*3\.1\.4"):
        render("a", HI)


def test_renders_are_quick() -> None:
    """The cost of the process is in docs/clients.md; here only that it is no other order."""
    render_template(ChatTemplate("{{ x }}"), {"x": 1})
    gc.collect()
    began = time.perf_counter()
    for i in range(200):
        render_template(ChatTemplate("{{ x }}"), {"x": i})
    assert (time.perf_counter() - began) / 200 < 0.05
