"""Rewrites what requests to other servers say into the fields that stand for it here."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json

Object = dict[str, Any]


def _schema(schema: Any) -> Object:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _regex(regex: Any) -> Object:
    return {"type": "regex", "regex": regex}


def _choice(choices: Any) -> Object:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise UserError(f"got choices {brief(repr(choices), 80)}, expected a list of texts")
    return _regex("|".join(re.escape(each) for each in choices))


def _grammar(grammar: Any) -> Object:
    return {"type": "ebnf", "grammar": grammar}


def _structural(tag: Any) -> Object:
    """Returns vLLM's structural tag, which it takes as JSON in a text, too."""
    if isinstance(tag, str):
        with suppress(ValueError):
            tag = parse_json(tag)
    if not isinstance(tag, dict):
        raise UserError(f"got structural_tag {brief(repr(tag), 80)}, expected an object")
    return {**tag, "type": "structural_tag"}


# What vLLM's `structured_outputs` may hold, and the response_format that says the same.
_STRUCTURED: dict[str, Callable[[Any], Object]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural,
}
# Fields of vLLM and llama.cpp that say the same.
FORMATS = {
    **{f"guided_{name}": make for name, make in _STRUCTURED.items()},
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _grammar,
}

NO_EFFORT, SOME_EFFORT = "none", "enabled"  # as `reasoning_effort`: no thinking, any at all
_EFFORTS = {"enabled": SOME_EFFORT, "True": SOME_EFFORT, "disabled": NO_EFFORT, "False": NO_EFFORT}
# Where others say how much is thought: a field, its part that is the budget, and its switch.
_THINKING = (("reasoning", "max_tokens", "enabled"), ("thinking", "budget_tokens", "type"))
_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget")
_NAMES = {**dict.fromkeys(_BUDGETS, "thinking_budget"), "repeat_penalty": "repetition_penalty"}


def as_ours(body: Object) -> Object:
    """Returns a request's body in which what other servers call differently has our names: formats
    of answers, thinking, penalties and choices of tools. What is not rewritten is refused or
    ignored as ever."""
    ours = dict(body)
    if ours.get("response_format") is None:
        for name in (*FORMATS, "structured_outputs"):
            if ours.get(name) and (made := _made(name, ours[name])) is not None:
                ours["response_format"] = made
                del ours[name]
                break
    for name, key, switch in _THINKING:
        if isinstance(said := ours.get(name), dict) and said:
            rest = ours[name] = dict(said)
            if key in rest:
                ours.setdefault("thinking_budget", rest.pop(key))
            if (effort := _EFFORTS.get(str(rest.get(switch)))) is not None and "messages" in ours:
                ours["reasoning_effort"] = ours.get("reasoning_effort") or effort
                del rest[switch]
            if not rest:
                del ours[name]
    for name, own in _NAMES.items():
        if name in ours:
            ours.setdefault(own, ours.pop(name))
    format = ours.get("response_format")
    if isinstance(format, dict) and format.get("type") == "json_object" and "schema" in format:
        ours["response_format"] = _schema(format["schema"])
    if isinstance(choice := ours.get("tool_choice"), str):
        named = {"type": "function", "function": {"name": choice}}
        tools = ours["tools"] if isinstance(ours.get("tools"), list) else []
        known = [_name(tool) for tool in tools if isinstance(tool, dict)]
        ours["tool_choice"] = named if choice in known else {"any": "required"}.get(choice, choice)
    return ours


def _made(name: str, value: Any) -> Object | None:
    if name != "structured_outputs":
        return FORMATS[name](value)
    given = {key: each for key, each in value.items() if each} if isinstance(value, dict) else {}
    if len(given) == 1 and (key := next(iter(given))) in _STRUCTURED:
        return _STRUCTURED[key](given[key])
    return None


def _name(tool: Object) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def chosen(choice: Any, functions: list[Object]) -> tuple[Any, list[Object]]:
    """Returns a choice of tools, and the functions that may be called: one of type allowed_tools
    names them, and whether one has to be. Raises UserError for one in another form."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, functions
    said = choice.get("allowed_tools", choice)
    mode, named = (said.get("mode"), said.get("tools")) if isinstance(said, dict) else ("", None)
    if mode not in ("auto", "required") or not isinstance(named, list):
        raise UserError(
            f"got tool_choice {brief(repr(choice), 80)}, expected allowed_tools with a mode, auto "
            "or required, and tools",
            param="tool_choice",
        )
    tools = [each for each in named if isinstance(each, dict)]
    names = [_name(each) or each.get("name") for each in tools]
    return mode, [each for each in functions if _name(each) in names]
