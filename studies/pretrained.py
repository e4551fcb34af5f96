"""Errors of the attentions in a pretrained image model: `python -m studies pretrained MODEL ...`.

MODEL is a folder of Hugging Face transformers with an image model such as DINOv2 or ViT. The frames
of real videos pass through it, and two tables compare the attentions with exact attention:

- PREFIX_layers: in every layer, the queries of all patches of a clip attend to the patches of each
  frame, as in the spatial stage of trajectory attention. The q, k, v are those of exact attention.
- PREFIX_swapped: all layers use the attention, over all tokens of a frame, CLS included. The cosine
  compares the final features with those of exact attention, for CLS and for the patches.

Nothing is trained. The settings are fixed in advance: `--numbers` for every attention.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from benchmarks.tables import MarkdownTable
from slowfast_lara.analysis.measure import count_macs
from slowfast_lara.analysis.model_errors import ModelErrorTable, measure_samples, token_weights
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.attention import ESTIMATORS, build_estimator
from slowfast_lara.config import get_cfg
from slowfast_lara.data import load_views
from slowfast_lara.drawing import attention_styles, saved_figure
from slowfast_lara.errors import InputError, counted
from slowfast_lara.inference.layers import LayerInputs
from slowfast_lara.inference.videos import find_videos
from slowfast_lara.models.attention_config import EXACT, RECOMMENDED
from slowfast_lara.progress import progress_bar

ATTENTIONS = [name for name in ESTIMATORS if name not in (EXACT, "ra")]
BUDGET = 0.5  # the cost for which the tables recommend an attention, relative to exact attention


class SwappedResult(NamedTuple):
    """Cosines of final features to those of exact attention; one entry per frame."""

    label: str
    number: int
    share: float  # of the MACs of exact attention, in one layer
    cls: list[float]
    patches: list[float]  # mean over the patches of a frame


@dataclass
class SwappedTable(MarkdownTable):
    results: Sequence[SwappedResult]

    def cells(self) -> Cells:
        return self._cells(digits=4)

    def csv_cells(self) -> Cells:
        return self._cells(digits=6)

    def _cells(self, digits: int) -> Cells:
        titles = ["attention", "landmarks", "MACs, % of exact", "CLS", "CLS, worst frame"]
        rows = [[*titles, "patches", "patches, worst frame"]]
        for result in self.results:
            figures = [
                f"{figure(values):.{digits}f}"
                for values in (result.cls, result.patches)
                for figure in (statistics.fmean, min)
            ]
            rows.append([result.label, str(result.number), f"{100 * result.share:.0f}", *figures])
        return rows

    def plot(self, path: str) -> None:
        with saved_figure(path, (11, 4.6), columns=2) as (figure, axes):
            for axis, kind in zip(axes, ("cls", "patches")):
                labels = [*dict.fromkeys(result.label for result in self.results)]
                for label, style in zip(labels, attention_styles(labels)):
                    some = [result for result in self.results if result.label == label]
                    shares = [100 * result.share for result in some]
                    means = [1 - statistics.fmean(getattr(result, kind)) for result in some]
                    axis.plot(shares, means, **style, label=label)
                axis.set(xscale="log", yscale="log", xlabel="MACs, % of exact attention")
                axis.set_ylabel(f"1 - cosine to exact attention, {kind}")
            axes[1].legend(fontsize=7)
            figure.suptitle(self.title, fontsize=9)


def study_pretrained(
    model: str,
    videos: Sequence[str],
    *,
    crop: int,
    frames: int,
    clips: int,
    numbers: Sequence[int],
    attentions: Sequence[str] | None,
    out: str,
) -> str:
    """Measure and write both tables; returns the second one as Markdown."""
    torch.set_num_threads(1)
    network, cfg = load_model(model, crop, frames)
    found = find_videos(videos, frames_in_folders=False)
    some = np.linspace(0, len(found) - 1, min(clips, len(found))).round().astype(int)
    views = [load_views(found[index], cfg)[0] for index in some]  # each [3,T,H,W]
    tokens = (crop // cfg.VIT.PATCH_SIZE) ** 2
    named = _settings(attentions or [*ATTENTIONS, *RECOMMENDED], numbers, tokens)
    sizes = f"{counted(len(views), 'clip')} of {counted(frames, 'frame')}"
    what = f"{Path(model).name}, {crop} pixels, {sizes}"
    notes: list[str] = []
    settings = [Setting(EXACT, {}), *(setting for _, setting in named)]
    rows = measure_samples(_samples(network, views, cfg), len(views), settings, cfg, 3, notes)
    depth = network.config.num_hidden_layers
    layers = ModelErrorTable(
        f"squared error relative to the square of exact attention: {what}",
        range(depth),
        BUDGET,
        rows,
        notes=notes,
    )
    layers.write(f"{out}_layers")
    print(layers.text())
    swapped = SwappedTable(
        f"Final features with another attention in all {depth} layers: {what}",
        list(_swapped(network, views, named)),
        notes=["Cosine to the features with exact attention, mean and worst frame; no training."],
    )
    swapped.write(f"{out}_swapped")
    return swapped.markdown()


def load_model(folder: str, crop: int, frames: int) -> tuple[Any, CfgNode]:
    """A model of transformers with exact attention, and a config that reads clips for it."""
    from transformers import AutoModel

    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise InputError(f"{folder}: expected a Hugging Face folder with config.json")
    network = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    patch = getattr(network.config, "patch_size", None)
    if not isinstance(patch, int):
        raise InputError(f"{folder}: expected an image model with square patches")
    if crop % patch:
        raise InputError(f"--crop is {crop}; must be a multiple of the patch size, {patch}")
    cfg = get_cfg()
    cfg.VIT.PATCH_SIZE, cfg.VIT.PATCH_SIZE_TEMP = patch, 1
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = frames, 8
    cfg.DATA.TEST_CROP_SIZE = crop
    cfg.TEST.NUM_ENSEMBLE_VIEWS = cfg.TEST.NUM_SPATIAL_CROPS = 1
    processor = Path(folder) / "preprocessor_config.json"
    if processor.is_file():
        values = json.loads(processor.read_text(encoding="utf-8"))
        cfg.DATA.MEAN, cfg.DATA.STD = values["image_mean"], values["image_std"]
    return network.eval(), cfg


def _settings(
    names: Sequence[str], numbers: Sequence[int], tokens: int
) -> list[tuple[str, Setting]]:
    """Labels and settings; numbers that would be exact attention are left out."""
    settings = []
    for label in names:
        name, options = RECOMMENDED.get(label, (label, {}))
        if name not in ESTIMATORS:
            raise InputError(f"unknown attention {label!r}; known: {', '.join(ATTENTIONS)}")
        for number in numbers:
            if number < tokens:
                settings.append((label, Setting(name, dict(options), number)))
    return settings


def _samples(
    network: Any, views: Sequence[Tensor], cfg: CfgNode
) -> Iterator[tuple[Tensor, list[LayerInputs]]]:
    """Token weights of each clip, and q, k, v of its patches in every layer."""
    exact = build_estimator(EXACT, head_dim=1)
    for view in views:
        inputs = []
        tokens = (view.shape[-1] // cfg.VIT.PATCH_SIZE) ** 2
        for layer in captured_qkv(network, view.transpose(0, 1)):
            # [F,h,1+P,d] -> [1,h,F*P,d], without CLS and registers
            patches = (x[:, :, -tokens:] for x in layer)
            q, k, v = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in patches)
            inputs.append(LayerInputs(q, k, v, view.shape[1], exact))
        yield token_weights(view, cfg), inputs


@torch.no_grad()
def captured_qkv(network: Any, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Run the model on images [B,3,H,W]; q, k, v [B,h,N,d] of every layer."""
    from transformers import AttentionInterface

    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        captured.append((q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("slowfast_lara_capture", attention)
    before = network.config._attn_implementation
    network.set_attn_implementation("slowfast_lara_capture")
    try:
        network(images)
    finally:
        network.set_attn_implementation(before)
    return captured


@torch.no_grad()
def _swapped(
    network: Any, views: Sequence[Tensor], named: Sequence[tuple[str, Setting]]
) -> Iterator[SwappedResult]:
    from slowfast_lara import hf

    images = torch.cat([view.transpose(0, 1) for view in views])
    expected = _features(network, images)
    q, k, v = captured_qkv(network, images[:1])[0]
    exact_macs = 2 * q.shape[1] * q.shape[2] ** 2 * q.shape[3]
    with progress_bar(len(named), "all layers swapped", unit="setting") as bar:
        for label, setting in named:
            settings: dict[str, Any] = {**setting.options, "num_landmarks": setting.number}
            estimator = build_estimator(
                setting.name, head_dim=q.shape[3], num_heads=q.shape[1], **settings
            ).eval()
            share = count_macs(partial(estimator, q, k, v)) / exact_macs
            hf.use(network, setting.name, **settings)
            cosines = functional.cosine_similarity(_features(network, images), expected, dim=-1)
            hf.use(network, EXACT)
            patches = cosines[:, 1:].mean(1)
            assert setting.number is not None  # set by _settings
            yield SwappedResult(
                label, setting.number, share, cosines[:, 0].tolist(), patches.tolist()
            )
            bar.update()


def _features(network: Any, images: Tensor) -> Tensor:
    """The final tokens [B,N,D]."""
    return torch.cat([network(some).last_hidden_state for some in images.split(8)])
