#!/usr/bin/env python3
"""Everything at once, on a machine with no GPU and no data: python tools/quickstart.py [FOLDER]

Makes a small set of videos, trains a small Motionformer with LARA on it, tests it
with 30 views of each video, and says how well it does and where everything is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quick" / "lara.yaml"
SET = ("--classes", "4", "--train", "2048", "--val", "128", "--test", "128", "--size", "64")


def main(folder: Path) -> int:
    videos, output = folder / "videos", folder / "output"
    started = time.monotonic()
    make_set = [ROOT / "datasets" / "make_synthetic.py", videos, *SET]
    train_and_test = [
        ROOT / "tools" / "run_net.py",
        "--cfg",
        CONFIG,
        "DATA.PATH_TO_DATA_DIR",
        videos,
        "OUTPUT_DIR",
        output,
    ]
    for command in (make_set, train_and_test):
        # The products are small: threads would only fight with the loader's workers.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        code = subprocess.run([sys.executable, *map(str, command)], env=environment).returncode
        if code:
            return code
    results = json.loads((output / "test_results.json").read_text())
    classes = len(json.loads((videos / "classes.json").read_text()))
    print(f"""
Top-1 accuracy {results["top1_acc"]:.1f} % on {results["num_videos"]} videos, by {
        results["videos"][0]["num_views"]
    } views each (chance: {100 / classes:.1f} %), in {time.monotonic() - started:.0f} s.
  videos and lists   {videos}
  config             {CONFIG}
  checkpoint         {results["checkpoint"]}
  log                {output / "stdout.log"}
  every video's top  {output / "test_results.json"}""")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")))
