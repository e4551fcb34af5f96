"""Reading files of weights: PyTorch's, safetensors, and NumPy's .npz.

The content decides, not the name. Files come from anywhere, so nothing in them is
ever run: pickles of anything but tensors and plain values are refused. Nor does a small
file fill the memory: see `_check_unpacked`.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slowfast_lara.errors import WeightsError, first_line
from slowfast_lara.files import check_regular_file, parse_json

# Where checkpoints keep their weights: PySlowFast and ours; Lightning, MoCo; DeiT, MAE.
_WRAPPERS = ("model_state", "state_dict", "model")
# Where ours also have a moving average of the weights.
EMA_STATE = "ema_state"
_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The header of a model of 1,000 layers has a tenth of this.
_LONGEST_HEADER = 10_000_000
_MOST_DIMENSIONS = 16
# Weights are noise to a compressor: real ones shrink by a third at most, those that were
# trained in 16 bits and saved in 32 to half.
_MOST_GROWTH = 4
# What any file may stand for, say one of nothing but zeros: a model of ours fits in.
_ALWAYS_ALLOWED = 512 * 2**20


def read_weights(path: str | os.PathLike[str], *, averaged: bool = False) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU, without a `module.` before the names.

    `averaged`: of a checkpoint that has a moving average of its weights, that.
    """
    path = os.fspath(path)
    with _one_line_errors(path):
        weights = _reader_of(path, averaged)(path)
    if not weights:
        raise WeightsError(f"{path} holds no weights")
    return bare_names(weights, path)


def read_torch_file(path: str) -> Any:
    """What torch.save has written, on the CPU: tensors and plain values, or a WeightsError."""
    with _one_line_errors(path):
        _check_sums(path)
        with open(path, "rb") as file:  # given a path, torch would go by the suffix
            content = torch.load(file, map_location="cpu", weights_only=True)
        # A tensor may repeat the same few bytes for ever, and is unfolded when it is used.
        _check_unpacked(sum(x.numel() * x.element_size() for x in _tensors_in(content, {})), path)
        return content


def _tensors_in(content: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """All tensors in dictionaries and lists, each object once, as pickles may share theirs."""
    if id(content) in seen:
        return
    seen[id(content)] = content
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _tensors_in(value, seen)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors_in(value, seen)


@contextlib.contextmanager
def _one_line_errors(path: str) -> Iterator[None]:
    try:
        check_regular_file(path)
        yield
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise WeightsError(
            f"cannot read {path}: besides tensors and plain values it holds objects, which could "
            "run code (a config, NumPy scalars?); save its weights alone, with the software that "
            "wrote it"
        ) from None
    except Exception as error:  # a damaged file breaks zip, JSON, pickle or tensors, anywhere
        raise WeightsError(f"cannot read {path}: {first_line(error)}") from None


def _check_sums(path: str) -> list[str]:
    """The names in a zip archive, whose check sums torch.load does not look at."""
    if not zipfile.is_zipfile(path):
        return []
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # The others are unpacked whole, whatever size they say.
        kinds = {entry.compress_type for entry in entries}
        if kinds - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise WeightsError(f"cannot read {path}: it is packed neither plainly nor by deflate")
        _check_unpacked(sum(entry.file_size for entry in entries), path)
        damaged = archive.testzip()
        if damaged:
            raise WeightsError(f"cannot read {path}: {damaged} in it is damaged")
        return archive.namelist()


def _check_unpacked(size: int, path: str) -> None:
    """A WeightsError if a file stands for far more bytes than it has, before they are made."""
    packed = os.path.getsize(path)
    if size > max(_MOST_GROWTH * packed, _ALWAYS_ALLOWED):
        raise WeightsError(
            f"cannot read {path}: its {packed} bytes stand for {size}; at most "
            f"{_ALWAYS_ALLOWED}, or {_MOST_GROWTH} times its own size, are expected of weights"
        )


def _reader_of(path: str, averaged: bool) -> Callable[[str], dict[str, Tensor]]:
    read_torch = partial(_read_torch, averaged=averaged)
    with open(path, "rb") as file:
        start = file.read(9)
    if zipfile.is_zipfile(path):
        names = _check_sums(path)
        return _read_npz if all(name.endswith(".npy") for name in names) else read_torch
    if start[8:] == b"{":
        return _read_safetensors
    if start[:1] != pickle.PROTO:  # PyTorch's older files are pickles
        raise WeightsError(
            f"cannot read {path}: it starts with {start!r}, as no file of PyTorch, safetensors or "
            "NumPy does"
        )
    return read_torch


def _read_torch(path: str, averaged: bool) -> dict[str, Tensor]:
    content = read_torch_file(path)
    if isinstance(content, dict):
        for key in (EMA_STATE, *_WRAPPERS) if averaged else _WRAPPERS:
            if isinstance(content.get(key), dict):
                content = content[key]
                break
    return plain_weights(content, path)


def plain_weights(content: Any, path: str) -> dict[str, Tensor]:
    """What was read from a file, if that is plain tensors by name, or a WeightsError."""
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and torch.is_tensor(value) for name, value in content.items()
    ):
        keys = [*content][:6] if isinstance(content, dict) else [content]
        # Only text is shown: tuples of tuples may have no end.
        found = [f"{key!r:.40}" if isinstance(key, str) else type(key).__name__ for key in keys]
        raise WeightsError(
            f"{path} holds no weights: tensors by name are expected, bare or under "
            f"{', '.join(_WRAPPERS)}; found: {', '.join(found)}"
        )
    for name, x in content.items():
        if x.layout != torch.strided or x.device.type != "cpu" or x.is_nested or x.is_quantized:
            raise WeightsError(f"cannot read {path}: {name!r:.80} is no plain tensor")
    return dict(content)


