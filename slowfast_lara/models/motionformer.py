"""Motionformer: a vision transformer with space-time attention.

Patrick et al., "Keeping Your Eye on the Ball: Trajectory Attention in Video Transformers", NeurIPS
2021. Parameters have the same names as in Motionformer's checkpoints.

Shapes: B batch, T frames of the clip, F temporal tokens, P patches per temporal token, R prefix
tokens (CLS and registers), D width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry
from torch import Tensor, nn
from torch.nn import functional

from slowfast_lara.attention import build_estimator, has_kernels
from slowfast_lara.labels import label_kind
from slowfast_lara.models.act_checkpoint import checkpointed
from slowfast_lara.models.attention_config import chosen_estimator, estimator_settings
from slowfast_lara.models.space_time import ATTENTION_LAYERS, DIVIDED

MODEL_REGISTRY = Registry("MODEL")  # PySlowFast 1.0 has no registry of models

ACTIVATIONS = {"tanh": nn.Tanh, "gelu": nn.GELU, "relu": nn.ReLU}
# Values of VIT.GELU, and PyTorch's names for them.
GELUS = {"exact": "none", "tanh": "tanh"}
POSITIONS = ("separate", "joint", "sincos")


def resize_positions(positions: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize position embeddings from the grid `old` to `new`: [F,P,D] -> [F,P',D]."""
    if old == new:
        return positions
    image = positions.transpose(1, 2).unflatten(2, old)
    return functional.interpolate(image, size=new, mode="bicubic").flatten(2).transpose(1, 2)


def resize_times(times: Tensor, frames: int) -> Tensor:
    """Resize temporal position embeddings linearly: [B,F,D] -> [B,frames,D]."""
    if times.shape[1] == frames:
        return times
    return functional.interpolate(times.transpose(1, 2), size=frames, mode="linear").transpose(1, 2)


def sincos_positions(number: int, dim: int) -> Tensor:
    """Fixed embeddings [1,number,dim] of the positions n = 0, 1, ... (Vaswani et al., 2017).

    Components 2i and 2i+1 are the sine and cosine of n / 10000**(2i/dim).
    """
    rates = 10000 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(number, dtype=torch.float64)[:, None] * rates
    table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :dim]
    return table.float()[None]


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for random clips, and scales up the kept ones."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        keep = 1 - self.rate
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (kept / keep)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, drop: float, gelu: str) -> None:
        super().__init__()
        self.gelu = GELUS[gelu]
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.fc1(x), approximate=self.gelu)
        return self.drop(self.fc2(self.drop(hidden)))


