"""Tests with many views: scores, result files, failed videos, interrupted tests."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.engine import evaluate
from slowfast_lara.engine.metrics import count_correct
from slowfast_lara.errors import RunError
from slowfast_lara.inference.scoring import score_views
from slowfast_lara.labels import LabelKind, top_classes
from slowfast_lara.models import build_model
from slowfast_lara.models.motionformer import VisionTransformer
from slowfast_lara.runs.checkpoint import load_weights
from tests.helpers.commands import run as main
from tests.helpers.launchers import start_nodes
from tests.helpers.runs import (
    copy_lists,
    finish,
    json_stats,
    kill_group,
    load_checkpoint,
    run_ok,
    start,
    wait_for,
    write_config,
)

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, video_set):
    """Return the checkpoint of a short training."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "c.yaml", video_set, folder / "out", TEST__ENABLE=False)
    assert main(["--cfg", str(config)]) == 0
    return folder / "out" / "checkpoints" / "checkpoint_epoch_00002.pyth"


def run_test(folder, video_set, trained, *, code=0, **changes):
    output = folder / "out"
    changes = {
        "TRAIN__ENABLE": False,
        "TEST__CHECKPOINT_FILE_PATH": str(trained),
        "TEST__SAVE_RESULTS_PATH": "scores.npz",
        **changes,
    }
    config = write_config(folder / "c.yaml", video_set, output, **changes)
    assert main(["--cfg", str(config)]) == code
    return output, config


def test_scores_are_the_mean_over_single_views(tmp_path, video_set, trained):
    output, config = run_test(tmp_path, video_set, trained)
    cfg = load_config(config)
    model = build_model(cfg)
    load_weights(model, load_checkpoint(trained.parent.parent, trained.name)["model_state"], "")
    model.eval()
    results = json.loads((output / "test_results.json").read_text())
    saved = np.load(output / "scores.npz", allow_pickle=False)
    assert [video["path"] for video in results["videos"]] == saved["paths"].tolist()
    for i, video in enumerate(results["videos"]):
        views = load_views(video["path"], cfg)
        assert video["num_views"] == len(views) == 6 == saved["num_views"][i]
        with torch.no_grad():
            expected = sum(model([view[None]])[0].double() for view in views) / len(views)
        assert np.allclose(saved["scores"][i], expected, atol=1e-6)
        assert torch.allclose(score_views(model, views, cfg), expected.float(), atol=1e-6)
        order = np.argsort(-saved["scores"][i])
        assert video["top5"] == order.tolist()
        assert video["top5_scores"] == pytest.approx(saved["scores"][i][order].tolist())
        assert video["label"] == saved["labels"][i]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_scores_do_not_depend_on_the_global_generator(tmp_path, video_set, name):
    """In a test, estimators draw from their own seeds and do not advance the global generator."""
    changes = {"VIT__APPROX_ATTN_TYPE": name, "VIT__APPROX_ATTN_DIM": 3}
    cfg = load_config(write_config(tmp_path / "c.yaml", video_set, tmp_path, **changes))
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    views = torch.randn(5, 3, 4, 32, 32)
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        scores.append(score_views(model, views, cfg))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*scores)


def test_accuracies_follow_from_the_scores(tmp_path, video_set, trained):
    output, _ = run_test(tmp_path, video_set, trained)
    results = json.loads((output / "test_results.json").read_text())
    saved = np.load(output / "scores.npz")
    correct = saved["scores"].argmax(1) == saved["labels"]
    assert results["top1_acc"] == pytest.approx(100 * correct.mean())
    assert results["top5_acc"] == 100  # there are three classes
    for label in range(3):
        of_class = saved["labels"] == label
        per_class = results["per_class"][str(label)]
        assert per_class["num_videos"] == of_class.sum()
        assert per_class["top1_acc"] == pytest.approx(100 * correct[of_class].mean())
    final = json_stats(output)[-1]
    assert final["split"] == "test_final"
    assert final["top1_acc"] == pytest.approx(results["top1_acc"], abs=1e-5)


def test_failed_videos_are_listed_and_not_counted(tmp_path, video_set, trained):
    lists = tmp_path / "lists"
    lists.mkdir()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video")
    lines = (video_set / "test.csv").read_text().splitlines()
    lines[2:2] = [f"{broken} 1", f"{tmp_path / 'missing.mp4'} 0"]
    (lists / "test.csv").write_text("\n".join(lines) + "\n")
    output, _ = run_test(tmp_path, lists, trained)
    results = json.loads((output / "test_results.json").read_text())
    assert [video["path"] for video in results["failed"]] == [
        str(broken),
        str(tmp_path / "missing.mp4"),
    ]
    assert all(video["reason"] for video in results["failed"])
    assert results["num_videos"] == 7 and results["num_failed"] == 2
    assert json_stats(output)[-1]["num_failed"] == 2
    assert "on 7 videos; 2 failed" in (output / "stdout.log").read_text()
    whole, _ = run_test(tmp_path / "out", video_set, trained)
    assert json.loads((whole / "test_results.json").read_text())["videos"] == results["videos"]


