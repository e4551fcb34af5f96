"""Loading, merging and validation of configs."""

import itertools
import re

import pytest
import yaml

from slowfast_lara.config import check_machine, get_cfg, load_config
from slowfast_lara.config.defaults import walk
from slowfast_lara.config.keys import get_value
from slowfast_lara.config.load import REPLACED_KEYS
from slowfast_lara.config.yaml_files import parse_yaml, read_with_bases
from slowfast_lara.errors import ConfigError


def published(dataset, layer, crop, frames, rate):
    """A config with the keys and values of Motionformer's published files.

    The files for Kinetics-600 are those for Kinetics-400 with 600 classes and without random crops.
    """
    ssv2, kitchens = dataset == "Ssv2", dataset == "Epickitchens"
    large = crop == 336 or frames == 32
    tree = {
        "TRAIN": {
            "ENABLE": True,
            "DATASET": dataset,
            "BATCH_SIZE": 12 if large else 32,
            "EVAL_PERIOD": 5,
            "CHECKPOINT_PERIOD": 5,
            "AUTO_RESUME": True,
        },
        "DATA": {
            "NUM_FRAMES": frames,
            "SAMPLING_RATE": rate,
            "TRAIN_CROP_SIZE": crop,
            "TRAIN_JITTER_SCALES": [384, 480] if crop == 336 else [256, 320],
            "TEST_CROP_SIZE": crop,
            "INPUT_CHANNEL_NUM": [3],
            "MEAN": [0.5, 0.5, 0.5],
            "STD": [0.5, 0.5, 0.5],
            "PATH_TO_DATA_DIR": "data/here",
            "USE_RAND_AUGMENT": ssv2 or kitchens,
            "RE_PROB": 0.0,
            "USE_REPEATED_AUG": False,
            "COLORJITTER": dataset == "Kinetics",
            "USE_RANDOM_RESIZE_CROPS": frames == 32 and dataset == "Kinetics",
            "GRAYSCALE": False,
            "GAUSSIAN": False,
        },
        "SOLVER": {
            # PyYAML parses 1e-4 as a string.
            "BASE_LR": "0.375e-4" if large else "1e-4",
            "LR_POLICY": "steps_with_relative_lrs",
            "LRS": [1, 0.1, 0.01],
            "STEPS": [0, 30, 40] if kitchens else [0, 20, 30],
            "MAX_EPOCH": 50 if kitchens else 35,
            "MOMENTUM": 0.9,
            "WEIGHT_DECAY": "5e-2",
            "WARMUP_EPOCHS": 0.0,
            "OPTIMIZING_METHOD": "adamw",
            "USE_MIXED_PRECISION": True,
            "SMOOTHING": 0.2,
        },
        "SLOWFAST": {"ALPHA": 8},
        "VIT": {
            "PATCH_SIZE": 16,
            "PATCH_SIZE_TEMP": 2,
            "CHANNELS": 3,
            "EMBED_DIM": 768,
            "DEPTH": 12,
            "NUM_HEADS": 12,
            "MLP_RATIO": 4,
            "QKV_BIAS": True,
            "VIDEO_INPUT": True,
            "TEMPORAL_RESOLUTION": frames // 2,
            "USE_MLP": True,
            "DROP": 0.0,
            "POS_DROPOUT": 0.0,
            "DROP_PATH": 0.2,
            "IM_PRETRAINED": True,
            "HEAD_DROPOUT": 0.0,
            "HEAD_ACT": "tanh",
            "PRETRAINED_WEIGHTS": "vit_1k",
            "ATTN_LAYER": layer,
        },
        "MODEL": {
            "NUM_CLASSES": {"Ssv2": 174, "Epickitchens": 97}.get(dataset, 400),
            "ARCH": "slow",
            "LOSS_FUNC": "cross_entropy",
            "MODEL_NAME": "VisionTransformer",
        },
        "TEST": {
            "ENABLE": True,
            "DATASET": dataset,
            "BATCH_SIZE": 64,
            "NUM_SPATIAL_CROPS": 3,
            "NUM_ENSEMBLE_VIEWS": 1 if ssv2 else 10,
        },
        "DATA_LOADER": {"NUM_WORKERS": 4 if ssv2 else 8, "PIN_MEMORY": True},
        "NUM_GPUS": 8,
        "NUM_SHARDS": 4,
        "RNG_SEED": 0,
        "OUTPUT_DIR": ".",
        "TENSORBOARD": {"ENABLE": True},
    }
    if ssv2 or kitchens:
        tree["TRAIN"].update(CHECKPOINT_EPOCH_RESET=True, CHECKPOINT_FILE_PATH="there/x.pyth")
    if ssv2:
        tree["DATA"].update(
            PATH_PREFIX="frames",
            INV_UNIFORM_SAMPLE=True,
            RANDOM_FLIP=False,
            REVERSE_INPUT_CHANNEL=True,
        )
    return tree


