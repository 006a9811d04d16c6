"""The algorithms of large passes."""
