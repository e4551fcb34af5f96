"""The README.md of an exported model: what it is, what it was trained on, how well it does."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from slowfast.utils.checkpoint import get_checkpoint_dir

from slowfast_lara.errors import UserError
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, display_name
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.folder import CONFIG, OF_TEST, Run, read_run

_USE = {
    "safetensors": """```python
import slowfast_lara

model = slowfast_lara.load("THIS_FOLDER")
print(model("video.mp4"))
```""",
    "torch": """```python
import torch

program = torch.export.load("THIS_FOLDER/model.pt2").module()
scores = program(clip)  # clip float32 [batch, 3, frames, height, width]; see config.json
```""",
    "onnx": """`python example.py video.mp4` prints the likeliest classes; it needs numpy, PyAV and
onnxruntime, and nothing else. The input is a clip, float32 [batch, 3, frames, height, width],
normalised as config.json says; the output is the scores of the classes.""",
}


def model_card(model: TrainedModel, form: str, checked: str) -> str:
    """The text; `checked` says what the export was compared with, and by how much it differs."""
    vit, data = model.cfg.VIT, model.cfg.DATA
    attention = display_name(chosen_estimator(model.cfg))
    if attention not in ("exact", "ra"):
        attention += f" ({vit.APPROX_ATTN_DIM} landmarks or samples)"
    content = checkpoint.peek_checkpoint(model.path)
    parameters = sum(x.numel() for x in model.network.parameters())
    rows = {
        "model": f"Motionformer ({vit.ATTN_LAYER} attention), {parameters / 1e6:.2f} million "
        "parameters",
        "attention": attention,
        "clip": f"{data.NUM_FRAMES} frames, each {data.SAMPLING_RATE}th at {data.TARGET_FPS} a "
        f"second, {data.TEST_CROP_SIZE} x {data.TEST_CROP_SIZE} pixels",
        "classes": str(len(model.class_names)),
        "trained on": _trained_on(model, content),
        "accuracy": _accuracy(model),
        "exported from": os.path.basename(model.path)
        + (", the moving average of its weights" if model.averaged else ""),
        "checked": checked,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    title = "A video model of slowfast_lara"
    return f"# {title}\n\n| | |\n| --- | --- |\n{table}\n\n{_USE[form]}\n"


def _trained_on(model: TrainedModel, content: dict[str, Any]) -> str:
    cfg, videos = model.cfg, content.get("train_list")
    folder = os.path.basename(os.path.normpath(cfg.DATA.PATH_TO_DATA_DIR or "."))
    name = f"{cfg.TRAIN.DATASET} set `{folder}`" if folder != "." else f"{cfg.TRAIN.DATASET} set"
    return f"{name}, {videos}" if isinstance(videos, str) and "|" not in videos else name


def _accuracy(model: TrainedModel) -> str:
    """That of the run's own test, if it was of this checkpoint and this model."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(model.path)))
    with contextlib.suppress(UserError, OSError, IndexError, KeyError, TypeError, ValueError):
        run = read_run(folder, None)
        same_file = os.path.basename(run.checkpoint) == os.path.basename(model.path)
        if same_file and _tested_as(model, run):
            final = run.of_type("test_final")[-1]
            failed = int(final.get("num_failed", 0))
            return (
                f"top-1 {float(final['top1_acc']):.2f} %, top-5 {float(final['top5_acc']):.2f} % "
                f"of {int(final['num_videos'])} test videos"
                + (f"; {failed} more could not be read" if failed else "")
            )
    return "not tested as it is"


def _tested_as(model: TrainedModel, run: Run) -> bool:
    with open(os.path.join(run.folder, OF_TEST + CONFIG), encoding="utf-8") as file:
        tested = {"cfg": file.read()}
    saved_config.check_model(run.folder, tested, model.cfg)  # or an error
    if saved_config.saved_value(tested, "TEST.USE_EMA") != model.cfg.TEST.USE_EMA:
        return False
    # A test may have been of another run's checkpoint; both paths are of the test's time.
    own = get_checkpoint_dir(saved_config.saved_value(tested, "OUTPUT_DIR"))
    return _same_place(os.path.dirname(run.checkpoint), own)


def _same_place(path: str, other: str) -> bool:
    """Of two paths of one folder, either may start at the folder of that time."""
    short, long = sorted((os.path.normpath(path), os.path.normpath(other)), key=len)
    return short == long or long.endswith(os.sep + short)
