"""The parts of tools/gpu/check.py that ask how fast other engines are on the same weights."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.job import PRECISION_FOR, Check, needed
from tools.gpu.report import Findings, LeftOut

LOOKUP = {"prompt_lookup_num_tokens": 10}
Answer = Callable[[list[int]], list[int]]


def with_torch(check: Check, found: Findings) -> None:
    """Decodes by transformers: eagerly, with its prompt lookup, and compiled for CUDA graphs."""
    torch, transformers = needed("torch"), needed("transformers")
    if check.device == "cuda" and not torch.cuda.is_available():
        raise LeftOut("torch has no GPU here")
    options = {"dtype": "auto", "device_map": check.device}
    model = transformers.AutoModelForCausalLM.from_pretrained(_folder(check), **options)

    def answering(**more: Any) -> Answer:
        def answer(ids: list[int]) -> list[int]:
            text = torch.tensor([ids], device=check.device)
            count = check.sizes.bench_tokens
            out = model.generate(text, do_sample=False, max_new_tokens=count, **more)
            return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]

        return answer

    _race(check, found, "transformers, eager", answering())
    _race(check, found, "transformers, prompt lookup", answering(**LOOKUP))
    backend = "eager" if check.device == "cpu" else "inductor"  # on a CPU for the order of calls
    model.forward = torch.compile(model.forward, backend=backend, mode="reduce-overhead")
    static = answering(cache_implementation="static")
    _race(check, found, "torch.compile, static cache", static)


def with_genai(check: Check, found: Findings) -> None:
    """Decodes by onnxruntime-genai, with a model that its own builder makes."""
    og, out = needed("onnxruntime_genai"), check.work / "genai"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", _folder(check)]
    command += ["-o", out, "-p", PRECISION_FOR[check.device], "-e", check.device]
    command += ["-c", check.work / "genai-cache"]
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
    speed = found.attempt(name, _speed, check.kept["texts"], check.kept["answers"], answer)
    if speed is not None:
        found.add({"engine": name, **speed})
        rows = found.tables["measured"]
        found.figure = ", ".join(f"{row['engine']} {row['tokens/s']:.0f} tokens/s" for row in rows)


def _speed(
    texts: Sequence[list[int]], expected: Sequence[list[int]], answer: Answer
) -> dict[str, float]:
    for ids in texts:
        answer(ids)
    begin = time.perf_counter()
    answers = [answer(ids) for ids in texts]
    seconds = time.perf_counter() - begin
    same = [got[: len(own)] == own[: len(got)] for got, own in zip(answers, expected, strict=True)]
    tokens = sum(map(len, answers))
    return {"tokens/s": tokens / seconds, "tokens": tokens, "identical": sum(same) / len(same)}
