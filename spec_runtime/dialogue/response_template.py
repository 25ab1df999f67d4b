"""Reads response templates, which say as data how a model writes its thinking and calls of tools.

The form is that of `response_template` in tokenizer_config.json: fields `content`, thinking under
one of three names, and `tool_calls`, each with the texts or expressions that open and close it.
What a template cannot say safely here is refused, see patterns.py.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from spec_runtime.dialogue.families import (
    AFTER_HEAD,
    CALLS,
    CLOSINGS,
    FAMILIES,
    KEYED,
    KNOWN_BY_MARKS,
    MISTRAL,
    OBJECT,
    PYTHON,
    QUOTE,
    THINKING,
    WITHOUT_ARGUMENTS,
    WRAPPERS,
    Field,
)
from spec_runtime.dialogue.patterns import END, Pattern
from spec_runtime.dialogue.tools import unknown_family
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

_THOUGHT = ("reasoning_content", "reasoning", "thinking")
_START = {"start_anchor", "start_anchor_pattern"}
_TOP = {"version", "defaults", "fields", *_START}
_FIELD = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
    "optional", "transform", "transform_each",
}  # fmt: skip
MARK = re.compile(r"<[^<>]+>|\[[^][]+\]|｜DSML｜")
_TAG = re.compile(r"(.*?)(\\s\*|\\n\?)?\(\?P<value>\.\*\??\)(?:\\s\*|\\n\?)?(.*)", re.DOTALL)
NEVER = Pattern(END)  # closes what nothing closes
_CONTENTS = ("json", "xml-inline", "keyed", "python")


class Tags(NamedTuple):
    """The texts between which a model thinks."""

    opening: str
    closing: str


# gpt-oss: what stands before the final message is not for the user.
HARMONY = Tags("<|channel|>", "<|channel|>final<|message|>")


class Region(NamedTuple):
    """A stretch of thinking, or of text, between two marks; `repeats` says that it may begin
    anywhere, and not only where an answer begins or after the first one of its kind."""

    kind: Literal["thinking", "text"]
    open: Pattern
    close: Pattern
    repeats: bool


class CallForm(NamedTuple):
    """Says how a call is written: what opens it, its name among that, and its arguments.

    These are a JSON object ("json"), or parameters: between tags ("tags"), Python's keyword
    arguments ("python"), or JSON with a `quote` of its own and keys without any ("quoted").
    "keyed" is an object that holds the name, too. `opening` opens a parameter, whose key it
    captures, and `closing` closes it; `trim` says what around its value is no part of it. One of
    `ends` ends the call. In a list the second call and later ones open with `next`.
    """

    open: Pattern
    content: str
    next: Pattern | None = None
    opening: Pattern | None = None
    closing: str = ""
    trim: str = ""
    ends: Pattern | None = None
    quote: str = ""


class ResponseTemplate:
    """Holds what is read of a template, and of the families whose calls are read in every answer.

    `tags` are the texts between which a grammar lets the model think, None if it does not think
    between two texts. `family` is the one in whose form a call is forced. Raises UserError for a
    template that is not valid. `bare` are forms that need no mark where an answer begins. `start`
    is what stands in a prompt before each answer, NEVER where the template does not say.
    """

    def __init__(self, spec: Any, family: str = "hermes", tags: Tags | None = None) -> None:
        if family not in FAMILIES:
            raise unknown_family(family)
        self.family = family
        fields: Mapping[str, Field] = _checked(spec)
        self.start = Pattern(_anchor(spec, "start_anchor")) if spec.keys() & _START else NEVER
        if not self.start.beginnings():
            raise _error("got a start_anchor_pattern that fits any text", "texts before an answer")
        self.regions: list[Region] = []
        self.forms: list[CallForm] = []
        closings, self.tags = [*map(_escaped, CLOSINGS)], tags
        for name, field in fields.items():
            is_open = "open" in field or "open_pattern" in field
            close = _anchor(field, "close")
            if name == "tool_calls":
                self.forms += _forms_of(field)
                closings += [close] if close else []
            elif is_open:
                kind: Any = "text" if name == "content" else "thinking"
                pattern, end = Pattern(_anchor(field, "open")), Pattern(close) if close else NEVER
                if not (pattern.beginnings() and end.beginnings()):
                    raise _error(f"got {brief(repr(field), 80)}", "texts that open and close it")
                self.regions.append(Region(kind, pattern, end, field.get("repeats") is True))
                plain = [field.get(each) for each in ("open", "close")]
                if kind == "thinking" and tags is None and all(type(each) is str for each in plain):
                    self.tags = Tags(*map(str, plain))
        if not all(form.open.beginnings() for form in self.forms):
            raise _error("got calls that may begin with any text", "a text that opens them")
        self.forms += _FORMS
        self.keyed = _KEYED
        named = {"mistral": _NAMED, "llama3": _EMPTY}.get(family)
        self.bare = [*_KEYED, *_BARE, *([named] if named else [])]
        self.wrapped = [*self.bare, _EMPTY]
        self.closing = Pattern("|".join(closings))
        firsts = [mark for form in self.forms for mark in form.open.beginnings()]
        self.call_marks = [*dict.fromkeys((*WRAPPERS, *firsts, "```"))]
        texts = [each for each in self.regions if each.kind == "text"]
        thoughts = [each for each in self.regions if each.kind == "thinking"]
        self.thinking = thoughts[0] if thoughts else None
        self.text_end = texts[0].close if texts else NEVER
        ends = [mark for each in thoughts for mark in each.close.beginnings()]
        self.thinking_ends = any_of(ends)
        opens = [*(each.open for each in self.regions), *(each.close for each in texts)]
        marks = [mark for each in opens for mark in each.beginnings()]
        run = rf"(?:(?:{_any(WRAPPERS)})\s{{0,100}}){{1,8}}"
        self.wrappers = re.compile(rf"\s{{0,100}}(?:{run})?")
        # what finds them, and the marks that may have begun: without calls, and with them
        every = [*marks, *self.call_marks]
        self.markers = (
            (any_of(marks), marks),
            (re.compile(rf"```\w{{0,30}}|{run}|{_any(every)}"), every),
        )
        # the names of control tokens by which thinking and messages are found
        sources = [each.open.source + each.close.source for each in self.regions]
        self.tokens = sorted({mark for each in sources for mark in _marks(each)})

    @property
    def marks(self) -> set[str]:
        """Returns the texts that may be control tokens, which an answer has to show."""
        patterns = [each for form in self.forms for each in (form.open, form.opening, form.ends)]
        found = {mark for each in patterns if each is not None for mark in _marks(each.source)}
        return {*found, *self.tokens, *WRAPPERS, *_marks(self.closing.source), *_OTHER_MARKS}

    def begins_in(self, text: str) -> bool:
        """Says whether an answer begins somewhere in this text of a prompt."""
        places = (each.start() for each in any_of(self.start.beginnings()).finditer(text))
        return any(self.start.match(text, at)[0] > at for at in places)


_OTHER_MARKS = ("[ARGS]", "[CALL_ID]", "<|constrain|>", "<|role_sep|>", "</arg_value>", QUOTE)


def _marks(source: str) -> list[str]:
    return MARK.findall(source.replace("\\", ""))


def any_of(texts: Any) -> re.Pattern[str]:
    """Returns an expression that fits each of these texts, the first that does."""
    return re.compile(_any(texts) or r"(?!)")


def _any(texts: Any) -> str:
    return "|".join(map(re.escape, texts))


def _escaped(text: str) -> str:
    return re.sub(r"[\\()|*+?{}\[\]^$.]", r"\\\g<0>", text)


def family_of(chat_template: str | None) -> str:
    """Returns the family whose calls a model of this chat template writes.

    A template without tools is smollm's: its prompts are written by tool_prompts.py.
    """
    source = chat_template or ""
    if re.search(r"\btools\b", source) is None:
        return "smollm"
    marked = (
        name for name in KNOWN_BY_MARKS if any(map(source.__contains__, FAMILIES[name].marks))
    )
    return next(marked, "hermes")


def tags_of(chat_template: str) -> Tags | None:
    """Returns the tags of the models of a chat template, which reads them in earlier answers or
    writes them before a new one; None for models that do not think."""
    closing = next((each for each in THINKING if each in chat_template), None)
    if closing is None:
        return None
    if closing == HARMONY.closing:
        return HARMONY
    return Tags(THINKING[closing]["reasoning_content"]["open"], closing)


@functools.lru_cache(64)
def template_of(tags: Tags | None, family: str) -> ResponseTemplate:
    """Returns the template of models that ship none, by what their chat template writes."""
    own = {"reasoning_content": {"open": tags.opening, "close": tags.closing}} if tags else {}
    fields: dict[str, Field] = own if tags is None else THINKING.get(tags.closing, own)
    return ResponseTemplate({"fields": {"content": {}, **fields}}, family or "hermes", tags)


# ---- reading ----


def _checked(spec: Any) -> Mapping[str, Field]:
    """Returns the fields of a template; raises UserError if it says what is not read."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("fields"), Mapping):
        raise _error(f"got {brief(repr(spec), 80)}", "an object with `fields`")
    if unknown := [*map(str, spec.keys() - _TOP)]:
        raise _error(f"got {brief(', '.join(unknown), 80)}", ", ".join(sorted(_TOP)))
    if spec.get("version", 1) != 1:
        raise _error(f"got version {brief(repr(spec['version']), 40)}", "1")
    fields = spec["fields"]
    for name, field in fields.items():
        if name not in ("content", "tool_calls", *_THOUGHT):
            expected = ", ".join(("content", "tool_calls", *_THOUGHT))
            raise _error(f"got the field {brief(repr(name), 80)}", expected)
        if not isinstance(field, Mapping) or field.keys() - _FIELD - {"next_pattern"}:
            raise _error(f"got {brief(repr(field), 80)} as {name}", ", ".join(sorted(_FIELD)))
        if name != "tool_calls" and field.get("content", "text") != "text":
            raise _error(f"got content {brief(repr(field['content']), 40)} of {name}", "text")
        if name in _THOUGHT and not (field.keys() & {"open", "open_pattern"}):
            raise _error(f"got {name} without open", "the text before the thinking")
    if sum(name in fields for name in _THOUGHT) > 1:
        raise _error(f"got {', '.join(fields)}", "one field of thinking")
    return fields


