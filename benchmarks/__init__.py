"""Benchmarks that compare implementations: run from a checkout, not installed."""
