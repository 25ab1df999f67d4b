"""Makes small graphs from ONNX's own text form, see onnx.parser."""

from typing import Any

import onnx


def model_of(text: str) -> onnx.ModelProto:
    """Returns a model such as `g (float[N] x) => (float[N] y) { y = Neg(x) }`, in opset 24."""
    return onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["": 24, "com.microsoft": 1]> {text}'
    )


def session_of(model: onnx.ModelProto) -> Any:
    """Opens a model with ONNX Runtime on the CPU."""
    import onnxruntime

    content = model.SerializeToString()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
