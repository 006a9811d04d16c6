"""Probes: small models that show how a TensorRT computes on a GPU.

Making the models takes half a second, so only `ask` imports them.
"""
