"""Configuration: options from files and the environment, for the command line and for hooks.

    in_force = load(model_path).with_options(preset="accurate")
    rewriter.fix(model_path, output, **in_force.arguments("fix"))

An option comes from the first of these that sets it: the command line, the environment (`REWRITER_*`), the
file found upwards from the model's folder, the preset, and what `rewriter.fix` does by itself.
`rewriter.fix` and `rewriter.scan` themselves read neither files nor the environment.
"""

from __future__ import annotations

from rewriter.pipeline.config.force import Configuration, InForce, Origin, load
from rewriter.pipeline.config.settings import KEYS, Key, Settings

__all__ = ["KEYS", "Configuration", "InForce", "Key", "Origin", "Settings", "load"]
