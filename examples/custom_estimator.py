"""Define your own attention: register a class, compare it with exact attention, train with it.

python examples/custom_estimator.py
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from slowfast_lara import build_estimator, build_model, load_config
from slowfast_lara.attention import Estimator, register, softmax_attention


@register("strided")
class StridedAttention(Estimator):
    """Exact softmax attention over every `stride`-th key of each frame."""

    # A keyword argument becomes a config key: VIT.STRIDED.STRIDE.
    def __init__(self, *, stride: Annotated[int, "use every STRIDE-th key"] = 2) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        """q [B,h,N,d]; k, v [B,h,F*P,d], frame-major -> [B,h,N,F,d]."""
        k, v = (
            x.unflatten(2, (num_frames, -1))[:, :, :, :: self.stride].flatten(2, 3) for x in (k, v)
        )
        return softmax_attention(q, k, v, num_frames=num_frames)


def error_to_exact(stride: int) -> float:
    """Mean squared error on random q, k, v, compared with exact attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 4 * 49, 32).unbind()
    estimator = build_estimator("strided", head_dim=32, stride=stride)
    difference = estimator(q, k, v, num_frames=4) - softmax_attention(q, k, v, num_frames=4)
    return difference.square().mean().item()


def train_steps(steps: int) -> list[float]:
    """Train a small Motionformer with this attention on one random batch; returns the losses."""
    options = ["VIT.APPROX_ATTN_TYPE", "strided", "VIT.STRIDED.STRIDE", 2]
    cfg = load_config("quick/softmax", options)
    torch.manual_seed(0)
    model = build_model(cfg)
    clip = torch.randn(
        4, 3, cfg.DATA.NUM_FRAMES, cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.TRAIN_CROP_SIZE
    )
    labels = torch.arange(4) % cfg.MODEL.NUM_CLASSES
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model([clip]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for stride in (1, 2, 4):
        print(f"stride {stride}: mean squared error {error_to_exact(stride):.4f}")
    losses = train_steps(8)
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
