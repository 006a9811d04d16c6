"""Runs of scripts that call models: recordings, and sessions that are watched or replaced."""
