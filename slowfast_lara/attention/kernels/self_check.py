"""Before kernels are used on a GPU: do they give there what PyTorch's operations give?

Nobody has run them on every GPU, driver and version of Triton. So a small case of each is
compared, output and gradients, in the precision of the run, also with its width of a head and
its number of samples, by which some GPUs run out of shared memory; and on any difference
PyTorch's operations are used, by all processes of a run alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from slowfast_lara.attention.kernels.choice import missing_sizes, obstacle
from slowfast_lara.attention.kernels.estimates import attention_of_landmarks
from slowfast_lara.attention.kernels.landmarks import landmarks
from slowfast_lara.attention.kernels.launch import precision
from slowfast_lara.attention.kernels.temporal import temporal
from slowfast_lara.errors import first_line

logger = logging.getLogger(__name__)

# Differences allowed, as shares of the largest number: what rounding does, many times over, and
# far below what a wrong sum, mask or order does.
_ALLOWED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ALLOWED_TF32 = 2e-2
_FRAMES, _LANDMARKS = 3, 5
_verdicts: dict[tuple[torch.device, torch.dtype], bool] = {}


class Case(NamedTuple):
    """A kernel's name, the way it is used, the same by PyTorch, and what both are given."""

    name: str
    kernel: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Sequence[Tensor]


def works_here(device: torch.device, dtype: torch.dtype) -> bool:
    """The verdict on the kernels; found once for each device and precision."""
    if (device, dtype) not in _verdicts:
        _settle(device, dtype, None, together=False)
    return _verdicts[device, dtype]


def agree(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] | None = None) -> bool:
    """The verdict of all processes together: every one of them calls this at the same place.

    `sizes`: the width of a head and the number of samples that a run will have.
    """
    _settle(device, dtype, sizes, together=True)
    return _verdicts[device, dtype]


def _settle(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] | None, together: bool
) -> None:
    impossible = obstacle(device)
    wrong = "" if impossible else first_difference(device, dtype, sizes)
    usable = not impossible and not wrong
    if together and distributed.is_initialized() and distributed.get_world_size() > 1:
        place = device if distributed.get_backend() == "nccl" else torch.device("cpu")
        verdict = torch.tensor(int(usable), device=place)
        distributed.all_reduce(verdict, distributed.ReduceOp.MIN)
        if usable and not verdict.item():
            impossible = "another process of this run cannot use them"
        usable = bool(verdict.item())
    _verdicts[device, dtype] = usable
    name = str(dtype).removeprefix("torch.")
    if wrong:
        logger.warning("kernels on %s in %s: PyTorch's, not ours: %s", device, name, wrong)
    elif impossible:
        logger.info("kernels on %s in %s: PyTorch's, not ours: %s", device, name, impossible)
    else:
        logger.info("kernels on %s in %s: ours, equal to PyTorch's in a check", device, name)


def first_difference(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] | None = None
) -> str:
    """The first kernel that does not do what PyTorch does, and how; or nothing."""
    tf32 = dtype == torch.float32 and precision() == "tf32"
    allowed = _ALLOWED_TF32 if tf32 else _ALLOWED[dtype]
    cases = small_cases()
    if sizes is not None and not missing_sizes(*sizes):
        cases += small_cases(*sizes)
    for case in cases:
        try:
            problem = _difference(case, device, dtype, allowed)
        except Exception as error:  # one that does not compile or start is of no use either
            problem = f"{type(error).__name__}: {first_line(error)}"
        if problem:
            return f"{case.name}: {problem}"
    return ""


@torch.enable_grad()
def _difference(case: Case, device: torch.device, dtype: torch.dtype, allowed: float) -> str:
    rounded = [x.to(device, dtype) for x in case.inputs]
    actual = _with_gradients(case.kernel, rounded)
    # PyTorch is given the same numbers in float32.
    expected = _with_gradients(case.reference, [x.float() for x in rounded])
    for i, (ours, theirs) in enumerate(zip(actual, expected)):
        size = max(theirs.abs().max().item(), 1e-6)
        share = (ours.float() - theirs).abs().max().item() / size
        if not share <= allowed:  # also if it is no number
            what = f"the gradient of input {i}" if i else "the output"
            return f"{what} differs from PyTorch's by {share:.1e} of its size, over {allowed:.0e}"
    return ""


