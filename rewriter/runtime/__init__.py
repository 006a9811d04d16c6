"""What runs a model: child processes, engines, emulation, samples, measured ranges and figures of error."""
