"""Comparison and timing of the Triton kernels and PyTorch, for given operators and shapes.

`verdicts.measure` runs `main` in a subprocess. The command-line argument is a request as JSON: the
device, the matmul precision and a list of operator invocations. `main` prints one verdict per line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention import build_estimator
from slowfast_lara.attention.kernels.verdicts import PREFIX, Verdict
from slowfast_lara.attention.merged import merged_attention
from slowfast_lara.attention.temporal import temporal_attention
from slowfast_lara.errors import first_line

# Tolerance for |difference| / |float32 result|, as Euclidean norms. It is well above rounding
# errors, and well below the effect of a wrong sum, mask or order. The maximum norm would be too
# strict: if two tokens are equally far from a mean, rounding decides which one becomes a landmark,
# and a few elements differ completely.
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
ROUNDS, ROUND_MS, MAX_CALLS = 5, 20, 50


class Operator:
    """An operator with random inputs of the shapes and memory layouts in `call`."""

    def __init__(self, call: dict[str, Any], device: torch.device) -> None:
        self.name, self.options, self.device = call["operator"], call["options"], device
        torch.manual_seed(0)
        # Only the bias of "temporal", the last tensor, may be None.
        self.inputs: list[Any] = [x and _random_tensor(x, device) for x in call["tensors"]]
        self.batch, self.dtype = len(self.inputs[0]), self.inputs[0].dtype
        if self.name == "temporal":
            self.inputs[2].mul_(self.inputs[2].shape[1] ** -0.5)
        if self.name == "merged":
            for x in self.inputs[1:]:
                _make_groups(x, self.options["num_frames"], self.options["num_groups"])

    def function(self, kernels: str) -> Callable[..., Tensor]:
        functions: dict[str, Any] = {"temporal": temporal_attention, "merged": merged_attention}
        if self.name in functions:
            return lambda *xs: functions[self.name](*xs, **self.options, kernels=kernels)
        options = dict(self.options)
        frames = options.pop("num_frames")
        torch.manual_seed(0)  # the same weights for both kinds of kernels
        estimator = build_estimator(self.name, **options, kernels=kernels).to(self.device).train()
        return lambda *xs: estimator(*xs, num_frames=frames)

    def step(
        self, kernels: str, batch: int | None = None, dtype: torch.dtype | None = None
    ) -> Callable[[], list[Tensor]]:
        """Return a function that runs forward and backward and returns the output and gradients."""
        batched = 2 if self.name == "temporal" else 3  # number of inputs with a batch dimension
        inputs = [
            x if x is None else (x[:batch] if i < batched else x).to(dtype or x.dtype)
            for i, x in enumerate(self.inputs)
        ]
        inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
        function, grads = self.function(kernels), [x for x in inputs if x is not None]
        directions: list[Tensor] = []

        def run() -> list[Tensor]:
            torch.manual_seed(1)  # so that Triton and PyTorch draw the same noise
            out = function(*inputs)
            if not directions:
                torch.manual_seed(2)
                normal = torch.randn(out.shape, device=out.device).to(self.dtype)
                directions.append(torch.empty_like(out).copy_(normal))
            return [out.detach(), *torch.autograd.grad(out, grads, directions[0])]

        return run

    def compare(self, batch: int) -> tuple[float, str]:
        """Return the largest relative error, and its description if above TOLERANCE, else ""."""
        actual = self.step("triton", batch)()
        expected = self.step("torch", batch, torch.float32)()
        errors = [
            ((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-6)).item()
            for ours, theirs in zip(actual, expected)
        ]
        worst = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
        if errors[worst] <= TOLERANCE[self.dtype]:
            return errors[worst], ""
        what = f"gradient of input {worst - 1}" if worst else "output"
        return errors[worst], (
            f"relative error of the {what} is {errors[worst]:.1e}; must be at most "
            f"{TOLERANCE[self.dtype]:.0e}"
        )

    def compare_largest(self) -> tuple[float, str]:
        """Call `compare` for the whole batch, halved until the comparison fits into the memory.

        PyTorch in float32 takes several times the memory of the kernels in half precision.
        """
        batch = self.batch
        while True:
            try:
                return self.compare(batch)
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
            torch.cuda.empty_cache()
            batch //= 2


def _random_tensor(layout: dict[str, Any], device: torch.device) -> Tensor:
    shape, stride, offset = (layout[key] for key in ("shape", "stride", "offset"))
    dtype = getattr(torch, layout["dtype"])
    values = torch.randn(shape, device=device)
    if 0 in stride:  # an expanded tensor: several elements share memory, so copy_ would fail
        return values.to(dtype)
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride))
    return torch.empty(size, dtype=dtype, device=device).as_strided(shape, stride, offset).copy_(
        values
    )  # fmt: skip


def _make_groups(x: Tensor, num_frames: int, num_groups: int) -> None:
    """Overwrite keys or values [B,h,F*P,d], so that the groups of `merged` are unambiguous.

    Token c < num_groups is the centre of group c. Groups 1, 2, ... get one more token each; the
    tokens that are left join group 0, which is near the mean. The tokens of a group are far closer
    to each other than to other groups.
    """
    tokens = x.unflatten(2, (num_frames, -1))
    P = tokens.shape[3]
    pairs = torch.arange(num_groups, P, device=x.device) - num_groups + 1
    groups = torch.arange(num_groups, device=x.device)
    groups = torch.cat((groups, torch.where(pairs < num_groups, pairs, 0)))
    centres = tokens[..., :num_groups, :].clone()
    centres[..., 0, :] = 0
    tokens.copy_(centres[..., groups, :] + torch.randn_like(tokens) / 16)


def measure(call: dict[str, Any], device: torch.device) -> Verdict:
    """Compare the kernels with PyTorch for one clip and for the whole batch; time the batch."""
    try:
        operator = Operator(call, device)
        error, problem = operator.compare(1)
        if operator.batch > 1 and not problem:
            found, problem = operator.compare_largest()
            error = found if problem else max(error, found)
        if problem:
            return Verdict(error=error if error == error else None, problem=problem)
    except Exception as exception:  # e.g. a kernel does not compile or launch
        return Verdict(problem=f"{type(exception).__name__}: {first_line(exception)}")
    steps = [operator.step(kernels) for kernels in ("torch", "triton")]
    torch_ms, triton_ms = _milliseconds(steps, device)
    return Verdict(torch_ms, triton_ms, error)


def _milliseconds(steps: list[Callable[[], Any]], device: torch.device) -> list[float | None]:
    """Median time of each step in milliseconds; None for a step that runs out of memory.

    The steps alternate, because the clock of a GPU changes with its temperature. Several iterations
    are queued at a time. So host time matters only if it exceeds GPU time, as in training.
    """
    calls: dict[int, int] = {}
    for i, step in enumerate(steps):
        try:
            first = max(elapsed_ms(step, 1, device) for _ in range(2))
            calls[i] = max(1, min(MAX_CALLS, int(ROUND_MS / first)))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    rounds = [
        {i: elapsed_ms(steps[i], number, device) / number for i, number in calls.items()}
        for _ in range(ROUNDS)
    ]
    return [
        statistics.median(times[i] for times in rounds) if i in calls else None
        for i in range(len(steps))
    ]


def elapsed_ms(step: Callable[[], Any], number: int, device: torch.device) -> float:
    """Milliseconds of `number` iterations of `step`."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(number):
            step()
        return (time.perf_counter() - start) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(number):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def main() -> None:
    request = json.loads(sys.argv[1])
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The kernels are compiled for this precision of float32 matmuls.
    torch.backends.cuda.matmul.allow_tf32 = request["precision"] == "tf32"
    for call in request["calls"]:
        print(PREFIX + json.dumps(measure(call, device)._asdict()), flush=True)
