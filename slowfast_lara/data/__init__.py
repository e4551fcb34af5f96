"""Video in: decoding, clips and views, augmentation, datasets, loaders."""

from slowfast_lara.data.bad_videos import BadVideos
from slowfast_lara.data.dataset import Sample, VideoViews
from slowfast_lara.data.errors import DataError, DecodeError, Failure, TooManyBadVideos
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.loader import Batch, test_loader, train_loader, val_loader
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.data.views import load_views

__all__ = [
    "BadVideos",
    "Batch",
    "DataError",
    "DecodeError",
    "Failure",
    "Kinetics",
    "Sample",
    "Ssv2",
    "TooManyBadVideos",
    "VideoViews",
    "load_views",
    "test_loader",
    "train_loader",
    "val_loader",
]
