"""Chat templates and grammars of strangers: what they raise, take or break is one line about them, and nobody waits."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from draftree.errors import ConfigError, PromptError
from draftree.sampling.grammar import Function, Grammars
from draftree.sandbox import workers
from draftree.text.encoding import Conversation, encode, user

from .tiny import BYTES_VOCAB, bytes_tokenizer

TOKENIZER = bytes_tokenizer(True)
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CPU_SECONDS", 1)


def test_a_job_has_an_end_by_the_clock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine so busy that its worker gets no processor, nobody waits for ever."""
    monkeypatch.setattr(workers, "CPU_SECONDS", 1 << 20)
    monkeypatch.setattr(workers, "SECONDS", 1)
    with pytest.raises(PromptError):
        encode(bytes_tokenizer(True, FOREVER), user("a"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'A'*(10**10) }}",
        "{{ 9**(9**9) }}",
        FOREVER,
        "{{ 'a'|center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ ('a'*10**6).replace('a', 'b'*10**6) }}",
        "{{ [1]|batch(10**10, 'x')|list }}",
        "{{ {'a': 1}|tojson(indent=10**10) }}",
        "{{ range(10**10)|list }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% for i in range(99) %}{{ 'x'*10**6 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ " + "-" * 3000 + "1 }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ raise_exception('\ud800') }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% include 'x' %}",
        "{% for %}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_hostile_template_is_one_line(template: str) -> None:
    """One took 7.5 GB, another never ended."""
    tokenizer = bytes_tokenizer(True, template)
    with pytest.raises(PromptError, match="chat template") as caught:
        encode(tokenizer, user("the"))
    assert len(str(caught.value).splitlines()) == 1 and "Traceback" not in str(caught.value)
    assert encode(TOKENIZER, user("the"))


TEXTS = ["", " ", "# c", "a ::= b", "\ud800", "\0", "(" * 5000, "[", "{", "start: /", 'start: "\ud800"', "%", "\\"]
CHAIN = [f'r{i}: "a" r{i + 1}' for i in range(4000)]
BIG: dict[str, Any] = {
    "rules without end": "\n".join(["start: r0", *CHAIN, 'r4000: "b"']),
    "rules without end in GBNF": "\n".join(["root ::= r0", *CHAIN]).replace(":", " ::=") + '\nr4000 ::= "b"',
    "a million": "x" * (1 << 21),
}


def _kinds(value: str) -> dict[str, Callable[[Grammars], object]]:
    """Each kind of grammar with a text in each place that takes one."""
    schemas: list[dict[str, Any]] = [
        {"const": value},
        {"type": value},
        {"type": "string", "pattern": value},
        {"type": "string", "format": value},
        {"$ref": value},
        {"type": "object", "properties": {value: {"type": "string"}}, "required": [value]},
    ]
    return {
        "regex": lambda g: g.regex(value),
        "grammar": lambda g: g.grammar(value),
        "choice": lambda g: g.choice([value]),
        **{f"schema {i}": lambda g, s=s: g.json_schema(s) for i, s in enumerate(schemas)},  # type: ignore[misc]
        **{
            f"calls {i}": lambda g, s=s: g.calls([Function("f", s)], forced=True, several=False)  # type: ignore[misc]
            for i, s in enumerate(schemas)
        },
    }


@pytest.mark.parametrize("kind", _kinds(""))
@pytest.mark.parametrize("value", [*TEXTS, *BIG])
def test_a_hostile_grammar_is_compiled_or_one_line(kind: str, value: str) -> None:
    """Some were exceptions of llguidance, and rules that follow one another 3,000 deep ended the process."""
    try:
        _kinds(BIG.get(value, value))[kind](GRAMMARS)
    except ConfigError as error:
        assert 20 < len(str(error)) < 500 and len(str(error).splitlines()) == 1
        assert "Traceback" not in str(error) and "panick" not in str(error)


GRAMMARS = Grammars(TOKENIZER, BYTES_VOCAB, {2})


@pytest.mark.parametrize(
    "make",
    [
        lambda: GRAMMARS.choice([str(i) for i in range(200_000)]),
        lambda: GRAMMARS.grammar(BIG["rules without end"]),
        lambda: GRAMMARS.grammar("# c"),
        lambda: GRAMMARS.regex("a\ud800"),
        lambda: GRAMMARS.json_schema({"const": "\ud800"}),
        lambda: GRAMMARS.json_schema({"const": float("nan")}),
        lambda: GRAMMARS.json_schema({"const": {1, 2}}),
        lambda: GRAMMARS.json_schema(json.loads('{"items":' * 900 + "{}" + "}" * 900)),
        lambda: GRAMMARS.json_schema({"properties": {f"k{i}": {"type": "string"} for i in range(30_000)}}),
    ],
)
def test_what_takes_too_much_is_refused(make: Callable[[], object]) -> None:
    """100,000 choices took 35 s, and then panicked."""
    with pytest.raises(ConfigError):
        make()


def test_nobody_waits_for_the_job_of_another() -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(encode, bytes_tokenizer(True, FOREVER), user("the"))
        assert encode(TOKENIZER, user("the")) and GRAMMARS.regex("a")
        assert not slow.done()
        with pytest.raises(PromptError):
            slow.result()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that interrupt")
def test_an_interrupted_job_does_not_answer_the_next_one() -> None:
    """Its worker was used again: the next prompt was rendered as the former one."""
    slow = "{% for i in range(99999) %}{% for j in range(40) %}{% endfor %}{% endfor %}former"
    assert workers.run("render", "{{ x }}", {"x": "first"}) == "first"
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            workers.run("render", slow, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert workers.run("render", "{{ x }}", {"x": "next"}) == "next"


@pytest.mark.parametrize("content", ["the", "the ", " the\n", "<b>"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_an_answer_goes_on_where_transformers_lets_it(content: str, trim: str) -> None:
    template = (
        "{%- for m in messages -%}<{{ m.role }}>{{ m.content" + trim + " }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ tools }}<assistant>{% endif %}"
    )
    tokenizer = bytes_tokenizer(True, template)
    messages = [{"role": "user", "content": "hat"}, {"role": "assistant", "content": content}]
    wanted = tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert encode(tokenizer, Conversation(messages, continued=True)) == wanted
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, messages) == wanted


def test_a_worker_that_keeps_much_memory_takes_no_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four workers waited with whatever their largest job had left them, up to 2 GB each."""
    assert workers.run("render", "{{ x }}", {"x": "small"}) == "small"
    before = [worker.pid for worker in workers._idle]
    assert workers.run("render", "{{ x }}", {"x": "small"}) == "small"
    assert sorted(worker.pid for worker in workers._idle) == sorted(before)
    monkeypatch.setattr(workers, "_KEPT", 1 << 20)  # less than any process has
    assert workers.run("render", "{{ x }}", {"x": "large"}) == "large"
    assert len(workers._idle) == len(before) - 1


def test_a_worker_that_died_while_it_waited_fails_no_job() -> None:
    """It failed one, as if that were nested too deep: so did each that the system had ended for want of memory."""
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda x: workers.run("render", "{{ x }}", {"x": x}), "abc")) == [*"abc"]
    died = [*workers._idle]
    for worker in died:
        worker.kill()
        worker.wait()
    assert died and workers.run("render", "{{ x }}", {"x": "next"}) == "next"
    assert not {worker.pid for worker in died} & {worker.pid for worker in workers._idle}
