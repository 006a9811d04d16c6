"""Where training code meets `rewriter`: export hooks for PyTorch and the libraries around it.

`rewriter.hooks.torch` is the core; the others are a few lines over it. None of them loads with
`import rewriter`, and each fails with one line where its library is missing. docs/hooks.md shows them.
"""
