"""Labelled example clips in TensorBoard."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from slowfast_lara.data.classes import class_names
from slowfast_lara.data.dataset import Sample, VideoDataset
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.errors import DataError

logger = logging.getLogger(__name__)


def write_clips(writer: Any, dataset: VideoDataset, count: int = 4) -> None:
    """Write clips of different classes, frames side by side, as "clips/LABEL_CLASS".

    Args:
        writer: A SummaryWriter.
        dataset: A training or validation set.
        count: The largest number of clips; one per class.
    """
    cfg = dataset.cfg
    num_classes = cfg.MODEL.NUM_CLASSES
    try:
        names = class_names(None, num_classes, cfg.DATA.PATH_TO_DATA_DIR)
    except DataError as error:  # not fatal: names only label the clips
        logger.warning("TensorBoard clips have class numbers instead of names: %s", error)
        names = [f"class {number}" for number in range(num_classes)]
    first_of_class = {label: index for index, label in reversed([*enumerate(dataset.labels)])}
    for index in sorted(first_of_class.values())[:count]:
        sample = dataset[index]
        if isinstance(sample, Sample) and sample.clip is not None:
            frames = np.concatenate(list(pixels_of(sample.clip, cfg)), axis=1)
            # TensorBoard replaces some characters; the number keeps the tags distinct.
            tag = f"clips/{sample.label}_{names[sample.label]}"
            writer.add_image(tag, frames, dataformats="HWC")
