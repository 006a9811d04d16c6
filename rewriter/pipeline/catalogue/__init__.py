"""Pages and tables of the passes, the presets, the options and the hazards.

`python -m rewriter.pipeline.catalogue` writes the pages, `--check` fails if one is stale.
"""
