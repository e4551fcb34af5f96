"""Folders of Hugging Face transformers in `load`, against transformers' own models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.videomae.image_processing_pil_videomae import VideoMAEImageProcessorPil

import slowfast_lara
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import UserError, WeightsError
from slowfast_lara.inference.export import export
from slowfast_lara.inference.hugging_face import config_tree, read_hub_folder
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.weights.pretrained import load_pretrained
from slowfast_lara.visualization.attention_view import AttentionView
from slowfast_lara.visualization.token_grid import QueryPoint
from tests.helpers.comparing import assert_close
from tests.helpers.videos import decode_all

KINDS = ("vivit", "videomae", "timesformer")
over_kinds = pytest.mark.parametrize("kind", KINDS)
WIDTH = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 50}
SIZES = [
    {"image_size": 32, "frames": 4, "patch": 8, "depth": 2, "classes": 5, **WIDTH},
    {"image_size": 48, "frames": 6, "patch": 16, "depth": 1, "classes": 3, "hidden_size": 40,
     "num_attention_heads": 5, "intermediate_size": 97, "qkv_bias": False},
]  # fmt: skip


def hub_model(kind, *, image_size, frames, patch, depth, classes, qkv_bias=True, **sizes):
    """A model of transformers with random weights, also of norms and biases."""
    names = {number: f"name {number}" for number in range(classes)}
    shared = {
        "image_size": image_size,
        "num_frames": frames,
        "num_hidden_layers": depth,
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        **sizes,
    }
    torch.manual_seed(len(kind) + depth)
    if kind == "vivit":
        config = transformers.VivitConfig(
            tubelet_size=[2, patch, patch], qkv_bias=qkv_bias, **shared
        )
        model = transformers.VivitForVideoClassification(config)
    elif kind == "videomae":
        config = transformers.VideoMAEConfig(patch_size=patch, qv_bias=qkv_bias, **shared)
        model = transformers.VideoMAEForVideoClassification(config)
    else:
        config = transformers.TimesformerConfig(patch_size=patch, qkv_bias=qkv_bias, **shared)
        model = transformers.TimesformerForVideoClassification(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def processor_of(kind, **arguments):
    if kind == "vivit":
        return transformers.VivitImageProcessor(**arguments)
    return VideoMAEImageProcessorPil(**arguments)


def write_folder(folder, kind, sizes=SIZES[0], short_side=None):
    """The model and its processor, saved by transformers."""
    model = hub_model(kind, **sizes)
    model.save_pretrained(folder)
    crop = sizes["image_size"]
    processor = processor_of(
        kind,
        size={"shortest_edge": short_side or crop},
        crop_size={"height": crop, "width": crop},
        image_mean=[0.4, 0.45, 0.5],
        image_std=[0.2, 0.25, 0.3],
    )
    processor.save_pretrained(folder)
    return model, processor


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


@over_kinds
def test_longer_clips_and_larger_crops(tmp_path, kind):
    """A file starts a model with more frames and pixels: its positions are resized."""
    model, _ = write_folder(tmp_path, kind)
    del model
    cfg = slowfast_lara.load(tmp_path).cfg.clone()
    cfg.defrost()
    cfg.VIT.TEMPORAL_RESOLUTION *= 2
    cfg.VIT.POS_CROP_SIZE = 64
    network = VisionTransformer.from_config(cfg)
    load_pretrained(network, tmp_path / "model.safetensors")
    frames = cfg.VIT.TEMPORAL_RESOLUTION * cfg.VIT.PATCH_SIZE_TEMP
    assert network.train()(torch.randn(1, 3, frames, 64, 64)).isfinite().all()


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


@pytest.mark.parametrize(
    "name, config",
    [
        ("videomae_224_16x4", transformers.VideoMAEConfig()),
        ("vivit_224_32x2", transformers.VivitConfig()),
        ("timesformer_224_8x32", transformers.TimesformerConfig()),
    ],
)
def test_shipped_configs_are_those_of_the_base_models(tmp_path, name, config):
    """The settings of a folder with the defaults of transformers, which are the base models'."""
    config.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="model.safetensors"):
        read_hub_folder(str(tmp_path))
    tree = config_tree(str(tmp_path))
    shipped = slowfast_lara.load_config(f"K400/{name}")
    for key, value in tree["VIT"].items():
        assert shipped.VIT[key] == value, key
    assert shipped.DATA.NUM_FRAMES == tree["DATA"]["NUM_FRAMES"]
    assert shipped.DATA.SAMPLING_RATE == tree["DATA"]["SAMPLING_RATE"]
    assert shipped.TEST.NUM_ENSEMBLE_VIEWS == tree["TEST"]["NUM_ENSEMBLE_VIEWS"]


