"""Triton kernels for NVIDIA GPUs; Triton itself is imported when a kernel first runs.

The operators are `key_stats`, `combine`, `landmarks`, `merged`, `proposals` and `temporal`. NAME.py
registers the PyTorch operator with its backward pass. triton_NAME.py (`merged`: triton_group*.py)
holds the kernels. choice.py decides whether a model uses them or PyTorch's own operations, by
measurement (measure.py, verdicts.py).
"""
