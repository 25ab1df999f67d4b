"""Chat templates: programs in Jinja that loop, grow, reach out of the sandbox or make no sense."""

import os
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

CANARY = "canary-5fb1"
MAX_TEXT = 50_000_000  # characters; no context is as long
NAMES = ("messages", "m", "x", "bos_token", "eos_token", "add_generation_prompt", "tools", "loop")
ATTRIBUTES = (
    *("role", "content", "items()", "keys()", "upper()", "format(m)", "__class__", "__globals__"),
    *("__init__.__globals__", "__class__.__mro__", "__subclasses__()", "append(1)", "split()"),
    *("__reduce__()", "format_map(x)", "encode()", "pop()", "clear()", "last", "index", "cycle(1)"),
    *("replace('a','aaaa')", "join(messages)", "nosuch", "center(999999999)", "zfill(9999999)"),
)
LEAVES = (
    *("'a'", "''", "1", "0", "-1", "2**31", "10**9", "1.5", "none", "true", "[]", "[1,2]", "{}"),
    *("'{0.__class__}'.format(m)", "'%s'|format(m)", "range(10)", "range(10**9)", "range(-1)"),
    *("'a'*10**9", "'a'*1000", "[0]*10**9", "range(99999)|list", "namespace(x=1)", "dict(a=1)"),
    *("cycler(1,2)", "joiner()", "lipsum(5)", "lipsum(n=99999)", "self", "caller()", "varargs"),
    *("strftime_now('%Y')", "strftime_now('%')", "strftime_now(1)", "raise_exception('no')"),
    *(
        "raise_exception(messages)",
        "raise_exception('a\nb\x1b[31m')",
        "undefined.a.b",
        "()",
        "9**9**9",
    ),
    *("messages[-1]", "messages[99]", "messages[0]['content']", "self._TemplateReference__context"),
    *(
        "cycler.__init__.__globals__.os.environ",
        "joiner.__init__.__globals__",
        "m|attr('__class__')",
    ),
)
FILTERS = (
    *(
        "trim",
        "upper",
        "length",
        "list",
        "tojson",
        "tojson(indent=2)",
        "join(',')",
        "first",
        "last",
    ),
    *(
        "map('upper')",
        "map(attribute='__class__')",
        "map(attribute='role')",
        "select",
        "reject('x')",
    ),
    *(
        "sort",
        "reverse",
        "string",
        "int",
        "float",
        "default('d')",
        "replace('a','aaaa')",
        "batch(2)",
    ),
    *(
        "groupby('role')",
        "sum",
        "unique",
        "items",
        "dictsort",
        "random",
        "pprint",
        "safe",
        "escape",
    ),
    *("indent(99999999)", "center(99999999)", "wordwrap(0)", "truncate(3)", "urlize", "nosuch"),
    *("slice(0)", "slice(10**8)|list", "batch(0)|list", "round(10**9)", "format(1)", "xmlattr"),
    *("filesizeformat", "striptags", "urlencode", "min", "max", "abs", "attr('__class__')"),
)
TESTS = ("defined", "string", "mapping", "iterable", "none", "sameas(x)", "divisibleby(0)", "in x")


def _expressions() -> SearchStrategy[str]:
    leaves = st.sampled_from(LEAVES + NAMES) | st.sampled_from(NAMES)

    def grown(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        return st.one_of(
            st.builds("({})|{}".format, inner, st.sampled_from(FILTERS)),
            st.builds("({}).{}".format, inner, st.sampled_from(ATTRIBUTES)),
            st.builds("({})[{}]".format, inner, inner),
            st.builds("({}) {} ({})".format, inner, st.sampled_from(list("+-*/%~<")), inner),
            st.builds("({}) is {}".format, inner, st.sampled_from(TESTS)),
            st.builds("({}) if ({}) else ({})".format, inner, inner, inner),
            st.builds("[{},{}]".format, inner, inner),
            st.builds("({})(({}))".format, inner, inner),
        )

    return st.recursive(leaves, grown, max_leaves=4)


def _statements() -> SearchStrategy[str]:
    expression = _expressions()
    leaves = st.one_of(
        st.builds("{{{{ {} }}}}".format, expression),
        st.builds("{{{{ {} }}}}".format, expression),
        st.builds("{{% set x = {} %}}".format, expression),
        st.builds("{{% set ns.x = {} %}}".format, expression),
        st.sampled_from(
            (
                *("text", "{", "{{", "{% end %}", "{# #}", "{% break %}", "{% continue %}"),
                *("{% include 'x' %}", "{% extends 'x' %}", "{% import 'os' as x %}", "{{ f(x) }}"),
                *("{% do x %}", "{%- raw %}{{ x }}{% endraw %}", "{% set ns=namespace(x='a') %}"),
                *(
                    "{{ bos_token }}",
                    "{{ m['content'] }}",
                    "\ud800",
                    "\x00\x1b[31m",
                    "{% block b %}",
                ),
            )
        ),
    )

    def grown(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        body = st.lists(inner, min_size=1, max_size=3).map("".join)
        loops = st.sampled_from(
            ("messages", "range(9)", "range(300)", "x", "messages recursive", "'abc'")
        )
        return st.one_of(
            st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, loops, body),
            st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, expression, body),
            st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, expression, body, body),
            st.builds("{{% macro f(x) %}}{}{{% endmacro %}}{{{{ f(1) }}}}".format, body),
            st.builds(
                "{{% filter {} %}}{}{{% endfilter %}}".format, st.sampled_from(FILTERS), body
            ),
            st.builds("{{% set x %}}{}{{% endset %}}".format, body),
            st.builds("{{% call f(1) %}}{}{{% endcall %}}".format, body),
            st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, expression, body),
        )

    return st.recursive(leaves, grown, max_leaves=8)


