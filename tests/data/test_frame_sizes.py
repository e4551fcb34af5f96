"""Frames whose scaled size would exhaust memory are refused by every reader."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from slowfast_lara.data import load_views
from slowfast_lara.data.display import MAX_ASPECT, check_size
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.sources import open_frames
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import DecodeError
from slowfast_lara.prepare.check import check_video
from slowfast_lara.report.sections import thumbnail
from tests.helpers.videos import config, write_image, write_video

NARROW = (16, 2000)  # scaled to 224 pixels, a frame would be 224 x 28000


@pytest.fixture(scope="module", params=["video", "images"])
def narrow(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    if request.param == "video":
        return write_video(folder / "narrow.mp4", 8, size=NARROW)
    for number in range(8):
        write_image(folder / f"{number}.png", np.zeros((*NARROW, 3), np.uint8))
    return folder


def refused(read) -> None:
    with pytest.raises(DecodeError, match="frames of 2000x16 pixels") as caught:
        read()
    assert "\n" not in str(caught.value)


def test_all_readers_refuse(narrow):
    cfg = config(TEST__DATASET="Ssv2")
    refused(lambda: load_views(str(narrow), cfg))
    refused(lambda: thumbnail(str(narrow)))

    def stream() -> None:
        with open_frames(str(narrow)) as (_, frames):
            list(frames)

    refused(stream)


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_datasets_refuse(narrow, tmp_path, mode):
    whole = write_video(tmp_path / "whole.mp4")
    lines = [f"{narrow} 1\n"] + [f"{whole} 2\n"] * 20
    (tmp_path / f"{mode}.csv").write_text("".join(lines))
    kind = Ssv2 if narrow.is_dir() else Kinetics
    found = kind(config(DATA__PATH_TO_DATA_DIR=str(tmp_path)), mode)[0]
    reason = found.error if mode == "test" else found.failures[0].reason
    assert "frames of 2000x16 pixels" in reason


def test_data_check_refuses(narrow):
    if narrow.is_file():
        assert "frames of 2000x16 pixels" in check_video(str(narrow))


def test_size_limits():
    check_size(8192, 8192)
    check_size(100, 100 * MAX_ASPECT)
    check_size(100 * MAX_ASPECT, 100)
    for size in ((8192, 8193), (100, 100 * MAX_ASPECT + 1), (100 * MAX_ASPECT + 1, 100)):
        with pytest.raises(ValueError, match=f"{size[1]}x{size[0]}"):
            check_size(*size)


def test_an_image_is_refused_before_its_pixels_are_read(tmp_path):
    """The header has 80 million pixels; the file has no pixel data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    (tmp_path / "1.png").write_bytes(
        start + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    with pytest.raises(DecodeError, match="9000x9000"):
        load_views(str(tmp_path), config(TEST__DATASET="Ssv2"))


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n123", b"BM\x00\x00"])
def test_errors_of_damaged_images_are_one_line(tmp_path, content):
    (tmp_path / "1.png").write_bytes(content)
    with pytest.raises(DecodeError, match="1.png") as caught:
        load_views(str(tmp_path), config(TEST__DATASET="Ssv2"))
    assert "\n" not in str(caught.value)
