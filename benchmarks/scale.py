"""Estimates of training speed and memory by model, clip and number of GPUs; no GPU is needed.

The kernels of a block are counted on the meta device, with the Triton kernels where they exist
(kernel_counts.py), and turned into seconds by the roofline (roofline.py). Everything is per GPU,
for b clips of N tokens in F temporal tokens, a model of width D, depth L and p trained parameters:

    memory   = 18 p + b (L s + 4 F N D)               without activation checkpointing
             = 18 p + b (4 L N D + s + 4 F N D)       with activation checkpointing
               18 bytes: parameter, gradient and two moments in float32, bfloat16 copy
               s: bytes that the backward pass of a block needs, counted for one clip
               4 F N D: the gradient of the trajectory tokens [F,N,D] in bfloat16, and a copy
    forward  = (L forward seconds of a block + patch embedding) / efficiency
    backward = (L backward seconds + patch embedding) / efficiency; with checkpointing + forward
    update   = 28 p / bandwidth / efficiency          AdamW reads 4 and writes 3 float32 numbers
    reduce   = 2 (g-1)/g 4p / link                    ring in a node of g GPUs
             + 2 (m-1)/m 4p/g / network               between m nodes; each GPU sends a g-th part
    step     = forward + max(backward, reduce) + update      reduction overlaps backward pass
    clips/s  = b GPUs / step
    workers  = clips/s of a node x seconds to decode a clip on one core

b is the first of --clips, --clips / 2, --clips / 4, ... whose memory fits into 90 % of the GPU; if
not even one clip fits, activations are checkpointed. `efficiency` is the share of the roofline that
real kernels reach, an assumption: adjust it to the first step that you measure. Not included: the
classifier, the loss, stragglers and evaluation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.kernel_counts import Kernel, count_kernels
from benchmarks.roofline import DEVICES, Device, seconds
from benchmarks.tables import MarkdownTable
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.errors import InputError
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import display_name

ATTENTIONS = ("softmax", "lara", "merged")
LANDMARKS, GROUPS, CLASSES = 128, 96, 400
NODE = 8  # GPUs of a node
USABLE = 0.9  # of the GPU's memory
DECODE_FRAMES = 16  # of the clip that --decode-ms describes


class Model(NamedTuple):
    width: int
    heads: int
    depth: int


MODELS = {"ViT-B": Model(768, 12, 12), "ViT-L": Model(1024, 16, 24)}


class Cluster(NamedTuple):
    """A GPU, its memory in bytes, and its links in bytes/s per direction, from the data sheets."""

    gpu: Device
    memory: float
    link: float  # NVLink
    network: float  # one GPU's share of the network bandwidth of its node


CLUSTERS = {
    # This is the A100 with 80 GB; roofline.py has the bandwidth of the A100 with 40 GB.
    "A100": Cluster(DEVICES["A100"]._replace(bandwidth=2.039e12), 80e9, 300e9, 25e9),
    "H100": Cluster(DEVICES["H100"], 80e9, 450e9, 50e9),
}


class Setting(NamedTuple):
    """A model, a clip and an attention; `frames` counts frames, not temporal tokens."""

    model: str
    crop: int
    frames: int
    attention: str

    @property
    def tokens(self) -> int:
        return self.frames // 2 * (self.crop // 16) ** 2


class Estimate(NamedTuple):
    """Clips and bytes of one GPU; seconds of a step and of its all-reduce; workers of a node."""

    clips: int  # 0 if not even one clip fits
    checkpointing: bool
    memory: float
    step: float
    reduce: float
    clips_per_second: float  # of all GPUs
    workers: int


class BlockCounts(NamedTuple):
    forward: list[Kernel]
    backward: list[Kernel]
    saved: int  # bytes, with weights


class _Autocast(TorchFunctionMode):
    """Emulates autocast, which the meta device lacks: casts inputs of linear layers to bfloat16."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.linear:
            args = tuple(x if x is None else x.to(torch.bfloat16) for x in args)
        return function(*args, **(kwargs or {}))


