"""Writes files and folders whole or not at all; reads the outline of ONNX files."""
