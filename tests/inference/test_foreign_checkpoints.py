"""Checkpoints of Motionformer and of PySlowFast checkouts, with configs of their own keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from slowfast_lara.config import load_config
from slowfast_lara.errors import CheckpointError, ConfigError, UserError
from slowfast_lara.inference.load import load
from tests.helpers.commands import run
from tests.helpers.motionformer_config import FOREIGN, motionformer_config
from tests.helpers.runs import write_config
from tests.helpers.small_models import ModelFiles, small_config, write_model

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> ModelFiles:
    """A model with exact attention: its YAML file and its weights."""
    config = small_config(APPROX_ATTN_TYPE="none")
    config["DATA"] |= {"MEAN": [0.5, 0.4, 0.3], "STD": [0.5, 0.5, 0.2], "TARGET_FPS": 25}
    config["DATA"]["REVERSE_INPUT_CHANNEL"] = True
    return write_model(tmp_path_factory.mktemp("exact"), config)


def tree_of(model: ModelFiles) -> dict[str, Any]:
    """The complete config of a model, as a checkpoint of this package holds it."""
    return yaml.safe_load(load_config(model.cfg).dump())


def save(path: Path, model: ModelFiles, tree: dict[str, Any], prefix: str = "") -> Path:
    """A checkpoint with a given config and the keys of Motionformer's."""
    states = torch.load(model.checkpoint, weights_only=True)["model_state"]
    content = {
        "epoch": 34,
        "model_state": {prefix + name: tensor for name, tensor in states.items()},
        "optimizer_state": {"state": {}, "param_groups": []},
        "cfg": yaml.safe_dump(tree),
        "scaler": {"scale": 65536.0},
    }
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    return path


def checkout_config(model: ModelFiles, **changes: Any) -> dict[str, Any]:
    """A config as a checkout of PySlowFast with the plugin saves it."""
    tree = motionformer_config(tree_of(model), **changes)
    del tree["SOLVER"]["USE_MIXED_PRECISION"], tree["EPICKITCHENS"], tree["TEST"]["SHUFFLE_FRAMES"]
    tree["MASK"] = {"ENABLE": False, **tree.get("MASK", {})}
    tree["DATA"] = {"USE_OFFSET_SAMPLING": False, **tree["DATA"]}
    return tree


def test_motionformer_checkpoint_needs_no_config(exact, clips, tmp_path, caplog):
    tree = motionformer_config(tree_of(exact), SOLVER={"USE_MIXED_PRECISION": True})
    expected = load(exact.cfg, exact.checkpoint)(clips[0]).scores
    alone = save(tmp_path / "motionformer_224_16x4.pyth", exact, tree)
    wrapped = save(tmp_path / "wrapped.pyth", exact, tree, prefix="module.")
    save(tmp_path / "checkpoints" / "checkpoint_epoch_00035.pyth", exact, tree)
    for source in (alone, wrapped, tmp_path):
        model = load(source)
        np.testing.assert_array_equal(model(clips[0]).scores, expected)
        assert model.cfg.SOLVER.USE_MIXED_PRECISION and model.cfg.DATA.REVERSE_INPUT_CHANNEL
    assert not caplog.records
    lara = load(alone, attention="lara", num_landmarks=4)(clips[0]).scores
    assert not np.array_equal(lara, expected)


def test_motionformer_checkpoint_of_verbs_and_nouns(clips, tmp_path):
    config = small_config(APPROX_ATTN_TYPE="none")
    for part in ("TRAIN", "TEST"):
        config[part] = config.get(part, {}) | {"DATASET": "Epickitchens"}
    kitchens = write_model(tmp_path / "kitchens", config)
    assert {"head0.weight", "head1.weight"} <= {
        *torch.load(kitchens.checkpoint, weights_only=True)["model_state"]
    }
    model = load(save(tmp_path / "m.pyth", kitchens, motionformer_config(tree_of(kitchens))))
    expected, prediction = load(kitchens.cfg, kitchens.checkpoint)(clips[0]), model(clips[0])
    np.testing.assert_array_equal(prediction.scores, expected.scores)
    assert [*prediction.top_parts()] == ["verb", "noun"] and len(prediction.top().classes[0]) == 2


@pytest.mark.parametrize("node", FOREIGN)
def test_each_foreign_key_alone_does_not_matter(exact, tmp_path, node):
    tree = motionformer_config(tree_of(exact))
    if isinstance(tree[node], dict):
        tree[node]["OF_A_FORK"] = [1, {"x": None}]
    else:
        tree[node] = "changed"
    load(save(tmp_path / "model.pyth", exact, tree | {"OF_A_FORK": {"A": 1}}))


