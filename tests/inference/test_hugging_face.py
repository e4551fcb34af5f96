"""Folders of Hugging Face transformers in `load`, against transformers' own models."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import slowfast_lara
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import UserError, WeightsError
from slowfast_lara.inference.export import export
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.weights.pretrained import load_pretrained
from slowfast_lara.visualization.attention_view import AttentionView
from slowfast_lara.visualization.token_grid import QueryPoint
from tests.helpers.comparing import assert_close
from tests.helpers.hub_folders import KINDS, SIZES, hub_model, write_folder
from tests.helpers.videos import decode_all

over_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_folder(path, request.param)
    return path


def logits(network, clip):
    with torch.no_grad():
        return network.head(network.forward_features(clip))


@over_kinds
@pytest.mark.parametrize("sizes", SIZES, ids=("small", "no_bias"))
def test_logits_and_class_names(tmp_path, kind, sizes):
    model, _ = write_folder(tmp_path, kind, sizes)
    ours = slowfast_lara.load(tmp_path)
    side = sizes["image_size"]
    clip = torch.randn(2, sizes["frames"], 3, side, side)
    with torch.no_grad():
        expected = model(clip).logits
    assert expected.abs().max() > 0.1
    assert_close(logits(ours.network, clip.transpose(1, 2)), expected, 1e-5)
    assert ours.class_names == [f"name {number}" for number in range(sizes["classes"])]


@over_kinds
@pytest.mark.parametrize("short_side", [32, 37])
def test_preprocessing(tmp_path, clips, kind, short_side):
    """The pixels of a view equal those of the processor for the same frames."""
    _, processor = write_folder(tmp_path, kind, short_side=short_side)
    cfg = slowfast_lara.load(
        tmp_path, overrides=["TEST.NUM_ENSEMBLE_VIEWS", 1, "TEST.NUM_SPATIAL_CROPS", 1]
    ).cfg
    frames, fps = decode_all(clips[0])
    frames = [np.ascontiguousarray(frame[:, :41]) for frame in frames]  # not square
    indices = dataset_class(cfg, "TEST").view_frames(cfg, 0, 1, len(frames), fps)
    chosen = [frames[index] for index in indices]
    expected = torch.as_tensor(np.stack(processor(chosen)["pixel_values"][0]))
    (view,) = _views_of(np.stack(frames), cfg, fps)
    assert_close(view.transpose(0, 1), expected, 1e-5)


def _views_of(frames, cfg, fps):
    from slowfast_lara.data.sources import FrameArray

    return dataset_class(cfg, "TEST").read_views(FrameArray(frames, fps), cfg)


def test_every_attention(folder, clips):
    model = slowfast_lara.load(folder)
    for name in ESTIMATORS:
        scores = model.with_attention(name, num_landmarks=4)(clips[0], views=1).scores
        assert np.isfinite(scores).all() and abs(scores.sum() - 1) < 1e-5, name


def test_every_use(folder, clips, tmp_path):
    """Predictions, features, streams, pictures and exports."""
    model = slowfast_lara.load(folder)
    prediction = model(clips[0])
    assert model.class_names[prediction.top(1)[0][0]].startswith("name ")
    assert model.features(clips[0], views=1).shape == (24,)
    assert all(np.isfinite(window.scores).all() for window in model.stream(clips[0]))
    view = AttentionView(model, clips[0])
    maps = view.attention_maps(QueryPoint(16, 16, 1), ["softmax", "lara"])
    assert maps[0].weights.shape == (view.grid.num_frames, view.grid.side**2)
    assert maps[0].weights.sum() <= 1 + 1e-5
    export(model, tmp_path / "out", "safetensors")
    again = slowfast_lara.load(tmp_path / "out")
    assert np.array_equal(again(clips[0]).scores, prediction.scores)


def interpolation(old, new, cubic):
    """Float64 weights [new, old] of linear or cubic interpolation between pixel centres."""
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        position = (i + 0.5) * old / new - 0.5
        if not cubic:
            position = min(max(position, 0), old - 1)
        first = math.floor(position)
        for j in range(first - 1, first + 3):
            x, a = abs(position - j), -0.75  # cubic convolution of Keys, 1981
            weight = max(0.0, 1 - x)
            if cubic and x <= 1:
                weight = (a + 2) * x**3 - (a + 3) * x**2 + 1
            elif cubic:
                weight = a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0
            matrix[i, min(max(j, 0), old - 1)] += weight
    return matrix


def resized(positions, frames, side, new_frames, new_side):
    """Position embeddings [1,F*P,D] for other frames and sides, [1,F'*P',D]."""
    space = interpolation(side, new_side, cubic=True)
    grid = positions.double().reshape(frames, side, side, -1)
    time = interpolation(frames, new_frames, cubic=False)
    grid = torch.einsum("fthwd,yh,xw->fyxd", (time[:, :, None, None, None] * grid), space, space)
    return grid.flatten(0, 2)[None].float()


def with_other_clips(model, kind, frames, crop):
    """transformers' model for clips of another size, with the same weights."""
    larger = hub_model(kind, **{**SIZES[0], "frames": frames, "image_size": crop})
    base, new_base = getattr(model, kind).embeddings, getattr(larger, kind).embeddings
    tubelet = 1 if kind == "timesformer" else 2
    old, new = (4 // tubelet, 32 // 8), (frames // tubelet, crop // 8)
    states = {**larger.state_dict(), **model.state_dict()}
    positions = base.position_embeddings.detach()
    if kind == "vivit":
        patches = resized(positions[:, 1:], *old, *new)
        states["vivit.embeddings.position_embeddings"] = torch.cat((positions[:, :1], patches), 1)
    elif kind == "videomae":
        new_base.position_embeddings = resized(positions, *old, *new)
    else:
        patches = resized(positions[:, 1:], 1, old[1], 1, new[1])
        name = "timesformer.embeddings."
        states[name + "position_embeddings"] = torch.cat((positions[:, :1], patches), dim=1)
        times = base.time_embeddings.detach()
        states[name + "time_embeddings"] = resized(times, old[0], 1, new[0], 1)
    larger.load_state_dict(states)
    return larger


@over_kinds
@pytest.mark.parametrize("frames, crop", [(8, 32), (4, 48), (10, 64), (2, 16)])
def test_other_frames_and_crops(tmp_path, clips, kind, frames, crop):
    """Positions are resized for overrides of the number of frames and the crop."""
    model, _ = write_folder(tmp_path, kind, short_side=40)
    opts = ["DATA.NUM_FRAMES", str(frames), "DATA.TEST_CROP_SIZE", crop]
    ours = slowfast_lara.load(tmp_path, overrides=opts)
    clip = torch.randn(2, frames, 3, crop, crop)
    with torch.no_grad():
        expected = with_other_clips(model, kind, frames, crop)(clip).logits
    assert_close(logits(ours.network, clip.transpose(1, 2)), expected, 1e-5)
    assert ours.cfg.DATA.TEST_SHORT_SIDE == crop * 40 // 32
    scores = ours(clips[0]).scores
    assert np.isfinite(scores).all() and abs(scores.sum() - 1) < 1e-5
    export(ours, tmp_path / "out", "safetensors")
    assert np.array_equal(slowfast_lara.load(tmp_path / "out")(clips[0]).scores, scores)


@pytest.mark.parametrize(
    "opts, word",
    [
        ({"DATA.NUM_FRAMES": 7}, "DATA.NUM_FRAMES is 7"),
        ({"DATA.NUM_FRAMES": "many"}, "DATA.NUM_FRAMES is 'many'"),
        ({"DATA.NUM_FRAMES": -4}, "DATA.NUM_FRAMES is -4"),
        ({"DATA.TEST_CROP_SIZE": 36}, "DATA.TEST_CROP_SIZE is 36"),
        ({"DATA.TEST_CROP_SIZE": 64, "DATA.TEST_SHORT_SIDE": 40}, "DATA.TEST_SHORT_SIDE is 40"),
        ({"VIT.TEMPORAL_RESOLUTION": 4}, "DATA.NUM_FRAMES is 4"),
        ({"VIT.POS_NUM_FRAMES": 3}, "VIT.POS_NUM_FRAMES is 3"),
    ],
    ids=str,
)
def test_invalid_frames_and_crops(tmp_path, opts, word):
    write_folder(tmp_path, "vivit")
    with pytest.raises(UserError) as caught:
        slowfast_lara.load(tmp_path, overrides=opts)
    assert word in str(caught.value) and "\n" not in str(caught.value)


@over_kinds
def test_start_of_a_larger_model(tmp_path, kind):
    """A file starts a model whose own positions are for more frames and pixels."""
    model, _ = write_folder(tmp_path, kind)
    del model
    cfg = slowfast_lara.load(tmp_path).cfg.clone()
    cfg.defrost()
    cfg.VIT.TEMPORAL_RESOLUTION *= 2
    cfg.VIT.POS_NUM_FRAMES *= 2
    cfg.VIT.POS_CROP_SIZE = 64
    network = VisionTransformer.from_config(cfg)
    load_pretrained(network, tmp_path / "model.safetensors")
    frames = cfg.VIT.TEMPORAL_RESOLUTION * cfg.VIT.PATCH_SIZE_TEMP
    assert network.train()(torch.randn(1, 3, frames, 64, 64)).isfinite().all()


def published(name):
    """The name of a parameter in published files, which older versions of transformers wrote."""
    words = {"q": "query", "k": "key", "v": "value"}
    name = re.sub(r"([qkv])_proj", lambda match: f"attention.{words[match[1]]}", name)
    if name.startswith("videomae"):
        name = name.replace("query.bias", "q_bias").replace("value.bias", "v_bias")
    return name.replace("attention.o_proj", "attention.output.dense")


def test_published_names(folder, tmp_path):
    """Names and config keys of the files on the Hub, in PyTorch's format."""
    for name in ("config.json", "preprocessor_config.json"):
        content = json.loads((folder / name).read_text())
        content.pop("offset", None)
        if "qv_bias" in content:
            content["qkv_bias"] = content.pop("qv_bias")
        (tmp_path / name).write_text(json.dumps(content))
    weights = {published(name): x for name, x in load_file(folder / "model.safetensors").items()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    own, other = (slowfast_lara.load(x).network.state_dict() for x in (folder, tmp_path))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_sharded_weights(folder, tmp_path):
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    weights = load_file(folder / "model.safetensors")
    shards = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for shard in set(shards.values()):
        save_file({x: weights[x] for x in weights if shards[x] == shard}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    own, other = (slowfast_lara.load(x).network.state_dict() for x in (folder, tmp_path))
    assert all(torch.equal(own[name], other[name]) for name in own)
    index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(WeightsError, match="weight_map"):
        slowfast_lara.load(tmp_path)
