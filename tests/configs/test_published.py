"""The K400, SSV2 and EK configs: published settings, parameters, GFLOPs, a training step."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from benchmarks.profiling import count_flops
from slowfast_lara.config import check_machine, load_config
from slowfast_lara.engine.optimizer import build_optimizer, lr_at
from slowfast_lara.models import build_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DATASETS = {"K400": 400, "SSV2": 174}


class Expected(NamedTuple):
    """Expected properties of a config. Parameters (thousands) and GFLOPs are those on K400."""

    parameters: int
    gflops: float
    batch: int
    lr: float
    epochs: int


PUBLISHED = {"batch": 128, "lr": 1e-4, "epochs": 35}
LARGE = {"batch": 32, "lr": 0.375e-4, "epochs": 35}
PAPER = {"batch": 256, "lr": 1e-4, "epochs": 40}
# Settings shared by all published files, and defaults that the paper's rows keep.
SHARED = {
    "TRAIN.ENABLE": True,
    "TRAIN.EVAL_PERIOD": 5,
    "TRAIN.CHECKPOINT_PERIOD": 5,
    "TRAIN.AUTO_RESUME": True,
    "DATA.INPUT_CHANNEL_NUM": [3],
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.WARMUP_EPOCHS": 0.0,
    "SOLVER.USE_MIXED_PRECISION": True,
    "SOLVER.CLIP_GRAD": None,
    "SOLVER.ACCUMULATE_STEPS": 1,
    "SOLVER.REFERENCE_BATCH": 0,
    "VIT.PATCH_SIZE": 16,
    "VIT.PATCH_SIZE_TEMP": 2,
    "VIT.CHANNELS": 3,
    "VIT.EMBED_DIM": 768,
    "VIT.DEPTH": 12,
    "VIT.NUM_HEADS": 12,
    "VIT.MLP_RATIO": 4,
    "VIT.QKV_BIAS": True,
    "VIT.VIDEO_INPUT": True,
    "VIT.USE_MLP": True,
    "VIT.DROP": 0.0,
    "VIT.POS_DROPOUT": 0.0,
    "VIT.DROP_PATH": 0.2,
    "VIT.HEAD_DROPOUT": 0.0,
    "VIT.HEAD_ACT": "tanh",
    "VIT.IM_PRETRAINED": True,
    "VIT.INFLATE": "centre",
    "VIT.POS_EMBED": "separate",
    "VIT.USE_ORIGINAL_TRAJ_ATTN_CODE": True,
    "VIT.LARA.BETA": 1.0,
    "VIT.LARA.LEARNED": False,
    "VIT.RA.NUM_SAMPLES": 1,
    "MODEL.ARCH": "slow",
    "MODEL.MODEL_NAME": "VisionTransformer",
    "MODEL.LOSS_FUNC": "cross_entropy",
    "TEST.ENABLE": True,
    "TEST.BATCH_SIZE": 64,
    "NUM_GPUS": 8,
    "NUM_SHARDS": 4,
    "RNG_SEED": 0,
    "TENSORBOARD.ENABLE": True,
}
ROWS = {
    "motionformer_224_16x4": Expected(109145, 204.31, **PUBLISHED),
    "joint_224_16x4": Expected(87883, 180.64, **PUBLISHED),
    "divided_224_16x4": Expected(116250, 185.77, **PUBLISHED),
    "motionformer_336_16x8": Expected(109145, 587.04, **LARGE),
    "motionformer_224_32x3": Expected(109151, 502.17, **LARGE),
    "lara_224_16x4": Expected(109145, 181.34, **PAPER),
    "ra_224_16x4": Expected(109145, 227.68, **PAPER),
    "ra_biased_224_16x4": Expected(109145, 250.33, **PAPER),
    "performer_224_16x4": Expected(109145, 179.34, **PAPER),
    "nystrom_224_16x4": Expected(109145, 187.95, **PAPER),
    "orthoformer_224_16x4": Expected(109145, 181.17, **PAPER),
    "lara_336_16x8": Expected(109145, 407.78, **PAPER),
    "lara_joint_224_16x4": Expected(87883, 144.69, **PAPER),
    "lara_best_224_16x4": Expected(109145, 180.15, **PAPER),
    "lara_best_336_16x8": Expected(109145, 405.08, **PAPER),
    "lara_best_224_32x3": Expected(109151, 389.00, **LARGE),
    "lara_best_joint_224_16x4": Expected(87883, 143.70, **PAPER),
    "merged_224_16x4": Expected(109145, 183.26, **PUBLISHED),
    "merged_336_16x8": Expected(109145, 411.39, **LARGE),
    "merged_224_32x3": Expected(109151, 413.82, **LARGE),
    "merged_joint_224_16x4": Expected(87883, 144.72, **PUBLISHED),
}


# Models of Hugging Face: tests/inference/test_hugging_face.py compares their settings.
HUB = ("videomae_224_16x4", "vivit_224_32x2", "timesformer_224_8x32")


def file_of(dataset: str, name: str) -> Path:
    """The file of a row; 336-pixel configs have a stride of 8 on Kinetics and of 4 on SSv2."""
    name = name.replace("336_16x8", "336_16x4") if dataset == "SSV2" else name
    return CONFIGS / dataset / f"{name}.yaml"


EVERY = [(dataset, name) for dataset in DATASETS for name in ROWS]
every_config = pytest.mark.parametrize("dataset, name", EVERY)


def test_table_has_every_file():
    bases = {
        CONFIGS / dataset / f"{name}.yaml"
        for dataset in DATASETS
        for name in ("base", "paper", "best")
    }
    found = set(CONFIGS.glob("K400/*.yaml")) | set(CONFIGS.glob("SSV2/*.yaml"))
    hub = {CONFIGS / "K400" / f"{name}.yaml" for name in HUB}
    assert found - bases == {file_of(*key) for key in EVERY} | hub


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_file_loads_and_builds(path):
    """Including the quick configs and the base configs."""
    cfg = load_config(path, ["NUM_GPUS", 0])
    with torch.device("meta"):
        model = build_model(cfg)
    counts = [getattr(model, head).out_features for head in model.heads]
    assert counts == ([97, 300] if path.parent.name == "EK" else [cfg.MODEL.NUM_CLASSES])


@every_config
def test_settings(dataset, name, tmp_path):
    cfg, row = load_config(file_of(dataset, name)), ROWS[name]
    ssv2, paper = dataset == "SSV2", row.epochs == 40
    crop = 336 if "_336_" in name else 224
    frames, rate = (int(n) for n in file_of(dataset, name).stem.split("_")[-1].split("x"))
    assert cfg.TRAIN.BATCH_SIZE * cfg.NUM_SHARDS == row.batch
    assert cfg.TRAIN.BATCH_SIZE % cfg.NUM_GPUS == cfg.TEST.BATCH_SIZE % cfg.NUM_GPUS == 0
    assert (cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE) == (frames, rate)
    assert cfg.DATA.TRAIN_CROP_SIZE == cfg.DATA.TEST_CROP_SIZE == crop
    assert cfg.DATA.TRAIN_JITTER_SCALES == ([384, 480] if crop == 336 else [256, 320])
    assert cfg.DATA.MEAN == cfg.DATA.STD == [0.5, 0.5, 0.5]
    assert cfg.DATA.INV_UNIFORM_SAMPLE == ssv2
    assert cfg.DATA.USE_RAND_AUGMENT == (ssv2 and name != "joint_224_16x4")
    assert cfg.DATA.RANDOM_FLIP == cfg.DATA.COLORJITTER == (not ssv2)
    assert cfg.DATA.REVERSE_INPUT_CHANNEL == cfg.TRAIN.CHECKPOINT_EPOCH_RESET == ssv2
    assert cfg.DATA.USE_RANDOM_RESIZE_CROPS == (frames == 32 and not ssv2)
    assert cfg.TRAIN.DATASET == cfg.TEST.DATASET == ("Ssv2" if ssv2 else "Kinetics")
    assert cfg.MODEL.NUM_CLASSES == DATASETS[dataset]
    views = (10 if paper or not ssv2 else 1, 3)
    assert (cfg.TEST.NUM_ENSEMBLE_VIEWS, cfg.TEST.NUM_SPATIAL_CROPS) == views
    assert (cfg.SOLVER.OPTIMIZING_METHOD, cfg.SOLVER.WEIGHT_DECAY, cfg.SOLVER.SMOOTHING) == (
        "adamw",
        0.05,
        0.2,
    )
    best = "best" in name
    numbers = {"lara_best": (112, 96), "merged": (96, 208)}  # trajectory, joint
    number = next((n for kind, n in numbers.items() if kind in name), (128, 128))
    assert cfg.VIT.APPROX_ATTN_DIM == number["joint" in name]
    lara = cfg.VIT.LARA
    chosen = (lara.PROPOSAL, lara.LANDMARKS, lara.WEIGHTING, lara.NOISE)
    recommended = ("global", "farthest", "balance", "code")
    assert chosen == (recommended if best else ("local", "means", "decoupled", 1.0))
    attention = name.split("_")[0].replace("motionformer", "none")
    assert cfg.VIT.APPROX_ATTN_TYPE == ("none" if attention in ("joint", "divided") else attention)
    layer = next((x for x in ("joint", "divided") if x in name), "trajectory")
    assert cfg.VIT.ATTN_LAYER == layer
    assert cfg.VIT.RA.BIASED == ("biased" in name)
    assert cfg.OUTPUT_DIR == f"runs/{dataset}/{file_of(dataset, name).stem}"
    assert cfg.DATA.PATH_PREFIX == ("data/ssv2/frames" if ssv2 else "")
    assert cfg.VIT.TEMPORAL_RESOLUTION == frames // 2
    for key, value in SHARED.items():
        node = cfg
        for part in key.split("."):
            node = node[part]
        assert node == value, key


KITCHENS = ("motionformer_224_16x4", "joint_224_16x4", "divided_224_16x4")
KITCHENS += ("motionformer_224_32x3", "motionformer_336_16x4", "lara_best_224_16x4")
KITCHENS += ("merged_224_16x4",)


def test_kitchens_table_has_every_file():
    found = {path.stem for path in CONFIGS.glob("EK/*.yaml")}
    assert found == {"base", *KITCHENS}


@pytest.mark.parametrize("name", KITCHENS)
def test_kitchens_settings(name):
    """Those of Motionformer's files; the attention is that of the K400 config it starts from."""
    cfg = load_config(CONFIGS / "EK" / f"{name}.yaml")
    kinetics = load_config(CONFIGS / "K400" / f"{name.replace('336_16x4', '336_16x8')}.yaml")
    last = f"checkpoints/checkpoint_epoch_{kinetics.SOLVER.MAX_EPOCH:05d}.pyth"
    assert cfg.TRAIN.CHECKPOINT_FILE_PATH == f"{kinetics.OUTPUT_DIR}/{last}"
    assert cfg.VIT == kinetics.VIT
    large = "336" in name or "32x3" in name
    assert cfg.TRAIN.BATCH_SIZE * cfg.NUM_SHARDS == (32 if large else 128)
    assert cfg.SOLVER.BASE_LR == (0.375e-4 if large else 1e-4)
    assert (cfg.SOLVER.STEPS, cfg.SOLVER.MAX_EPOCH) == ([0, 30, 40], 50)
    assert (cfg.SOLVER.LRS, cfg.SOLVER.WEIGHT_DECAY) == ([1, 0.1, 0.01], 0.05)
    frames, rate = (int(n) for n in name.split("_")[-1].split("x"))
    assert (cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE) == (frames, rate)
    assert cfg.DATA.TRAIN_CROP_SIZE == cfg.DATA.TEST_CROP_SIZE == (336 if "336" in name else 224)
    assert cfg.DATA.USE_RAND_AUGMENT and cfg.DATA.RANDOM_FLIP and not cfg.DATA.COLORJITTER
    assert not cfg.DATA.USE_RANDOM_RESIZE_CROPS and not cfg.DATA.REVERSE_INPUT_CHANNEL
    assert cfg.TRAIN.DATASET == cfg.TEST.DATASET == "Epickitchens"
    assert (cfg.TEST.NUM_ENSEMBLE_VIEWS, cfg.TEST.NUM_SPATIAL_CROPS) == (10, 3)
    assert cfg.TRAIN.CHECKPOINT_EPOCH_RESET and cfg.OUTPUT_DIR == f"runs/EK/{name}"


