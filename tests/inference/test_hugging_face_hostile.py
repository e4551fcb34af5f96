"""Hostile and inconsistent Hugging Face folders: one clear line, no memory, no traceback."""

from __future__ import annotations

import json
import random
import resource
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

import slowfast_lara
from slowfast_lara.errors import UserError
from tests.helpers.hub_folders import KINDS, write_folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_folder(path, request.param)
    return path


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
    assert message.isprintable() and len(message) < 1000
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

    def unprintable(tensors):
        tensors["a\nb\x1b" * 100] = torch.ones(8)

    for change, word in (
        (unprintable, "'a\\nb\\x1ba"),
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


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "..", "", "a\nb.safetensors",
             "a\0.safetensors", "x" * 300 + ".safetensors", "config.json", 3, None, ["x"]],
    ids=lambda name: repr(name)[:20],
)  # fmt: skip
def test_names_of_shards(folder, tmp_path, name):
    """Shards are safetensors files of the folder itself."""
    changed_folder(folder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    assert "weight_map" in error_of(tmp_path)


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


# Values for every key of both files: wrong types, huge, negative and fractional numbers.
VALUES = [
    None,
    True,
    -1,
    0,
    3,
    1.5,
    2**20,
    2**40,
    10**30,
    1e30,
    -1e300,
    "",
    "24",
    "\u6f22\n\u0000",
    [],
    [8, 8],
]
VALUES += [
    [[1, [2]]],
    {},
    {"height": [1], "shortest_edge": {}},
    float("nan"),
    float("inf"),
    "x" * 10**6,
]
MEMORY = 300 * 2**20


def assert_one_line(folder, what):
    """Load the folder: it works, or raises a one-line UserError."""
    before = peak_memory()
    try:
        slowfast_lara.load(folder)
    except UserError as error:
        message = str(error)
        assert "\n" not in message and message.isprintable() and len(message) < 1000, what
    assert peak_memory() - before < MEMORY, what


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_any_value_of_any_key(folder, tmp_path, name):
    changed_folder(folder, tmp_path)
    content = json.loads((tmp_path / name).read_text())
    for key in [*content, "num_labels", "tubelet_size", "attention_type", "qkv_bias", "offset"]:
        for value in VALUES:
            (tmp_path / name).write_text(json.dumps({**content, key: value}))
            assert_one_line(tmp_path, (key, repr(value)[:40]))
        (tmp_path / name).write_text(json.dumps({x: content[x] for x in content if x != key}))
        assert_one_line(tmp_path, f"{key} missing")


@pytest.mark.parametrize("seed", range(4))
def test_several_wrong_values(folder, tmp_path, seed):
    changed_folder(folder, tmp_path)
    rng = random.Random(seed)
    names = ("config.json", "preprocessor_config.json")
    contents = {name: json.loads((tmp_path / name).read_text()) for name in names}
    for _ in range(25):
        changes = {}
        for name, content in contents.items():
            keys = rng.sample([*content], 2)
            changes[name] = {key: rng.choice(VALUES) for key in keys}
            (tmp_path / name).write_text(json.dumps({**content, **changes[name]}))
        assert_one_line(tmp_path, repr(changes)[:300])


@pytest.mark.slow
def test_any_shape_of_any_tensor(folder, tmp_path):
    """Tensors that contradict config.json, or each other."""
    changed_folder(folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    changes = [
        lambda x: x.flatten(),
        lambda x: x[None],
        lambda x: x[:0],
        lambda x: x.flatten()[0],
        lambda x: torch.cat((x, x)),
        lambda x: x.long(),
        lambda x: x.expand(2, *x.shape).contiguous(),
    ]
    for name, x in tensors.items():
        change = changes[zlib.crc32(name.encode()) % len(changes)]
        save_file({**tensors, name: change(x)}, tmp_path / "model.safetensors")
        assert_one_line(tmp_path, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "3",
        '"text"',
        "[" * 10**5,
        '{"a": ' * 10**5,
        '{"model_type": "vivit"',
        "\ufeff{}",
    ],
    ids=lambda text: text[:20],
)
def test_damaged_config(folder, tmp_path, text):
    changed_folder(folder, tmp_path)
    (tmp_path / "config.json").write_text(text)
    error_of(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe" + text.encode()[:100])
    error_of(tmp_path)
