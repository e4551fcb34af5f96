"""Equality with Motionformer's published model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.models import VisionTransformer
from tests.helpers.comparing import assert_close

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("motionformer_*.npz"))


def test_number_of_golden_files():
    assert len(GOLDEN) == 5


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_logits_of_the_published_model(path):
    with np.load(path) as golden:
        meta = {name[5:]: golden[name].item() for name in golden if name.startswith("meta/")}
        state = {
            name[3:]: torch.from_numpy(golden[name]) for name in golden if name.startswith("sd/")
        }
        expected = {name: torch.from_numpy(golden[name]) for name in ("logits", "probs")}
    model = VisionTransformer(
        num_classes=7,
        attn_layer=meta["layer"],
        dim=meta["embed"],
        depth=meta["depth"],
        num_heads=meta["heads"],
        num_frames=meta["T"],
        original_trajectory=meta["orig"],
    ).eval()
    model.load_state_dict(state, strict=True)
    axes = (np.arange(n) for n in (3, 2 * meta["T"], meta["crop"], meta["crop"]))
    c, t, y, x = np.meshgrid(*axes, indexing="ij")
    clip = np.sin(0.3 * (c + 1) * t + 0.05 * y) * np.cos(0.03 * x * (c + 1) + 0.2 * t)
    clip = torch.from_numpy(clip.astype(np.float32))[None]
    with torch.no_grad():
        logits = model.head(model.forward_features([clip]))
        assert_close(logits, expected["logits"], 2e-5, "logits")
        assert_close(model([clip]), expected["probs"], 2e-5, "probs")
