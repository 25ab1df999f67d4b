"""Turns modules into ONNX graphs and rewrites these: cache forms, precisions, GPUs, TensorRT."""
