"""Runs models: engines, emulation, samples, measured ranges and error metrics."""