class Block(nn.Module):
    """Attention and MLP; divided attention has a temporal attention layer before them."""

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        timeattn: nn.Module | None,
        mlp_ratio: float,
        drop: float,
        drop_path: float,
        gelu: str = "exact",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.timeattn = timeattn
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop, gelu)
        self.norm3 = nn.LayerNorm(dim, eps=eps) if timeattn is not None else None

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        if self.timeattn is not None and self.norm3 is not None:
            x = x + self.timeattn(self.norm3(x), num_frames)
        x = x + self.drop_path(self.attn(self.norm1(x), num_frames))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """Embedding of non-overlapping patches, 2-D or 3-D according to the length of `patch`.

    `proj` holds the parameters under the names of Motionformer's checkpoints, but is not called.
    Instead, `forward` computes the same result with a matmul: several versions of cuDNN 9 fail or
    are orders of magnitude slower on a half-precision Conv3d whose stride equals its kernel size
    (pytorch/pytorch#174051, #163539).
    """

    def __init__(self, channels: int, dim: int, patch: tuple[int, ...]) -> None:
        super().__init__()
        convolution: Any = {2: nn.Conv2d, 3: nn.Conv3d}[len(patch)]
        self.proj = convolution(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """[B,channels,(T,)H,W] -> [B,patches,D]; T, H and W must be multiples of the patch size."""
        sizes = self.proj.kernel_size
        for axis, size in enumerate(sizes):
            x = x.unflatten(2 + 2 * axis, (-1, size))
        grid, within = range(2, x.ndim, 2), range(3, x.ndim, 2)
        patches = x.permute(0, *grid, 1, *within).flatten(1, len(sizes)).flatten(2)
        return functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


@MODEL_REGISTRY.register()
class VisionTransformer(nn.Module):
    """Motionformer with any attention layer and estimator.

    Without CLS, the classifier gets the mean of all tokens (registers and patches).

    The input is clips [B,channels,T,H,W] or, if `video_input` is False, images [B,channels,H,W]. It
    is a tensor, or a list of which the first tensor is used (PySlowFast's pathways). The output is
    logits in training mode, and in eval mode softmax scores or, with `multi_label`, sigmoid scores.
    If `num_classes` is a sequence, each number has its own classifier, and the outputs are
    concatenated.
    """

    sincos: Tensor  # fixed position embeddings, [1,F*P,D]

    def __init__(
        self,
        *,
        num_classes: int | Sequence[int],
        multi_label: bool = False,
        attn_layer: str = "trajectory",
        estimator: str = "softmax",
        estimator_args: dict[str, Any] | None = None,
        patch_size: int = 16,
        patch_size_temp: int = 2,
        channels: int = 3,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        num_frames: int = 8,
        video_input: bool = True,
        pos_embed: str = "separate",
        pos_crop_size: int = 224,
        pos_frames: int = 0,
        cls_token: bool = True,
        num_registers: int = 0,
        gelu: str = "exact",
        norm_eps: float = 1e-6,
        final_norm_eps: float = 1e-6,
        original_trajectory: bool = True,
        hidden_head: bool = True,
        head_act: str = "tanh",
        drop: float = 0.0,
        drop_path: float = 0.0,
        attn_drop: float = 0.0,
        head_drop: float = 0.0,
        pos_drop: float = 0.0,
        act_checkpoint: bool = False,
        act_checkpoint_keep: str = "nothing",
        seed: int = 0,
        kernels: str = "auto",
    ) -> None:
        super().__init__()
        self.patch_size, self.patch_size_temp = patch_size, patch_size_temp
        self.channels, self.video_input, self.num_heads = channels, video_input, num_heads
        self.num_frames, self.act_checkpoint = num_frames if video_input else 1, act_checkpoint
        self.act_checkpoint_keep = act_checkpoint_keep
        self.has_cls, self.num_registers = cls_token, num_registers
        self.base_grid = pos_crop_size // patch_size
        self.base_frames = pos_frames or self.num_frames
        self.make_embeddings(dim, pos_embed)
        self.pos_drop = nn.Dropout(pos_drop)

        sizes = dict[str, Any](head_dim=dim // num_heads, num_heads=num_heads, dropout=attn_drop)
        # Trajectory attention accepts kernels="triton" with any estimator, because the temporal
        # stage has Triton kernels. An estimator without Triton kernels then gets "auto".
        only_temporal = attn_layer == "trajectory" and not has_kernels(estimator)
        estimator_kernels = "auto" if only_temporal else kernels
        layer = partial(
            ATTENTION_LAYERS[attn_layer],
            dim=dim,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            drop=drop,
            num_prefix=cls_token + num_registers,
        )
        if attn_layer == "trajectory":
            layer = partial(layer, project_values=not original_trajectory, kernels=kernels)
        blocks = []
        for i in range(depth):
            layer_args = {**sizes, "seed": seed + i, "kernels": estimator_kernels}
            layer_args |= estimator_args or {}
            attn, timeattn = layer(estimator=build_estimator(estimator, **layer_args)), None
            if attn_layer in DIVIDED:  # attention over time is exact, because F is small
                timeattn = layer(estimator=build_estimator("softmax", **sizes), over_time=True)
            rate = drop_path * i / max(1, depth - 1)
            blocks.append(Block(dim, attn, timeattn, mlp_ratio, drop, rate, gelu, norm_eps))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, eps=final_norm_eps)
        self.pre_logits: nn.Module = nn.Identity()
        if hidden_head:
            layers = {"fc": nn.Linear(dim, dim), "act": ACTIVATIONS[head_act]()}
            self.pre_logits = nn.Sequential(OrderedDict(layers))
        self.head_drop = nn.Dropout(head_drop)
        self.multi_label = multi_label
        self.make_classifiers(dim, [num_classes] if isinstance(num_classes, int) else num_classes)
        self.initialise()

    def make_classifiers(self, dim: int, counts: Sequence[int]) -> None:
        # Motionformer's names: head, or head0 (verbs) and head1 (nouns).
        self.heads = [f"head{i}" if len(counts) > 1 else "head" for i in range(len(counts))]
        for head, count in zip(self.heads, counts):
            self.add_module(head, nn.Linear(dim, count))

    def make_embeddings(self, dim: int, pos_embed: str) -> None:
        """Create the embeddings of patches, tokens and positions.

        Position embeddings are stored for crops of `pos_crop_size` and `pos_frames` temporal tokens
        (`num_frames` if `pos_frames` is 0), and resized for other crops and numbers of frames.
        """
        patch = (self.patch_size, self.patch_size)
        self.patch_embed = PatchEmbed(self.channels, dim, patch)
        self.patch_embed_3d = PatchEmbed(self.channels, dim, (self.patch_size_temp, *patch))
        if self.has_cls:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        if self.num_registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, self.num_registers, dim))
        tokens = self.base_grid**2 * self.base_frames
        self.fixed_positions = pos_embed == "sincos"
        self.joint_positions = self.video_input and pos_embed == "joint"
        if self.fixed_positions:
            self.register_buffer("sincos", sincos_positions(tokens, dim), persistent=False)
            return
        self.pos_embed = nn.Parameter(torch.zeros(1, self.base_grid**2 + 1, dim))
        if self.joint_positions:
            self.st_embed = nn.Parameter(torch.zeros(1, tokens + 1, dim))
        elif self.video_input:
            self.temp_embed = nn.Parameter(torch.zeros(1, self.base_frames, dim))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> VisionTransformer:
        vit, kind = cfg.VIT, label_kind(cfg)
        name = chosen_estimator(cfg)
        return cls(
            num_classes=list(kind.parts.values()),
            multi_label=kind.several,
            attn_layer=vit.ATTN_LAYER,
            estimator=name,
            estimator_args=estimator_settings(cfg, name),
            patch_size=vit.PATCH_SIZE,
            patch_size_temp=vit.PATCH_SIZE_TEMP,
            channels=vit.CHANNELS,
            dim=vit.EMBED_DIM,
            depth=vit.DEPTH,
            num_heads=vit.NUM_HEADS,
            mlp_ratio=vit.MLP_RATIO,
            qkv_bias=vit.QKV_BIAS,
            num_frames=vit.TEMPORAL_RESOLUTION,
            video_input=vit.VIDEO_INPUT,
            pos_embed=vit.POS_EMBED,
            pos_crop_size=vit.POS_CROP_SIZE,
            pos_frames=vit.POS_NUM_FRAMES // vit.PATCH_SIZE_TEMP,
            cls_token=vit.CLS_TOKEN,
            num_registers=vit.NUM_REGISTERS,
            gelu=vit.GELU,
            norm_eps=vit.NORM_EPS,
            final_norm_eps=vit.FINAL_NORM_EPS,
            original_trajectory=vit.USE_ORIGINAL_TRAJ_ATTN_CODE,
            hidden_head=vit.USE_MLP,
            head_act=vit.HEAD_ACT,
            drop=vit.DROP,
            drop_path=vit.DROP_PATH,
            attn_drop=vit.ATTN_DROPOUT,
            head_drop=vit.HEAD_DROPOUT,
            pos_drop=vit.POS_DROPOUT,
            act_checkpoint=cfg.MODEL.ACT_CHECKPOINT,
            act_checkpoint_keep=vit.ACT_CHECKPOINT_KEEP,
            seed=cfg.RNG_SEED,
            kernels=vit.KERNELS,
        )

    def initialise(self) -> None:
        """Initialise the parameters, and freeze those that the model does not use."""
        # A linear layer with D inputs multiplies the scale of activations by std * sqrt(D). Keep
        # the factor of Motionformer (std 0.02 at width 768): with 0.02 at width 96, the factor is a
        # third of it, and a model did not learn in hundreds of steps.
        linear_std = 0.02 * (768 / len(self.norm.weight)) ** 0.5
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                std = linear_std if isinstance(module, nn.Linear) else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name in ("cls_token", "pos_embed", "st_embed", "register_tokens"):
            if hasattr(self, name):
                nn.init.normal_(getattr(self, name), std=0.02)
        # Motionformer's checkpoints hold a 2-D and a 3-D patch embedding, so the model has both.
        # The unused one is frozen, because DDP waits for gradients of all trainable parameters.
        unused = self.patch_embed if self.patch_size_temp > 1 else self.patch_embed_3d
        unused.requires_grad_(False)
        if self.joint_positions:
            self.pos_embed.requires_grad_(False)

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings without weight decay; the optimizer adds biases and norms."""
        return {"pos_embed", "cls_token", "temp_embed", "st_embed", "register_tokens"}

    def layers_after(self, name: str) -> int:
        """Distance of a parameter's layer from the classifier, for layer-wise LR decay.

        The classifier, its hidden layer and the final norm have distance 0, the last block has
        distance 1. All embeddings form one layer before the first block.
        """
        first, *rest = name.split(".")
        if first == "blocks":
            return len(self.blocks) - int(rest[0])
        return 0 if first in ("norm", "pre_logits", *self.heads) else len(self.blocks) + 1

    def forward(self, x: Sequence[Tensor] | Tensor) -> Tensor:
        return self.classify(self.forward_features(x))

    def classify(self, features: Tensor) -> Tensor:
        """Logits in training mode, scores in eval mode: [B,D] -> [B,classes of all parts].

        Scores are the softmax over each part of the label or, for multi-label models, the sigmoid.
        """
        features = self.head_drop(features)
        outputs = [getattr(self, head)(features) for head in self.heads]
        if not self.training:
            outputs = [x.sigmoid() if self.multi_label else x.softmax(dim=-1) for x in outputs]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def forward_features(self, x: Sequence[Tensor] | Tensor) -> Tensor:
        """The input of the classifier, [B,D]."""
        clip = x if isinstance(x, Tensor) else x[0]
        tokens = self.embed(clip)
        for block in self.blocks:
            if self.act_checkpoint and self.training:
                tokens = checkpointed(block, tokens, self.num_frames, self.act_checkpoint_keep)
            else:
                tokens = block(tokens, self.num_frames)
        return self.pre_logits(
            self.norm(tokens)[:, 0] if self.has_cls else self.norm(tokens.mean(1))
        )

    def embed(self, clip: Tensor) -> Tensor:
        """CLS, registers and patches: [B,R+F*P,D]. Registers have no position embeddings."""
        self.check_input(clip)
        if self.patch_size_temp > 1:
            patches = self.patch_embed_3d(clip)
        elif self.video_input:  # 2-D patches of each frame
            frames = clip.transpose(1, 2).flatten(0, 1)
            patches = self.patch_embed(frames).unflatten(0, (clip.shape[0], -1)).flatten(1, 2)
        else:
            patches = self.patch_embed(clip)
        grid = (clip.shape[-2] // self.patch_size, clip.shape[-1] // self.patch_size)
        positions = self.positions(grid)
        tokens = [patches + positions[:, 1:]]
        if self.num_registers:
            tokens.insert(0, self.register_tokens.expand(clip.shape[0], -1, -1))
        if self.has_cls:
            cls = self.cls_token + positions[:, :1]
            tokens.insert(0, cls.expand(clip.shape[0], -1, -1))
        return self.pos_drop(torch.cat(tokens, dim=1))

    def check_input(self, clip: Tensor) -> None:
        frames = (self.num_frames * self.patch_size_temp,) if self.video_input else ()
        expected = (self.channels, *frames)
        sides = clip.shape[-2:]
        if tuple(clip.shape[1:-2]) != expected or any(side % self.patch_size for side in sides):
            shape = ", ".join(map(str, ("batch", *expected, "height", "width")))
            raise ValueError(
                f"expected a clip [{shape}] with height and width multiples of {self.patch_size}, "
                f"got {list(clip.shape)}"
            )

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embeddings of CLS and of F frames with a `grid` of patches, [1,1+F*P,D]."""
        base = (self.base_grid, self.base_grid)
        if self.fixed_positions or self.joint_positions:
            stored = self.sincos if self.fixed_positions else self.st_embed[:, 1:]
            patches = resize_positions(stored.unflatten(1, (self.base_frames, -1))[0], base, grid)
            patches = resize_times(patches.transpose(0, 1), self.num_frames).transpose(0, 1)
            patches = patches.flatten(0, 1)[None]
            cls = torch.zeros_like(patches) if self.fixed_positions else self.st_embed
            return torch.cat((cls[:, :1], patches), dim=1)
        space = resize_positions(self.pos_embed[:, 1:], base, grid)  # [1,P,D]
        if self.video_input:
            times = resize_times(self.temp_embed, self.num_frames)
            space = (times[0].unsqueeze(1) + space).flatten(0, 1)[None]
        return torch.cat((self.pos_embed[:, :1], space), dim=1)
