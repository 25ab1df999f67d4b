"""specsplit's runtime: draft, verify, accept. Needs neither torch nor transformers."""

from spec_runtime.engine import Engine, GenerationResult
from spec_runtime.load import load
from spec_runtime.sampling import SamplingParams

__all__ = ["Engine", "GenerationResult", "SamplingParams", "load"]
