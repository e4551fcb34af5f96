"""Many texts in one block of memory, which the workers of a loader share.

A list of strings would be copied to every worker: if it is forked, as soon as it counts
references to them; if it is spawned, at once. PyTorch hands on the memory of a tensor, and
copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import torch


class Texts(Sequence[str]):
    """`block`: the texts as UTF-8, one after the other; `ends`: where each one ends."""

    def __init__(self, block: bytes | bytearray, ends: np.ndarray) -> None:
        # A spare byte, since PyTorch takes no empty memory.
        shared = torch.frombuffer(bytearray(block) + b"\0", dtype=torch.uint8)
        self.__setstate__((shared, torch.from_numpy(np.append(0, ends).astype(np.int64))))

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensors

    def __setstate__(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._tensors = tensors
        # The same memory; quicker to read single bytes and numbers from.
        self._block, self._ends = (tensor.numpy() for tensor in tensors)

    @staticmethod
    def of(texts: Iterable[str]) -> Texts:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        return Texts(b"".join(encoded), np.cumsum([len(text) for text in encoded]))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"text {number} of {len(self)}")
        number %= len(self)
        text = self._block[self._ends[number] : self._ends[number + 1]].tobytes()
        return text.decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return f"Texts.of({list(self)!r:.200})"
