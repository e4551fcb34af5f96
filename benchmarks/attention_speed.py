"""Time and memory of the attentions at several crop sizes and sequence lengths.

`crop` measures one trajectory layer of ViT-B with 8 temporal tokens. The baseline is the layer of
textbook.py.

`stage` measures the attention of that layer alone: the spatial stage, without the projections and
the temporal stage. The baseline is exact attention.

`vjepa2` measures one layer of V-JEPA 2-L in transformers: `hf.use` replaces its attention. RA is
left out, because it materialises the attention matrix. The baseline is the fused kernel of PyTorch
that the model uses.

`length` measures the encoder of the paper's efficiency table (appendix H.5): 8 layers of joint
attention, width 192, 3 heads, 16 samples. The baseline is exact attention that materialises the
attention matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.profiling import count_flops, peak_memory
from benchmarks.speed_table import Cost, SpeedTable
from benchmarks.textbook import TextbookTrajectoryAttention
from slowfast_lara import hf
from slowfast_lara.analysis.measure import best_times
from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator
from slowfast_lara.attention.softmax import softmax_weights
from slowfast_lara.lazy import check_installed
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import (
    EXACT,
    RECOMMENDED,
    display_name,
    resolve_attention,
    resolve_estimator,
)
from slowfast_lara.models.motionformer import Block
from slowfast_lara.models.space_time import JointAttention, TrajectoryAttention
from slowfast_lara.progress import print_progress

WIDTH, HEADS, FRAMES, LANDMARKS = 768, 12, 8, 128
BASELINE = "textbook"


def crop_costs(
    crops: Sequence[int], estimators: Sequence[str] | None, repeats: int, flops: bool
) -> SpeedTable:
    """Measure a trajectory layer at each crop size; `flops` adds the GFLOPs of whole models."""
    names = _estimator_names(estimators)
    table = SpeedTable("trajectory layer, ViT-B, 8 frames, batch 1", "crop", BASELINE)
    for crop in crops:
        tokens = torch.randn(1, 1 + FRAMES * (crop // 16) ** 2, WIDTH, requires_grad=True)
        textbook = TextbookTrajectoryAttention(trajectory_layer(EXACT))
        layers: dict[str, nn.Module] = {BASELINE: textbook}
        layers.update((display_name(name), trajectory_layer(name)) for name in names)
        table.costs += _costs(crop, layers, tokens, FRAMES, repeats=repeats)
    if flops:
        counts = model_gflops(crops[0], names)
        figures = ", ".join(f"{name} {gflops:.1f}" for name, gflops in counts.items())
        table.notes.append(f"GFLOPs of the whole model at {crops[0]} pixels (fvcore): {figures}")
    return table


def stage_costs(
    crops: Sequence[int], estimators: Sequence[str] | None, repeats: int, groups: int
) -> SpeedTable:
    """Measure the spatial stage at each crop size: LANDMARKS landmarks, or `groups` per frame."""
    title = f"spatial stage, ViT-B, 8 frames, batch 1, {LANDMARKS} landmarks or {groups} groups"
    table = SpeedTable(title, "crop", display_name(EXACT))
    for crop in crops:
        x = torch.randn(1, 1 + FRAMES * (crop // 16) ** 2, WIDTH)
        with torch.no_grad():
            projected = trajectory_layer(EXACT).queries_keys_values(x)
        # The factor 2 makes attention weights that are neither nearly uniform nor nearly one-hot.
        inputs = [(2 * tensor[:, :, 1:]).requires_grad_() for tensor in projected]
        stages: dict[str, nn.Module] = {}
        for name, shown, options in _stage_settings(estimators):
            number = groups if ESTIMATORS[name].counts_keys_of_a_frame else LANDMARKS
            stages[shown] = build_estimator(
                name, head_dim=WIDTH // HEADS, num_heads=HEADS, num_landmarks=number, **options
            )
        table.costs += _costs(crop, stages, *inputs, repeats=repeats, num_frames=FRAMES)
    return table


def _stage_settings(names: Sequence[str] | None) -> list[tuple[str, str, dict[str, Any]]]:
    """(estimator, user-facing name, options) of exact attention and each attention in `names`."""
    shown = [display_name(name) for name in names or (*ESTIMATORS, *RECOMMENDED)]
    settings = [(name, *resolve_attention(name)) for name in dict.fromkeys(["exact", *shown])]
    return [(name, shown, options) for shown, name, options in settings]


def length_costs(
    lengths: Sequence[int], estimators: Sequence[str] | None, repeats: int
) -> SpeedTable:
    """Measure the encoder of the paper's efficiency table at each sequence length."""
    names = _estimator_names(estimators)
    title = "encoder of 8 layers, width 192, 3 heads, 16 samples, batch 1"
    table = SpeedTable(title, "tokens", BASELINE)
    for length in lengths:
        tokens = torch.randn(1, 1 + length, 192, requires_grad=True)
        encoders: dict[str, nn.Module] = {BASELINE: encoder(TextbookSoftmax)}
        for name in names:
            build = partial(build_estimator, name, head_dim=64, num_heads=3, num_landmarks=16)
            encoders[display_name(name)] = encoder(build)
        table.costs += _costs(length, encoders, tokens, repeats=repeats)
    return table