def changed_folder(folder, tmp_path, *, config=None, processor=None, weights=None):
    for name, changes in (("config.json", config), ("preprocessor_config.json", processor)):
        content = json.loads((folder / name).read_text())
        content.update(changes or {})
        (tmp_path / name).write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    if weights:
        weights(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def error_of(folder) -> str:
    with pytest.raises(UserError) as caught:
        slowfast_lara.load(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def test_foreign_and_missing_weights_are_refused(folder, tmp_path):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    block = f"{kind}.encoder.layer.0."

    def foreign(tensors):
        tensors[block + "attention.q_norm.weight"] = torch.ones(8)

    def decoder(tensors):
        tensors["decoder.head.weight"] = torch.ones(8)

    def missing(tensors):
        del tensors[block + "output.dense.bias"]

    for change, word in (
        (foreign, "blocks.0.attention.q_norm.weight is not in the model"),
        (decoder, "decoder.head.weight is not in the model"),
        (missing, "has no blocks.0.mlp.fc2.bias"),
    ):
        assert word in error_of(changed_folder(folder, tmp_path, weights=change))


HOSTILE = [
    ({"model_type": "hiera"}, "model_type is 'hiera'; must be one of vivit, videomae"),
    ({"model_type": ["vivit"]}, "model_type"),
    ({"architectures": ["VideoMAEForPreTraining"]}, "architectures"),
    ({"hidden_size": -3}, "hidden_size is -3"),
    ({"hidden_size": 10**9}, "hidden_size"),
    ({"hidden_size": "24"}, "hidden_size"),
    ({"hidden_size": 32}, "VIT.EMBED_DIM is 32"),
    ({"hidden_size": 48}, "instead of"),
    ({"num_hidden_layers": 50_000}, "blocks; VIT.DEPTH is 50000"),
    ({"num_hidden_layers": 1}, "not in the model"),
    ({"num_attention_heads": 5}, "VIT.NUM_HEADS (5)"),
    ({"image_size": 1_000_000}, "image_size"),
    ({"image_size": [32, 48]}, "image_size"),
    ({"image_size": 33}, "image_size is 33; must be a multiple"),
    ({"num_frames": True}, "num_frames is True"),
    ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ({"hidden_act": {}}, "hidden_act"),
    ({"layer_norm_eps": 0}, "layer_norm_eps"),
    ({"layer_norm_eps": "small"}, "layer_norm_eps"),
    ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
    ({"id2label": [1, 2]}, "id2label"),
    ({"id2label": {"0": "a"}}, "instead of"),
    ({"num_channels": 4}, "VIT.CHANNELS"),
]


@pytest.mark.parametrize("config, word", HOSTILE, ids=lambda x: str(x)[:40])
def test_hostile_configs_give_one_line(folder, tmp_path, config, word):
    assert word in error_of(changed_folder(folder, tmp_path, config=config))


@pytest.mark.parametrize(
    "processor, word",
    [
        ({"do_center_crop": False}, "do_center_crop"),
        ({"resample": 3}, "resample is 3; must be 2"),
        ({"size": {"height": 32, "width": 48}}, "size"),
        ({"size": {"shortest_edge": 16}}, "at least crop_size"),
        ({"crop_size": {"height": 32, "width": 40}}, "crop_size"),
        ({"image_std": [0.1, 0.0, 0.2]}, "image_std"),
        ({"image_mean": [0.1, 0.2]}, "image_mean"),
        ({"rescale_factor": "big"}, "rescale_factor"),
        ({"do_normalize": 1}, "do_normalize"),
        ({"crop_size": 30, "size": 30}, "DATA.TRAIN_CROP_SIZE is 30"),
    ],
    ids=str,
)
def test_unsupported_processors_are_refused(folder, tmp_path, processor, word):
    assert word in error_of(changed_folder(folder, tmp_path, processor=processor))


def test_other_attentions_of_the_models_are_refused(tmp_path):
    write_folder(tmp_path, "timesformer")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "attention_type": "space_only"}))
    assert "attention_type is 'space_only'" in error_of(tmp_path)
    path.write_text(json.dumps({**content, "model_type": "videomae", "use_mean_pooling": False}))
    assert "use_mean_pooling" in error_of(tmp_path)


def test_damaged_json(folder, tmp_path):
    changed_folder(folder, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("[1")
    assert "cannot read" in error_of(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    assert slowfast_lara.load(tmp_path).cfg.DATA.TEST_CROP_SIZE == 32
    (tmp_path / "model.safetensors").unlink()
    assert "cannot read" in error_of(tmp_path)
    (tmp_path / "config.json").write_text("{" * 100_000)
    assert "config.json" in error_of(tmp_path)
