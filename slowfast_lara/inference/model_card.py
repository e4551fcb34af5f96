"""Model card: the README.md of an exported model."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from slowfast.utils.checkpoint import get_checkpoint_dir

from slowfast_lara.errors import UserError, counted, printable
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, display_name
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.folder import CONFIG, TEST_METRICS, TEST_PREFIX, RunRecord, read_run

# Format of the text that `engine.resume_policy.list_fingerprint` returns. A checkpoint from another
# source may hold any text instead.
_FINGERPRINT = re.compile("[0-9]{1,9} videos, sha256 [0-9a-f]{1,64}")

_USAGE = {
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
    "onnx": """`python example.py video.mp4` prints the top 5 classes. It needs only numpy, PyAV and
onnxruntime. The input is a clip, float32 [batch, 3, frames, height, width], normalised with the
mean and std in config.json. The output is the scores of the classes. If the model has several
classifiers, their scores are concatenated; `class_counts` in config.json gives their sizes.""",
}


# YAML metadata of the model card, which the Hugging Face Hub reads.
_METADATA = """---
library_name: slowfast_lara
pipeline_tag: video-classification
tags:
- video-classification
---
"""


def model_card(model: TrainedModel, export_format: str, checked: str) -> str:
    """The text of the model card; `checked` describes the check of the exported model."""
    vit, data = model.cfg.VIT, model.cfg.DATA
    attention = display_name(chosen_estimator(model.cfg))
    if attention not in ("exact", "ra"):
        attention += f" ({vit.APPROX_ATTN_DIM} landmarks, groups or samples)"
    parameters = sum(x.numel() for x in model.network.parameters())
    rows = {
        "model": f"Motionformer, {vit.ATTN_LAYER} attention, {parameters / 1e6:.2f} M parameters",
        "attention": attention,
        "clip": f"{data.NUM_FRAMES} frames of {data.TEST_CROP_SIZE} x {data.TEST_CROP_SIZE} "
        f"pixels, {_every(data.SAMPLING_RATE)} at {data.TARGET_FPS} fps",
        "classes": str(len(model.class_names)),
        "trained on": _training_set(model, checkpoint.peek_checkpoint(model.path)),
        "accuracy": _accuracy(model),
        "exported from": _code(os.path.basename(model.path)) + " (EMA weights)" * model.averaged,
        "checked": checked,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    title = "Video model exported from slowfast_lara"
    return f"{_METADATA}# {title}\n\n| | |\n| --- | --- |\n{table}\n\n{_USAGE[export_format]}\n"


def _training_set(model: TrainedModel, content: dict[str, Any]) -> str:
    cfg, videos = model.cfg, content.get("train_list")
    folder = os.path.basename(os.path.normpath(cfg.DATA.PATH_TO_DATA_DIR))
    name = f"{cfg.TRAIN.DATASET} set" + (f" {_code(folder)}" if folder != "." else "")
    is_fingerprint = isinstance(videos, str) and _FINGERPRINT.fullmatch(videos)
    return f"{name}, {videos}" if is_fingerprint else name


def _code(text: str) -> str:
    """Untrusted text as a Markdown code span: without markup or HTML, valid in a table cell."""
    return "`" + printable(text).replace("`", r"\x60").replace("|", r"\x7c") + "`"


def _every(number: int) -> str:
    """`every 2nd frame`, `every 3rd frame`, ...; `all frames` for 1."""
    if number == 1:
        return "all frames"
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"every {number}{ending} frame"


def _accuracy(model: TrainedModel) -> str:
    """The accuracy in the run's test, if the run tested this checkpoint with this config."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(model.path)))
    with contextlib.suppress(UserError, OSError, IndexError, KeyError, TypeError, ValueError):
        run = read_run(folder, None)
        if _is_test_of(run, model):
            final = run.stats_of("test_final")[-1]
            failed = int(final.get("num_failed", 0))
            metrics = [
                f"{name.removesuffix(' accuracy')} {float(final[key]):.2f} %"
                for key, name in TEST_METRICS.items()
                if key in final
            ]
            return f"{', '.join(metrics)} on {counted(int(final['num_videos']), 'test video')}" + (
                f"; {failed} more could not be read" if failed else ""
            )
    return "not tested with these weights and settings"


def _is_test_of(run: RunRecord, model: TrainedModel) -> bool:
    with open(os.path.join(run.folder, TEST_PREFIX + CONFIG), encoding="utf-8") as file:
        tested = {"cfg": file.read()}
    # Raises if the config of the test has other model settings.
    saved_config.check_model(run.folder, tested, model.cfg)
    if saved_config.saved_value(tested, "TEST.USE_EMA") != model.cfg.TEST.USE_EMA:
        return False
    # The run may have tested a checkpoint of another run, so compare the path of the tested
    # checkpoint with that of this model. The folder of the run may have been moved since, so use
    # the saved OUTPUT_DIR. One of the two paths may be relative to the working directory.
    own_folder = get_checkpoint_dir(saved_config.saved_value(tested, "OUTPUT_DIR"))
    own_path = os.path.join(own_folder, os.path.basename(model.path))
    short, long = sorted(map(os.path.normpath, (run.checkpoint, own_path)), key=len)
    return short == long or long.endswith(os.sep + short)
