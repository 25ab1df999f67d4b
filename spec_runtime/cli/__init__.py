"""Implements the spec-runtime command: finds the verb, imports its module only, words its errors.

What a verb does is in the file of its name. ``spec_export.cli`` runs through the same ``run``.
"""

import importlib
import logging
import sys
from collections.abc import Sequence

import typer

VERBS = ("generate", "chat", "bench", "audit", "tune", "show")

# Names the extra of the distribution that brings a module which may be absent.
EXTRAS = {
    "onnxruntime": "cpu",
    "tensorrt": "tensorrt",
    "tensorrt_rtx_bindings": "tensorrt-rtx",
    "openvino_genai": "distill",
    **dict.fromkeys(
        ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"), "export"
    ),
    **dict.fromkeys(("accelerate", "peft", "optimum", "matplotlib"), "export"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Generate text from a bundle by speculative decoding."""
    run("spec-runtime", __name__, VERBS, main.__doc__, argv)


def run(
    program: str,
    package: str,
    verbs: Sequence[str],
    summary: str | None,
    argv: Sequence[str] | None,
) -> None:
    """Runs one verb of ``package`` and raises SystemExit: 0, 2 for bad input, 130 on Ctrl-C.

    Imports the verb's own module only; all of them for ``--help`` or an unknown verb.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    app = typer.Typer(
        name=program,
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # The callback keeps typer from dropping the verb when there is only one.
    app.callback()(lambda: None)
    wanted = [verb for verb in verbs if verb in arguments[:1]]
    for verb in wanted or verbs:
        module = importlib.import_module(f"{package}.{verb}")
        app.command(verb)(module.command)
    # A warning begins a line of its own, wherever the streamed text stands.
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setFormatter(logging.Formatter("\nwarning: %(message)s"))
    logging.getLogger("spec_runtime").handlers = [warnings]
    try:
        app(arguments, prog_name=program)
    except ModuleNotFoundError as error:
        module_name = (error.name or "").partition(".")[0]
        if module_name not in EXTRAS:
            raise
        _fail(
            f"{module_name} is not installed, which this command needs; "
            f"run pip install 'specsplit[{EXTRAS[module_name]}]'"
        )
    except (ValueError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    """Prints one line to stderr and exits with code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
