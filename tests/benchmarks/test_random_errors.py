"""`python -m benchmarks errors`: errors of all attentions on random q, k, v."""

import math

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.random_errors import measure_errors, smooth_inputs
from slowfast_lara.attention import ESTIMATORS, build_estimator, softmax_attention
from slowfast_lara.config import get_cfg
from slowfast_lara.errors import InputError


def test_every_approximate_attention_has_a_row_of_errors():
    inputs = smooth_inputs(frames=2, side=8, d=8)
    table = measure_errors(inputs, get_cfg(), [8, 32], seeds=2)
    assert set(table.errors) == {*ESTIMATORS, "ra biased"} - {"softmax"}
    assert table.errors["ra"][1] < table.errors["ra"][0]
    assert all(error > 0 for row in table.errors.values() for error in row)
    assert table.notes == []


def test_numbers_above_the_tokens_are_skipped():
    inputs = smooth_inputs(frames=2, side=3, d=8)
    table = measure_errors(inputs, get_cfg(), [8, 18, 19, 256], seeds=1)
    assert table.samples == [8, 18]
    assert all(len(row) == 2 for row in table.errors.values())
    assert "skipped 19, 256 samples: the layer has 18 tokens" in table.notes
    assert "skipped merged with 18: a frame has 9 tokens" in table.notes
    assert table.errors["merged"][0] > 0 and math.isnan(table.errors["merged"][1])
    assert table.notes[0] in table.text()
    with pytest.raises(InputError, match="at most 18"):
        measure_errors(inputs, get_cfg(), [19], seeds=1)


def test_errors_use_the_options_of_the_config_and_learned_layers_of_the_model():
    inputs = smooth_inputs(frames=2, side=4, d=8)
    cfg = get_cfg()
    plain = measure_errors(inputs, cfg, [8], seeds=1).errors
    cfg.VIT.LARA.PROPOSAL = "global"
    assert measure_errors(inputs, cfg, [8], seeds=1).errors["lara"] != plain["lara"]
    cfg.VIT.LARA.LEARNED = True
    own = build_estimator(
        "lara", head_dim=8, num_landmarks=8, proposal="global", learned=True
    ).eval()
    inputs = inputs._replace(estimator=own)
    q, k, v, frames, _ = inputs
    with torch.no_grad():
        difference = own(q, k, v, num_frames=frames) - softmax_attention(q, k, v, num_frames=frames)
    rows = measure_errors(inputs, cfg, [8], seeds=1).errors
    assert rows["lara"] == pytest.approx([difference.square().mean().item()])


def test_command(tmp_path):
    out = tmp_path / "errors"
    assert main(["errors", "--samples", "8", "16", "--seeds", "1", "--out", str(out)]) == 0
    lines = out.with_suffix(".csv").read_text().splitlines()
    assert lines[2] == "estimator,8,16"
    assert len(lines) == 3 + len(ESTIMATORS)  # without softmax, with both forms of RA
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
