"""Raw pixels that are normalised on the device equal clips that the workers normalise."""

from __future__ import annotations

import contextlib

import pytest
import torch

from slowfast_lara.config import get_cfg, load_config
from slowfast_lara.data.loader import train_loader, val_loader
from slowfast_lara.data.transforms import Normalize
from slowfast_lara.engine import run as run_module
from slowfast_lara.engine.batch_copies import BatchCopies
from tests.helpers.commands import run as main
from tests.helpers.runs import json_stats, load_checkpoint, same_tensors, write_config

CPU = torch.device("cpu")
NOISY = {
    "DATA_LOADER__NUM_WORKERS": 2,
    "DATA__GRAYSCALE": True,
    "DATA__RE_PROB": 0.5,
    "DATA__MEAN": [0.2, 0.4, 0.6],
    "DATA__STD": [0.3, 0.2, 0.1],
    "DATA__REVERSE_INPUT_CHANNEL": True,
    "MIXUP__ENABLE": True,
}


@pytest.mark.parametrize("loader", [train_loader, val_loader])
def test_raw_batches_equal_normalised_ones(tmp_path, video_set, loader):
    cfg = load_config(write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **NOISY))
    copies = BatchCopies(cfg, CPU)
    batches = list(zip(*(loader(cfg, batch_size=3, raw=raw) for raw in (False, True))))
    assert len(batches) > 1
    for plain, raw in batches:
        assert raw.clips[0].dtype == torch.uint8 and raw.clips[0].shape[-1] == 3
        (expected,), labels = copies(plain)
        (clips,), raw_labels = copies(raw)
        assert expected is plain.clips[0] and torch.equal(labels, raw_labels)
        assert clips.dtype == torch.float32 and clips.is_contiguous()
        assert torch.equal(clips, expected)
        assert torch.equal(plain.indices, raw.indices)


def test_tables_are_copied_to_a_device_once(monkeypatch):
    """On CUDA, each copy from memory that is not pinned would block the host."""
    normalize = Normalize(get_cfg().DATA)
    pixels = torch.randint(0, 256, (2, 3, 4, 5, 3), dtype=torch.uint8)
    first = normalize.batch(pixels)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "from_numpy", None)
        assert torch.equal(normalize.batch(pixels), first)
    assert normalize.batch(pixels.to("meta")).device.type == "meta"


@pytest.mark.usefixtures("in_process")
def test_training_on_raw_pixels_is_equal(tmp_path, video_set, monkeypatch):
    """As on a GPU, but on the CPU: mixup, validation and TensorBoard included."""
    results = []
    for name in ("plain", "raw"):
        if name == "raw":
            for loader in (train_loader, val_loader):
                raw = lambda cfg, loader=loader, **o: loader(cfg, **{**o, "raw": True})  # noqa: E731
                monkeypatch.setattr(run_module, loader.__name__, raw)
        changes = {**NOISY, "TEST__ENABLE": False, "TENSORBOARD__ENABLE": True}
        config = write_config(tmp_path / f"{name}.yaml", video_set, tmp_path / name, **changes)
        assert main(["--cfg", str(config)]) == 0
        weights = load_checkpoint(tmp_path / name, "checkpoint_epoch_00002.pyth")["model_state"]
        stats = [s for s in json_stats(tmp_path / name) if s.get("_type") == "val_epoch"]
        results.append((weights, stats))
    assert same_tensors(results[0][0], results[1][0]) and results[0][1] == results[1][1] != []


class RecordedStream:
    """Stands for a CUDA stream, which does not exist without a GPU; records the order of calls."""

    def __init__(self, calls: list, name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: RecordedStream) -> None:
        self.calls.append((self.name, "waits for", other.name))


def test_copies_on_a_side_stream(tmp_path, video_set, monkeypatch):
    cfg = load_config(write_config(tmp_path / "c.yaml", video_set, tmp_path / "out"))
    calls: list = []
    side, current = RecordedStream(calls, "side"), RecordedStream(calls, "current")

    @contextlib.contextmanager
    def use(stream):
        calls.append((stream.name, "starts"))
        yield
        calls.append((stream.name, "ends"))

    copy = BatchCopies._copy
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: calls.append((stream.name, x.shape))
    )
    copies = BatchCopies(cfg, torch.device("cuda", 0))
    copies._device = CPU  # where tensors can be
    monkeypatch.setattr(BatchCopies, "_copy", lambda *a: calls.append(("copy",)) or copy(*a))
    batch = next(iter(train_loader(cfg, batch_size=2, raw=True)))
    (clips,), labels = copies(batch)
    order = [("side", "starts"), ("copy",), ("side", "ends"), ("current", "waits for", "side")]
    assert calls == [*order, ("current", clips.shape), ("current", labels.shape)]