def write(path, tree):
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


@pytest.fixture
def base(tmp_path):
    return write(tmp_path / "base.yaml", published("Kinetics", "trajectory", 224, 16, 4))


VARIANTS = [
    ("trajectory", 224, 16, 4),
    ("joint", 224, 16, 4),
    ("divided", 224, 16, 4),
    ("trajectory", 224, 32, 3),
    ("trajectory", 336, 16, 8),
]


@pytest.mark.parametrize(
    "dataset, variant",
    list(itertools.product(["Kinetics", "K600", "Ssv2", "Epickitchens"], VARIANTS)),
)
def test_published_files_load_unchanged(tmp_path, dataset, variant):
    """All twenty of Motionformer's files."""
    layer, crop, frames, rate = variant
    if crop == 336 and dataset != "Kinetics":
        rate = 4
    tree = published("Kinetics" if dataset == "K600" else dataset, layer, crop, frames, rate)
    if dataset == "K600":
        tree["MODEL"]["NUM_CLASSES"], tree["DATA"]["USE_RANDOM_RESIZE_CROPS"] = 600, False
    cfg = load_config(write(tmp_path / "x.yaml", tree))
    assert cfg.is_frozen()
    assert cfg.VIT.ATTN_LAYER == variant[0]
    assert cfg.SOLVER.BASE_LR == float(tree["SOLVER"]["BASE_LR"])
    assert cfg.SOLVER.WEIGHT_DECAY == 0.05
    assert cfg.NUM_SHARDS == 4
    assert cfg.VIT.APPROX_ATTN_TYPE == "none"


def test_defaults_are_valid_and_fresh():
    first, second = get_cfg(), get_cfg()
    first.VIT.DEPTH = 1
    assert second.VIT.DEPTH == 12
    assert first.RESNET.DEPTH == 50  # a key of PySlowFast


def test_opts_override_the_file(base):
    cfg = load_config(base, ["VIT.DEPTH", "2", "SOLVER.CLIP_GRAD", 1, "DATA.MEAN", "[0, 0, 0.5]"])
    assert (cfg.VIT.DEPTH, cfg.SOLVER.CLIP_GRAD, cfg.DATA.MEAN) == (2, 1, [0, 0, 0.5])
    assert load_config(base, ("SOLVER.CLIP_GRAD", "None")).SOLVER.CLIP_GRAD is None
    reset = load_config(base, ["SOLVER.CLIP_GRAD", 1, "SOLVER.CLIP_GRAD", "None"])
    assert reset.SOLVER.CLIP_GRAD is None


def test_opts_may_be_a_mapping(base):
    pairs = ["VIT.DEPTH", 2, "SOLVER.CLIP_GRAD", 1, "VIT.LARA.BETA", 2]
    flat = {"VIT.DEPTH": 2, "SOLVER.CLIP_GRAD": 1, "VIT.LARA.BETA": 2}
    nested = {"VIT": {"DEPTH": 2, "LARA": {"BETA": 2}}, "SOLVER": {"CLIP_GRAD": 1}}
    expected = load_config(base, pairs)
    assert load_config(base, flat) == load_config(base, nested) == expected
    assert load_config(base, {}) == load_config(base) != expected
    with pytest.raises(ConfigError, match="unknown config key VIT.DEPHT; did you mean VIT.DEPTH"):
        load_config(base, {"VIT.DEPHT": 2})


