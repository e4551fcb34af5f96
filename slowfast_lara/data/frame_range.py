"""Ranges of extracted frames, written as FOLDER/frame_0000000198-0000000255.jpg.

EPIC-KITCHENS stores the frames of a video as FOLDER/frame_0000000001.jpg and so on; an action is a
range of them. Lists of failed videos and test results contain the path of an action in this form.
The readers in `sources` accept such a path as the path of a video.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

_PATH = re.compile(r"(?P<folder>.*)frame_(?P<first>\d{10})-(?P<last>\d{10})\.jpg", re.DOTALL)


class FrameRange(Sequence[str]):
    """Paths of the frames `first` to `last` in a folder; `fps` depends on the folder's name."""

    def __init__(self, folder: str, first: int, last: int) -> None:
        self.folder, self.first, self.last = folder, first, last

    @staticmethod
    def parse(path: str) -> FrameRange | None:
        """Parse FOLDER/frame_<first>-<last>.jpg; None for other paths, or if last < first."""
        match = _PATH.fullmatch(path)
        if match is None or int(match["last"]) < int(match["first"]):
            return None
        return FrameRange(match["folder"], int(match["first"]), int(match["last"]))

    def __str__(self) -> str:
        return os.path.join(self.folder, f"frame_{self.first:010d}-{self.last:010d}.jpg")

    def __len__(self) -> int:
        return self.last + 1 - self.first

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number = range(self.first, self.last + 1)[index]  # raises IndexError if out of range
        return os.path.join(self.folder, f"frame_{number:010d}.jpg")

    @property
    def fps(self) -> int | None:
        """Frame rate by the video's name: 50 for P01_101, 60 for P01_01; None for other names.

        EPIC-KITCHENS-55 has two-digit video numbers; EPIC-KITCHENS-100 adds three-digit numbers.
        """
        name = os.path.basename(os.path.normpath(self.folder))
        match = re.fullmatch(r"P\d+_(\d{2,3})", name)
        return {2: 60, 3: 50}[len(match[1])] if match else None
