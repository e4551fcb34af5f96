"""Runs with verbs and nouns, and with several classes per clip: training to report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import slowfast_lara
from slowfast_lara.config import load_config
from slowfast_lara.data.loader import val_loader
from slowfast_lara.engine.metrics import (
    average_precisions,
    classification_loss,
    correct_ranks,
    metrics,
    score_loss,
)
from slowfast_lara.inference.model_card import model_card
from slowfast_lara.labels import LabelKind, top_actions
from slowfast_lara.models import build_model
from slowfast_lara.runs.checkpoint import load_weights
from tests.helpers.commands import predict, report
from tests.helpers.labelled_sets import CLASSES, NOUNS, VERBS, write_charades, write_kitchens
from tests.helpers.launchers import start_nodes
from tests.helpers.runs import (
    finish,
    json_stats,
    load_checkpoint,
    run_ok,
    same_tensors,
    start,
    write_config,
)

KITCHENS = {
    "TRAIN__DATASET": "Epickitchens",
    "TEST__DATASET": "Epickitchens",
    "MODEL__NUM_CLASSES": VERBS,
    "EPICKITCHENS__NUM_NOUNS": NOUNS,
}
CHARADES = {
    "TRAIN__DATASET": "charades",
    "TEST__DATASET": "charades",
    "MODEL__NUM_CLASSES": CLASSES,
    "MODEL__LOSS_FUNC": "bce_logit",
    "MODEL__HEAD_ACT": "sigmoid",
    "DATA__MULTI_LABEL": True,
    "DATA__ENSEMBLE_METHOD": "max",
}
SETS = {"kitchens": (write_kitchens, KITCHENS), "charades": (write_charades, CHARADES)}
PAIR = LabelKind({"verb": 7, "noun": 9})


@pytest.fixture(scope="module", params=SETS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def data(tmp_path_factory, kind) -> Path:
    return SETS[kind][0](tmp_path_factory.mktemp(kind))


def config_of(kind: str, folder: Path, data: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    options = {"TRAIN__CHECKPOINT_BEST": True, "TEST__SAVE_RESULTS_PATH": "scores.npz"}
    changes = {
        **SETS[kind][1],
        **options,
        "SOLVER__MAX_EPOCH": 3,
        "TRAIN__EVAL_PERIOD": 1,
    } | changes
    return write_config(folder / "c.yaml", data, folder / "out", **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory, kind, data) -> Path:
    """A run in one process."""
    folder = tmp_path_factory.mktemp("run")
    run_ok("--cfg", config_of(kind, folder, data))
    return folder / "out"


def results_of(output: Path) -> dict:
    return json.loads((output / "test_results.json").read_text())


def test_results_follow_from_the_scores(run, kind):
    """Accuracies, or the mean average precision, by plain loops over the saved scores."""
    results, saved = results_of(run), np.load(run / "scores.npz", allow_pickle=False)
    scores, labels = saved["scores"].astype(float), saved["labels"]
    if kind == "charades":
        precisions = []
        for score, positive in zip(scores.T, labels.T):
            ranks = [(score >= score[i]).sum() for i in np.flatnonzero(positive)]
            hits = [positive[score >= score[i]].sum() for i in np.flatnonzero(positive)]
            precisions.append(np.mean(np.array(hits) / ranks))
        assert results["map"] == pytest.approx(100 * np.mean(precisions))
        found = [results["per_class"][str(label)]["ap"] for label in range(CLASSES)]
        assert found == pytest.approx([100 * value for value in precisions])
        assert [video["label"] for video in results["videos"]] == [
            np.flatnonzero(row).tolist() for row in labels
        ]
        return
    verbs, nouns = scores[:, :VERBS], scores[:, VERBS:]
    assert verbs.sum(1) == pytest.approx(1, abs=1e-5) and nouns.sum(1) == pytest.approx(1, abs=1e-5)
    right = {"verb": verbs.argmax(1) == labels[:, 0], "noun": nouns.argmax(1) == labels[:, 1]}
    right["action"] = right["verb"] & right["noun"]
    for part, correct in right.items():
        assert results[f"{part}_top1_acc"] == pytest.approx(100 * correct.mean())
    for video, score in zip(results["videos"], scores):
        assert video["label"] == [video["verb"]["label"], video["noun"]["label"]]
        products = np.outer(score[:VERBS], score[VERBS:])
        best = [tuple(pair) for pair in video["top5"]]
        assert video["top5_scores"] == pytest.approx(sorted(products.flatten())[-1:-6:-1], rel=1e-5)
        assert [products[pair] for pair in best] == pytest.approx(video["top5_scores"], rel=1e-5)
    with_top5 = [video["label"] in video["top5"] for video in results["videos"]]
    assert results["action_top5_acc"] == pytest.approx(100 * np.mean(with_top5))


def test_log_and_best_checkpoint(run, kind):
    stats = json_stats(run)
    validations = [s for s in stats if s.get("_type") == "val_epoch"]
    key = "map" if kind == "charades" else "action_top1_err"
    assert len(validations) == 3 and all(key in s for s in validations)
    values = [s[key] for s in validations]
    best = max(values) if kind == "charades" else min(values)
    saved = load_checkpoint(run, "best.pyth")
    assert saved["epoch"] == values.index(best)
    training = [s for s in stats if s.get("_type") == "train_epoch"]
    assert all(np.isfinite(s["loss"]) for s in training)
    assert ("verb_top1_err" in training[0]) == (kind == "kitchens")
    final = stats[-1]
    assert final["split"] == "test_final"
    assert {k for k in results_of(run) if k.endswith("_acc") or k == "map"} <= set(final)


def test_lines_for_people(run, kind):
    """Epochs, test and checkpoints are summarised by the metric that chooses best.pyth."""
    log, results = (run / "stdout.log").read_text(), results_of(run)
    validation = [s for s in json_stats(run) if s.get("_type") == "val_epoch"][-1]
    if kind == "charades":
        name, percent, test = "mAP", validation["map"], "mean average precision"
    else:
        name, percent, test = "action top-1", 100 - validation["action_top1_err"], "action top-1"
    (epoch,) = (line for line in log.splitlines() if "Epoch 3/3: " in line)
    assert f"val loss {validation['loss']:.3f}, val {name} {percent:.1f} %" in epoch
    percent = results["map" if kind == "charades" else "action_top1_acc"]
    assert f"Test of checkpoint_epoch_00003.pyth: {test} {percent:.2f} %" in log
    assert f", val {name} " in log.split("best.pyth (epoch ")[-1]


def test_validation_loss(run, kind, data):
    """The mean over the videos of the training loss, from scores of single clips."""
    cfg = load_config(run / "config.yaml", [])
    model = build_model(cfg).eval()
    path = str(run / "checkpoints" / "checkpoint_epoch_00003.pyth")
    load_weights(model, load_checkpoint(run, "checkpoint_epoch_00003.pyth")["model_state"], path)
    losses = []
    with torch.no_grad():
        for batch in val_loader(cfg, batch_size=1):
            (scores,), (label,) = model(batch.clips).double(), batch.labels
            if kind == "charades":
                chances = torch.where(label == 1, scores, 1 - scores)
            else:
                chances = scores[label + torch.tensor([0, VERBS])]
            losses.append(-chances.log().mean().item())
    stats = [s for s in json_stats(run) if s.get("_type") == "val_epoch"]
    assert stats[-1]["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_results_have_names(run, kind):
    results = results_of(run)
    if kind == "charades":  # this set has no names
        assert "_name" not in json.dumps(results)
        return
    for video in results["videos"]:
        labels, names = [video["label"], *video["top5"]], [video["label_name"]]
        assert names + video["top5_names"] == [f"verb {v} noun {n}" for v, n in labels]
        for part in ("verb", "noun"):
            own = video[part]
            assert own["label_name"] == f"{part} {own['label']}"
            assert own["top5_names"] == [f"{part} {number}" for number in own["top5"]]
    for part in ("verb", "noun"):
        names = {number: row["name"] for number, row in results["per_class"][part].items()}
        assert names and names == {number: f"{part} {number}" for number in names}


def test_prediction_is_a_sequence(run, kind):
    """Of actions, for verbs and nouns; each has the product of two scores."""
    model = slowfast_lara.load(run / "checkpoints" / "checkpoint_epoch_00003.pyth")
    prediction = model(results_of(run)["videos"][0]["path"])
    ranked, scores = list(prediction), prediction.scores
    if kind == "kitchens":
        scores = np.outer(scores[:VERBS], scores[VERBS:]).flatten()
        assert prediction.to_dict()["noun"]["top5_names"][0].startswith("noun ")
    assert len(prediction) == len(ranked) == len({name for name, _ in ranked}) == len(scores)
    assert [x.score for x in ranked] == pytest.approx(sorted(scores.tolist(), reverse=True))
    assert prediction[0] == ranked[0] and prediction[-1] == ranked[-1]
    assert prediction.to_dict()["top5_names"] == [x.name for x in ranked[:5]]
    json.dumps(prediction.to_dict())


def test_scores_and_features_in_one_pass(run, kind):
    """Features are the mean over the views, also if scores are the maximum."""
    model = slowfast_lara.load(run / "checkpoints" / "checkpoint_epoch_00003.pyth")
    path = results_of(run)["videos"][0]["path"]
    prediction, features = model.predict_with_features(path, views=4)
    np.testing.assert_array_equal(prediction.scores, model(path, views=4).scores)
    np.testing.assert_array_equal(features, model.features(path, views=4))


def test_it_resumes_bit_for_bit(tmp_path, run, kind, data):
    """The fourth of six iterations fails; resumed, weights and test equal those of one run."""
    config = config_of(kind, tmp_path, data, TRAIN__CHECKPOINT_ITERATIONS=1)
    fault = ("-m", "tests.helpers.fault_injection", "forward", "4", "0", str(tmp_path), "0", "--")
    assert finish(start("--cfg", config, program=fault))[0] == 1
    assert "Resuming from" in run_ok("--cfg", config)
    last, output = "checkpoint_epoch_00003.pyth", tmp_path / "out"
    states = [load_checkpoint(folder, last)["model_state"] for folder in (run, output)]
    assert same_tensors(*states)
    whole, resumed = results_of(run), results_of(output)
    assert whole["videos"] == resumed["videos"] and whole["per_class"] == resumed["per_class"]


def test_two_processes_test_and_validate_like_one(tmp_path, run, kind, data):
    """The same checkpoint; and a validation of unequal numbers of videos per rank."""
    checkpoint = run / "checkpoints" / "checkpoint_epoch_00003.pyth"
    changes = {"TRAIN__ENABLE": False, "TEST__CHECKPOINT_FILE_PATH": str(checkpoint)}
    nodes = start_nodes(config_of(kind, tmp_path, data, **changes), 2)
    assert [finish(node)[0] for node in nodes] == [0, 0]
    assert results_of(tmp_path / "out")["videos"] == results_of(run)["videos"]
    trained = config_of(kind, tmp_path / "trained", data, TRAIN__BATCH_SIZE=2, TEST__ENABLE=False)
    assert [finish(node)[0] for node in start_nodes(trained, 2)] == [0, 0]
    stats = [s for s in json_stats(tmp_path / "trained" / "out") if s.get("_type") == "val_epoch"]
    assert [s["num_videos"] for s in stats] == [5, 5, 5]


def test_predict_lists_the_classes(run, kind, data, tmp_path, capsys):
    video = results_of(run)["videos"][1]
    checkpoint = run / "checkpoints" / "checkpoint_epoch_00003.pyth"
    files = ["--json", str(tmp_path / "p.json"), "--csv", str(tmp_path / "p.csv")]
    assert predict(["--checkpoint", str(checkpoint), *files, video["path"]]) == 0
    printed = capsys.readouterr().out
    (found,) = json.loads((tmp_path / "p.json").read_text())["videos"]
    assert found["top5"] == video["top5"] and found["top5_scores"] == video["top5_scores"]
    rows = (tmp_path / "p.csv").read_text().splitlines()[1:]
    if kind == "charades":
        assert found["top5_names"][0] == f"class {found['top5'][0]}" in printed
        assert rows[0].split(",")[3] == str(found["top5"][0])
        return
    verb, noun = found["top5"][0]
    assert found["top5_names"][0] == f"verb {verb} noun {noun}" in printed
    assert rows[0].split(",")[3] == f"{verb} {noun}"
    for part in ("verb", "noun"):
        assert found[part]["top5"] == video[part]["top5"]
        assert found[part]["top5_names"] == [f"{part} {i}" for i in found[part]["top5"]]
        assert f"\n  {part}\n" in printed


def test_predict_windows(run, kind, data, tmp_path):
    """A folder of frames as a stream: each window has its classes or actions."""
    folder = data / "P02" / "rgb_frames" / "P02_03" if kind == "kitchens" else data / "val0"
    assert predict([str(run), "--stream", "--json", str(tmp_path / "w.json"), str(folder)]) == 0
    windows = json.loads((tmp_path / "w.json").read_text())["windows"]
    assert windows and all(len(window["top5"]) == 5 for window in windows)


def test_report_shows_the_metrics(run, kind):
    assert report([str(run)]) == 0
    page, results = (run / "report.html").read_text(), results_of(run)
    if kind == "charades":
        assert f"{results['map']:.2f} %" in page and "mean average precision" in page
        assert "Confusion" not in page and "class 4" in page
        return
    for part in ("verb", "noun", "action"):
        assert f"{results[f'{part}_top1_acc']:.2f} %" in page
        assert f"{part} top-1 accuracy" in page and f"{part} top-1 error" in page
    assert "Confusion matrix of verbs" in page and "Classes of nouns" in page
    wrong = [v for v in results["videos"] if v["top5"][0] != v["label"]]
    assert page.count("<img") == len(wrong)  # thumbnails of the actions


def test_features_and_model_card(run, kind):
    model = slowfast_lara.load(run / "checkpoints" / "checkpoint_epoch_00003.pyth")
    path = results_of(run)["videos"][0]["path"]
    assert model.features(path).shape == (24,)
    assert model(path).scores.shape == (VERBS + NOUNS if kind == "kitchens" else CLASSES,)
    results, card = results_of(run), model_card(model, "safetensors", "")
    key, name = (
        ("map", "mean average precision") if kind == "charades" else ("verb_top1_acc", "verb top-1")
    )
    assert f"{name} {results[key]:.2f} %" in card


# Losses and metrics against references


def test_loss_of_scores_that_are_rounded_to_zero_or_one():
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    for label, classes in ((torch.tensor([0]), {}), (torch.tensor([[1, 0, 0]]), {"several": True})):
        loss = score_loss(sure, label, LabelKind({"": 3}, **classes)).item()
        assert 50 < loss < 101
    assert score_loss(sure, torch.tensor([1]), LabelKind({"": 3})).item() == pytest.approx(0)


@pytest.mark.parametrize(
    "kind, valid, invalid",
    [
        (LabelKind({"": 3}), [0, np.int64(2)], [3, -1, 1.0, "1", (1,), None, [1]]),
        (LabelKind({"": 3}, several=True), [(), (0, 2)], [0, (3,), (0, -1), ("0",), [0]]),
        (PAIR, [(0, 0), (6, 8)], [1, (7, 0), (0, 9), (0,), (0, 0, 0), (0, "1"), [0, 0]]),
    ],
)
def test_labels_of_a_kind(kind, valid, invalid):
    assert all(map(kind.has_label, valid)) and not any(map(kind.has_label, invalid))


def test_loss_of_a_pair_is_the_mean_of_two():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 16, generator=generator)
    labels = torch.stack([torch.arange(6) % 7, torch.arange(6) % 9], dim=1)
    expected = [
        functional.cross_entropy(part, labels[:, i], label_smoothing=0.1)
        for i, part in enumerate((logits[:, :7], logits[:, 7:]))
    ]
    found = classification_loss(logits, labels, PAIR, 0.1)
    assert found.item() == pytest.approx(sum(x.item() for x in expected) / 2)


def test_loss_of_several_classes():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator)
    labels = torch.randint(0, 2, (6, 4), generator=generator)
    found = classification_loss(logits, labels, LabelKind({"": 4}, several=True), 0.0)
    p = logits.double().sigmoid()
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("distinct", [2, 4, 1000])
def test_actions_are_the_best_pairs(distinct):
    """Against a stable sort of all pairs; with few distinct scores, most products are equal."""
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randint(1, distinct, (40, 16), generator=generator).double()
    pairs, products = top_actions(scores, PAIR)
    for row, pair, product in zip(scores.numpy(), pairs.tolist(), products.numpy()):
        every = np.outer(row[:7], row[7:]).flatten()
        order = np.argsort(-every, kind="stable")[:5]
        assert pair == [[i // 9, i % 9] for i in order.tolist()]
        assert product.tolist() == every[order].tolist()


def test_an_action_needs_both():
    scores = torch.zeros(3, 16)
    scores[:, 2] = scores[:, 7 + 4] = 1
    labels = torch.tensor([[2, 4], [2, 5], [1, 4]])
    ranks = correct_ranks(scores, labels, PAIR)
    assert [ranks[part][:, 0].tolist() for part in ("verb", "noun", "action")] == [
        [True, True, False],
        [True, False, True],
        [True, False, False],
    ]


def precision_by_thresholds(scores, labels):
    """The sum over all thresholds of the increase in recall times the precision."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = scores >= threshold
        new = labels[chosen].sum() / labels.sum()
        total += (new - recall) * labels[chosen].mean()
        recall = new
    return total


@pytest.mark.parametrize("distinct", [1, 3, 10**6])
def test_average_precision(distinct):
    rng = np.random.default_rng(distinct)
    scores = rng.integers(0, distinct, (60, 5)).astype(np.float32)
    labels = rng.random((60, 5)) < [0.0, 0.02, 0.3, 0.7, 1.0]
    labels[7, 1] = True
    found = average_precisions(scores, labels)
    assert sorted(found) == [1, 2, 3, 4]  # the first class has no positive video
    for label, value in found.items():
        assert value == pytest.approx(precision_by_thresholds(scores[:, label], labels[:, label]))
    order = rng.permutation(60)
    assert average_precisions(scores[order], labels[order]) == pytest.approx(found)
    several = LabelKind({"": 5}, several=True)
    tensors = torch.from_numpy(scores), torch.from_numpy(labels.astype(int))
    assert metrics(*tensors, several)["map"] == pytest.approx(100 * np.mean([*found.values()]))
