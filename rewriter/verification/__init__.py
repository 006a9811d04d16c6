"""Checks of a rewritten model: expected outputs, structure, emulation, build, run, verdict."""
