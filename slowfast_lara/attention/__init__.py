"""Estimators of softmax attention over the keys of each frame."""

from slowfast_lara.attention.registry import (
    ESTIMATORS,
    Estimator,
    build_estimator,
    estimator_options,
    has_kernels,
    register,
)

# Importing a module registers its estimator. Tables and plots list estimators in this order.
from slowfast_lara.attention.softmax import softmax_attention  # isort: skip
from slowfast_lara.attention.lara import lara_attention  # isort: skip
from slowfast_lara.attention.ra import ra_attention  # isort: skip
from slowfast_lara.attention.performer import performer_attention  # isort: skip
from slowfast_lara.attention.nystrom import nystrom_attention  # isort: skip
from slowfast_lara.attention.orthoformer import orthoformer_attention  # isort: skip
from slowfast_lara.attention.merged import merged_attention  # isort: skip
from slowfast_lara.attention.tome import tome_attention  # isort: skip
from slowfast_lara.attention.pooled import pooled_attention  # isort: skip
from slowfast_lara.attention.eva import eva_attention  # isort: skip
from slowfast_lara.attention.landmarks import segment_means  # isort: skip

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "build_estimator",
    "estimator_options",
    "eva_attention",
    "has_kernels",
    "lara_attention",
    "merged_attention",
    "nystrom_attention",
    "orthoformer_attention",
    "performer_attention",
    "pooled_attention",
    "ra_attention",
    "register",
    "segment_means",
    "softmax_attention",
    "tome_attention",
]
