"""Training steps on a fake CUDA device: python -m tests.helpers.fake_cuda CASE ...

Fake tensors have shapes, strides and a device, but no data. On them a model takes the code paths of
a GPU. LD_PRELOAD must hold the library of benchmarks/fake_cuda.cpp, because PyTorch looks for
devices once. This file patches torch globally, so tests run it as a program of its own. A case is
LAYER:ATTENTION:PRECISION:KERNELS[:KEY=VALUE...]. One line per case: the case, "passed" or the
error, and the SDPA backends and operators of this package that it used.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import tempfile
import traceback
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.fake_cuda import patch_torch
from benchmarks.kernel_counts import gpu_attention, gpu_backend
from slowfast_lara.attention.kernels import verdicts
from slowfast_lara.config import load_config
from slowfast_lara.engine.ema import ModelEMA
from slowfast_lara.engine.metrics import classification_loss, count_correct
from slowfast_lara.engine.optimizer import (
    build_optimizer,
    load_optimizer,
    scales_loss,
    set_lr,
    step_if_finite,
)
from slowfast_lara.inference.scoring import autocast
from slowfast_lara.labels import label_kind
from slowfast_lara.models import build_model
from slowfast_lara.models.build import device_of
from tests.helpers.small_models import small_config

USED: collections.Counter[str] = collections.Counter()


class Operators(TorchDispatchMode):
    """Counts this package's operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "slowfast_lara" and args[0].device.type == "cuda":
            USED[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))


def run_graph(graph: Any, _: Any) -> Any:
    """Backend of torch.compile that counts this package's operators and compiles nothing."""
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "slowfast_lara":
            USED[node.target._schema.name.split("::")[1]] += 1
    return graph.forward


def attention_on_gpu(attention: Any) -> Any:
    """`scaled_dot_product_attention` with the operator that PyTorch chooses on a GPU."""

    def replacement(q, k, v, attn_mask=None, dropout_p=0.0, *, scale=None):
        # A graph of torch.compile calls PyTorch's function.
        if q.device.type != "cuda" or torch.compiler.is_compiling():
            return attention(q, k, v, attn_mask, dropout_p, scale=scale)
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN's attention is allowed"
        backend = gpu_backend(q, k, v, attn_mask)
        USED[backend] += 1
        assert backend != "math", (q.shape, v.shape, q.dtype)
        return gpu_attention(q, k, v, attn_mask, dropout_p, scale)

    return replacement


def config(case: str) -> Any:
    layer, attention, precision, kernels, *changes = case.split(":")
    import yaml

    content = small_config(
        ATTN_LAYER=layer,
        APPROX_ATTN_TYPE=attention,
        KERNELS=kernels,
        DROP_PATH=0.1,
        EMBED_DIM=48,
        DEPTH=1,
    )
    content |= {"NUM_GPUS": 1}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(content, file)
        file.flush()
        mixed = precision != "float32"
        options = ["SOLVER.USE_MIXED_PRECISION", str(mixed), "SOLVER.OPTIMIZING_METHOD", "adamw"]
        options += ["SOLVER.PRECISION", precision if mixed else "float16"]
        options += ["SOLVER.CLIP_GRAD", "1.0", "SOLVER.EMA_DECAY", "0.99"]
        for change in changes:
            options += change.split("=")
        return load_config(file.name, options)


def train_and_evaluate(cfg: Any) -> None:
    """Two steps as `engine.train` does them, then an evaluation and a checkpoint."""
    device, kind = device_of(cfg), label_kind(cfg)
    with device:
        model = build_model(cfg)
    optimizer, ema = build_optimizer(model, cfg), ModelEMA(model, cfg.SOLVER.EMA_DECAY)
    scaler = torch.amp.GradScaler(device.type, enabled=scales_loss(cfg))
    crop = cfg.DATA.TRAIN_CROP_SIZE
    clip = torch.empty(3, 3, cfg.DATA.NUM_FRAMES, crop, crop, device=device)
    labels = torch.zeros(3, dtype=torch.long, device=device)
    model.train()
    for _ in range(2):
        with autocast(cfg, device):
            logits = model([clip])
        assert logits.device == device and logits.dtype == (
            getattr(torch, cfg.SOLVER.PRECISION)
            if cfg.SOLVER.USE_MIXED_PRECISION
            else torch.float32
        )
        loss = classification_loss(logits.float(), labels, kind, 0.1)
        count_correct(logits.detach().float(), labels, kind)
        scaler.scale(loss).backward()
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, name
        set_lr(optimizer, 1e-4)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.SOLVER.CLIP_GRAD)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            step_if_finite(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)
        ema.update()
    model.eval()
    with torch.inference_mode(), ema.swapped_in(), autocast(cfg, device):
        assert model([clip]).shape == (3, kind.num_classes)
    # torch.save cannot write fake tensors: a checkpoint is copied to the CPU and loaded again.
    states = [x.state_dict() for x in (model, optimizer, ema)]
    states = tree_map(lambda x: x.to("cpu") if isinstance(x, torch.Tensor) else x, states)
    load_optimizer(optimizer, states[1])
    for state in (states[2], states[0]):
        model.load_state_dict(state)
    ema.reset(1)


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    patch_torch()
    # Not a function mode: activation checkpointing recomputes in a thread without modes.
    functional.scaled_dot_product_attention = attention_on_gpu(
        functional.scaled_dot_product_attention
    )
    # With MODEL.COMPILE, trace all of the model as one graph, and run its operators.
    torch.compile = functools.partial(torch.compile, backend=run_graph, fullgraph=True)
    # As on a GPU where Triton is faster: there is no GPU to measure.
    verdicts.of_calls = lambda calls, device: [verdicts.Verdict(2.0, 1.0, 0.0)] * len(calls)
    for case in cases:
        USED.clear()
        try:
            cfg = config(case)
            # torch.compile does not trace within such a mode.
            operators = contextlib.nullcontext() if cfg.MODEL.COMPILE else Operators()
            with FakeTensorMode(), operators:
                train_and_evaluate(cfg)
            result = "passed"
        except Exception:
            result = repr(traceback.format_exc())
        print(f"{case}\t{result}\t{dict(USED)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
