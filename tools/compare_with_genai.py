#!/usr/bin/env python3
"""Compares plain decoding of an fp32 bundle with onnxruntime-genai's own model in one run.

usage: compare_with_genai.py --genai-python PYTHON --prompts FILE.jsonl [--limit 10]
       [--max-new-tokens 128] [--bundle DIR] [--model M] [--work DIR] [--threads N] [--json OUT]

PYTHON is the interpreter of an environment with onnxruntime-genai and nothing of ours:
`python3 -m venv genai && genai/bin/pip install onnxruntime-genai==0.18.0`. Its model is built once,
into DIR, by genai's builder under this interpreter (which has torch), from the same weights.
Both decode greedily, prompt by prompt, the first of the two alternating, with as many threads;
tokens per second are of decoding only: the first token, which prefill gives, is not counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import spec_runtime
from spec_export import target
from spec_export.distill.engines import save_dequantized
from spec_runtime import bundle
from spec_runtime.backends.threads import default_threads
from spec_runtime.files import require_writable, write_atomically
from spec_runtime.measure import provenance
from spec_runtime.measure.prompts import read_prompts

# Runs in the other environment: a prompt's ids a line in, its tokens and seconds a line out.
WORKER = """
import json, os, sys, time
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime_genai as og
model = og.Model(sys.argv[1])
print(json.dumps({"version": og.__version__}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    params = og.GeneratorParams(model)
    params.set_search_options(
        do_sample=False, max_length=len(job["ids"]) + job["max_new_tokens"], batch_size=1
    )
    generator = og.Generator(model, params)
    generator.append_tokens(job["ids"])
    tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        if len(tokens) == 1:
            begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    del generator
    print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
"""


class Genai:
    """Runs onnxruntime-genai in a process of its own, which sleeps while it is not asked."""

    def __init__(self, python: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), "-c", WORKER, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._read()["version"]

    def generate(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """Returns the new tokens, and the seconds that all but the first took."""
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"ids": ids, "max_new_tokens": max_new_tokens}) + "\n")
        stdin.flush()
        reply = self._read()
        return reply["tokens"], reply["seconds"]

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("onnxruntime-genai ended early: see its message above")
        return json.loads(line)


def build(python: Path, source: target.Source, work: Path, threads: int) -> Path:
    """Returns genai's fp32 CPU model of `source` under `work`; builds it if it is not there."""
    out = work / f"genai-{source.name}-fp32"
    if not (out / "genai_config.json").is_file():
        find = "import onnxruntime_genai as og; print(og.__path__[0])"
        found = subprocess.run(
            [str(python), "-c", find], check=True, capture_output=True, text=True
        )
        builder = Path(found.stdout.strip()) / "models" / "builder.py"
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            weights, built = Path(scratch) / "weights", Path(scratch) / "model"
            save_dequantized(source, weights)
            command = [sys.executable, builder, "-i", weights, "-o", built]
            command += ["-p", "fp32", "-e", "cpu", "-c", Path(scratch) / "cache"]
            subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
            shutil.move(built, out)
    config = json.loads((out / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    (out / "genai_config.json").write_text(json.dumps(config, indent=2))
    return out


def compare(args: argparse.Namespace) -> dict[str, Any]:
    folder, threads = args.bundle or bundle.find(), args.threads or default_threads()
    manifest = bundle.read(folder).manifest
    if manifest.target.precision != "fp32":
        raise ValueError(f"got a bundle of {manifest.target.precision}, expected fp32")
    prompts = read_prompts(args.prompts, args.limit)
    model = build(args.genai_python, target.resolve(args.model), args.work, threads)
    engine = spec_runtime.load(folder, "none", threads=threads, verify=False)
    genai = Genai(args.genai_python, model)
    rows: list[dict[str, Any]] = []
    try:
        warm_up = engine.encode(prompts[0].content)
        engine.generate(warm_up, max_new_tokens=8, reuse=False)
        genai.generate(warm_up, 8)
        for number, prompt in enumerate(prompts):
            ids = engine.encode(prompt.content)
            if number % 2:
                theirs, seconds = genai.generate(ids, args.max_new_tokens)
            ours = engine.generate(ids, max_new_tokens=args.max_new_tokens, reuse=False)
            if not number % 2:
                theirs, seconds = genai.generate(ids, args.max_new_tokens)
            rows.append(
                {
                    "prompt": prompt.id,
                    "tokens": ours.stats.committed_tokens,
                    "seconds": ours.stats.decode_seconds,
                    "genai_tokens": len(theirs) - 1,
                    "genai_seconds": seconds,
                    "identical": ours.token_ids == theirs,
                }
            )
            print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr)
    finally:
        genai.close()
    speed = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    rival = sum(row["genai_tokens"] for row in rows) / sum(row["genai_seconds"] for row in rows)
    return {
        "provenance": provenance.collect(
            threads=threads, prompts_file=args.prompts, prompts=prompts, manifest=manifest
        ),
        "bundle": manifest.name,
        "genai_version": genai.version,
        "threads": threads,
        "max_new_tokens": args.max_new_tokens,
        "tokens_per_second": speed,
        "genai_tokens_per_second": rival,
        "ratio": speed / rival,
        "identical": sum(row["identical"] for row in rows) / len(rows),
        "prompts": rows,
    }


def main() -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--genai-python", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench lines, or prompt")
    parser.add_argument("--limit", type=int, default=10, help="prompts, evenly over categories")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--model", help="what the bundle was built from; default: the demo")
    parser.add_argument("--work", type=Path, default=Path("runs/genai"), help="keeps genai's model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    try:
        if args.json:
            require_writable(args.json)
        result = compare(args)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        write_atomically(args.json, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
