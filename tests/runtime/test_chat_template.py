"""Chat templates are programs of strangers: they end in time, stay small, and fail in one line."""

import time

import pytest

from spec_runtime.dialogue import chat_template
from spec_runtime.dialogue.chat_template import ChatTemplate
from spec_runtime.errors import UserError

MESSAGES = [{"role": "user", "content": "hi"}]

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
]
HUGE = [
    "{{ 'a' * 10**10 }}",
    "{{ [1] * 10**10 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a'|indent(10**10, true) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ '%10000000000d' % 5 }}",
    "{{ '%*d' % (10**10, 5) }}",
    "{{ '%10000000000d'|format(5) }}",
    "{{ '{:10000000000}'.format(5) }}",
    "{{ '{:{}}'.format(5, 10**10) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ ('a' * 4000000).replace('', 'b' * 1000) }}",
    "{{ ('a' * 4000000)|replace('', 'b' * 1000) }}",
    "{{ ','.join(['a' * 1000000] * 1000) }}",
    "{{ (['a' * 1000000] * 1000)|join }}",
    "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ range(99999)|map('center', 99999)|list|length }}",
    "{% set x = 'a' * 1000000 %}{% set y %}" + "{{ x }}" * 100 + "{% endset %}{{ y|length }}",
    "{% set x = 'a' * 1000000 %}" + "{{ x }}" * 100,
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}"
    "{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
    "{{ ([[1]] * 1000)|sum(start=[]) }}",
    "{{ 1.5|round(10**9, 'ceil') }}",
    "{{ (5).from_bytes(('a' * 100000).encode(), 'big') }}",
]
WRONG = [
    "{{ messages[0].content + 5 }}",
    "{{ 5 // 0 }}",
    "{{ messages|tojson(indent=messages) }}",
    "{% include 'other' %}",
    "{{ lipsum(n=1000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ strftime_now(5) }}",
    "{{ nothing|tojson }}",
    "{{ nothing.there }}",
    "{{ messages.append(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages|sort }}{{ [1, 'a']|sort }}",
]
INVALID = [
    "{% if %}",
    "{{ x|nofilter }}",
    "{% generation %}x",
    "{{ x is notest }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "x" * (chat_template.MAX_SOURCE + 1),
]


def refusal(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_loops_on_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    begin = time.monotonic()
    refusal(source, "cannot render these messages: it takes longer than 0.2 s")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("source", HUGE)
def test_a_template_that_makes_too_much_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_WEIGHT", 1 << 20)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 600.0)  # also on a busy machine
    refusal(source, "cannot render these messages: it (makes|formats|sums)")


@pytest.mark.parametrize("source", WRONG)
def test_a_template_that_fails_is_one_line(source: str) -> None:
    refusal(source, "^the chat template cannot render these messages: ")


@pytest.mark.parametrize("source", INVALID)
def test_a_template_that_is_none_is_one_line(source: str) -> None:
    refusal(source, "^the chat template is not valid: ")


def test_what_a_template_says_against_messages_is_one_short_line() -> None:
    refusal("{{ raise_exception('no\nroles' * 1000) }}", "refuses these messages: no roles")


def test_templates_still_do_what_prompts_need() -> None:
    for source, expected in (
        ("{% for m in messages %}{{ loop.index }}{{ m.items()|list }}{% endfor %}", "1[('role'"),
        ("{{ ''.join(messages|map(attribute='role')) }}", "user"),
        ("{{ messages|map(attribute='content')|join('-') }}", "hi"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{% set a, b = 1, 2 %}{{ a ~ b }}", "12"),
        ("{{ '%s-%03d' % ('a', 5) }}{{ '{} {}'.format('b', 6) }}", "a-005b 6"),
        ("{{ {'a': [1]}|tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ {'b': 1, 'a': 'é'}|tojson(ensure_ascii=False, sort_keys=True) }}", '{"a": "é"'),
        ("{{ [1, 'é']|tojson(separators=(',', ':'), ensure_ascii=True) }}", '[1,"\\u00e9"]'),
        ("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "a1False"),
        ("{% set n = namespace(v=[]) %}{% set n.v = n.v + [1] %}{{ n.v }}", "[1]"),
        ("{% set x %}a{% endset %}{{ x|upper }}{% filter lower %}B{% endfilter %}", "Ab"),
        ("{% macro m(x, y=[1]) %}{{ x }}{{ y[0] }}{% endmacro %}{{ m('a') }}", "a1"),
        ("{{ messages[::-1][0]['content'].split('i')[0] }}", "h"),
        ("{{ range(3)|sum }}{{ 'x' if messages is iterable else (1, 2) }}", "3x"),
        ("{% for x in [1, 2] if x > 1 %}{{ x }}{% break %}{% endfor %}", "2"),
    ):  # fmt: skip
        assert ChatTemplate(source).render(MESSAGES).startswith(expected), source


def test_long_conversations_are_rendered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand messages, 4 MB: far longer than any context of today."""
    source = (
        "{% set n = namespace(text='') %}{% for m in messages %}{% set n.text = m.content.replace("
        "'<think>', '') | trim %}<{{ m.role }}>{{ n.text + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    most = chat_template.MAX_SECONDS / 2
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 600.0)
    begin = time.thread_time()
    assert len(ChatTemplate(source).render(messages)) > 3_900_000
    assert time.thread_time() - begin < most


def test_the_limits_begin_anew_with_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_TOTAL", 1 << 16)
    template = ChatTemplate("{{ ('a' * 20000)|length }}")
    assert [template.render(MESSAGES) for _ in range(9)] == ["20000"] * 9
