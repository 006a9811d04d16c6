"""Configuration: options from files and the environment, for the command line and for hooks.

    resolved = load().resolve(preset="accurate")
    rewriter.fix(model_path, output, **resolved.arguments("fix"))

The first of these sources that sets an option decides: the command line, the environment (`REWRITER_*`), the
file of the project one works in, the preset, and the default of `rewriter.fix`.
`rewriter.fix` and `rewriter.scan` themselves read neither files nor the environment.
"""

from __future__ import annotations

from rewriter.pipeline.config.resolve import Configuration, Origin, ResolvedOptions, load

__all__ = ["Configuration", "Origin", "ResolvedOptions", "load"]
