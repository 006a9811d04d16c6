"""Probes: small graphs that show how a TensorRT computes on a GPU."""
