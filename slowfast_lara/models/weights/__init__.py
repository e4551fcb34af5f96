"""Weights that exist already: reading their files, and fitting them to a model."""
