"""Runs graphs by ONNX Runtime on CUDA; holds what TensorRT needs of CUDA, too."""
