"""Leads to the annex `spec_export.imports`: imports its modules by name, when they are first used.

No other module outside of the annex names its modules, but for the commands.
"""

from importlib import import_module
from typing import Any

MODULES = {
    "gguf_config": "gguf.config",
    "gguf_header": "gguf.header",
    "gguf_tokenizer": "gguf.tokenizer",
    "gguf_vocabulary": "gguf.vocabulary",
    "gguf_weights": "gguf.weights",
    "importer": "drafters.importer",
    "lora": "lora",
    "quantised": "quantised",
}


def __getattr__(name: str) -> Any:
    """Imports the module that `annex.name` stands for."""
    if name not in MODULES:
        raise AttributeError(name)
    return import_module(f"spec_export.imports.{MODULES[name]}")
