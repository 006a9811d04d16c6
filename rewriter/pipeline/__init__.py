"""Pipelines of passes: their text, presets, options, configuration, and the driver that runs them."""
