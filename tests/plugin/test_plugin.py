"""The plugin with only the config and the registry of a checkout, in this process."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from slowfast_lara.config import get_cfg
from slowfast_lara.errors import ConfigError, InputError
from slowfast_lara.models.motionformer import VisionTransformer
from tests.helpers.checkouts import CHECKOUT, MODEL, PAGE, checkout_run
from tests.helpers.made_up_weights import vit


@pytest.fixture
def checkout(monkeypatch):
    """The stand-in's default config and a registry, in place of the `slowfast` modules."""
    defaults, build = ModuleType("slowfast.config.defaults"), ModuleType("slowfast.models.build")
    source = (CHECKOUT / "slowfast" / "config" / "defaults.py").read_text()
    exec(source, defaults.__dict__)
    build.MODEL_REGISTRY = Registry("MODEL")
    for module in (defaults, build):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "slowfast_lara.plugin", raising=False)
    yield defaults._C, build.MODEL_REGISTRY
    sys.modules.pop("slowfast_lara.plugin", None)


def plug_in() -> ModuleType:
    return importlib.import_module("slowfast_lara.plugin")


def with_model(tree: CfgNode, **vit: Any) -> CfgNode:
    cfg = tree.clone()
    cfg.merge_from_other_cfg(CfgNode(MODEL))
    cfg.merge_from_other_cfg(CfgNode({"VIT": vit}))
    return cfg


def test_keys_and_model_are_added_once(checkout):
    tree, registry = checkout
    before = tree.clone()
    module = plug_in()
    ours = get_cfg()
    assert tree.VIT == ours.VIT and tree.VIT is not ours.VIT
    assert {key for key in tree if key != "VIT"} == set(before)
    assert all(tree[key] == before[key] for key in before)  # its own keys are unchanged
    added = tree.clone()
    importlib.reload(module)
    assert tree == added
    cfg = with_model(tree)
    assert isinstance(registry.get("VisionTransformer")(cfg), VisionTransformer)


def test_existing_keys_of_a_fork_keep_their_values(checkout):
    tree, _ = checkout
    tree.VIT = CfgNode({"DEPTH": 24, "POS_EMBED": "joint", "FORK_ONLY": 1})
    del tree["MODEL"]["ACT_CHECKPOINT"]
    plug_in()
    assert (tree.VIT.DEPTH, tree.VIT.POS_EMBED, tree.VIT.FORK_ONLY) == (24, "joint", 1)
    assert tree.VIT.NUM_HEADS == 12 and tree.MODEL.ACT_CHECKPOINT is False


@pytest.mark.parametrize(
    "key, value",
    [
        ("VIT", "vit_base"),
        ("VIT.PATCH_SIZE", [2, 16, 16]),
        ("VIT.LARA", True),
        ("VIT.POS_EMBED", "sinusoid"),
        ("MODEL.ACT_CHECKPOINT", 2),
    ],
)
def test_key_with_a_different_meaning_is_refused_and_nothing_is_added(checkout, key, value):
    tree, registry = checkout
    node, _, name = key.rpartition(".")
    if node == "VIT":
        tree.VIT = CfgNode()
    (tree[node] if node else tree)[name] = value
    before = tree.clone()
    with pytest.raises(ConfigError, match=f"{key}.* default .* meanings differ"):
        plug_in()
    assert tree == before and "VisionTransformer" not in registry


def test_model_of_the_same_name_is_refused(checkout):
    _, registry = checkout
    registry.register(type("VisionTransformer", (), {"__module__": "slowfast.models.theirs"}))
    with pytest.raises(ImportError, match="own model VisionTransformer.*slowfast.mod"):
        plug_in()


@pytest.mark.parametrize(
    "node, key, value, words",
    [
        ("VIT", "ATTN_LAYER", "trajectori", "must be one of trajectory, joint, divided"),
        ("VIT", "DEPTH", 0, "VIT.DEPTH is 0.*at least 1"),
        ("VIT", "DROP_PATH", 1.0, "VIT.DROP_PATH is 1.0.*below 1"),
        ("VIT", "NUM_HEADS", 5, "a multiple of VIT.NUM_HEADS"),
        ("VIT", "APPROX_ATTN_TYPE", "lora", "VIT.APPROX_ATTN_TYPE is 'lora'.*none"),
        ("DATA", "NUM_FRAMES", 8, r"VIT.TEMPORAL_RESOLUTION \* VIT.PATCH_SIZE_TEMP"),
        ("MODEL", "ARCH", "slowfast", "one pathway.*2d, c2d"),
        ("MODEL", "HEAD_ACT", "sigmoid", "must be 'softmax'"),
        ("DETECTION", "ENABLE", True, "must be False"),
        ("MASK", "ENABLE", True, "MASK.ENABLE is True; must be False"),
        ("MULTIGRID", "SHORT_CYCLE", True, "must be False"),
        ("MULTIGRID", "LONG_CYCLE", True, "must be False"),
    ],
)
def test_unsupported_config_is_refused_in_one_line(checkout, node, key, value, words):
    tree, registry = checkout
    plug_in()
    cfg = with_model(tree)
    cfg[node][key] = value
    with pytest.raises(ConfigError, match=words) as refused:
        registry.get("VisionTransformer")(cfg)
    assert "\n" not in str(refused.value)


