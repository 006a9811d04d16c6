"""Hooks for training code: fix a model right after its export from PyTorch and the libraries around it.

`torch`, `lightning`, `ultralytics` and `optimum` are the hooks; `precommit` and `install` serve repositories.
All exports go through `fixing`, with `hook_options`. `advice` inspects a module before its export: `observe`
runs it once, `norm_modules` recognises norms. `import rewriter` loads none of them. See docs/hooks.md.
"""
