"""`python -m rewriter` is the command `rewriter`."""

from __future__ import annotations

from rewriter.cli import main

main()
