"""Motionformer, and building it from a config."""

from slowfast_lara.models.build import build_model
from slowfast_lara.models.motionformer import MODEL_REGISTRY, VisionTransformer

__all__ = ["MODEL_REGISTRY", "VisionTransformer", "build_model"]
