from __future__ import annotations

import pytest

from tests.helpers.datasets import make_synthetic


def flags(**values: object) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    """Videos of all 12 classes."""
    folder = tmp_path_factory.mktemp("synthetic")
    make_synthetic(folder, *flags(classes=12, train=50, val=13, test=7, size=48, frames=16, seed=3))
    return folder


@pytest.fixture(scope="session")
def synthetic_frames(tmp_path_factory):
    """Extracted frames, as for Something-Something-v2."""
    folder = tmp_path_factory.mktemp("synthetic_frames")
    make_synthetic(
        folder, *flags(classes=5, train=20, val=7, test=6, size=48, frames=20, form="frames")
    )
    return folder
