from .build import MODEL_REGISTRY, build_model

__all__ = ["MODEL_REGISTRY", "build_model"]
