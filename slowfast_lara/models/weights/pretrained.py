"""Starting a model from weights that exist: of image models, and of other runs.

Read are timm's state dicts, the original ViT release (.npz), and checkpoints of
Motionformer, PySlowFast and this package. What does not fit as it is:

- A 2-D patch embedding becomes 3-D: in the middle one of the patch's frames (index
  t // 2 of t) and zero in the others, as in Motionformer, or averaged over them.
- Positions are resized bicubically to the model's base grid, times linearly to its
  length. A joint embedding starts as that of space, plus that of time if there is one,
  in every frame.
- A classifier of another number of classes is left at its start.
- What images do not have stays as a new model has it: trajectory projections (proj_q,
  proj_kv), attention over time (timeattn, norm3), the hidden layer of the head
  (pre_logits), `temp_embed`, an estimator's own parameters and samples. At ViT-B's width
  these are Motionformer's: linear layers normal with deviation 0.02, biases and
  `temp_embed` zero.

Everything else is essential: without it, or in another shape, nothing is loaded; nor
from a file whose blocks compute something else.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from slowfast_lara.errors import ConfigError, WeightsError
from slowfast_lara.models.motionformer import VisionTransformer, resize_positions
from slowfast_lara.models.weights.files import read_weights
from slowfast_lara.models.weights.vit_npz import from_vit_npz, is_vit_npz

INFLATIONS = ("centre", "average")

# May be absent from a file, but only if all of its kind are.
_OPTIONAL = re.compile(
    r"(?:blocks\.\d+\.)?(?:"
    r"(?P<trajectory>attn\.proj_(?:q|kv))|(?P<divided>timeattn|norm3)|"
    r"(?P<estimator>attn\.estimator\.\w+)|(?P<hidden>pre_logits)|(?P<head>head)|"
    r"(?P<time>temp_embed))\b.*"
)
# In a file alone, these make it another network: LayerScale or norms of q and k in a
# block, say, or tokens besides CLS.
_PART_OF_A_NETWORK = re.compile(r"blocks\.(\d+)\.|norm_pre\b|(?:reg|dist|register)_token")
# May have another shape in a file, and are then left at their start.
_REPLACEABLE = ("head", "attn.estimator.")


@dataclass
class LoadReport:
    """What became of every name in the model and in the file, with a note where one helps."""

    path: str
    loaded: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    left_at_start: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """One line for a name, or for the same name in all blocks."""
        lines = [f"weights from {self.path}"]
        groups = {
            "loaded": self.loaded,
            "adapted": self.adapted,
            "left at start": self.left_at_start,
            "unused": self.unused,
        }
        for state, names in groups.items():
            counts = Counter((_shown(name), self.notes.get(name, "")) for name in names)
            for (name, note), count in counts.items():
                times = f" x {count}" if count > 1 else ""
                lines.append(f"{state:<14} {name + times:<44} {note}".rstrip())
        return "\n".join(lines)


def image_weights(cfg: CfgNode) -> str:
    """The file that VIT.IM_PRETRAINED asks for."""
    path = cfg.VIT.PRETRAINED_WEIGHTS
    if not os.path.isfile(path):
        raise ConfigError(
            f"VIT.PRETRAINED_WEIGHTS is {path!r}; an existing file of image weights is "
            "expected (configs/README.md names some), or VIT.IM_PRETRAINED False to start "
            "from random weights"
        )
    return path


def load_pretrained(
    model: VisionTransformer, path: str | os.PathLike[str], *, inflate: str = "centre"
) -> LoadReport:
    """Put a file's weights into a VisionTransformer, all that fit or none."""
    if inflate not in INFLATIONS:
        raise ValueError(f"inflate is {inflate!r}; allowed: {', '.join(INFLATIONS)}")
    loading = _Loading(model, os.fspath(path), inflate)
    for name, own in model.state_dict().items():
        loading.fill(name, own)
    return loading.finish()


