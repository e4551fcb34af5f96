"""Whether a model is being turned into a program for others (torch.export, ONNX).

Paths that work in parts, or have a backward pass of their own, then take plain operations on
the whole batch: parts would fix its size in the program, and there is no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# PyTorch before 2.7 does not tell, and exports no batches of any size.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
