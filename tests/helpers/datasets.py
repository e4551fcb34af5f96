"""Small datasets: synthetic sets, and annotation files of Something-Something-v2."""

from __future__ import annotations

import json

from slowfast_lara.data.ssv2 import PREFIX
from tests.helpers.runs import MAKE_SYNTHETIC, finish, start

TEMPLATES = ["Pushing something from left to right", "Turning something upside down"]


def make_synthetic(folder, *arguments: str) -> None:
    code, _, stderr = finish(start(folder, *arguments, program=(MAKE_SYNTHETIC,)))
    assert code == 0, stderr


def write_annotations(folder, **entries):
    """Write the JSON files of the splits `train` and `validation`: lists of (id, class)."""
    labels = {template: str(number) for number, template in enumerate(TEMPLATES)}
    (folder / f"{PREFIX}labels.json").write_text(json.dumps(labels))
    for split, videos in entries.items():
        content = [
            {
                "id": name,
                "label": "a thing",
                "template": TEMPLATES[label].replace("something", "[something]"),
            }
            for name, label in videos
        ]
        (folder / f"{PREFIX}{split}.json").write_text(json.dumps(content))
