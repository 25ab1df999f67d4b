"""Command lines: random flags and values for every verb, on a bundle of a few kilobytes."""

import os
from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Run, Wrong
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from shell import call, require_kept_promises

FOLDERS = ("@bundle", "@bundle", "@bundle", "@cwd", "@file", "nosuch", "", "\udcff", "a\nb")
FILES = ("@prompts", "@prompts", "@prompts", "@bad", "@cwd", "nosuch", "", "@bundle/manifest.json")
OUT = ("@out/x.json", "@out/a/b/x.json", "@bundle", "@file/x", "", "/proc/x", "@out/\udcff")
WORDS = mutations.texts(8).map(lambda text: text.replace("\x00", "").replace("\ud800", "\udc80"))
NUMBER = mutations.numbers().map(lambda value: str(value)[:400] if abs(value) < 1e300 else "1e999")
RIGHT = st.sampled_from(("1", "2", "3", "5"))
WRONG = st.sampled_from(("0", "-1", "1.5", "x", "", "99999", "1e3", "nan"))
SMALL = st.integers(0, 5).flatmap(lambda turn: WRONG if turn == 0 else RIGHT)
SAMPLING: dict[str, SearchStrategy[str] | None] = {
    **dict.fromkeys(
        ("--temperature", "--top-p", "--min-p", "--repetition-penalty"), SMALL | NUMBER
    ),
    **dict.fromkeys(
        ("--presence-penalty", "--frequency-penalty", "--typical-delta"), SMALL | NUMBER
    ),
    **dict.fromkeys(("--typical-epsilon", "--top-k", "--seed"), SMALL | NUMBER),
    "--stop-token-id": SMALL,
    "--logit-bias": st.builds("{}={}".format, SMALL, NUMBER) | WORDS,
    "--stop": WORDS,
    "--acceptance": st.sampled_from(("target_sampling", "rejection", "typical", "no")),
    "--draw-widths": st.sampled_from(("1", "2,1", "3,,1", "0", "x", "99999", "9" * 5000)),
    "--draw-with-replacement": None,
    "--ignore-eos": None,
}
THREADS = st.sampled_from(("1", "1", "2", "2", "0", "100000", "x", str(2**31)))
COMMON: dict[str, SearchStrategy[str] | None] = {
    "--drafter": st.sampled_from(("medusa", "parallelspec", "none", "prompt_lookup", "no", "a+b")),
    "--lookup": None,
    "--no-lookup": None,
    "--threads": THREADS,
}
ENGINE = COMMON | {
    "--backend": st.sampled_from(
        ("onnxruntime", "onnxruntime", "onnxruntime", "cuda", "tensorrt", "no")
    ),
    "--no-profile": None,
    "--system": WORDS,
}
TOKENS = st.sampled_from(("1", "2", "3", "8", "12", "99", "999999999999", "0", "x"))
VERBS: dict[str, dict[str, SearchStrategy[str] | None]] = {
    "generate": SAMPLING
    | ENGINE
    | {"--raw": None, "--show-accepted": None, "--json": None, "--logprobs": SMALL},
    "chat": SAMPLING | ENGINE,
    "bench": SAMPLING
    | ENGINE
    | {
        "--drafter": st.sampled_from(("medusa", "parallelspec+prompt_lookup", "none", "a+b")),
        "--limit": SMALL,
        "--per-category": SMALL,
        "--nodes": SMALL,
        "--json": st.sampled_from(OUT),
    },
    "audit": COMMON
    | {
        "--temperature": SMALL,
        "--seed": SMALL,
        "--strict": None,
        "--json": st.sampled_from(OUT),
        "--limit": SMALL,
    },
    "show": {
        "--json": None,
    },
}


def cases() -> SearchStrategy[Any]:
    return st.one_of(*(_lines(verb, flags) for verb, flags in VERBS.items()), _odd())


