"""What a list costs, by this or another checkout of the package, in a process of its own.

    PYTHONPATH=CHECKOUT python -P long_lists_process.py Kinetics|Ssv2 LISTS WORKERS fork|spawn

Prints the seconds of a core to read the lists, the megabytes that this takes, and those that all
workers have for themselves once each has looked at its share of the videos. Run by its path,
it imports what every checkout has.
"""

import sys
import time
from typing import Any

import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2


def megabytes(*kinds: str) -> float:
    with open("/proc/self/smaps_rollup", encoding="utf-8") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(kinds)) / 1024


def own() -> float:
    return megabytes("Private_Clean:", "Private_Dirty:")


def work(dataset, number, workers, ready, go, answers) -> None:
    before = own()
    ready.wait()
    go.wait()
    for index in range(number, len(dataset), workers):
        dataset._source(index)
        dataset.paths[index]
        dataset.labels[index]
    answers.put((before, own()))
    ready.wait()


def main() -> None:
    kind, folder, workers, method = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = cfg.DATA.PATH_PREFIX = folder
    cfg.MODEL.NUM_CLASSES = 400
    start, before = time.process_time(), megabytes("Pss:")
    dataset = {"Kinetics": Kinetics, "Ssv2": Ssv2}[kind](cfg, "train")
    seconds, listed = time.process_time() - start, megabytes("Pss:") - before
    context: Any = torch.multiprocessing.get_context(method)
    ready, go, answers = context.Barrier(workers), context.Event(), context.Queue()
    processes = [
        context.Process(target=work, args=(dataset, number, workers, ready, go, answers))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    go.set()
    answered = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    print(seconds, listed, sum(own for _, own in answered), sum(a - b for b, a in answered))


if __name__ == "__main__":
    main()
