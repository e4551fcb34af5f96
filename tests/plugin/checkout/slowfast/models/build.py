from fvcore.common.registry import Registry

MODEL_REGISTRY = Registry("MODEL")


def build_model(cfg):
    return MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME)(cfg)
