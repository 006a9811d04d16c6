"""What runs models: ONNX Runtime on the CPU, and TensorRT."""
