"""Files of weights are read as data, strictly; what is wrong with one is said in a line."""

import numpy as np
import pytest
import torch

from slowfast_lara.models.weights.pretrained import load_pretrained

from .made_up_weights import DIM, build, refused, safetensors, save, vit, write_safetensors


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
