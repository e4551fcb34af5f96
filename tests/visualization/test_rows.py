"""Rows of joint and divided attention, and CLS's rollout, against whole matrices in float64."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.inference.load import load
from slowfast_lara.visualization.attention_rows import (
    attention_rows,
    cls_rollout,
    given_layers,
    one_token,
)
from slowfast_lara.visualization.scene import Scene
from slowfast_lara.visualization.trajectories import Point
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
    return given_layers(model.network, view)


def exact_matrices(given) -> torch.Tensor:
    """[h,1+N,1+N] in float64, row by row: CLS sees all, a patch its group and CLS."""
    layer, tokens, _ = given
    q, k, _ = (x[0].double() for x in layer.queries_keys_values(tokens))
    frame, place = (torch.arange(FRAMES * PATCHES) // PATCHES), torch.arange(FRAMES * PATCHES)
    place = place % PATCHES
    rows = torch.zeros(HEADS, 1 + FRAMES * PATCHES, 1 + FRAMES * PATCHES, dtype=torch.float64)
    for n in range(rows.shape[1]):
        if n == 0 or not hasattr(layer, "over_time"):
            group = torch.ones(FRAMES * PATCHES, dtype=torch.bool)
        elif layer.over_time:
            group = place == place[n - 1]
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
    shares = torch.rand(1 + FRAMES * PATCHES)
    for given in blocks[1]:
        expected = torch.einsum("n,hnm->hm", shares.double(), exact_matrices(given))
        torch.testing.assert_close(
            attention_rows(given, shares).rows.double(), expected, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("attention", ESTIMATORS)
def test_rows_make_the_output(tmp_path, layer, attention):
    """Of CLS and of patches, by every estimator; the layer's hooks are gone then."""
    for given in blocks_of(small(tmp_path, layer, attention))[1]:
        values = given.layer.queries_keys_values(given.tokens)[2][0]
        for token in (0, 1, 20, FRAMES * PATCHES):
            mixed = attention_rows(given, one_token(given, token))
            made = torch.einsum("hm,hmd->hd", mixed.rows, values)
            torch.testing.assert_close(made, mixed.output[token], atol=2e-5, rtol=1e-4)
        assert not given.layer.qkv._forward_hooks and not given.layer.proj._forward_pre_hooks


@pytest.mark.parametrize("layer", LAYERS)
def test_rollout_is_the_product_of_all_layers(tmp_path, layer):
    blocks = blocks_of(small(tmp_path, layer))
    whole = torch.eye(1 + FRAMES * PATCHES, dtype=torch.float64)
    for given in (given for block in blocks for given in block):
        matrix = exact_matrices(given).mean(0)
        whole = (torch.eye(len(matrix)) + matrix) / 2 @ whole
    found = cls_rollout(blocks)
    torch.testing.assert_close(found.double(), whole[0], atol=1e-5, rtol=0)
    assert found.sum().item() == pytest.approx(1, abs=1e-5)


def test_a_divided_patch_sees_through_time(tmp_path, clips):
    """Its frame's tokens in place, and each of these at its own place in other frames."""
    scene = Scene(small(tmp_path, "divided"), clips[0])
    over_time, over_space = (exact_matrices(given) for given in scene._blocks[1])
    token = 1 + scene.grid.token(Point(20, 10, 3))
    for head in (None, 1):
        space = over_space.mean(0) if head is None else over_space[head]
        expected = (space[token] @ over_time.mean(0))[1:].unflatten(0, (FRAMES, PATCHES))
        (picture,) = scene.look(Point(20, 10, 3), ["softmax"], head)
        np.testing.assert_allclose(picture.weights, expected, atol=1e-5)
        assert (picture.weights.sum(1) > 0).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_other_estimators_are_those_of_a_swapped_model(tmp_path, clips, layer):
    """In the first layer, which is given the same tokens whatever the attention."""
    model = small(tmp_path, layer)
    pictures = Scene(model, clips[0], 0).look(Point(9, 9, 2), list(ESTIMATORS))
    for picture in pictures[1:]:
        swapped = Scene(model.with_attention(picture.name), clips[0], 0)
        (exact, own) = swapped.look(Point(9, 9, 2), ["softmax", picture.name])
        np.testing.assert_allclose(picture.weights, own.weights, atol=1e-6)
        np.testing.assert_allclose(exact.weights, pictures[0].weights, atol=1e-6)
        assert picture.output_error > 0
        assert picture.output_error == pytest.approx(own.output_error, rel=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_pictures_and_numbers(tmp_path, clips, capsys, layer):
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
    assert 0 < np.sum(point["attention"]["softmax"]["weights"]) < 1  # the rest is of CLS
    # The estimators leave CLS out of the keys; over time, which is exact, it is one.
    lara = np.sum(point["attention"]["lara"]["weights"])
    assert lara == pytest.approx(1, abs=1e-4) if layer == "joint" else 0 < lara < 1
    printed = capsys.readouterr().out
    assert "cls.png" in printed and "what CLS takes, through all layers" in printed
    cls, point = (
        np.asarray(Image.open(out / f"{n}.png").convert("RGB")) for n in ("cls", "point_1")
    )
    assert cls.shape[1] == point.shape[1] and len(cls) < len(point) and cls.std() > 10
    with av.open(str(out / "cls.mp4")) as video:
        assert sum(1 for _ in video.decode(video=0)) == 3 * 2 * FRAMES
