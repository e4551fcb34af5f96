"""Existing weights: reading their files and loading them into a model."""
