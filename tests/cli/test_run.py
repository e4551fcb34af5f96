"""`slowfast-lara run`: flags, KEY VALUE pairs, and bad input in one line with exit code 2."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from slowfast_lara.cli import build_parser
from slowfast_lara.engine import launch
from slowfast_lara.locks import LOCK
from slowfast_lara.runs.folder import LOG
from tests.helpers.commands import run as main
from tests.helpers.runs import json_stats, run_net, write_config

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture()
def setup(tmp_path, video_set):
    """A config, its folder of lists, and its output folder."""
    lists = tmp_path / "lists"
    lists.mkdir()
    for split in ("train", "val", "test"):
        shutil.copy(video_set / f"{split}.csv", lists)
    return write_config(tmp_path / "c.yaml", lists, tmp_path / "out"), lists, tmp_path / "out"


def assert_refused(capsys, arguments, *mentions):
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert len(captured.err.splitlines()) == 1, captured.err
    for mention in mentions:
        assert str(mention) in captured.err
    assert "json_stats" not in captured.out


def test_pairs_bare_and_with_opts():
    parse = build_parser().subcommands["run"].parse_arguments
    pairs = ["A.B", "1", "C", "-1e-4"]
    assert parse(["--cfg", "f", *pairs]).opts == pairs
    assert parse(["--cfg", "f", "--opts", *pairs]).opts == pairs
    assert parse([*pairs[:2], "--cfg", "f", "--opts", *pairs[2:]]).opts == pairs
    args = parse(["--cfg", "f", "A", "1", "--num_shards", "2", "--shard_id", "1"])
    assert (args.opts, args.num_shards, args.shard_id) == (["A", "1"], 2, 1)
    assert args.init_method is None


def test_num_shards_of_the_config_and_of_the_flags(tmp_path, setup, monkeypatch):
    config = write_config(tmp_path / "two.yaml", setup[1], setup[2], NUM_SHARDS=2, SHARD_ID=1)
    seen = []
    monkeypatch.setattr(launch, "launch", lambda run, cfg, init: seen.append(cfg) or 0)
    assert main(["--cfg", str(config)]) == 0
    assert main(["--cfg", str(config), "--num_shards", "3", "--shard_id", "0"]) == 0
    assert [(cfg.NUM_SHARDS, cfg.SHARD_ID) for cfg in seen] == [(2, 1), (3, 0)]


def test_config_for_several_nodes_started_on_one(tmp_path, setup, capsys, monkeypatch):
    """Without a flag for several nodes, the run refuses to start instead of waiting for peers."""
    config = write_config(tmp_path / "four.yaml", setup[1], setup[2], NUM_SHARDS=4)
    assert_refused(capsys, ["--cfg", config], "NUM_SHARDS 1")
    seen = []
    monkeypatch.setattr(launch, "launch", lambda run, cfg, init: seen.append(cfg.NUM_SHARDS) or 0)
    for words in (
        ["NUM_SHARDS", "1"],
        ["--num_shards", "1"],
        ["--shard_id", "0"],
        ["--init_method", "tcp://localhost:9999"],
    ):
        assert main(["--cfg", str(config), *words]) == 0
    assert seen == [1, 1, 4, 4]


def test_unknown_flag_in_a_real_process(setup):
    code, stdout, stderr = run_net("--cfg", setup[0], "--bogus", "1")
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert "--bogus" in stderr


@pytest.mark.parametrize(
    "extra, mention",
    [
        (["--bogus"], "--bogus"),
        (["VIT.DEPTH", "1", "-x", "1"], "unknown flag -x"),
        (["--num_shards", "two"], "--num_shards"),
        (["--num_shards", "2", "--shard_id", "2"], "SHARD_ID"),
        (["--num_shards", "2", "--init_method", "nowhere"], "--init_method"),
        (["SOLVER.MAX_EPOCHS", "3"], "SOLVER.MAX_EPOCH"),
        (["SOLVER.MAX_EPOCH"], "no value"),
        (["SOLVER.MAX_EPOCH", "many"], "SOLVER.MAX_EPOCH"),
        (["DATA.PATH_TO_DATA_DIR", "/not/there"], "/not/there"),
        (["TRAIN.BATCH_SIZE", "17"], "17"),
        (["VIT.IM_PRETRAINED", "True"], "VIT.PRETRAINED_WEIGHTS is 'vit_1k'"),
        (["TRAIN.CHECKPOINT_FILE_PATH", "/not/there.pyth"], "/not/there.pyth"),
        (["TRAIN.ENABLE", "False"], "no readable checkpoint"),
        (["SOLVER.OPTIMIZING_METHOD", "sgd", "SOLVER.DAMPENING", "0.5"], "Nesterov"),
        (["NUM_GPUS", "99"], "NUM_GPUS"),
    ],
)
def test_bad_arguments(setup, capsys, extra, mention):
    assert_refused(capsys, ["--cfg", setup[0], *extra], mention)


def test_no_config(capsys, tmp_path):
    assert_refused(capsys, [], "--cfg")
    assert_refused(capsys, ["--cfg", tmp_path / "none.yaml"], "none.yaml")


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize(
    "text, mention",
    [("", "test.csv"), ("a.mp4 3\n", "3"), ("a.mp4 -1\n", "-1"), ("a.mp4\n", "a.mp4")],
)
def test_bad_lists(setup, capsys, split, text, mention):
    config, lists, output = setup
    (lists / f"{split}.csv").write_text(text)
    assert_refused(capsys, ["--cfg", config], mention.replace("test.csv", f"{split}.csv"))
    assert not (output / "checkpoints").exists()


def test_missing_list(setup, capsys):
    (setup[1] / "val.csv").unlink()
    assert_refused(capsys, ["--cfg", setup[0]], "val.csv")


def test_another_number_of_classes_than_in_the_lists(setup, capsys):
    """A larger number would train: each label is valid."""
    config, lists, output = setup
    (lists / "classes.json").write_text('["a", "b", "c"]')
    wrong = ["--cfg", config, "MODEL.NUM_CLASSES", 5]
    assert_refused(capsys, wrong, "MODEL.NUM_CLASSES is 5", "set MODEL.NUM_CLASSES 3")
    assert not output.exists()


def test_unwritable_output(setup, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert_refused(
        capsys, ["--cfg", setup[0], "OUTPUT_DIR", tmp_path / "file" / "out"], "OUTPUT_DIR"
    )


@pytest.mark.parametrize("name", [LOCK, LOG])
def test_links_in_the_output_folder_are_refused(setup, capsys, tmp_path, name):
    precious, output = tmp_path / "precious", tmp_path / "linked"
    precious.write_text("precious")
    output.mkdir()
    (output / name).symlink_to(precious)
    arguments = ["--cfg", setup[0], "OUTPUT_DIR", output]
    assert_refused(capsys, arguments, name, "symbolic link")
    assert precious.read_text() == "precious"


def test_unusable_checkpoints(setup, capsys, tmp_path):
    torn = tmp_path / "torn.pyth"
    torn.write_bytes(b"PK\x03\x04 half")
    for key in ("TRAIN.CHECKPOINT_FILE_PATH", "TEST.CHECKPOINT_FILE_PATH"):
        enable = "TEST.ENABLE" if key.startswith("TRAIN") else "TRAIN.ENABLE"
        assert_refused(capsys, ["--cfg", setup[0], key, torn, enable, "False"], torn)
    text = tmp_path / "text.pyth"
    text.write_text("a page with the text 404")
    arguments = ["--cfg", setup[0], "TRAIN.CHECKPOINT_FILE_PATH", text, "TEST.ENABLE", "False"]
    assert_refused(capsys, arguments, text, "expected a PyTorch file", "starts with b'a page")
    other = tmp_path / "other.pyth"
    torch.save({"epoch": 0, "model_state": {"head.weight": torch.zeros(2, 2)}}, other)
    assert_refused(
        capsys,
        ["--cfg", setup[0], "TRAIN.ENABLE", "False", "TEST.CHECKPOINT_FILE_PATH", other],
        other,
        "does not fit",
    )


def test_files_of_a_run(setup):
    assert main(["--cfg", str(setup[0]), "--opts", "SOLVER.MAX_EPOCH", "1"]) == 0
    left = set(os.listdir(setup[2]))
    assert {"stdout.log", "config.yaml", "environment.json", "test_results.json"} <= left
    stats = json_stats(setup[2])
    assert stats[-1]["split"] == "test_final" and stats[-1]["num_videos"] == 7
    assert "MAX_EPOCH: 1" in (setup[2] / "config.yaml").read_text()
    log = (setup[2] / "stdout.log").read_text()
    assert "Effective batch 4" in log and "Learning rate 0.001" in log
