"""Kernels for GPUs: the only place that knows Triton, and imports it only when one runs."""
