"""slowfast_lara.load: sources, scores, features, streams, other attentions, bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
import yaml

import slowfast_lara
from slowfast_lara.data import load_views
from slowfast_lara.errors import CheckpointError, ConfigError, DecodeError, InputError, UserError
from slowfast_lara.inference.load import load
from tests.helpers.commands import predict, run, visualize
from tests.helpers.runs import NUM_CLASSES, write_config, write_video
from tests.helpers.small_models import ROOT, only_error, small_config, write_model

pytestmark = pytest.mark.usefixtures("in_process")

NAMES = ["left", "right", "up"]
LAST = "checkpoint_epoch_00002.pyth"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, video_set) -> Path:
    """A run with class names, tested with 30 views; scores.npz has the scores of its videos."""
    folder = tmp_path_factory.mktemp("trained")
    data = Path(shutil.copytree(video_set, folder / "set"))
    for name in ("train", "val", "test"):
        text = (data / f"{name}.csv").read_text().replace(str(video_set), str(data))
        (data / f"{name}.csv").write_text(text)
    (data / "classes.json").write_text(json.dumps(NAMES))
    changes = {
        "TEST__NUM_ENSEMBLE_VIEWS": 10,
        "TEST__SAVE_RESULTS_PATH": "scores.npz",
        "TEST__BATCH_SIZE": 4,
    }
    config = write_config(folder / "c.yaml", data, folder / "out", **changes)
    assert run(["--cfg", str(config)]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def videos(trained) -> list[str]:
    return np.load(trained / "scores.npz")["paths"].tolist()


def test_loading_needs_no_engine():
    modules = ("inference.load", "inference.export", "inference.predict", "report.sections")
    code = "".join(f"import slowfast_lara.{module}; " for module in modules)
    code += "import sys; print([n for n in sys.modules if n.startswith('slowfast_lara.engine')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def frames_of(path: str) -> np.ndarray:
    with av.open(path) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def without(checkpoint: Path, *keys: str) -> Path:
    """Remove keys from a checkpoint, as in those of earlier versions."""
    content = torch.load(checkpoint, weights_only=True)
    torch.save({key: content[key] for key in content if key not in keys}, checkpoint)
    return checkpoint


def test_scores_equal_those_of_a_test_bit_for_bit(trained, videos):
    saved = np.load(trained / "scores.npz")
    model = slowfast_lara.load(trained)
    for path, expected in zip(videos, saved["scores"]):
        prediction = model(path, views=30)
        assert np.array_equal(prediction.scores, expected) and prediction.num_views == 30
        assert prediction.top().names == [NAMES[i] for i in np.argsort(-expected)]
    # One video fills a batch, so a list gives the same bits.
    assert [p.scores.tolist() for p in model(videos)] == saved["scores"].tolist()
    assert np.array_equal(model(Path(videos[0])).scores, saved["scores"][0])


@pytest.mark.parametrize(
    ("attention", "batch", "layer"),
    [
        ("lara", 1, "trajectory"),
        ("ra", 7, "trajectory"),
        ("performer", 64, "joint"),
        ("nystrom", 30, "divided"),
        ("orthoformer", 13, "trajectory"),
    ],
)
def test_scores_are_bit_exact_for_every_attention_batch_and_size(tmp_path, attention, batch, layer):
    """Also for unbiased RA, whose samples do not depend on the videos scored before."""
    sizes = ((33, 71, 5), (95, 47, 17), (48, 48, 40))
    for number, (width, height, frames) in enumerate(sizes):
        write_video(tmp_path / f"{number}.mp4", number, frames, height, width)
    videos = [str(tmp_path / f"{number}.mp4") for number in range(len(sizes))]
    (tmp_path / "test.csv").write_text("".join(f"{path} 0\n" for path in videos))
    config = small_config(APPROX_ATTN_TYPE=attention, ATTN_LAYER=layer)
    config["TEST"] |= {"BATCH_SIZE": batch, "NUM_ENSEMBLE_VIEWS": 10}
    files = write_model(tmp_path / "model", config)
    test = {
        "TRAIN.ENABLE": False,
        "TEST.CHECKPOINT_FILE_PATH": files.checkpoint,
        "TEST.SAVE_RESULTS_PATH": "scores.npz",
        "DATA.PATH_TO_DATA_DIR": tmp_path,
        "OUTPUT_DIR": tmp_path / "out",
        "DATA_LOADER.NUM_WORKERS": 0,
    }
    words = [str(word) for pair in test.items() for word in pair]
    assert run(["--cfg", files.cfg, *words]) == 0
    expected = np.load(tmp_path / "out" / "scores.npz")["scores"]
    model = load(files.cfg, files.checkpoint)
    for number in (2, 0, 1):
        found = model(videos[number], views=30).scores
        assert np.array_equal(found, expected[number]), number


def test_scores_do_not_depend_on_the_number_of_threads(trained, videos, monkeypatch):
    """A run of a narrow model uses one thread; a user's process has one per core."""
    expected = np.load(trained / "scores.npz")["scores"][0]
    model, seen = load(trained), []
    model.network.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        assert np.array_equal(model(videos[0], views=30).scores, expected)
        model.features(videos[0], views=1)
        next(model.stream(videos[0]))
        assert torch.get_num_threads() == 2 and {*seen} == {1}
    finally:
        torch.set_num_threads(1)