def _error(got: str, expected: str) -> UserError:
    return UserError(f"{got} in the response template, expected {expected}")


def _anchor(field: Field, key: str) -> str:
    """Returns the expression of what opens or closes a field, an empty one if there is none."""
    texts, pattern = field.get(key), field.get(f"{key}_pattern", "")
    texts = [texts] if isinstance(texts, str) else texts or []
    is_list = isinstance(texts, list) and all(isinstance(each, str) and each for each in texts)
    if not is_list or not isinstance(pattern, str) or (texts and pattern):
        raise _error(f"got {key} {brief(repr(field), 80)}", "one text, a list, or an expression")
    return pattern or "|".join(map(_escaped, sorted(texts, key=len, reverse=True)))


def _forms_of(field: Field) -> list[CallForm]:
    """Returns the forms of the calls of a field, and of the objects that it may hold."""
    source, content = f"(?:{_anchor(field, 'open')})", field.get("content", "text")
    args, after = field.get("content_args", {}), str(field.get("next_pattern", ""))
    if content not in _CONTENTS or not isinstance(args, Mapping):
        raise _error(f"got content {brief(repr(content), 40)} of tool_calls", ", ".join(_CONTENTS))
    if "name" not in Pattern(source).names:
        if content != "json" or not _names_are_inside(field.get("transform")):
            raise _error(f"got {brief(repr(field), 80)}", "a capture `name` before the arguments")
        keyed = (*_KEYED, _EMPTY)
        return [each._replace(open=Pattern(rf"{source}\s*{each.open.source}")) for each in keyed]
    if content == "python":
        opening, ends = Pattern(r"(?P<key>[\w.-]+)="), Pattern(r"\)")
        following = Pattern(after) if after else None
        return [CallForm(Pattern(source), content, following, opening, ends=ends)]
    if content == "xml-inline":
        return [
            _between_tags(Pattern(source), str(args.get("tag_pattern")), _anchor(field, "close"))
        ]
    if not args.get("string_delims") and not args.get("unquoted_keys"):
        following = Pattern(after + OBJECT) if after else None
        return [CallForm(Pattern(source + OBJECT), content, following), *_without(field, source)]
    match args.get("string_delims"):
        case [[str(quote), str(other)]] if quote and quote == other:
            opening, ends = Pattern(r"(?P<key>[\w.$-]+):"), Pattern(r"\}")
            quoted = Pattern(source + r"\{")
            form = CallForm(quoted, "quoted", None, opening, ends=ends, quote=quote)
            return [form, *_without(field, source)]
    raise _error(f"got content_args {brief(repr(args), 80)}", "string_delims of two equal marks")


