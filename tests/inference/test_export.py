"""Export to safetensors, torch.export and ONNX: equal scores, model cards, failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.attention import build_estimator
from slowfast_lara.data import load_views
from slowfast_lara.errors import InputError, RunError, UserError
from slowfast_lara.inference import export as export_module
from slowfast_lara.inference.export import export
from slowfast_lara.inference.load import load
from tests.helpers.commands import export as export_command
from tests.helpers.commands import predict, run
from tests.helpers.runs import ROOT, write_config, write_video
from tests.helpers.small_models import (
    NAMES,
    files_of_at_most,
    make_videos,
    only_error,
    small_config,
    write_model,
)
from tests.helpers.videos import real_videos

onnx, onnxruntime, _ = (
    pytest.importorskip(name, reason="the extra `export` is not installed")
    for name in ("onnx", "onnxruntime", "onnxscript")
)

pytestmark = pytest.mark.usefixtures("in_process")

LAYERS = ("trajectory", "joint", "divided")
ATTENTIONS = {
    "none": {},
    "lara": {},
    "lara mixture": {"LARA": {"PROPOSAL": "mixture", "WEIGHTING": "coupled"}},
    "lara recommended": {
        "LARA": {"PROPOSAL": "global", "LANDMARKS": "farthest", "WEIGHTING": "balance"}
    },
    "performer": {},
    "nystrom": {},
    "orthoformer": {},
    "ra": {"RA": {"BIASED": True}},
    "merged": {},
    "tome": {},
    "pooled": {},
    "eva": {},
}
SCRIPT = re.search(
    r"```python\n(import onnxruntime.*?)```",
    (ROOT / "docs" / "use-a-model.md").read_text("utf-8"),
    re.DOTALL,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, video_set) -> Path:
    """A trained and tested run with class names."""
    folder = tmp_path_factory.mktemp("trained")
    data = Path(shutil.copytree(video_set, folder / "set"))
    (data / "classes.json").write_text(json.dumps(["left", "right", "up | down"]))
    changes = {"VIT__APPROX_ATTN_TYPE": "lara", "VIT__APPROX_ATTN_DIM": 3, "SOLVER__MAX_EPOCH": 1}
    config = write_config(folder / "c.yaml", data, folder / "out", **changes)
    assert run(["--cfg", str(config)]) == 0
    return folder / "out"


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def small(folder: Path, attention: str = "lara", layer: str = "trajectory"):
    """A model of two blocks with large random weights.

    CLS attends exactly, so the output of an estimator reaches the classifier only through the
    next block.
    """
    vit = {"APPROX_ATTN_TYPE": attention.split()[0], "ATTN_LAYER": layer}
    files = write_model(folder, small_config(**vit, **ATTENTIONS[attention]))
    return load(files.cfg, files.checkpoint)


def program_of(folder: Path, form: str):
    """A function that runs an export."""
    if form == "torch":
        return torch.export.load(folder / "model.pt2").module()
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert list(session.get_inputs()[0].shape[:2]) == ["batch", 3]
    return lambda clips: torch.from_numpy(session.run(None, {"clip": clips.numpy()})[0])


def check_scores(folder: Path, form: str, model, video: str) -> None:
    """Compare an export with the model on the views of a video."""
    program, views = program_of(folder, form), load_views(video, model.cfg)
    for count in (1, 5):
        with torch.no_grad():
            expected = model.network([views[:count]])
        assert expected.std() > 1e-3
        np.testing.assert_allclose(program(views[:count].clone()), expected, atol=1e-4, rtol=0)


def test_torch_program(tmp_path, clips):
    model = small(tmp_path)
    checked = export(model, tmp_path / "out", "torch")
    assert re.search(
        r"in batches of 1 and 5; a clip takes \d+ ms, the model itself \d+ ms", checked
    )
    assert listing(tmp_path / "out") == ["README.md", "config.json", "model.pt2"]
    check_scores(tmp_path / "out", "torch", model, clips[0])


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_and_layer(tmp_path, clips, monkeypatch, attention, layer):
    model = small(tmp_path, attention, layer)
    # Tracing is slow: trace once for both formats.
    program = export_module.trace(model.network, export_module.example_clips(model, 2))
    monkeypatch.setattr(export_module, "trace", lambda *_: program)
    for form in ("torch", "onnx"):
        export(model, tmp_path / form, form)
        for video in (clips[0], *map(str, real_videos())):
            check_scores(tmp_path / form, form, model, video)
    written = onnx.load(tmp_path / "onnx" / "model.onnx")
    assert {entry.domain: entry.version for entry in written.opset_import}[""] >= 20


class OneInput(torch.nn.Module):
    """An estimator with queries, keys and values derived from one tensor."""

    def __init__(self, estimator: torch.nn.Module, num_frames: int) -> None:
        super().__init__()
        self.estimator, self.num_frames = estimator, num_frames

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x, x.roll(1, dims=2) * 1.5, x.roll(2, dims=3) - 1
        return self.estimator(q, k, v, num_frames=self.num_frames)


# Every value of every option of LARA, and each kind of landmarks with several proposals.
OPTIONS = [
    ("lara", 1, {"proposal": "local", "landmarks": "farthest", "weighting": "balance"}),
    ("lara", 2, {"proposal": "global", "landmarks": "farthest", "learned": True, "beta": 2.0}),
    ("lara", 1, {"proposal": "mixed", "weighting": "coupled", "noise": 0.5}),
    ("lara", 2, {"proposal": "mixture", "landmarks": "farthest", "weighting": "decoupled"}),
    ("lara", 2, {"proposal": "single", "weighting": "coupled"}),
    ("ra", 2, {"biased": True, "noise": 0.5, "num_samples": 2}),
    ("performer", 2, {"orthogonal": True}),
    ("nystrom", 1, {"pinv_iterations": 3}),
    ("orthoformer", 1, {}),
    ("merged", 1, {}),
    ("merged", 2, {"rounds": 1, "values": 0.0}),
    ("tome", 2, {}),
    ("pooled", 1, {}),
    ("eva", 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, num_frames, options", OPTIONS)
def test_every_option_of_an_estimator(name, num_frames, options):
    """An estimator alone, with 5 landmarks for 12 tokens, as a torch.export and an ONNX program."""
    landmarks = {} if name == "ra" else {"num_landmarks": 5}
    estimator = build_estimator(name, head_dim=8, num_heads=2, seed=1, **landmarks, **options)
    layer = OneInput(estimator, num_frames).eval()
    clips = torch.randn((5, 2, 12, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        program = export_module.trace(layer, clips)
        written = export_module.to_onnx(program, clips)
    session = onnxruntime.InferenceSession(written.model_proto.SerializeToString())
    (entry,) = session.get_inputs()
    for count in (1, 5):
        with torch.no_grad():
            expected, found = layer(clips[:count]), program.module()(clips[:count])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        (found,) = session.run(None, {entry.name: clips[:count].numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("attention", sorted(ATTENTIONS))
@pytest.mark.parametrize("layer", LAYERS)
def test_traced_operations_equal_eager_ones(tmp_path, clips, monkeypatch, attention, layer):
    """The code path that is traced, run eagerly."""
    model = small(tmp_path, attention, layer)
    views = load_views(clips[0], model.cfg)
    with torch.no_grad():
        expected = model.network([views])
        names = ("importance_sampling", "landmarks", "tensors", "groups", "merged", "temporal")
        for name in names:
            monkeypatch.setattr(f"slowfast_lara.attention.{name}.is_exporting", lambda: True)
        np.testing.assert_allclose(model.network([views]), expected, atol=1e-6)


def test_safetensors_are_loaded(trained, tmp_path, capsys):
    out, video = tmp_path / "new" / "out", str(trained.parent / "set" / "test0.mp4")
    assert export_command([str(trained), str(out)]) == 0
    assert f"{out}: the file contains the model's weights" in capsys.readouterr().out
    assert listing(out) == ["README.md", "config.json", "model.safetensors"]
    assert listing(tmp_path / "new") == ["out"]
    expected, model = load(trained), load(out)
    assert np.array_equal(model(video).scores, expected(video).scores)
    assert model.class_names == ["left", "right", "up | down"]
    assert predict([str(out), video]) == 0
    swapped = load(out, attention="performer", num_landmarks=5)
    again = load(trained, attention="performer", num_landmarks=5)
    assert np.array_equal(swapped(video).scores, again(video).scores)
    with pytest.raises(UserError, match="trained .*VIT.NUM_HEADS"):
        load(out, overrides=["VIT.NUM_HEADS", 4])


def test_model_card_has_the_accuracy_of_the_run(trained, tmp_path):
    results = json.loads((trained / "test_results.json").read_text())
    assert export_command([str(trained), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"top-1 {results['top1_acc']:.2f} %" in card and "on 7 test videos" in card
    assert "lara (3 landmarks, groups or samples)" in card
    assert "kinetics set `set`, 16 videos" in card
    # The run did not test the replaced attention.
    swapped = ["VIT.APPROX_ATTN_TYPE", "nystrom"]
    assert export_command([str(trained), str(tmp_path / "swapped"), *swapped]) == 0
    card = (tmp_path / "swapped" / "README.md").read_text()
    assert "| accuracy | not tested with these weights and settings |" in card and "nystrom" in card


def test_model_card_ignores_a_test_of_another_run(trained, tmp_path):
    """The run's last test was of a checkpoint of the same name in another run."""
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    results = json.loads((other / "test_results.json").read_text())
    for changed, message in (
        (results["checkpoint"], "top-1"),
        (results["checkpoint"].replace(str(trained), "elsewhere"), "not tested with these"),
    ):
        results["checkpoint"] = changed
        (other / "test_results.json").write_text(json.dumps(results))
        out = tmp_path / message[:3]
        assert export_command([str(other), str(out)]) == 0
        assert f"| accuracy | {message}" in (out / "README.md").read_text()


