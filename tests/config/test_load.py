"""Configs load, merge and are refused with a line that helps."""

import itertools
import re

import pytest
import yaml

from slowfast_lara.config import check_machine, get_cfg, load_config
from slowfast_lara.config.defaults import walk
from slowfast_lara.config.load import CALLED_HERE
from slowfast_lara.config.yaml_files import read_with_bases
from slowfast_lara.errors import ConfigError


def published(dataset, layer, crop, frames, rate):
    """The keys and values of Motionformer's published files."""
    ssv2 = dataset == "Ssv2"
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
            "USE_RAND_AUGMENT": ssv2,
            "RE_PROB": 0.0,
            "USE_REPEATED_AUG": False,
            "COLORJITTER": not ssv2,
            "USE_RANDOM_RESIZE_CROPS": frames == 32 and not ssv2,
            "GRAYSCALE": False,
            "GAUSSIAN": False,
        },
        "SOLVER": {
            # As PyYAML reads it: without a dot, 1e-4 is text.
            "BASE_LR": "0.375e-4" if large else "1e-4",
            "LR_POLICY": "steps_with_relative_lrs",
            "LRS": [1, 0.1, 0.01],
            "STEPS": [0, 20, 30],
            "MAX_EPOCH": 35,
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
            "NUM_CLASSES": 174 if ssv2 else 400,
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
    if ssv2:
        tree["TRAIN"].update(CHECKPOINT_EPOCH_RESET=True, CHECKPOINT_FILE_PATH="there/x.pyth")
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
    "dataset, variant", list(itertools.product(["Kinetics", "Ssv2"], VARIANTS))
)
def test_published_files_load_unchanged(tmp_path, dataset, variant):
    tree = published(dataset, *variant)
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
    assert first.RESNET.DEPTH == 50  # PySlowFast's tree is there


def test_opts_override_the_file(base):
    cfg = load_config(base, ["VIT.DEPTH", "2", "SOLVER.CLIP_GRAD", 1, "DATA.MEAN", "[0, 0, 0.5]"])
    assert (cfg.VIT.DEPTH, cfg.SOLVER.CLIP_GRAD, cfg.DATA.MEAN) == (2, 1, [0, 0, 0.5])
    assert load_config(base, ("SOLVER.CLIP_GRAD", "None")).SOLVER.CLIP_GRAD is None


def test_a_word_may_stand_for_a_number(base, tmp_path):
    """And a number for the word of a file below."""
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


def test_a_circle_of_base_files_is_refused(tmp_path):
    write(tmp_path / "a.yaml", {"_BASE_": "b.yaml"})
    write(tmp_path / "b.yaml", {"_BASE_": "a.yaml"})
    with pytest.raises(ConfigError, match="_BASE_ files refer to each other in a circle"):
        load_config(tmp_path / "a.yaml")


def test_python_tags_are_refused_and_nothing_runs(tmp_path):
    victim = tmp_path / "victim"
    for text in (
        f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{victim}']",
        f"_BASE_: !!python/object/apply:os.mkdir ['{victim}']",
    ):
        with pytest.raises(ConfigError, match="is not plain YAML: could not determine a constr"):
            load_config(write(tmp_path / "evil.yaml", text))
        with pytest.raises(ConfigError, match="is not plain YAML"):
            write(tmp_path / "innocent.yaml", {"_BASE_": "evil.yaml"})
            load_config(tmp_path / "innocent.yaml")
    assert not victim.exists()


