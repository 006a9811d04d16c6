"""Recognises the patterns that exporters write."""
