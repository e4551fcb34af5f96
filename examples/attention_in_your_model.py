"""Use an estimator of this package in your own transformer, without configs or videos.

python examples/attention_in_your_model.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from slowfast_lara import build_estimator


class Block(nn.Module):
    """A pre-norm transformer block whose attention is one of the estimators."""

    def __init__(self, dim: int, heads: int, attention: str, **options: object) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.estimator = build_estimator(
            attention, head_dim=dim // heads, num_heads=heads, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B,N,D] -> [B,N,D]: attention over all N tokens."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B,h,N,d]
        attended = self.estimator(q, k, v)[:, :, :, 0]  # drop the frame dimension: [B,h,N,d]
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def main() -> None:
    tokens = torch.randn(2, 2048, 64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    exact = Block(64, 2, "softmax").eval()
    recommended = {"proposal": "global", "landmarks": "farthest", "weighting": "balance"}
    attentions = {
        "lara (paper)": ("lara", {}),
        "lara (recommended)": ("lara", recommended),
        "nystrom": ("nystrom", {}),
        "performer": ("performer", {}),
    }
    with torch.no_grad():
        reference, seconds = timed(exact, tokens)
        print(f"{'exact':<20} {1000 * seconds:6.1f} ms")
        for name, (attention, options) in attentions.items():
            block = Block(64, 2, attention, num_landmarks=64, **options).eval()
            block.load_state_dict(exact.state_dict(), strict=False)  # Performer adds a buffer
            output, seconds = timed(block, tokens)
            error = (output - reference).square().mean().sqrt().item()
            print(f"{name:<20} {1000 * seconds:6.1f} ms   RMS error of the output {error:.4f}")


def timed(block: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """The output of a block, and the shortest of three times in seconds."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        output = block(tokens)
        best = min(best, time.perf_counter() - start)
    return output, best


if __name__ == "__main__":
    main()
