"""Files of weights are read as data, strictly; what is wrong with one is said in a line."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.models.weights.pretrained import load_pretrained
from tests.helpers.made_up_weights import (
    DIM,
    build,
    refused,
    safetensors,
    save,
    vit,
    vit_npz,
    write_safetensors,
)


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a file was run')",))


def test_no_code_in_a_file_is_run(tmp_path):
    torch.save({"model_state": vit(), "cfg": Trap()}, tmp_path / "trap.pyth")
    assert "could run code" in refused(build(), tmp_path / "trap.pyth")
    np.savez(tmp_path / "trap.npz", cls=np.array([Trap()], dtype=object))
    assert "trap.npz" in refused(build(), tmp_path / "trap.npz")


def test_damaged_and_missing_files(tmp_path):
    assert "No such file" in refused(build(), tmp_path / "none.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    refused(build(), tmp_path / "empty.pth")
    (tmp_path / "text.pth").write_text("not a checkpoint, a page of text that says 404")
    assert "starts with b'not a che'" in refused(build(), tmp_path / "text.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    assert "no weights" in refused(build(), tmp_path / "list.pth")
    torch.save({"epoch": 3, "teacher": vit()}, tmp_path / "wrapped.pth")
    assert "found: 'epoch', 'teacher'" in refused(build(), tmp_path / "wrapped.pth")
    for form in ("pth", "npz", "safetensors"):
        whole = save(tmp_path, form, vit()).read_bytes()
        cut = tmp_path / f"cut.{form}"
        cut.write_bytes(whole[: len(whole) // 2])
        refused(build(), cut)
    flipped = bytearray(save(tmp_path, "pth", vit()).read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    (tmp_path / "flipped.pth").write_bytes(bytes(flipped))
    refused(build(), tmp_path / "flipped.pth")


def test_the_content_decides_and_not_the_name(tmp_path):
    for form in ("pth", "npz", "safetensors"):
        for suffix in ("pth", "npz", "safetensors"):
            path = tmp_path / f"really_{form}.{suffix}"
            path.write_bytes(save(tmp_path, form, vit()).read_bytes())
            assert "blocks.0.norm1.weight" in load_pretrained(build(), path).loaded


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to("meta"),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([x[0]]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_kinds(tmp_path, convert):
    state = vit()
    torch.save({**state, "cls_token": convert(state["cls_token"])}, tmp_path / "x.pth")
    assert "cannot read " in refused(build(), tmp_path / "x.pth")


def test_weights_of_eight_bits(tmp_path):
    state, model = vit(), build()
    state["norm.weight"] = state["norm.weight"].to(torch.float8_e5m2)
    load_pretrained(model, save(tmp_path, "pth", state))
    assert torch.equal(model.norm.weight, state["norm.weight"].float())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h, n: h[n].update(shape=[2, 2]),
        lambda h, n: h[n].update(shape=[-1, DIM]),
        lambda h, n: h[n].update(dtype="F8"),
        lambda h, n: h[n].update(data_offsets=[0, 10**12]),
        lambda h, n: h[n].update(data_offsets=[-4, 4]),
        lambda h, n: h[n].update(data_offsets=["0", "4"]),
        lambda h, n: h[n].pop("shape"),
        lambda h, n: h.pop(n),
        lambda h, n: h.update({n: "text"}),
    ],
)
def test_safetensors_are_checked_strictly(tmp_path, spoil):
    header, data = safetensors(vit())
    spoil(header, "cls_token")
    refused(build(), write_safetensors(tmp_path / "x.safetensors", header, data))


def test_safetensors_without_overlap_and_rest(tmp_path):
    header, data = safetensors(vit())
    longer = write_safetensors(tmp_path / "longer.safetensors", header, data + b"rest")
    assert "bytes of tensors" in refused(build(), longer)
    header["norm.bias"]["data_offsets"] = header["norm.weight"]["data_offsets"]
    shared = write_safetensors(tmp_path / "shared.safetensors", header, data)
    assert "norm." in refused(build(), shared)
    header, data = safetensors(vit())
    last = list(header)[-1]
    size = header[last]["data_offsets"][1] - header[last]["data_offsets"][0]
    # Into the tensor before it, and nothing left over at the end.
    header[last]["data_offsets"] = [n - size for n in header[last]["data_offsets"]]
    overlapping = write_safetensors(tmp_path / "overlapping.safetensors", header, data[:-size])
    assert "are expected" in refused(build(), overlapping)


def test_safetensors_of_half_precision(tmp_path):
    state, model = {n: x.half() for n, x in vit().items()}, build()
    load_pretrained(model, write_safetensors(tmp_path / "x.safetensors", *safetensors(state)))
    assert torch.equal(model.norm.weight, state["norm.weight"].float())


def zeros_packed(path, name, size, method=zipfile.ZIP_DEFLATED):
    """An archive with `size` zeros, as NumPy writes an array of bytes."""
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        start, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    )
    with (
        zipfile.ZipFile(path, "w", method, compresslevel=1) as archive,
        archive.open(name, "w") as entry,
    ):
        entry.write(start.getvalue())
        for _ in range(size // 2**20):
            entry.write(bytes(2**20))
    return path


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bombs")
    files = {"x.npz": "cls.npy", "x.pth": "archive/data/0"}
    return [zeros_packed(folder / file, name, 600 * 2**20) for file, name in files.items()]


def test_a_small_file_does_not_unpack_to_a_large_one(bombs):
    for bomb in bombs:
        assert bomb.stat().st_size < 4 * 2**20
        assert "bytes stand for 629" in refused(build(), bomb)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_that_say_a_small_size_for_a_large_one(tmp_path, method):
    """Python unpacks these kinds whole, beyond the size they say."""
    path = zeros_packed(tmp_path / "bomb.npz", "cls.npy", 2**20, method)
    assert "neither plainly nor by deflate" in refused(build(), path)


UNDER_A_LIMIT = """
import resource, sys
from slowfast_lara.errors import WeightsError
from slowfast_lara.models.weights.files import read_weights
with open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + 60 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    try:
        read_weights(path)
    except WeightsError as error:
        print(error)
