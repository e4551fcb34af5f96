"""Reading of weight files: formats, damaged files, and files that attack the reader."""

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
        return (exec, ("raise SystemExit('executed code of a file')",))


def test_code_in_a_file_is_not_executed(tmp_path):
    torch.save({"model_state": vit(), "cfg": Trap()}, tmp_path / "trap.pyth")
    assert "could run code" in refused(build(), tmp_path / "trap.pyth")
    np.savez(tmp_path / "trap.npz", cls=np.array([Trap()], dtype=object))
    assert "trap.npz" in refused(build(), tmp_path / "trap.npz")


def test_damaged_and_missing_files(tmp_path):
    assert "No such file" in refused(build(), tmp_path / "none.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    refused(build(), tmp_path / "empty.pth")
    (tmp_path / "text.pth").write_text("not a checkpoint, a page with the text 404")
    assert "b'not a che'" in refused(build(), tmp_path / "text.pth")
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


def test_format_is_determined_by_content(tmp_path):
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
def test_tensors_that_are_not_dense(tmp_path, convert):
    state = vit()
    torch.save({**state, "cls_token": convert(state["cls_token"])}, tmp_path / "x.pth")
    assert "cannot read " in refused(build(), tmp_path / "x.pth")


def test_float8_weights(tmp_path):
    state, model = vit(), build()
    state["norm.weight"] = state["norm.weight"].to(torch.float8_e5m2)
    load_pretrained(model, save(tmp_path, "pth", state))
    assert torch.equal(model.norm.weight, state["norm.weight"].float())


@pytest.mark.parametrize(
    "corrupt",
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
def test_malformed_safetensors_are_refused(tmp_path, corrupt):
    header, data = safetensors(vit())
    corrupt(header, "cls_token")
    refused(build(), write_safetensors(tmp_path / "x.safetensors", header, data))


def test_safetensors_with_overlap_or_trailing_bytes_are_refused(tmp_path):
    header, data = safetensors(vit())
    longer = write_safetensors(tmp_path / "longer.safetensors", header, data + b"rest")
    refused(build(), longer)
    header["norm.bias"]["data_offsets"] = header["norm.weight"]["data_offsets"]
    shared = write_safetensors(tmp_path / "shared.safetensors", header, data)
    refused(build(), shared)
    header, data = safetensors(vit())
    last = list(header)[-1]
    size = header[last]["data_offsets"][1] - header[last]["data_offsets"][0]
    # The last tensor overlaps the one before it, and no bytes are left over.
    header[last]["data_offsets"] = [n - size for n in header[last]["data_offsets"]]
    overlapping = write_safetensors(tmp_path / "overlapping.safetensors", header, data[:-size])
    refused(build(), overlapping)


def test_half_precision_safetensors(tmp_path):
    state, model = {n: x.half() for n, x in vit().items()}, build()
    load_pretrained(model, write_safetensors(tmp_path / "x.safetensors", *safetensors(state)))
    assert torch.equal(model.norm.weight, state["norm.weight"].float())


def archive_of_zeros(path, name, size, method=zipfile.ZIP_DEFLATED):
    """A zip archive with a NumPy array of `size` zero bytes."""
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
    return [archive_of_zeros(folder / file, name, 600 * 2**20) for file, name in files.items()]


def test_decompression_bombs_are_refused(bombs):
    for bomb in bombs:
        assert bomb.stat().st_size < 4 * 2**20
        assert "expand to 629" in refused(build(), bomb)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_methods_are_refused(tmp_path, method):
    """Python decompresses these beyond the declared size."""
    path = archive_of_zeros(tmp_path / "bomb.npz", "cls.npy", 2**20, method)
    assert "compression" in refused(build(), path)


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


def test_bombs_are_refused_before_memory_is_allocated(bombs):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, *map(str, bombs)],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.count("expand to 629") == 2


def test_compressed_weights(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **vit_npz(vit()))
    assert "blocks.0.norm1.weight" in load_pretrained(build(), tmp_path / "x.npz").loaded


@pytest.mark.parametrize("form", ["pth", "pth-old"])
def test_expanded_tensors_are_refused(tmp_path, form):
    state = {**vit(), "pos_embed": torch.zeros(1).expand(1, 10**9 + 1, DIM)}
    assert "expand to" in refused(build(), save(tmp_path, form, state))


def test_deeply_nested_values_are_not_printed(tmp_path):
    key = value = ("x",)
    for _ in range(40):
        value = (value,) * 9
    torch.save({key: [value, value]}, tmp_path / "x.pth")
    assert "found: tuple" in refused(build(), tmp_path / "x.pth")


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda entry: entry.replace("[1, 1, 24]", "[" + "9" * 5000 + "]"),
        lambda entry: entry.replace("[1, 1, 24]", f"[{2**63}]"),
        lambda entry: entry.replace("[1, 1, 24]", "[NaN]"),
        lambda entry: entry.replace("[1, 1, 24]", "[" * 100_000),
        lambda entry: entry.replace("[1, 1, 24]", "[" + "1, " * 1000 + "24]"),
        lambda entry: entry.replace('"F32"', '"' + "F" * 5000 + '"'),
    ],
)
def test_malformed_safetensors_headers_give_short_errors(tmp_path, corrupt):
    header, data = safetensors(vit())
    text = corrupt(json.dumps(header)).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert len(refused(build(), path)) < 400 + len(str(path))