def _odd() -> SearchStrategy[Any]:
    """Draws lines that are no command at all."""
    first = st.sampled_from((*VERBS, "tune", "no", "--help", "--version", "-h", "")) | WORDS
    lines = st.lists(first | WORDS | st.sampled_from(tuple(SAMPLING)), min_size=1, max_size=4)
    # `tune` measures for seconds: it is run elsewhere, here only its parsing
    return lines.filter(lambda words: words[:1] != ["tune"] or "--no" in words).map(
        lambda words: {"words": words, "stdin": ""}
    )


def flag_words(flags: dict[str, SearchStrategy[str] | None]) -> SearchStrategy[list[str]]:
    """Draws up to four flags with their values; None is the value of a flag that takes none."""
    flag = st.one_of(
        *(
            st.just([name])
            if values is None
            else st.builds(lambda n, v: [n, v], st.just(name), values)
            for name, values in flags.items()
        )
    )
    return st.lists(flag, max_size=4).map(lambda parts: [word for part in parts for word in part])


def _lines(verb: str, flags: dict[str, SearchStrategy[str] | None]) -> SearchStrategy[Any]:
    given = flag_words(flags)
    wild = st.lists(WORDS, min_size=1, max_size=1)
    rest = st.one_of(given, given, given, given, st.builds(lambda a, b: a + b, given, wild))
    folder = st.sampled_from(FOLDERS).map(lambda name: ["--bundle", name])
    places = st.one_of(st.just(["--bundle", "@bundle"]), st.just(["--bundle", "@bundle"]), folder)
    begin = [verb]
    prompts: SearchStrategy[list[str]] = st.just([])
    tokens: SearchStrategy[list[str]] = st.just([])
    if verb in ("bench", "audit"):
        prompts = st.sampled_from(FILES).map(lambda name: ["--prompts", name])
    if verb == "generate":
        prompts = st.one_of(st.just([]), WORDS.map(lambda word: [word]), st.just(["hello"]))
    if verb == "audit":  # whose test of a distribution takes 1000 draws otherwise
        begin += ["--draws", "50"]
    if verb != "show":
        tokens = TOKENS.map(lambda count: ["--max-new-tokens", count])
    return st.builds(
        lambda prompts, places, tokens, rest, stdin: {
            "words": [*begin, *prompts, *places, *tokens, *rest],
            "stdin": stdin,
        },
        prompts,
        places,
        tokens,
        rest,
        st.sampled_from(("", "hello\n", "a\nb\n/reset\nc\n", "\udcff\n", "x" * 200)),
    )


PROMPTS = (
    '{"question_id": 1, "category": "writing", "turns": ["abc", "d"]}\n'
    '{"prompt": "hello", "category": "[/b]"}\n'
    '{"messages": [{"role": "user", "content": "x"}], "category": "\\u001b[31m"}\n'
)


def open_kind(folder: Path) -> Run:
    import tiny_bundle

    from spec_runtime import cli

    bundle = tiny_bundle.write(folder / "b[x]undle")
    before = {file: file.read_bytes() for file in bundle.rglob("*") if file.is_file()}
    for name, text in (("prompts", PROMPTS), ("bad", PROMPTS + "{"), ("file", "")):
        (folder / name).write_text(text)
    places = {f"@{name}": str(folder / name) for name in ("prompts", "bad", "file", "out")}
    places |= {"@bundle": str(bundle), "@cwd": str(Path.cwd())}

    def run(case: dict[str, Any]) -> None:
        words = []
        for word in case["words"]:
            place = next((name for name in places if word.startswith(name)), None)
            words.append(word if place is None else places[place] + word.removeprefix(place))
        try:
            printed = call(cli.main, words, case["stdin"])
            require_kept_promises(printed, words[:1] in (["generate"], ["chat"]))
        finally:
            os.chdir(places["@cwd"])
            for file, content in before.items():
                if not file.is_file() or file.read_bytes() != content:
                    raise Wrong(f"{file.name} of the bundle has been changed")

    return run


KIND = Kind("command line", cases, open_kind, weight=12, seconds=20)
