"""Implied weights against the outputs of the estimators; points, paths and figures."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tables import plot_over_sizes
from slowfast_lara.analysis.model_errors import ModelErrorTable, SettingError
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.analysis.swap import SwapResult, SwapTable
from slowfast_lara.attention import ESTIMATORS, build_estimator, softmax_attention
from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.drawing import attention_colour, attention_styles, saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.inference.layers import LayerInputs
from slowfast_lara.inference.load import load
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import RECOMMENDED
from slowfast_lara.visualization.heat_maps import (
    GAP,
    LABEL_WIDTH,
    AttentionMap,
    HeatMapFigure,
    frame_range,
    heat_coloured,
)
from slowfast_lara.visualization.implied_weights import trajectory_weights
from slowfast_lara.visualization.token_grid import (
    QueryPoint,
    TokenGrid,
    attention_path,
    moving_points,
)
from tests.helpers.commands import visualize as main
from tests.helpers.small_models import only_error, small_config, write_model

# Token merging compares half of a frame's keys with the other half.
LINEAR = [name for name in ESTIMATORS if name not in ("softmax", "ra", "tome")]


def random_inputs(
    name: str, frames: int, tokens: int, heads: int, d: int, landmarks: int, **options
) -> LayerInputs:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, frames * tokens, d).unbind(0)
    estimator = build_estimator(
        name, head_dim=d, num_heads=heads, num_landmarks=landmarks, **options
    ).eval()
    return LayerInputs(2 * q, 2 * k, v, frames, estimator)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize(("frames", "tokens", "d"), [(3, 25, 7), (1, 9, 16), (4, 16, 4)])
def test_weights_times_values_are_the_output(name, frames, tokens, d):
    """With the values of the layer, and with others."""
    options = {"values": 0.0} if name == "merged" else {}  # other values would change the groups
    inputs = random_inputs(name, frames, tokens, 2, d, 6, **options)
    for token in (0, frames * tokens // 2, frames * tokens - 1):
        weights, _ = trajectory_weights(inputs.estimator, inputs, token)
        assert weights.shape == (2, frames, tokens)
        for v in (inputs.v, torch.randn_like(inputs.v)):
            with torch.no_grad():
                expected = inputs.estimator(inputs.q, inputs.k, v, num_frames=frames)[0, :, token]
            values = v[0].unflatten(1, (frames, tokens))
            found = torch.einsum("hfp,hfpd->hfd", weights, values)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("proposal", ["local", "global", "mixed", "mixture", "single"])
def test_weights_of_every_proposal(proposal):
    inputs = random_inputs("lara", 3, 8, 2, 5, 4, proposal=proposal)
    weights, output = trajectory_weights(inputs.estimator, inputs, 7)
    found = torch.einsum("hfp,hfpd->hfd", weights, inputs.v[0].unflatten(1, (3, 8)))
    torch.testing.assert_close(found, output[0, :, 7], atol=2e-5, rtol=1e-4)


def test_exact_weights_are_the_softmax():
    inputs = random_inputs("softmax", 3, 25, 2, 7, 6)
    weights, _ = trajectory_weights(inputs.estimator, inputs, 40)
    logits = torch.einsum("hd,hpd->hp", inputs.q[0, :, 40], inputs.k[0]) / 7**0.5
    torch.testing.assert_close(weights, logits.unflatten(1, (3, 25)).softmax(-1))


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                stored = value.untyped_storage().nbytes() // value.element_size()
                self.elements = max(self.elements, min(value.numel(), stored))
        return result


@pytest.mark.parametrize("name", LINEAR)
def test_the_attention_matrix_is_never_built(name):
    frames, tokens = 8, 324
    inputs = random_inputs(name, frames, tokens, 1, 8, 16)
    with LargestTensor() as largest:
        trajectory_weights(inputs.estimator, inputs, 1000)
    total = frames * tokens
    # The largest tensor of a linear-time estimator is its output, [N,F,d].
    assert total * 8 <= largest.elements <= total * frames * 8 < total * total / 20


def test_grid_is_that_of_the_patch_embedding():
    """A changed pixel changes only the embedding of its token in the grid."""
    network = VisionTransformer(
        num_classes=2, patch_size=8, patch_size_temp=2, dim=16, depth=1, num_heads=2, num_frames=3
    ).eval()
    grid = TokenGrid(3, 5, 8, 2)
    clip = torch.zeros(1, 3, 6, 40, 40)
    changed = clip.clone()
    changed[0, :, 3, 17, 30] = 1
    with torch.no_grad():
        difference = (network.embed(changed) - network.embed(clip))[0, 1:].abs().sum(-1)
    assert difference.nonzero().flatten().tolist() == [grid.token(QueryPoint(30, 17, 3))]
    x, y = grid.centres()[grid.token(QueryPoint(30, 17, 3)) % 25]
    assert (x, y) == (28, 20)
    for point in (QueryPoint(40, 0, 0), QueryPoint(0, -1, 0), QueryPoint(0, 0, 6)):
        with pytest.raises(InputError):
            grid.token(point)


def test_path_is_the_centre_of_the_peak():
    grid = TokenGrid(3, 4, 10, 1)
    weights = np.full((3, 16), 0.02)
    weights[0, 6] = 0.7  # row 1, column 2
    weights[1, [0, 1]] = 0.35  # between two tokens
    weights[2] = 1 / 16  # no peak
    np.testing.assert_allclose(attention_path(weights, grid), [(25, 15), (10, 5), (20, 20)])


def test_frame_range():
    assert [frame_range(i, TokenGrid(2, 4, 8, 2)) for i in range(2)] == [
        "frames 0 to 1",
        "frames 2 to 3",
    ]
    assert frame_range(2, TokenGrid(3, 4, 8, 1)) == "frame 2"


def test_moving_points():
    rng = np.random.default_rng(0)
    still = rng.integers(60, 200, (64, 64, 3), dtype=np.uint8)
    pixels = np.repeat(still[None], 8, axis=0)
    for frame in range(8):
        pixels[frame, 8:20, 7 * frame : 7 * frame + 12] = 255
        pixels[frame, 50:62, 56 - 7 * frame : 56 - 7 * frame + 8] //= 2
    grid = TokenGrid(4, 8, 8, 2)
    first, second = moving_points(pixels, grid, 2, 4)
    # At frames 4 and 5 the bright square is at 28 to 47, the dark one at 21 to 36.
    assert 24 <= first.x < 48 and 8 <= first.y < 24
    assert first.frame == second.frame == 4
    assert 16 <= second.x < 40 and 48 <= second.y < 64
    assert len(set(moving_points(pixels, grid, 64, 4))) == 64


def test_figures_and_json(model, clips, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(
            [
                *model.flags(),
                "--point",
                "20,10",
                "--frame",
                "3",
                "--layer",
                "0",
                "--out",
                str(out),
                clips[0],
            ]
        )
        == 0
    )
    facts = json.loads((out / "trajectories.json").read_text())
    (point,) = facts["points"]
    assert (point["x"], point["y"], point["frame"], facts["layer"]) == (20, 10, 3, 0)
    attention = point["attention"]
    assert list(attention) == list(ESTIMATORS)
    assert attention["softmax"]["output_error"] == attention["softmax"]["weight_error"] == 0
    assert all(attention[name]["output_error"] > 0 for name in attention if name != "softmax")
    printed = capsys.readouterr().out
    assert "mean squared error to exact attention" in printed
    assert "  exact  " in printed and "softmax" not in printed
    grid = TokenGrid.from_config(load_config(model.cfg))
    for name, found in attention.items():
        weights = np.array(found["weights"])
        assert weights.shape == (2, 16)
        if name != "nystrom":  # its weights need not sum to one
            np.testing.assert_allclose(weights.sum(1), 1, atol=1e-4)
        np.testing.assert_allclose(found["path"], attention_path(weights, grid), atol=0.1)
        assert f"{found['output_error']:.3e}" in printed
    strip = np.asarray(Image.open(out / "point_1.png").convert("RGB"))
    assert strip.shape[0] > 6 * 160 and strip.shape[1] > 2 * 160 and strip.std() > 10
    # The colour scale below the rows: from grey at the mean to full colour at the largest.
    ends = heat_coloured(np.full((1, 2, 3), 128), np.array([[0.0, 1.0]]))[0].astype(int)
    bar = next(row for row in strip[::-1].astype(int) if np.abs(row[-1] - ends[1]).max() < 12)
    assert np.abs(bar[LABEL_WIDTH + GAP] - ends[0]).max() < 12
    with av.open(str(out / "point_1.mp4")) as container:
        assert container.streams.video[0].codec_context.name in ("h264", "mpeg4")
        assert sum(1 for _ in container.decode(video=0)) % 4 == 0


def test_recommended_attention_of_an_exact_model(tmp_path, clips, capsys):
    """Its row follows that of the same attention with the paper's settings, by default."""
    files = write_model(tmp_path, small_config(APPROX_ATTN_TYPE="none"))
    assert main([*files.flags(), "--out", str(tmp_path / "all"), clips[0]]) == 0
    (point,) = json.loads((tmp_path / "all" / "trajectories.json").read_text())["points"]
    names = list(point["attention"])
    assert names[names.index("lara") + 1] == "lara-recommended"
    assert set(names) == {*ESTIMATORS, *RECOMMENDED}
    printed = capsys.readouterr().out
    assert "lara (paper)" in printed and "lara (recommended)" in printed
    keys = ["VIT.LARA.PROPOSAL", "global", "VIT.LARA.LANDMARKS", "farthest"]
    keys += ["VIT.LARA.WEIGHTING", "balance"]
    one = ["--estimators", "lara,lara-recommended", "--out", str(tmp_path / "one")]
    assert main([*files.flags(), *one, clips[0], *keys]) == 0
    (point_of_keys,) = json.loads((tmp_path / "one" / "trajectories.json").read_text())["points"]
    found = point_of_keys["attention"]
    assert found["lara"] == found["lara-recommended"] == point["attention"]["lara-recommended"]
    assert found["lara"] != point["attention"]["lara"]
    assert "(paper)" not in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["K400", "SSV2"])