def _read_npz(path: str) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _read_safetensors(path: str) -> dict[str, Tensor]:
    """8 bytes with the length of a JSON header, the header, and the tensors' bytes."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        space = os.path.getsize(path) - 8
        if length > min(space, _LONGEST_HEADER):
            raise WeightsError(
                f"cannot read {path}: its header of {length} bytes is cut off, or longer than "
                f"{_LONGEST_HEADER}"
            )
        header = parse_json(file.read(length).decode("utf-8"), object_pairs_hook=_no_doubles)
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    expected_start = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        start, end = _offsets(entry)
        kind, shape = _SAFETENSORS_TYPES.get(entry["dtype"]), entry["shape"]
        if kind is None:
            raise WeightsError(f"cannot read {path}: {name:.80} is of type {entry['dtype']!r:.40}")
        if (
            not isinstance(shape, list)
            or len(shape) > _MOST_DIMENSIONS
            or not all(type(n) is int and n >= 0 for n in shape)
        ):
            raise WeightsError(f"cannot read {path}: {name:.80} has shape {shape!r:.80}")
        if start != expected_start or end - start != math.prod(shape) * kind.itemsize:
            raise WeightsError(
                f"cannot read {path}: bytes {start} to {end} are given for {name:.80}, "
                f"{math.prod(shape) * kind.itemsize} from {expected_start} on are expected"
            )
        expected_start = end
    if expected_start != len(data):
        raise WeightsError(
            f"cannot read {path}: {len(data)} bytes of tensors, {expected_start} expected"
        )
    return {name: _tensor(entry, data) for name, entry in header.items()}


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    start, end = entry["data_offsets"]
    if type(start) is not int or type(end) is not int:
        raise ValueError(f"data_offsets are {entry['data_offsets']!r:.80}; whole numbers expected")
    return start, end


def _tensor(entry: dict[str, Any], data: bytearray) -> Tensor:
    kind, shape, start = _SAFETENSORS_TYPES[entry["dtype"]], entry["shape"], _offsets(entry)[0]
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    # Copied: a tensor of wider elements may start anywhere in the file.
    part = data[start : start + count * kind.itemsize]
    return torch.frombuffer(part, dtype=kind).reshape(shape)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("its header names a tensor twice")
    return dict(pairs)


def bare_names(weights: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """Names as in a bare model: DDP puts `module.` before each."""
    bare: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        while name.startswith("module."):
            name = name[len("module.") :]
        if name in bare:
            raise WeightsError(f"{path} holds {name} twice, with and without `module.`")
        bare[name] = tensor
    return bare
