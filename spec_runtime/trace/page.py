"""Writes a trace as one HTML page: every step's tree, the accepted path, and where the time went.

The page needs nothing outside of itself. Texts come from a user and a model: all of them are
escaped, and the page's policy lets no script run but its own, which it knows by a hash.
"""

import base64
import hashlib
import html
from collections.abc import Mapping

from spec_runtime.loop.stats import PHASES
from spec_runtime.trace.assets import SCRIPT, STYLE
from spec_runtime.trace.record import Trace, TracedStep
from spec_runtime.trees.drawing import accepted_nodes

SHOWN = {"prefill": "prompt", "draft": "draft", "verify": "verify", "accept": "accept"}
REST = "rest"  # commit and other


def page(trace: Trace) -> str:
    """Returns the page as HTML."""
    stats, result = trace.result.stats, trace.result
    steps = trace.steps
    total = _bar(_phases(stats.timings), "of the whole generation")
    figures = (
        f"{len(result.token_ids)} tokens in {stats.steps} steps, accepted length "
        f"{stats.accepted_length:.2f}, {stats.tokens_per_second:.1f} tokens/s, finished by "
        f"{result.finish_reason}"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src '{_digest(STYLE)}'; script-src '{_digest(SCRIPT)}'">
<title>Trace: {len(result.token_ids)} tokens by {_escaped(trace.drafter)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Trace of one generation</h1>
<p>Drafter {_escaped(trace.drafter)}: {_escaped(figures)}.</p>
<details><summary>Prompt, {stats.prompt_tokens} tokens</summary>
<div class="text" dir="auto" tabindex="0" role="region" aria-label="Prompt">\
{_escaped(trace.prompt)}</div></details>
<div class="text answer" dir="auto" tabindex="0" role="region" aria-label="Answer">\
{_answer(steps)}</div>
<p class="quiet"><span class="drafted">Tinted</span> tokens were drafted and accepted; the others
are the target's own. Tap a token to see its step; the arrow keys, Home and End walk through
them.</p>
{total}
<div class="controls" hidden>
<button class="ends" data-move="first" aria-label="First step">&laquo;</button>
<button data-move="back" aria-label="Previous step">&lsaquo;</button>
<input type="range" min="0" max="{max(0, len(steps) - 1)}" value="0" aria-label="Step">
<button data-move="on" aria-label="Next step">&rsaquo;</button>
<button class="ends" data-move="last" aria-label="Last step">&raquo;</button>
<output aria-live="polite"></output>
</div>
<main>
{"".join(_section(number, step) for number, step in enumerate(steps))}</main>
<ul class="keys quiet">
<li><i class="k-root"></i>last committed token</li>
<li><i class="k-accepted"></i>drafted and accepted</li>
<li><i class="k-refused"></i>drafted and refused</li>
<li><i class="k-bonus"></i>bonus: the target's own token</li>
</ul>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _digest(text: str) -> str:
    """Returns what a page's policy calls this style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    """Returns text for HTML, between tags or quotes; what cannot be printed becomes U+FFFD."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return html.escape(plain, quote=True)


def _answer(steps: tuple[TracedStep, ...]) -> str:
    """Returns the answer, each piece of it with the number of its step."""
    return "".join(
        f'<span class="piece{" drafted" if depth else ""}" data-step="{number}">'
        f"{_escaped(text)}</span>"
        for number, step in enumerate(steps)
        for text, depth in step.pieces
    )


def _section(number: int, step: TracedStep) -> str:
    """Returns what the page shows of one step."""
    text = _escaped("".join(piece for piece, _ in step.pieces))
    if step.tree is None:
        what = "The prompt was read, and the first token drawn."
        picture = ""
    else:
        num_drafted = step.tree.num_nodes - 1
        what = f"{num_drafted} nodes drafted, {step.num_accepted} accepted, "
        what += f"{len(step.tokens)} token{'s' if len(step.tokens) > 1 else ''} committed."
        picture = _tree(step)
    return f"""<section class="step">
<h2>Step {number}</h2>
<p>{what}</p>
<div class="text" dir="auto">{text or "&nbsp;"}</div>
{_bar(_phases(step.seconds), f"of step {number}")}{picture}</section>
"""


def _tree(step: TracedStep) -> str:
    """Returns a step's tree as lists in each other. What was accepted, or the bonus, comes first
    among the children of a node."""
    assert step.tree is not None, step
    nodes = accepted_nodes(step.tree, step.path, step.node_texts, step.bonus_text)
    kept, refused = [""] * len(nodes), [""] * len(nodes)  # of each node's children
    item = ""
    for node, (parent, kind, text) in reversed([*enumerate(nodes)]):  # children before parents
        children = kept[node] + refused[node]
        below = f"<ul>{children}</ul>" if children else ""
        item = f'<li class="node {kind}"><span>{_escaped(text)}</span>{below}</li>'
        beside = refused if kind == "refused" else kept
        beside[parent] = item + beside[parent]
    return f'<div class="tree" tabindex="0" role="region" aria-label="Tree"><ul>{item}</ul></div>\n'


def _phases(timings: Mapping[str, float]) -> dict[str, float]:
    """Returns milliseconds by what the page shows, without those that took none."""
    found = {name: 1000 * timings[phase] for phase, name in SHOWN.items()}
    found[REST] = 1000 * sum(timings[phase] for phase in PHASES if phase not in SHOWN)
    return {name: ms for name, ms in found.items() if ms > 0}


def _bar(ms: dict[str, float], of: str) -> str:
    """Returns a bar whose parts are as wide as their share of the time, and what they stand for."""
    css = {name: phase for phase, name in SHOWN.items()} | {REST: REST}
    total = sum(ms.values()) or 1.0
    parts, at = [], 0.0
    for name, value in ms.items():
        width = 100 * value / total
        parts.append(f'<rect class="{css[name]}" x="{at:.2f}" width="{width:.2f}" height="1"/>')
        at += width
    keys = "".join(
        f'<li><i class="{css[name]}"></i>{name} {value:.2f} ms</li>' for name, value in ms.items()
    )
    return (
        f'<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Time {of}">{"".join(parts)}</svg><ul class="keys">{keys}</ul>\n'
    )
