"""Benchmarks that compare implementations. They run from a checkout; the wheel omits them."""
