"""Folders of the checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
MODELS = ROOT / "models"
DOCS = ROOT / "docs"