def test_nothing_to_score_is_an_error(tmp_path, video_set, trained, capsys):
    lists = tmp_path / "lists"
    lists.mkdir()
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (lists / "test.csv").write_text(f"{tmp_path / 'broken.mp4'} 0\n")
    output, _ = run_test(tmp_path, lists, trained, code=1)
    assert "broken.mp4" in capsys.readouterr().err
    assert not (output / "test_results.json").exists()


def test_last_checkpoint_of_the_run_is_tested(tmp_path, video_set, trained):
    target = tmp_path / "out" / "checkpoints"
    target.mkdir(parents=True)
    (target / "checkpoint_epoch_00001.pyth").write_bytes(trained.read_bytes())
    (target / "checkpoint_epoch_00002.pyth").write_bytes(trained.read_bytes()[:1000])
    output, _ = run_test(tmp_path, video_set, "")
    results = json.loads((output / "test_results.json").read_text())
    assert results["checkpoint"].endswith("checkpoint_epoch_00001.pyth")


def test_validation_does_not_count_failed_videos(tmp_path, video_set):
    lists = copy_lists(tmp_path / "lists", video_set)
    with open(lists / "val.csv", "a") as file:
        file.write(f"{tmp_path / 'missing.mp4'} 0\n" * 6)  # a whole batch of them
    output, _ = run_test(tmp_path, lists, "", TRAIN__ENABLE=True, TEST__ENABLE=False)
    stats = [s for s in json_stats(output) if s.get("_type") == "val_epoch"]
    assert [(s["num_videos"], s["num_failed"]) for s in stats] == [(5, 6)]
    whole, _ = run_test(output, video_set, "", TRAIN__ENABLE=True, TEST__ENABLE=False)
    assert (
        stats[0]["top1_err"]
        == [s["top1_err"] for s in json_stats(whole) if s.get("_type") == "val_epoch"][0]
    )


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 7])
def test_top_five_of_any_number_of_classes(classes):
    scores = torch.rand(20, classes, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % classes
    ranks = [(row > row[label]).sum().item() for row, label in zip(scores, labels)]
    expected = [sum(r < 1 for r in ranks), sum(r < 5 for r in ranks)]
    assert count_correct(scores, labels, LabelKind({"": classes})) == expected


def test_equal_scores_have_one_order_everywhere(tmp_path, video_set, trained):
    """All classes have the same score: accuracies and lists must agree that class 0 is first."""
    content = load_checkpoint(trained.parent.parent, trained.name)
    for name in ("head.weight", "head.bias"):
        content["model_state"][name].zero_()
    torch.save(content, tmp_path / "equal.pyth")
    output, _ = run_test(tmp_path, video_set, tmp_path / "equal.pyth")
    results = json.loads((output / "test_results.json").read_text())
    assert all(video["top5"] == [0, 1, 2] for video in results["videos"])
    first = [video["label"] == 0 for video in results["videos"]]
    assert results["top1_acc"] == pytest.approx(100 * np.mean(first))
    per_class = {label: row["top1_acc"] for label, row in results["per_class"].items()}
    assert per_class == {"0": 100, "1": 0, "2": 0}


@pytest.mark.parametrize("classes", [7, 40, 400])
def test_equal_scores_are_ranked_by_class(classes):
    """Few distinct values, so that most scores are equal; a stable sort is the reference."""
    scores = torch.randint(0, 3, (50, classes), generator=torch.Generator().manual_seed(0)).float()
    expected = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :5]
    assert top_classes(scores).tolist() == expected.tolist()
    labels = torch.arange(50) % classes
    correct = expected == labels.numpy()[:, None]
    counts = count_correct(scores, labels, LabelKind({"": classes}))
    assert [int(count) for count in counts] == [correct[:, 0].sum(), correct.sum()]


def bad_on_some_videos(monkeypatch, is_bad):
    """In validation, the scores of clip number i are NaN if `is_bad(i)`."""
    forward, counter = VisionTransformer.forward, itertools.count()

    def broken(self, clips):
        outputs = forward(self, clips)
        if not self.training:
            for row in outputs:
                row[0] = torch.nan if is_bad(next(counter)) else row[0]
        return outputs

    monkeypatch.setattr(VisionTransformer, "forward", broken)


