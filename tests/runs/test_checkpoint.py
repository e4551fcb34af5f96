"""Checkpoints: atomic writing, safe reading, order by progress."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from slowfast.utils.checkpoint import get_last_checkpoint
from torch import nn

from slowfast_lara.errors import CheckpointError, WeightsError
from slowfast_lara.files import remove_unfinished
from slowfast_lara.runs import checkpoint
from slowfast_lara.runs.checkpoint import TrainingPosition
from tests.helpers.runs import finish, start

BATCH = 4


def content(value: float = 1.0) -> dict:
    return {"epoch": 1, "model_state": {"weight": torch.full((50, 50), value)}, "cfg": "A: 1"}


def save_at(output: Path, position: TrainingPosition, value: float = 1.0) -> str:
    path = checkpoint.path_of(str(output), position, global_batch=BATCH)
    checkpoint.save(path, content(value))
    return path


def save_as(output: Path, name: str, value: float, **more: Any) -> str:
    path = str(output / "checkpoints" / name)
    checkpoint.save(path, {**content(value), **more})
    return path


def test_read_back(tmp_path):
    path = save_at(tmp_path, TrainingPosition(40))
    assert os.path.basename(path) == "checkpoint_epoch_00040.pyth"
    assert torch.equal(checkpoint.load(path)["model_state"]["weight"], torch.ones(50, 50))
    assert os.listdir(os.path.dirname(path)) == ["checkpoint_epoch_00040.pyth"]


def test_order_is_by_progress_as_in_pyslowfast(tmp_path):
    positions = [
        TrainingPosition(0, 7),
        TrainingPosition(1),
        TrainingPosition(1, 120),
        TrainingPosition(2),
        TrainingPosition(10, 3),
    ]
    for number, position in enumerate(positions):
        save_at(tmp_path, position, number)
        path, found = checkpoint.newest(str(tmp_path))
        assert found["model_state"]["weight"][0, 0] == number
        assert path == get_last_checkpoint(str(tmp_path))


def test_order_counts_samples_instead_of_batches(tmp_path):
    """120 batches of 1 are fewer samples than 40 batches of 4."""
    first = checkpoint.path_of(str(tmp_path), TrainingPosition(2, 120), global_batch=1)
    second = checkpoint.path_of(str(tmp_path), TrainingPosition(2, 40), global_batch=4)
    assert os.path.basename(first) == "checkpoint_epoch_00002_sample_000000120.pyth"
    for path in (second, first):
        checkpoint.save(path, content())
    assert checkpoint.newest(str(tmp_path))[0] == second == get_last_checkpoint(str(tmp_path))


def test_old_names_are_ordered_by_the_batch_size_in_the_file(tmp_path):
    """PySlowFast sorts by name, which is correct except between two old names."""
    save_as(tmp_path, "checkpoint_epoch_00002_iter_000120.pyth", 1, iteration=120, global_batch=1)
    further = save_as(
        tmp_path, "checkpoint_epoch_00002_iter_000040.pyth", 2, iteration=40, global_batch=4
    )
    assert checkpoint.newest(str(tmp_path))[0] == further
    new = save_at(tmp_path, TrainingPosition(2, 41))
    assert checkpoint.newest(str(tmp_path))[0] == new == get_last_checkpoint(str(tmp_path))
    checkpoint.prune(new, 2)
    assert set(os.listdir(tmp_path / "checkpoints")) == set(map(os.path.basename, (further, new)))
    whole = save_at(tmp_path, TrainingPosition(3))
    assert checkpoint.newest(str(tmp_path))[0] == whole == get_last_checkpoint(str(tmp_path))


def test_the_checkpoint_just_written_is_not_pruned(tmp_path):
    """Even if the run resumed from an earlier one because that with more progress is unreadable."""
    torn = save_at(tmp_path, TrainingPosition(5))
    os.truncate(torn, 10)
    for batch in (1, 2, 3):
        written = save_at(tmp_path, TrainingPosition(4, batch))
        checkpoint.prune(written, 1)
        assert set(os.listdir(tmp_path / "checkpoints")) == {
            os.path.basename(written),
            os.path.basename(torn),
        }
    past = save_at(tmp_path, TrainingPosition(6))
    checkpoint.prune(past, 1)
    assert os.listdir(tmp_path / "checkpoints") == [os.path.basename(past)]


@pytest.mark.parametrize("tenth", range(10))
def test_truncated_files_are_skipped(tmp_path, caplog, tenth):
    whole = save_at(tmp_path, TrainingPosition(1))
    torn = save_at(tmp_path, TrainingPosition(2))
    os.truncate(torn, os.path.getsize(torn) * tenth // 10)
    assert checkpoint.newest(str(tmp_path))[0] == whole
    assert torn in caplog.text


def test_files_with_flipped_bytes_are_skipped(tmp_path):
    whole = save_at(tmp_path, TrainingPosition(1))
    damaged = save_at(tmp_path, TrainingPosition(2))
    data = bytearray(Path(damaged).read_bytes())
    data[len(data) // 2] ^= 0xFF
    Path(damaged).write_bytes(data)
    assert checkpoint.newest(str(tmp_path))[0] == whole


class RunsCode:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return (Path.touch, (self.proof,))


@pytest.mark.parametrize("torch_format", [True, False])
def test_code_in_a_pickle_is_not_executed(tmp_path, torch_format):
    proof = tmp_path / "run"
    whole = save_at(tmp_path, TrainingPosition(1))
    bad = checkpoint.path_of(str(tmp_path), TrainingPosition(2), BATCH)
    payload = {**content(), "extra": RunsCode(proof)}
    if torch_format:
        torch.save(payload, bad)
    else:
        Path(bad).write_bytes(pickle.dumps(payload))
    with pytest.raises(WeightsError, match="code") as raised:
        checkpoint.load(bad)
    assert "\n" not in str(raised.value) and bad in str(raised.value)
    assert checkpoint.newest(str(tmp_path))[0] == whole
    assert not proof.exists()
    torch.load(bad, weights_only=False) if torch_format else pickle.loads(Path(bad).read_bytes())
    assert proof.exists()  # the payload works


@pytest.mark.parametrize("other", [[1, 2], {"epoch": 1}, {"model_state": {"weight": 3}}])
def test_other_content_is_an_error(tmp_path, other):
    path = tmp_path / "other.pyth"
    torch.save(other, path)
    with pytest.raises(CheckpointError, match="model_state"):
        checkpoint.load(str(path))


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(WeightsError, match="nothing.pyth") as raised:
        checkpoint.load(str(tmp_path / "nothing.pyth"))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_regular_is_skipped(tmp_path):
    """Reading a FIFO or /dev/zero would never end; this test uses /dev/null instead."""
    whole = save_at(tmp_path, TrainingPosition(1))
    device = Path(whole).with_name("checkpoint_epoch_00002_iter_000007.pyth")
    device.symlink_to("/dev/null")
    assert checkpoint.newest(str(tmp_path))[0] == whole
    with pytest.raises(WeightsError, match="iter_000007"):
        checkpoint.load(str(device))


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    """A limit on the file size simulates the full disk."""
    path = save_at(tmp_path, TrainingPosition(1), 1.0)
    script = f"""
