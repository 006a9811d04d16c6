"""Hooks for training code: fix a model right after its export from PyTorch and the libraries around it.

`torch`, `lightning`, `ultralytics` and `optimum` are the hooks; all go through `fixing`, which serves
committed models, too. `import rewriter` loads none of them.
"""