def test_a_cpu_computes_in_float32(trained, videos):
    """Published configs enable mixed precision, which is much slower on a CPU."""
    expected = np.load(trained / "scores.npz")["scores"][0]
    for precision in ("float16", "bfloat16"):
        mixed = ["SOLVER.USE_MIXED_PRECISION", True, "SOLVER.PRECISION", precision]
        assert np.array_equal(load(trained, overrides=mixed)(videos[0]).scores, expected)


def test_model_trained_with_triton_loads_without_triton(trained, videos, tmp_path):
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    content["cfg"] = content["cfg"].replace("KERNELS: auto", "KERNELS: triton")
    assert "KERNELS: triton" in content["cfg"]
    torch.save(content, tmp_path / "model.pyth")
    expected = np.load(trained / "scores.npz")["scores"][0]
    for overrides in ((), ("VIT.KERNELS", "torch")):
        model = load(tmp_path / "model.pyth", overrides=overrides)
        assert np.array_equal(model(videos[0]).scores, expected)
    load(tmp_path / "model.pyth", attention="nystrom", num_landmarks=4)  # without Triton kernels


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"DEPTH": 10**7}, "has 2 blocks; VIT.DEPTH is 10000000"),
        ({"EMBED_DIM": 24 * 10**9}, "cannot build the model"),
        ({"MLP_RATIO": 1e300}, "cannot build the model"),
        ({"MLP_RATIO": 1e6}, "does not fit this model: blocks.0.mlp.fc1.weight is"),
        ({"EMBED_DIM": 24 * 10**5}, "does not fit this model: "),
    ],
)
def test_absurd_sizes_in_a_config_allocate_no_memory(trained, tmp_path, sizes, message):
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    tree = yaml.safe_load(content["cfg"])
    tree["VIT"].update(sizes)
    torch.save({**content, "cfg": yaml.safe_dump(tree)}, tmp_path / "model.pyth")
    with pytest.raises(CheckpointError, match=message) as error:
        load(tmp_path / "model.pyth")
    assert "\n" not in str(error.value)


def test_a_checkpoint_loads_without_its_run(trained, videos, tmp_path, monkeypatch, capsys):
    expected = np.load(trained / "scores.npz")["scores"][0]
    alone = Path(shutil.copy(trained / "checkpoints" / LAST, tmp_path / "model.pyth"))
    video = shutil.copy(videos[0], tmp_path / "v.mp4")
    hidden = trained.parent.rename(trained.parent.with_name("hidden"))
    try:
        monkeypatch.chdir(tmp_path)
        model = load("model.pyth")
        assert np.array_equal(model(video).scores, expected)
        assert model.class_names == NAMES and model.path == "model.pyth"
        assert predict([str(alone), "v.mp4"]) == 0
    finally:
        hidden.rename(trained.parent)
    first = NAMES[int(expected.argmax())]
    assert f"  1. {expected.max():6.1%}  {first}\n" in capsys.readouterr().out


def test_best_checkpoint_is_preferred_and_a_truncated_one_skipped(trained, tmp_path):
    copy = Path(shutil.copytree(trained, tmp_path / "run"))
    assert load(copy).path.endswith(LAST)
    best = copy / "checkpoints" / "best.pyth"
    shutil.copy(copy / "checkpoints" / "checkpoint_epoch_00001.pyth", best)
    assert load(copy).path == str(best)
    best.write_bytes(best.read_bytes()[:5000])
    assert load(copy).path.endswith(LAST)


