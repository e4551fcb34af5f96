"""The estimators as a config asks for them, and what people call them."""

from __future__ import annotations

from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.attention import ESTIMATORS, estimator_options
from slowfast_lara.errors import InputError

EXACT = "softmax"
# Recommended settings by the name that selects them: the estimator, and the options that differ
# from the paper's and affect inference. configs/*/best.yaml set the same values.
RECOMMENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "lara-recommended": (
        "lara",
        {"proposal": "global", "landmarks": "farthest", "weighting": "balance"},
    )
}


def chosen_estimator(cfg: CfgNode) -> str:
    """The name of VIT.APPROX_ATTN_TYPE's estimator: no approximation is exact attention."""
    name = cfg.VIT.APPROX_ATTN_TYPE
    return EXACT if name == "none" else name


def estimator_settings(cfg: CfgNode, name: str) -> dict[str, Any]:
    """What the config says of an estimator, as arguments of build_estimator."""
    options = {key: cfg.VIT[name.upper()][key.upper()] for key in estimator_options(name)}
    return {"num_landmarks": cfg.VIT.APPROX_ATTN_DIM, **options}


def estimator_named(name: str) -> str:
    """The estimator that people call by a name: `shown_name`'s are known, too."""
    name = EXACT if name in ("exact", "none") else name
    if name not in ESTIMATORS:
        raise InputError(f"unknown attention {name!r}; known: exact, {', '.join(ESTIMATORS)}")
    return name


def shown_name(name: str) -> str:
    """A value of VIT.APPROX_ATTN_TYPE as people read it."""
    return "exact" if name in ("none", EXACT) else name
