"""Roofline estimates: the counter of kernels, bytes and FLOPs, and upper bounds for our kernels."""

import sys

import pytest
import torch
from torch.nn import functional

from benchmarks.__main__ import main
from benchmarks.kernel_counts import Kernel, count_kernels
from benchmarks.roofline import DEVICES, LAUNCH, Sizes, seconds, spatial_counts, temporal_counts
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.models.attention_config import display_name
from tests.helpers.small_models import only_error

# LARA's spatial stage (bytes) and the temporal stage (seconds on an A100) before they had code
# paths for GPUs: forward and backward, 8 clips of 8 frames, counted by `count_kernels`.
FIRST_LARA_BYTES = {224: 27_931_508_744, 336: 62_011_800_584, 448: 109_711_626_248}
FIRST_TEMPORAL_SECONDS = {224: 3.822e-3, 336: 8.706e-3, 448: 15.531e-3}


def meta(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=grad)


def counted(function):
    return count_kernels(function)[0]


def test_bytes_of_known_operators():
    a, b = meta(6, 4), meta(4, 8)
    assert counted(lambda: a @ b) == [Kernel("mm", 1, 2 * (24 + 32 + 48), 2 * 6 * 4 * 8, True)]
    assert counted(lambda: a.t().view(4, 6).expand(3, 4, 6)) == []
    x, y = meta(5, 3, dtype=torch.float32, grad=False), meta(1, 3, dtype=torch.float32)
    assert counted(lambda: x.mul_(2)) == [Kernel("mul_", 1, 2 * 60, 0, False)]
    assert counted(lambda: x + y.expand(5, 3)) == [Kernel("add", 1, 60 + 12 + 60, 0, False)]
    assert counted(lambda: x.zero_()) == [Kernel("zero_", 1, 60, 0, False)]
    half = meta(5, 3, grad=False)
    assert counted(lambda: torch.log(x, out=half)) == [Kernel("log", 1, 60 + 30, 0, False)]


@pytest.mark.parametrize(
    "d, dtype, mask, kernel",
    [
        (64, torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (64, torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (68, torch.float32, False, "_scaled_dot_product_efficient_attention"),
        (65, torch.float32, False, "bmm"),
    ],
)
def test_attention_counts_as_the_kernel_that_a_gpu_chooses(d, dtype, mask, kernel):
    q, k, v = (meta(2, 3, n, d, dtype=dtype) for n in (50, 24, 24))
    bias = meta(2, 3, 50, 24, dtype=dtype) if mask else None
    kernels, out = count_kernels(
        lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    )
    assert kernel in [k.name for k in kernels]
    assert sum(k.flops for k in kernels) == 2 * 2 * 6 * 50 * 24 * d
    backward = counted(lambda: torch.autograd.grad(out, (q, k, v), torch.empty_like(out)))
    matmuls = 4 if kernel == "bmm" else 5  # a fused kernel recomputes the weights
    assert sum(k.flops for k in backward) == matmuls * 2 * 6 * 50 * 24 * d


def test_time_is_the_maximum_of_memory_and_arithmetic():
    a100 = DEVICES["A100"]
    assert seconds([Kernel("", 2, int(a100.bandwidth), 5, True)], a100) == 1 + 2 * LAUNCH
    assert seconds([Kernel("", 1, 5, int(a100.single), False)], a100) == 1 + LAUNCH


def both(kernels):
    return [kernel for direction in kernels for kernel in direction]


@pytest.mark.parametrize("crop", [224, 336, 448])
@pytest.mark.parametrize("weighting", ["decoupled", "balance", "coupled"])
def test_lara_in_torch_moves_at_most_a_fifth_of_the_first_version(crop, weighting):
    kernels = both(spatial_counts("lara", Sizes(crop, 8, 8, 128), weighting=weighting))
    assert sum(k.bytes for k in kernels) <= FIRST_LARA_BYTES[crop] / 5


@pytest.mark.parametrize("crop, ceiling", [(224, 0.87), (336, 0.6), (448, 0.37)])
def test_fused_lara_against_exact_attention(crop, ceiling):
    sizes, a100 = Sizes(crop, 8, 8, 128), DEVICES["A100"]
    fused = seconds(both(spatial_counts("lara", sizes, kernels="triton")), a100)
    assert fused <= ceiling * seconds(both(spatial_counts("softmax", sizes)), a100)


@pytest.mark.parametrize("crop", [224, 336, 448])
def test_fused_temporal_stage_against_the_first_version(crop):
    fused = both(temporal_counts(Sizes(crop, 8, 8, 128), kernels="triton"))
    assert seconds(fused, DEVICES["A100"]) <= 0.25 * FIRST_TEMPORAL_SECONDS[crop]


def test_only_unbiased_ra_materialises_attention_matrices():
    """Unfused attention would start with a matmul whose output has the size of the matrix."""
    for name in set(ESTIMATORS) - {"ra"}:
        kernels = both(spatial_counts(name, Sizes(224, 8, 8, 128)))
        assert max(k.bytes for k in kernels) < 2e9, name


def test_command_is_deterministic(tmp_path, capsys):
    flags = ["roofline", "--device", "H100", "--crops", "32", "48", "--frames", "2", "4"]
    texts = []
    for number in (1, 2):
        path = tmp_path / str(number)
        assert main([*flags, "--landmarks", "8", "--out", str(path)]) == 0
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        texts.append((capsys.readouterr().out, path.with_suffix(".csv").read_text()))
    assert texts[0] == texts[1]
    for name in map(display_name, ESTIMATORS):
        assert f"\n32,2,{name},forward," in texts[0][1]
        assert f"\n48,4,{name},backward," in texts[0][1]
    assert "counted, not measured" in texts[0][0]


def test_sizes_that_the_kernels_do_not_support(tmp_path):
    """A crop of 320 pixels has 300 landmarks, more than the kernels support; one of 128 has 64."""
    sizes = ["--crops", "128", "320", "--frames", "1", "--landmarks", "300"]
    assert main(["roofline", *sizes, "--out", str(tmp_path / "out")]) == 0
    rows = (tmp_path / "out.csv").read_text()
    assert '\n128,1,"lara, fused",forward' in rows and "\n320,1,lara,forward," in rows
    assert '\n320,1,"lara, fused"' not in rows


def test_unknown_device_and_crop(capsys):
    assert main(["roofline", "--device", "C64"]) == 2
    assert "'C64'; must be one of A100" in only_error(capsys)
    with pytest.raises(SystemExit) as ended:
        main(["roofline", "--crops", "100"])
    assert ended.value.code == 2
    assert "multiple of 16" in only_error(capsys)


def test_kernels_without_triton(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["kernels"]) == 2
    assert "triton" in only_error(capsys)


def test_unknown_kernel_and_architecture(capsys):
    for flags in (["--kernels", "no"], ["--archs", "75"]):
        assert main(["kernels", *flags]) == 2
        assert "must be one of" in only_error(capsys)


@pytest.mark.parametrize("crop, share", [(224, 0.55), (336, 0.43), (448, 0.25)])
def test_merged_keys_by_kernels_cost_a_share_of_exact_attention(crop, share):
    """Spatial stage, forward and backward, on an A100 by the roofline."""
    sizes, device = Sizes(crop, 8, 8, 128, 96), DEVICES["A100"]
    exact, merged = (
        seconds(both(spatial_counts(name, sizes, **options)), device)
        for name, options in (("softmax", {}), ("merged", {"kernels": "triton"}))
    )
    assert merged <= share * exact
