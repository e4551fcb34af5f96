from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.data.bad_videos import BadVideos, Failure
from slowfast_lara.data.loader import test_loader as make_test_loader
from slowfast_lara.data.loader import train_loader, val_loader
from slowfast_lara.errors import DataError, RunError
from tests.helpers.runs import finish, start
from tests.helpers.videos import config


@pytest.fixture
def cfg(synthetic):
    return config(DATA__PATH_TO_DATA_DIR=str(synthetic), DATA__USE_RAND_AUGMENT=True)


# All augmentations of a training clip.
ALL_RECIPES = {
    "USE_REPEATED_AUG": True,
    "GRAYSCALE": True,
    "GAUSSIAN": True,
    "RE_PROB": 0.5,
    "COLORJITTER": True,
}


@pytest.fixture
def all_recipes(cfg):
    for key, value in ALL_RECIPES.items():
        cfg.DATA[key] = value
    return cfg


def batches(cfg, epoch=1, first_batch=0, **options):
    loader = train_loader(cfg, **options)
    loader.batch_sampler.set_epoch(epoch, first_batch)
    return list(loader)


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others):
        assert torch.equal(one.clips[0], other.clips[0])
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)


@pytest.mark.parametrize("recipes", [{}, ALL_RECIPES], ids=["plain", "all recipes"])
def test_same_batches_with_any_number_of_workers(cfg, recipes):
    cfg.DATA.update(recipes)
    results = []
    for workers in (0, 1, 3):
        cfg.DATA_LOADER.NUM_WORKERS = workers
        results.append(batches(cfg, batch_size=8))
    assert len(results[0]) == 6 and results[0][0].clips[0].shape == (8, 3, 8, 32, 32)
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_epochs_of_persistent_workers(cfg):
    cfg.DATA_LOADER.NUM_WORKERS = 2
    loader = train_loader(cfg, batch_size=8)
    for epoch in (0, 3):
        loader.batch_sampler.set_epoch(epoch)
        cfg.DATA_LOADER.NUM_WORKERS = 0
        assert_equal(list(loader), batches(cfg, epoch, batch_size=8))


def test_resume_within_an_epoch(cfg):
    whole = batches(cfg, batch_size=8)
    assert_equal(batches(cfg, first_batch=4, batch_size=8), whole[4:])
    loader = train_loader(cfg, batch_size=8)
    loader.batch_sampler.set_epoch(1, first_batch=4)
    assert len(loader) == 6


def test_two_ranks_read_the_batches_of_one_process(cfg):
    whole = batches(cfg, batch_size=6)
    halves = [batches(cfg, batch_size=3, rank=rank, world_size=2) for rank in (0, 1)]
    assert len(whole) == len(halves[0]) == len(halves[1]) == 8
    for batch, first, second in zip(whole, *halves):
        assert torch.equal(batch.clips[0], torch.cat([first.clips[0], second.clips[0]]))
        assert torch.equal(batch.indices, torch.cat([first.indices, second.indices]))
    indices = torch.cat([batch.indices for batch in whole])
    assert len(set(indices.tolist())) == 48
    assert (
        indices.tolist()
        != torch.cat([batch.indices for batch in batches(cfg, 2, batch_size=6)]).tolist()
    )


def test_repeated_augmentation(all_recipes):
    """Three clips of a video in a row, all different; as many clips in an epoch as videos."""
    cfg = all_recipes
    whole = batches(cfg, batch_size=7)
    assert len(whole) == 7
    indices = torch.cat([batch.indices for batch in whole]).tolist()
    clips = torch.cat([batch.clips[0] for batch in whole])
    order = np.random.default_rng((cfg.RNG_SEED, 1)).permutation(50)
    assert indices == np.repeat(order, 3)[:49].tolist()
    for first in range(0, 48, 3):
        one, two, three = clips[first : first + 3]
        assert not (torch.equal(one, two) or torch.equal(two, three) or torch.equal(one, three))
    assert_equal(batches(cfg, first_batch=5, batch_size=7), whole[5:])
    again = torch.cat([batch.indices for batch in batches(cfg, epoch=2, batch_size=7)])
    assert set(again.tolist()) != set(indices)


