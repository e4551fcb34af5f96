"""Loading of existing weights into a model: image models, and checkpoints of other runs.

Supported files are state dicts of timm, Hugging Face and Meta (ViT, DeiT III, DINOv2), the original
ViT release (.npz), and checkpoints of Motionformer, PySlowFast and this package. Weights that do
not fit are adapted:

- A 2-D patch embedding is inflated to the t frames of a 3-D patch. It is copied to the middle frame
  (index t // 2, zero elsewhere) as in Motionformer, or copied to all frames and divided by t.
- Position embeddings are resized to the model's: spatial ones bicubically, temporal ones linearly.
  If the file lacks the joint embedding of a model with VIT.POS_EMBED joint, it is computed as the
  spatial embedding in every frame, plus the temporal embedding if the file has one.
- A classifier, or a tensor of an estimator, keeps its initial value if the file has it in a
  different shape.
- Parts that the file lacks keep their initial weights: the classifier, trajectory projections
  (proj_q, proj_kv), temporal attention (timeattn, norm3), the hidden layer of the head
  (pre_logits), an estimator's parameters and samples, and for image models `temp_embed`. At ViT-B's
  width the initial weights are Motionformer's: linear layers normal with standard deviation 0.02,
  biases and `temp_embed` zero.

The file must hold all other weights that the model uses, in the right shape. It is refused if it
has register or distillation tokens, a norm before the blocks, or parameters of the model's blocks
that the model lacks, except for the parts listed above. If a file is refused, the model does not
change.
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

from slowfast_lara.errors import ConfigError, WeightsError
from slowfast_lara.models.motionformer import VisionTransformer, resize_positions, resize_times
from slowfast_lara.models.weights.conversion import to_own_names
from slowfast_lara.models.weights.files import read_weights
from slowfast_lara.models.weights.vit_npz import from_vit_npz, is_vit_npz

INFLATIONS = ("centre", "average")

# Optional parts: a file must hold all parameters of such a part, in all blocks, or none of them.
_OPTIONAL_PART = re.compile(
    r"(?:blocks\.\d+\.)?(?:"
    r"(?P<trajectory>attn\.proj_(?:q|kv))|(?P<divided>timeattn|norm3)|"
    r"(?P<estimator>attn\.estimator\.\w+)|(?P<hidden>pre_logits)|(?P<head>head\d*)|"
    r"(?P<time>temp_embed))\b.*"
)
# Parameters of the file that must not be ignored, because they change the network's output: norms
# of q and k, gated MLPs, tokens other than CLS, and the like.
_PART_OF_NETWORK = re.compile(r"blocks\.(\d+)\.|norm_pre\b|(?:reg|dist|register)_token")
# Parts that keep their initial weights if the file has them in a different shape.
_REPLACEABLE = ("head", "attn.estimator.")


@dataclass
class LoadReport:
    """Weights by outcome: loaded, adapted, initialised or unused; `notes` maps names to reasons."""

    path: str
    loaded: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)
    initialised: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """One line per name; names that differ only in the block index share a line."""
        lines = [f"weights from {self.path}"]
        for outcome in ("loaded", "adapted", "initialised", "unused"):
            names = getattr(self, outcome)
            counts = Counter((_without_index(name), self.notes.get(name, "")) for name in names)
            for (name, note), count in counts.items():
                times = f" x {count}" if count > 1 else ""
                lines.append(f"{outcome:<14} {name + times:<44} {note}".rstrip())
        return "\n".join(lines)


def image_weights(cfg: CfgNode) -> str:
    """The path in VIT.PRETRAINED_WEIGHTS, or ConfigError if there is no such file."""
    path = cfg.VIT.PRETRAINED_WEIGHTS
    if not os.path.isfile(path):
        raise ConfigError(
            f"VIT.PRETRAINED_WEIGHTS is {path!r}; must be an existing file of image weights "
            "(configs/README.md lists some); set VIT.IM_PRETRAINED False to start from random "
            "weights"
        )
    return path


def load_pretrained(
    model: VisionTransformer, path: str | os.PathLike[str], *, inflate: str = "centre"
) -> LoadReport:
    """Load a file's weights into a model; raise WeightsError and load none if they do not fit.

    Args:
        model: The model to change.
        path: A file in any of the supported formats.
        inflate: How 2-D patch embeddings become 3-D, "centre" or "average".

    Returns:
        The outcome for every name in the model and in the file.
    """
    if inflate not in INFLATIONS:
        raise ValueError(f"inflate is {inflate!r}; must be one of {', '.join(INFLATIONS)}")
    loader = _Loader(model, os.fspath(path), inflate)
    for name, own in model.state_dict().items():
        loader.find_value(name, own)
    return loader.finish()


class _Loader:
    """Collects the new values of a model's tensors, and all problems; `finish` loads the values."""

    def __init__(self, model: VisionTransformer, path: str, inflate: str) -> None:
        self.model, self.path, self.inflate = model, path, inflate
        self.report = LoadReport(path)
        self.values: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.content = self.read()
        self.file = {name: x.float() for name, x in self.content.items() if x.is_floating_point()}
        self.parts = {_optional_part(name) for name in self.file}
        self.has_3d_patches = any(name.startswith("patch_embed_3d.") for name in self.file)
        self.is_video_model = self.has_3d_patches or bool(self.parts & {"trajectory", "divided"})
        self.position_finders = {
            "pos_embed": self.find_space,
            "temp_embed": self.find_time,
            "st_embed": self.find_space_time,
        }

    def read(self) -> dict[str, Tensor]:
        """Read the file's weights and convert their names to those of this package."""
        weights = read_weights(self.path, averaged=True)
        heads = None
        try:
            if is_vit_npz(weights):
                weights, heads = from_vit_npz(weights)
            else:
                weights = to_own_names(weights)
        except ValueError as error:
            raise WeightsError(f"{self.path} does not fit this model: {error}") from None
        if heads and heads != self.model.num_heads:
            self.problems.append(f"{heads} attention heads, expected {self.model.num_heads}")
        return weights

    def find_value(self, name: str, own: Tensor) -> None:
        """Find the new value of a tensor of the model, or record why there is none."""
        given = self.file.get(name)
        if name in self.content and given is None:
            dtype = self.content[name].dtype
            self.problems.append(f"{name} has dtype {dtype}, expected floating point")
            return
        if given is not None and name.endswith("proj.weight") and name.startswith("patch_embed"):
            given = _as_convolution(given, own)
        if given is not None and given.shape == own.shape:
            self.use(name, given, None, name)
        elif name.startswith("patch_embed"):
            self.find_patch_embedding(name, own, given)
        elif name in self.position_finders:
            try:
                self.position_finders[name](own, given)
            except ValueError as error:
                self.problems.append(str(error))
        elif given is None:
            if _optional_part(name) in (None, *self.parts):
                self.missing.append(name)
            else:
                self.keep(name, "not in the file")
        elif (_optional_part(name) or "").startswith(_REPLACEABLE):
            self.keep(name, f"{_shape(given)} in the file, {_shape(own)} in the model")
        else:
            self.wrong_shape(name, given, own)

    def find_patch_embedding(self, name: str, own: Tensor, given: Tensor | None) -> None:
        flat_name = name.replace("patch_embed_3d", "patch_embed")
        flat = self.file.get(flat_name)
        if given is not None:
            self.wrong_shape(name, given, own)
        elif name == flat_name:
            # A model with 3-D patches does not use the 2-D patch embedding.
            if self.model.patch_size_temp > 1 and "patch_embed_3d.proj.bias" in self.file:
                self.keep(name, "not in the file, and not needed")
            else:
                self.missing.append(name)
        elif self.has_3d_patches:
            self.missing.append(name)
        elif flat is None:
            self.missing.append(flat_name)
        elif name.endswith("bias"):
            if flat.shape == own.shape:  # a wrong shape is reported for flat_name
                self.use(name, flat, f"from {flat_name}", flat_name)
        else:
            flat = _as_convolution(flat, own[:, :, 0])
            if flat.shape != own[:, :, 0].shape:
                self.wrong_shape(flat_name, flat, own[:, :, 0])
                return
            note = f"from {flat_name}, {self.inflate} of {own.shape[2]} frames"
            self.use(name, _inflate(flat, own.shape[2], self.inflate), note, flat_name)

    def find_space(self, own: Tensor, given: Tensor | None) -> None:
        if given is None:
            if self.model.joint_positions and "st_embed" in self.file:
                self.keep("pos_embed", "not in the file, and not needed")
            else:
                self.missing.append("pos_embed")
            return
        grid, base = _grid_of(given, own.shape[2]), self.model.base_grid
        value = torch.cat((given[:, :1], _resize_space(given[:, 1:], base)), dim=1)
        self.use("pos_embed", value, f"{grid} x {grid} patches to {base} x {base}", "pos_embed")

    def find_time(self, own: Tensor, given: Tensor | None) -> None:
        if given is None:
            if "st_embed" in self.file:
                raise ValueError("the file has joint positions (st_embed): set VIT.POS_EMBED joint")
            if self.is_video_model:
                self.missing.append("temp_embed")
            else:
                self.keep("temp_embed", "not in the file")
        elif not _is_sequence(given, own.shape[2]):
            self.wrong_shape("temp_embed", given, own)
        else:
            value, note = resize_times(given, own.shape[1]), f"{given.shape[1]} frames"
            self.use("temp_embed", value, f"{note} to {own.shape[1]}", "temp_embed")

    def find_space_time(self, own: Tensor, given: Tensor | None) -> None:
        frames, base, dim = self.model.base_frames, self.model.base_grid, own.shape[2]
        space, time = self.file.get("pos_embed"), self.file.get("temp_embed")
        if given is not None and space is None:
            # ViViT's files do not store the side length of the grid. Assume the model's side length
            # or, if that does not fit, the model's number of frames.
            tokens = given.shape[1] - 1 if _is_sequence(given, dim) else 0
            side = base if tokens % base**2 == 0 else math.isqrt(tokens // frames)
            space = given[:, : 1 + side**2]
        if space is None or (given is None and time is None and self.is_video_model):
            self.missing.append("pos_embed" if space is None else "temp_embed")
            return
        grid = _grid_of(space, dim)
        if given is None:
            patches = _resize_space(space[:, 1:], base).repeat(frames, 1, 1)
            note, source, cls = f"from pos_embed, in each of {frames} frames", "pos_embed", space
            if time is not None:
                if not _is_sequence(time, dim):
                    expected = f"[1, frames, {dim}]"
                    raise ValueError(f"temp_embed is {_shape(time)}, expected {expected}")
                patches = patches + resize_times(time, frames).transpose(0, 1)
                note, source = f"from pos_embed and temp_embed, for {frames} frames", "temp_embed"
        else:
            tokens = given.shape[1] - 1 if _is_sequence(given, dim) else 0
            if tokens < 1 or tokens % grid**2:
                self.wrong_shape("st_embed", given, own)
                return
            patches = given[0, 1:].unflatten(0, (-1, grid**2))
            note = f"{len(patches)} frames of {grid} x {grid} to {frames} of {base} x {base}"
            patches = resize_times(_resize_space(patches, base).transpose(0, 1), frames)
            patches, source, cls = patches.transpose(0, 1), "st_embed", given
        value = torch.cat((cls[:, :1], patches.flatten(0, 1)[None]), dim=1)
        self.use("st_embed", value, note, source)

    def use(self, name: str, value: Tensor, note: str | None, source: str) -> None:
        """Set the new value of a tensor; `note` describes its adaptation, or is None."""
        if not torch.isfinite(value).all():
            self.problems.append(f"{source} has values that are not finite")
        self.values[name] = value
        self.used.add(source)
        (self.report.loaded if note is None else self.report.adapted).append(name)
        if note is not None:
            self.report.notes[name] = note

    def keep(self, name: str, note: str) -> None:
        """Keep the initial value of a tensor."""
        self.report.initialised.append(name)
        self.report.notes[name] = note

    def wrong_shape(self, name: str, given: Tensor, own: Tensor) -> None:
        self.problems.append(f"{name} is {_shape(given)}, expected {_shape(own)}")

    def changes_network(self, name: str) -> bool:
        """Whether a parameter that the model lacks is a reason to refuse the file."""
        match = _PART_OF_NETWORK.match(name)
        # With a smaller VIT.DEPTH, the model omits the file's last blocks on purpose.
        too_deep = match and match[1] and int(match[1]) >= len(self.model.blocks)
        return bool(match) and not too_deep and _optional_part(name) is None

    def finish(self) -> LoadReport:
        """Load the values, or raise WeightsError with all problems."""
        known = self.model.state_dict()
        self.report.unused = [name for name in self.content if name not in self.used]
        foreign = [
            name for name in self.report.unused if name not in known and self.changes_network(name)
        ]
        if foreign:
            self.problems.append(f"this model has no {_summary(foreign)}")
            if "register_tokens" in foreign and self.content["register_tokens"].ndim == 3:
                number = self.content["register_tokens"].shape[1]
                self.problems.append(f"set VIT.NUM_REGISTERS {number}")
        if self.missing or self.problems:
            problems = [f"missing {_summary(self.missing)}"] if self.missing else []
            problems += [_summary(self.problems, "; ")] if self.problems else []
            raise WeightsError(
                f"{self.path} does not fit this model: {'; '.join(problems)}; "
                f"the file has {_summary(list(self.content))}"
            )
        self.model.load_state_dict(self.values, strict=False)
        return self.report


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)!s:.80}"


