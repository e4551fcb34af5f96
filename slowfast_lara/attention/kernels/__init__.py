"""Triton kernels for NVIDIA GPUs; Triton itself is imported when a kernel first runs.

One operator per subject (`key_stats`, `combine`, `landmarks`, `proposals`, `temporal`): NAME.py
registers the PyTorch operator with its backward pass, triton_NAME.py holds its kernels. choice.py
decides between them and PyTorch's operations.
"""
