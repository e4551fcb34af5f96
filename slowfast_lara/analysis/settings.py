"""Settings of attentions to compare, and their squared differences from exact attention."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.attention import ESTIMATORS, Estimator, estimator_options
from slowfast_lara.inference.layers import LayerInputs, estimator_for
from slowfast_lara.models.attention_config import display_name

# The cost of RA is quadratic in the number of tokens, so its error is measured on a subset of
# this number of queries, or up to twice as many.
RA_QUERIES = 64


class Setting(NamedTuple):
    """An attention, the values of its varied options, and its number of landmarks or samples."""

    name: str
    options: dict[str, Any]
    # Landmarks, samples, or groups of keys per frame. None: the number from the config, if any.
    number: int | None = None

    @property
    def label(self) -> str:
        """The display name with the options, e.g. "lara global", "ra biased" or "exact"."""
        chosen = [(key, value) for key, value in self.options.items() if value is not False]
        words = [key if value is True else str(value) for key, value in chosen]
        return " ".join([display_name(self.name), *words])

    def build(
        self, inputs: LayerInputs, cfg: CfgNode, seed: int, kernels: str = "auto"
    ) -> Estimator:
        changes = {**self.options, "kernels": kernels}
        if self.number is not None:
            has_samples = "num_samples" in estimator_options(self.name)
            changes["num_samples" if has_samples else "num_landmarks"] = self.number
        return estimator_for(inputs, self.name, cfg, seed=seed, **changes)

    def queries(self, tokens: int) -> slice:
        """The queries to measure: all or, for RA, evenly spaced ones (see RA_QUERIES)."""
        return slice(None, None, max(1, tokens // RA_QUERIES) if self.name == "ra" else 1)

    def squared_errors(
        self, inputs: LayerInputs, exact: Tensor, cfg: CfgNode, seeds: int
    ) -> Tensor:
        """Squared error of each measured query, summed over heads, frames and components.

        If the attention is random, the result is the mean over `seeds` seeds.
        """
        q, k, v, num_frames, _ = inputs
        some = self.queries(q.shape[2])
        is_random = "seed" in inspect.signature(ESTIMATORS[self.name]).parameters
        repetitions = range(seeds if is_random else 1)
        errors = []
        for seed in repetitions:
            estimate = self.build(inputs, cfg, seed)(q[:, :, some], k, v, num_frames=num_frames)
            errors.append((estimate - exact[:, :, some]).square().sum((0, 1, 3, 4)))
        return torch.stack(errors).mean(0)


def vary(names: Sequence[str], varied: Sequence[str]) -> list[Setting]:
    """A Setting for each attention and each combination of values of the `varied` options."""
    settings = []
    for name in names:
        choices = [
            [(key, choice) for choice in option.choices or (False, True)]
            for key, option in estimator_options(name).items()
            if key in varied
        ]
        settings += [Setting(name, dict(options)) for options in itertools.product(*choices)]
    return settings


def token_counts(cfg: CfgNode) -> tuple[int, int]:
    """Number of patch tokens of a test view, and number of frames after temporal patching."""
    frames = cfg.DATA.NUM_FRAMES // cfg.VIT.PATCH_SIZE_TEMP
    return frames * (cfg.DATA.TEST_CROP_SIZE // cfg.VIT.PATCH_SIZE) ** 2, frames


def has_landmarks(name: str) -> bool:
    """Whether an attention has a number of landmarks, groups or samples (VIT.APPROX_ATTN_DIM)."""
    return "num_landmarks" in inspect.signature(ESTIMATORS[name]).parameters


def fitting_numbers(
    name: str, samples: Sequence[int], tokens: int, num_frames: int, notes: list[str]
) -> list[int]:
    """The `samples` that are valid numbers of landmarks; adds a note on the others to `notes`.

    A clip cannot have more landmarks than tokens. A frame must have fewer groups than keys, because
    one group per key is exact attention.
    """
    most = None
    if ESTIMATORS[name].counts_keys_of_a_frame:
        most, reason = tokens // num_frames - 1, f"a frame has {tokens // num_frames} tokens"
    elif ESTIMATORS[name].landmarks_are_tokens:
        most, reason = tokens, f"the clip has {tokens} tokens"
    if most is None or max(samples) <= most:
        return list(samples)
    larger = ", ".join(str(number) for number in samples if number > most)
    note = f"skipped {name} with {larger}: {reason}"
    notes += [note] if note not in notes else []
    return [number for number in samples if number <= most]
