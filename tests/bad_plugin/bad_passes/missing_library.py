"""A module whose import fails, as one does that needs a library which is not installed."""

raise ModuleNotFoundError("No module named 'acme_runtime'")
