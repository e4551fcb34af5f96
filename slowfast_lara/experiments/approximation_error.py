"""How far each estimator is from exact attention, over its number of samples.

The mean squared error to softmax attention, as in the paper's figure 1, on the
q, k, v of a model looking at a video, or on random ones that are alike in
neighbouring tokens, as those of a video are.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
from dataclasses import dataclass

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention import (
    ESTIMATORS,
    build_estimator,
    estimator_options,
    softmax_attention,
)
from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.engine import checkpoint
from slowfast_lara.errors import InputError
from slowfast_lara.experiments.measure import environment
from slowfast_lara.files import write_text, written_aside
from slowfast_lara.models import build_model

# RA's cost is quadratic, for each of its samples: it is measured on some queries.
RA_QUERIES = 64


@dataclass(frozen=True)
class Variant:
    """A row: an estimator, and how its number of samples is set."""

    label: str
    name: str
    options: dict[str, bool]

    def build(self, samples: int, seed: int, head_dim: int, num_heads: int) -> torch.nn.Module:
        options = dict(self.options)
        if "num_samples" in estimator_options(self.name):
            options["num_samples"] = samples
        else:
            options["num_landmarks"] = samples
        sizes = {"head_dim": head_dim, "num_heads": num_heads, "seed": seed}
        return build_estimator(self.name, **sizes, **options).eval()


def variants() -> list[Variant]:
    """Every estimator but the exact one, and RA's biased form."""
    rows = [Variant(name, name, {}) for name, cls in ESTIMATORS.items() if not cls.exact]
    return [*rows, Variant("ra biased", "ra", {"biased": True})]


def run(args: argparse.Namespace) -> Errors:
    if args.cfg or args.checkpoint or args.video:
        if not (args.cfg and args.checkpoint and args.video):
            raise InputError("--cfg, --checkpoint and --video belong together")
        cfg = load_config(args.cfg, ["NUM_GPUS", 0])
        inputs = model_inputs(cfg, args.checkpoint, args.video, args.layer)
        source = f"layer {args.layer} of {os.path.basename(args.cfg)} on a video"
    else:
        inputs, source = smooth_inputs(), "random q, k, v, alike in neighbouring tokens"
    return measure(inputs, source, args.samples, args.seeds)


@torch.no_grad()
def measure(
    inputs: tuple[Tensor, Tensor, Tensor, int], source: str, samples: list[int], seeds: int
) -> Errors:
    q, k, v, num_frames = inputs
    errors = Errors(source, samples, {})
    exact = softmax_attention(q, k, v, num_frames=num_frames)
    step = max(1, q.shape[2] // RA_QUERIES)
    for variant in variants():
        some = slice(None, None, step if variant.name == "ra" else 1)
        row = []
        for number in samples:
            squares = []
            for seed in range(seeds):
                estimator = variant.build(number, seed, q.shape[3], q.shape[1])
                estimate = estimator(q[:, :, some], k, v, num_frames=num_frames)
                squares.append((estimate - exact[:, :, some]).square().mean().item())
            row.append(sum(squares) / seeds)
        errors.rows[variant.label] = row
    return errors


def smooth_inputs(
    frames: int = 4, side: int = 14, heads: int = 2, d: int = 32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Random fields over space and time, smooth on the scale of a few tokens.

    Query and key of a token share half of their variance, since a token of a trained
    model attends to what is like it.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 4 * heads * d, 2, 5, 5, generator=generator)
    field = functional.interpolate(coarse, size=(frames, side, side), mode="trilinear")
    tokens = field.view(4, 1, heads, d, -1).transpose(3, 4)
    q, k, v, shared = (tokens / tokens.std()).unbind(0)
    return (q + shared) / 2**0.5, (k + shared) / 2**0.5, v, frames


@torch.no_grad()
def model_inputs(
    cfg: CfgNode, weights: str, video: str, layer: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The q, k, v that a model's layer computes for the middle view of a video."""
    if not 0 <= layer < cfg.VIT.DEPTH:
        raise InputError(f"--layer is {layer}; the model has layers 0 to {cfg.VIT.DEPTH - 1}")
    if cfg.VIT.ATTN_LAYER != "trajectory":
        raise InputError(f"the model has {cfg.VIT.ATTN_LAYER} attention; trajectory is expected")
    model = build_model(cfg).eval()
    checkpoint.load_weights(model, checkpoint.load(weights)["model_state"], weights)
    views = load_views(video, cfg)
    taken = {}

    def take(_: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, int]) -> None:
        taken["inputs"] = (*args, kwargs["num_frames"])

    model.blocks[layer].attn.estimator.register_forward_pre_hook(take, with_kwargs=True)
    middle = len(views) // 2
    model([views[middle : middle + 1]])
    return taken["inputs"]


@dataclass
class Errors:
    """Mean squared errors by estimator and number of samples."""

    source: str
    samples: list[int]
    rows: dict[str, list[float]]

    def head(self) -> list[str]:
        facts = ", ".join(f"{key} {value}" for key, value in environment().items())
        return [f"mean squared error to exact attention, {self.source}", facts]

    def table(self) -> str:
        width = max(map(len, self.rows))
        lines = [*self.head(), " " * width + "".join(f"{number:>11}" for number in self.samples)]
        for label, row in self.rows.items():
            lines.append(f"{label:<{width}}" + "".join(f"{error:>11.3e}" for error in row))
        return "\n".join(lines)

    def write(self, path: str) -> None:
        """PATH.csv and PATH.png, written aside and renamed."""
        file = io.StringIO()
        file.writelines(f"# {line}\n" for line in self.head())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["estimator", *self.samples])
        writer.writerows([label, *(f"{e:.6e}" for e in row)] for label, row in self.rows.items())
        write_text(f"{path}.csv", file.getvalue())
        with written_aside(f"{path}.png") as aside:
            self.plot(aside)

    def plot(self, path: str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axis = pyplot.subplots(figsize=(6, 4.2), constrained_layout=True)
        for label, row in self.rows.items():
            axis.plot(self.samples, row, "o-", label=label)
        axis.set(xscale="log", yscale="log", xlabel="samples or landmarks", xticks=self.samples)
        axis.set_xticklabels(self.samples)
        axis.set_xticks([], minor=True)
        axis.set_ylabel("mean squared error to exact attention")
        axis.set_title(self.source, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