class _Loading:
    """One file on its way into one model."""

    def __init__(self, model: VisionTransformer, path: str, inflate: str) -> None:
        self.model, self.path, self.inflate = model, path, inflate
        self.report = LoadReport(path)
        self.new: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.content = self.read()
        self.file = {name: x.float() for name, x in self.content.items() if x.is_floating_point()}
        self.kinds = {_kind(name) for name in self.file}
        self.has_3d_patches = any(name.startswith("patch_embed_3d.") for name in self.file)
        self.is_of_video = self.has_3d_patches or bool(self.kinds & {"trajectory", "divided"})

    def read(self) -> dict[str, Tensor]:
        """What the file holds, by our names."""
        weights = read_weights(self.path, averaged=True)
        if not is_vit_npz(weights):
            return weights
        try:
            weights, heads = from_vit_npz(weights)
        except ValueError as error:
            raise WeightsError(f"{self.path} cannot start this model: {error}") from None
        own_heads = self.model.num_heads
        if heads and heads != own_heads:
            self.problems.append(f"it has {heads} attention heads, the model {own_heads}")
        return weights

    def fill(self, name: str, own: Tensor) -> None:
        """Find the new value of one of the model's tensors, or why it has none."""
        given = self.file.get(name)
        if name in self.content and given is None:
            self.problems.append(
                f"its {name} is of type {self.content[name].dtype}; "
                "floating-point numbers are expected"
            )
            return
        if name in ("patch_embed.proj.weight", "patch_embed_3d.proj.weight"):
            given = None if given is None else _as_convolution(given, own)
        if given is not None and given.shape == own.shape:
            self.take(name, given, None, name)
        elif name.startswith("patch_embed"):
            self.fill_patch_embedding(name, own, given)
        elif name in ("pos_embed", "temp_embed", "st_embed"):
            self.fill_positions(name, own, given)
        elif given is None:
            if _kind(name) in (None, *self.kinds):
                self.missing.append(name)
            else:
                self.leave(name, "not in the file")
        elif (_kind(name) or "").startswith(_REPLACEABLE):
            self.leave(name, f"{list(given.shape)} in the file, {list(own.shape)} here")
        else:
            self.does_not_fit(name, given, own)

    def fill_patch_embedding(self, name: str, own: Tensor, given: Tensor | None) -> None:
        flat_name = name.replace("patch_embed_3d", "patch_embed")
        flat = self.file.get(flat_name)
        if given is not None:
            self.does_not_fit(name, given, own)
        elif name == flat_name:
            # 3-D patches alone are enough for a model that uses these.
            needed = self.model.patch_size_temp == 1 or "patch_embed_3d.proj.bias" not in self.file
            (self.missing.append if needed else self.leave)(name)
        elif self.has_3d_patches:
            self.missing.append(name)
        elif flat is None:
            self.missing.append(flat_name)
        elif name.endswith("bias"):
            if flat.shape == own.shape:  # else it is told of the 2-D one
                self.take(name, flat, f"from {flat_name}", flat_name)
        else:
            flat = _as_convolution(flat, own[:, :, 0])
            if flat.shape != own[:, :, 0].shape:
                self.does_not_fit(flat_name, flat, own[:, :, 0])
                return
            note = f"from {flat_name}, {self.inflate} of {own.shape[2]} frames"
            self.take(name, _inflate(flat, own.shape[2], self.inflate), note, flat_name)

    def fill_positions(self, name: str, own: Tensor, given: Tensor | None) -> None:
        try:
            if name == "pos_embed":
                self.fill_space(own, given)
            elif name == "temp_embed":
                self.fill_time(own, given)
            else:
                self.fill_space_time(own, given)
        except ValueError as error:
            self.problems.append(str(error))

    def fill_space(self, own: Tensor, given: Tensor | None) -> None:
        if given is None:
            self.missing.append("pos_embed")
            return
        grid, base = _grid_of(given, own.shape[2]), self.model.base_grid
        value = torch.cat((given[:, :1], _resize_space(given[:, 1:], base)), dim=1)
        self.take("pos_embed", value, f"{grid} x {grid} patches to {base} x {base}", "pos_embed")

    def fill_time(self, own: Tensor, given: Tensor | None) -> None:
        if given is None:
            if "st_embed" in self.file:
                raise ValueError("its positions are joint (st_embed): set VIT.POS_EMBED joint")
            if self.is_of_video:
                self.missing.append("temp_embed")
            else:
                self.leave("temp_embed", "not in the file")
        elif not _are_times(given, own.shape[2]):
            self.does_not_fit("temp_embed", given, own)
        else:
            value = _resize_time(given, own.shape[1])
            self.take(
                "temp_embed", value, f"{given.shape[1]} frames to {own.shape[1]}", "temp_embed"
            )

    def fill_space_time(self, own: Tensor, given: Tensor | None) -> None:
        frames, base = self.model.num_frames, self.model.base_grid
        space, time = self.file.get("pos_embed"), self.file.get("temp_embed")
        if space is None or (given is None and time is None and self.is_of_video):
            self.missing.append("pos_embed" if space is None else "temp_embed")
            return
        grid = _grid_of(space, own.shape[2])
        if given is None:
            patches = _resize_space(space[:, 1:], base).repeat(frames, 1, 1)
            note, source, cls = f"from pos_embed, in each of {frames} frames", "pos_embed", space
            if time is not None:
                if not _are_times(time, own.shape[2]):
                    raise ValueError(
                        f"its temp_embed is {list(time.shape)}; [1, frames, "
                        f"{own.shape[2]}] is expected"
                    )
                patches = patches + _resize_time(time, frames).transpose(0, 1)
                note, source = f"from pos_embed and temp_embed, in {frames} frames", "temp_embed"
        else:
            tokens = given.shape[1] - 1 if _are_times(given, own.shape[2]) else 0
            if tokens < 1 or tokens % grid**2:
                self.does_not_fit("st_embed", given, own)
                return
            patches = given[0, 1:].unflatten(0, (-1, grid**2))
            note = f"{len(patches)} frames of {grid} x {grid} to {frames} of {base} x {base}"
            patches = _resize_time(_resize_space(patches, base).transpose(0, 1), frames)
            patches, source, cls = patches.transpose(0, 1), "st_embed", given
        value = torch.cat((cls[:, :1], patches.flatten(0, 1)[None]), dim=1)
        self.take("st_embed", value, note, source)

    def take(self, name: str, value: Tensor, note: str | None, source: str) -> None:
        if not torch.isfinite(value).all():
            self.problems.append(f"its {source} does not hold finite numbers")
        self.new[name] = value
        self.used.add(source)
        if note is None:
            self.report.loaded.append(name)
        else:
            self.report.adapted.append(name)
            self.report.notes[name] = note

    def leave(self, name: str, note: str = "not in the file, and not needed") -> None:
        self.report.left_at_start.append(name)
        self.report.notes[name] = note

    def does_not_fit(self, name: str, given: Tensor, own: Tensor) -> None:
        self.problems.append(f"its {name} is {list(given.shape)}, {list(own.shape)} is expected")

    def is_foreign(self, name: str) -> bool:
        """Whether what the file alone has changes what its network computes."""
        match = _PART_OF_A_NETWORK.match(name)
        # The blocks of a deeper model are left out on purpose: VIT.DEPTH says how many.
        too_deep = match and match[1] and int(match[1]) >= len(self.model.blocks)
        return bool(match) and not too_deep and _kind(name) is None

    def finish(self) -> LoadReport:
        known = self.model.state_dict()
        self.report.unused = [name for name in self.content if name not in self.used]
        foreign = [
            name for name in self.report.unused if name not in known and self.is_foreign(name)
        ]
        if foreign:
            self.problems.append(f"it has {_listed(foreign)}, which this model has not")
        if self.missing or self.problems:
            told = [f"it lacks {_listed(self.missing)}"] if self.missing else []
            told += [_listed(self.problems, "; ")] if self.problems else []
            raise WeightsError(
                f"{self.path} cannot start this model: {'; '.join(told)}; "
                f"it holds {_listed(list(self.content))}"
            )
        self.model.load_state_dict(self.new, strict=False)
        return self.report


