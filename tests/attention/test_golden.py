"""The estimators reproduce recorded outputs of the public implementations."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.attention import (
    build_estimator,
    lara_attention,
    nystrom_attention,
    orthoformer_attention,
    ra_attention,
    segment_means,
    softmax_attention,
)
from tests.helpers.comparing import assert_close

TOLERANCE = 2e-5


def load(name):
    with np.load(Path(__file__).parents[1] / "golden" / f"estimators_{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}


@pytest.fixture(scope="module")
def joint():
    return load("joint")


def lara(golden, k_bar, **options):
    inputs = (golden[name] for name in ("q", "k", "v", "q_bar", k_bar))
    return lara_attention(*inputs, **options)


JOINT = {
    "softmax": lambda g: softmax_attention(g["q"], g["k"], g["v"]),
    "lara_balance": lambda g: lara(g, "k_bar", weighting="balance"),
    "lara_decoupled_beta1": lambda g: lara(g, "k_bar"),
    "lara_decoupled_beta2": lambda g: lara(g, "k_bar", beta=2.0),
    "k_bar_mixed": lambda g: softmax_attention(g["k_bar"], g["k_bar"], g["k_bar"]),
    "lara_mixed_decoupled_beta2": lambda g: lara(g, "k_bar_mixed", beta=2.0),
    "ra_biased": lambda g: ra_attention(g["q"], g["k"], g["v"], biased=True),
}


@pytest.mark.parametrize("name", JOINT)
def test_joint(joint, name):
    assert_close(JOINT[name](joint).squeeze(3), joint[name], TOLERANCE, name)


def test_module_of_biased_ra(joint):
    estimator = build_estimator("ra", head_dim=16, biased=True, num_samples=3).eval()
    out = estimator(joint["q"], joint["k"], joint["v"])
    assert_close(out.squeeze(3), joint["ra_biased"], TOLERANCE)


def test_trajectory():
    golden = load("trajectory")
    q, k, v = (golden[name].unsqueeze(1) for name in "qkv")
    F, C = golden["num_frames"].item(), golden["landmarks"].item()
    landmarks = (segment_means(x, C, num_frames=F) for x in (q, k))
    outputs = {
        "softmax": softmax_attention(q, k, v, num_frames=F),
        "nystrom": nystrom_attention(q, k, v, *landmarks, num_frames=F),
        "orthoformer_first0": orthoformer_attention(
            q, k, v, num_landmarks=C, num_frames=F, first_landmark=0
        ),
    }
    for name, out in outputs.items():
        assert_close(out.squeeze(1), golden[name], TOLERANCE, name)
    for name in ("softmax", "nystrom"):
        estimator = build_estimator(name, head_dim=16, num_landmarks=C).eval()
        assert_close(estimator(q, k, v, num_frames=F), outputs[name], 0.0, name)
