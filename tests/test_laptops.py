"""Where modules, signals and ways of Linux are missing: Windows, and Apple's mps device.

Neither is here. What Windows lacks is hidden from the package in a process of its own, with what
it does otherwise in its place. For mps stands PyTorch's meta device, whose tensors have a shape
and a type and no numbers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from fvcore.common.config import CfgNode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slowfast_lara
from slowfast_lara import locks
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.attention.tensors import without_autocast
from slowfast_lara.config import check_machine, load_config
from slowfast_lara.config.load import with_overrides
from slowfast_lara.engine.evaluate import count_correct
from slowfast_lara.engine.iteration import Numbers
from slowfast_lara.engine.optimizer import build_optimizer, step_if_finite
from slowfast_lara.errors import ConfigError, InputError
from slowfast_lara.inference.scoring import autocast, to_device, view_outputs
from slowfast_lara.models.build import build_model, device_of
from slowfast_lara.models.motionformer import VisionTransformer
from slowfast_lara.models.space_time import ATTENTION_LAYERS
from slowfast_lara.runs import checkpoint
from tests.helpers.preloaded import environment
from tests.helpers.runs import json_stats, write_config

# What PyTorch and multiprocessing ask Linux for stays theirs; the package sees the rest alone.
AS_ON_WINDOWS = """
import errno, fcntl, importlib, json, multiprocessing, os, pkgutil, signal, stat, sys, types

import av, cv2, fvcore.nn, matplotlib.pyplot, slowfast.datasets.kinetics, slowfast.models.optimizer
import slowfast.utils.checkpoint, slowfast.utils.logging, slowfast.utils.meters, torch
import torch.distributed, torch.utils.data, tqdm, yaml

ABSENT = "SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGBUS SIGKILL SIGHUP SIGQUIT SIGPIPE setitimer alarm"
few_signals = types.ModuleType("signal")
few_signals.__dict__.update(
    {name: it for name, it in vars(signal).items() if name not in ABSENT.split()}
)


def locking(file, mode, count):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)
    except OSError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


msvcrt = types.ModuleType("msvcrt")
msvcrt.locking, msvcrt.LK_NBLCK = locking, 2
real_open, real_sync, real_remove = os.open, os.fsync, os.remove


def open_no_folder(path, flags, *rest, **more):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return real_open(path, flags, *rest, **more)


def sync_what_may_be_written(file):
    number = file if isinstance(file, int) else file.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    return real_sync(number)


def remove_what_is_closed(path, **more):
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    if any(os.path.exists(name) and os.path.samefile(name, path) for name in names):
        raise PermissionError(errno.EACCES, "it is open", path)
    return real_remove(path, **more)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    os.open, os.fsync, os.remove = open_no_folder, sync_what_may_be_written, remove_what_is_closed
    sys.modules.update({"signal": few_signals, "msvcrt": msvcrt, "resource": None, "fcntl": None})
    import slowfast_lara

    for module in pkgutil.walk_packages(slowfast_lara.__path__, "slowfast_lara."):
        if not any(word in module.name for word in ("triton_", "ahead_of_time", "plugin", "demo")):
            importlib.import_module(module.name)
    assert slowfast_lara.locks.fcntl is None
    assert len(slowfast_lara.engine.signals.SIGNALS) == 2
    sys.modules["signal"] = signal
    from slowfast_lara.cli import main

    print("codes", *[main(words) for words in json.loads(sys.argv[1])])