def _hungry() -> SearchStrategy[str]:
    """Draws templates that are long, deep, slow or large by design."""
    loop = st.builds(
        lambda depth, size, body: (
            "".join(f"{{% for a{i} in range({size}) %}}" for i in range(depth))
            + body
            + "{% endfor %}" * depth
        ),
        st.sampled_from((1, 2, 4, 9, 20)),
        st.sampled_from((3, 100, 99999)),
        st.sampled_from(("", "a", "{{ 'a'*1000 }}", "{{ bos_token }}", "{% break %}")),
    )
    doubling = st.builds(
        lambda times, how: "{% set ns=namespace(x='a') %}" + how * times + "{{ ns.x|length }}",
        st.sampled_from((5, 30, 60, 400)),
        st.sampled_from(
            ("{% set ns.x=ns.x+ns.x %}", "{% set ns.x=ns.x~ns.x %}", "{% set ns.x=[ns.x,ns.x] %}")
        ),
    )
    deep = st.builds(
        lambda depth, pair: pair[0] * depth + "x" + pair[1] * depth,
        st.sampled_from((20, 300, 5000, 100_000)),
        st.sampled_from(
            (("{{ (", ") }}"), ("{% if x %}", "{% endif %}"), ("{{ [", "] }}"), ("{{ x.a", ""))
        ),
    )
    recursion = st.sampled_from(
        (
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
            "{% macro f(x) %}{{ f(x~x) }}{% endmacro %}{{ f('a') }}",
            "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
            "{% set ns=namespace() %}{% set ns.x=ns %}{{ ns }}{{ ns.x.x.x }}",
            "{{ 10**10**10 }}",
            "{{ (10**9999)|string }}",
            "{{ '%999999999d' % 1 }}",
            "{{ '{:>999999999}'.format(1) }}",
            "{{ messages|join('a'*99999)|replace('a','a'*9999) }}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        )
    )
    nested = st.builds(
        "{{{{ ({}){} }}}}".format, st.just("messages"), st.sampled_from(("|tojson", "|string"))
    )
    return st.one_of(loop, doubling, deep, recursion, nested)


def _messages() -> SearchStrategy[Any]:
    content = mutations.texts(20) | st.sampled_from(
        ({"$": "repeat", "text": "a", "times": 100_000}, "a")
    )
    role = st.sampled_from(("user", "assistant", "system", "", "tool")) | mutations.texts(4)
    message = st.fixed_dictionaries({"role": role, "content": content})
    return st.lists(message, min_size=1, max_size=4)


def cases() -> SearchStrategy[Any]:
    bodies = st.lists(_statements(), min_size=1, max_size=3).map("".join)
    # few, because those that are slow by design take all the time that a rendering may take
    sources = st.integers(0, 24).flatmap(lambda turn: _hungry() if turn == 0 else bodies)
    return st.fixed_dictionaries({"source": sources, "messages": _messages()})


def open_kind(folder: Path) -> Run:
    from spec_runtime.dialogue.chat_template import ChatTemplate

    os.environ["FUZZ_CANARY"] = CANARY

    def run(case: dict[str, Any]) -> None:
        with refusing():
            template = ChatTemplate(case["source"], {"bos_token": "<s>", "eos_token": "</s>"})
            text = template.render(mutations.expand(case["messages"]))
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise Wrong(f"a template renders {type(text).__name__} of length {len(text)}")
        if CANARY in text:
            raise Wrong("a template has read the environment")

    return run


KIND = Kind("chat template", cases, open_kind, weight=12, seconds=15)
