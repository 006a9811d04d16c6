"""Samples: read, generated, checked against the model, and the ranges measured on them."""
