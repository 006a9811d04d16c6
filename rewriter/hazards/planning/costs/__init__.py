"""Latency estimated from recorded costs."""