@every_config
def test_schedule(dataset, name):
    cfg, row = load_config(file_of(dataset, name)), ROWS[name]
    first, second = (25, 35) if row.epochs == 40 else (20, 30)
    assert cfg.SOLVER.MAX_EPOCH == row.epochs
    for epoch, factor in (
        (0, 1),
        (first - 0.01, 1),
        (first, 0.1),
        (second - 0.01, 0.1),
        (second, 0.01),
        (row.epochs - 0.01, 0.01),
    ):
        assert lr_at(cfg, epoch) == pytest.approx(row.lr * factor, rel=1e-9)


@pytest.mark.parametrize("name", ROWS)
def test_ssv2_starts_from_the_kinetics_checkpoint(name):
    kinetics = load_config(file_of("K400", name))
    start = load_config(file_of("SSV2", name)).TRAIN.CHECKPOINT_FILE_PATH
    last = f"checkpoints/checkpoint_epoch_{kinetics.SOLVER.MAX_EPOCH:05d}.pyth"
    assert start == f"{kinetics.OUTPUT_DIR}/{last}"


@every_config
def test_parameters(dataset, name):
    with torch.device("meta"):
        model = build_model(load_config(file_of(dataset, name), ["NUM_GPUS", 0]))
    classifier = (768 + 1) * (400 - DATASETS[dataset])
    expected = ROWS[name].parameters * 1000
    own = sum(p.numel() for p in model.parameters())
    assert own + classifier == pytest.approx(expected, abs=500)