def test_validation_refuses_scores_that_are_not_finite(tmp_path, video_set, monkeypatch):
    """As in a test: such videos are reported as failed. The model cannot be the best one."""
    changes = {"TRAIN__CHECKPOINT_BEST": True, "TEST__ENABLE": False, "TRAIN__EVAL_PERIOD": 1}
    bad_on_some_videos(monkeypatch, lambda i: i in (1, 3))  # of the five of the first epoch
    output, _ = run_test(tmp_path, video_set, "", TRAIN__ENABLE=True, **changes)
    stats = [s for s in json_stats(output) if s.get("_type") == "val_epoch"]
    assert [(s["num_videos"], s["num_failed"]) for s in stats] == [(3, 2), (5, 0)]
    log = (output / "stdout.log").read_text()
    assert log.count("val1.mp4: the scores of the model are not finite") == 1
    assert log.count("val3.mp4: the scores of the model are not finite") == 1
    assert load_checkpoint(output, "best.pyth")["epoch"] == 1


def test_validation_without_finite_scores_is_an_error(tmp_path, video_set, monkeypatch, capsys):
    bad_on_some_videos(monkeypatch, lambda i: True)
    run_test(tmp_path, video_set, "", code=1, TRAIN__ENABLE=True, TEST__ENABLE=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert "none of 5 validation videos" in line and "not finite" in line


# Interrupted tests resume


def results_of(output):
    """Return the results and the bytes of the scores."""
    results = json.loads((output / "test_results.json").read_text())
    return results, np.load(output / "scores.npz")["scores"].tobytes()


def parts(output):
    return sorted(output.glob("test_scores.*.part"))


def size_of_parts(output):
    return sum(path.stat().st_size for path in parts(output))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, video_set, trained):
    return results_of(run_test(tmp_path_factory.mktemp("whole"), video_set, trained)[0])


def interrupt_test(folder, video_set, trained, monkeypatch, after, **changes):
    """Run a test that fails after `after` videos."""
    calls = []

    def failing(model, views, cfg):
        calls.append(views)
        if len(calls) > after:
            raise RunError("interrupted")
        return score_views(model, views, cfg)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "score_views", failing)
        output, config = run_test(folder, video_set, trained, code=1, **changes)
    assert not (output / "test_results.json").exists()
    return output, config


def test_an_interrupted_test_resumes(tmp_path, video_set, trained, whole, monkeypatch):
    for after in (2, 3):
        output, config = interrupt_test(tmp_path, video_set, trained, monkeypatch, after)
    assert len(parts(output)) == 2
    # The last record is incomplete, so its video is scored again.
    longest = max(parts(output), key=lambda path: path.stat().st_size)
    longest.write_bytes(longest.read_bytes()[:-1])
    scored = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "score_views", lambda *a: scored.append(1) or score_views(*a))
        assert main(["--cfg", str(config)]) == 0
    assert len(scored) == 7 - 2 - 3 + 1
    assert results_of(output) == whole
    assert parts(output) == []


def test_score_files_that_are_not_regular_are_ignored(tmp_path, video_set, trained, whole):
    """Reading a FIFO would block until another process writes to it."""
    (tmp_path / "out" / "test_scores.folder.part").mkdir(parents=True)
    fifo = tmp_path / "out" / "test_scores.fifo.part"
    os.mkfifo(fifo)
    # A reader would get the end of the file, and the test would remove the FIFO as invalid.
    writer = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_WRONLY)), daemon=True)
    writer.start()
    output, _ = run_test(tmp_path, video_set, trained)
    assert results_of(output) == whole and fifo.is_fifo()
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))  # ends the writer
    writer.join()


@pytest.mark.parametrize("change", ["weights", "views", "list", "nothing"])
def test_scores_of_another_test_are_removed(
    tmp_path, video_set, trained, monkeypatch, change, caplog
):
    output, config = interrupt_test(tmp_path, video_set, trained, monkeypatch, 3)
    lists, changes = video_set, {}
    if change == "weights":
        content = load_checkpoint(trained.parent.parent, trained.name)
        content["model_state"]["head.bias"] += 1
        torch.save(content, tmp_path / "other.pyth")
        trained = tmp_path / "other.pyth"
    elif change == "views":
        changes["TEST__NUM_ENSEMBLE_VIEWS"] = 1
    elif change == "list":
        lists = tmp_path / "lists"
        lists.mkdir()
        lines = (video_set / "test.csv").read_text().splitlines()
        (lists / "test.csv").write_text("\n".join(lines[1:]) + "\n")
    else:  # only keys that change no score
        copy = tmp_path / "copy.pyth"
        copy.write_bytes(trained.read_bytes())
        trained, changes = copy, {"LOG_PERIOD": 3, "DIST_TIMEOUT": 77}
    scored = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "score_views", lambda *a: scored.append(1) or score_views(*a))
        run_test(tmp_path, lists, trained, **changes)
    log = (output / "stdout.log").read_text()
    assert len(scored) == {"list": 6, "nothing": 4}.get(change, 7)
    assert ("Removing scores" in log) == (change != "nothing")
    assert parts(output) == []


