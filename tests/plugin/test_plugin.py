"""The plugin in a git checkout of PySlowFast; checkout/ holds a stand-in that trains and tests."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

import slowfast_lara
from slowfast_lara.config import get_cfg, load_config
from slowfast_lara.engine.optimizer import build_optimizer
from slowfast_lara.errors import ConfigError, InputError
from slowfast_lara.inference.scoring import score_views
from slowfast_lara.models import build_model
from slowfast_lara.models.motionformer import VisionTransformer
from tests.helpers.commands import run as main
from tests.helpers.made_up_weights import vit
from tests.helpers.runs import ROOT, write_config

CHECKOUT = Path(__file__).parent / "checkout"
PAGE = ROOT / "docs" / "pyslowfast.md"
CLASSES, FRAMES, CROP, VIEWS, VIDEOS = 3, 4, 32, 6, 3
MODEL = {
    "DATA": {
        "NUM_FRAMES": FRAMES,
        "SAMPLING_RATE": 2,
        "DECODING_BACKEND": "pyav",
        "TRAIN_CROP_SIZE": CROP,
        "TEST_CROP_SIZE": CROP,
    },
    "MODEL": {"MODEL_NAME": "VisionTransformer", "ARCH": "slow", "NUM_CLASSES": CLASSES},
    "TRAIN": {"BATCH_SIZE": 4},
    "TEST": {"BATCH_SIZE": 4, "NUM_ENSEMBLE_VIEWS": 2, "NUM_SPATIAL_CROPS": 3},
    "VIT": {
        "PATCH_SIZE": 8,
        "TEMPORAL_RESOLUTION": 2,
        "EMBED_DIM": 24,
        "DEPTH": 2,
        "NUM_HEADS": 2,
        "APPROX_ATTN_DIM": 5,
        "IM_PRETRAINED": False,
        "DROP_PATH": 0.2,
    },
    "SOLVER": {"OPTIMIZING_METHOD": "adamw", "BASE_LR": 0.01, "WEIGHT_DECAY": 0.05},
    "NUM_GPUS": 0,
    "RNG_SEED": 5,
}
MIXUP = ["MIXUP.ENABLE", "True", "MODEL.LOSS_FUNC", "soft_cross_entropy"]


def checkout_run(*words: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess:
    """Run Python in a checkout, with its `slowfast` before the installed one on the path."""
    path = os.pathsep.join([str(cwd), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True
    )


def commands_of_the_page() -> list[str]:
    """The commands of docs/pyslowfast.md that prepare a checkout."""
    blocks = PAGE.read_text().split("```sh\n")[1:]
    (lines,) = [block.split("```")[0] for block in blocks if "sed -i" in block]
    return lines.splitlines()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A copy of the stand-in in which the commands of the page have been run."""
    copy = tmp_path_factory.mktemp("prepared") / "slowfast"
    shutil.copytree(CHECKOUT, copy)
    subprocess.run(["sh", "-ec", "\n".join(commands_of_the_page())], cwd=copy, check=True)
    return copy


@dataclass
class Trained:
    """A run in the checkout, and the result of the same steps without it."""

    folder: Path
    losses: list[float]
    logits: np.ndarray
    state: dict[str, torch.Tensor]

    @property
    def checkpoint(self) -> str:
        return str(self.folder / "checkpoints" / "checkpoint_epoch_00001.pyth")