@functools.cache
def counted(path: Path, heads: int, depth: int) -> int:
    """Multiply-accumulates of one clip with this number of heads of 64 channels, and blocks."""
    opts = ["VIT.NUM_HEADS", heads, "VIT.EMBED_DIM", 64 * heads, "VIT.DEPTH", depth, "NUM_GPUS", 0]
    cfg = load_config(path, opts)
    crop = cfg.DATA.TRAIN_CROP_SIZE
    clip = torch.zeros(1, 3, cfg.DATA.NUM_FRAMES, crop, crop)
    return count_flops(build_model(cfg).eval(), [clip])


def at_full_size(path: Path, heads: int, depth: int) -> float:
    """The count of a full-size model, extrapolated from models with one and two heads and blocks.

    Every operation costs a multiple of h (attention, norms) or of h**2 (matmuls with weights), per
    block or outside of the blocks: four unknowns, four counts.
    """

    def of_heads(at_one: float, at_two: float) -> float:
        square = (at_two - 2 * at_one) / 2
        return square * heads**2 + (at_one - square) * heads

    one, two = (of_heads(counted(path, 1, d), counted(path, 2, d)) for d in (1, 2))
    return one + (depth - 1) * (two - one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_gflops(name):
    gflops = at_full_size(file_of("K400", name), 12, 12) / 1e9
    assert gflops == pytest.approx(ROWS[name].gflops, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["motionformer_224_16x4", "orthoformer_224_16x4"])
def test_extrapolated_gflops_equal_counted_ones(name):
    path = file_of("K400", name)
    assert at_full_size(path, 3, 3) == pytest.approx(counted(path, 3, 3), rel=1e-12)


def test_gflops_compared_with_the_motionformer_paper():
    """Joint and divided attention agree; trajectory attention costs less here."""
    paper = {"joint": 180.6, "divided": 185.8}
    for layer, gflops in paper.items():
        assert ROWS[f"{layer}_224_16x4"].gflops == pytest.approx(gflops, rel=0.005)
    assert ROWS["motionformer_224_16x4"].gflops < 369.5 * 0.6


# Parameters without a gradient by design: the head reads only CLS, so not the temporal stage of the
# last block; the bias of the temporal keys cancels in the softmax (and the published code does not
# use the values of proj_kv); 2-D patch embeddings are for images.
NOT_LEARNED = re.compile(r"blocks\.1\.attn\.proj_(q|kv)\..*|.*\.proj_kv\.bias|patch_embed\..*")


@every_config
def test_one_training_step_of_a_small_version(dataset, name, tmp_path):
    opts = [
        "VIT.EMBED_DIM",
        24,
        "VIT.NUM_HEADS",
        2,
        "VIT.DEPTH",
        2,
        "VIT.APPROX_ATTN_DIM",
        6,
        "DATA.TRAIN_CROP_SIZE",
        32,
        "DATA.TEST_CROP_SIZE",
        32,
        "NUM_GPUS",
        0,
        "NUM_SHARDS",
        1,
        "TRAIN.BATCH_SIZE",
        2,
        "SOLVER.USE_MIXED_PRECISION",
        False,
        "OUTPUT_DIR",
        tmp_path,
        "DATA.PATH_TO_DATA_DIR",
        tmp_path,
        "TRAIN.CHECKPOINT_FILE_PATH",
        "",
        "VIT.DROP_PATH",
        0.0,
    ]
    cfg = load_config(file_of(dataset, name), opts)
    check_machine(cfg)
    torch.manual_seed(0)
    model = build_model(cfg).train()
    optimizer = build_optimizer(model, cfg)
    before = {key: x.clone() for key, x in model.named_parameters() if x.requires_grad}
    logits = model([torch.randn(2, 3, cfg.DATA.NUM_FRAMES, 32, 32)])
    assert logits.shape == (2, DATASETS[dataset])
    labels = torch.tensor([0, DATASETS[dataset] - 1])
    functional.cross_entropy(logits, labels, label_smoothing=cfg.SOLVER.SMOOTHING).backward()
    optimizer.step()
    for key, x in model.named_parameters():
        assert torch.isfinite(x).all(), key
        if key in before and not NOT_LEARNED.fullmatch(key):
            assert x.grad.any() and not torch.equal(x, before[key]), key
