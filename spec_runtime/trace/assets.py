"""Holds the style and the script of the trace page, which names no file outside of itself."""

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1a202c; --quiet: #4a5568; --line: #cbd5e0; --box: #f7fafc;
  --accepted: #2b6cb0; --on-accepted: #ffffff; --root: #2d3748; --on-root: #ffffff;
  --bonus: #9c4221; --drafted: #dbeafe; --here: #f6ad55;
  --draft: #2b6cb0; --verify: #718096; --accept: #2f855a; --rest: #cbd5e0; --prefill: #805ad5 }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181f; --ink: #e2e8f0; --quiet: #a0aec0; --line: #3b4657; --box: #1c222c;
  --accepted: #2f6fb5; --on-accepted: #ffffff; --root: #cbd5e0; --on-root: #14181f;
  --bonus: #f6ad55; --drafted: #1e3a5f; --here: #dd6b20;
  --draft: #63a4e8; --verify: #718096; --accept: #48bb78; --rest: #3b4657; --prefill: #b794f4 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.25rem; margin: 0 0 .25rem } h2 { font-size: 1rem; margin: 0 }
p { margin: .25rem 0 } .quiet { color: var(--quiet) }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; padding: .75rem;
  background: var(--box); border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0 }
details .text, .answer { max-height: 13rem; overflow: auto }
summary { cursor: pointer; padding: .25rem 0 }
.drafted { background: var(--drafted); border-radius: .15rem }
.piece { cursor: pointer } .piece.here { outline: 2px solid var(--here); border-radius: .15rem }
.controls { display: flex; gap: .5rem; align-items: center; position: sticky; top: 0; z-index: 1;
  padding: .5rem 0; background: var(--page) }
.controls button { font: inherit; min-width: 2.75rem; min-height: 2.75rem; color: inherit;
  background: var(--box); border: 1px solid var(--line); border-radius: .5rem; cursor: pointer }
.controls input { flex: 1; min-width: 4rem; height: 2.75rem; accent-color: var(--accepted) }
:focus-visible { outline: 3px solid var(--here); outline-offset: 1px }
.step { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; margin: .5rem 0 }
.js .step { display: none } .js .step.here { display: block }
.bar { display: block; width: 100%; height: 1rem; border-radius: .25rem; margin: .5rem 0 .25rem }
.keys { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0; padding: 0; list-style: none }
.keys i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .35rem; vertical-align: -.05rem }
.draft { background: var(--draft); fill: var(--draft) }
.verify { background: var(--verify); fill: var(--verify) }
.accept { background: var(--accept); fill: var(--accept) }
.rest { background: var(--rest); fill: var(--rest) }
.prefill { background: var(--prefill); fill: var(--prefill) }
.k-root { background: var(--root) } .k-accepted { background: var(--accepted) }
.k-refused { border: 1px solid var(--quiet) } .k-bonus { border: 2px dashed var(--bonus) }
.tree { overflow-x: auto; margin-top: .5rem; font-size: .8rem }
.tree ul { list-style: none; margin: 0; padding: 0;
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.node > span { display: inline-block; height: 1.7rem; line-height: 1.55rem; padding: 0 .45rem;
  margin-bottom: .3rem; white-space: pre; border: 1px solid var(--line); border-radius: .35rem;
  color: var(--quiet) }
.root > span { background: var(--root); border-color: var(--root); color: var(--on-root) }
.accepted > span { background: var(--accepted); border-color: var(--accepted);
  color: var(--on-accepted) }
.bonus > span { border: 2px dashed var(--bonus); color: var(--bonus) }
/* A chain reads on like text, from arrow to arrow; branches stand below it, where ::before goes
   from the parent to a node and ::after along the siblings. */
.tree ul, .node:only-child { display: inline }
.node { position: relative }
.node .node:not(:only-child) { padding-left: 1.1rem }
.node .node::before { content: ""; position: absolute; top: .8rem; left: .4rem; width: .7rem;
  border-top: 2px solid var(--line) }
.node .node:only-child::before { content: "\\2192"; position: static; padding: 0 .3rem; border: 0;
  color: var(--quiet) }
.node .node:not(:only-child)::after { content: ""; position: absolute; top: -.3rem; bottom: 0;
  left: .4rem; border-left: 2px solid var(--line) }
.node .node:last-child::after { bottom: auto; height: 1.1rem }
.node.accepted:not(:only-child)::before { border-top: 3px solid var(--accepted) }
.node.bonus:not(:only-child)::before { border-top: 2px dashed var(--bonus) }
@media (max-width: 30rem) { body { padding: .6rem } .controls .ends { display: none } }
"""

SCRIPT = """
"use strict";
const steps = [...document.querySelectorAll(".step")];
const pieces = [...document.querySelectorAll(".piece")];
const range = document.querySelector("input");
document.documentElement.classList.add("js");
document.querySelector(".controls").hidden = false;
let at = 0;
function show(number) {
  at = Math.max(0, Math.min(steps.length - 1, number));
  steps.forEach((step, i) => step.classList.toggle("here", i === at));
  pieces.forEach(piece => piece.classList.toggle("here", Number(piece.dataset.step) === at));
  const answer = document.querySelector(".answer"), piece = answer.querySelector(".here");
  if (piece) {
    const below = piece.getBoundingClientRect().top - answer.getBoundingClientRect().top;
    if (below < 0 || below > answer.clientHeight - 24) answer.scrollTop += below - 60;
  }
  range.value = at;
  range.setAttribute("aria-valuetext", "step " + at + " of " + (steps.length - 1));
  document.querySelector("output").textContent = at + " / " + (steps.length - 1);
}
range.addEventListener("input", () => show(Number(range.value)));
for (const button of document.querySelectorAll("button")) {
  const moves = {first: () => 0, back: () => at - 1, on: () => at + 1, last: () => steps.length};
  button.addEventListener("click", () => show(moves[button.dataset.move]()));
}
document.querySelector(".answer").addEventListener("click", event => {
  const piece = event.target.closest(".piece");
  if (piece) show(Number(piece.dataset.step));
});
document.addEventListener("keydown", event => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target === range) return;
  const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length}[event.key];
  if (to === undefined || event.target.closest(".tree")) return;
  event.preventDefault();
  show(to);
});
show(Math.min(1, steps.length - 1));
"""
