"""The paths that PyTorch takes on GPUs alone, run here on the CPU: outputs and gradients."""

import pytest
import torch

from slowfast_lara import attention
from slowfast_lara.attention import ra
from tests.attention import reference
from tests.attention.test_estimators import SIZES, normal, qkv
from tests.comparing import assert_same_function

over_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


@over_sizes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("zeros", [3, 7])
def test_ra_with_components_of_zeros(sizes, dtype, zeros):
    B, h, F, P, d, _ = sizes
    samples, (_, k, v) = normal(B, h, F * P, d, seed=5), qkv(B, h, 1, P, d)
    assert_same_function(
        lambda w, k, v: ra._mean_seen_by(w, k, v, zeros),
        lambda w, k, v: reference.ra_sample(None, k, v, w),
        [samples, k, v],
        dtype,
    )


def of_a_layer(B, h, F, P, d):
    """q, k, v as a layer's projection lays them out, without CLS: three of [B,h,F*P,d]."""
    projected = normal(B, 1 + F * P, 3, h, d)
    return [x[:, :, 1:] for x in projected.permute(2, 0, 3, 1, 4)]


@pytest.mark.parametrize("batch", [1, 3])
def test_exact_attention_writes_what_the_temporal_stage_reads(batch):
    """[B,F,N,D], with the heads of a token side by side: as a view, nothing is copied."""
    out = attention.softmax_attention(*of_a_layer(batch, 2, 4, 5, 8), num_frames=4)
    paths = out.permute(0, 3, 2, 1, 4).flatten(3)
    assert paths.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
