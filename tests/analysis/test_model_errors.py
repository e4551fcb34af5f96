"""`approximation-error RUN VIDEO`: errors, MACs, recommendation, files, messages."""

from __future__ import annotations

import csv
import itertools
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from benchmarks.random_errors import smooth_inputs
from slowfast_lara.analysis.measure import count_macs
from slowfast_lara.analysis.model_errors import (
    ModelErrorTable,
    SettingError,
    all_settings,
    config_lines,
    errors_in_model,
    setting_macs,
    token_weights,
)
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator, estimator_options
from slowfast_lara.attention.kernels import choice
from slowfast_lara.config import get_cfg, load_config
from slowfast_lara.inference.layers import layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.models.attention_config import estimator_settings
from tests.helpers.commands import approximation_error
from tests.helpers.small_models import only_error


def measured(model, videos, **changes):
    settings = {"attentions": None, "layer": None, "samples": [4, 8], "seeds": 2, "budget": 1.0}
    settings["number"] = 8
    return errors_in_model((model.cfg, model.checkpoint), [], videos, **{**settings, **changes})


@pytest.fixture(scope="module")
def table(model, clips):
    """All settings, on two videos."""
    return measured(model, clips[:2])


def row_of(table, name, **options):
    """The row with 8 landmarks and these options; other options have their defaults."""
    known = {key: option.default for key, option in estimator_options(name).items()}
    wanted = {**known, **options}
    return next(
        row
        for row in table.rows
        if (row.setting.name, row.setting.number) == (name, 8)
        and row.setting.options.items() <= wanted.items()
    )


def token_changes(view, patch, frames):
    """The change of each token to its neighbours in time, token by token, in float64."""
    pixels = view.double().numpy()
    times, rows, columns = (
        length // size for length, size in zip(pixels.shape[1:], (frames, patch, patch))
    )
    tokens = np.empty((times, rows, columns, 3, patch, patch))
    for f, y, x in itertools.product(range(times), range(rows), range(columns)):
        block = pixels[:, f * frames : (f + 1) * frames, y * patch : (y + 1) * patch]
        tokens[f, y, x] = block[..., x * patch : (x + 1) * patch].mean(axis=1)
    changes = [
        np.mean(
            [
                np.abs(tokens[f, y, x] - tokens[g, y, x]).mean()
                for g in (f - 1, f + 1)
                if 0 <= g < times
            ]
        )
        for f, y, x in itertools.product(range(times), range(rows), range(columns))
    ]
    return np.array(changes) / np.mean(changes)


def exact_in_float64(q, k, v, num_frames):
    """[N,F,d] of one head."""
    out = []
    for k_frame, v_frame in zip(k.chunk(num_frames), v.chunk(num_frames)):
        weights = (q @ k_frame.T / q.shape[1] ** 0.5).softmax(1)
        out.append(weights @ v_frame)
    return torch.stack(out, 1)


