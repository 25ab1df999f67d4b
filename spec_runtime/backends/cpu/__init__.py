"""Runs graphs by ONNX Runtime on the CPU."""
