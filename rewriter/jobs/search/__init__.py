"""Searches for plans, by emulation and recorded costs."""
