#!/usr/bin/env python3
"""Training and testing as in a checkout: --cfg FILE --opts KEY VALUE ...

With --spawn each job runs in its own process, as with several GPUs.
"""

import argparse
import multiprocessing

import torch
from slowfast.config.defaults import get_cfg
from vision.fair.slowfast.tools.test_net import test
from vision.fair.slowfast.tools.train_net import train


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg", required=True)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    cfg = get_cfg()
    cfg.merge_from_file(args.cfg)
    cfg.merge_from_list(args.opts)
    for enabled, job in ((cfg.TRAIN.ENABLE, train), (cfg.TEST.ENABLE, test)):
        if enabled and args.spawn:
            process = multiprocessing.get_context("spawn").Process(target=job, args=(cfg,))
            process.start()
            process.join()
            assert process.exitcode == 0
        elif enabled:
            job(cfg)


if __name__ == "__main__":
    main()
