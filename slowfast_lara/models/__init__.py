"""Motionformer, and building it from a config."""

from slowfast_lara.models.build import build_model
from slowfast_lara.models.motionformer import VisionTransformer
from slowfast_lara.models.registry import MODEL_REGISTRY

__all__ = ["MODEL_REGISTRY", "VisionTransformer", "build_model"]
