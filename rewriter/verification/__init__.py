"""Checks of a rewritten model against its original."""
