"""Training samples as another checkout of this package reads them, in a process of its own.

    PYTHONPATH=CHECKOUT python -P reading_process.py FRAMES RATE LISTS ...

It answers lines `LISTS epoch video` by `seconds digest`. Run by its path, it imports what
every checkout has.
"""

import hashlib
import sys
import time
from typing import Any

import torch

from slowfast_lara.config import get_cfg
from slowfast_lara.data.kinetics import Kinetics


def main() -> None:
    torch.set_num_threads(1)
    frames, rate, *folders = sys.argv[1:]
    datasets = {}
    for folder in folders:
        cfg = get_cfg()
        cfg.DATA.PATH_TO_DATA_DIR = folder
        cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = int(frames), int(rate)
        datasets[folder] = Kinetics(cfg, "train")
    print("ready", flush=True)
    for line in sys.stdin:
        folder, epoch, video = line.rstrip("\n").rsplit(" ", 2)
        start = time.process_time()
        sample: Any = datasets[folder][(int(epoch), int(video))]
        seconds = time.process_time() - start
        print(seconds, hashlib.sha256(sample.clip.numpy()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