import resource, signal, torch
from slowfast_lara.runs import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    checkpoint.save({path!r}, {{"model_state": {{"weight": torch.zeros(300, 300)}}}})
except OSError as error:
    print("refused:", error)
"""
    _, stdout, stderr = finish(start(program=("-c", script)))
    assert "refused: cannot write checkpoint" in stdout, stderr
    assert torch.equal(checkpoint.load(path)["model_state"]["weight"], torch.ones(50, 50))
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for position in (
        TrainingPosition(1),
        TrainingPosition(1, 5),
        TrainingPosition(2),
        TrainingPosition(3),
    ):
        last = save_at(tmp_path, position)
    checkpoint.save(checkpoint.best_path(str(tmp_path)), content())
    checkpoint.prune(last, 0)
    assert len(os.listdir(tmp_path / "checkpoints")) == 5
    checkpoint.prune(last, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "best.pyth",
        "checkpoint_epoch_00002.pyth",
        "checkpoint_epoch_00003.pyth",
    ]


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    whole = save_at(tmp_path, TrainingPosition(1))
    left = Path(whole).with_name(".writing-77")
    left.write_bytes(b"half")
    assert checkpoint.newest(str(tmp_path))[0] == whole == get_last_checkpoint(str(tmp_path))
    remove_unfinished(os.path.dirname(whole))
    assert not left.exists()


def test_position_is_computed_from_samples():
    within = {"epoch": 1, "iteration": 6, "global_batch": 4}
    assert checkpoint.position_of("x.pyth", within, 4) == TrainingPosition(2, 6)
    assert checkpoint.position_of("x.pyth", within, 8) == TrainingPosition(2, 3)
    assert checkpoint.position_of("x.pyth", {"epoch": 1}, 4) == TrainingPosition(2)


@pytest.mark.parametrize(
    "key, value",
    [
        ("epoch", "x"),
        ("epoch", -2),
        ("epoch", 1.5),
        ("epoch", None),
        ("epoch", True),
        pytest.param("epoch", 10**600, id="epoch-long"),
        ("epoch", torch.tensor(3)),
        ("iteration", "y"),
        ("iteration", -1),
        ("iteration", float("nan")),
        ("global_batch", 0),
        ("global_batch", [4]),
        ("optimizer_state", "z"),
        ("scaler_state", [1]),
    ],
)
def test_files_with_invalid_fields_are_skipped(tmp_path, key, value):
    whole = save_at(tmp_path, TrainingPosition(1))
    bad = checkpoint.path_of(str(tmp_path), TrainingPosition(2), BATCH)
    checkpoint.save(bad, {**content(), key: value})
    with pytest.raises(CheckpointError, match=key) as raised:
        checkpoint.load(bad)
    assert bad in str(raised.value) and "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300 + len(bad)
    assert checkpoint.newest(str(tmp_path))[0] == whole


def test_a_checkpoint_without_an_epoch_cannot_be_resumed(tmp_path):
    path = checkpoint.path_of(str(tmp_path), TrainingPosition(1), BATCH)
    checkpoint.save(path, {"model_state": content()["model_state"]})
    with pytest.raises(CheckpointError, match="no 'epoch'") as raised:
        checkpoint.position_of(path, checkpoint.load(path), 4)
    assert path in str(raised.value)


def test_weights_with_the_prefix_of_ddp():
    model, source = nn.Linear(3, 2), nn.Linear(3, 2)
    states = {f"module.{name}": x for name, x in source.state_dict().items()}
    checkpoint.load_weights(model, states, "x.pyth")
    assert torch.equal(model.weight, source.weight)


def test_weights_that_do_not_fit_are_an_error_of_one_line():
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    states = {"weight": torch.zeros(2, 4), "other": torch.zeros(1)}
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load_weights(model, states, "x.pyth")
    message = str(raised.value)
    assert "x.pyth" in message and "\n" not in message
    assert "no bias" in message and "other" in message and "[2, 4]" in message
    assert torch.equal(model.weight, before)
