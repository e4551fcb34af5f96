"""A trained model as files for others: safetensors, a torch.export program, ONNX.

Each export is a folder: the model, config.json (what to feed it, the class names, the whole
config) and a model card. It is compared with the model before the folder is put in place.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slowfast_lara.errors import InputError, RunError, first_line
from slowfast_lara.files import atomic_folder, write_json, write_text
from slowfast_lara.inference.export_folder import DESCRIPTION, SAFETENSORS, description_of
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.inference.model_card import model_card
from slowfast_lara.lazy import check_installed
from slowfast_lara.models.attention_config import chosen_estimator
from slowfast_lara.models.weights.files import read_weights

CARD = "README.md"
TOLERANCE = 1e-4
OPSET = 20
_BATCHES = (1, 5)
_ROUNDS = 3


def export(model: TrainedModel, folder: str | os.PathLike[str], to: str = "safetensors") -> str:
    """Write a model to a new folder; what it was compared with, and the difference, in words."""
    if to not in FORMS:
        raise InputError(f"cannot export to {to!r}; allowed: {', '.join(FORMS)}")
    if not os.fspath(folder) or "\0" in os.fspath(folder):
        raise InputError(f"{os.fspath(folder)!r} cannot be the name of a folder")
    folder = os.path.normpath(folder)  # of "FILE/" the system says that it is not there
    if os.path.lexists(folder):
        raise InputError(f"{folder} is there already; a new folder is expected")
    write, needed = FORMS[to]
    for package in needed:
        check_installed(package, "export")
    if to != "safetensors":
        _check_program(model)
    network, weight = model.network, next(model.network.parameters())
    if weight.dtype != torch.float32:
        raise InputError("a model in float32 is expected, not one after half()")
    if weight.device.type != "cpu":
        network = copy.deepcopy(network).cpu()
    with atomic_folder(folder) as aside:
        try:
            checked = write(network, model, aside)
            description = description_of(model.cfg, model.class_names, to)
            write_json(os.path.join(aside, DESCRIPTION), description)
            write_text(os.path.join(aside, CARD), model_card(model, to, checked))
        except OSError as error:
            raise RunError(f"cannot write {folder}: {error.strerror or error}") from None
    return checked


def _check_program(model: TrainedModel) -> None:
    """Refuse what is more than a function of the clip."""
    if chosen_estimator(model.cfg) == "ra" and not model.cfg.VIT.RA.BIASED:
        raise InputError(
            "unbiased RA draws samples for every query in use too, by PyTorch's generators, which "
            "a program has not: export it to safetensors, or with VIT.RA.BIASED True"
        )


def _to_safetensors(network: nn.Module, model: TrainedModel, folder: str) -> str:
    from safetensors.torch import save

    path = os.path.join(folder, SAFETENSORS)
    states = {name: x.contiguous() for name, x in network.state_dict().items()}
    # Both libraries' own ways to a file answer a full disk by errors of their own or by an abort.
    Path(path).write_bytes(save(states, metadata={"format": "pt"}))
    read = read_weights(path)
    if read.keys() != states.keys() or not all(torch.equal(read[n], states[n]) for n in states):
        raise RunError(f"{path} does not hold the weights that were written")
    return "the file holds the model's weights, to the last bit"


def _to_torch(network: nn.Module, model: TrainedModel, folder: str) -> str:
    path = os.path.join(folder, "model.pt2")
    file = io.BytesIO()
    torch.export.save(_program(network, model), file)
    Path(path).write_bytes(file.getbuffer())
    return _compare(torch.export.load(path).module(), network, model)


def _to_onnx(network: nn.Module, model: TrainedModel, folder: str) -> str:
    import onnxruntime

    path = os.path.join(folder, "model.onnx")
    clip = _clips(model, 2)
    with _quiet():
        program = torch.onnx.export(
            _program(network, model),
            (clip,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["clip"],
            output_names=["scores"],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
        )
    assert program is not None  # it is None where a file is written at once
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(clip: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(session.run(None, {"clip": clip.numpy()})[0]))

    with open(os.path.join(os.path.dirname(__file__), "onnx_example.py"), encoding="utf-8") as file:
        write_text(os.path.join(folder, "example.py"), file.read())
    return _compare(run, network, model)


def _program(network: nn.Module, model: TrainedModel) -> Any:
    """The network as a program for clips of the test's size, in batches of any size."""
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        return torch.export.export(
            network, (_clips(model, 2),), dynamic_shapes=({0: batch},), strict=False
        )


def _clips(model: TrainedModel, count: int) -> Tensor:
    """Clips of noise: float32 [count,3,T,H,W]."""
    data = model.cfg.DATA
    shape = (count, model.cfg.VIT.CHANNELS, data.NUM_FRAMES, *[data.TEST_CROP_SIZE] * 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def _compare(program: Callable[[Tensor], Tensor], network: nn.Module, model: TrainedModel) -> str:
    """How far a program's scores are from the model's; a RunError if that is too far."""
    largest = 0.0
    for count in _BATCHES:
        clips = _clips(model, count)
        difference = (program(clips) - network([clips])).abs().max().item()
        if not difference <= TOLERANCE:  # nor if it is not a number
            raise RunError(
                f"the export differs from the model by {difference:.1e} in a batch of {count}; at "
                f"most {TOLERANCE:.0e} is allowed"
            )
        largest = max(largest, difference)
    batches = " and ".join(map(str, _BATCHES))
    here, there = _times(program, network, _clips(model, 1))
    return (
        f"scores differ from the model's by at most {largest:.1e}, in batches of {batches}; a clip "
        f"takes {there:.0f} ms, the model itself {here:.0f} ms (CPU, best of {_ROUNDS})"
    )


def _times(
    program: Callable[[Tensor], Tensor], network: nn.Module, clip: Tensor
) -> tuple[float, float]:
    """Milliseconds of a clip by the model and by a program, in turn."""
    best = [float("inf")] * 2
    for _ in range(_ROUNDS):
        for number, run in enumerate((lambda x: network([x]), program)):
            start = time.perf_counter()
            run(clip)
            best[number] = min(best[number], 1000 * (time.perf_counter() - start))
    return best[0], best[1]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' reports of what they do; their errors in one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # anything, from deep within
        raise RunError(f"the model cannot be exported: {first_line(error)}") from error
    finally:
        logging.disable(disabled)


# How each form is written, and what has to be installed for it.
FORMS: dict[str, tuple[Callable[[nn.Module, TrainedModel, str], str], tuple[str, ...]]] = {
    "safetensors": (_to_safetensors, ("safetensors",)),
    "torch": (_to_torch, ()),
    "onnx": (_to_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
