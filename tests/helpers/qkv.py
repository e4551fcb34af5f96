"""Random inputs of the estimators, in float64."""

import torch

# B, h, F, P, d, C: one frame and several, N not divisible by C, d from 8 to 64.
SIZES = [(2, 2, 1, 23, 8, 5), (1, 3, 2, 16, 16, 8), (2, 1, 5, 9, 64, 7), (1, 2, 5, 13, 24, 13)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(B, h, F, P, d, seed=0):
    return list(normal(3, B, h, F * P, d, seed=seed))


def qkv_of_layer(B, h, F, P, d):
    """q, k, v as a layer's projection lays them out, without CLS: three of [B,h,F*P,d]."""
    projected = normal(B, 1 + F * P, 3, h, d)
    return [x[:, :, 1:] for x in projected.permute(2, 0, 3, 1, 4)]
