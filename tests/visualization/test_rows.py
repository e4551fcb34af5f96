"""Attention rows of joint and divided layers, and CLS rollout, against float64 matrices."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.inference.load import load
from slowfast_lara.models.attention_config import RECOMMENDED
from slowfast_lara.visualization.attention_view import AttentionView
from slowfast_lara.visualization.implied_weights import (
    attention_rows,
    capture_layers,
    cls_rollout,
    one_hot,
)
from slowfast_lara.visualization.token_grid import QueryPoint
from tests.helpers.commands import visualize as main
from tests.helpers.small_models import small_config, write_model

FRAMES, PATCHES, HEADS = 3, 16, 2
LAYERS = ("joint", "divided")


def config(layer: str, attention: str) -> dict:
    vit = {"ATTN_LAYER": layer, "APPROX_ATTN_TYPE": attention, "TEMPORAL_RESOLUTION": FRAMES}
    cfg = small_config(**vit)
    cfg["DATA"]["NUM_FRAMES"] = 2 * FRAMES
    return cfg


def small(folder, layer: str, attention: str = "softmax"):
    files = write_model(folder, config(layer, attention))
    return load(files.cfg, files.checkpoint, overrides=["TEST.NUM_SPATIAL_CROPS", 1])


def blocks_of(model):
    view = torch.randn(3, 2 * FRAMES, 32, 32, generator=torch.Generator().manual_seed(0))
    return capture_layers(model.network, view)


def exact_matrices(call) -> torch.Tensor:
    """[h,1+N,1+N] in float64: CLS attends to all tokens, a patch to its group and CLS."""
    layer, tokens, _ = call
    q, k, _ = (x[0].double() for x in layer.queries_keys_values(tokens))
    frame = torch.arange(FRAMES * PATCHES) // PATCHES
    position = torch.arange(FRAMES * PATCHES) % PATCHES
    rows = torch.zeros(HEADS, 1 + FRAMES * PATCHES, 1 + FRAMES * PATCHES, dtype=torch.float64)
    for n in range(rows.shape[1]):
        if n == 0 or not hasattr(layer, "over_time"):
            group = torch.ones(FRAMES * PATCHES, dtype=torch.bool)
        elif layer.over_time:
            group = position == position[n - 1]
        else:
            group = frame == frame[n - 1]
        keys = torch.cat((torch.tensor([0]), 1 + group.nonzero().flatten()))
        logits = torch.einsum("hd,hmd->hm", q[:, n], k[:, keys]) / q.shape[-1] ** 0.5
        rows[:, n, keys] = logits.softmax(-1)
    return rows


@pytest.mark.parametrize("layer", LAYERS)
def test_exact_rows_are_the_softmax(tmp_path, layer):
    blocks = blocks_of(small(tmp_path, layer))
    assert [len(block) for block in blocks] == [1 if layer == "joint" else 2] * 2
    query_weights = torch.rand(1 + FRAMES * PATCHES)
    for call in blocks[1]:
        expected = torch.einsum("n,hnm->hm", query_weights.double(), exact_matrices(call))
        found = attention_rows(call, query_weights).weights.double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("attention", ESTIMATORS)
def test_rows_times_values_are_the_output(tmp_path, layer, attention):
    """For CLS and patches, with every estimator."""
    for call in blocks_of(small(tmp_path, layer, attention))[1]:
        values = call.layer.queries_keys_values(call.tokens)[2][0]
        for token in (0, 1, 20, FRAMES * PATCHES):
            rows, output = attention_rows(call, one_hot(call, token))
            expected = torch.einsum("hm,hmd->hd", rows, values)
            torch.testing.assert_close(expected, output[token], atol=2e-5, rtol=1e-4)
        assert not call.layer(call.tokens, FRAMES).requires_grad  # the hooks are removed


@pytest.mark.parametrize("layer", LAYERS)
def test_rollout_is_the_product_of_all_layers(tmp_path, layer):
    blocks = blocks_of(small(tmp_path, layer))
    product = torch.eye(1 + FRAMES * PATCHES, dtype=torch.float64)
    for call in (call for block in blocks for call in block):
        matrix = exact_matrices(call).mean(0)
        product = (torch.eye(len(matrix)) + matrix) / 2 @ product
    found = cls_rollout(blocks)
    torch.testing.assert_close(found.double(), product[0], atol=1e-5, rtol=0)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)


def test_divided_attention_is_over_space_then_time(tmp_path, clips):
    """A patch attends to its frame, and each patch there to its position in other frames."""
    view = AttentionView(small(tmp_path, "divided"), clips[0])
    over_time, over_space = (exact_matrices(call) for call in view.blocks[1])
    token = 1 + view.grid.token(QueryPoint(20, 10, 3))
    for head in (None, 1):
        space = over_space.mean(0) if head is None else over_space[head]
        expected = (space[token] @ over_time.mean(0))[1:].unflatten(0, (FRAMES, PATCHES))
        (exact,) = view.attention_maps(QueryPoint(20, 10, 3), ["softmax"], head)
        np.testing.assert_allclose(exact.weights, expected, atol=1e-5)
        assert (exact.weights.sum(1) > 0).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_other_estimators_equal_a_model_with_them(tmp_path, clips, layer):
    """In the first layer, whose tokens do not depend on the attention."""
    model = small(tmp_path, layer)
    point, attentions = QueryPoint(9, 9, 2), {name: (name, {}) for name in ESTIMATORS}
    attentions |= RECOMMENDED
    maps = AttentionView(model, clips[0], 0).attention_maps(point, list(attentions))
    for found in maps[1:]:
        name, options = attentions[found.name]
        swapped = AttentionView(model.with_attention(name, **options), clips[0], 0)
        exact, own = swapped.attention_maps(point, ["softmax", name])
        np.testing.assert_allclose(found.weights, own.weights, atol=1e-6)
        np.testing.assert_allclose(exact.weights, maps[0].weights, atol=1e-6)
        assert found.output_error > 0
        assert found.output_error == pytest.approx(own.output_error, rel=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_figures_and_json(tmp_path, clips, capsys, layer):
    files, out = write_model(tmp_path, config(layer, "lara")), tmp_path / "out"
    names = ["--estimators", "lara,nystrom", "--moving", "2"]
    assert main([*files.flags(), *names, "--out", str(out), clips[0]]) == 0
    made = [
        f"{name}.{suffix}" for name in ("cls", "point_1", "point_2") for suffix in ("mp4", "png")
    ]
    assert sorted(path.name for path in out.iterdir()) == [*made, "trajectories.json"]
    facts = json.loads((out / "trajectories.json").read_text())
    assert np.array(facts["cls"]["weights"]).shape == (FRAMES, PATCHES)
    (point, _) = facts["points"]
    assert list(point["attention"]) == ["softmax", "lara", "nystrom"]
    assert 0 < np.sum(point["attention"]["softmax"]["weights"]) < 1  # CLS has the rest
    # CLS is not a key of the estimators; it is one over time, where attention is exact.
    lara = np.sum(point["attention"]["lara"]["weights"])
    assert lara == pytest.approx(1, abs=1e-4) if layer == "joint" else 0 < lara < 1
    printed = capsys.readouterr().out
    assert "cls.png" in printed and "rollout of CLS" in printed
    cls, point = (
        np.asarray(Image.open(out / f"{n}.png").convert("RGB")) for n in ("cls", "point_1")
    )
    assert cls.shape[1] == point.shape[1] and len(cls) < len(point) and cls.std() > 10
    with av.open(str(out / "cls.mp4")) as video:
        assert sum(1 for _ in video.decode(video=0)) == 3 * 2 * FRAMES
