"""Runs models on ONNX Runtime and TensorRT; builds and measurements run in child processes."""
