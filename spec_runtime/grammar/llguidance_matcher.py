"""Follows grammars with llguidance.

Its masks choose the tokenizer's own way to write what the grammar determines: where `{"name": "`
has to follow, only the first token of its usual tokenisation is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.files.installed import install
from spec_runtime.files.mapping import brief
from spec_runtime.grammar import json_schema, trial_process
from spec_runtime.grammar.base import read
from spec_runtime.grammar.formats import Grammar, format_error
from spec_runtime.grammar.model_tokens import ModelTokens
from spec_runtime.grammar.trials import GrammarTrials, TrialLimits
from spec_runtime.interruption import Interrupted, Interruption

# JSON is written as Python's json.dumps writes it. Free whitespace would leave little determined,
# and small models fall into endless runs of it. A schema's own "x-guidance" goes before these.
_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_WORD_BITS = 32
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # one that Lark's notation would take for the end


class GrammarCompiler:
    """Compiles grammars over the tokens of one tokenizer.

    `definition` is its tokenizer.json as text, `eos` the tokens that end an answer, and
    `vocab_size` the number of logits, which may be more than there are tokens. Each grammar is
    tried in another process first, within `limits`. Threads may share a compiler. Raises UserError
    if the library is missing or cannot read the tokenizer, and for a tokenizer without EOS.
    """

    def __init__(
        self,
        definition: str,
        eos: Sequence[int],
        vocab_size: int,
        limits: TrialLimits | None = None,
    ) -> None:
        try:
            import llguidance
        except ImportError:
            missing = format_error("llguidance is not installed, which response_format needs")
            missing.hint = f"run {install('grammar')}"
            raise missing from None
        if not eos:
            raise format_error(
                "got response_format for a tokenizer without EOS, expected one with EOS, which "
                "ends what a grammar allows; build the bundle again"
            )
        self._library: Any = llguidance
        self._eos, self._vocab_size = tuple(eos), vocab_size
        self._trials = GrammarTrials(definition, eos, vocab_size, limits or TrialLimits())
        self._trials.start()  # it opens the tokenizer while this process does
        try:
            self._tokens = ModelTokens(llguidance, definition, eos, vocab_size)
            self._tokenizer = self._library.LLTokenizer(self._tokens, eos_token=list(eos))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of its Rust code is no Exception
            raise format_error(
                f"llguidance cannot read this bundle's tokenizer ({brief(error)}); generate "
                "without response_format"
            ) from None

    def close(self) -> None:
        """Ends the other process; the next grammar starts another one."""
        self._trials.close()

    def matcher(
        self, grammar: Grammar, interruption: Interruption | None = None
    ) -> LlguidanceMatcher:
        """Returns a matcher of this grammar; raises UserError if that is not valid, allows nothing
        or takes too much to compile.

        The interruption is that of the matcher's call. Once it has a reason, this method and those
        of the matcher raise Interrupted.
        """
        interruption = Interruption() if interruption is None else interruption
        try:
            compiled, schemas = self._compiled(grammar)
        except ValueError as error:
            raise _invalid(grammar, error) from None
        probes = [each for schema in schemas for each in json_schema.probes_of_names(schema)]
        fault = self._trials.fault(compiled, interruption, probes)
        if not self._trials.are_possible:
            fault = trial_process.fault(self._library, self._tokenizer, compiled, probes)
        if fault is not None:
            raise _invalid(grammar, fault, "simpler")
        with self._trials.place(interruption):
            matcher = self._library.LLMatcher(self._tokenizer, compiled, log_level=0)
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        result = LlguidanceMatcher(
            matcher, self._tokenizer, self._eos, self._vocab_size, interruption
        )
        try:
            result.allowed()
        except ValueError:
            raise _invalid(grammar, "no text fits it, or it is too complex") from None
        return result

    def _compiled(self, grammar: Grammar) -> tuple[str, list[Any]]:
        """Returns the grammar as the library takes it, and the JSON schemas in it; raises
        ValueError for some bad ones."""
        library = self._library.LLMatcher
        if grammar.kind == "regex":
            return str(library.grammar_from_regex(grammar.text)), []
        if grammar.kind == "ebnf":
            lark, schemas = _with_prepared_schemas(self._tokens.numbered(grammar.text))
            return str(self._library.grammar_from("ebnf", lark)), schemas
        if grammar.kind == "json_schema" and not grammar.begin and not grammar.end:
            schema = json_schema.prepared(json.loads(grammar.text))
            compiled = library.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_STYLE)
            return str(compiled), [schema]
        is_triggered = grammar.kind == "triggered_json"
        choices, schemas = grammar.choices or (grammar,), list[Any]()
        start = " | ".join(f"form{number}" for number in range(len(choices)))
        begins = [each.begin for each in choices if each.choices]
        lines = self._free_text(start, begins) if is_triggered else [f"start: {start}"]

        def json_rule(schema: str) -> str:
            """Adds the rule of JSON of this schema, and returns its name."""
            schemas.append(json_schema.prepared(json.loads(schema)))
            styled = json.dumps({"x-guidance": _JSON_STYLE, **schemas[-1]})
            lines.append(f"json{len(schemas)}: %json {styled}")
            return f"json{len(schemas)}"

        def tagged(form: Grammar) -> str:
            begin, end = map(self._tokens.quoted, (form.begin, form.end))
            return f"{begin} {json_rule(form.text)} {end}"

        for number, each in enumerate(choices):
            if each.kind == "regex":
                lines.append(f"form{number}: {_in_lark(each.text)}")
            elif not is_triggered:
                lines.append(f"form{number}: {tagged(each)}")
            elif not each.choices:
                lines.append(f"trigger{number}[lazy]: TEXT {_in_lark(each.begin)}")
                lines.append(f"form{number}: trigger{number} BLANK {json_rule(each.text)}")
            else:
                quoted = self._tokens.quoted(each.begin)
                is_text = json.dumps(each.begin) == quoted  # a special token ends the text itself
                if not is_text and not quoted.startswith('"" '):
                    raise ValueError(f"a special token is not at the start of {each.begin!r}")
                lines += [f"trigger{number}[lazy]: TEXT {quoted}"] * is_text
                trigger = f"trigger{number}" if is_text else f"TEXT {quoted}"
                lines.append(f"form{number}: {trigger} ({' | '.join(map(tagged, each.choices))})")
        return str(library.grammar_from_lark("\n".join(lines))), schemas

    def _free_text(self, forms: str, begins: Sequence[str]) -> list[str]:
        """Returns the rules of a text in which anything may stand before and after these forms,
        special tokens too, but for those in `begins`, the texts with which forms begin."""
        lines = [r"TEXT: /(.|\n)*/", r"BLANK: /[ \n]?/"]
        special, taken = self._tokens.special.items(), "\0".join(begins)
        ids = [str(token) for name, token in special if name not in taken]
        if ids:
            forms += " | special"
            lines.append(f"special: TEXT <[{','.join(ids)}]>")
        return [f"start: ({forms})* TEXT", *lines]


def _in_lark(regex: str) -> str:
    """Returns a regular expression as Lark's notation has it, which ends one at a bare slash."""
    escaped = _SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], regex)
    return f"/(?:{escaped})/"


