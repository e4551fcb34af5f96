"""Array of strings in one block of memory, which DataLoader workers share.

A list of strings would be copied to every worker: with fork, page by page as reference counts
change; with spawn, by pickling. PyTorch passes tensors in shared memory without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch


class StringArray(Sequence[str]):
    """Sequence of strings: `block` has their UTF-8 bytes, `ends` the end offset of each string."""

    def __init__(self, block: bytes | bytearray, ends: np.ndarray) -> None:
        # The extra byte is needed because PyTorch rejects an empty buffer.
        shared = torch.frombuffer(bytearray(block) + b"\0", dtype=torch.uint8)
        self.__setstate__((shared, torch.from_numpy(np.append(0, ends).astype(np.int64))))

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensors

    def __setstate__(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._tensors = tensors
        # NumPy arrays on the same memory are faster to index than tensors.
        self._block, self._ends = (tensor.numpy() for tensor in tensors)

    @staticmethod
    def of(strings: Iterable[str]) -> StringArray:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        return StringArray(b"".join(encoded), np.cumsum([len(string) for string in encoded]))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        """A string, or a list of strings for a slice."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # raises IndexError if `index` is out of range
        string = self._block[self._ends[index] : self._ends[index + 1]].tobytes()
        return string.decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list