def _as_convolution(given: Tensor, own: Tensor) -> Tensor:
    """Reshape the linear patch embedding [D,3*p*p] of early ViTs to the shape of `own`."""
    return given.reshape(own.shape) if given.shape == own.flatten(1).shape else given


def _is_sequence(given: Tensor, dim: int) -> bool:
    """Whether a tensor has the shape [1,n,dim] with n >= 1."""
    return given.ndim == 3 and (given.shape[0], given.shape[2]) == (1, dim) and given.shape[1] > 0


def _inflate(flat: Tensor, frames: int, inflate: str) -> Tensor:
    """[D,3,p,p] -> [D,3,t,p,p], with the same output for t equal frames as `flat` for one frame."""
    if inflate == "average":
        return flat.unsqueeze(2).repeat(1, 1, frames, 1, 1) / frames
    value = flat.new_zeros((*flat.shape[:2], frames, *flat.shape[2:]))
    value[:, :, frames // 2] = flat
    return value


def _grid_of(positions: Tensor, dim: int) -> int:
    """The side length of the square grid of position embeddings [1,1+side**2,D]."""
    side = math.isqrt(positions.shape[1] - 1) if _is_sequence(positions, dim) else 0
    if side == 0 or side * side != positions.shape[1] - 1:
        expected = f"[1, 1 + side**2, {dim}]"
        raise ValueError(f"pos_embed is {_shape(positions)}, expected {expected}")
    return side


def _resize_space(positions: Tensor, side: int) -> Tensor:
    """[F,P,D] of a square grid -> [F,side**2,D]."""
    old = math.isqrt(positions.shape[1])
    return resize_positions(positions, (old, old), (side, side))


def _optional_part(name: str) -> str | None:
    """Name of the optional part that a parameter belongs to, or None."""
    match = _OPTIONAL_PART.fullmatch(name)
    return (match["estimator"] or match["head"] or match.lastgroup) if match else None


def _without_index(name: str) -> str:
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


def _summary(items: list[str], separator: str = ", ") -> str:
    """List up to four items that differ in more than the block index; count the others."""
    items = list(dict.fromkeys(items))
    first: dict[str, str] = {}
    for item in items:
        first.setdefault(_without_index(item), item if item.isprintable() else repr(item))
    shown = list(first.values())[:4]
    more = f" and {len(items) - len(shown)} more" if len(items) > len(shown) else ""
    return separator.join(shown) + more
