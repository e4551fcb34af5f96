"""The estimator that a config selects, and the user-facing names of the estimators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.attention import ESTIMATORS, estimator_options
from slowfast_lara.errors import InputError

EXACT = "softmax"
# User-facing name -> estimator and recommended options. Only options that affect inference and
# differ from the paper's are listed. configs/*/best.yaml set the same values.
RECOMMENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "lara-recommended": (
        "lara",
        {"proposal": "global", "landmarks": "farthest", "weighting": "balance"},
    )
}


def chosen_estimator(cfg: CfgNode) -> str:
    """The name in ESTIMATORS for VIT.APPROX_ATTN_TYPE; "none" is exact attention."""
    name = cfg.VIT.APPROX_ATTN_TYPE
    return EXACT if name == "none" else name


def estimator_settings(cfg: CfgNode, name: str) -> dict[str, Any]:
    """An estimator's settings in a config, as keyword arguments of build_estimator."""
    options = {key: cfg.VIT[name.upper()][key.upper()] for key in estimator_options(name)}
    return {"num_landmarks": cfg.VIT.APPROX_ATTN_DIM, **options}


def resolve_estimator(name: str, also: Collection[str] = ()) -> str:
    """The name in ESTIMATORS for a user-facing name; names in `also` are returned as they are."""
    name = EXACT if name in ("exact", "none") else name
    known = [*ESTIMATORS, *also]
    if name not in known:
        raise InputError(f"unknown attention {name!r}; known: exact, {', '.join(known)}")
    return name


def resolve_attention(name: str) -> tuple[str, dict[str, Any]]:
    """The estimator for a user-facing name, and the options that RECOMMENDED lists for the name."""
    name = resolve_estimator(name, also=RECOMMENDED)
    return RECOMMENDED.get(name, (name, {}))


def display_name(name: str) -> str:
    """The user-facing name of an estimator; `resolve_estimator` accepts it."""
    return "exact" if name in ("none", EXACT) else name
