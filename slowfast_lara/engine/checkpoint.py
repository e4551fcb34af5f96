"""Deprecated location of `slowfast_lara.runs.checkpoint`."""

from slowfast_lara.deprecation import deprecated
from slowfast_lara.runs.checkpoint import *  # noqa: F403

deprecated("slowfast_lara.engine.checkpoint", "slowfast_lara.runs.checkpoint", "0.5")