def test_old_checkpoints_load(trained, videos, tmp_path):
    expected = np.load(trained / "scores.npz")["scores"][0]
    copy = Path(shutil.copytree(trained, tmp_path / "run"))
    old = without(copy / "checkpoints" / LAST, "cfg", "class_names")
    for source in ((copy,), (old,), (copy / "config.yaml", old)):
        model = load(*source)
        assert np.array_equal(model(videos[0]).scores, expected)
        assert model.class_names == NAMES  # classes.json next to the lists
    (copy / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="holds no model config"):
        load(copy)


def test_frames_in_memory_equal_their_file(trained, videos):
    model, path = load(trained), videos[0]
    frames = frames_of(path)
    for given in (frames, torch.from_numpy(frames)):
        assert np.array_equal(model(given, fps=30).scores, model(path).scores)
        assert np.array_equal(model.features(given), model.features(path))
    # At half the frame rate a clip spans half as many frames.
    slow = model(frames, views=1, fps=15).scores
    assert not np.array_equal(slow, model(frames, views=1, fps=30).scores)


def test_list_of_paths_arrays_and_tensors(trained, videos):
    model = load(trained)
    given = [videos[0], frames_of(videos[1]), torch.from_numpy(frames_of(videos[2])), videos[3]]
    singly = [model(video, views=1).scores for video in given]
    together = model(given, views=1)
    np.testing.assert_allclose([p.scores for p in together], singly, atol=1e-6)
    features = model.features(tuple(given), views=1)
    np.testing.assert_allclose(
        features, [model.features(video, views=1) for video in given], atol=1e-5
    )
    assert model([]) == [] and features.shape == (4, model.cfg.VIT.EMBED_DIM)
    assert model.features([]).shape == (0, model.cfg.VIT.EMBED_DIM)


def test_representations(trained, videos, tmp_path):
    model = load(trained)
    path = trained / "checkpoints" / LAST
    assert repr(model) == (
        f"<TrainedModel {path}: trajectory attention (exact), 3 classes, clips of 4 frames 32 x "
        "32, float32 on cpu>"
    )
    assert "(lara)" in repr(model.with_attention("lara", num_landmarks=4).half())
    prediction = model(videos[0], views=np.int64(2))
    best = ", ".join(f"{n} {s:.1%}" for n, s in zip(*prediction.top()[1:]))
    assert (str(prediction), prediction.num_views) == (best, 2) and prediction == prediction
    (tmp_path / "names.txt").write_text("a\x1b[31m\nb\nc\n")
    named = load(trained, classes=str(tmp_path / "names.txt"))
    window = next(named.stream(videos[0]))
    assert repr(window).startswith("0.00 to 0.27 s: ") and "a\\x1b[31m" in repr(window)
    assert "scores" in repr(window._replace(names=()))


def test_predictions_are_sequences_and_json(trained, videos, tmp_path):
    model = load(trained)
    first, second = predictions = model(videos[:2], views=3)
    order = np.argsort(-first.scores)
    pairs = [(NAMES[i], float(first.scores[i])) for i in order]
    assert len(first) == NUM_CLASSES and list(first) == first[:] == pairs
    assert first[0] == pairs[0] and first[-1].name == pairs[-1][0] and first[:2] == pairs[:2]
    assert first[0].score == max(dict(first).values()) and dict(first) == dict(pairs)
    with pytest.raises(IndexError):
        _ = first[NUM_CLASSES]
    assert first.path == videos[0] and model(frames_of(videos[0]), views=1).path is None
    out = tmp_path / "out.json"
    assert predict([str(trained), *videos[:2], "--views", "3", "--json", str(out)]) == 0
    written = json.loads(out.read_text())["videos"]
    single = [model(video, views=3).to_dict() for video in videos[:2]]
    assert json.loads(json.dumps(single)) == written
    assert [prediction.to_dict()["path"] for prediction in predictions] == videos[:2]


