"""Triton kernels for NVIDIA GPUs; Triton itself is imported when a kernel first runs.

The operators are `key_stats`, `combine`, `landmarks`, `proposals` and `temporal`. For each of them,
NAME.py registers the PyTorch operator with its backward pass, and triton_NAME.py holds the kernels.
choice.py decides whether a model uses these operators or PyTorch's own operations.
"""