def test_values_on_the_command_line_are_literals_only(base, tmp_path):
    code = f"__import__('os').mkdir('{tmp_path / 'victim'}')"
    with pytest.raises(ConfigError, match="VIT.DEPTH is .*; a whole number is expected"):
        load_config(base, ["VIT.DEPTH", code])
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("- a\n- b\n", "a mapping of config keys is expected"),
        ("VIT: [", "is not plain YAML"),
        (b"\xff\xfe\x00", "is not plain YAML"),
        ("_BASE_: 3", "_BASE_ is 3; a file name is expected"),
        ("_BASE_: none.yaml", "cannot read config .*none.yaml: No such file"),
    ],
)
def test_files_of_the_wrong_form(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="no config file .*x.yaml"):
        load_config(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot read config .*: Is a directory"):
        load_config(tmp_path)


WRONG = {
    ("VIT.ATN_LAYER", "joint"): "unknown config key VIT.ATN_LAYER; did you mean VIT.ATTN_LAYER?",
    ("PATCH_SIZE", "16"): "unknown config key PATCH_SIZE; did you mean VIT.PATCH_SIZE?",
    ("NUM_GPU", "1"): "unknown config key NUM_GPU; did you mean NUM_GPUS?",
    ("VIT.LARA.BTA", "1"): "unknown config key VIT.LARA.BTA; did you mean VIT.LARA.BETA?",
    ("VIT.DEPTH.X", "1"): "VIT.DEPTH is {'X': '1'}; a whole number is expected",
    ("VIT", "3"): "VIT is '3'; it holds keys: PATCH_SIZE",
    ("VIT.DEPTH", "many"): "VIT.DEPTH is 'many'; a whole number is expected",
    ("VIT.DEPTH", "1.5"): "VIT.DEPTH is 1.5; a whole number is expected",
    ("VIT.QKV_BIAS", "1"): "VIT.QKV_BIAS is 1; True or False is expected",
    ("SOLVER.BASE_LR", "fast"): "SOLVER.BASE_LR is 'fast'; a number is expected",
    ("SOLVER.BASE_LR", "0"): "SOLVER.BASE_LR is 0.0; a positive number is expected",
    ("SOLVER.CLIP_GRAD", "x"): "SOLVER.CLIP_GRAD is 'x'; a number or None is expected",
    ("SOLVER.CLIP_GRAD", "1e999"): "SOLVER.CLIP_GRAD is inf; a finite number is expected",
    ("SOLVER.CLIP_GRAD", "-1"): "SOLVER.CLIP_GRAD is -1; a positive number or None is expected",
    ("DATA.MEAN", "0.5"): "DATA.MEAN is 0.5; a list is expected",
    ("DATA.MEAN", "[1, 2]"): "DATA.MEAN is [1, 2]; 3 numbers (VIT.CHANNELS) are expected",
    ("DATA.STD", "[0, 1, 1]"): "DATA.STD is [0, 1, 1]; positive numbers are expected",
    ("VIT.ATTN_LAYER", "axial"): "VIT.ATTN_LAYER is 'axial'; allowed: trajectory, joint, divided",
    ("VIT.APPROX_ATTN_TYPE", "laura"): "VIT.APPROX_ATTN_TYPE is 'laura'; allowed: none, softmax, ",
    ("VIT.LARA.PROPOSAL", "near"): "VIT.LARA.PROPOSAL is 'near'; allowed: local, global, mixed",
    ("VIT.LARA.NOISE", "loud"): "VIT.LARA.NOISE is 'loud'; a number is expected, or one of: code",
    ("VIT.RA.NOISE", "-1"): "VIT.RA.NOISE is -1.0; a finite number of at least 0 is expected",
    ("VIT.RA.NUM_SAMPLES", "0"): "VIT.RA.NUM_SAMPLES is 0; at least 1 is expected",
    ("VIT.NUM_HEADS", "7"): "VIT.EMBED_DIM is 768; a multiple of VIT.NUM_HEADS (7) is expected",
    ("DATA.TRAIN_CROP_SIZE", "230"): "DATA.TRAIN_CROP_SIZE is 230; a multiple of VIT.PATCH_SIZE",
    ("DATA.NUM_FRAMES", "15"): "DATA.NUM_FRAMES is 15; VIT.TEMPORAL_RESOLUTION * "
    "VIT.PATCH_SIZE_TEMP (8 * 2) is expected",
    ("TRAIN.DATASET", "Epickitchens"): "TRAIN.DATASET is 'Epickitchens'; supported datasets: "
    "Kinetics, Ssv2",
    ("TRAIN.BATCH_SIZE", "0"): "TRAIN.BATCH_SIZE is 0; at least 1 is expected",
    ("SHARD_ID", "4"): "SHARD_ID is 4; below NUM_SHARDS (4) is expected",
    ("TEST.NUM_SPATIAL_CROPS", "2"): "TEST.NUM_SPATIAL_CROPS is 2; allowed: 1, 3",
    ("SOLVER.STEPS", "[0, 30, 20]"): "SOLVER.STEPS is [0, 30, 20]; rising epochs that start with 0",
    ("SOLVER.LRS", "[1]"): "SOLVER.LRS is [1]; one factor for each of SOLVER.STEPS (3) is expected",
    ("SOLVER.SMOOTHING", "1"): "SOLVER.SMOOTHING is 1.0; a number from 0 to below 1 is expected",
    ("SOLVER.EMA_DECAY", "1"): "SOLVER.EMA_DECAY is 1.0; a number from 0 to below 1 is expected",
    ("SOLVER.LAYER_DECAY", "0"): "SOLVER.LAYER_DECAY is 0.0; a number above 0, at most 1, is",
    ("SOLVER.LAYER_DECAY", "1.1"): "SOLVER.LAYER_DECAY is 1.1; a number above 0, at most 1, is",
    ("DATA.RE_PROB", "1.5"): "DATA.RE_PROB is 1.5; a number from 0 to 1 is expected",
    ("DATA.GRAYSCALE", "0.2"): "DATA.GRAYSCALE is 0.2; True or False is expected",
    ("MIXUP.PROB", "-0.1"): "MIXUP.PROB is -0.1; a number from 0 to 1 is expected",
    ("MIXUP.ALPHA", "-1"): "MIXUP.ALPHA is -1.0; at least 0 is expected",
    ("TRAIN.CHECKPOINT_TYPE", "caffe2"): "TRAIN.CHECKPOINT_TYPE is 'caffe2'; allowed: pytorch",
    ("DATA.TRAIN_JITTER_SCALES", "[200, 320]"): "DATA.TRAIN_JITTER_SCALES is [200, 320]; a short "
    "side of at least DATA.TRAIN_CROP_SIZE (224) is expected",
    ("DATA.RAND_AUGMENT", "strong"): "DATA.RAND_AUGMENT is 'strong'; the form is rand-m<magnitude>",
    ("VIT.VIDEO_INPUT", "False"): "VIT.VIDEO_INPUT is False; images need VIT.PATCH_SIZE_TEMP 1",
}


@pytest.mark.parametrize("override", WRONG, ids=" ".join)
def test_a_wrong_value_is_one_line_with_key_value_and_what_is_allowed(base, override):
    with pytest.raises(ConfigError) as caught:
        load_config(base, list(override))
    assert str(caught.value).startswith(WRONG[override])
    assert "\n" not in str(caught.value)


def test_a_wrong_key_in_a_file_names_the_file(tmp_path):
    path = write(tmp_path / "typo.yaml", {"VIT": {"DEPHT": 3}})
    message = f"unknown config key VIT.DEPHT in {path}; did you mean VIT.DEPTH?"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == message


def test_mixup_needs_something_to_draw_from(base):
    opts = ["MIXUP.ENABLE", "True", "MIXUP.ALPHA", "0", "MIXUP.CUTMIX_ALPHA"]
    load_config(base, [*opts, "0.5"])
    with pytest.raises(ConfigError, match="MIXUP.ENABLE is True; MIXUP.ALPHA .* above 0"):
        load_config(base, [*opts, "0"])
    with pytest.raises(ConfigError, match="MIXUP.CUTMIX_ALPHA is inf; a finite number"):
        load_config(base, [*opts, "1e400"])


@pytest.mark.parametrize("key", [*CALLED_HERE, "AUG.RE_PROB"])
def test_names_of_other_versions_say_what_it_is_here(base, tmp_path, key):
    top = key if key in CALLED_HERE else key.split(".")[0]
    path = write(tmp_path / "other.yaml", {"MIXUP": {}, **nested(key)})
    for load in (lambda: load_config(base, [key, "0.1"]), lambda: load_config(path)):
        with pytest.raises(ConfigError, match=f"unknown config key {top}.*; here it is [A-Z]"):
            load()
    known = {name for name, _ in walk(get_cfg())}
    assert set(re.findall(r"[A-Z]+\.[A-Z_]+", " ".join(CALLED_HERE.values()))) <= known


def nested(key):
    tree = 0.1
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return tree


def test_pairs_must_be_pairs(base):
    with pytest.raises(ConfigError, match="KEY VALUE pairs; 'VIT.DEPTH' has no value"):
        load_config(base, ["NUM_GPUS", "0", "VIT.DEPTH"])


@pytest.mark.parametrize("name", ["lara", "nystrom", "orthoformer"])
@pytest.mark.parametrize("layer, tokens", [("trajectory", 1568), ("joint", 1568), ("divided", 196)])
def test_more_landmarks_than_tokens(base, name, layer, tokens):
    opts = ["VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_LAYER", layer, "VIT.APPROX_ATTN_DIM"]
    load_config(base, [*opts, tokens])
    with pytest.raises(
        ConfigError, match=f"VIT.APPROX_ATTN_DIM is {tokens + 1}; .*at most {tokens}"
    ):
        load_config(base, [*opts, tokens + 1])


def test_samples_are_not_limited_by_tokens(base):
    cfg = load_config(base, ["VIT.APPROX_ATTN_TYPE", "performer", "VIT.APPROX_ATTN_DIM", 5000])
    assert cfg.VIT.APPROX_ATTN_DIM == 5000


def test_only_exact_attention_has_dropout(base):
    load_config(base, ["VIT.ATTN_DROPOUT", 0.1])
    with pytest.raises(ConfigError, match="VIT.ATTN_DROPOUT is 0.1; only exact attention has"):
        load_config(base, ["VIT.ATTN_DROPOUT", 0.1, "VIT.APPROX_ATTN_TYPE", "lara"])


class TestMachine:
    def config(self, base, tmp_path, *opts):
        here = ["NUM_GPUS", 0, "OUTPUT_DIR", str(tmp_path / "out")]
        data = ["DATA.PATH_TO_DATA_DIR", str(tmp_path)]
        return load_config(base, [*here, *data, *opts])

    def test_a_run_that_can_start(self, base, tmp_path):
        check_machine(self.config(base, tmp_path))
        assert not (tmp_path / "out").exists()  # it may still be refused

    def test_more_gpus_than_there_are(self, base, tmp_path):
        cfg = self.config(
            base, tmp_path, "NUM_GPUS", 1000, "TRAIN.BATCH_SIZE", 1000, "TEST.BATCH_SIZE", 1000
        )
        with pytest.raises(ConfigError, match="NUM_GPUS is 1000; this machine has .*; 0 runs on"):
            check_machine(cfg)

    def test_a_batch_that_the_gpus_cannot_share(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "TRAIN.BATCH_SIZE", 30, "NUM_GPUS", 8)
        with pytest.raises(ConfigError, match=r"TRAIN.BATCH_SIZE is 30; a multiple of NUM_GPUS"):
            check_machine(cfg)

    def test_kernels_that_cannot_run_here(self, base, tmp_path, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        cfg = self.config(base, tmp_path, "VIT.KERNELS", "triton")
        with pytest.raises(ConfigError, match="VIT.KERNELS is 'triton'; .*; auto and torch do"):
            check_machine(cfg)

    def test_no_data(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "DATA.PATH_TO_DATA_DIR", str(tmp_path / "no"))
        with pytest.raises(ConfigError, match="DATA.PATH_TO_DATA_DIR is .*an existing folder with"):
            check_machine(cfg)

    def test_no_checkpoint(self, base, tmp_path):
        cfg = self.config(base, tmp_path, "TRAIN.CHECKPOINT_FILE_PATH", "no.pyth")
        with pytest.raises(ConfigError, match="TRAIN.CHECKPOINT_FILE_PATH is 'no.pyth'; an exist"):
            check_machine(cfg)

    def test_output_that_cannot_be_written(self, base, tmp_path):
        (tmp_path / "file").touch()
        cfg = self.config(base, tmp_path, "OUTPUT_DIR", str(tmp_path / "file" / "out"))
        with pytest.raises(ConfigError, match="OUTPUT_DIR is .*; a folder that can be written is"):
            check_machine(cfg)


def laughs(levels, line="{name}: &{name} [{last}]"):
    """Each line names the one before it nine times."""
    names = [f"a{number}" for number in range(levels)]
    lines = ["a0: &a0 [lol]"]
    for last, name in itertools.pairwise(names):
        lines.append(line.format(name=name, last=", ".join([f"*{last}"] * 9)))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        laughs(10),
        laughs(40),
        "a0: &a0 {k: 1}\n" + laughs(10, "{name}: &{name} {{<<: [{last}]}}").partition("\n")[2],
        # An error that shows the value of the key would be without end.
        "RNG_SEED:\n" + laughs(10, "- &{name} [{last}]").replace("a0:", "-", 1),
        "VIT: &x [*x]",
        "VIT: &x {DEPTH: *x}",
    ],
)
def test_aliases_of_aliases_are_refused_at_once(tmp_path, text):
    with pytest.raises(ConfigError, match="aliases stand for more than") as caught:
        load_config(write(tmp_path / "x.yaml", text))
    assert len(str(caught.value)) < 300


