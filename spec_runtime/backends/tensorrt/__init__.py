"""Runs the plans that TensorRT made of graphs."""