def test_bad_input(trained, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    ra = ["VIT.APPROX_ATTN_TYPE", "ra"]
    out, before = str(tmp_path / "out"), listing(tmp_path)
    for arguments, message in (
        ([str(trained), str(tmp_path / "there")], "there already exists"),
        ([str(trained), str(tmp_path / "file")], "file already exists"),
        ([str(trained), str(tmp_path / "file") + "/"], "file already exists"),
        ([str(trained), str(tmp_path / "file" / "out")], "File exists"),
        ([str(trained), ""], "'' is not a valid folder name"),
        ([str(trained), "a\0b"], "not a valid folder name"),
        ([str(trained), "/proc/out"], "error: /proc: "),
        ([str(trained)], "expected one output folder, got 0"),
        ([str(tmp_path / "nowhere"), out], "nowhere: no such run"),
        ([str(tmp_path / "there"), out], "no readable checkpoint"),
        ([str(trained), out, "--to", "onnx", *ra], "unbiased RA"),
        ([str(trained), out, "--to", "torch", *ra], "unbiased RA"),
    ):
        assert export_command(arguments) == 2, message
        assert message in only_error(capsys)
        assert listing(tmp_path) == before
    assert export_command([str(trained), out, *ra]) == 0  # weights can be exported
    with pytest.raises(InputError, match="expected a float32 model"):
        export(load(trained).half(), tmp_path / "half")
    with pytest.raises(InputError, match="'tf'; must be one of safetensors, torch"):
        export(load(trained), tmp_path / "tf", "tf")


def test_an_export_that_differs_is_discarded(tmp_path, monkeypatch):
    model = small(tmp_path / "model")
    wrong = small(tmp_path / "other", "nystrom").network

    def write(network, model, folder):
        (Path(folder) / "model.pt2").touch()
        return export_module.compare(lambda clips: wrong([clips]), network, model)

    monkeypatch.setitem(export_module.FORMATS, "torch", (write, ()))
    with pytest.raises(RunError, match="differs from the model by .* in a batch of 1"):
        export(model, tmp_path / "out", "torch")
    assert listing(tmp_path) == ["model", "other"]


@pytest.mark.parametrize("form", ["safetensors", "torch", "onnx"])
def test_full_disk(trained, tmp_path, capsys, form):
    with files_of_at_most(20_000):
        assert export_command([str(trained), str(tmp_path / "out"), "--to", form]) == 1
    assert f"cannot write {tmp_path}/out: File too large" in only_error(capsys)
    assert listing(tmp_path) == []


def test_missing_package(tmp_path, monkeypatch):
    model = small(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"onnxscript.*'slowfast_lara\[export\]'"):
        export(model, tmp_path / "out", "onnx")
    assert listing(tmp_path) == ["model"]


def test_invalid_exports(trained, tmp_path):
    good = tmp_path / "good"
    export(load(trained), good)
    text = (good / "config.json").read_text()
    content = json.loads(text)

    def changed(**changes):
        return json.dumps({**content, **changes})

    cases = {
        "format_version is 2; must be 1": changed(format_version=2),
        "format_version is None": changed(format_version=None),
        "an export to 'onnx'": changed(form="onnx"),
        "was not written by slowfast_lara export": json.dumps({"architectures": ["Bert"]}),
        "cannot read .*config.json": "{",
        "config.json has no config": changed(config=[]),
        "unknown config key VIT.WIDTH": changed(config={"VIT": {"WIDTH": 3}}),
        "class_names must be a list of 3": changed(class_names=["a"]),
    }
    for message, text in cases.items():
        (good / "config.json").write_text(text)
        with pytest.raises(UserError, match=message) as error:
            load(good)
        assert error.value.exit_code == 2 and "\n" not in str(error.value)
    (good / "config.json").write_text(changed())
    weights = good / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot read .*model.safetensors"):
        load(good)


@pytest.fixture(scope="module")
def onnx_only(tmp_path_factory) -> Path:
    """A folder with only numpy, PyAV, onnxruntime and the packages they import."""
    folder = tmp_path_factory.mktemp("packages")
    wanted = ("numpy", "av", "onnxruntime", "flatbuffers", "google", "packaging")
    (packages,) = [Path(p) for p in site.getsitepackages() if (Path(p) / "numpy").is_dir()]
    for name in wanted:
        for part in packages.glob(f"{name}*"):
            if part.name in (name, f"{name}.libs"):
                (folder / part.name).symlink_to(part)
    return folder


def example(folder: Path, video: str, packages: Path) -> dict[str, float]:
    """Run example.py of an export with only these packages; names and scores."""
    program = f"import sys, runpy; sys.path.append({str(packages)!r}); sys.argv = sys.argv[1:]; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__'); "
    program += "assert not {'torch', 'cv2', 'slowfast_lara', 'onnx'} & set(sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", program, str(folder / "example.py"), video]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ", 1) for line in done.stdout.splitlines()]
    return {name: float(score) for score, name in lines}