def test_an_alias_is_a_copy(tmp_path):
    write(tmp_path / "base.yaml", "TRAIN: &node {BATCH_SIZE: 6}\nTEST: *node")
    top = write(tmp_path / "top.yaml", "_BASE_: base.yaml\nTEST: {BATCH_SIZE: 9}")
    assert read_with_bases(str(top)) == {"TRAIN": {"BATCH_SIZE": 6}, "TEST": {"BATCH_SIZE": 9}}


def test_bases_that_share_bases_are_read_once(tmp_path):
    """Without that, 2**40 files would be read."""
    write(tmp_path / "0.yaml", "RNG_SEED: 5")
    for number in range(1, 41):
        write(tmp_path / f"{number}.yaml", f"_BASE_: [{number - 1}.yaml, ./{number - 1}.yaml]")
    assert read_with_bases(str(tmp_path / "40.yaml")) == {"RNG_SEED": 5}


@pytest.mark.parametrize(
    "text",
    [
        "RNG_SEED: " + "9" * 5000,
        "RNG_SEED: 0x" + "f" * 5000,
        "SOLVER: {BASE_LR: 0x" + "f" * 5000 + "}",
        "0x" + "f" * 5000 + ": 1",
        'RNG_SEED: "0x' + "f" * 5000 + '"',
        'SOLVER: {BASE_LR: "1' + "0" * 400 + '"}',
        "RNG_SEED: 2001-99-99",
        "RNG_SEED: !!int ''",
        "RNG_SEED: !!bool x",
        "RNG_SEED: !!timestamp x",
        "RNG_SEED: " + "x" * 300_000,
        pytest.param("RNG_SEED: " + "[" * 10_000, marks=pytest.mark.slow),
        pytest.param("RNG_SEED: [" + "1, " * 30_000 + "]", marks=pytest.mark.slow),
        "RNG_SEED: [" + "1, " * 5_000 + "]",
        "x" * 100_000 + ": 1",
        "VIT: " + "x" * 100_000,
    ],
)
def test_absurd_values_are_one_short_line(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "x.yaml", text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 600


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, "9" * 5000, "0x" + "f" * 100, "[" * 900])
@pytest.mark.parametrize("key", ["RNG_SEED", "SOLVER.BASE_LR", "DATA.MEAN"])
def test_absurd_overrides_are_one_short_line(base, key, value):
    with pytest.raises(ConfigError) as caught:
        load_config(base, [key, value])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
