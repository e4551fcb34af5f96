"""Running: launch, train, evaluate, checkpoints."""

from slowfast_lara.engine.command import main
from slowfast_lara.engine.evaluate import score_views

__all__ = ["main", "score_views"]
