"""Selective activation checkpointing: equal gradients, no second attention, less memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.config import load_config
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.space_time import ATTENTION_LAYERS

KEEPS = {
    "all": [],
    "attention": ["MODEL.ACT_CHECKPOINT", True, "VIT.ACT_CHECKPOINT_KEEP", "attention"],
    "nothing": ["MODEL.ACT_CHECKPOINT", True],
}


class LiveBytes(TorchDispatchMode):
    """Counts operators, and the bytes of tensors made within the context that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if torch.is_tensor(x)}
        for x in tree_leaves(out):
            if torch.is_tensor(x) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def step(keep: str, *opts):
    """Return logits, gradients, stored bytes, and operators of the forward and backward pass."""
    cfg = load_config("quick/softmax", [*KEEPS[keep], "VIT.DROP", 0.1, *opts])
    torch.manual_seed(0)
    model = VisionTransformer.from_config(cfg).train()
    size = cfg.DATA.TRAIN_CROP_SIZE
    clip = torch.randn(2, 3, cfg.DATA.NUM_FRAMES, size, size)
    with LiveBytes() as forward:
        logits = model([clip])
        loss = logits.square().sum()
    stored = forward.bytes()
    with LiveBytes() as backward:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, stored, forward.calls, backward.calls


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ["none", *ESTIMATORS])
def test_gradients_are_equal(name, layer):
    opts = ["VIT.APPROX_ATTN_TYPE", name, "VIT.APPROX_ATTN_DIM", 4, "VIT.ATTN_LAYER", layer]
    logits, gradients, *_ = step("all", *opts, "VIT.DEPTH", 2)
    for keep in ("attention", "nothing"):
        again, kept_gradients, *_ = step(keep, *opts, "VIT.DEPTH", 2)
        assert torch.equal(again, logits) and kept_gradients.keys() == gradients.keys()
        for key in gradients:
            assert torch.equal(kept_gradients[key], gradients[key]), key


def test_attention_is_kept_and_the_rest_computed_again():
    found = {keep: step(keep) for keep in KEEPS}
    attention, linear = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::addmm"
    once = found["all"][3][attention]
    assert once > 0
    assert {keep: x[4][attention] for keep, x in found.items()} == {
        "all": 0,
        "attention": 0,
        "nothing": once,
    }
    assert found["attention"][4][linear] == found["nothing"][4][linear] > found["all"][4][linear]
    stored = [found[keep][2] for keep in ("nothing", "attention", "all")]
    assert stored == sorted({*stored})