@pytest.mark.parametrize("frames, patch", [(8, 8), (4, 16), (6, 4)])
def test_weights_of_moving_tokens(frames, patch):
    cfg = get_cfg()
    cfg.VIT.PATCH_SIZE, cfg.VIT.PATCH_SIZE_TEMP = patch, 2
    view = torch.randn(3, frames, 32, 32, generator=torch.Generator().manual_seed(1))
    view[:, :, :16] *= 0.1  # little change in the upper half
    equal, moving = token_weights(view, cfg)
    assert (equal == 1).all()
    np.testing.assert_allclose(moving, token_changes(view, patch, 2), rtol=1e-5)
    still = token_weights(torch.ones(3, frames, 32, 32), cfg)
    assert (still == 1).all()
    alone = token_weights(view[:, :2], cfg)  # one temporal token
    assert alone.shape == (2, (32 // patch) ** 2) and (alone == 1).all()


def test_errors_equal_a_slow_reference(table, model, clips):
    trained = load(model.cfg, model.checkpoint)
    for name, changes in (("lara", {"proposal": "global"}), ("nystrom", {})):
        sums = torch.zeros(2, 2, 2, dtype=torch.float64)  # layer; weights; error, square
        for clip in clips[:2]:
            view = middle_view(clip, trained.cfg)
            weights = torch.tensor(token_changes(view, 8, 2))
            layers = layer_inputs(trained.network, view, trained.cfg, [0, 1])
            for layer, (q, k, v, frames, _) in enumerate(layers):
                estimator = build_estimator(name, head_dim=16, num_landmarks=8, **changes)
                with torch.no_grad():
                    estimate = estimator.eval()(q, k, v, num_frames=frames)[0].double()
                for head in range(2):
                    exact = exact_in_float64(*(x[0, head].double() for x in (q, k, v)), frames)
                    pair = (
                        (estimate[head] - exact).square().sum((1, 2)),
                        exact.square().sum((1, 2)),
                    )
                    for number, square in enumerate(pair):
                        sums[layer, 0, number] += square.sum()
                        sums[layer, 1, number] += (weights * square).sum()
        expected = sums[..., 0] / sums[..., 1]
        row = row_of(table, name, **changes)
        assert row.errors == pytest.approx(expected[:, 0].tolist(), rel=1e-3)
        assert row.moving_errors == pytest.approx(expected[:, 1].tolist(), rel=1e-3)
        assert row.error != pytest.approx(row.moving_error, rel=1e-3)


def test_every_choice_has_a_row_with_valid_config_lines(table, model):
    names = {row.setting.name for row in table.rows}
    assert names == set(ESTIMATORS) and table.notes == []
    for key in ("proposal", "landmarks"):
        for name in names:
            if key in (options := estimator_options(name)):
                tried = {row.setting.options[key] for row in table.rows if row.setting.name == name}
                assert tried == set(options[key].choices)
    assert {r.setting.label for r in table.rows if r.setting.name == "ra"} == {"ra", "ra biased"}
    for row in table.rows:
        vit = yaml.safe_load(config_lines(row.setting))["VIT"]
        own = vit.pop(row.setting.name.upper(), {})
        keys = [word for pair in vit.items() for word in (f"VIT.{pair[0]}", str(pair[1]))]
        prefix = f"VIT.{row.setting.name.upper()}"
        keys += [word for key, value in own.items() for word in (f"{prefix}.{key}", str(value))]
        cfg = load_config(model.cfg, keys)
        settings = estimator_settings(cfg, row.setting.name)
        assert cfg.VIT.APPROX_ATTN_TYPE == row.setting.name
        assert row.setting.options.items() <= settings.items()
        assert row.setting.number in (None, settings["num_landmarks"])


def test_random_attentions_are_measured_with_several_seeds(model, clips):
    one, five = (
        measured(model, clips[:1], attentions=["performer", "lara"], samples=[8], seeds=seeds)
        for seeds in (1, 5)
    )
    first, mean = row_of(one, "performer").error, row_of(five, "performer").error
    assert first != mean and first / 3 < mean < 3 * first
    assert row_of(one, "lara").errors == row_of(five, "lara").errors
    assert [row.setting.label for row in one.rows[:1]] == ["exact"]


def test_macs_are_counted_for_all_queries():
    """Exact attention by hand; RA, which is measured on some queries, for all of them."""
    inputs = smooth_inputs(frames=2, side=10, d=8)
    q, k, v, frames, _ = inputs
    settings, _ = all_settings(["softmax", "ra", "lara"], [5], 200, 2)
    costs = setting_macs(settings, inputs, get_cfg(), [])
    assert costs[0][1] == 2 * 200 * 200 * 8 * 2
    for setting, macs in costs[1:]:
        layer = partial(setting.build(inputs, get_cfg(), seed=0), q, k, v, num_frames=frames)
        with torch.no_grad():
            assert macs == pytest.approx(count_macs(layer), rel=1e-6)


def test_macs_are_counted_without_gpu_kernels(monkeypatch):
    """`auto` chooses them on a GPU, and the counter cannot see into them."""
    (settings, _), inputs = (
        all_settings(["lara", "performer"], [5], 72, 2),
        smooth_inputs(2, 6, d=8),
    )
    expected = setting_macs(settings, inputs, get_cfg(), [])
    monkeypatch.setattr(choice, "uses_triton", lambda kernels, *_, **__: kernels != "torch")
    assert setting_macs(settings, inputs, get_cfg(), []) == expected


class Picky(Estimator):
    """Accepts only square numbers of landmarks."""

    def __init__(self, *, num_landmarks):
        super().__init__()
        if round(num_landmarks**0.5) ** 2 != num_landmarks:
            raise ValueError(f"num_landmarks is {num_landmarks}; must be a square")

    def forward(self, q, k, v, *, num_frames=1):
        return 0 * q.unsqueeze(3).expand(-1, -1, -1, num_frames, -1)


def test_impossible_settings_are_skipped_and_noted(model, clips, monkeypatch):
    monkeypatch.setitem(ESTIMATORS, "picky", Picky)
    table = measured(model, clips[:1], attentions=["picky"])
    assert [(row.setting.label, row.setting.number) for row in table.rows[1:]] == [("picky", 4)]
    assert table.rows[1].errors == pytest.approx([1, 1])
    assert table.notes == ["skipped picky with 8: num_landmarks is 8; must be a square"]


def table_of(*figures, budget=0.5):
    """A table with rows of MACs, error and moving error, after exact attention."""
    rows = [SettingError(Setting("softmax", {}), 100, [0.0], [0.0])]
    for number, (macs, error, moving) in enumerate(figures, start=1):
        setting = Setting("lara", {"proposal": "global"}, number)
        rows.append(SettingError(setting, macs, [error, error], [moving, moving]))
    return ModelErrorTable("test", [0, 1], budget, rows)


def test_recommendation():
    table = table_of((20, 0.3, 0.5), (40, 0.2, 0.6), (40, 0.25, 0.9), (60, 0.1, 0.1))
    assert table.best("error") is table.rows[2]
    assert table.best("moving_error") is table.rows[1]
    assert [table.is_pareto_optimal(row) for row in table.rows] == [True, True, True, False, True]
    _, first, lines, second, other_lines = table.footer()
    assert "smallest error with at most 50 %" in first and "2 landmarks" in first
    assert "APPROX_ATTN_DIM: 2\n  LARA:\n    PROPOSAL: global\n" in lines
    assert "smallest moving error" in second and "APPROX_ATTN_DIM: 1" in other_lines
    _, only, _ = table_of((20, 0.3, 0.5), (40, 0.2, 0.4)).footer()
    assert only.startswith("smallest error and moving error") and "40.0 % of the MACs" in only
    _, problem, cheapest, lines = table_of((70, 0.1, 0.1), (60, 0.2, 0.2)).footer()
    assert problem.startswith("no setting with finite errors has at most 50 %")
    assert cheapest.startswith("the cheapest setting is lara global with 2 landmarks")
    assert "APPROX_ATTN_DIM: 2" in lines


def test_errors_that_are_not_finite_are_not_recommended():
    table = table_of((20, math.nan, math.nan), (30, math.inf, 0.1), (40, 0.2, 0.6))
    assert table.best("error") is table.rows[3] and table.best("moving_error") is table.rows[2]
    assert [table.is_pareto_optimal(row) for row in table.rows] == [True, False, False, True]


def test_small_errors_are_distinguishable():
    """Of merged keys in a trained model, for example."""
    table = table_of((20, 2.5e-6, 3e-7), (40, 1.25e-6, 2e-7))
    assert [row[4:6] for row in table.cells()[2:]] == [["2.5e-06", "3e-07"], ["1.25e-06", "2e-07"]]
    assert "error 1.25e-06, moving 2e-07" in table.footer()[1]


def test_command(tmp_path, model, clips, capsys):
    out = tmp_path / "errors"
    command = [*model.flags(), clips[0], clips[1], "--seeds", "1", "--budget", "9"]
    assert approximation_error([*command, "--samples", "8", "64", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 layers, 2 videos" in printed and "  APPROX_ATTN_TYPE: " in printed
    assert "skipped lara with 64: the clip has 32 tokens" in printed
    assert "skipped merged with 64: a frame has 16 tokens" in printed
    lines = (line for line in (tmp_path / "errors.csv").open() if not line.startswith("#"))
    rows = list(csv.DictReader(lines))
    assert len(rows) == len(all_settings(list(ESTIMATORS), [8, 64], 32, 2)[0])
    for row in rows:
        layers = [float(row[f"error {layer}"]) for layer in (0, 1)]
        assert float(row["error"]) == pytest.approx(np.mean(layers), rel=1e-3)
    assert np.asarray(Image.open(f"{out}.png")).std() > 1
    assert approximation_error([*command, "--layer", "1", "--attentions", "lara"]) == 0
    assert "1 layer, 2 videos" in capsys.readouterr().out


def test_some_of_many_videos_are_measured(tmp_path, model, clips, capsys):
    """Evenly spaced; the command says how many, and ends with advice."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.mp4").symlink_to(clips[number % len(clips)])
    flags = ["--samples", "4", "--seeds", "1", "--attentions", "merged"]
    assert approximation_error([*model.flags(), str(folder), *flags]) == 0
    out, messages = capsys.readouterr()
    assert "measuring 2 settings in 2 layers on 8 of 30 videos" in messages
    assert re.search(r"about \d+ s for 7 more videos", messages)
    assert "2 layers, 8 videos" in out
    assert out.rstrip().splitlines()[-3:] == [
        "VIT:",
        "  APPROX_ATTN_TYPE: merged",
        "  APPROX_ATTN_DIM: 4",
    ]
    assert approximation_error([*model.flags(), str(folder), *flags, "--videos", "3"]) == 0
    assert "2 layers, 3 videos" in capsys.readouterr().out


def test_a_bad_video_is_skipped_and_noted(tmp_path, model, clips, capsys):
    (tmp_path / "a.mp4").write_text("not a video")
    (tmp_path / "b.mp4").symlink_to(clips[0])
    (tmp_path / "c.mp4").write_text("not a video")
    (tmp_path / "notes.txt").touch()
    flags = ["--samples", "4", "--attentions", "merged"]
    assert approximation_error([*model.flags(), str(tmp_path), *flags]) == 0
    out = capsys.readouterr().out
    assert [f"skipped {tmp_path}/{name}.mp4: " in out for name in "abc"] == [True, False, True]
    assert "notes.txt" not in out and out.rstrip().splitlines()[-1] == "  APPROX_ATTN_DIM: 4"
    (tmp_path / "b.mp4").unlink()
    assert approximation_error([*model.flags(), str(tmp_path), *flags]) == 2
    assert "c.mp4: " in only_error(capsys)


@pytest.mark.parametrize(
    "arguments, mention",
    [
        ([], "no run given"),
        (["--cfg", "x.yaml"], "--checkpoint"),
        (["RUN"], "no video given"),
        (["MODEL", "CLIP", "--layer", "2"], "--layer is 2"),
        (["MODEL", "CLIP", "--attentions", "lora"], "'lora'"),
        (["MODEL", "no.mp4"], "no.mp4: "),
        (["MODEL", "CLIP", "--samples", "64", "--attentions", "lara"], "32 tokens"),
    ],
)
def test_bad_input(model, clips, capsys, arguments, mention):
    given = {"MODEL": model.flags(), "CLIP": [clips[0]]}
    words = [part for word in arguments for part in given.get(word, [word])]
    assert approximation_error(words) == 2
    assert mention in only_error(capsys)


@pytest.mark.parametrize(
    "share, mention",
    [("0", "must be above 0"), ("-1", "above 0"), ("nan", "above 0"), ("half", "invalid float")],
)
def test_bad_budget(capsys, share, mention):
    try:
        code = approximation_error(["RUN", "v.mp4", "--budget", share])
    except SystemExit as ended:  # argparse
        code = ended.code
    error = only_error(capsys)
    assert code == 2 and "--budget" in error and mention in error
