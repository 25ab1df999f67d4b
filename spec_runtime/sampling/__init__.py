"""Chooses tokens: what a request asks for, and how a token is drawn from a row of logits."""

from spec_runtime.sampling.params import (
    ACCEPTANCES,
    MAX_FACTOR,
    MAX_SHIFT,
    MIN_TEMPERATURE,
    LogitsProcessor,
    SamplingOptions,
    SamplingParams,
)
from spec_runtime.sampling.sampler import Sampler, TokenLogprob, TopLogits, token_logprob

__all__ = [
    "ACCEPTANCES",
    "MAX_FACTOR",
    "MAX_SHIFT",
    "MIN_TEMPERATURE",
    "LogitsProcessor",
    "Sampler",
    "SamplingOptions",
    "SamplingParams",
    "TokenLogprob",
    "TopLogits",
    "token_logprob",
]