def _without(field: Field, source: str) -> list[CallForm]:
    """Returns the form of a call that ends where its arguments would begin."""
    ends = "|".join((*filter(None, [_anchor(field, "close")]), *map(_escaped, AFTER_HEAD)))
    space = "" if source.endswith(r"\s*)") else r"\s*"
    form = Pattern(f"{source}{space}(?={ends})")
    return [CallForm(form, "tags", None, NEVER, ends=Pattern(""))]


def _between_tags(opening: Pattern, tag: str, ends: str) -> CallForm:
    """Returns the form of parameters each of which such a tag_pattern matches."""
    found = _TAG.fullmatch(tag)
    closing = Pattern(found[3]).beginnings() if found is not None else []
    is_fixed = found is not None and [*map(_escaped, closing)] == [_escaped(_unescaped(found[3]))]
    if found is None or "(?P<key>" not in found[1] or not is_fixed or not ends:
        expected = "a key, a value and a fixed text after it, and a close"
        raise _error(f"got tag_pattern {brief(repr(tag), 80)}", expected)
    trim = {r"\s*": "space", r"\n?": "line"}.get(found[2] or "", "")
    return CallForm(opening, "tags", None, Pattern(found[1]), closing[0], trim, Pattern(ends))


def _unescaped(source: str) -> str:
    return re.sub(r"\\(?=\W)", "", source)


def _names_are_inside(transform: Any) -> bool:
    """Says whether a transform takes name and arguments from a JSON object's usual keys."""
    match transform:
        case None | "{content}" | {"function": "{content}"}:
            return True
        case {"function": {"name": str(name), "arguments": str(arguments)}}:
            keys = [each.replace("{content.", "{") for each in (name, arguments)]
            usual = (("{name}", "{tool_name}"), ("{arguments}", "{parameters}"))
            return all(key in known for key, known in zip(keys, usual, strict=True))
    return False


_KEYED = [CallForm(Pattern(str(each["open_pattern"])), str(each["content"])) for each in KEYED]
_EMPTY = CallForm(Pattern(str(WITHOUT_ARGUMENTS["open_pattern"])), "keyed")
_FORMS = [form for field in CALLS for form in _forms_of(field)]
_BARE, (_NAMED, _) = _forms_of(PYTHON), _forms_of(MISTRAL)