def vjepa2_costs(
    tokens: Sequence[int], estimators: Sequence[str] | None, repeats: int
) -> SpeedTable:
    """Measure a transformers layer of V-JEPA 2-L with its own attention and with each estimator."""
    check_installed("transformers", "hf")
    from transformers import VJEPA2Config
    from transformers.models.vjepa2.modeling_vjepa2 import VJEPA2Layer

    names = [resolve_estimator(name) for name in estimators or ESTIMATORS if name != "ra"]
    title = f"layer of V-JEPA 2-L, {LANDMARKS} groups, landmarks or samples, batch 1"
    table = SpeedTable(title, "tokens", "own")
    for number in tokens:
        layers: dict[str, nn.Module] = {}
        for name in ("own", *names):
            layers[display_name(name)] = layer = VJEPA2Layer(VJEPA2Config())
            layer.config._attn_implementation = "sdpa"
            if name != "own":
                hf.use(layer, name, num_landmarks=LANDMARKS)
        inputs = torch.randn(1, number, 1024, requires_grad=True)
        table.costs += _costs(number, layers, inputs, repeats=repeats)
    return table


def _estimator_names(names: Sequence[str] | None) -> Sequence[str]:
    return [resolve_estimator(name) for name in names or ESTIMATORS]


def trajectory_layer(name: str) -> TrajectoryAttention:
    estimator = build_estimator(
        name, head_dim=WIDTH // HEADS, num_heads=HEADS, num_landmarks=LANDMARKS
    )
    return TrajectoryAttention(WIDTH, HEADS, estimator, qkv_bias=True, drop=0.0)


def _costs(
    size: int, models: Mapping[str, nn.Module], *inputs: Any, repeats: int, **options: Any
) -> Iterator[Cost]:
    """Yield times (forward; forward + backward) and peak memory (forward + backward) per model."""

    @torch.no_grad()
    def forward(model: nn.Module) -> None:
        model(*inputs, **options)

    def both(model: nn.Module) -> None:
        out = model(*inputs, **options)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    print_progress(f"{size}: timing {', '.join(models)}")
    for model in models.values():
        model.eval()
    times = best_times({name: partial(forward, m) for name, m in models.items()}, repeats)
    for model in models.values():
        model.train()
    both_times = best_times({name: partial(both, m) for name, m in models.items()}, repeats)
    for name, model in models.items():
        seconds = times[name], both_times[name]
        print_progress(
            f"{size} {name}: forward {1e3 * seconds[0]:.1f} ms, with backward "
            f"{1e3 * seconds[1]:.1f} ms"
        )
        yield Cost(size, name, *seconds, peak_memory(partial(both, model)))


class TextbookSoftmax(Estimator):
    """Exact attention that materialises the N x N matrix: the paper's baseline."""

    exact = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return (softmax_weights(q, k) @ v).unsqueeze(3)


class _Encoder(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 1)
        return x


def encoder(build: Callable[[], Any]) -> nn.Module:
    """The encoder of the paper's efficiency table, with joint space-time attention."""
    layers = (JointAttention(192, 3, build(), True, 0.0) for _ in range(8))
    return _Encoder([Block(192, layer, None, 4.0, 0.0, 0.0) for layer in layers])


def model_gflops(crop: int, estimators: Sequence[str]) -> dict[str, float]:
    """GFLOPs of a whole ViT-B Motionformer with the textbook layer, and with each estimator."""
    clip = torch.zeros(1, 3, 2 * FRAMES, crop, crop)
    textbook = VisionTransformer(num_classes=400, estimator=EXACT)
    blocks: Iterable[Any] = textbook.blocks
    for block in blocks:
        block.attn = TextbookTrajectoryAttention(block.attn)
    counts = {BASELINE: _gflops(textbook, clip)}
    for name in estimators:
        model = VisionTransformer(num_classes=400, estimator=name)
        counts[display_name(name)] = _gflops(model, clip)
    return counts


@torch.no_grad()
def _gflops(model: nn.Module, clip: Tensor) -> float:
    return count_flops(model.eval(), [clip]) / 1e9
