"""Readers for weight files: PyTorch, safetensors and NumPy's .npz.

The format is detected from the content of a file, not from its name. Files may come from anyone, so
no code in them is executed: pickles may hold tensors and plain values only. `_check_expanded_size`
rejects small files whose content would fill the memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slowfast_lara.errors import WeightsError, first_line
from slowfast_lara.files import check_regular_file

# Keys of the weights in checkpoints: of PySlowFast and this package (model_state), of Lightning and
# MoCo (state_dict), and of DeiT and MAE (model).
_WRAPPERS = ("model_state", "state_dict", "model")
# The key of the EMA weights in this package's checkpoints.
EMA_STATE = "ema_state"
# Maximum ratio of a file's expanded size to its own size. Trained weights hardly compress: by a
# third at most, or by half if they were trained in 16 bits and saved in 32.
_MAX_EXPANSION = 4
# Files of any size may expand to this many bytes, which is enough for Motionformer at ViT-B's size.
_ALWAYS_ALLOWED_BYTES = 512 * 2**20


def read_weights(path: str | os.PathLike[str], *, averaged: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a weight file by name, on the CPU.

    Args:
        path: The file.
        averaged: Return the EMA weights if the file has them.

    Returns:
        The tensors, with DDP's prefix `module.` removed from their names.
    """
    path = os.fspath(path)
    with _errors_in_one_line(path):
        weights = _read(path, averaged)
    if not weights:
        raise WeightsError(f"{path} holds no weights")
    return bare_names(weights, path)


def read_torch_file(path: str) -> Any:
    """Read a torch.save file to the CPU; it may hold only tensors and plain values."""
    with _errors_in_one_line(path):
        if zipfile.is_zipfile(path):
            _check_archive(path)
        else:  # older PyTorch files are bare pickles
            _check_start(path, pickle.PROTO, "a PyTorch file")
        with open(path, "rb") as file:  # not a path: torch.load would trust its suffix
            content = torch.load(file, map_location="cpu", weights_only=True)
        # Count full sizes: a copy of an expanded tensor (stride 0) needs memory for all elements.
        size = sum(x.numel() * x.element_size() for x in _tensors_in(content, {}))
        _check_expanded_size(size, path)
        return content


def _tensors_in(content: Any, visited: dict[int, Any]) -> Iterator[Tensor]:
    """Yield each tensor in nested dictionaries, lists and tuples once, even if it occurs again."""
    if id(content) in visited:
        return
    visited[id(content)] = content
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, (dict, list, tuple)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _tensors_in(value, visited)


@contextlib.contextmanager
def _errors_in_one_line(path: str) -> Iterator[None]:
    try:
        check_regular_file(path)
        yield
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise WeightsError(
            f"cannot read {path}: it is damaged, or contains objects other than tensors and plain "
            "values (a config, NumPy scalars?), which could run code; copy the file again, or save "
            "only the weights again, with the software that wrote the file"
        ) from None
    except Exception as error:  # damaged zip, JSON or pickle data can raise anything
        raise WeightsError(f"cannot read {path}: {first_line(error)}") from None


def _check_start(path: str, expected: bytes, kind: str) -> None:
    with open(path, "rb") as file:
        start = file.read(9)
    if not start.startswith(expected):
        raise WeightsError(
            f"cannot read {path}: expected {kind}, got a file that starts with {start!r}"
        )


def _check_archive(path: str) -> None:
    """Verify the checksums of a zip archive, which torch.load does not do."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # With other compression methods, zipfile may decompress far beyond the declared size.
        methods = {entry.compress_type for entry in entries}
        if methods - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise WeightsError(f"cannot read {path}: the zip compression must be stored or deflate")
        _check_expanded_size(sum(entry.file_size for entry in entries), path)
        damaged = archive.testzip()
        if damaged:
            raise WeightsError(f"cannot read {path}: its entry {damaged} is damaged")


def _check_expanded_size(size: int, path: str) -> None:
    """Raise WeightsError if a file would expand to far more than its own size."""
    packed = os.path.getsize(path)
    limit = max(_MAX_EXPANSION * packed, _ALWAYS_ALLOWED_BYTES)
    if size > limit:
        raise WeightsError(
            f"cannot read {path}: its {packed} bytes expand to {size}; at most {limit} are allowed"
        )


def _read(path: str, averaged: bool) -> dict[str, Tensor]:
    with open(path, "rb") as file:
        start = file.read(9)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_npz = all(name.endswith(".npy") for name in archive.namelist())
        if is_npz:
            _check_archive(path)
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    elif start[8:] == b"{":
        # Imported here, because a PySlowFast checkout may lack safetensors.
        from safetensors.torch import load

        with open(path, "rb") as file:
            return load(file.read())
    else:
        _check_start(path, pickle.PROTO, "a PyTorch, safetensors or NumPy file")
    content = read_torch_file(path)
    if isinstance(content, dict):
        for key in (EMA_STATE, *_WRAPPERS) if averaged else _WRAPPERS:
            if isinstance(content.get(key), dict):
                content = content[key]
                break
    return plain_weights(content, path)


def plain_weights(content: Any, path: str) -> dict[str, Tensor]:
    """Return a file's content if it maps names to dense CPU tensors, else raise WeightsError."""
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and torch.is_tensor(value) for name, value in content.items()
    ):
        keys = [*content][:6] if isinstance(content, dict) else [content]
        # Only strings are shown, because the repr of a nested tuple may be extremely long.
        found = [f"{key!r:.40}" if isinstance(key, str) else type(key).__name__ for key in keys]
        raise WeightsError(
            f"{path} holds no weights: expected a dictionary of tensors, at the top level or under "
            f"one of the keys {', '.join(_WRAPPERS)}; found: {', '.join(found)}"
        )
    for name, x in content.items():
        if x.layout != torch.strided or x.device.type != "cpu" or x.is_nested or x.is_quantized:
            raise WeightsError(f"cannot read {path}: {name!r:.80} is not a dense CPU tensor")
    return dict(content)


def bare_names(weights: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The weights with DDP's prefix `module.` removed from their names."""
    bare: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        while name.startswith("module."):
            name = name.removeprefix("module.")
        if name in bare:
            raise WeightsError(f"{path} holds {name} twice, with and without `module.`")
        bare[name] = tensor
    return bare