def test_features_are_the_input_of_the_classifier(trained, videos):
    model = load(trained)
    features = torch.from_numpy(model.features(videos[0], views=1))
    one = load(trained, overrides=["TEST.NUM_ENSEMBLE_VIEWS", 1, "TEST.NUM_SPATIAL_CROPS", 1])
    view = load_views(videos[0], one.cfg)
    with torch.no_grad():
        assert torch.equal(features, model.network.forward_features([view])[0])
        scores = model.network.head(features).softmax(-1)
    np.testing.assert_allclose(scores, model(videos[0], views=1).scores, atol=1e-6)


def test_stream(trained, videos):
    model, frames = load(trained), frames_of(videos[0])
    windows = list(model.stream(videos[0], stride=0.1))
    assert len(windows) > 1 and all(window.full for window in windows)
    assert windows[0].top(1).names[0] in NAMES and windows[0].end == pytest.approx(8 / 30)
    for given in (frames, torch.from_numpy(frames), iter(frames), [*frames]):
        again = list(model.stream(given, stride=0.1, fps=30))
        assert [w.scores.tolist() for w in again] == [w.scores.tolist() for w in windows]
    assert next(model.stream(videos[0])).scores.shape == (NUM_CLASSES,)


def test_overrides_may_be_a_mapping(trained, videos):
    pairs = load(trained, overrides=["TEST.NUM_ENSEMBLE_VIEWS", 1, "VIT.KERNELS", "torch"])
    flat = load(trained, overrides={"TEST.NUM_ENSEMBLE_VIEWS": 1, "VIT.KERNELS": "torch"})
    nested = {"TEST": {"NUM_ENSEMBLE_VIEWS": 1}, "VIT": {"KERNELS": "torch"}}
    assert flat.cfg == pairs.cfg == load(trained, overrides=nested).cfg
    assert flat.cfg.VIT.KERNELS == "torch" and flat(videos[0]).num_views == 3
    assert load(trained, overrides={}).cfg == load(trained).cfg
    with pytest.raises(ConfigError, match="overrides.*mapping.*KEY, VALUE"):
        load(trained, overrides="VIT.DEPTH 2")


def test_half_and_device(trained, videos):
    model = load(trained, device="cpu")
    expected = model(videos[0]).scores
    assert model.to("cpu") is model and next(model.network.parameters()).device.type == "cpu"
    assert model.half() is model and model.network.head.weight.dtype == torch.float16
    np.testing.assert_allclose(model(videos[0]).scores, expected, atol=5e-3)
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert not model.network.training
    with pytest.raises(InputError, match="cannot use device 'nowhere'"):
        model.to("nowhere")


@pytest.mark.parametrize(
    ("attention", "options", "keys"),
    [
        ("lara", {"num_landmarks": 4, "beta": 2.0}, {"LARA": {"BETA": 2.0}}),
        (
            "performer",
            {"num_landmarks": 5, "orthogonal": True},
            {"PERFORMER": {"ORTHOGONAL": True}},
        ),
        ("nystrom", {"num_landmarks": 4}, {}),
        ("orthoformer", {"num_landmarks": 4}, {}),
        ("ra", {"biased": True, "num_landmarks": 4}, {"RA": {"BIASED": True}}),
        ("exact", {}, {}),
        (
            "lara-recommended",
            {"num_landmarks": 4, "beta": 2.0},
            {
                "LARA": {
                    "PROPOSAL": "global",
                    "LANDMARKS": "farthest",
                    "WEIGHTING": "balance",
                    "BETA": 2.0,
                }
            },
        ),
    ],
)
def test_replaced_attention_equals_a_test(trained, videos, tmp_path, attention, options, keys):
    before = torch.get_rng_state()
    model = load(trained, attention=attention, **options)
    assert torch.equal(torch.get_rng_state(), before)
    estimator = {"exact": "softmax", "lara-recommended": "lara"}.get(attention, attention)
    assert model.cfg.VIT.APPROX_ATTN_TYPE == estimator
    changes = {
        "TRAIN__ENABLE": False,
        "TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST),
        "TEST__SAVE_RESULTS_PATH": "scores.npz",
        "VIT__APPROX_ATTN_TYPE": model.cfg.VIT.APPROX_ATTN_TYPE,
        "VIT__APPROX_ATTN_DIM": options.get("num_landmarks", 4),
        **{f"VIT__{key}": value for key, value in keys.items()},
    }
    config = write_config(tmp_path / "c.yaml", trained.parent / "set", tmp_path / "o", **changes)
    assert run(["--cfg", str(config)]) == 0
    saved = np.load(tmp_path / "o" / "scores.npz")["scores"]
    assert [p.scores.tolist() for p in model(videos, views=6)] == saved.tolist()
    exact = load(trained)(videos[0]).scores
    assert np.array_equal(model(videos[0]).scores, exact) == (attention == "exact")