@pytest.mark.slow
def test_python_example_of_the_readme(tmp_path, monkeypatch, capsys, onnx_only):
    """Run it on a small run in place of the quickstart's, then example.py of its export."""
    home = tmp_path / "runs" / "quickstart"
    videos = make_videos(home / "videos", 3, "--frames", "20")
    (videos / "classes.json").write_text(json.dumps(NAMES))
    config = write_config(
        tmp_path / "c.yaml",
        videos,
        home / "output",
        MODEL__NUM_CLASSES=6,
        VIT__APPROX_ATTN_TYPE="lara",
        VIT__APPROX_ATTN_DIM=3,
        TRAIN__BATCH_SIZE=2,
        SOLVER__MAX_EPOCH=1,
        TEST__NUM_ENSEMBLE_VIEWS=10,
    )
    for split in ("train", "val"):
        shutil.copy(videos / "test.csv", videos / f"{split}.csv")
    assert run(["--cfg", str(config)]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert SCRIPT is not None
    names: dict = {}
    exec(compile(SCRIPT[1], "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[:3]] == names["videos"]
    assert all(NAMES[0][:1] and "%" in line for line in printed[:3])
    assert names["features"].shape == (3, 24)
    assert float(printed[-1]) < 1e-4
    out = home / "onnx"
    assert listing(out) == ["README.md", "config.json", "example.py", "model.onnx"]
    check_scores(out, "onnx", names["model"], names["videos"][0])
    # 48 pixels are scaled to 32, which OpenCV rounds differently; 32 are not scaled.
    write_video(tmp_path / "small.mp4", seed=0, size=32)
    for video, atol in ((names["videos"][1], 5e-3), (str(tmp_path / "small.mp4"), 1e-5)):
        found = example(out, video, onnx_only)
        model = load(home / "output", overrides=["TEST.NUM_SPATIAL_CROPS", 1])
        expected = model(video, views=1)
        assert list(found) == [name for name in expected.top().names if name in found]
        np.testing.assert_allclose([*found.values()], expected.top().scores, atol=atol)
