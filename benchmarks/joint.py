"""Estimates for layers of other video transformers, which attend to all tokens of a clip.

The method is that of roofline.py. Joint attention has one group of keys: the whole clip. A layer is
attention, projections, MLP and norms. The ratios compare a layer with an estimator to the same
layer with exact attention (flash attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.roofline import (
    DEVICES,
    Counts,
    Device,
    Sizes,
    rest_counts,
    seconds,
    spatial_counts,
    unsupported,
)
from benchmarks.tables import MarkdownTable
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.attention import has_kernels
from slowfast_lara.errors import InputError

ATTENTIONS = ("merged", "lara", "nystrom")


class Model(NamedTuple):
    """A published model: sizes, and the numbers of frames to estimate."""

    width: int
    heads: int
    crop: int
    patch: int
    frames_per_token: int
    frames: tuple[int, ...]


# DINOv2 is an image model. Its rows are for a video model of the same size with joint space-time
# attention.
MODELS = {
    "DINOv2-S, joint": Model(384, 6, 224, 14, 1, (8, 32)),
    "DINOv2-B, joint": Model(768, 12, 224, 14, 1, (8, 32)),
    "VideoMAE-B": Model(768, 12, 224, 16, 2, (16, 32, 64)),
    "ViViT-B": Model(768, 12, 224, 16, 2, (32, 64)),
    "V-JEPA 2-L": Model(1024, 16, 256, 16, 2, (16, 64, 128)),
    "V-JEPA 2-g": Model(1408, 22, 384, 16, 2, (16, 64)),
}


class LayerCost(NamedTuple):
    """Estimated seconds: forward pass of a layer, both passes, attention alone in both passes."""

    forward: float
    both: float
    attention: float

    def ratios(self, exact: LayerCost) -> tuple[float, float]:
        return self.forward / exact.forward, self.both / exact.both


@dataclass
class JointTable(MarkdownTable):
    devices: Sequence[str] = ()
    # (model, frames, tokens, device) -> attention -> cost
    costs: dict[tuple[str, int, int, str], dict[str, LayerCost]] = field(default_factory=dict)

    def head(self) -> list[str]:
        # Omits the hardware of this machine, which does not affect the estimates.
        return [self.title, *self.notes]

    def cells(self) -> Cells:
        """A row for each model and clip length.

        For each device: the share of attention in the time of a layer with exact attention; then,
        for each attention, "inference / training" times of a layer relative to exact attention.
        """
        names = [f"{device}: {x}" for device in self.devices for x in ("share", *ATTENTIONS)]
        rows: list[list[object]] = [["model, frames x pixels", "tokens", *names]]
        for model, frames, tokens in dict.fromkeys(key[:3] for key in self.costs):
            cells: list[object] = [f"{model}, {frames} x {MODELS[model].crop}", f"{tokens:,}"]
            for device in self.devices:
                costs = self.costs[model, frames, tokens, device]
                exact = costs["exact"]
                cells.append(f"{exact.attention / exact.both:.0%}")
                ratios = [costs[name].ratios(exact) for name in ATTENTIONS]
                cells += [f"{forward:.2f} / {both:.2f}" for forward, both in ratios]
            rows.append(cells)
        return rows

    def csv_cells(self) -> Cells:
        titles = ["model", "frames", "tokens", "device", "attention", "forward_ms", "both_ms"]
        rows: list[list[object]] = [[*titles, "forward_ratio", "both_ratio"]]
        for key, costs in self.costs.items():
            for name, cost in costs.items():
                times = (f"{1e3 * x:.4f}" for x in (cost.forward, cost.both))
                ratios = (f"{x:.3f}" for x in cost.ratios(costs["exact"]))
                rows.append([*key, name, *times, *ratios])
        return rows


def joint_costs(devices: Sequence[str], clips: int, landmarks: int, groups: int) -> JointTable:
    """Estimate a layer of every model with exact attention and with the estimators."""
    for device in devices:
        if device not in DEVICES:
            raise InputError(f"--devices has {device!r}; must be of {', '.join(DEVICES)}")
    notes = [
        f"`python -m benchmarks joint --devices {' '.join(devices)} --clips {clips}`",
        "an estimate: counted, not measured",
        f"{clips} clips, bfloat16, {landmarks} landmarks, {groups} groups of keys",
        "time of a layer relative to exact attention, forward pass / forward and backward pass; "
        "below 1 is faster",
        "share: part of exact attention in forward and backward pass of a layer",
        "LARA by its Triton kernels, merged keys and Nyström by PyTorch's operations (the kernels "
        "of merged keys support frames of up to 1,024 keys)",
    ]
    table = JointTable("Layers of video transformers with other attentions", notes=notes)
    table.devices = devices
    for name, model in MODELS.items():
        for frames in model.frames:
            temporal = frames // model.frames_per_token
            sizes = Sizes(
                *(model.crop, temporal, clips, landmarks, groups),
                *(model.width, model.heads, model.patch),
                joint=True,
            )
            rest = rest_counts(sizes)
            counts = {"exact": spatial_counts("softmax", sizes)}
            counts |= {attention: _counts(attention, sizes) for attention in ATTENTIONS}
            for device in devices:
                table.costs[name, frames, sizes.tokens, device] = {
                    attention: _cost(count, rest, DEVICES[device])
                    for attention, count in counts.items()
                }
    return table


def _counts(name: str, sizes: Sizes) -> Counts:
    fused = has_kernels(name) and not unsupported(name, sizes, {})
    return spatial_counts(name, sizes, **({"kernels": "triton"} if fused else {}))


def _cost(attention: Counts, rest: Counts, device: Device) -> LayerCost:
    own, other = ([seconds(kernels, device) for kernels in counts] for counts in (attention, rest))
    return LayerCost(own[0] + other[0], sum(own) + sum(other), sum(own))
