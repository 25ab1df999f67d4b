"""The parts of tools/gpu/check.py that ask how fast other engines are on the same weights."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu.job import PRECISION_FOR, Check, needed, torch_on
from tools.gpu.report import Findings, LeftOut
from tools.measure.compare import generated

Answer = Callable[[list[int]], list[int]]


def with_torch(check: Check, found: Findings) -> None:
    """Decodes by transformers: eagerly, with its prompt lookup, and compiled for CUDA graphs."""
    torch, transformers = torch_on(check.device), needed("transformers")
    options = {"dtype": "auto", "device_map": check.device}
    model = transformers.AutoModelForCausalLM.from_pretrained(_folder(check), **options)

    def answering(**more: Any) -> Answer:
        return lambda ids: generated(model, ids, check.sizes.bench_tokens, **more)

    _race(check, found, "transformers, eager", answering())
    _race(check, found, "transformers, prompt lookup", answering(prompt_lookup_num_tokens=10))
    backend = "eager" if check.device == "cpu" else "inductor"  # on a CPU for the order of calls
    model.forward = torch.compile(model.forward, backend=backend, mode="reduce-overhead")
    static = answering(cache_implementation="static")
    _race(check, found, "torch.compile, static cache", static)


def with_genai(check: Check, found: Findings) -> None:
    """Decodes by onnxruntime-genai, with a model that its own builder makes."""
    og, out = needed("onnxruntime_genai"), check.work / "genai"
    words = f"onnxruntime_genai.models.builder -p {PRECISION_FOR[check.device]} -e {check.device}"
    places = {"-i": _folder(check), "-o": out, "-c": check.work / "genai-cache"}
    options = [str(word) for option in places.items() for word in option]
    command = [sys.executable, "-m", *words.split(), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the builder ended with {done.returncode}: {done.stderr[-300:]}")
    model = og.Model(str(out))

    def answer(ids: list[int]) -> list[int]:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + check.sizes.bench_tokens)
        generator, tokens = og.Generator(model, params), []
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return tokens

    _race(check, found, f"onnxruntime-genai {og.__version__}", answer)


def _folder(check: Check) -> Path:
    """Returns the checkpoint that the bundle was built from."""
    if not check.kept.get("checkpoint"):
        raise LeftOut("the bundle was given, and not the checkpoint that it was built from")
    return Path(check.kept["checkpoint"])


def _race(check: Check, found: Findings, name: str, answer: Answer) -> None:
    """Answers each prompt twice, and times the second time."""

    def measure() -> None:
        seconds = [time.perf_counter()]
        for _ in range(2):
            answers = [answer(ids) for ids in check.kept["texts"]]
            seconds.append(time.perf_counter())
        pairs = zip(answers, check.kept["answers"], strict=True)
        same = [got[: len(own)] == own[: len(got)] for got, own in pairs]
        tokens = sum(map(len, answers))
        row = {"engine": name, "tokens/s": tokens / (seconds[2] - seconds[1]), "tokens": tokens}
        found.add(row | {"identical": sum(same) / len(same)})

    found.attempt(name, measure)
    rows = found.tables.get("measured", [])
    found.figure = ", ".join(f"{row['engine']} {row['tokens/s']:.0f} tokens/s" for row in rows)
