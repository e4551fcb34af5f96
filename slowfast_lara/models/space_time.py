"""Space-time attention layers: projections around an estimator.

The first R tokens are the prefix: CLS and registers, usually CLS alone. The other tokens are the
patches, frame-major. The prefix attends to all tokens, always with exact attention. Patches attend
to the prefix only in joint and divided layers with exact attention, as in Motionformer. They do not
attend to it in trajectory layers, nor with estimators that are not exact.
TimesformerAttention treats the prefix differently: see its docstring.

Shapes: B batch, h heads, R prefix tokens, N = F*P patches, F frames, P tokens of a frame, d head
size, D = h*d.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slowfast_lara.attention import Estimator
from slowfast_lara.attention.sdpa import fused_attention
from slowfast_lara.attention.temporal import temporal_attention
from slowfast_lara.attention.tensors import is_exporting


class SpaceTimeAttention(nn.Module):
    """Base class of the layers: an estimator, and the projections of its input and output."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        estimator: Estimator,
        qkv_bias: bool,
        drop: float,
        num_prefix: int = 1,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_prefix = num_heads, num_prefix
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.estimator = estimator
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B,R+N,D] -> q, k and v, each [B,h,R+N,d]."""
        q, k, v = _heads_first(self.project_tokens(x))
        return q, k, v

    def project_tokens(self, x: Tensor) -> Tensor:
        """[B,R+N,D] -> queries, keys and values [B,R+N,3,h,d]."""
        return self.qkv(x).unflatten(2, (3, self.num_heads, -1))

    def prefix_and_patches(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Attention output of the prefix [B,h,R,d]; q, k and v of the patches, each [B,h,N,d]."""
        split = _Split.apply if self.num_prefix and not _is_traced() else _split
        prefix, k, v, *patches = split(self.project_tokens(x), self.num_prefix)
        out = fused_attention(prefix, k, v) if self.num_prefix else prefix
        return out, tuple(patches)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B,h,R+N,d] -> the prefix [B,h,R,d] and the patches [B,h,N,d]."""
        return x[:, :, : self.num_prefix], x[:, :, self.num_prefix :]

    def project(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix [B,h,R,d] and patches [B,N,D] -> the layer's output [B,R+N,D]."""
        tokens = patches
        if self.num_prefix:
            prefix = prefix.transpose(1, 2).flatten(2).to(patches.dtype)
            tokens = torch.cat((prefix, patches), dim=1)
        return self.proj_drop(self.proj(tokens))


class JointAttention(SpaceTimeAttention):
    """Each patch attends to the patches of all frames."""

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        if self.estimator.exact:
            out = self.estimator(*self.queries_keys_values(x)).squeeze(3)
            prefix, patches = self.split(out)
        else:
            prefix, qkv = self.prefix_and_patches(x)
            patches = self.estimator(*qkv).squeeze(3)
        return self.project(prefix, patches.transpose(1, 2).flatten(2))