def test_recommended_settings_are_those_of_the_configs(folder):
    (name, options), vit = RECOMMENDED["lara-recommended"], load_config(f"{folder}/best").VIT
    assert name == vit.APPROX_ATTN_TYPE
    assert options == {key: vit.LARA[key.upper()] for key in options}


def test_each_attention_has_its_own_colour():
    names = [*ESTIMATORS, *RECOMMENDED]
    assert len({attention_colour(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    "name, labels",
    {
        "softmax": ["exact", "none", "exact softmax", "exact (as trained)"],
        "lara": ["LARA", "lara global farthest", "lara (as trained)"],
        "lara-recommended": ["LARA, recommended"],
        "ra": ["RA, biased", "ra_biased"],
        "nystrom": ["Nyströmformer"],
    }.items(),
)
def test_labels_of_an_attention_have_its_colour(name, labels):
    assert {attention_colour(label) for label in labels} == {attention_colour(name)}


def test_variants_of_an_attention_have_lines_of_their_own():
    labels = ["lara", "lara global", "ra", "lara mixed", "lara single", "lara mixture"]
    styles = attention_styles(labels)
    assert len({tuple(style.items()) for style in styles}) == len(labels)
    assert len({style["color"] for style in styles}) == 2


def test_figures_draw_an_attention_in_its_colour(tmp_path):
    """Also if the figure has only some attentions, in another order."""
    result = SwapResult("eva", 8, 50.0, 90.0, 50.0, 0.001)
    results = [result, result._replace(attention="nystrom", view_seconds=0.002)]
    SwapTable("swapped", results=results).plot(str(tmp_path / "swap.png"))
    names = ("softmax", "eva", "nystrom")
    rows = [SettingError(Setting(name, {}), 10.0, [0.1], [0.1]) for name in names]
    ModelErrorTable("errors", [0], 1.0, rows).plot(str(tmp_path / "errors.png"))
    with saved_figure(tmp_path / "sizes.png", (5, 4)) as (_, (axis,)):
        plot_over_sizes(axis, "crop", [1, 2], "ms", {"eva": [1, 2], "nystrom": [3, 4]})
    with saved_figure(tmp_path / "bars.png", (5, 4)) as (_, (axis,)):
        plot_over_sizes(axis, "crop", [1], "ms", {"eva": [1], "nystrom": [3]})
    for name in ("swap", "errors", "sizes", "bars"):
        image = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"))
        colours = {tuple(colour) for colour in np.unique(image.reshape(-1, 3), axis=0).tolist()}
        assert {attention_colour("eva"), attention_colour("nystrom")} <= colours
        assert attention_colour("softmax") not in colours


@pytest.mark.parametrize("name", ["eva", "nystrom"])
def test_heat_maps_draw_an_attention_in_its_colour(name):
    """In the bar at the left of its caption, and in the line along its path."""
    pixels, weights = np.full((2, 32, 32, 3), 128, np.uint8), np.full((2, 16), 1 / 16)
    maps = [AttentionMap(name, name, weights, path=np.array([[4.0, 4.0], [28.0, 28.0]]))]
    point, grid = QueryPoint(0, 0, 0), TokenGrid(2, 4, 8, 1)
    strip = HeatMapFigure(pixels, grid, maps, point, "all attention").strip()
    coloured = (strip == attention_colour(name)).all(-1)
    assert coloured[:, 0].any() and coloured[:, LABEL_WIDTH + GAP :].any()


def test_own_estimator_is_that_of_the_model(tmp_path, clips, capsys):
    """With its learned parameters: errors are those of the model itself."""
    model = write_model(tmp_path, small_config(LARA={"LEARNED": True}))
    assert (
        main(
            [
                *model.flags(),
                "--estimators",
                "lara",
                "--moving",
                "2",
                "--head",
                "1",
                "--out",
                str(tmp_path / "out"),
                clips[1],
            ]
        )
        == 0
    )
    points = json.loads((tmp_path / "out" / "trajectories.json").read_text())["points"]
    assert len(points) == 2 and list(points[0]["attention"]) == ["softmax", "lara"]
    cfg = load_config(model.cfg, ["TEST.NUM_SPATIAL_CROPS", 1])
    network, taken = load(model.cfg, model.checkpoint).network, []
    network.blocks[1].attn.estimator.register_forward_hook(
        lambda module, args, kwargs, output: taken.append((*args, output)), with_kwargs=True
    )
    with torch.no_grad():
        network([load_views(clips[1], cfg)[1:2]])
    q, k, v, output = taken[0]
    error = (output - softmax_attention(q, k, v, num_frames=2)).square().mean().item()
    assert points[0]["attention"]["lara"]["output_error"] == pytest.approx(error, rel=1e-4)


def test_pixels_equal_the_decoded_frame(clips, model):
    for opts in ([], ["DATA.REVERSE_INPUT_CHANNEL", True]):
        size = ["TEST.NUM_SPATIAL_CROPS", 1, "DATA.TEST_CROP_SIZE", 48]
        cfg = load_config(model.cfg, [*size, *opts])
        pixels = pixels_of(load_views(clips[0], cfg)[0], cfg)
        with av.open(clips[0]) as container:
            first = next(container.decode(video=0)).to_ndarray(format="rgb24")
        np.testing.assert_array_equal(pixels[0], first)


def test_bad_input_is_one_line(model, clips, tmp_path, capsys):
    (tmp_path / "no.mp4").write_text("x")
    flags = [*model.flags(), "--out", str(tmp_path / "out")]
    cases = {
        "0 to 31": [*flags, "--point", "32,0", clips[0]],
        "frames from 0 to 3": [*flags, "--frame", "4", clips[0]],
        "--point is '3'": [*flags, "--point", "3", clips[0]],
        "cannot be combined": [*flags, "--point", "3,3", "--moving", "2", clips[0]],
        "--moving is 0": [*flags, "--moving", "0", clips[0]],
        "--layer is 2": [*flags, "--layer", "2", clips[0]],
        "--head is -1": [*flags, "--head", "-1", clips[0]],
        "unknown attention 'lora'": [*flags, "--estimators", "lora", clips[0]],
        "expected one video, got 4": [*flags, *clips],
        "no.mp4": [*flags, str(tmp_path / "no.mp4")],
    }
    for text, argv in cases.items():
        assert main(argv) == 2, text
        assert text in only_error(capsys)
    assert not list(tmp_path.glob("out/*"))
