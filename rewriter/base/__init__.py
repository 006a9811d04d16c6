"""Errors, texts and worker processes: what every room may use."""