"""


def as_on_windows(tmp_path, *commands: list[Any]) -> str:
    """What commands print that are called one after the other, as on Windows; all succeed."""
    program = tmp_path / "windows.py"
    program.write_text(AS_ON_WINDOWS)
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, program, words],
        env={**environment(), "PYTHONIOENCODING": "cp1252"},
        capture_output=True,
        encoding="cp1252",
    )
    assert "codes" + " 0" * len(commands) in done.stdout, done.stderr
    return done.stdout


def test_train_predict_and_report_as_on_windows(tmp_path, video_set):
    output, names = tmp_path / "out", tmp_path / "names.json"
    config = write_config(tmp_path / "c.yaml", video_set, output)
    names.write_text(json.dumps(["links", "größer", "左"]), encoding="utf-8")
    printed = as_on_windows(
        tmp_path,
        ["run", "--cfg", config, "SOLVER.MAX_EPOCH", 1],
        ["predict", output, video_set / "test0.mp4", "--classes", names],
        ["report", output],
    )
    assert "größer" in printed and "\\u5de6" in printed
    stats = json_stats(output)
    assert stats[-1]["num_videos"] == 7
    # Windows does not tell the memory of a process, and nothing is made up for it.
    (epoch,) = [line for line in stats if line.get("_type") == "train_epoch"]
    assert "ram" not in epoch and "gpu_mem" in epoch
    assert (output / "report.html").is_file()
    assert not list(output.glob(".*"))  # no lock, nothing unfinished


@pytest.mark.slow
def test_processes_that_are_not_forked(tmp_path):
    """Workers of loaders, and those who make videos: what they are given is sent to them."""
    videos, output = tmp_path / "videos", tmp_path / "out"
    few = ["--classes", 3, "--train", 8, "--val", 3, "--test", 3, "--size", 40, "--jobs", 2]
    config = write_config(tmp_path / "c.yaml", videos, output, DATA_LOADER__NUM_WORKERS=1)
    as_on_windows(
        tmp_path,
        ["data", "synthetic", videos, *few],
        ["run", "--cfg", config, "SOLVER.MAX_EPOCH", 1],
    )
    assert json_stats(output)[-1]["num_videos"] == 3


def test_the_lock_of_windows(tmp_path, monkeypatch):
    msvcrt = ModuleType("msvcrt")
    msvcrt.LK_NBLCK = 2

    def locking(file: int, mode: int, count: int) -> None:
        assert (mode, count, os.lseek(file, 0, os.SEEK_CUR) > 1000) == (2, 1, True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # within a process too
        except OSError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    msvcrt.locking = locking
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(locks, "fcntl", None)
    folder = str(tmp_path / "run")
    with locks.exclusive_lock(folder, "OUTPUT_DIR"):
        second = pytest.raises(InputError, match=f"another run is at work: process {os.getpid()}")
        with second, locks.exclusive_lock(folder, "OUTPUT_DIR"):
            pass
    assert not os.path.exists(folder)
    with locks.exclusive_lock(folder, "OUTPUT_DIR"):
        assert os.listdir(folder) == [locks.LOCK]


# The device.


def on_mps(*opts: Any) -> CfgNode:
    return load_config("quick/lara", ["DEVICE", "mps", "NUM_GPUS", 0, *opts])


@pytest.mark.parametrize(
    "opts, told",
    [
        (["DEVICE", "cuda"], "DEVICE is 'cuda'; allowed: auto, mps"),
        (["DEVICE", "mps", "NUM_GPUS", 2], "NUM_GPUS is 2; with DEVICE mps, 0 is expected"),
        (["DEVICE", "mps", "NUM_SHARDS", 2], "NUM_SHARDS is 2; with DEVICE mps, 1 is expected"),
    ],
)
def test_devices_that_cannot_be(opts, told):
    with pytest.raises(ConfigError, match=told):
        load_config("quick/lara", ["NUM_GPUS", 0, *opts])


def test_the_device_of_a_config(monkeypatch):
    assert device_of(load_config("quick/lara")).type == "cpu"
    assert device_of(on_mps()).type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="DEVICE is 'mps'; PyTorch finds no Apple GPU here"):
        check_machine(on_mps())


def test_a_model_trained_on_mps_is_used_elsewhere(tmp_path, monkeypatch):
    cfg = load_config("quick/lara", ["VIT.DEPTH", 1])
    content = {"epoch": 0, "model_state": build_model(cfg).state_dict()}
    path = str(tmp_path / "of_a_mac.pyth")
    checkpoint.save(path, {**content, "cfg": with_overrides(cfg, ["DEVICE", "mps"]).dump()})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    model = slowfast_lara.load(path)
    assert model.cfg.DEVICE == "auto" and next(model.network.parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match="no Apple GPU here"):
        slowfast_lara.load(path, overrides=["DEVICE", "mps"])


@pytest.mark.parametrize("method", ["sgd", "adam", "adamw"])
def test_a_step_that_is_not_finite_is_left_out_on_mps_too(method):
    """A fused optimiser on mps would take it: it is told on the device, and does not heed that."""
    layer = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(layer, on_mps("SOLVER.OPTIMIZING_METHOD", method))
    assert not optimizer.defaults["fused"]
    before = layer.weight.clone()
    for norm, moves in ((math.nan, False), (math.inf, False), (1.0, True)):
        layer.weight.grad, layer.bias.grad = torch.full((2, 3), norm), torch.zeros(2)
        step_if_finite(optimizer, torch.tensor(norm))
        assert torch.equal(layer.weight, before) != moves


class _NothingWide(TorchDispatchMode):
    """Fails where mps would: at a float64 on a device that is not the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                assert x.dtype not in (torch.float64, torch.complex128), func
        return out


