from .build import MODEL_REGISTRY, build_model
from .custom_video_model_builder import *  # noqa: F403

__all__ = ["MODEL_REGISTRY", "build_model"]
