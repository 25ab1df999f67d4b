"""Decodes with mlx-lm: plainly. On Linux its CPU backend runs, which is not what it is made for."""

import importlib.metadata
from pathlib import Path

import mlx.core as mx
import protocol
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def open_engine(settings):
    """Opens a Hugging Face folder, or one that mlx_lm's converter quantised."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(settings["model"]))

    def generate(ids, max_new_tokens):
        watch = protocol.Watch()
        tokens = []
        for token, _ in generate_step(mx.array(ids), model, max_tokens=max_new_tokens):
            tokens.append(int(token))
            watch.tick(1)
            if tokens[-1] in settings["end_ids"]:
                break
        return watch.reply(tokens)

    return importlib.metadata.version("mlx-lm"), generate


if __name__ == "__main__":
    protocol.serve(open_engine)
