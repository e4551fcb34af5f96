"""Export of trained models: safetensors, a torch.export program, ONNX.

An export is a folder that contains the model, config.json (see `export_folder`) and a model card.
The exported model is compared with the original before the folder is renamed to its final name.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import timeit
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slowfast_lara.errors import InputError, RunError, first_line
from slowfast_lara.files import atomic_folder, write_json, write_text
from slowfast_lara.inference import hub
from slowfast_lara.inference.export_folder import (
    DESCRIPTION,
    SAFETENSORS,
    description_of,
    without_paths,
)
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.inference.model_card import model_card
from slowfast_lara.lazy import check_installed
from slowfast_lara.models.attention_config import chosen_estimator
from slowfast_lara.models.weights.files import read_weights

CARD = "README.md"
TOLERANCE = 1e-4
OPSET = 20
_BATCH_SIZES = (1, 5)
_TIMINGS = 3


def export(
    model: TrainedModel,
    folder: str | os.PathLike[str],
    to: str = "safetensors",
    *,
    push: str | None = None,
) -> str:
    """Export a model to a new folder, and compare the exported model with the original.

    Args:
        model: a model in float32, as `slowfast_lara.load` returns it.
        folder: the folder to create; must not exist.
        to: "safetensors" (for `slowfast_lara.load`), "torch" (a torch.export program) or "onnx".
        push: the repository USER/MODEL on the Hugging Face Hub to upload the folder to. If given,
            config.json has no paths of this machine.

    Returns:
        The result of the comparison, as one line of text.
    """
    folder = os.fspath(folder)
    if to not in FORMATS:
        raise InputError(f"export format is {to!r}; must be one of {', '.join(FORMATS)}")
    if not folder or "\0" in folder:
        raise InputError(f"{folder!r} is not a valid folder name")
    folder = os.path.normpath(folder)  # remove a trailing slash: lexists("FILE/") is False
    if os.path.lexists(folder):
        raise InputError(f"{folder} already exists; must be a new folder")
    if push is not None:
        hub.check_repository(push)
    write, packages = FORMATS[to]
    for package in packages:
        check_installed(package, "export")
    if to != "safetensors" and chosen_estimator(model.cfg) == "ra" and not model.cfg.VIT.RA.BIASED:
        raise InputError(
            f"unbiased RA draws samples at inference time, which a {to} program cannot do; export "
            "to safetensors, or set VIT.RA.BIASED True"
        )
    network, weight = model.network, next(model.network.parameters())
    if weight.dtype != torch.float32:
        raise InputError(
            f"expected a float32 model, got {weight.dtype}; load it again without half()"
        )
    if weight.device.type != "cpu":
        network = copy.deepcopy(network).cpu()
    with atomic_folder(folder) as temporary:
        try:
            checked, speed = write(network, model, temporary)
            cfg = model.cfg if push is None else without_paths(model.cfg)
            description = description_of(cfg, model.class_names, to)
            write_json(os.path.join(temporary, DESCRIPTION), description)
            write_text(os.path.join(temporary, CARD), model_card(model, to, checked))
        except OSError as error:
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from None
    pushed = "" if push is None else f"; pushed to {hub.push(folder, push)}"
    return checked + speed + pushed


def _write_safetensors(network: nn.Module, model: TrainedModel, folder: str) -> tuple[str, str]:
    from safetensors.torch import save

    path = os.path.join(folder, SAFETENSORS)
    states = {name: x.contiguous() for name, x in network.state_dict().items()}
    # On a full disk, `write_bytes` raises an OSError; `save_file` and `torch.export.save` to a path
    # do not.
    Path(path).write_bytes(save(states, metadata={"format": "pt"}))
    read = read_weights(path)
    if read.keys() != states.keys() or not all(torch.equal(read[n], states[n]) for n in states):
        raise RunError(f"{path} does not contain the weights that were written")
    return "the file contains the model's weights, bit for bit", ""


def _write_torch(network: nn.Module, model: TrainedModel, folder: str) -> tuple[str, str]:
    path = os.path.join(folder, "model.pt2")
    file = io.BytesIO()
    torch.export.save(trace(network, example_clips(model, 2)), file)
    Path(path).write_bytes(file.getbuffer())
    return compare(torch.export.load(path).module(), network, model)


def _write_onnx(network: nn.Module, model: TrainedModel, folder: str) -> tuple[str, str]:
    import onnxruntime  # optional dependency

    path = os.path.join(folder, "model.onnx")
    clips = example_clips(model, 2)
    to_onnx(trace(network, clips), clips).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(clips: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run(None, {"clip": clips.numpy()})[0]))

    example = Path(__file__).with_name("onnx_example.py").read_text(encoding="utf-8")
    write_text(os.path.join(folder, "example.py"), example)
    return compare(run, network, model)


def trace(network: nn.Module, clips: Tensor) -> Any:
    """Trace the network into a torch.export program; only the batch dimension is dynamic."""
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        return torch.export.export(network, (clips,), dynamic_shapes=({0: batch},), strict=False)


def to_onnx(program: Any, clips: Tensor) -> Any:
    """Convert a torch.export program to ONNX, with input "clip" and output "scores"."""
    with _quiet():
        return torch.onnx.export(
            program,
            (clips,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["clip"],
            output_names=["scores"],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
        )


def example_clips(model: TrainedModel, count: int) -> Tensor:
    """Clips of standard normal noise, float32 [count,3,T,H,W]."""
    data = model.cfg.DATA
    shape = (count, model.cfg.VIT.CHANNELS, data.NUM_FRAMES, *[data.TEST_CROP_SIZE] * 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def compare(
    program: Callable[[Tensor], Tensor], network: nn.Module, model: TrainedModel
) -> tuple[str, str]:
    """Compare an exported program with the model; RunError if their scores differ too much.

    Returns:
        Two parts of a line of text: the difference between the scores, and the speed. The model
        card omits the speed, because the speed depends on the load of this machine.
    """
    largest = 0.0
    for count in _BATCH_SIZES:
        clips = example_clips(model, count)
        difference = (program(clips) - network([clips])).abs().max().item()
        if not difference <= TOLERANCE:  # "not <=" also catches NaN
            raise RunError(
                f"the export differs from the model by {difference:.1e} in a batch of {count}; "
                f"must be at most {TOLERANCE:.0e}"
            )
        largest = max(largest, difference)
    clip = example_clips(model, 1)
    exported, original = (
        1000 * min(timeit.repeat(run, number=1, repeat=_TIMINGS))
        for run in (lambda: program(clip), lambda: network([clip]))
    )
    return (
        f"scores differ from the model's by at most {largest:.1e}, in batches of "
        f"{' and '.join(map(str, _BATCH_SIZES))}",
        f"; a clip takes {exported:.0f} ms, the model itself {original:.0f} ms (on this CPU now, "
        f"best of {_TIMINGS})",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output of PyTorch's exporters, and raise their errors as a RunError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise RunError(f"cannot export the model: {first_line(error)}") from error
    finally:
        logging.disable(disabled)


_Writer = Callable[[nn.Module, TrainedModel, str], tuple[str, str]]
# For each format: the function that writes it, and the packages that the function needs.
FORMATS: dict[str, tuple[_Writer, tuple[str, ...]]] = {
    "safetensors": (_write_safetensors, ("safetensors",)),
    "torch": (_write_torch, ()),
    "onnx": (_write_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
