"""Registry of models by name; PySlowFast 1.0 has no such registry."""

from fvcore.common.registry import Registry

MODEL_REGISTRY = Registry("MODEL")