"""


def test_they_are_refused_before_they_take_memory(bombs):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, *map(str, bombs)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.count("bytes stand for 629") == 2


def test_compressed_weights_are_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **vit_npz(vit()))
    assert "blocks.0.norm1.weight" in load_pretrained(build(), tmp_path / "x.npz").loaded


@pytest.mark.parametrize("form", ["pth", "pth-old"])
def test_a_tensor_that_repeats_itself_for_ever(tmp_path, form):
    state = {**vit(), "pos_embed": torch.zeros(1).expand(1, 10**9 + 1, DIM)}
    assert "bytes stand for" in refused(build(), save(tmp_path, form, state))


def test_values_within_values_without_end(tmp_path):
    key = value = ("x",)
    for _ in range(40):
        value = (value,) * 9
    torch.save({key: [value, value]}, tmp_path / "x.pth")
    assert "found: tuple" in refused(build(), tmp_path / "x.pth")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: entry.replace("[1, 1, 24]", "[" + "9" * 5000 + "]"),
        lambda entry: entry.replace("[1, 1, 24]", f"[{2**63}]"),
        lambda entry: entry.replace("[1, 1, 24]", "[NaN]"),
        lambda entry: entry.replace("[1, 1, 24]", "[" * 100_000),
        lambda entry: entry.replace("[1, 1, 24]", "[" + "1, " * 1000 + "24]"),
        lambda entry: entry.replace('"F32"', '"' + "F" * 5000 + '"'),
        lambda entry: entry + " " * 10_000_000,
    ],
)
def test_headers_of_safetensors_without_end(tmp_path, spoil):
    header, data = safetensors(vit())
    text = spoil(json.dumps(header)).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert len(refused(build(), path)) < 400 + len(str(path))