class DividedAttention(SpaceTimeAttention):
    """Each patch attends to its frame, or if `over_time`, to its spatial position in all frames."""

    def __init__(self, *args: Any, over_time: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.over_time = over_time

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        num_patches = x.shape[1] - self.num_prefix
        num_groups = num_patches // num_frames if self.over_time else num_frames
        groups = [self.group(tokens, num_frames) for tokens in (q, k, v)]
        if self.estimator.exact:
            for i, tokens in ((1, k), (2, v)):
                prefix = self.split(tokens)[0].repeat_interleave(num_groups, dim=0)
                groups[i] = torch.cat((prefix, groups[i]), dim=2)
        out = self.estimator(*groups).squeeze(3)  # [B*groups,h,tokens of a group,d]
        out = out.unflatten(0, (-1, num_groups))
        order = (0, 3, 1, 2, 4) if self.over_time else (0, 1, 3, 2, 4)
        patches = out.permute(order).flatten(1, 2).flatten(2)
        prefix, _ = self.split(q)
        if self.num_prefix:
            prefix = fused_attention(prefix, k, v)
        return self.project(prefix, patches)

    def group(self, tokens: Tensor, num_frames: int) -> Tensor:
        """Group the patches of [B,h,R+N,d]: [B*P,h,F,d] over time, [B*F,h,P,d] over space."""
        patches = self.split(tokens)[1].unflatten(2, (num_frames, -1))
        order = (0, 3, 1, 2, 4) if self.over_time else (0, 2, 1, 3, 4)
        return patches.permute(order).flatten(0, 1)


class TimesformerAttention(DividedAttention):
    """Divided attention of TimeSformer (Bertasius et al., ICML 2021).

    Attention over time returns zeros for the prefix, so that the residual branch leaves the prefix
    unchanged. Attention over space has a copy of the prefix in every frame; the prefix's output is
    the mean over these copies.
    """

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        q_group, k_group, v_group = (self.group(tokens, num_frames) for tokens in (q, k, v))
        if self.over_time:
            out = self.estimator(q_group, k_group, v_group).squeeze(3)  # [B*P,h,F,d]
            patches = out.unflatten(0, (len(x), -1)).permute(0, 3, 1, 2, 4).flatten(1, 2).flatten(2)
            patches = self.proj_drop(self.proj(patches))
            prefix = patches.new_zeros(len(x), self.num_prefix, patches.shape[2])
            return torch.cat((prefix, patches), dim=1)
        prefixes = [self.split(y)[0].repeat_interleave(num_frames, dim=0) for y in (q, k, v)]
        keys, values = (
            torch.cat((prefix, group), dim=2)
            for prefix, group in zip(prefixes[1:], (k_group, v_group))
        )
        prefix = fused_attention(prefixes[0], keys, values)
        prefix = prefix.unflatten(0, (len(x), num_frames)).mean(1)
        if self.estimator.exact:
            k_group, v_group = keys, values
        out = self.estimator(q_group, k_group, v_group).squeeze(3)  # [B*F,h,P,d]
        patches = out.unflatten(0, (len(x), num_frames)).transpose(2, 3).flatten(1, 2).flatten(2)
        return self.project(prefix, patches)


class TrajectoryAttention(SpaceTimeAttention):
    """Each patch attends to every frame separately, then over time to the F results."""

    def __init__(
        self, *args: Any, project_values: bool = False, kernels: str = "auto", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        dim, bias = self.qkv.in_features, self.qkv.bias is not None
        self.proj_q = nn.Linear(dim, dim, bias=bias)
        self.proj_kv = nn.Linear(dim, 2 * dim, bias=bias)
        self.project_values, self.kernels = project_values, kernels

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        prefix, qkv = self.prefix_and_patches(x)
        paths = self.estimator(*qkv, num_frames=num_frames)
        paths = paths.permute(0, 3, 2, 1, 4).flatten(3)  # [B,F,N,D]
        # The output for the patch's own frame becomes the query of the temporal stage (`proj_q`).
        if _is_traced():
            own = own_frames(paths).flatten(1, 2)
        else:
            own, paths = _WithOwnFrames.apply(paths)
        own_q = self.proj_q(own).unflatten(2, (self.num_heads, -1))
        # Under autocast, own_q has autocast's dtype; the other arguments must have the same dtype.
        weight = self.proj_kv.weight.to(own_q.dtype)
        bias = None if self.proj_kv.bias is None else self.proj_kv.bias.to(own_q.dtype)
        patches = temporal_attention(
            own_q, paths.to(own_q.dtype), weight, bias, self.project_values, self.kernels
        )
        return self.project(prefix, patches.flatten(2))


def _is_traced() -> bool:
    """Whether torch.compile or torch.export is tracing.

    Plain operations then replace the autograd Functions of this file.
    """
    return torch.compiler.is_compiling() or is_exporting()


def _heads_first(qkv: Tensor) -> Tensor:
    """[B,R+N,3,h,d] -> [3,B,h,R+N,d]."""
    return qkv.permute(2, 0, 3, 1, 4)


def _split(qkv: Tensor, num_prefix: int) -> tuple[Tensor, ...]:
    """Views of qkv: q of the prefix, k and v of all tokens, q, k and v of the patches."""
    q, k, v = _heads_first(qkv).unbind(0)
    return q[:, :, :num_prefix], k, v, *(x[:, :, num_prefix:] for x in (q, k, v))


class _Split(torch.autograd.Function):
    """`_split`, with a backward pass that writes the gradient of qkv once.

    Autograd would pad the gradient of each view with zeros to the size of all tokens.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_prefix: int) -> tuple[Tensor, ...]:
        ctx.num_prefix, ctx.shape = num_prefix, qkv.shape
        return _split(qkv, num_prefix)

    @staticmethod
    def backward(ctx: Any, prefix: Tensor, *grads: Tensor) -> tuple[Tensor, None]:
        R, k, v, *patches = ctx.num_prefix, *grads
        out = prefix.new_empty(ctx.shape)
        q_out, k_out, v_out = _heads_first(out)
        q_out[:, :, :R], q_out[:, :, R:] = prefix, patches[0]
        for part, whole, own in ((k_out, k, patches[1]), (v_out, v, patches[2])):
            part[:, :, :R] = whole[:, :, :R]
            torch.add(whole[:, :, R:], own, out=part[:, :, R:])
        return out, None


def own_frames(paths: Tensor) -> Tensor:
    """Select each patch's attention to its own frame: `paths` [B,F,N,D] -> a view [B,F,P,D]."""
    frames = paths.unflatten(2, (paths.shape[1], -1))
    return frames.diagonal(dim1=1, dim2=2).permute(0, 3, 1, 2)


class _WithOwnFrames(torch.autograd.Function):
    """Return `own_frames(paths)` as [B,N,D], and `paths`.

    The backward pass adds the gradient of the first output in place to that of the second. Autograd
    would first copy the first gradient to a zero tensor of the size of `paths`.
    """

    @staticmethod
    def forward(ctx: Any, paths: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.shape = paths.shape
        return own_frames(paths).flatten(1, 2), paths.view_as(paths)

    @staticmethod
    def backward(ctx: Any, grad_own: Tensor | None, grad: Tensor | None) -> Tensor | None:
        if grad_own is None:
            return grad
        if grad is None:
            grad = grad_own.new_zeros(ctx.shape)
        own = own_frames(grad)
        own += grad_own.unflatten(1, own.shape[1:3])
        return grad


ATTENTION_LAYERS = {
    "trajectory": TrajectoryAttention,
    "joint": JointAttention,
    "divided": DividedAttention,
    "timesformer": TimesformerAttention,
}
# Layers with one attention over space and one over time.
DIVIDED = ("divided", "timesformer")