def test_replaced_attention_shares_the_weights(trained, videos):
    model = load(trained).half()
    other = model.with_attention("lara", num_landmarks=4)
    assert model.cfg.VIT.APPROX_ATTN_TYPE == "none" and other.class_names == NAMES
    own = dict(model.network.named_parameters())
    for name, parameter in other.network.named_parameters():
        assert parameter.data_ptr() == own[name].data_ptr() and not parameter.requires_grad
    more = other.with_attention(num_landmarks=2, weighting="balance")
    assert (more.cfg.VIT.APPROX_ATTN_DIM, more.cfg.VIT.LARA.WEIGHTING) == (2, "balance")
    assert np.isfinite(more(videos[0]).scores).all()


def test_changed_options_redraw_the_samples(trained):
    """Saved samples have the right shape, but were drawn with different options."""
    model = load(trained, attention="performer", num_landmarks=np.int64(6))
    assert not load(trained).from_seed
    other = model.with_attention(orthogonal=True)
    assert other.from_seed == [f"blocks.{i}.attn.estimator.projection" for i in range(2)]
    before, after = (
        m.network.blocks[0].attn.estimator.projection[0].double() for m in (model, other)
    )
    assert before.shape == after.shape == (6, 12)
    for samples, orthogonal in ((before, False), (after, True)):
        gram = samples @ samples.T
        gram.fill_diagonal_(0)
        assert (gram.abs().max() < 1e-4) == orthogonal


def test_invalid_attention_and_options(trained):
    for options, message in (
        ({"attention": "lora"}, "unknown attention 'lora'.*lara-recommended"),
        ({"attention": "lara", "betta": 1}, "unknown option 'betta' of lara.*proposal"),
        ({"attention": "lara", "num_landmarks": 9}, "at most 8"),
        ({"attention": "performer", "num_landmarks": 10**15}, "cannot build the model"),
        ({"attention": "lara", "num_landmarks": 4, "beta": "x"}, "VIT.LARA.BETA is 'x'"),
        ({"attention": "lara", "num_landmarks": 4, "learned": True}, "it has no blocks.0.attn.est"),
    ):
        with pytest.raises(InputError, match=message):
            load(trained, **options)


