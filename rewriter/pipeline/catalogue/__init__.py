"""What there is to choose from, as pages and as tables: passes, presets, options.

`python -m rewriter.pipeline.catalogue` writes the pages, `--check` fails if one is stale.
"""
