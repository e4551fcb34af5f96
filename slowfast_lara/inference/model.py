"""Trained models: class scores and features of videos, and scores of sliding windows."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.attention import estimator_options
from slowfast_lara.config.load import with_overrides
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import FrameArray, FrameSource, at_constant_rate, open_frames
from slowfast_lara.errors import ConfigError, DecodeError, InputError, first_line, printable
from slowfast_lara.inference.prediction import Prediction
from slowfast_lara.inference.scoring import (
    mean_of_views,
    pool_scores,
    view_outputs,
    views_at_a_time,
)
from slowfast_lara.inference.stream import Window, WindowScorer
from slowfast_lara.labels import label_kind
from slowfast_lara.models import build_model
from slowfast_lara.models.attention_config import chosen_estimator, display_name, resolve_attention
from slowfast_lara.runs.checkpoint import TrainedAttention, load_weights

logger = logging.getLogger(__name__)

MAX_VIEWS = 30
_MAX_NUMBER = 1e6  # upper limit of frame rates, and of windows and strides in seconds

# A video's frames, uint8 RGB [T,H,W,3], or its path: a file, or a folder of extracted frames.
VideoInput = str | os.PathLike[str] | np.ndarray | Tensor
VideoInputs = list[Any] | tuple[Any, ...]
T = TypeVar("T")


class TrainedModel:
    """A trained model in eval mode, as `slowfast_lara.load` returns it.

    The scores of a single video are bitwise equal to those of a test. The videos of a list share
    batches of up to TEST.BATCH_SIZE views, which can change the last bits of their scores.

    Attributes:
        network: the nn.Module; its parameters require no gradient.
        cfg: the config of the model.
        class_names: a name for each class.
        path: the file that the weights were loaded from.
        averaged: whether `network` has the EMA weights of the checkpoint.
        from_seed: names of the buffers that were drawn from the seed, not loaded from the file.
            Only an attention that replaced the trained one has such buffers.
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
        attention = display_name(chosen_estimator(self.cfg))
        dtype = str(weight.dtype).removeprefix("torch.")
        size = data.TEST_CROP_SIZE
        return (
            f"<TrainedModel {printable(self.path)}: {vit.ATTN_LAYER} attention ({attention}), "
            f"{len(self.class_names)} classes, clips of {data.NUM_FRAMES} frames {size} x {size}, "
            f"{dtype} on {weight.device}>"
        )

    @overload
    def __call__(
        self, videos: VideoInput, *, views: int | None = None, fps: float | None = None
    ) -> Prediction: ...
    @overload
    def __call__(
        self, videos: VideoInputs, *, views: int | None = None, fps: float | None = None
    ) -> list[Prediction]: ...
    def __call__(
        self,
        videos: VideoInput | VideoInputs,
        *,
        views: int | None = None,
        fps: float | None = None,
    ) -> Prediction | list[Prediction]:
        """Classify a video, or each video of a list.

        Args:
            videos: one video or a list; a video is a path, or frames uint8 RGB [T,H,W,3].
            views: number of views (clips x crops) to combine, 1 to 30; default: from the config.
            fps: frame rate of videos given as frames; default: DATA.TARGET_FPS.

        Returns:
            A Prediction; for a list of videos, a list of Predictions. If a video of a list cannot
            be read or has scores that are not finite, its Prediction has an `error`, which is also
            logged.

        Raises:
            slowfast_lara.errors.DecodeError: a single video, not in a list, cannot be read or has
                scores that are not finite.
        """
        outputs, num_views = self._pooled_outputs(videos, views, fps, self.network, pool_scores)
        found = [
            self._prediction(video, scores, num_views)
            for video, scores in zip(_as_list(videos), outputs)
        ]
        return found if isinstance(videos, (list, tuple)) else found[0]

    def _prediction(
        self, video: VideoInput, scores: np.ndarray | DecodeError, num_views: int
    ) -> Prediction:
        path = os.fspath(video) if isinstance(video, (str, os.PathLike)) else None
        if isinstance(scores, DecodeError):
            reason = str(scores).removeprefix(f"{path}: ")
            return Prediction(np.empty(0, np.float32), (), 0, path, reason)
        kind = label_kind(self.cfg)
        return Prediction(scores, self.class_names, num_views, path, kind=kind)

    def predict_with_features(
        self, video: VideoInput, *, views: int | None = None
    ) -> tuple[Prediction, np.ndarray]:
        """Classify a video and compute its features, in one pass; see `__call__` and `features`."""
        network, sizes = cast(Any, self.network), [len(self.class_names), self.cfg.VIT.EMBED_DIM]

        def compute(clips: list[Tensor]) -> Tensor:
            features = network.forward_features(clips)
            return torch.cat((network.classify(features), features), dim=1)

        def pool(outputs: Tensor, cfg: CfgNode) -> Tensor:
            scores, features = outputs.split(sizes, dim=1)
            return torch.cat((pool_scores(scores, cfg), mean_of_views(features, cfg)))

        (output,), num_views = self._pooled_outputs(video, views, None, compute, pool)
        assert isinstance(output, np.ndarray)  # the DecodeError of a single video is raised
        scores, features = np.split(output, sizes[:1])
        return self._prediction(video, scores, num_views), features

    def features(
        self,
        videos: VideoInput | VideoInputs,
        *,
        views: int | None = None,
        fps: float | None = None,
    ) -> np.ndarray:
        """Compute the features of a video: the input of the classifier, averaged over views.

        Args:
            videos: one video or a list; a video is a path, or frames uint8 RGB [T,H,W,3].
            views: number of views (clips x crops) to average, 1 to 30; default: from the config.
            fps: frame rate of videos given as frames; default: DATA.TARGET_FPS.

        Returns:
            float32 [D] with D = VIT.EMBED_DIM; for a list of videos, [videos, D]. If a video of a
            list cannot be read or has features that are not finite, its row is NaN, and the error
            is logged.

        Raises:
            slowfast_lara.errors.DecodeError: a single video, not in a list, cannot be read or has
                features that are not finite.
        """
        compute = cast(Any, self.network).forward_features
        outputs, _ = self._pooled_outputs(videos, views, fps, compute, mean_of_views)
        features = np.full((len(outputs), self.cfg.VIT.EMBED_DIM), np.nan, np.float32)
        for row, output in zip(features, outputs):
            if not isinstance(output, DecodeError):
                row[:] = output
        return features if isinstance(videos, (list, tuple)) else features[0]

    def stream(
        self,
        video: VideoInput | Iterable[np.ndarray],
        *,
        window: float | None = None,
        stride: float | None = None,
        fps: float | None = None,
    ) -> Iterator[Window]:
        """Classify sliding windows of a video of any length, in constant memory.

        Window times come from the frames' timestamps, so the frame rate may vary.

        Args:
            video: a path, frames uint8 RGB [T,H,W,3], or an iterable of frames [H,W,3].
            window: length of a window in seconds; default: the time span of a clip,
                or 4 for Ssv2 models.
            stride: seconds between the starts of two windows; default: half a window.
            fps: frame rate of videos given as frames; default: DATA.TARGET_FPS.

        Returns:
            An iterator of `Window` objects, in the order of time. All have the full length, unless
            the video is shorter. The last one ends with the video.
        """
        target_fps = self.cfg.DATA.TARGET_FPS
        for name, number in (("window", window), ("stride", stride), ("fps", fps)):
            check_positive(name, number)
        if not isinstance(video, (str, os.PathLike, Iterable)):
            raise _invalid_video(video)

        def windows() -> Iterator[Window]:
            with contextlib.ExitStack() as stack:
                if isinstance(video, (str, os.PathLike, np.ndarray, Tensor)):
                    source = _source(video, fps)
                    rate, frames = stack.enter_context(open_frames(source, target_fps))
                else:
                    rate = fps or target_fps
                    images = (FrameArray(_as_array(frame)[None]).pixels[0] for frame in video)
                    frames = at_constant_rate(images, rate)
                for _, found in self.scorer(rate, window, stride).run(frames):
                    if found is not None and found.full:
                        yield found

        return windows()

    def scorer(
        self, fps: float, window: float | None = None, stride: float | None = None
    ) -> WindowScorer:
        """Create a scorer of sliding windows of frames at `fps`; other arguments: see `stream`."""
        return WindowScorer(self.network, self.cfg, fps, window, stride, self.class_names)

    def to(self, device: str | torch.device) -> TrainedModel:
        """Move the network to a device, in place."""
        try:
            self.network.to(device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"cannot use device {str(device)!r}: {first_line(error)}") from None
        return self

    def half(self) -> TrainedModel:
        """Convert the weights to float16, in place; softmax still accumulates in float32."""
        self.network.half()
        return self

    def with_attention(self, attention: str | None = None, **options: Any) -> TrainedModel:
        """Create a model with another attention, without training; it shares this model's weights.

        Args:
            attention: the new attention, e.g. "lara-recommended"; default: that of this model.
            options: `num_landmarks` (landmarks, samples, or groups of keys per frame), and the
                options of the attention.

        Returns:
            A new model.
        """
        cfg = with_overrides(self.cfg, _attention_overrides(self.cfg, attention, options))
        weight = next(self.network.parameters())
        network = new_network(cfg).to(weight.device, weight.dtype)
        states = self.network.state_dict()
        from_seed = load_weights(network, states, self.path, TrainedAttention.OTHER)
        shared = {name: states[name] for name, _ in network.named_parameters()}
        network.load_state_dict(shared, strict=False, assign=True)
        return TrainedModel(network, cfg, self.class_names, self.path, self.averaged, from_seed)

    def _pooled_outputs(
        self,
        videos: VideoInput | VideoInputs,
        views: int | None,
        fps: float | None,
        compute: Callable[..., Tensor],
        pool: Callable[[Tensor, CfgNode], Tensor],
    ) -> tuple[list[np.ndarray | DecodeError], int]:
        """Outputs of `compute`, pooled over the views of each video; and the number of views.

        If a video of a list cannot be read, or its output is not finite, its DecodeError takes the
        place of the output. For a single video, the error is raised.
        """
        check_positive("fps", fps)
        cfg = with_views(self.cfg, views)
        num_views = cfg.TEST.NUM_ENSEMBLE_VIEWS * cfg.TEST.NUM_SPATIAL_CROPS
        videos_per_batch = max(1, views_at_a_time(cfg) // num_views)
        sources = [_or_error(_source, video, fps) for video in _as_list(videos)]
        results: list[np.ndarray | DecodeError] = []
        for start in range(0, len(sources), videos_per_batch):
            results += self._batch_outputs(sources[start:][:videos_per_batch], cfg, compute, pool)
        for error in [result for result in results if isinstance(result, DecodeError)]:
            if not isinstance(videos, (list, tuple)):
                raise error
            logger.warning("%s", printable(str(error)))
        return results, num_views

    def _batch_outputs(
        self,
        sources: list[FrameSource | DecodeError],
        cfg: CfgNode,
        compute: Callable[..., Tensor],
        pool: Callable[[Tensor, CfgNode], Tensor],
    ) -> list[np.ndarray | DecodeError]:
        """The pooled output or the DecodeError of each video of one batch."""
        read_views = dataset_class(cfg, "TEST").read_views
        found = [
            source if isinstance(source, DecodeError) else _or_error(read_views, source, cfg)
            for source in sources
        ]
        parts = [views for views in found if isinstance(views, Tensor)]
        if parts:
            batch = parts[0] if len(parts) == 1 else torch.cat(parts)
            outputs = iter(view_outputs(self.network, batch, cfg, compute).split(len(parts[0])))
        results: list[np.ndarray | DecodeError] = []
        for source, views in zip(sources, found):
            if isinstance(views, DecodeError):
                results.append(views)
                continue
            pooled = pool(next(outputs), cfg).numpy()
            if np.isfinite(pooled).all():
                results.append(pooled)
            else:
                name = source if isinstance(source, str) else "the frames"
                results.append(DecodeError(f"{name}: the model's outputs are not finite"))
        return results


def new_network(cfg: CfgNode) -> nn.Module:
    """Build the network of a config; the global random state stays unchanged."""
    try:
        with torch.random.fork_rng(devices=[]):
            # With TRAIN.ENABLE, build_model would also measure kernels for training batches.
            return build_model(with_overrides(cfg, ["TRAIN.ENABLE", False]))
    except (RuntimeError, MemoryError, TypeError) as error:  # the layers are too large
        raise ConfigError(f"cannot build the model of this config: {first_line(error)}") from None


def _attention_overrides(cfg: CfgNode, attention: str | None, options: dict[str, Any]) -> list[Any]:
    name, preset = resolve_attention(chosen_estimator(cfg) if attention is None else attention)
    keys = {key: f"VIT.{name}.{key}".upper() for key in estimator_options(name)}
    keys["num_landmarks"] = "VIT.APPROX_ATTN_DIM"
    # Estimators require ATTN_DROPOUT 0 in the config; inference applies no dropout anyway.
    overrides: list[Any] = ["VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_DROPOUT", 0.0]
    for key, value in {**preset, **options}.items():
        if key not in keys:
            raise InputError(f"unknown option {key!r} of {name}; must be one of {', '.join(keys)}")
        overrides += [keys[key], value.item() if isinstance(value, np.generic) else value]
    return overrides


def with_views(cfg: CfgNode, views: int | None) -> CfgNode:
    """Set the number of views: 3 crops per clip if `views` is a multiple of 3, else 1 crop."""
    if views is None:
        return cfg
    if not isinstance(views, (int, np.integer)) or not 1 <= views <= MAX_VIEWS:
        raise InputError(f"views is {views!r}; must be an integer from 1 to {MAX_VIEWS}")
    crops = 1 if views % 3 else 3
    clips = int(views) // crops
    return with_overrides(cfg, ["TEST.NUM_ENSEMBLE_VIEWS", clips, "TEST.NUM_SPATIAL_CROPS", crops])


def check_positive(name: str, number: object) -> None:
    if number is None:
        return
    if not isinstance(number, (int, float, np.number)) or not 0 < number <= _MAX_NUMBER:
        raise InputError(f"{name} is {number!r}; must be positive and at most {_MAX_NUMBER:g}")


def _as_list(videos: VideoInput | VideoInputs) -> VideoInputs:
    return videos if isinstance(videos, (list, tuple)) else [videos]


def _or_error(read: Callable[..., T], *arguments: Any) -> T | DecodeError:
    try:
        return read(*arguments)
    except DecodeError as error:
        return error


def _source(video: VideoInput, fps: float | None) -> FrameSource:
    if isinstance(video, (str, os.PathLike)):
        return os.fspath(video)
    if not isinstance(video, (np.ndarray, Tensor)):
        raise _invalid_video(video)
    return FrameArray(_as_array(video), fps)


def _as_array(frames: Any) -> np.ndarray:
    try:
        return frames.detach().cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
    except (TypeError, ValueError, RuntimeError):
        # NumPy cannot hold sparse tensors, ragged lists and some dtypes of PyTorch.
        raise _invalid_video(frames) from None


def _invalid_video(video: object) -> InputError:
    kind = type(video).__name__ + (f" of {video.dtype}" if isinstance(video, Tensor) else "")
    return InputError(f"expected a path or uint8 frames [T, H, W, 3], got {kind}")