@pytest.mark.parametrize(
    "opts", ["VIT.DEPTH 2", None, 3, [("VIT.DEPTH", 2)], [("VIT.DEPTH", 2)] * 2, {3: 4}, {"A", "B"}]
)
def test_other_forms_of_overrides_are_one_clear_error(base, opts):
    with pytest.raises(ConfigError, match="overrides.*mapping.*KEY, VALUE") as caught:
        load_config(base, opts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("VIT.QKV_BIAS", "false", False),
        ("MODEL.COMPILE", "true", True),
        ("MODEL.COMPILE", "TRUE", True),
        ("SOLVER.CLIP_GRAD", "null", None),
        ("MODEL.SINGLE_PATHWAY_ARCH", "[slow, c2d]", ["slow", "c2d"]),
    ],
)
def test_values_as_configs_prints_them(base, key, text, value):
    assert get_value(load_config(base, ["SOLVER.CLIP_GRAD", 1.0, key, text]), key) == value


@pytest.mark.parametrize("word", ["VIT.DEPTH=2", "NUM_GPUS=0", "VIT.DEPTH=", "vit.depth=2"])
def test_equals_sign_gets_a_hint(base, word):
    key, _, value = word.partition("=")
    for opts in ([word], ["RNG_SEED", "1", word], [word, "RNG_SEED", "1"], [word, word]):
        with pytest.raises(ConfigError, match=f"'{word}'.*write {key} {value or 'VALUE'}"):
            load_config(base, opts)


def test_noise_is_a_number_or_a_word(base, tmp_path):
    word = load_config(base, ["VIT.LARA.NOISE", "code", "VIT.RA.NOISE", "0.5"])
    assert (word.VIT.LARA.NOISE, word.VIT.RA.NOISE) == ("code", 0.5)
    written = write(tmp_path / "word.yaml", word.dump())
    number = load_config(written, ["VIT.LARA.NOISE", 2, "VIT.RA.NOISE", "code"])
    assert (number.VIT.LARA.NOISE, number.VIT.RA.NOISE) == (2.0, "code")
    assert type(number.VIT.LARA.NOISE) is float


def test_base_files(tmp_path, base):
    write(tmp_path / "middle.yaml", {"_BASE_": "base.yaml", "VIT": {"DEPTH": 3, "DROP": 0.1}})
    (tmp_path / "sub").mkdir()
    top = write(tmp_path / "sub/top.yaml", {"_BASE_": ["../middle.yaml"], "VIT": {"DEPTH": 4}})
    cfg = load_config(top)
    assert (cfg.VIT.DEPTH, cfg.VIT.DROP, cfg.SOLVER.MAX_EPOCH) == (4, 0.1, 35)


