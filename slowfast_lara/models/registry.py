"""Registry of models by name, which PySlowFast 1.0 lacks."""

from fvcore.common.registry import Registry

MODEL_REGISTRY = Registry("MODEL")
