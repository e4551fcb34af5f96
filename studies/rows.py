"""Rows of the attention study, with accuracies from the LARA paper's two tables.

The paper is "Linear Complexity Randomized Self-attention Mechanism" (ICML 2022). Its tables are the
video table (section 5.3; biased RA is from appendix G.2) and the ablation of LARA (appendix I.3).
The paper's ablation uses images, and learned layers on the landmarks (H.2). The paper's video
models have no such layers, nor do the models of this study.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class StudyRow(NamedTuple):
    """One attention: its config overrides, and its accuracy in each column of the paper."""

    name: str
    label: str
    opts: tuple[str, ...]
    paper: tuple[float, ...]


class StudyTable(NamedTuple):
    title: str
    columns: tuple[str, ...]  # columns of the paper's table
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
    """A row; `number` overrides the number of landmarks or samples of the study's configs."""
    opts = ["VIT.APPROX_ATTN_TYPE", attention]
    if number is not None:
        opts += ["VIT.APPROX_ATTN_DIM", str(number)]
    for key, value in options.items():
        opts += [f"VIT.{attention}.{key}".upper(), value]
    return StudyRow(name, label, tuple(opts), paper)


# The options with the best results in this study; the configs lara_best_* use them too.
_BEST = {"proposal": "global", "landmarks": "farthest", "weighting": "balance", "noise": "code"}

VIDEO = StudyTable(
    "Attentions at equal cost",
    ("K400", "SSv2"),
    (
        _row("softmax", "exact softmax", "softmax", (79.2, 66.5)),
        _row("ra_biased", "RA, biased", "ra", (79.0, 65.9), {"biased": "True"}),
        _row("ra", "RA", "ra", (78.2, 64.9)),
        _row("orthoformer", "Orthoformer", "orthoformer", (77.8, 64.7)),
        # 18 landmarks, not the 21 of study/exact, so that this row has no more MACs than `lara`.
        _row("lara_best", "LARA, recommended", "lara", (), _BEST, number=18),
        _row("lara", "LARA", "lara", (77.5, 63.7)),
        _row("nystrom", "Nyströmformer", "nystrom", (76.5, 61.7)),
        _row("performer", "Performer", "performer", (72.1, 53.1)),
        # Numbers of groups of the 64 keys of a frame, chosen for about as many MACs as `lara_best`.
        _row("merged", "merged keys", "merged", number=17),
        _row("tome", "ToMe of keys", "tome", number=18),
        _row("pooled", "pooled keys", "pooled", number=20),
        _row("eva", "EVA", "eva", number=24),
    ),
    seeds=5,
)

# The pretraining run that provides the initial weights of the fine-tuned rows.
EXACT_FIRST = _row("exact", "exact, before fine-tuning", "softmax")

# Base of the paper's ablation, which changes one option at a time.
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
        # Rows that are not in the paper: they vary the noise scale and the kind of landmarks.
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

# Numbers of landmarks: 4, 8, 20 and 50 % of the 256 tokens in configs/study/exact.yaml, which
# sets 21.
NUMBERS = (10, 21, 52, 128)
# Numbers of groups of the 64 keys of a frame. Except for EVA, the MACs are from about a quarter of
# those of `lara_best` to about those of exact attention.
GROUP_NUMBERS = (4, 8, 17, 34, 56)
GROUPED = ("merged", "tome", "pooled", "eva")


def _with_number(row: StudyRow, number: int) -> StudyRow:
    """The row with `number` landmarks; has a new name unless the row already has this number."""
    opts = dict(zip(row.opts[::2], row.opts[1::2]))
    if str(number) == opts.get("VIT.APPROX_ATTN_DIM", str(NUMBERS[1])):
        return row._replace(paper=())
    opts["VIT.APPROX_ATTN_DIM"] = str(number)
    pairs = tuple(word for pair in opts.items() for word in pair)
    return StudyRow(f"{row.name}_{number}", row.label, pairs, ())


def _over_numbers(row: StudyRow) -> list[StudyRow]:
    if row.name in ("softmax", "ra_biased", "ra"):  # these have no landmarks
        return [row._replace(paper=())]
    numbers = GROUP_NUMBERS if row.name in GROUPED else NUMBERS
    return [_with_number(row, number) for number in numbers]


LANDMARKS = StudyTable(
    "Over the number of landmarks",
    (),
    tuple(with_number for row in VIDEO.rows for with_number in _over_numbers(row)),
    seeds=5,
)