def _as_convolution(given: Tensor, own: Tensor) -> Tensor:
    """Early ViTs embed flattened patches by a linear layer: [D,3*p*p] as `own` is shaped."""
    if given.shape == own.flatten(1).shape:
        return given.reshape(own.shape)
    return given


def _are_times(given: Tensor, dim: int) -> bool:
    return given.ndim == 3 and (given.shape[0], given.shape[2]) == (1, dim) and given.shape[1] > 0


def _inflate(flat: Tensor, frames: int, inflate: str) -> Tensor:
    """[D,3,p,p] -> [D,3,t,p,p] with the same response to t equal frames."""
    if inflate == "average":
        return flat.unsqueeze(2).repeat(1, 1, frames, 1, 1) / frames
    value = flat.new_zeros((*flat.shape[:2], frames, *flat.shape[2:]))
    value[:, :, frames // 2] = flat
    return value


def _grid_of(positions: Tensor, dim: int) -> int:
    """The side of the square that [1,1+side**2,D] is for."""
    if positions.ndim == 3 and positions.shape[0] == 1 and positions.shape[2] == dim:
        side = math.isqrt(max(0, positions.shape[1] - 1))
        if side > 0 and side * side == positions.shape[1] - 1:
            return side
    raise ValueError(
        f"its pos_embed is {list(positions.shape)}; CLS and a square of patches, width {dim}, "
        "are expected"
    )


def _resize_space(positions: Tensor, side: int) -> Tensor:
    """[F,P,D] of a square grid -> [F,side**2,D]."""
    old = math.isqrt(positions.shape[1])
    return resize_positions(positions, (old, old), (side, side))


def _resize_time(times: Tensor, frames: int) -> Tensor:
    """[B,F,D] -> [B,frames,D]."""
    if times.shape[1] == frames:
        return times
    return functional.interpolate(times.transpose(1, 2), size=frames, mode="linear").transpose(1, 2)


def _kind(name: str) -> str | None:
    match = _OPTIONAL.fullmatch(name)
    # Estimators have names of their own.
    return (match["estimator"] or match.lastgroup) if match else None


def _shown(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


def _listed(items: list[str], separator: str = ", ") -> str:
    """The first few, one of each kind, and how many there are."""
    items = list(dict.fromkeys(items))
    first: dict[str, str] = {}
    for item in items:
        first.setdefault(_shown(item), item if item.isprintable() else repr(item))
    shown = list(first.values())[:4]
    more = f" and {len(items) - len(shown)} more" if len(items) > len(shown) else ""
    return separator.join(shown) + more
