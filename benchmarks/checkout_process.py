"""Measurements of one checkout of this package, in a separate process.

    PYTHONPATH=CHECKOUT python -P checkout_process.py read FRAMES RATE
    PYTHONPATH=CHECKOUT python -P checkout_process.py lists Kinetics|Ssv2 LISTS WORKERS fork|spawn

LISTS is a folder of lists. `read` takes lines `LISTS train|test EPOCH VIDEO` from stdin. For each
line it reads the video, and prints the CPU seconds that this took and a digest of the pixels.

`lists` prints four numbers: the CPU seconds to read the lists, the megabytes that the lists take,
the private megabytes of all workers after each has looked up its share of the videos, and how many
of these private megabytes the look-up added.

To measure another checkout, this file is run by its path with that checkout's package. It uses only
names that exist in both old and new checkouts.
"""

import sys
import time
import zlib
from typing import Any

import cv2
import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2


def reading_config(folder: str, frames: int, rate: int) -> Any:
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = folder
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = frames, rate
    cfg.DATA.TEST_CROP_SIZE = cfg.DATA.TRAIN_CROP_SIZE
    return cfg


def timed_read(dataset: Any, epoch: int, video: int) -> tuple[float, int]:
    """CPU seconds to read a training sample or all test views, and a digest of the pixels."""
    start = time.process_time()
    item = dataset[(epoch, video)]
    return time.process_time() - start, zlib.crc32(item[0].contiguous().numpy())


def answer_reads(frames: str, rate: str) -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    datasets: dict[tuple[str, str], Kinetics] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        folder, mode, epoch, video = line.rstrip("\n").rsplit(" ", 3)
        if (folder, mode) not in datasets:
            cfg = reading_config(folder, int(frames), int(rate))
            datasets[folder, mode] = Kinetics(cfg, mode)
        print(*timed_read(datasets[folder, mode], int(epoch), int(video)), flush=True)


def megabytes(*kinds: str) -> float:
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(kinds)) / 1024


def look_up(dataset, number, workers, ready, go, answers) -> None:
    """Body of a worker process: look up its share of the videos, and report private memory."""
    private = ("Private_Clean:", "Private_Dirty:")
    before = megabytes(*private)
    ready.wait()
    go.wait()
    path_of = getattr(dataset, "video_path", None) or dataset._source
    for index in range(number, len(dataset), workers):
        path_of(index), dataset.paths[index], dataset.labels[index]
    after = megabytes(*private)
    answers.put((after, after - before))
    ready.wait()


def measure_lists(kind: str, folder: str, count: str, method: str) -> None:
    workers = int(count)
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = cfg.DATA.PATH_PREFIX = folder
    cfg.MODEL.NUM_CLASSES = 400
    start, before = time.process_time(), megabytes("Pss:")
    dataset = {"Kinetics": Kinetics, "Ssv2": Ssv2}[kind](cfg, "train")
    seconds, size = time.process_time() - start, megabytes("Pss:") - before
    context: Any = torch.multiprocessing.get_context(method)
    ready, go, answers = context.Barrier(workers), context.Event(), context.Queue()
    processes = [
        context.Process(target=look_up, args=(dataset, number, workers, ready, go, answers))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    go.set()
    private, added = zip(*(answers.get() for _ in processes))
    for process in processes:
        process.join()
    print(seconds, size, sum(private), sum(added))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        answer_reads(*sys.argv[2:])
    else:
        measure_lists(*sys.argv[2:])