def test_repeated_augmentation_in_two_ranks(all_recipes):
    whole = batches(all_recipes, batch_size=8)
    halves = [batches(all_recipes, batch_size=4, rank=rank, world_size=2) for rank in (0, 1)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert torch.equal(batch.clips[0], torch.cat([first.clips[0], second.clips[0]]))


def test_disabled_augmentation_draws_nothing(cfg):
    """Erasing does not change other draws: only the rectangle differs."""
    plain = batches(cfg, batch_size=8)
    cfg.DATA.RE_PROB = 1.0
    for one, other in zip(plain, batches(cfg, batch_size=8), strict=True):
        same = (one.clips[0] == other.clips[0]).float().mean()
        assert 0.6 < same < 1 and torch.equal(one.indices, other.indices)


def test_too_few_videos_for_a_batch(cfg):
    with pytest.raises(DataError, match="50 videos.*batch of 51.*smaller TRAIN.BATCH_SIZE"):
        train_loader(cfg, batch_size=17, world_size=3)


@pytest.mark.parametrize("world_size, batch_size", [(1, 4), (2, 4), (5, 2), (20, 3)])
def test_validation_reads_every_video_once(cfg, world_size, batch_size):
    indices = [
        index
        for rank in range(world_size)
        for batch in val_loader(cfg, batch_size=batch_size, rank=rank, world_size=world_size)
        for index in batch.indices.tolist()
    ]
    assert sorted(indices) == list(range(13))


def test_validation_omits_videos_that_do_not_decode(cfg, tmp_path):
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    good = (Path(cfg.DATA.PATH_TO_DATA_DIR) / "val.csv").read_text().splitlines()[0]
    good = f"{cfg.DATA.PATH_TO_DATA_DIR}/{good}"
    lines = [f"{bad} 0", good, f"{bad} 0", f"{bad} 1"]
    (tmp_path / "val.csv").write_text("\n".join(lines))
    cfg.DATA.PATH_TO_DATA_DIR = str(tmp_path)
    first, second = val_loader(cfg, batch_size=2)
    assert first.indices.tolist() == [1] and first.clips[0].shape[0] == 1
    assert [failure.path for failure in first.failures] == [str(bad)]
    assert second.clips == [] and len(second.labels) == 0 and len(second.failures) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_testing_gives_each_video_to_one_rank(cfg, workers):
    cfg.DATA_LOADER.NUM_WORKERS = workers
    for rank in range(3):
        videos = list(make_test_loader(cfg, rank=rank, world_size=3))
        assert [video.index for video in videos] == list(range(rank, 7, 3))
        assert all(video.views.shape == (30, 3, 8, 32, 32) for video in videos)


START_WORKERS = """
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    import cv2
    import numpy as np
    cv2.setNumThreads(2)
    cv2.GaussianBlur(np.zeros((1000, 1000, 3), np.uint8), (0, 0), 5)  # starts OpenCV's threads
    from tests.helpers.videos import config
    from slowfast_lara.data.loader import train_loader
    assert cv2.getNumThreads() == 2  # importing has no side effects
    cfg = config(DATA__PATH_TO_DATA_DIR=sys.argv[1], DATA_LOADER__NUM_WORKERS=1,
                 DATA__USE_RAND_AUGMENT=True)
    loader = train_loader(cfg, batch_size=25)
    assert cv2.getNumThreads() == 1
    loader.dataset[0]
    print(len(list(loader)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_start_by_fork_and_spawn(synthetic, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(START_WORKERS)
    _, stdout, stderr = finish(start(synthetic, method, program=(str(script),)))
    assert stdout.split() == ["2"], stderr


@pytest.fixture
def with_workers(cfg):
    """A worker of a loader in use, and the iterator over its next batches."""
    cfg.DATA_LOADER.NUM_WORKERS = 2
    before = set(multiprocessing.active_children())
    loader = train_loader(cfg, batch_size=2)

    def epochs():
        while True:
            yield from loader

    items = epochs()
    next(items)
    yield (set(multiprocessing.active_children()) - before).pop(), items
    items.close()


@pytest.mark.parametrize("batches", [0, 24])
def test_worker_death_is_raised_with_the_next_batch(with_workers, batches):
    """PyTorch would raise it from a signal handler, for example inside logging, which drops it."""
    worker, items = with_workers
    for _ in range(batches):  # an epoch has 25
        next(items)
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)  # a handler would raise here
    with pytest.raises(RunError, match="lower DATA_LOADER.NUM_WORKERS") as raised:
        list(items)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kill", [True, False])
def test_connection_reset_by_a_dying_worker(with_workers, monkeypatch, kill):
    """The exit of a worker killed while it transfers a batch is known a moment later."""
    worker, items = with_workers

    def reset(*_, **__):
        if kill:
            threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL)).start()
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(multiprocessing.queues.Queue, "get", reset)
    expected = (RunError, "was killed") if kill else (ConnectionResetError, "reset by peer")
    with pytest.raises(expected[0], match=expected[1]):
        list(items)


@pytest.mark.parametrize(
    "number, expected",
    [(signal.SIGBUS, "no space left in /dev/shm"), (signal.SIGSEGV, "worker died")],
)
def test_other_deaths_of_a_worker(with_workers, number, expected):
    worker, items = with_workers
    os.kill(worker.pid, number)
    with pytest.raises(RunError, match=expected):
        list(items)


def test_bad_videos_are_counted_once(caplog):
    bad = BadVideos(600, 0.01)
    for _ in range(3):
        bad.add([Failure("a.mp4", "no frame decodes"), Failure("b.mp4", "not a file")])
    assert len(caplog.records) == 2 and "a.mp4: no frame decodes" in caplog.text
    bad.add([Failure(f"{number}.mp4", "truncated") for number in range(4)])
    with pytest.raises(RunError, match="MAX_BAD_SHARE") as caught:
        bad.add([Failure("c.mp4", "truncated")])
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("7 of 600 videos do not decode") and "drop-bad" in first
    assert lines[:2] == ["  a.mp4: no frame decodes", "  b.mp4: not a file"]
    assert lines[6:] == ["  c.mp4: truncated"]


def test_a_few_bad_videos_of_a_small_set_are_allowed():
    few = [Failure(f"{number}.mp4", "truncated") for number in range(6)]
    BadVideos(43, 0.01).add(few[:5])
    with pytest.raises(RunError, match="MAX_BAD_SHARE"):
        BadVideos(43, 0.01).add(few)
    with pytest.raises(RunError, match="MAX_BAD_SHARE"):
        BadVideos(43, 0).add(few[:1])
