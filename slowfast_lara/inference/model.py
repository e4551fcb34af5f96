"""A trained model as an object: videos in, classes, features or windows out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast, overload

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.attention import estimator_options
from slowfast_lara.config.load import with_overrides
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import FrameArray, FrameSource, open_frames
from slowfast_lara.errors import ConfigError, DecodeError, InputError, first_line, printable
from slowfast_lara.inference.prediction import Prediction
from slowfast_lara.inference.scoring import view_outputs, views_at_a_time
from slowfast_lara.inference.stream import Window, WindowScorer
from slowfast_lara.models import build_model
from slowfast_lara.models.attention_config import chosen_estimator, estimator_named, shown_name
from slowfast_lara.runs.checkpoint import TrainedAttention, load_weights

MOST_VIEWS = 30
# No video has more frames a second, and no window more seconds.
_MOST = 1e6

# A path of a video (or of a folder of frames, where the model's dataset has such), or frames:
# an array or tensor, uint8 RGB [T,H,W,3].
Video = str | os.PathLike[str] | np.ndarray | Tensor
Listed = list[Any] | tuple[Any, ...]


class TrainedModel:
    """What `slowfast_lara.load` gives. `network` is the plain nn.Module, never to be trained.

    `averaged` says whether its weights are the moving average that its checkpoint has;
    `from_seed` names what an attention that it was not trained with has drawn for itself.

    Videos in a list are read one after the other, and go through the network together as far
    as TEST.BATCH_SIZE views allow: their scores may differ from those of one video by itself,
    which are a test's, in the last bits.
    """

    def __init__(
        self,
        network: nn.Module,
        cfg: CfgNode,
        class_names: Sequence[str],
        path: str,
        averaged: bool = False,
        from_seed: Sequence[str] = (),
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.cfg, self.class_names, self.path = cfg, list(class_names), path
        self.averaged, self.from_seed = averaged, list(from_seed)

    def __repr__(self) -> str:
        vit, data, weight = self.cfg.VIT, self.cfg.DATA, next(self.network.parameters())
        attention = shown_name(chosen_estimator(self.cfg))
        kind = str(weight.dtype).removeprefix("torch.")
        size = data.TEST_CROP_SIZE
        return (
            f"<TrainedModel {printable(self.path)}: {vit.ATTN_LAYER} attention ({attention}), "
            f"{len(self.class_names)} classes, clips of {data.NUM_FRAMES} frames {size} x {size}, "
            f"{kind} on {weight.device}>"
        )

    @overload
    def __call__(
        self, videos: Video, *, views: int | None = None, fps: float | None = None
    ) -> Prediction: ...
    @overload
    def __call__(
        self, videos: Listed, *, views: int | None = None, fps: float | None = None
    ) -> list[Prediction]: ...
    def __call__(self, videos, *, views=None, fps=None):
        """The classes of a video, or of each in a list.

        `views`: clips and crops to average, 1 to 30 (default: as in the config). `fps`: the
        rate of frames that are given as such (default: DATA.TARGET_FPS).
        """
        outputs, num_views = self._mean_outputs(videos, views, fps, self.network)
        for video, scores in zip(_listed(videos), outputs):
            if not np.isfinite(scores).all():
                raise DecodeError(f"{_name(video)}: the model's scores are not finite")
        found = [Prediction(scores, self.class_names, num_views) for scores in outputs]
        return found if isinstance(videos, (list, tuple)) else found[0]

    def features(
        self, videos: Video | Listed, *, views: int | None = None, fps: float | None = None
    ) -> np.ndarray:
        """The vector before the classifier, the mean over the views: float32 [D].

        Of a list, [videos, D].
        """
        compute = cast(Any, self.network).forward_features
        outputs, _ = self._mean_outputs(videos, views, fps, compute)
        if not isinstance(videos, (list, tuple)):
            return outputs[0]
        return np.stack(outputs) if outputs else np.empty((0, self.cfg.VIT.EMBED_DIM), np.float32)

    def stream(
        self,
        video: Video | Iterable[np.ndarray],
        *,
        window: float | None = None,
        stride: float | None = None,
        fps: float | None = None,
    ) -> Iterator[Window]:
        """Windows of a video of any length, or of frames [H,W,3] as they come.

        `window` and `stride` are seconds; by default what a clip spans, and half of it. `fps`:
        the rate of frames that are given as such (default: DATA.TARGET_FPS). Memory is that of
        a window, however long the video.
        """
        for name, number in (("window", window), ("stride", stride), ("fps", fps)):
            check_positive(name, number)
        if not isinstance(video, (str, os.PathLike, Iterable)):
            raise _unusable(video)
        return self._windows(video, window, stride, fps)

    def _windows(
        self,
        video: Video | Iterable[np.ndarray],
        window: float | None,
        stride: float | None,
        fps: float | None,
    ) -> Iterator[Window]:
        target = self.cfg.DATA.TARGET_FPS
        if isinstance(video, (str, os.PathLike, np.ndarray, Tensor)):
            with open_frames(_source(video, fps), target) as (rate, frames):
                yield from self._full_windows(self.scorer(rate, window, stride), frames)
        else:
            checked = (FrameArray(_as_array(frame)[None]).pixels[0] for frame in video)
            yield from self._full_windows(self.scorer(fps or target, window, stride), checked)

    @staticmethod
    def _full_windows(scorer: WindowScorer, frames: Iterable[np.ndarray]) -> Iterator[Window]:
        for _, found in scorer.run(frames):
            if found is not None and found.full:
                if not np.isfinite(found.scores).all():
                    raise DecodeError(f"the scores at {found.end:.2f} seconds are not finite")
                yield found

    def scorer(
        self, fps: float, window: float | None = None, stride: float | None = None
    ) -> WindowScorer:
        """What scores windows of frames that come one by one."""
        return WindowScorer(self.network, self.cfg, fps, window, stride, self.class_names)

    def to(self, device: str | torch.device) -> TrainedModel:
        """Put the network on a device, this object's own."""
        try:
            self.network.to(device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"device {str(device)!r} cannot be used: {first_line(error)}"
            ) from None
        return self

    def half(self) -> TrainedModel:
        """Weights in float16; sums of exponentials stay in float32."""
        self.network.half()
        return self

    def with_attention(self, attention: str | None = None, **options: Any) -> TrainedModel:
        """The same weights, in the same memory, with another attention; nothing is trained.

        `options`: num_landmarks (or samples), and the attention's own. Without a name they
        are those of the model's attention.
        """
        cfg = with_overrides(self.cfg, _attention_opts(self.cfg, attention, options))
        weight = next(self.network.parameters())
        network = new_network(cfg).to(weight.device, weight.dtype)
        states = self.network.state_dict()
        from_seed = load_weights(network, states, self.path, TrainedAttention.OTHER)
        shared = {name: states[name] for name, _ in network.named_parameters()}
        network.load_state_dict(shared, strict=False, assign=True)
        return TrainedModel(network, cfg, self.class_names, self.path, self.averaged, from_seed)

    def _mean_outputs(
        self,
        videos: Video | Listed,
        views: int | None,
        fps: float | None,
        compute: Callable[..., Tensor],
    ) -> tuple[list[np.ndarray], int]:
        """For each video the mean over its views of what is computed, and how many they are."""
        check_positive("fps", fps)
        cfg = with_views(self.cfg, views)
        num_views = cfg.TEST.NUM_ENSEMBLE_VIEWS * cfg.TEST.NUM_SPATIAL_CROPS
        together = max(1, views_at_a_time(cfg) // num_views)
        sources = [_source(video, fps) for video in _listed(videos)]
        read, found = dataset_class(cfg, "TEST").read_views, []
        for start in range(0, len(sources), together):
            some = [read(source, cfg) for source in sources[start : start + together]]
            batch = some[0] if len(some) == 1 else torch.cat(some)
            outputs = view_outputs(self.network, batch, cfg, compute)
            found += [x.mean(dim=0).float().numpy() for x in outputs.split(num_views)]
        return found, num_views


def new_network(cfg: CfgNode) -> nn.Module:
    """The config's model; the global random state, from which it is initialised, stays."""
    try:
        with torch.random.fork_rng(devices=[]):
            return build_model(cfg)
    except (RuntimeError, MemoryError, TypeError) as error:  # PyTorch, of sizes beyond any memory
        raise ConfigError(f"a model of its config cannot be made: {first_line(error)}") from None


def _attention_opts(cfg: CfgNode, attention: str | None, options: dict[str, Any]) -> list[Any]:
    """Config keys and values for an attention and its options."""
    name = chosen_estimator(cfg) if attention is None else estimator_named(attention)
    keys = {key: f"VIT.{name}.{key}".upper() for key in estimator_options(name)}
    keys["num_landmarks"] = "VIT.APPROX_ATTN_DIM"
    # Dropout of attention is for training alone, and only exact attention has it.
    opts: list[Any] = ["VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_DROPOUT", 0.0]
    for key, value in options.items():
        if key not in keys:
            raise InputError(f"unknown option {key!r} of {name}; allowed: {', '.join(keys)}")
        opts += [keys[key], value.item() if isinstance(value, np.generic) else value]
    return opts


def with_views(cfg: CfgNode, views: int | None) -> CfgNode:
    """A config for so many views: clips of three crops where 3 divides them."""
    if views is None:
        return cfg
    if not isinstance(views, (int, np.integer)) or not 1 <= views <= MOST_VIEWS:
        raise InputError(f"views is {views!r}; 1 to {MOST_VIEWS} are allowed")
    views = int(views)
    crops = 1 if views % 3 else 3
    opts = ["TEST.NUM_ENSEMBLE_VIEWS", views // crops, "TEST.NUM_SPATIAL_CROPS", crops]
    return with_overrides(cfg, opts)


def _listed(videos: Video | Listed) -> Listed:
    return videos if isinstance(videos, (list, tuple)) else [videos]


def _source(video: Video, fps: float | None) -> FrameSource:
    if isinstance(video, (str, os.PathLike)):
        return os.fspath(video)
    if not isinstance(video, (np.ndarray, Tensor)):
        raise _unusable(video)
    return FrameArray(_as_array(video), fps)


def _as_array(frames: Any) -> np.ndarray:
    try:
        if isinstance(frames, Tensor):
            frames = frames.detach().cpu().numpy()
        return np.asarray(frames)
    except (TypeError, ValueError, RuntimeError):  # sparse, of a kind that NumPy has not, ragged
        raise _unusable(frames) from None


def _unusable(video: object) -> InputError:
    kind = type(video).__name__ + (f" of {video.dtype}" if isinstance(video, Tensor) else "")
    return InputError(f"{kind} is given; a path, or frames uint8 [T, H, W, 3], is expected")


def check_positive(name: str, number: object) -> None:
    if number is None:
        return
    if not isinstance(number, (int, float, np.number)) or not 0 < number <= _MOST:
        raise InputError(f"{name} is {number!r}; a positive number up to {_MOST:g} is expected")


def _name(video: Video) -> str:
    return os.fspath(video) if isinstance(video, (str, os.PathLike)) else "the frames given"
