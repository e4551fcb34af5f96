"""Triton kernels for NVIDIA GPUs; Triton itself is imported when a kernel first runs.

The operators are `key_stats`, `combine`, `landmarks`, `merged`, `proposals` and `temporal`. For the
operator NAME, NAME.py registers the PyTorch operator and its backward pass, and triton_NAME.py
(`merged`: triton_group*.py) holds the kernels. choice.py decides by measurement (measure.py,
verdicts.py) whether a model uses the kernels or PyTorch's own operations.
"""
