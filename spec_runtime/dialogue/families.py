"""Holds, as data, how families of models write thinking and calls of tools.

The tables are in the form of the response templates that models ship in tokenizer_config.json, with
two contents more: "python", keyword arguments, and "keyed", a JSON object that names the function.
A family is added by a row. `CALLS` are read whatever the family: a free answer keeps to no form.
"""

from typing import Any, NamedTuple

from spec_runtime.dialogue.patterns import END

_NAME = r"(?P<name>[\w-][\w.-]{0,127})"
_KEY = r'(?P<key>[^<>"\n]{1,128})'
_STRING = r'"(?:[^"\\]+|\\.)*"'
OBJECT = r'(?=\{\s*["}])'  # looked at, not taken
_OTHER = rf'"(?:type|id|tool_call_id)"\s*:\s*(?:{_STRING}|[\w.+-]+)\s*'
_MEMBERS = rf"(?:{_OTHER},\s*)*"
_FUNCTION = rf'\[?\s*\{{\s*{_MEMBERS}(?:"function"\s*:\s*\{{\s*{_MEMBERS})?'
_NAMED = rf'{_FUNCTION}"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*{_MEMBERS}'
_ARGUMENTS = r'"(?:arguments|parameters)"\s*:\s*'
_DSML = "｜DSML｜"
_DEEPSEEK = "<｜tool▁call▁begin｜>"
QUOTE = '<|"|>'  # Gemma 4's, around strings
_QUOTED = {"unquoted_keys": True, "string_delims": [[QUOTE, QUOTE]]}

Field = dict[str, Any]

# gpt-oss writes several messages, each with a head; what is for nobody else is thinking.
_ENDS = r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)"
_START = r"(?:<\|start\|>\w*)?\s*"
_HARMONY: Field = {
    "content": {
        "open_pattern": rf"{_START}<\|channel\|>\s*(?:final|commentary)[^<]*"
        r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
        "close_pattern": _ENDS,
    },
    "reasoning_content": {
        "open_pattern": r"(?:<\|start\|>[^<]*(?:<\|channel\|>[^<]*)?|<\|channel\|>[^<]*)"
        r"(?:<\|constrain\|>[^<]*)?<\|message\|>",
        "close_pattern": _ENDS,
        "repeats": True,
        "join": "\n",
    },
    "tool_calls": {
        "open_pattern": rf"{_START}(?:<\|channel\|>\s*commentary\s*)?to=functions\.{_NAME}"
        r"[^<{]*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>",
        "close": END,
        "content": "json",
    },
}


def _between(opening: str, closing: str, **more: Any) -> Field:
    return {"reasoning_content": {"open": opening, "close": closing, **more}}


