"""What is compared: the rows of the paper's two tables, and its figures.

"Linear Complexity Randomized Self-attention Mechanism" (ICML 2022): the video table
(section 5.3; biased RA from appendix G.2), and the ablation of LARA (appendix I.3),
which the paper made on images, with learned layers on the landmarks (H.2) that its video
models, and so our rows, do not have.
"""

from __future__ import annotations

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


def _row(
    name: str, label: str, attention: str, paper: tuple[float, ...], **options: str
) -> StudyRow:
    opts = ["VIT.APPROX_ATTN_TYPE", attention]
    for key, value in options.items():
        opts += [f"VIT.{attention}.{key}".upper(), value]
    return StudyRow(name, label, tuple(opts), paper)


VIDEO = StudyTable(
    "Attentions of the paper's video table",
    ("K400", "SSv2"),
    (
        _row("softmax", "exact softmax", "softmax", (79.2, 66.5)),
        _row("ra_biased", "RA, biased", "ra", (79.0, 65.9), biased="True"),
        _row("ra", "RA", "ra", (78.2, 64.9)),
        _row("orthoformer", "Orthoformer", "orthoformer", (77.8, 64.7)),
        _row("lara", "LARA", "lara", (77.5, 63.7)),
        _row("nystrom", "Nyströmformer", "nystrom", (76.5, 61.7)),
        _row("performer", "Performer", "performer", (72.1, 53.1)),
    ),
)

# What the rows of a fine-tuning study go on from.
EXACT_FIRST = _row("exact", "exact, before fine-tuning", "softmax", ())

# The paper varies one choice at a time from mixed proposals with decoupled weights.
_LARA = {"proposal": "mixed", "weighting": "decoupled"}


def _ablation(name: str, label: str, accuracy: float, **change: str) -> StudyRow:
    return _row(name, label, "lara", (accuracy,), **{**_LARA, **change})


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
    ),
)
