"""What this TensorRT does on this GPU, asked with small models, and what the rest of the tool makes of it.

The models of the probes take half a second to make: only `ask` imports them.
"""