@pytest.mark.parametrize(
    "node, key, value, words",
    [
        ("MODEL", "MODEL_NAME", "SlowFast", "MODEL.MODEL_NAME is 'SlowFast'"),
        ("MODEL", "NUM_CLASSES", [97, 300], "MODEL.NUM_CLASSES.*must be an integer"),
        ("TRAIN", "DATASET", "ava", "TRAIN.DATASET is 'ava'"),
        ("VIT", "DEPTH", 0, "VIT.DEPTH is 0"),
        ("VIT", "APPROX_ATTN_TYPE", "linformer", "VIT.APPROX_ATTN_TYPE is 'linformer'"),
        ("DATA", "NUM_FRAMES", 8, "DATA.NUM_FRAMES is 8"),
    ],
)
def test_motionformer_settings_that_matter_are_checked(exact, tmp_path, node, key, value, words):
    tree = motionformer_config(tree_of(exact), **{node: {key: value}})
    with pytest.raises(UserError, match=words) as error:
        load(save(tmp_path / "model.pyth", exact, tree))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixed", [{}, {"MIXED_PRECISION": True}], ids=["early", "recent"])
def test_checkpoint_of_a_checkout(exact, clips, tmp_path, caplog, mixed):
    tree = checkout_config(exact, TRAIN=mixed)
    model = load(save(tmp_path / "model.pyth", exact, tree))
    expected = load(exact.cfg, exact.checkpoint)(clips[0]).scores
    np.testing.assert_array_equal(model(clips[0]).scores, expected)
    assert not caplog.records


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"DATA": {"USE_OFFSET_SAMPLING": True}}, "DATA.USE_OFFSET_SAMPLING"),
        ({"DATA": {"ENSEMBLE_METHOD": "max"}}, "DATA.ENSEMBLE_METHOD is 'max'"),
        (
            {"TEST": {"NUM_SPATIAL_CROPS": 1}, "DATA": {"TRAIN_JITTER_SCALES": [40, 48]}},
            r"TEST.NUM_SPATIAL_CROPS 1 .* DATA.TRAIN_JITTER_SCALES\[0\]",
        ),
        ({"VIT": {"WINDOW": 7}}, "VIT.WINDOW is unknown"),
    ],
)
def test_different_views_of_a_checkout_are_reported_once(exact, tmp_path, caplog, changes, words):
    load(save(tmp_path / "model.pyth", exact, checkout_config(exact, **changes)))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "model.pyth" in record.getMessage()
    assert re.search(words, record.getMessage())


def test_different_views_of_motionformer(exact, tmp_path, caplog):
    # Motionformer scales a single crop as this package does.
    one_crop = {"TEST": {"NUM_SPATIAL_CROPS": 1}, "DATA": {"TRAIN_JITTER_SCALES": [40, 48]}}
    load(save(tmp_path / "a.pyth", exact, motionformer_config(tree_of(exact), **one_crop)))
    assert not caplog.records
    shuffled = motionformer_config(tree_of(exact), TEST={"SHUFFLE_FRAMES": True})
    load(save(tmp_path / "b.pyth", exact, shuffled))
    assert "TEST.SHUFFLE_FRAMES" in caplog.text


@pytest.mark.parametrize(
    "node, key, value", [("MASK", "ENABLE", True), ("MODEL", "HEAD_ACT", "sigmoid")]
)
def test_other_uses_of_the_model_in_a_checkout_are_refused(exact, tmp_path, node, key, value):
    tree = checkout_config(exact, **{node: {key: value}})
    with pytest.raises(CheckpointError, match=f"model.pyth: {node}.{key} is"):
        load(save(tmp_path / "model.pyth", exact, tree))
    # Motionformer's model does not read these keys.
    tree = motionformer_config(tree_of(exact), **{node: {key: value}})
    load(save(tmp_path / "model.pyth", exact, tree))


def test_unknown_keys_in_own_configs_are_refused(exact, tmp_path):
    tree = tree_of(exact)
    tree["VIT"]["DEPHT"] = 3
    with pytest.raises(ConfigError, match="unknown config key VIT.DEPHT.*VIT.DEPTH"):
        load(save(tmp_path / "model.pyth", exact, tree))
    typo = tmp_path / "typo.yaml"
    for text in ("BENCHMARK: {NUM_EPOCHS: 5}", "VIT: {DEPHT: 3}", "TEST: {SHUFFLE_FRAMES: False}"):
        typo.write_text(text)
        with pytest.raises(ConfigError, match="unknown config key"):
            load(typo, exact.checkpoint)


def test_motionformer_checkpoint_is_tested_and_fine_tuned_but_not_resumed(
    exact, video_set, tmp_path, capfd
):
    path = save(tmp_path / "m.pyth", exact, motionformer_config(tree_of(exact)))
    vit = small_config(APPROX_ATTN_TYPE="none")["VIT"]
    changes = {"MODEL__NUM_CLASSES": 6, "SOLVER__MAX_EPOCH": 1, "TEST__ENABLE": False}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", VIT=vit, **changes)
    start = ["--cfg", str(config), "TRAIN.CHECKPOINT_FILE_PATH", str(path)]
    assert run(start) == 2
    assert "Motionformer" in capfd.readouterr().err
    assert run([*start, "TRAIN.CHECKPOINT_EPOCH_RESET", "True"]) == 0