def saved_bytes(function: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Call `function`; return the bytes saved for backward (each storage once), and the result."""
    kept: list[Tensor] = []  # keeps tensors alive, so that no address is reused

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = function()
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in kept}
    return sum(storage.nbytes() for storage in storages.values()), out


def meta_model(setting: Setting, depth: int | None = None) -> VisionTransformer:
    """The model on the meta device, with Triton kernels."""
    width, heads, layers = MODELS[setting.model]
    in_frame = ESTIMATORS[setting.attention].counts_keys_of_a_frame
    number = GROUPS if in_frame else min(LANDMARKS, setting.tokens)
    with torch.device("meta"):
        return VisionTransformer(
            num_classes=CLASSES,
            dim=width,
            num_heads=heads,
            depth=layers if depth is None else depth,
            num_frames=setting.frames // 2,
            estimator=setting.attention,
            estimator_args={"num_landmarks": number},
            kernels="triton",
        )


@cache
def trained_parameters(setting: Setting) -> int:
    return sum(p.numel() for p in meta_model(setting).parameters() if p.requires_grad)


@cache
def block_counts(setting: Setting, clips: int) -> BlockCounts:
    """Kernels of a block, forward and backward, and the bytes it keeps for the backward pass."""
    block, width = meta_model(setting, depth=1).blocks[0], MODELS[setting.model].width
    x = torch.empty(clips, 1 + setting.tokens, width, device="meta", requires_grad=True)
    with _Autocast():
        forward, (saved, out) = count_kernels(
            lambda: saved_bytes(lambda: block(x, setting.frames // 2))
        )
    leaves, grad = [x, *block.parameters()], torch.empty_like(out)
    backward, _ = count_kernels(lambda: torch.autograd.grad(out, leaves, grad, allow_unused=True))
    return BlockCounts(forward, backward, saved)


def saved_per_clip(setting: Setting) -> int:
    """Bytes that a block saves per clip: batch of 2 minus batch of 1, so that weights cancel."""
    one, two = (block_counts(setting, clips).saved for clips in (1, 2))
    return two - one


@cache
def embedding_counts(setting: Setting, clips: int) -> tuple[list[Kernel], list[Kernel]]:
    """Kernels of the patch embedding; its backward pass computes only the weight gradient."""
    patches = torch.empty(clips * setting.tokens, 3 * 2 * 16 * 16, device="meta")
    weight = nn.Linear(patches.shape[1], MODELS[setting.model].width, device="meta").weight
    half = patches.bfloat16(), weight.bfloat16()
    forward, out = count_kernels(lambda: functional.linear(*half))
    grad = torch.empty_like(out)
    return forward, count_kernels(lambda: torch.autograd.grad(out, weight, grad))[0]


def memory(setting: Setting, clips: int, checkpointing: bool) -> float:
    width, _, depth = MODELS[setting.model]
    saved, tokens = saved_per_clip(setting), setting.tokens
    working = 4 * (setting.frames // 2) * tokens * width
    kept = 4 * depth * tokens * width + saved if checkpointing else depth * saved
    return 18 * trained_parameters(setting) + clips * (kept + working)


def largest_batch(setting: Setting, limit: float, most: int) -> tuple[int, bool]:
    """Number of clips that fits into `limit` bytes, and whether it needs checkpointing.

    Tries `most`, `most` / 2, ... clips, first without, then with checkpointing; 0 if none fits.
    """
    for checkpointing in (False, True):
        clips = most
        while clips and memory(setting, clips, checkpointing) > limit:
            clips //= 2
        if clips:
            return clips, checkpointing
    return 0, False


def reduce_seconds(parameters: int, gpus: int, cluster: Cluster) -> float:
    """All-reduce of float32 gradients: a ring in the node, then between nodes."""
    local = min(gpus, NODE)
    nodes, size = gpus // local, 4 * parameters
    within = 2 * (local - 1) / local * size / cluster.link
    return within + 2 * (nodes - 1) / nodes * size / local / cluster.network


def estimate(
    setting: Setting,
    device: str,
    gpus: int,
    *,
    most_clips: int,
    efficiency: float,
    decode_ms: float,
) -> Estimate:
    cluster, gpu = CLUSTERS[device], CLUSTERS[device].gpu
    clips, checkpointing = largest_batch(setting, USABLE * cluster.memory, most_clips)
    if not clips:
        return Estimate(0, True, memory(setting, 1, True), math.nan, math.nan, 0.0, 0)
    depth, block = MODELS[setting.model].depth, block_counts(setting, clips)
    embed = embedding_counts(setting, clips)
    forward = (depth * seconds(block.forward, gpu) + seconds(embed[0], gpu)) / efficiency
    backward = (depth * seconds(block.backward, gpu) + seconds(embed[1], gpu)) / efficiency
    if checkpointing:
        backward += forward
    parameters = trained_parameters(setting)
    update = 28 * parameters / gpu.bandwidth / efficiency
    reduce = reduce_seconds(parameters, gpus, cluster)
    step = forward + max(backward, reduce) + update
    rate, decode = clips * gpus / step, decode_ms / 1e3 * setting.frames / DECODE_FRAMES
    workers = math.ceil(rate / gpus * min(gpus, NODE) * decode)
    used = memory(setting, clips, checkpointing)
    return Estimate(clips, checkpointing, used, step, reduce, rate, workers)


@dataclass
class ScaleTable(MarkdownTable):
    gpus: Sequence[int] = ()
    estimates: dict[tuple[Setting, int], Estimate] = field(default_factory=dict)

    def head(self) -> list[str]:
        # Omits the hardware of this machine, which does not affect the estimates.
        return [self.title, *self.notes]

    def cells(self) -> Cells:
        rates = [f"clips/s on {n}" for n in self.gpus]
        others = [f"{display_name(name)} / exact" for name in ATTENTIONS[1:]]
        titles = ["model", "pixels", "frames", "tokens", "clips a GPU", "GiB", *rates]
        times = ["step, ms", "all-reduce, ms", "workers a node"]
        rows: list[list[object]] = [[*titles, *times, *others]]
        most = max(self.gpus)
        for setting in dict.fromkeys(setting for setting, _ in self.estimates):
            if setting.attention != "softmax":
                continue
            found = [self.estimates[setting, n] for n in self.gpus]
            first, last = found[0], self.estimates[setting, most]
            clips = f"{first.clips}{' (checkpointing)' if first.checkpointing else ''}"
            ratios = []
            for name in ATTENTIONS[1:]:
                other = self.estimates[setting._replace(attention=name), most]
                both = first.clips and other.clips
                ratio = other.clips_per_second / last.clips_per_second if both else 0.0
                ratios.append(f"{ratio:.2f}" if both else "-")
            rows.append(
                [
                    *(*setting[:3], f"{setting.tokens:,}", clips, f"{first.memory / 2**30:.0f}"),
                    *(_rate(e.clips_per_second) for e in found),
                    *(f"{1e3 * last.step:.0f}", f"{1e3 * last.reduce:.1f}", last.workers, *ratios),
                ]
            )
        return rows

    def csv_cells(self) -> Cells:
        titles = ["clips_per_gpu", "checkpointing", "memory_gib", "step_ms", "all_reduce_ms"]
        rows: list[list[object]] = [
            [*Setting._fields, "gpus", *titles, "clips_per_second", "workers_per_node"]
        ]
        for (setting, gpus), e in self.estimates.items():
            rows.append(
                [
                    *(*setting[:3], display_name(setting.attention), gpus, e.clips),
                    *(e.checkpointing, f"{e.memory / 2**30:.2f}", f"{1e3 * e.step:.2f}"),
                    *(f"{1e3 * e.reduce:.2f}", f"{e.clips_per_second:.2f}", e.workers),
                ]
            )
        return rows


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def scale(
    device: str,
    gpus: Sequence[int],
    crops: Sequence[int],
    frames: Sequence[int],
    most_clips: int,
    efficiency: float,
    decode_ms: float,
) -> ScaleTable:
    """Estimate all combinations of model, clip, attention and number of GPUs, for one GPU type."""
    if device not in CLUSTERS:
        raise InputError(f"--device is {device!r}; must be one of {', '.join(CLUSTERS)}")
    for number in gpus:
        if number > NODE and number % NODE:
            raise InputError(f"--gpus has {number}; above {NODE}, must be a multiple of {NODE}")
    for number in frames:
        if number % 2:
            raise InputError(f"--frames has {number}; must be even (two per temporal token)")
    widest = max(model.width for model in MODELS.values())
    largest = Setting("", max(crops), max(frames), "")
    if largest.frames // 2 * largest.tokens * widest >= 2**31:
        raise InputError(
            f"--crops {largest.crop} with --frames {largest.frames}: a clip of 2**31 elements or "
            "more is not supported by the kernels"
        )
    if not efficiency <= 1:
        raise InputError(f"--efficiency is {efficiency:g}; must be at most 1")
    notes = [
        f"`python -m benchmarks scale --device {device}`",
        "an estimate: counted, not measured; formulas in benchmarks/scale.py",
        f"training in bfloat16, GPUs of 80 GB, {NODE} in a node, at most {most_clips} clips a GPU; "
        f"kernels reach {efficiency:.0%} of the roofline (assumed)",
        f"workers: to decode {DECODE_FRAMES} frames takes {decode_ms:g} ms on a core; longer clips "
        "in proportion",
        "the all-reduce overlaps the backward pass; where it is shorter, it costs no time",
        f"from the column of step times on: {max(gpus)} GPUs; last columns: clips/s relative to "
        f"exact attention, {LANDMARKS} landmarks, {GROUPS} groups of a frame's keys",
    ]
    table = ScaleTable(f"Training speed and memory on {device} GPUs", notes=notes)
    table.gpus = gpus
    options: dict[str, Any] = {
        "most_clips": most_clips,
        "efficiency": efficiency,
        "decode_ms": decode_ms,
    }
    for model, crop, number, name in itertools.product(MODELS, crops, frames, ATTENTIONS):
        setting = Setting(model, crop, number, name)
        for count in gpus:
            table.estimates[setting, count] = estimate(setting, device, count, **options)
    return table
