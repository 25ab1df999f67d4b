"""One call on its way: what it asks for, the text it has so far, and whether it has to end."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.stream import TextStream
from spec_runtime.dialogue.thinking_matcher import AnyText
from spec_runtime.grammar.base import Matcher
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import Interrupted, Interruption
from spec_runtime.loop.answer import AnswerForm, form_of
from spec_runtime.loop.fair_lock import Holder
from spec_runtime.loop.generate import PromptScores
from spec_runtime.loop.options import Request
from spec_runtime.sampling import SamplingParams
from spec_runtime.text.tokenizer import Codec


class Call:
    """A checked prompt with its options, for one generation, see Engine.prepare.

    Its time runs from its making on. `stop_ids` are the tokens that end the answer, and `form` says
    how it is read. `compile_grammar` makes the masks of the grammar that it has to keep to; None is
    free text. `scores` takes the log-probabilities of the prompt, of which then no rows may be
    reused, and with `only_reads` nothing is answered.
    """

    def __init__(
        self,
        prompt: list[int],
        request: Request,
        text: TextStream,
        form: AnswerForm,
        stop_ids: frozenset[int],
        compile_grammar: Callable[[Interruption], PathMasks] | None = None,
    ) -> None:
        self.prompt = prompt
        self.params: SamplingParams = request.sampling
        self.reuse = request.reuse
        self.text = text
        self.form = form
        self.stop_ids = stop_ids
        self.scores: PromptScores | None = None
        self.only_reads = False
        self.masks: PathMasks | None = None
        self._compile_grammar = compile_grammar
        self.interruption: Interruption = request.interruption()
        self.holder = Holder()
        self._is_left = threading.Event()  # set while no thread is inside
        self._is_left.set()

    @property
    def is_compiled(self) -> bool:
        """Says whether `compile` has nothing left to do."""
        return self._compile_grammar is None

    def compile(self) -> None:
        """Compiles the grammar, if there is one, or leaves that if the call has to end before. Has
        to come before the call is answered. Raises UserError for a bad grammar."""
        if self._compile_grammar is not None:
            with suppress(Interrupted):
                self.masks = self._compile_grammar(self.interruption)
            self._compile_grammar = None

    def enter(self) -> None:
        """Notes that this thread begins or goes on with the call."""
        self._is_left.clear()
        self.holder.resume()

    def leave(self) -> None:
        """Notes that no thread is inside the call."""
        self._is_left.set()

    def end(self) -> None:
        """Ends the call from any thread: at its next step, or at once if it waits for its turn."""
        self.interruption.end()
        self.holder.wake()

    def wait_until_left(self) -> None:
        """Waits until no other thread is inside the call."""
        if self.holder.thread is not threading.current_thread():
            self._is_left.wait()


def make_call(
    codec: Codec, prompt: list[int], request: Request, tools: Tools | None, num_logits: int
) -> Call:
    """Returns the call of an encoded prompt, whose grammar is left to `Call.compile`."""
    params = request.sampling
    form = form_of(codec, prompt, tools)
    thinking = form.reader(has_calls=False) if params.stop and form.tags else None
    text = TextStream(codec.decode, params.stop, prompt, thinking)
    eos = () if params.ignore_eos else codec.eos
    stop_ids = frozenset([*params.stop_token_ids, *eos])
    grammar, budget = params.grammar, params.thinking_budget
    if budget is not None and form.tokens is None:
        request = replace(request, params=replace(params, thinking_budget=None))
        budget = None
    if grammar is None and budget is None:
        return Call(prompt, request, text, form, stop_ids)

    def compile_grammar(interruption: Interruption) -> PathMasks:
        matcher: Matcher = AnyText(num_logits)
        if grammar is not None:
            matcher = codec.matcher(grammar, num_logits, interruption)
        # EOS ends no thinking that a grammar's text has to follow
        eos = () if grammar is None else codec.eos
        return PathMasks(form.after_thinking(matcher, eos, num_logits, budget), codec.eos)

    return Call(prompt, request, text, form, stop_ids, compile_grammar)