def _with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs for some gradient of it."""
    given = [x.detach().requires_grad_() for x in inputs]
    out = function(*given)
    direction = _normal(*out.shape, seed=len(given)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, direction)]


def small_cases(d: int = 24, C: int = 19) -> list[Case]:
    """Odd sizes, one case for each way that the kernels are used."""
    from slowfast_lara.attention.landmarks import farthest_tokens, segment_means
    from slowfast_lara.attention.lara import lara_attention
    from slowfast_lara.attention.performer import performer_attention

    B, h, N = 1, 2, 7 * _FRAMES
    qkv = list(_normal(3, B, h, N, d))
    both = list(_normal(2, B, h, C, d, seed=1) / 2)
    noise = _normal(B, h, C, d, seed=5) / 2
    tokens = [_normal(B, N, h, d), _normal(B, _FRAMES, N, h * d, seed=2)]
    weights = [_normal(2 * h * d, h * d, seed=3) * (h * d) ** -0.5, _normal(2 * h * d, seed=4)]

    k = qkv[1]

    def of(name: str, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Case:
        triton, torch_ = (
            partial(function, num_frames=_FRAMES, kernels=kind) for kind in ("triton", "torch")
        )
        return Case(name, triton, torch_, inputs)

    cases = [
        Case("landmarks", partial(_segments, False), partial(_plain_segments, segment_means), [k]),
        Case("landmarks", partial(_segments, True), partial(_plain_segments, farthest_tokens), [k]),
        Case("attention of landmarks", _of_landmarks, _plain_of_landmarks, [both[0], k]),
        of("LARA", lara_attention, [*qkv, *both]),
        of("LARA with noise", partial(_with_noise, lara_attention), [*qkv, *both, noise]),
        of("Performer", performer_attention, [*qkv, both[0][0]]),
    ]
    temporal_cases = (("projected", [*tokens, *weights]), ("plain", [*tokens, weights[0]]))
    for values, inputs in temporal_cases:
        name = f"the temporal stage, {values} values"
        cases.append(Case(name, _temporal, _plain_temporal, inputs))
    return cases


def _with_noise(attention: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Tensor:
    return attention(*inputs[:-1], noise=inputs[-1], **options)


def _segments(farthest: bool, x: Tensor) -> Tensor:
    return landmarks(x, _LANDMARKS, _FRAMES, farthest)[0]


def _plain_segments(landmarks: Callable[..., Tensor], x: Tensor) -> Tensor:
    return landmarks(x, _LANDMARKS, num_frames=_FRAMES)


def _of_landmarks(landmarks: Tensor, k: Tensor) -> Tensor:
    return attention_of_landmarks(landmarks.float(), k)


def _plain_of_landmarks(landmarks: Tensor, k: Tensor) -> Tensor:
    return (landmarks @ k.mT * k.shape[-1] ** -0.5).softmax(-1) @ k


def _temporal(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With a bias the values are projected, without they are x."""
    return temporal(q, x, weight, bias, bias is not None)[0]


def _plain_temporal(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same by its definition: every token of every frame is projected."""
    h, d = q.shape[2:]
    projected = x @ weight.mT if bias is None else x @ weight.mT + bias
    keys, values = projected.unflatten(3, (2, h, d)).unbind(3)
    logits = torch.einsum("bnhd,bfnhd->bnhf", q, keys) * d**-0.5
    of_frames = x.unflatten(3, (h, d)) if bias is None else values
    return torch.einsum("bnhf,bfnhd->bnhd", logits.softmax(-1), of_frames)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
