"""`python -m studies recipes`: rows, lists, and agreement with the shipped recipe."""

from __future__ import annotations

import csv
import json

import pytest

from slowfast_lara.config import load_config
from slowfast_lara.inference.load import load
from studies import recipes
from studies.__main__ import main
from studies.recipes import MAIN_ROWS, PART_ROWS, RecipeResult, table_row, write_lists
from tests.helpers.small_models import only_error

SHIPPED = "finetune/motionformer_224_16x4"
# Factor between the widths, and between the learning rates, of the shipped and the study's model.
NARROWER = 12


def value(cfg, key):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def test_rows_are_configs_and_differ():
    rows = (*MAIN_ROWS, *PART_ROWS)
    configs = {load_config("study/recipe", row.opts).dump() for row in rows}
    assert len(configs) == len({row.name for row in rows}) == len(rows)


def test_recipe_equals_the_shipped_one_except_for_the_width():
    """Both recipes make the same changes to their plain configs."""
    shipped, plain = load_config(SHIPPED), load_config("K400/motionformer_224_16x4")
    row = next(row for row in MAIN_ROWS if row.name == "recipe")
    ours, before = load_config("study/recipe", row.opts), load_config("study/recipe")
    assert shipped.VIT.EMBED_DIM == NARROWER * ours.VIT.EMBED_DIM
    changed = set(row.opts[::2])
    for node in ("SOLVER", "MIXUP", "DATA"):
        changed |= {
            f"{node}.{key}" for key in shipped[node] if shipped[node][key] != plain[node][key]
        }
    for key in changed - {"DATA.PATH_TO_DATA_DIR", "SOLVER.BASE_LR"}:
        assert value(ours, key) == value(shipped, key), key
    assert ours.SOLVER.BASE_LR == pytest.approx(NARROWER * shipped.SOLVER.BASE_LR)
    assert before.SOLVER.BASE_LR == pytest.approx(NARROWER * plain.SOLVER.BASE_LR)
    for key in ("WEIGHT_DECAY", "SMOOTHING", "OPTIMIZING_METHOD"):
        assert before.SOLVER[key] == plain.SOLVER[key]
    assert before.VIT.DROP_PATH == plain.VIT.DROP_PATH
    assert before.DATA.COLORJITTER == plain.DATA.COLORJITTER


def test_lists_are_balanced_and_differ_from_seed_to_seed(tmp_path):
    (tmp_path / "second_set").mkdir()
    lines = [f"videos/{number}.mp4 {number * 7 % 12}" for number in range(120)]
    for split in ("train", "val", "test"):
        (tmp_path / "second_set" / f"{split}.csv").write_text("\n".join(lines) + "\n")
    seen: list[str] = []
    for seed in range(5):
        write_lists(tmp_path, 24, seed)
        folder = tmp_path / "lists" / "24_clips" / f"seed_{seed}"
        chosen = (folder / "train.csv").read_text().splitlines()
        labels = [line.split()[1] for line in chosen]
        assert len(chosen) == 24 and all(labels.count(str(label)) == 2 for label in range(12))
        assert (folder / "test.csv").read_text().splitlines() == lines
        seen += chosen
    assert len(set(seen)) == 120


def test_differences_are_paired_by_seed():
    def result(name, *accuracies):
        row = next(row for row in (*MAIN_ROWS, *PART_ROWS) if row.name == name)
        return RecipeResult(row, 240, list(accuracies), list(accuracies))

    plain, rate = result("plain", 10.0, 20.0, 30.0), result("rate", 30.0, 42.0, 50.0)
    part = result("erasing", 32.0, 42.0)
    results = [plain, rate, part]
    assert table_row(plain, results)[2:] == ["3", "20.0 ± 10.0", "20.0 ± 10.0", "", "-20.7 ± 0.7"]
    assert table_row(rate, results)[5:] == ["+20.7 ± 0.7", ""]
    assert table_row(part, results)[5:] == ["+22.0 ± 0.0", "+1.0 ± 1.0"]


def test_number_of_clips_must_be_a_multiple_of_the_classes(tmp_path, capsys):
    assert main(["recipes", "--clips", "25", "--work", str(tmp_path / "work")]) == 2
    assert "--clips is 25" in only_error(capsys)
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_small_study(tmp_path, monkeypatch, capsys):
    """The table has the accuracies of the runs; a second call trains nothing."""
    for one_set in (recipes.FIRST_SET, recipes.SECOND_SET):
        monkeypatch.setitem(one_set, "val", 12)
        monkeypatch.setitem(one_set, "test", 12)
    opts = ["SOLVER.MAX_EPOCH", "1", "VIT.DEPTH", "1", "VIT.EMBED_DIM", "24", "LOG_PERIOD", "1"]
    folders = ["--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    rows = ["--rows", "plain", "average", "--clips", "12", "24"]
    command = [
        "recipes",
        *folders,
        *rows,
        "--train",
        "16",
        "--seeds",
        "1",
        "--jobs",
        "1",
        "--opts",
        *opts,
    ]
    assert main(command) == 0
    assert "4/4" in capsys.readouterr().out
    assert main(command) == 0
    assert "seed 0:" not in capsys.readouterr().out
    with open(tmp_path / "finetuning.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    # Single parts run with the first number of clips only.
    found = [(line["row"], line["clips"]) for line in lines]
    assert found == [("plain", "12"), ("average", "12"), ("plain", "24")]
    for line in lines:
        folder = tmp_path / "work" / f"{line['clips']}_clips" / line["row"] / "seed_0"
        results = json.loads((folder / "test_results.json").read_text())
        assert float(line["top1_last"]) == pytest.approx(results["top1_acc"], abs=1e-3)
        assert load(folder).path.endswith("best.pyth")
        start = load_config(folder / "config.yaml").TRAIN.CHECKPOINT_FILE_PATH
        assert start.endswith("exact/seed_0/checkpoints/checkpoint_epoch_00001.pyth")
    assert "| EMA weights | 12 | 1 |" in (tmp_path / "finetuning.md").read_text()
    assert (tmp_path / "finetuning.png").stat().st_size > 0
