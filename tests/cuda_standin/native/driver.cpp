// libcuda.so.1, of which the provider of ONNX Runtime links to one function.
extern "C" int cuTensorMapEncodeTiled() { return 0; }
