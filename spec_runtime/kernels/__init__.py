"""Holds a native operator for ONNX Runtime, its build, and the rewrite that puts it into graphs."""
