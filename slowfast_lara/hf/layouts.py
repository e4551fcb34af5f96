"""Layout of the tokens in vision models of transformers, by their config.

A sequence has `prefix` tokens (CLS, registers, distillation), then the patches of the frames,
frame-major. A frame here is a temporal token: `tubelet_size` frames of the clip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class TokenLayout(NamedTuple):
    """Number of prefix tokens, and either number of frames or number of patches per frame."""

    prefix: int = 0
    frames: int = 1
    # If not 0, the number of frames follows from the sequence length, and `frames` is ignored.
    patches_of_frame: int = 0

    def frames_of(self, tokens: int) -> int:
        """Number of frames in a sequence; 1 if its length does not fit the layout."""
        patches = tokens - self.prefix
        if self.patches_of_frame:
            whole = patches % self.patches_of_frame == 0
            return patches // self.patches_of_frame if whole else 1
        return self.frames if patches % self.frames == 0 else 1


def _cls_and_registers(config: Any) -> int:
    return 1 + config.num_register_tokens


# Number of prefix tokens by `config.model_type`, as a number or a function of the config. Models
# that are not listed have none.
_PREFIX: dict[str, int | Callable[[Any], int]] = {
    "altclip_vision_model": 1,
    "beit": 1,
    "blip_2_vision_model": 1,
    "chinese_clip_vision_model": 1,
    "clip_vision_model": 1,
    "data2vec-vision": 1,
    "deit": 2,
    "dinov2": 1,
    "dinov2_with_registers": _cls_and_registers,
    "dinov3_vit": _cls_and_registers,
    "instructblip_vision_model": 1,
    "internvl_vision": 1,
    "metaclip_2_vision_model": 1,
    "mlcd_vision_model": 1,
    "vit": 1,
    "vit_mae": 1,
    "vit_msn": 1,
    "vivit": 1,
    "xclip_vision_model": 1,
}


def token_layout(config: Any) -> TokenLayout:
    """The layout of a model's sequences; no prefix and one frame for unknown model types."""
    kind = getattr(config, "model_type", "")
    count = _PREFIX.get(kind, 0)
    prefix = count if isinstance(count, int) else count(config)
    if kind == "videomae":
        return TokenLayout(prefix, max(1, config.num_frames // config.tubelet_size))
    if kind == "vivit":
        return TokenLayout(prefix, max(1, config.num_frames // config.tubelet_size[0]))
    if kind == "vjepa2":  # its crop size is fixed, its number of frames is not
        return TokenLayout(prefix, patches_of_frame=(config.crop_size // config.patch_size) ** 2)
    return TokenLayout(prefix)
