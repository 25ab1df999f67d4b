"""Turns modules into ONNX graphs and rewrites them: tracing, cache forms, precisions, TensorRT."""