def test_differences_are_logged(checkout, caplog):
    tree, registry = checkout
    plug_in()
    build, cfg = registry.get("VisionTransformer"), with_model(tree)
    cfg.LOG_MODEL_INFO = False
    build(cfg)
    assert not caplog.records
    cfg.SOLVER.LAYER_DECAY = 0.75
    build(cfg)
    assert "MVIT.DEPTH (16): set MVIT.DEPTH to VIT.DEPTH (2)" in caplog.text
    caplog.clear()
    cfg.MVIT.DEPTH = 2
    build(cfg)
    assert not caplog.records
    cfg.LOG_MODEL_INFO = True
    build(cfg)
    assert "LOG_MODEL_INFO does not count" in caplog.text


def test_training_starts_from_image_weights(checkout, tmp_path):
    tree, registry = checkout
    plug_in()
    weights = tmp_path / "image.pth"
    torch.save(vit(dim=24, depth=2, patch=8, grid=28, pre_logits=False), weights)
    cfg = with_model(tree, IM_PRETRAINED=True, PRETRAINED_WEIGHTS=str(weights))
    build, image = registry.get("VisionTransformer"), torch.load(weights)
    assert torch.equal(build(cfg).cls_token.detach(), image["cls_token"])
    for node, key, value in (("TRAIN", "ENABLE", False), ("TRAIN", "CHECKPOINT_FILE_PATH", "x")):
        other = cfg.clone()
        other[node][key] = value
        assert not torch.equal(build(other).cls_token.detach(), image["cls_token"])


def test_missing_image_weights(checkout, caplog):
    tree, registry = checkout
    plug_in()
    build = registry.get("VisionTransformer")
    with pytest.raises(ConfigError, match="VIT.PRETRAINED_WEIGHTS is 'no.pth'.*existing file"):
        build(with_model(tree, IM_PRETRAINED=True, PRETRAINED_WEIGHTS="no.pth"))
    build(with_model(tree, IM_PRETRAINED=True))
    assert "VIT.PRETRAINED_WEIGHTS is not set" in caplog.text


def test_checkout_without_optional_keys(checkout):
    """A fork may lack keys that only other models read."""
    tree, registry = checkout
    for node, key in (
        ("MODEL", "MULTI_PATHWAY_ARCH"),
        ("MODEL", "HEAD_ACT"),
        ("BN", "WEIGHT_DECAY"),
    ):
        del tree[node][key]
    del tree["DETECTION"]
    plug_in()
    assert registry.get("VisionTransformer")(with_model(tree)).blocks


def test_config_in_the_docs(checkout):
    tree, registry = checkout
    plug_in()
    text = PAGE.read_text().split("```yaml\n")[1].split("```")[0]
    cfg = tree.clone()
    cfg.merge_from_other_cfg(CfgNode(yaml.safe_load(text)))
    cfg.TRAIN.CHECKPOINT_FILE_PATH = "some checkpoint"
    with torch.device("meta"):
        model = registry.get(cfg.MODEL.MODEL_NAME)(cfg)
    assert len(model.blocks) == 12 and model.num_frames == 8


@pytest.mark.parametrize(
    "node, key, words",
    [
        (
            "SOLVER",
            "USE_MIXED_PRECISION",
            "Motionformer, which has this model .*slowfast_lara.load",
        ),
        ("TRAIN", None, "early checkout of PySlowFast, without TRAIN.MIXED_PRECISION.*update"),
    ],
)
def test_motionformer_and_early_checkouts_are_named(checkout, monkeypatch, node, key, words):
    tree, registry = checkout
    monkeypatch.setattr(sys.modules["slowfast.config.defaults"], "__file__", "a.py", raising=False)
    del tree["TRAIN"]["MIXED_PRECISION"]
    if key:
        tree[node][key] = True
    before = tree.clone()
    with pytest.raises(ImportError, match=f"a.py: it is from .*{words}") as error:
        plug_in()
    assert "1.0" not in str(error.value) and "uninstall" not in str(error.value)
    assert tree == before and "VisionTransformer" not in registry


def test_pyslowfast_1_is_refused():
    with pytest.raises(ImportError, match="pyslowfast 1.0.*git checkout"):
        plug_in()
    assert "slowfast_lara.plugin" not in sys.modules


def test_pyslowfast_missing(monkeypatch):
    class Nowhere:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.split(".")[0] == "slowfast":
                raise ModuleNotFoundError(name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == "slowfast"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Nowhere, *sys.meta_path])
    with pytest.raises(ImportError, match="PySlowFast not found"):
        plug_in()
    monkeypatch.delitem(sys.modules, "slowfast_lara.config.defaults")
    with pytest.raises(InputError, match="pip install pyslowfast"):
        importlib.import_module("slowfast_lara.config.defaults")


def test_model_and_attention_do_not_import_pyslowfast():
    names = ["attention", "models", "config.keys", "config.validate", "config.checkouts", "data"]
    program = f"""
import importlib, pkgutil, sys
sys.modules["slowfast"] = None
for name in {names}:
    package = importlib.import_module("slowfast_lara." + name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        if ".triton_" not in found.name and "ahead_of_time" not in found.name:
            importlib.import_module(found.name)
"""
    done = checkout_run("-c", program)
    assert done.returncode == 0, done.stderr