@pytest.mark.parametrize("name", ["quick/lara", "K400/lara_224_16x4.yaml", "study/base"])
def test_base_may_be_a_shipped_config(tmp_path, monkeypatch, name):
    """Also in a file of another folder than the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub/mine.yaml", {"_BASE_": name, "RNG_SEED": 5})
    cfg = load_config("sub/mine.yaml")
    assert cfg == load_config(name, {"RNG_SEED": 5}) != load_config(name)
    write(tmp_path / "sub/top.yaml", {"_BASE_": [name, "mine.yaml"]})
    assert load_config("sub/top.yaml") == load_config(name, {"RNG_SEED": 5})


def test_base_that_is_a_file_wins_over_a_shipped_config(tmp_path):
    (tmp_path / "quick").mkdir()
    write(tmp_path / "quick/lara.yaml", {"RNG_SEED": 7})
    mine = write(tmp_path / "mine.yaml", {"_BASE_": "quick/lara.yaml"})
    assert read_with_bases(str(mine)) == {"RNG_SEED": 7}


@pytest.mark.parametrize(
    ("base", "near"),
    [
        ("quick/larra", "quick/lara"),
        ("configs/K400/lara_224_16x4.yaml", "K400/lara_224_16x4"),
        ("sub/basis.yaml", "sub/bases.yaml"),
    ],
)
def test_missing_base_names_both_files_and_similar_ones(tmp_path, base, near):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub/bases.yaml", {})
    mine = write(tmp_path / "mine.yaml", {"_BASE_": base})
    with pytest.raises(ConfigError) as caught:
        load_config(mine)
    message = str(caught.value)
    assert f"{mine}: _BASE_" in message and str(tmp_path / base) in message
    assert f"did you mean {near}" in message and "\n" not in message


def test_circular_base_is_refused(tmp_path):
    write(tmp_path / "a.yaml", {"_BASE_": "b.yaml"})
    write(tmp_path / "b.yaml", {"_BASE_": "a.yaml"})
    with pytest.raises(ConfigError, match="circular _BASE_"):
        load_config(tmp_path / "a.yaml")


def test_python_tags_are_refused_and_not_executed(tmp_path):
    victim = tmp_path / "victim"
    for text in (
        f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{victim}']",
        f"_BASE_: !!python/object/apply:os.mkdir ['{victim}']",
    ):
        with pytest.raises(ConfigError, match="not plain YAML.*constructor"):
            load_config(write(tmp_path / "evil.yaml", text))
        with pytest.raises(ConfigError, match="not plain YAML"):
            write(tmp_path / "innocent.yaml", {"_BASE_": "evil.yaml"})
            load_config(tmp_path / "innocent.yaml")
    assert not victim.exists()


def test_override_values_are_literals_and_not_executed(base, tmp_path):
    code = f"__import__('os').mkdir('{tmp_path / 'victim'}')"
    with pytest.raises(ConfigError, match="VIT.DEPTH.*integer"):
        load_config(base, ["VIT.DEPTH", code])
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("- a\n- b\n", "expected a mapping"),
        ("VIT: [", "not plain YAML"),
        ("NUM_SHARDS: 2:4", "'2:4' is no number"),
        (b"\xff\xfe\x00", "not plain YAML"),
        ("_BASE_: 3", "_BASE_ is 3.*file name"),
        ("_BASE_: none.yaml", r"bad.yaml: _BASE_: no config file .*none.yaml"),
        ("_BASE_: sub", "cannot read config .*sub: Is a directory"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    (tmp_path / "sub").mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="no config file .*x.yaml"):
        load_config(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot read config .*: Is a directory"):
        load_config(tmp_path)


# Override -> parts of the error message.
WRONG = {
    ("VIT.ATN_LAYER", "joint"): ["unknown", "did you mean VIT.ATTN_LAYER?"],
    ("PATCH_SIZE", "16"): ["unknown", "did you mean VIT.PATCH_SIZE?"],
    ("NUM_GPU", "1"): ["unknown", "did you mean NUM_GPUS?"],
    ("VIT.LARA.BTA", "1"): ["unknown", "did you mean VIT.LARA.BETA?"],
    ("VIT.DEPTH.X", "1"): ["VIT.DEPTH is {'X': '1'}", "integer"],
    ("VIT", "3"): ["is '3'", "mapping", "PATCH_SIZE"],
    ("VIT.DEPTH", "many"): ["is 'many'", "integer"],
    ("VIT.DEPTH", "1.5"): ["is 1.5", "integer"],
    ("VIT.DEPTH", "0"): ["is 0", "at least 1"],
    ("VIT.DEPTH", "010"): ["is '010'", "integer"],
    ("VIT.DEPTH", "true"): ["is True", "integer"],
    ("VIT.QKV_BIAS", "1"): ["is 1", "True or False"],
    ("SOLVER.BASE_LR", "fast"): ["is 'fast'", "a number"],
    ("SOLVER.BASE_LR", "0"): ["is 0.0", "above 0"],
    ("SOLVER.CLIP_GRAD", "x"): ["is 'x'", "a number or None"],
    ("SOLVER.CLIP_GRAD", "1e999"): ["is inf", "finite"],
    ("SOLVER.CLIP_GRAD", "-1"): ["is -1", "above 0 or None"],
    ("DATA.MEAN", "0.5"): ["is 0.5", "a list"],
    ("DATA.MEAN", "['a', 'b', 'c']"): ["is ['a', 'b', 'c']", "numbers"],
    ("DATA.MEAN", "[1, 2]"): ["is [1, 2]", "3 numbers", "VIT.CHANNELS"],
    ("DATA.STD", "[0, 1, 1]"): ["is [0, 1, 1]", "positive"],
    ("VIT.ATTN_LAYER", "axial"): ["is 'axial'; must be one of trajectory, joint, divided"],
    ("VIT.APPROX_ATTN_TYPE", "laura"): ["is 'laura'; must be one of none, softmax, "],
    ("VIT.LARA.PROPOSAL", "near"): ["is 'near'", "local, global, mixed"],
    ("VIT.LARA.NOISE", "loud"): ["is 'loud'", "a number or code"],
    ("VIT.RA.NOISE", "-1"): ["is -1.0", "at least 0"],
    ("VIT.RA.NUM_SAMPLES", "0"): ["is 0", "at least 1"],
    ("VIT.NUM_HEADS", "7"): ["VIT.EMBED_DIM is 768", "multiple", "(7)"],
    ("DATA.TRAIN_CROP_SIZE", "230"): ["is 230", "multiple of VIT.PATCH_SIZE"],
    ("DATA.NUM_FRAMES", "15"): ["is 15", "VIT.TEMPORAL_RESOLUTION * VIT.PATCH_SIZE_TEMP (16)"],
    ("TRAIN.DATASET", "Ava"): ["is 'Ava'", "Kinetics, Ssv2, Epickitchens, Charades"],
    ("TRAIN.DATASET", "Epickitchens"): ["TEST.DATASET is 'Kinetics'", "Epickitchens"],
    ("TEST.DATASET", "epickitchens"): ["is 'epickitchens'", "TRAIN.DATASET"],
    ("TEST.DATASET", "Charades"): ["DATA.MULTI_LABEL is False", "Charades"],
    ("DATA.MULTI_LABEL", "True"): ["MODEL.LOSS_FUNC is 'cross_entropy'", "bce_logit"],
    ("MODEL.LOSS_FUNC", "bce"): ["is 'bce'", "cross_entropy", "DATA.MULTI_LABEL"],
    ("MODEL.HEAD_ACT", "sigmoid"): ["is 'sigmoid'", "DATA.MULTI_LABEL"],
    ("DATA.ENSEMBLE_METHOD", "median"): ["is 'median'; must be one of sum, max"],
    ("EPICKITCHENS.NUM_NOUNS", "0"): ["is 0", "at least 1"],
    ("TRAIN.BATCH_SIZE", "0"): ["is 0", "at least 1"],
    ("SHARD_ID", "4"): ["is 4", "below NUM_SHARDS (4)"],
    ("TEST.NUM_SPATIAL_CROPS", "2"): ["is 2", "one of 1, 3"],
    ("SOLVER.STEPS", "[0, 30, 20]"): ["is [0, 30, 20]", "rising", "starts with 0"],
    ("SOLVER.LRS", "[1]"): ["is [1]", "3 numbers", "SOLVER.STEPS"],
    ("SOLVER.SMOOTHING", "1"): ["is 1.0", "below 1"],
    ("SOLVER.EMA_DECAY", "1"): ["is 1.0", "below 1"],
    ("SOLVER.LAYER_DECAY", "0"): ["is 0.0", "above 0 and at most 1"],
    ("SOLVER.LAYER_DECAY", "1.1"): ["is 1.1", "above 0 and at most 1"],
    ("DATA.RE_PROB", "1.5"): ["is 1.5", "from 0 to 1"],
    ("DATA.GRAYSCALE", "0.2"): ["is 0.2", "True or False"],
    ("DATA.PATH_LABEL_SEPARATOR", ""): ["is ''", "at least one character"],
    ("MIXUP.PROB", "-0.1"): ["is -0.1", "from 0 to 1"],
    ("MIXUP.ALPHA", "-1"): ["is -1.0", "at least 0"],
    ("MODEL.ARCH", "slowfast"): ["is 'slowfast'", "slowonly"],
    ("TRAIN.CHECKPOINT_TYPE", "caffe2"): ["is 'caffe2'; must be pytorch"],
    ("DATA.TRAIN_JITTER_SCALES", "[320]"): ["is [320]", "[smallest, largest]"],
    ("DATA.TRAIN_JITTER_SCALES", "[200, 320]"): ["is [200, 320]", "DATA.TRAIN_CROP_SIZE (224)"],
    ("DATA.RAND_AUGMENT", "strong"): ["is 'strong'", "rand-m<magnitude>"],
    ("VIT.VIDEO_INPUT", "False"): ["is False", "VIT.PATCH_SIZE_TEMP 1"],
}


def test_the_learning_rate_does_not_rise_to_its_end():
    with pytest.raises(ConfigError, match="SOLVER.COSINE_END_LR is 0.01; must be at most SOLVER.B"):
        load_config("quick/lara", ["SOLVER.COSINE_END_LR", "0.01"])


@pytest.mark.parametrize("override", WRONG, ids=" ".join)
def test_invalid_override_reports_key_value_and_allowed_values(base, override):
    with pytest.raises(ConfigError) as caught:
        load_config(base, list(override))
    message = str(caught.value)
    assert all(word in message for word in [override[0].split(".")[0], *WRONG[override]]), message
    assert "\n" not in message


def test_unknown_key_in_a_file_reports_the_file(tmp_path):
    path = write(tmp_path / "typo.yaml", {"VIT": {"DEPHT": 3}})
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for part in ("VIT.DEPHT", str(path), "did you mean VIT.DEPTH?"):
        assert part in str(caught.value)


def test_mixup_requires_a_positive_alpha(base):
    opts = ["MIXUP.ENABLE", "True", "MIXUP.ALPHA", "0", "MIXUP.CUTMIX_ALPHA"]
    load_config(base, [*opts, "0.5"])
    with pytest.raises(ConfigError, match="MIXUP.ENABLE is True.*MIXUP.ALPHA.*above 0"):
        load_config(base, [*opts, "0"])
    with pytest.raises(ConfigError, match="MIXUP.CUTMIX_ALPHA is inf.*finite"):
        load_config(base, [*opts, "1e400"])


@pytest.mark.parametrize("key", [*REPLACED_KEYS, "AUG.RE_PROB"])
def test_keys_of_other_versions_report_the_replacement(base, tmp_path, key):
    top = key if key in REPLACED_KEYS else key.split(".")[0]
    path = write(tmp_path / "other.yaml", {"MIXUP": {}, **nested(key)})
    for load in (lambda: load_config(base, [key, "0.1"]), lambda: load_config(path)):
        with pytest.raises(ConfigError, match=f"unknown.*{top}.*; use [A-Z]"):
            load()
    known = {name for name, _ in walk(get_cfg())}
    assert set(re.findall(r"[A-Z]+\.[A-Z_]+", " ".join(REPLACED_KEYS.values()))) <= known


def nested(key):
    tree = 0.1
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def test_override_without_value(base):
    with pytest.raises(ConfigError, match="KEY VALUE pairs.*'VIT.DEPTH' has no value"):
        load_config(base, ["NUM_GPUS", "0", "VIT.DEPTH"])


@pytest.mark.parametrize("name", ["lara", "nystrom", "orthoformer"])
@pytest.mark.parametrize("layer, tokens", [("trajectory", 1568), ("joint", 1568), ("divided", 196)])
def test_more_landmarks_than_tokens(base, name, layer, tokens):
    opts = ["VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_LAYER", layer, "VIT.APPROX_ATTN_DIM"]
    load_config(base, [*opts, tokens])
    with pytest.raises(ConfigError, match=f"VIT.APPROX_ATTN_DIM is {tokens + 1}.*at most {tokens}"):
        load_config(base, [*opts, tokens + 1])


def test_samples_are_not_limited_by_tokens(base):
    cfg = load_config(base, ["VIT.APPROX_ATTN_TYPE", "performer", "VIT.APPROX_ATTN_DIM", 5000])
    assert cfg.VIT.APPROX_ATTN_DIM == 5000


def test_only_exact_attention_has_dropout(base):
    load_config(base, ["VIT.ATTN_DROPOUT", 0.1])
    with pytest.raises(ConfigError, match="VIT.ATTN_DROPOUT is 0.1.*exact attention"):
        load_config(base, ["VIT.ATTN_DROPOUT", 0.1, "VIT.APPROX_ATTN_TYPE", "lara"])


class TestMachine:
    def config(self, base, tmp_path, *opts):
        here = ["NUM_GPUS", 0, "OUTPUT_DIR", str(tmp_path / "out")]
        data = ["DATA.PATH_TO_DATA_DIR", str(tmp_path)]
        return load_config(base, [*here, *data, *opts])

    def test_valid_run(self, base, tmp_path):
        check_machine(self.config(base, tmp_path))
        assert not (tmp_path / "out").exists()  # nothing is created: the run may still be refused

    def test_more_gpus_than_available(self, base, tmp_path):
        cfg = self.config(
            base, tmp_path, "NUM_GPUS", 1000, "TRAIN.BATCH_SIZE", 1000, "TEST.BATCH_SIZE", 1000
        )
        with pytest.raises(ConfigError, match="NUM_GPUS is 1000.*this machine has"):
            check_machine(cfg)

    def test_batch_not_divisible_by_gpus(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "TRAIN.BATCH_SIZE", 30, "NUM_GPUS", 8)
        with pytest.raises(ConfigError, match="TRAIN.BATCH_SIZE is 30.*multiple of NUM_GPUS"):
            check_machine(cfg)

    def test_kernels_not_available(self, base, tmp_path, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        cfg = self.config(base, tmp_path, "VIT.KERNELS", "triton")
        with pytest.raises(ConfigError, match="VIT.KERNELS is 'triton'.*set auto or torch"):
            check_machine(cfg)

    def test_no_data(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "DATA.PATH_TO_DATA_DIR", str(tmp_path / "no"))
        with pytest.raises(ConfigError, match="DATA.PATH_TO_DATA_DIR is .*existing folder"):
            check_machine(cfg)

    def test_another_number_of_classes_than_in_the_lists(self, base, tmp_path):
        (tmp_path / "classes.json").write_text('["open", "close", "push"]')
        cfg = self.config(base, tmp_path, "MODEL.NUM_CLASSES", 400)
        with pytest.raises(ConfigError, match="NUM_CLASSES is 400.*set MODEL.NUM_CLASSES 3"):
            check_machine(cfg)
        check_machine(self.config(base, tmp_path, "MODEL.NUM_CLASSES", 3))
        check_machine(self.config(base, tmp_path, "TRAIN.ENABLE", False))
        (tmp_path / "classes.json").write_text("[")  # the names are not needed
        check_machine(cfg)

    def test_no_checkpoint(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "TRAIN.CHECKPOINT_FILE_PATH", "no.pyth")
        with pytest.raises(
            ConfigError, match="TRAIN.CHECKPOINT_FILE_PATH is 'no.pyth'.*existing file"
        ):
            check_machine(cfg)

    def test_output_not_writable(self, base, tmp_path):
        (tmp_path / "file").touch()
        cfg = self.config(base, tmp_path, "OUTPUT_DIR", str(tmp_path / "file" / "out"))
        with pytest.raises(ConfigError, match="OUTPUT_DIR is .*not a writable folder"):
            check_machine(cfg)


def test_aliased_mappings_are_copied(tmp_path):
    write(tmp_path / "base.yaml", "TRAIN: &node {BATCH_SIZE: 6}\nTEST: *node")
    top = write(tmp_path / "top.yaml", "_BASE_: base.yaml\nTEST: {BATCH_SIZE: 9}")
    assert read_with_bases(str(top)) == {"TRAIN": {"BATCH_SIZE": 6}, "TEST": {"BATCH_SIZE": 9}}


def alias_bomb(levels, line="{name}: &{name} [{last}]"):
    """YAML in which each line contains nine aliases of the line before it."""
    names = [f"a{number}" for number in range(levels)]
    lines = ["a0: &a0 [lol]"]
    for last, name in itertools.pairwise(names):
        lines.append(line.format(name=name, last=", ".join([f"*{last}"] * 9)))
    return "\n".join(lines)


MERGE_BOMB = alias_bomb(10, "{name}: &{name} {{<<: [{last}]}}").partition("\n")[2]


@pytest.mark.parametrize(
    "text, word",
    [
        (alias_bomb(10), "aliases"),
        (alias_bomb(40), "aliases"),
        ("a0: &a0 {k: 1}\n" + MERGE_BOMB, "aliases"),
        ("RNG_SEED:\n" + alias_bomb(10, "- &{name} [{last}]").replace("a0:", "-", 1), "aliases"),
        ("VIT: &x [*x]", "aliases"),
        ("VIT: &x {DEPTH: *x}", "aliases"),
        ("RNG_SEED: " + "x" * 300_000, "characters"),
        ("RNG_SEED: 0x" + "f" * 5000, "bits"),
        ("RNG_SEED: " + "9" * 5000, "digits"),
        ("RNG_SEED: !!python/name:os.system", "constructor"),
        ("RNG_SEED: " + "[" * 10_000, "recursion"),
        ("- a", "mapping"),
    ],
)
def test_hostile_yaml_is_refused(tmp_path, text, word):
    """In a checkpoint, and in a file of the user's."""
    path = str(write(tmp_path / "x.yaml", text))
    for parse in (lambda: parse_yaml(text, path), lambda: read_with_bases(path)):
        with pytest.raises(ConfigError, match=word) as caught:
            parse()
        assert len(str(caught.value)) < 400 + len(path) and "\n" not in str(caught.value)


def test_parsed_yaml():
    text = get_cfg().dump()
    assert parse_yaml(text, "x.pyth") == yaml.safe_load(text)
    assert parse_yaml("", "x.pyth") == {}


@pytest.mark.parametrize(
    "text",
    [
        "RNG_SEED: 0x" + "f" * 5000,
        "SOLVER: {BASE_LR: 0x" + "f" * 5000 + "}",
        'RNG_SEED: "0x' + "f" * 5000 + '"',
        'SOLVER: {BASE_LR: "1' + "0" * 400 + '"}',
        "RNG_SEED: 2001-99-99",
        "RNG_SEED: !!int ''",
        "RNG_SEED: !!bool x",
        "RNG_SEED: !!timestamp x",
        "RNG_SEED: [" + "1, " * 500 + "]",
        "x" * 1000 + ": 1",
        "VIT: " + "x" * 10_000,
    ],
)
def test_malformed_values_are_reported_in_one_line(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "x.yaml", text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 900


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "9" * 5000, "0x" + "f" * 100, "[" * 900])
@pytest.mark.parametrize("key", ["RNG_SEED", "SOLVER.BASE_LR", "DATA.MEAN"])
def test_malformed_overrides_are_reported_in_one_line(base, key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(base, [key, value])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
