"""Errors of the attentions in a pretrained model, on real videos: `python -m studies pretrained`.

MODEL is a folder of Hugging Face transformers with an image model such as DINOv2 or ViT, or a video
model with trajectory attention that `slowfast_lara.load` can load. Two tables compare each
attention with exact attention:

- PREFIX_layers: in every layer, the queries of all patches of a clip attend to the patches of each
  frame, as in the spatial stage of trajectory attention. The q, k, v are those of exact attention.
- PREFIX_swapped: the attention replaces exact attention in all layers. In an image model, the
  tokens of a frame, CLS included, attend to each other. The cosine compares the final features with
  those of exact attention, for CLS (in a video model, the input of its classifier) and for the
  patches.

Nothing is trained. The settings are fixed in advance: every attention uses the same `--numbers`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.tables import MarkdownTable
from slowfast_lara.analysis.model_errors import ModelErrorTable, measure_samples, token_weights
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.drawing import attention_styles, saved_figure
from slowfast_lara.errors import InputError, counted
from slowfast_lara.inference.layers import middle_view
from slowfast_lara.inference.videos import find_videos
from slowfast_lara.models.attention_config import EXACT, RECOMMENDED
from slowfast_lara.progress import progress_bar
from studies.pretrained_models import ImageModel, VideoModel, load_pretrained

ATTENTIONS = [name for name in ESTIMATORS if name not in (EXACT, "ra")]
BUDGET = 0.5  # maximum MACs of the recommended attention, relative to exact attention


class SwappedResult(NamedTuple):
    """Cosines of final features to those of exact attention; one entry per frame or clip."""

    label: str
    number: int
    share: float  # MACs in one layer, relative to exact attention
    cls: list[float]
    patches: list[float]  # mean over the patches


@dataclass
class SwappedTable(MarkdownTable):
    results: Sequence[SwappedResult]
    unit: str  # "frame" or "clip"

    def cells(self) -> Cells:
        return self._cells(digits=4)

    def csv_cells(self) -> Cells:
        return self._cells(digits=6)

    def _cells(self, digits: int) -> Cells:
        titles = ["attention", "landmarks", "MACs, % of exact", "CLS", f"CLS, worst {self.unit}"]
        rows = [[*titles, "patches", f"patches, worst {self.unit}"]]
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
    crop: int | None,
    frames: int | None,
    clips: int,
    numbers: Sequence[int],
    attentions: Sequence[str] | None,
    out: str,
) -> str:
    """Measure and write both tables; returns PREFIX_swapped as Markdown."""
    torch.set_num_threads(1)
    network = load_pretrained(model, crop, frames)
    cfg = network.cfg
    found = find_videos(videos, frames_in_folders=False)
    some = np.linspace(0, len(found) - 1, min(clips, len(found))).round().astype(int)
    views = [middle_view(found[index], cfg) for index in some]  # each [3,T,H,W]
    tokens = (cfg.DATA.TEST_CROP_SIZE // cfg.VIT.PATCH_SIZE) ** 2
    named = _settings(attentions or [*ATTENTIONS, *RECOMMENDED], numbers, tokens)
    sizes = f"{counted(len(views), 'clip')} of {counted(cfg.DATA.NUM_FRAMES, 'frame')}"
    what = f"{Path(model).name}, {cfg.DATA.TEST_CROP_SIZE} pixels, {sizes}"
    notes: list[str] = []
    settings = [Setting(EXACT, {}), *(setting for _, setting in named)]
    samples = ((token_weights(view, cfg), network.layers(view)) for view in views)
    rows = measure_samples(samples, len(views), settings, cfg, 3, notes)
    layers = ModelErrorTable(
        f"squared error relative to the square of exact attention: {what}",
        range(network.depth),
        BUDGET,
        rows,
        notes=notes,
    )
    layers.write(f"{out}_layers")
    print(layers.text())
    unit = network.unit
    swapped = SwappedTable(
        f"Final features with another attention in all {network.depth} layers: {what}",
        list(_swapped(network, views, named)),
        unit,
        notes=[f"Cosine to the features with exact attention, mean and worst {unit}; no training."],
    )
    swapped.write(f"{out}_swapped")
    return swapped.markdown()


def _settings(
    names: Sequence[str], numbers: Sequence[int], tokens: int
) -> list[tuple[str, Setting]]:
    """Pairs of label and setting for each number below `tokens`, the number of keys of a frame.

    Larger numbers are skipped: with as many groups as keys, attention would be exact.
    """
    settings = []
    for label in names:
        name, options = RECOMMENDED.get(label, (label, {}))
        if name not in ESTIMATORS:
            raise InputError(f"unknown attention {label!r}; known: {', '.join(ATTENTIONS)}")
        for number in numbers:
            if number < tokens:
                settings.append((label, Setting(name, dict(options), number)))
    return settings


@torch.no_grad()
def _swapped(
    model: ImageModel | VideoModel, views: Sequence[Tensor], named: Sequence[tuple[str, Setting]]
) -> Iterator[SwappedResult]:
    expected = model.features(views, Setting(EXACT, {}))
    with progress_bar(len(named), "all layers swapped", unit="setting") as bar:
        for label, setting in named:
            found = model.features(views, setting)
            cls, patches = (
                functional.cosine_similarity(*pair, dim=-1) for pair in zip(found, expected)
            )
            assert setting.number is not None  # set by _settings
            share = model.macs(setting) / model.macs(Setting(EXACT, {}))
            yield SwappedResult(
                label, setting.number, share, cls.tolist(), patches.mean(1).tolist()
            )
            bar.update()