def _with_prepared_schemas(lark: str) -> tuple[str, list[Any]]:
    """Returns a grammar in Lark's notation with its JSON schemas prepared, and these; what is no
    JSON stays, for the library to refuse."""
    parts, schemas, at = list[str](), list[Any](), 0
    for found in re.finditer(r"%json\s*(?={)", lark):
        if found.start() < at:  # in a text of the schema before
            continue
        with suppress(json.JSONDecodeError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
            schemas.append(json_schema.prepared(schema))
            parts += [lark[at : found.end()], json.dumps(schemas[-1])]
            at = end
    return "".join([*parts, lark[at:]]), schemas


def _invalid(grammar: Grammar, why: object, expected: str = "valid") -> UserError:
    names = {"json_schema": "JSON schema", "ebnf": "grammar", "any_of": "formats"}
    what = names.get(grammar.kind, grammar.kind)
    reason = brief(why, 200)
    return format_error(
        f"got {what} {brief(grammar.text, 60)}: {reason}; expected a {expected} one"
    )


class LlguidanceMatcher:
    """Implements grammar.base.Matcher."""

    def __init__(
        self,
        matcher: Any,
        tokenizer: Any,
        eos: Sequence[int],
        vocab_size: int,
        interruption: Interruption,
    ) -> None:
        self._interruption = interruption
        self._matcher, self._tokenizer = matcher, tokenizer
        self._eos, self._vocab_size = eos, vocab_size
        self._word_W = np.zeros(-(-vocab_size // _WORD_BITS), np.uint32)
        self._is_ended = False  # EOS was read; the library itself is not told of it

    def advance(self, token: int) -> bool:
        self._require_time()
        if self._is_ended:
            return False
        if token in self._eos:
            self._is_ended = self._matcher.is_accepting()
            return self._is_ended
        # The library reads other tokens of determined characters too, but its masks exclude them.
        forced = self._matcher.compute_ff_tokens()
        if forced and token != forced[0]:
            return False
        is_read = self._matcher.try_consume_tokens([token]) == 1
        self._require_health()
        return is_read

    def retreat(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._require_health()

    def allowed(self) -> np.ndarray:
        self._require_time()
        word_W = self._word_W
        self._matcher.unsafe_compute_mask_ptr(word_W.ctypes.data, word_W.nbytes)
        self._require_health()
        is_bit_V = np.unpackbits(word_W.view(np.uint8), count=self._vocab_size, bitorder="little")
        if not self._matcher.is_accepting():  # a grammar may name EOS as a token, <[*]> does
            is_bit_V[list(self._eos)] = 0
            if not is_bit_V.any():
                raise format_error("the grammar asks for EOS in the middle, expected none there")
        return is_bit_V.view(np.bool_)

    def forced(self, most: int) -> list[int]:
        """See Matcher.forced.

        The library itself says which tokens have to follow; the last characters before something
        free may belong to a longer token, so that they are guessed by tokenizing them by
        themselves.
        """
        if self._is_ended:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:most]
        tokens = tokens[: read(self, tokens)]
        if rest := self._matcher.compute_ff_bytes():
            guesses = self._tokenizer.tokenize_bytes(rest)[: most - len(tokens)]
            num_guessed = read(self, guesses)
            tokens = tokens + guesses[:num_guessed]
        is_complete = self._matcher.is_stopped()
        self.retreat(len(tokens))
        return [*tokens, self._eos[0]] if is_complete and len(tokens) < most else tokens

    def _require_time(self) -> None:
        """Raises Interrupted if the call has to end: a step may ask for hundreds of masks, and the
        library's own limits let one take up to a second."""
        if self._interruption.reason is not None:
            raise Interrupted

    def _require_health(self) -> None:
        """Raises UserError if the library has given up."""
        if self._matcher.is_error():
            raise format_error(
                f"the grammar cannot be followed here ({brief(self._matcher.stop_reason())}), "
                "expected one of less complexity; simplify it"
            )
