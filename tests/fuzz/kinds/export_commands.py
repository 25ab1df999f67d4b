"""Command lines of spec-export that name no model: they are refused and leave folders alone."""

from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from shell import call, require_kept_promises

from kinds.commands import SMALL, WORDS, flag_words
from kinds.out_folders import contents, fill, snapshot

MODELS = ("@folder/nosuch", "@folder/empty", "@folder/file", "./nosuch", "", "~nosuch", "\udcff")
FLAGS: dict[str, dict[str, SearchStrategy[str] | None]] = {
    "add": {"--model": st.sampled_from(MODELS), "--out": st.sampled_from(MODELS)},
    "build": {
        "--drafter": st.sampled_from(("medusa", "parallelspec", "none", "no", "")) | WORDS,
        "--drafter-checkpoint": st.sampled_from(MODELS),
        "--draft-model": st.sampled_from(MODELS),
        "--precision": st.sampled_from(("fp32", "int8", "fp16", "no")),
        "--drafter-precision": st.sampled_from(("fp32", "int8", "fp16", "no")),
        "--max-length": SMALL,
        "--backend": st.sampled_from(("onnxruntime", "tensorrt", "no")),
        "--device": st.sampled_from(("cpu", "cuda", "no")),
        "--form": st.sampled_from(("slots", "contiguous", "no")),
    },
    "distill": {
        "--prompts": st.sampled_from(MODELS),
        "--num-prompts": SMALL,
        "--max-new-tokens": SMALL,
        "--max-prompt-tokens": SMALL,
        "--temperature": SMALL
        | mutations.numbers().map(lambda v: f"{v:g}" if abs(v) < 1e300 else "inf"),
        "--seed": SMALL,
        "--batch-size": SMALL,
        "--engine": st.sampled_from(("auto", "transformers", "openvino", "vllm", "no")),
        "--precision": st.sampled_from(("fp32", "bf16", "no")),
        "--no-resume": None,
    },
    "recipe": {
        "--drafter": st.sampled_from(("medusa", "peagle", "no", "")) | WORDS,
        "--data": st.sampled_from(MODELS),
        "--tokens": SMALL,
        "--gpus": SMALL,
    },
    "train": {
        "--set": st.builds("{}={}".format, st.sampled_from(("train.lr", "x.y", "data.path")), WORDS)
        | WORDS,
        "--resume": None,
        "--cache": st.sampled_from(MODELS),
        "--init": st.sampled_from(MODELS),
    },
    "check": {
        "--precision": st.sampled_from(("fp32", "int8", "no")),
        "--bundle": st.sampled_from(MODELS),
    },
    "calibrate": {
        "--drafter": WORDS,
        "--max-new-tokens": SMALL,
        "--threads": SMALL,
        "--prompts": st.sampled_from(MODELS),
    },
}


def cases() -> SearchStrategy[Any]:
    return st.one_of(*(_lines(verb, flags) for verb, flags in FLAGS.items()))


def _lines(verb: str, flags: dict[str, SearchStrategy[str] | None]) -> SearchStrategy[Any]:
    rest = flag_words(flags)
    model = st.sampled_from(MODELS)
    fixed = {
        "add": model.map(lambda name: ["--bundle", name, "--drafter-checkpoint", name]),
        "recipe": model.map(lambda name: ["--model", name, "--out", "@folder/out/new.toml"]),
        "build": model.map(lambda name: ["--model", name, "--out", "@folder/out"]),
        "distill": model.map(lambda name: ["--model", name, "--out", "@folder/out/answers.jsonl"]),
        "train": model.map(lambda name: [name, "--out", "@folder/out"]),
        "check": model.map(lambda name: ["--model", name]),
        "calibrate": model.map(lambda name: ["--bundle", name]),
    }[verb]
    odd: SearchStrategy[list[str]] = st.one_of(
        st.just([]), st.just([]), st.just([]), WORDS.map(lambda word: [word])
    )
    return st.builds(
        lambda fixed, rest, odd, out: {"words": [verb, *fixed, *rest, *odd], "out": out},
        fixed,
        rest,
        odd,
        contents(),
    )


def open_kind(folder: Path) -> Run:
    from spec_export import cli

    (folder / "empty").mkdir(parents=True)
    (folder / "file").write_text("no model")

    def run(case: dict[str, Any]) -> None:
        fill(folder / "out", case["out"])
        before = snapshot(folder / "out")
        words = [word.replace("@folder", str(folder)) for word in case["words"]]
        try:
            require_kept_promises(call(cli.main, words), prints_text=False)
            if "--help" not in words:
                raise Wrong("a command without a model has succeeded")
        except Refused:
            if snapshot(folder / "out") != before:
                raise Wrong(f"a refused {words[0]} has changed its folder") from None
            raise

    return run


KIND = Kind("export command line", cases, open_kind, weight=4, seconds=20, megabytes=2048)
