"""Pages and tables of the passes, the presets and the options.

`python -m rewriter.pipeline.catalogue` writes the pages, `--check` fails if one is stale.
"""
