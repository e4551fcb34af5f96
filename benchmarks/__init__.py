"""Benchmarks that compare implementations; they run from a checkout and are not installed."""
