"""Sampling parameters: all fields, all types, extremes; what is accepted gives plain's tokens."""

from pathlib import Path
from typing import Any

import mutations
from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

# What a field may be: values that mostly fit it.
FITTING: dict[str, SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 40),
    "temperature": st.sampled_from(
        (0, 1e-40, 1e-38, 1e-20, 1e-6, 2e-4, 1e-2, 0.5, 1, 2.0, 1e3, 1e30)
    )
    | st.floats(0, 2),
    "top_k": st.none() | st.integers(1, 300),
    "top_p": st.none() | st.floats(0, 1, exclude_min=True),
    "min_p": st.none() | st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2) | st.floats(0, exclude_min=True, allow_infinity=False),
    "presence_penalty": st.floats(-2, 2) | st.floats(allow_nan=False, allow_infinity=False),
    "frequency_penalty": st.floats(-2, 2) | st.floats(allow_nan=False, allow_infinity=False),
    "logit_bias": st.dictionaries(
        st.integers(0, 257).map(str), st.floats(-100, 100) | mutations.numbers(), max_size=3
    ),
    "seed": st.integers(0, 5) | st.integers(),
    "stop": st.lists(mutations.texts(3), max_size=2) | mutations.texts(3),
    "stop_token_ids": st.lists(st.integers(0, 257), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 300),
    "acceptance": st.sampled_from(("target_sampling", "rejection", "typical")),
    "typical_epsilon": st.floats(0, 1, exclude_min=True),
    "typical_delta": st.none() | st.floats(0, 1, exclude_min=True),
    "draw_widths": st.none() | st.lists(st.integers(1, 4), min_size=1, max_size=4),
    "draw_with_replacement": st.booleans(),
}


def cases() -> SearchStrategy[Any]:
    fitting = st.fixed_dictionaries({}, optional=FITTING)
    wild = {name: values | mutations.values() for name, values in FITTING.items()}
    about = st.fixed_dictionaries(
        {
            "drafter": st.sampled_from(("medusa", "parallelspec", "prompt_lookup", "lookahead")),
            "prompt": st.lists(st.integers(0, 257), min_size=1, max_size=12),
        }
    )
    one_wild = st.sampled_from(sorted(wild)).flatmap(
        lambda name: st.fixed_dictionaries({name: wild[name]})
    )
    fields = st.one_of(fitting, fitting, one_wild, st.builds(lambda a, b: a | b, fitting, one_wild))
    return st.builds(lambda about, fields: about | {"fields": fields}, about, fields)


def open_kind(folder: Path) -> Run:
    import tiny_bundle

    import spec_runtime

    bundle = tiny_bundle.write(folder / "bundle")
    plain = spec_runtime.load(bundle, "none", threads=1)
    engines: dict[str, Any] = {}

    def run(case: dict[str, Any]) -> None:
        name = case["drafter"]
        if name not in engines:
            engines[name] = plain.with_drafter(name)
        engine = engines[name]
        fields = {key: mutations.expand(value) for key, value in case["fields"].items()}
        if isinstance(fields.get("logit_bias"), dict):
            fields["logit_bias"] = {_id(k): v for k, v in fields["logit_bias"].items()}
        fields.setdefault("seed", 7)
        fields.setdefault("max_new_tokens", 24)
        with refusing():
            got = engine.generate(case["prompt"], **fields)
        is_drawn = fields.get("temperature") and fields["seed"] is None
        if is_drawn:  # with a fresh seed each time nothing can be compared
            return
        judge = (
            plain if fields.get("acceptance", "target_sampling") == "target_sampling" else engine
        )
        try:
            with refusing():
                expected = judge.generate(case["prompt"], reuse=False, **fields)
        except Refused as refused:
            raise Wrong(f"taken once, then refused: {refused}") from refused
        if got.token_ids != expected.token_ids or got.text != expected.text:
            whose = "plain decoding's" if judge is plain else "the second time's"
            raise Wrong(f"tokens differ from {whose}: {got.token_ids} {expected.token_ids}")
        if got.logprobs is not None and len(got.logprobs) != len(got.token_ids):
            raise Wrong(f"{len(got.logprobs)} log-probabilities of {len(got.token_ids)} tokens")

    return run


def _id(key: str) -> Any:
    """Returns the token id that a JSON key stands for, or the key if it is none."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key


KIND = Kind("sampling parameters", cases, open_kind, weight=20)
