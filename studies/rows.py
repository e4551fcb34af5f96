"""Rows of the attention study, with the figures of the paper's two tables.

"Linear Complexity Randomized Self-attention Mechanism" (ICML 2022): the video table (section 5.3;
biased RA from appendix G.2), and the ablation of LARA (appendix I.3). The paper's ablation is on
images, with learned layers on the landmarks (H.2). Its video models have no such layers, and
neither have these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class StudyRow(NamedTuple):
    """One attention: its config keys, and the paper's accuracies by column."""

    name: str
    label: str
    opts: tuple[str, ...]
    paper: tuple[float, ...]


class StudyTable(NamedTuple):
    title: str
    columns: tuple[str, ...]  # the paper's
    rows: tuple[StudyRow, ...]
    seeds: int  # default number of seeds


def _row(
    name: str,
    label: str,
    attention: str,
    paper: tuple[float, ...] = (),
    options: Mapping[str, str] = MappingProxyType({}),
    number: int | None = None,
) -> StudyRow:
    """A row; `number` replaces the landmarks or samples of the study's configs."""
    opts = ["VIT.APPROX_ATTN_TYPE", attention]
    if number is not None:
        opts += ["VIT.APPROX_ATTN_DIM", str(number)]
    for key, value in options.items():
        opts += [f"VIT.{attention}.{key}".upper(), value]
    return StudyRow(name, label, tuple(opts), paper)


# The settings with the best results in the study; configs/*/lara_best_* use them.
_BEST = {"proposal": "global", "landmarks": "farthest", "weighting": "balance", "noise": "code"}

VIDEO = StudyTable(
    "Attentions of the paper's video table",
    ("K400", "SSv2"),
    (
        _row("softmax", "exact softmax", "softmax", (79.2, 66.5)),
        _row("ra_biased", "RA, biased", "ra", (79.0, 65.9), {"biased": "True"}),
        _row("ra", "RA", "ra", (78.2, 64.9)),
        _row("orthoformer", "Orthoformer", "orthoformer", (77.8, 64.7)),
        # Fewer landmarks than the paper's LARA, so that its MACs are not higher.
        _row("lara_best", "LARA, recommended", "lara", (), _BEST, number=18),
        _row("lara", "LARA", "lara", (77.5, 63.7)),
        _row("nystrom", "Nyströmformer", "nystrom", (76.5, 61.7)),
        _row("performer", "Performer", "performer", (72.1, 53.1)),
    ),
    seeds=5,
)

# The training from which the rows of a fine-tuning study start.
EXACT_FIRST = _row("exact", "exact, before fine-tuning", "softmax")

# The paper varies one choice at a time from mixed proposals with decoupled weights.
_LARA = {"proposal": "mixed", "weighting": "decoupled"}


def _ablation(name: str, label: str, *paper: float, **change: str) -> StudyRow:
    return _row(name, label, "lara", paper, {**_LARA, **change})


def _best(name: str, label: str, **change: str) -> StudyRow:
    return _row(name, label, "lara", (), {**_BEST, **change})


_FARTHEST = {"landmarks": "farthest"}
ABLATION = StudyTable(
    "Ablation of LARA",
    ("ImageNet, DeiT-Tiny",),
    (
        _row("performer", "Performer", "performer", (65.92,)),
        _ablation("single", "single proposal", 68.42, proposal="single"),
        _ablation("balance", "multiple proposals, balance heuristic", 70.78, weighting="balance"),
        _ablation("coupled", "multiple proposals, coupled weights", 71.02, weighting="coupled"),
        _ablation("mixture", "proposals: Gaussian mixtures", 70.22, proposal="mixture"),
        _ablation("global", "proposals: Gaussian, all keys", 71.22, proposal="global"),
        _ablation("local", "proposals: Gaussian, local means", 71.19, proposal="local"),
        _ablation("mixed", "multiple proposals, decoupled weights, mixed", 71.48),
        # Not in the paper: the scale of the noise, and the kind of landmarks.
        _ablation("noise_code", "mixed, noise of the authors' code", noise="code"),
        _ablation("noise_none", "mixed, no noise", noise="0.0"),
        _ablation("mixed_farthest", "mixed, farthest tokens", **_FARTHEST),
        _ablation("local_farthest", "local, farthest tokens", proposal="local", **_FARTHEST),
        _ablation("global_farthest", "all keys, farthest tokens", proposal="global", **_FARTHEST),
        _best("best_noise_paper", "recommended, noise of the paper", noise="1.0"),
        _best("best_noise_none", "recommended, no noise", noise="0.0"),
        _best("best", "recommended, noise of the code"),
    ),
    seeds=3,
)

# 4, 8, 20 and 50 % of the 256 tokens of configs/study/exact.yaml; 21 is its own number.
NUMBERS = (10, 21, 52, 128)


def _with_number(row: StudyRow, number: int) -> StudyRow:
    """The row with this number of landmarks; the same row if its config has this number."""
    opts = dict(zip(row.opts[::2], row.opts[1::2]))
    if number == NUMBERS[1] and "VIT.APPROX_ATTN_DIM" not in opts:
        return row._replace(paper=())
    opts["VIT.APPROX_ATTN_DIM"] = str(number)
    pairs = tuple(word for pair in opts.items() for word in pair)
    return StudyRow(f"{row.name}_{number}", row.label, pairs, ())


def _over_numbers(row: StudyRow) -> list[StudyRow]:
    if row.name in ("softmax", "ra_biased", "ra"):  # they have no landmarks
        return [row._replace(paper=())]
    return [_with_number(row, number) for number in NUMBERS]


LANDMARKS = StudyTable(
    "Over the number of landmarks",
    (),
    tuple(with_number for row in VIDEO.rows for with_number in _over_numbers(row)),
    seeds=2,
)