# What a chat template writes after thinking, and the fields of the models that it is for.
THINKING: dict[str, Field] = {
    "</think>": _between("<think>", "</think>"),
    "</seed:think>": _between("<seed:think>", "</seed:think>"),
    "[/THINK]": _between("[THINK]", "[/THINK]"),  # Magistral
    "<|END_THINKING|>": _between("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B
    "<|end_of_thought|>": _between("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker
    "<channel|>": _between("<|channel>thought\n", "<channel|>"),  # Gemma 4
    "<|channel|>final<|message|>": _HARMONY,
}


class Family(NamedTuple):
    """Says which marks of a chat template show a family, and how a call of it is forced: an object
    with its arguments at `key`, or the list of one, between two texts."""

    marks: tuple[str, ...]
    key: str = "arguments"
    is_list: bool = False
    begin: str = ""
    end: str = ""


FAMILIES = {
    "llama3": Family(
        ("<|python_tag|>", '"parameters": dictionary of argument name'), key="parameters"
    ),
    "mistral": Family(("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), is_list=True),
    "hermes": Family((), begin="<tool_call>\n", end="\n</tool_call>"),  # any other with tools
    "harmony": Family(("<|channel|>commentary",)),
    "phi": Family(("<|tool_call|>", "<|tool|>", "functools"), is_list=True),
    "smollm": Family((), is_list=True, begin="<tool_call>", end="</tool_call>"),  # without tools
}
KNOWN_BY_MARKS = ("mistral", "harmony", "phi", "llama3")  # the first one that fits

# A call after marks, in a fenced block, or bare; the second is read once its object is whole.
KEYED: tuple[Field, ...] = (
    {"open_pattern": _NAMED + _ARGUMENTS + OBJECT, "content": "json"},
    {"open_pattern": f"(?=(?:{_NAMED}|{_FUNCTION}){_ARGUMENTS}[^\\s])", "content": "keyed"},
)
# A call that leaves its arguments out: a JSON answer may look like one that has no mark.
WITHOUT_ARGUMENTS: Field = {
    "open_pattern": rf'(?={_FUNCTION}"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\]+)"\s*'
    rf"(?:,\s*{_OTHER})*\}})",
    "content": "keyed",
}
PYTHON: Field = {  # LFM2; without the mark Llama 3.2 and 4
    "open_pattern": rf"(?:<\|tool_call_start\|>\s*)?\[{_NAME}\(",
    "next_pattern": rf"{_NAME}\(",
    "content": "python",
}
MISTRAL: Field = {
    "close": END,
    "open_pattern": rf"(?:\[TOOL_CALLS\]\s*)?{_NAME}(?:(?:\[CALL_ID\]\w*)?\[ARGS\])?\s*",
    "content": "json",
}
CALLS: tuple[Field, ...] = (
    {**PYTHON, "open_pattern": rf"<\|tool_call_start\|>\s*\[{_NAME}\("},
    {**MISTRAL, "open_pattern": rf"\[TOOL_CALLS\]\s*{_NAME}(?:(?:\[CALL_ID\]\w*)?\[ARGS\])?\s*"},
    {  # gpt-oss
        "open_pattern": rf"<\|channel\|>commentary to=functions\.{_NAME}"
        r"(?: <\|constrain\|>json)?<\|message\|>",
        "close": END,
        "content": "json",
    },
    {"open_pattern": rf"<function={_NAME}>\s*", "content": "json"},  # Functionary, Llama 3.1
    {  # Apertus
        "open_pattern": rf'<\|tools_prefix\|>\s*\[\s*\{{"{_NAME}":\s*',
        "next_pattern": rf'\{{"{_NAME}":\s*',
        "content": "json",
    },
    {  # Solar Open
        "open_pattern": rf"<\|tool_call:begin\|>\w*<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>",
        "content": "json",
    },
    {  # Gemma 4
        "open_pattern": rf"<\|tool_call>call:{_NAME}",
        "content": "json",
        "content_args": _QUOTED,
    },
    {  # DeepSeek-V3 and R1
        "open_pattern": rf"{_DEEPSEEK}function<｜tool▁sep｜>{_NAME}\s*```json\s*",
        "content": "json",
    },
    {"open_pattern": rf"{_DEEPSEEK}{_NAME}<｜tool▁sep｜>\s*", "content": "json"},  # DeepSeek-V3.1
    {  # Kimi-K2
        "open_pattern": rf"<\|tool_call_begin\|>functions\.{_NAME}:\d*\s*"
        r"<\|tool_call_argument_begin\|>\s*",
        "content": "json",
    },
    {  # Qwen3-Coder, Seed-OSS
        "open_pattern": rf"<function={_NAME}>\s*(?=<)",
        "close_pattern": r"</function>|</tool_call>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": rf"<parameter={_KEY}>\n?(?P<value>.*?)\n?</parameter>"},
    },
    {  # GLM-4.5 to 4.7
        "open_pattern": rf"<tool_call>\s*{_NAME}\s*(?=<)",
        "close": "</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": rf"<arg_key>{_KEY}</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        },
    },
    {  # MiniMax-M2
        "open_pattern": rf'<invoke name="{_NAME}">',
        "close": "</invoke>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": rf'<parameter name="{_KEY}">(?P<value>.*?)</parameter>'},
    },
    {  # DeepSeek-V3.2
        "open_pattern": rf'<{_DSML}invoke name="{_NAME}">',
        "close": f"</{_DSML}invoke>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": rf'<{_DSML}parameter name="{_KEY}" string="\w*">(?P<value>.*?)'
            rf"</{_DSML}parameter>"
        },
    },
)
# Marks that may stand before a call, several in a row, and marks after it.
WRAPPERS = (
    "<tool_call>", "<tool_calls>", "<seed:tool_call>", "<minimax:tool_call>", "<|tool_call|>",
    "[TOOL_CALLS]", "<|python_tag|>", "functools", "<|START_ACTION|>", "<｜tool▁calls▁begin｜>",
    "<|tool_calls_section_begin|>", f"<{_DSML}function_calls>", "<TOOLCALL>", "<|tool_call_start|>",
    "<|function_call|>", "<|tool_calls|>", "<|message_sep|>", "function call<|role_sep|>",
)  # fmt: skip
CLOSINGS = (
    "</tool_call>", "</tool_calls>", "</seed:tool_call>", "</minimax:tool_call>", "<|/tool_call|>",
    "[/TOOL_CALLS]", "<|END_ACTION|>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", f"</{_DSML}function_calls>", "</TOOLCALL>",
    "<|call|>", "<tool_call|>", "<|tools_suffix|>", "<|tool_call:end|>", "<|calls|>",
    "<|message_sep|>", "</function>",
)  # fmt: skip
# What stands after a head without arguments, besides what closes its form.
AFTER_HEAD = (*CLOSINGS, "[TOOL_CALLS]", "<|start|>", "<|channel|>", "```")
# What stands between two calls: the rest of the first one's object, and separators.
MEMBER = rf',\s*"\w+"\s*:\s*(?:{_STRING}|[\w.+-]+)(?=\s*[,}}])'
SEPARATORS = r"[\s,;}\]]{1,1000}"