class _Copies(TorchFunctionMode):
    """Copies to devices that are not here, of which none is made; whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            device, _, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            self.made.append((device.type, not non_blocking))
            return args[0]
        return func(*args, **kwargs)


@pytest.fixture
def any_generator(monkeypatch):
    """There is none for a device that is not here, and tensors without numbers draw nothing."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())


def test_the_check_for_wide_numbers_finds_one():
    with _NothingWide(), pytest.raises(AssertionError):
        torch.ones(2, device="meta").double()


def small_model(name: str, layer: str, *opts: Any) -> CfgNode:
    sizes = ["VIT.DEPTH", 1, "VIT.APPROX_ATTN_DIM", 4]
    return on_mps("VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_LAYER", layer, *sizes, *opts)


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_training_step_on_a_device_without_float64(any_generator, name, layer):
    """On the meta device, which is not the CPU either: the batch, the loss, the gradients."""
    cfg, device = small_model(name, layer), torch.device("meta")
    model = VisionTransformer.from_config(cfg).to(device)
    size = cfg.DATA.TRAIN_CROP_SIZE
    clips, labels = torch.randn(2, 3, cfg.DATA.NUM_FRAMES, size, size), torch.tensor([0, 1])
    with _NothingWide():
        logits, labels = model([to_device(clips, device)]), to_device(labels, device)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        (loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        counts = count_correct(logits.detach(), labels)
        # They too are to_float32 on the host, to which these have no numbers to bring.
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            Numbers([loss, *counts, norm])
    assert {x.device.type for x in (logits, loss, norm, *counts)} == {"meta"}
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_of_views_on_a_device_without_float64(any_generator, name, layer):
    cfg = small_model(name, layer)
    model = VisionTransformer.from_config(cfg).to("meta").eval()
    size = cfg.DATA.TEST_CROP_SIZE
    views = torch.randn(3, 3, cfg.DATA.NUM_FRAMES, size, size)
    with _NothingWide(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        view_outputs(model, views, cfg)


def test_the_model_goes_to_its_device():
    with _Copies() as copies:
        model = build_model(on_mps("VIT.DEPTH", 1))
    assert len(copies.made) >= len(list(model.parameters()))
    assert {device for device, _ in copies.made} == {"mps"}


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_is_that_of_the_device(precision):
    cfg = on_mps("SOLVER.USE_MIXED_PRECISION", True, "SOLVER.PRECISION", precision)
    with autocast(cfg, device_of(cfg)):
        assert torch.is_autocast_enabled("mps") and not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("mps") == getattr(torch, precision)
        with without_autocast("mps"):  # where sums of exponentials are made
            assert not torch.is_autocast_enabled("mps")


def test_copies_to_and_from_mps_are_waited_for():
    """Nobody waits for those to CUDA, which takes a tensor before it may be freed."""
    with _Copies() as copies:
        x = to_device(torch.ones(()), torch.device("mps"))
        Numbers([x, x])
        to_device(x, torch.device("cuda"))
    assert copies.made == [("mps", True), ("cpu", True), ("cuda", False)]
