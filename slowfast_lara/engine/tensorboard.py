"""A few labelled clips for TensorBoard."""

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
    """Clips of different classes, if there are, frames beside each other, as "clips/NUMBER_CLASS".

    `writer` is a SummaryWriter, `dataset` one for training or validation.
    """
    cfg = dataset.cfg
    num_classes = cfg.MODEL.NUM_CLASSES
    try:
        names = class_names(None, num_classes, cfg.DATA.PATH_TO_DATA_DIR)
    except DataError as error:  # no reason to stop a training
        logger.warning("clips are labelled by numbers: %s", error)
        names = [f"class {number}" for number in range(num_classes)]
    first_of_class = {label: index for index, label in reversed([*enumerate(dataset.labels)])}
    for index in sorted(first_of_class.values())[:count]:
        sample = dataset[index]
        if isinstance(sample, Sample) and sample.clip is not None:
            frames = np.concatenate(list(pixels_of(sample.clip, cfg)), axis=1)
            # TensorBoard changes some characters; the number keeps the tags apart.
            tag = f"clips/{sample.label}_{names[sample.label]}"
            writer.add_image(tag, frames, dataformats="HWC")