def test_predict_and_visualize_need_no_flags(trained, videos, tmp_path, capsys):
    out = tmp_path / "p.json"
    assert predict([str(trained), videos[0], "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    best = np.load(trained / "scores.npz")["scores"][0].argsort()[::-1].tolist()
    assert content["videos"][0]["top5"] == best
    assert content["checkpoint"].endswith(LAST)
    look = ["--out", str(tmp_path / "look"), "--estimators", "lara", "VIT.APPROX_ATTN_DIM", "4"]
    assert visualize([str(trained), videos[0], *look]) == 0
    assert (tmp_path / "look" / "point_1.png").is_file()


def test_compiled_model_loads_uncompiled(trained, tmp_path):
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    content["cfg"] = content["cfg"].replace("COMPILE: false", "COMPILE: true")
    torch.save(content, tmp_path / "model.pyth")
    assert not load(tmp_path / "model.pyth").cfg.MODEL.COMPILE
    compiled = load(tmp_path / "model.pyth", overrides=["MODEL.COMPILE", True])
    assert compiled.cfg.MODEL.COMPILE


def test_files_that_cannot_be_memory_mapped(trained, videos, tmp_path, caplog):
    """Old torch files and undecodable file names: config, names and EMA weights are read."""
    caplog.set_level("WARNING")  # pytest-xdist cannot transfer logs that are not UTF-8
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    averaged = {
        name: 2 * x if x.is_floating_point() else x for name, x in content["model_state"].items()
    }
    torch.save({**content, "ema_state": averaged, "ema_steps": 1}, tmp_path / "new.pyth")
    content = torch.load(tmp_path / "new.pyth", weights_only=True)
    torch.save(content, tmp_path / "old.pyth", _use_new_zipfile_serialization=False)
    named = shutil.copy(tmp_path / "new.pyth", os.path.join(str(tmp_path), "\udcff.pyth"))
    expected = load(tmp_path / "new.pyth")(videos[0]).scores
    for path in (tmp_path / "old.pyth", named):
        model = load(path)
        assert model.averaged and model.class_names == NAMES
        assert np.array_equal(model(videos[0]).scores, expected)


def test_ddp_prefix_of_weight_names(trained, videos, tmp_path):
    run_folder = shutil.copytree(trained, tmp_path / "run")
    path = run_folder / "checkpoints" / LAST
    content = torch.load(path, weights_only=True)
    content["model_state"] = {f"module.{name}": x for name, x in content["model_state"].items()}
    torch.save(content, path)
    expected = load(trained)(videos[0]).scores
    for source in (run_folder, path):
        assert np.array_equal(load(source)(videos[0]).scores, expected)


def test_class_names_of_a_file_replace_those_of_the_checkpoint(trained, tmp_path):
    (tmp_path / "other.txt").write_text("a\nb\nc\n")
    assert load(trained, classes=str(tmp_path / "other.txt")).class_names == ["a", "b", "c"]


def test_unsuitable_class_names_do_not_stop_training(trained, video_set, tmp_path):
    """The checkpoint does not contain them."""
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    assert content["class_names"] == NAMES
    data = Path(shutil.copytree(video_set, tmp_path / "set"))
    (data / "classes.json").write_text("[")
    changes = {"SOLVER__MAX_EPOCH": 1, "TEST__ENABLE": False}
    config = write_config(tmp_path / "c.yaml", data, tmp_path / "out", **changes)
    assert run(["--cfg", str(config)]) == 0
    path = tmp_path / "out" / "checkpoints" / "checkpoint_epoch_00001.pyth"
    assert torch.load(path, weights_only=True)["class_names"] is None
    assert "classes.json" in (tmp_path / "out" / "stdout.log").read_text()
    assert load(path).class_names == ["class 0", "class 1", "class 2"]


def test_class_names_are_not_read_from_the_working_directory(clips, tmp_path, monkeypatch):
    files = write_model(tmp_path / "model", small_config())
    (tmp_path / "classes.json").write_text(
        json.dumps(["a"] * small_config()["MODEL"]["NUM_CLASSES"])
    )
    monkeypatch.chdir(tmp_path)
    assert load(files.cfg, files.checkpoint).class_names[0] == "class 0"


def test_bad_input(trained, videos, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pyth").write_text("not a checkpoint")
    (tmp_path / "none.pyth").write_bytes(b"")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.pth")
    wrong = tmp_path / "wrong.pyth"
    content = torch.load(trained / "checkpoints" / LAST, weights_only=True)
    torch.save({**content, "class_names": [1, 2, 3]}, wrong)
    cases = {
        "nowhere: no such run": [tmp_path / "nowhere"],
        "empty: no readable checkpoint": [tmp_path / "empty"],
        "text.pyth: .* starts with": [tmp_path / "text.pyth"],
        "none.pyth: .* starts with": [tmp_path / "none.pyth"],
        "foreign.pth holds no model config": [tmp_path / "foreign.pth"],
        "a config also needs weights": ["quick/lara"],
        "is a config; its weights must also be given": [trained / "config.yaml"],
        "no shipped config of this name": ["quick/lora", trained / "checkpoints" / LAST],
        "was trained .*: ": ["quick/lara", trained / "checkpoints" / LAST],
        "class_names must be a list of 3 names": [wrong],
    }
    before = sorted(os.listdir(tmp_path))
    for message, arguments in cases.items():
        with pytest.raises(UserError, match=message) as error:
            load(*arguments)
        assert error.value.exit_code == 2 and "\n" not in str(error.value)
    assert predict([str(tmp_path / "empty"), videos[0]]) == 2
    assert "no readable checkpoint" in only_error(capsys)
    assert sorted(os.listdir(tmp_path)) == before


def test_bad_videos(trained, videos, tmp_path):
    model, frames = load(trained), frames_of(videos[0])
    (tmp_path / "none.mp4").write_bytes(b"")
    for bad, message in (
        (tmp_path / "none.mp4", "none.mp4: "),
        ("nowhere.mp4", "nowhere.mp4: "),
        (frames[0], r"\[40, 40, 3\]"),
        (frames.astype(np.float32), "float32"),
        (frames[:0], r"\[0, 40, 40, 3\]"),
        (frames[:, :2], "too narrow"),
        (frames[:, :0, :0], "0x0"),
    ):
        with pytest.raises(DecodeError, match=message):
            model(bad)
    tensor = torch.from_numpy(frames)
    with pytest.raises(DecodeError, match="float32"):
        model(tensor.float().requires_grad_())
    with pytest.raises(InputError, match="path or uint8 frames.*Tensor of torch.bfloat16"):
        model(tensor.bfloat16())
    with pytest.raises(InputError, match="expected a path or uint8 frames"):
        model(tensor.to_sparse())
    for wrong in (-1, 0, float("nan"), float("inf"), 1e40, "30"):
        for name, use in (("fps", model), ("fps", model.stream), ("window", model.stream)):
            with pytest.raises(InputError, match=f"{name} is .*; must be positive"):
                use(frames, **{name: wrong})
    for bad in ({}, None, 3, b"v.mp4", iter(frames), [videos[0], None], [[videos[0]]]):
        with pytest.raises(InputError, match="expected a path or uint8 frames"):
            model(bad)
    for views in (0, 31, 2.5, "3"):
        with pytest.raises(InputError, match=f"views is {views!r}; must be .* 1 to 30"):
            model(videos[0], views=views)
    with pytest.raises(InputError, match="path or uint8 frames.*NoneType"):
        model.stream(None)
    for frame, message in (
        (np.zeros((8, 8, 3)), "float64"),
        (torch.zeros(8, 8, 3).requires_grad_(), "float32"),
        (torch.zeros(8, 8, 3).bfloat16(), "Tensor of torch.bfloat16"),
        ([[1], [2, 3]], "path or uint8 frames.*list"),
        (np.zeros((0, 0, 3), np.uint8), "0x0"),
    ):
        with pytest.raises(InputError, match=message):
            next(model.stream([frame]))


@pytest.mark.parametrize("views", [1, 30])
def test_an_unreadable_video_of_a_list_does_not_lose_the_others(
    trained, videos, tmp_path, views, caplog
):
    model, frames = load(trained), frames_of(videos[1])
    (tmp_path / "text.mp4").write_text("not a video")
    bad = ["nowhere.mp4", tmp_path / "text.mp4", frames[:0], tmp_path]
    given = [bad[0], videos[0], *bad[1:3], frames, bad[3]]
    found = model(given, views=views)
    assert [bool(prediction) for prediction in found] == [False, True, False, False, True, False]
    for index in (1, 4):
        expected = model(given[index], views=views).scores
        np.testing.assert_allclose(found[index].scores, expected, atol=1e-6)
    assert [prediction.path for prediction in found[:3]] == [*map(str, given[:3])]
    assert "nowhere.mp4" in caplog.text and "text.mp4" in caplog.text
    for prediction in (found[0], found[2], found[3], found[5]):
        assert prediction.error and len(prediction) == 0 and prediction.error in repr(prediction)
        assert json.loads(json.dumps(prediction.to_dict())).keys() == {"path", "error"}
        for use in (prediction.top, lambda p=prediction: p[0], lambda p=prediction: list(p)):
            name = prediction.path or "frames"
            with pytest.raises(DecodeError, match=re.escape(f"{name}: {prediction.error}")):
                use()
    rows = model.features(given, views=views)
    assert np.isnan(rows).all(1).tolist() == [True, False, True, True, False, True]
    np.testing.assert_allclose(rows[1], model.features(videos[0], views=views), atol=1e-5)
    assert [prediction.error is None for prediction in model(bad)] == [False] * 4
    with pytest.raises(DecodeError, match="nowhere"):
        model.features("nowhere.mp4")


def test_scores_that_are_not_finite(clips, tmp_path):
    files = write_model(tmp_path, small_config())
    model = load(files.cfg, files.checkpoint)
    model.network.head.weight[0] = float("nan")
    with pytest.raises(DecodeError, match="outputs are not finite"):
        model(clips[0])
    first, second = model([clips[0], clips[1]])
    assert "not finite" in first.error and "not finite" in second.error
    with pytest.raises(DecodeError, match=r"scores at [0-9.]+ seconds are not finite"):
        next(model.stream(clips[0]))