def test_a_full_disk_at_the_end_keeps_all_scores(
    tmp_path, video_set, trained, whole, monkeypatch, capsys
):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "write_json", full)
        output, config = run_test(tmp_path, video_set, trained, code=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(output / "test_results.json") in line and "No space left" in line
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "score_views", None)  # nothing is scored again
        assert main(["--cfg", str(config)]) == 0
    assert results_of(output) == whole


def write_test_config(folder, video_set, trained, **changes):
    """Write the config of a test of trained weights with output in `folder`/out."""
    return write_config(
        folder / "c.yaml",
        video_set,
        folder / "out",
        TRAIN__ENABLE=False,
        TEST__CHECKPOINT_FILE_PATH=str(trained),
        TEST__SAVE_RESULTS_PATH="scores.npz",
        **changes,
    )


@pytest.mark.slow
def test_a_test_killed_and_stopped_at_random_times(tmp_path, video_set, trained, whole):
    """With one and two processes: no video is lost or counted twice."""
    rng = random.Random(0)
    output = tmp_path / "out"
    config = write_test_config(tmp_path, video_set, trained, DATA_LOADER__NUM_WORKERS=1)
    for number in (signal.SIGKILL, signal.SIGTERM) * 3:
        written = size_of_parts(output)
        nodes = rng.choice([1, 2])
        processes = start_nodes(config, 2) if nodes == 2 else [start("--cfg", config)]
        while size_of_parts(output) <= written and processes[0].poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, number)
        for process in processes:
            finish(process)
        if (output / "test_results.json").exists():  # written before the signal
            assert json.loads((output / "test_results.json").read_text()) == whole[0]
    run_ok("--cfg", config)
    assert results_of(output) == whole
    assert parts(output) == []


LATE = """
import sys, time
from tests.helpers.commands import run as main
from slowfast_lara.engine import evaluate
from slowfast_lara.engine.distributed import rank

score_views = evaluate.score_views

def late(*arguments):
    time.sleep(4 * rank())
    return score_views(*arguments)

evaluate.score_views = late
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_exceeds_the_timeout(tmp_path, video_set, trained, whole):
    """Rank 1 scores its videos so slowly that the collective of rank 0 times out."""
    output = tmp_path / "out"
    config = write_test_config(tmp_path, video_set, trained, DIST_TIMEOUT=5)
    ends = [finish(node) for node in start_nodes(config, 2, program=("-c", LATE))]
    assert [code for code, _, _ in ends] == [1, 1], ends
    for _, _, stderr in ends:
        assert stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in stderr
    assert not (output / "test_results.json").exists()
    records = b"".join(part.read_bytes().partition(b"\n")[2] for part in parts(output))
    num_scored = len(records) // 32  # index, views, three scores, CRC
    assert 4 < num_scored < 7  # the four of rank 0, and some of rank 1
    assert f"Resuming a test: {num_scored} videos" in run_ok("--cfg", config)
    assert results_of(output) == whole
    assert parts(output) == []


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_nodes_stop_together_and_one_process_resumes(
    tmp_path, video_set, trained, whole, stopped
):
    """One node receives a signal, or is suspended; then one process scores the rest."""
    lists = tmp_path / "lists"
    lists.mkdir()
    lines = (video_set / "test.csv").read_text().splitlines()
    (lists / "test.csv").write_text("\n".join(lines * 30) + "\n")
    output = tmp_path / "out"
    config = write_config(
        tmp_path / "c.yaml",
        lists,
        output,
        TRAIN__ENABLE=False,
        TEST__CHECKPOINT_FILE_PATH=str(trained),
        DIST_TIMEOUT=10 if stopped else 60,
    )
    nodes = start_nodes(config, 2)
    wait_for(lambda: len(parts(output)) == 2, 180)
    os.kill(nodes[1].pid, signal.SIGSTOP if stopped else signal.SIGTERM)
    if stopped:
        code, _, stderr = finish(nodes[0], 100)
        assert code == 1, stderr
        kill_group(nodes[1])
    else:
        ends = [finish(node) for node in nodes]
        assert [code for code, _, _ in ends] == [75, 75], ends
    assert parts(output) and not (output / "test_results.json").exists()
    stdout = run_ok("--cfg", config)
    assert "Resuming a test" in stdout
    results = json.loads((output / "test_results.json").read_text())
    assert results["videos"] == whole[0]["videos"] * 30
    assert parts(output) == []