def make_clips(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", VIDEOS * VIEWS)):
        clips = rng.standard_normal((count, 3, FRAMES, CROP, CROP)).astype(np.float32)
        np.savez(folder / f"{part}.npz", clips=clips, labels=np.arange(count) % CLASSES)


def our_config(attention: str) -> CfgNode:
    """The config of the stand-in's model for this package; other keys keep their defaults."""
    opts = ["VIT.APPROX_ATTN_TYPE", attention]
    for node, keys in MODEL.items():
        if node in ("DATA", "MODEL", "VIT"):
            own = [(key, value) for key, value in keys.items() if key != "DECODING_BACKEND"]
            opts += [word for key, value in own for word in (f"{node}.{key}", value)]
    opts += ["DATA.TRAIN_JITTER_SCALES", [CROP, CROP], "RNG_SEED", 5, "NUM_GPUS", 0]
    return load_config("quick/softmax", opts)


def our_steps(folder: Path, attention: str, mixup: bool, mixed: bool) -> Trained:
    """Two training steps of the model in plain PyTorch, without the stand-in and the plugin."""
    np.random.seed(5)
    torch.manual_seed(5)
    model = build_model(our_config(attention)).train()
    spared = [p for name, p in model.named_parameters() if name in model.no_weight_decay()]
    others = [p for p in model.parameters() if not any(p is one for one in spared)]
    groups = [
        {"params": [p for p in others if p.requires_grad], "weight_decay": 0.05},
        {"params": [p for p in spared if p.requires_grad], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    torch.manual_seed(5)
    arrays, losses, logits = np.load(folder / "train.npz"), [], []
    for start in (0, 4):
        clips = torch.from_numpy(arrays["clips"][start : start + 4])
        target = torch.from_numpy(arrays["labels"][start : start + 4])
        if mixup:
            share = float(np.random.beta(0.8, 0.8))
            soft = torch.eye(CLASSES)[target] * 0.9 + 0.1 / CLASSES
            clips = clips * share + clips.flip(0) * (1 - share)
            target = soft * share + soft.flip(0) * (1 - share)
        with torch.autocast("cpu", enabled=mixed):
            out = model([clips])
        loss = torch.nn.functional.cross_entropy(out.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logits.append(out.detach().float().numpy())
    return Trained(folder, losses, np.stack(logits), model.state_dict())


# Attention, mixup, mixed precision (with each job in its own process).
RUNS = [
    pytest.param(("none", False, False), id="exact"),
    pytest.param(("lara", True, False), id="lara-mixup"),
    pytest.param(("lara", False, True), id="lara-mixed-spawned", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RUNS)
def trained(request, prepared, tmp_path_factory) -> Trained:
    attention, mixup, mixed = request.param
    folder = tmp_path_factory.mktemp("checkout")
    make_clips(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    paths = ["DATA.PATH_TO_DATA_DIR", str(folder), "OUTPUT_DIR", str(folder)]
    done = checkout_run(
        "tools/run_net.py",
        *("--cfg", str(folder / "model.yaml")),
        *(["--spawn"] if mixed else []),
        *("--opts", "VIT.APPROX_ATTN_TYPE", attention, "TRAIN.MIXED_PRECISION", str(mixed)),
        *(MIXUP if mixup else []),
        *paths,
        cwd=prepared,
    )
    assert done.returncode == 0, done.stderr
    assert mixed or "FlopCountAnalysis" in done.stdout
    return our_steps(folder, attention, mixup, mixed)


def test_two_training_steps_equal_ours(trained):
    theirs = np.load(trained.folder / "training.npz")
    assert len(theirs["losses"]) == 2 and np.isfinite(theirs["losses"]).all()
    np.testing.assert_allclose(theirs["losses"], trained.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(theirs["logits"], trained.logits, rtol=0, atol=1e-6)
    # They are logits: softmax scores would sum to 1.
    assert not np.allclose(theirs["logits"].sum(-1), 1)


def test_checkpoint_has_our_names_and_weights(trained):
    saved = torch.load(trained.checkpoint, weights_only=True)
    assert saved["model_state"].keys() == trained.state.keys()
    initial = initial_weights(trained)
    assert not torch.equal(saved["model_state"]["head.weight"], initial["head.weight"])
    for name, weight in trained.state.items():
        torch.testing.assert_close(saved["model_state"][name], weight, rtol=0, atol=1e-6)


def initial_weights(trained: Trained) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return build_model(slowfast_lara.load(trained.checkpoint).cfg).state_dict()


def test_multi_view_test_gives_our_scores(trained):
    model = slowfast_lara.load(trained.checkpoint)
    clips = torch.from_numpy(np.load(trained.folder / "test.npz")["clips"])
    sums = np.load(trained.folder / "scores.npy")
    assert sums.shape == (VIDEOS, CLASSES)
    for ours, theirs in zip(clips.split(VIEWS), sums):
        expected = score_views(model.network, ours, model.cfg).numpy()
        np.testing.assert_allclose(theirs / VIEWS, expected, rtol=0, atol=1e-6)


def test_its_checkpoint_can_be_tested_and_fine_tuned_but_not_resumed(
    trained, video_set, tmp_path, capfd, in_process
):
    cfg = slowfast_lara.load(trained.checkpoint).cfg
    assert cfg.TEST.NUM_SPATIAL_CROPS == 3 and cfg.VIT.DROP_PATH == 0.2 and cfg.RNG_SEED == 5
    vit = {**MODEL["VIT"], "APPROX_ATTN_TYPE": cfg.VIT.APPROX_ATTN_TYPE}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", VIT=vit)

    def run(*opts: Any) -> int:
        return main(["--cfg", str(config), *map(str, opts)])

    given = ["TRAIN.CHECKPOINT_FILE_PATH", trained.checkpoint, "SOLVER.MAX_EPOCH", 1]
    assert run("TRAIN.ENABLE", False, "TEST.CHECKPOINT_FILE_PATH", trained.checkpoint) == 0
    assert json.loads((tmp_path / "out" / "test_results.json").read_text())["num_videos"] == 7
    capfd.readouterr()
    assert run("TEST.ENABLE", False, "OUTPUT_DIR", tmp_path / "resumed", *given) == 2
    assert "git checkout of PySlowFast" in capfd.readouterr().err
    reset = ["TRAIN.CHECKPOINT_EPOCH_RESET", True]
    assert run("TEST.ENABLE", False, "OUTPUT_DIR", tmp_path / "fine_tuned", *given, *reset) == 0


def run_steps(folder: Path, checkout: Path, *opts: str) -> subprocess.CompletedProcess:
    """A training in a checkout."""
    make_clips(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    paths = ["DATA.PATH_TO_DATA_DIR", str(folder), "OUTPUT_DIR", str(folder)]
    words = ["tools/run_net.py", "--cfg", str(folder / "model.yaml"), "--opts", *paths, *opts]
    return checkout_run(*words, "LOG_MODEL_INFO", "False", cwd=checkout)


@pytest.mark.slow
def test_each_command_of_the_page_is_needed(tmp_path):
    *commands, path = commands_of_the_page()
    assert len(commands) == 3 and path.startswith("export PYTHONPATH")
    reasons = ["No module named 'vision'"] * 2 + ["Non-existent config key"]
    for number, reason in enumerate(reasons):
        copy = tmp_path / str(number)
        shutil.copytree(CHECKOUT, copy)
        some = [command for i, command in enumerate(commands) if i != number]
        subprocess.run(["sh", "-ec", "\n".join(some)], cwd=copy, check=True)
        if number == 2:  # the place of the import that earlier versions had
            custom = copy / "slowfast" / "models" / "custom_video_model_builder.py"
            custom.write_text("import slowfast_lara.plugin\n")
        done = run_steps(copy, copy)
        assert done.returncode != 0 and reason in done.stderr


@pytest.mark.slow
def test_default_decoding_backend_does_not_work(prepared, tmp_path):
    done = run_steps(tmp_path, prepared, "DATA.DECODING_BACKEND", "torchvision")
    assert done.returncode != 0 and "torchvision" in done.stderr


@pytest.mark.slow
def test_our_checkpoint_in_the_checkout(prepared, tmp_path):
    cfg = our_config("none")
    torch.manual_seed(7)
    model = build_model(cfg)
    ours = {
        "epoch": 0,
        "model_state": model.state_dict(),
        "optimizer_state": build_optimizer(model, cfg).state_dict(),
        "cfg": cfg.dump(),
    }
    path = str(tmp_path / "ours.pyth")
    torch.save(ours, path)
    start = ["TRAIN.CHECKPOINT_FILE_PATH", path, "SOLVER.ZERO_WD_1D_PARAM", "True"]
    start += ["SOLVER.BASE_LR", "0.0", "TEST.CHECKPOINT_FILE_PATH", path]
    done = run_steps(tmp_path, prepared, *start)
    assert done.returncode != 0 and "KeyError: 'layer_decay'" in done.stderr
    done = run_steps(tmp_path, prepared, *start, "TRAIN.CHECKPOINT_EPOCH_RESET", "True")
    assert done.returncode == 0 and "not loaded: []" in done.stdout, done.stderr
    trained = torch.load(tmp_path / "checkpoints" / "checkpoint_epoch_00001.pyth")["model_state"]
    assert all(torch.equal(trained[name], x) for name, x in ours["model_state"].items())


def test_our_commands_refuse_a_checkout_on_the_path():
    done = checkout_run("-m", "slowfast_lara.cli", "run", "--cfg", "quick/lara")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: found a git checkout of PySlowFast")
    assert done.stderr.count("\n") == 1


# Tests with only the config and the registry of a checkout, in this process.


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
    assert "MVIT.DEPTH, which is 16: set it to VIT.DEPTH (2)" in caplog.text
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
    with pytest.raises(ImportError, match=f"a.py belongs to .*{words}") as error:
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
