"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import ahead_of_time, compiled_kernels
from benchmarks import kernel_traffic as traffic
from benchmarks.ahead_of_time import Form
from slowfast_lara.attention import ESTIMATORS, build_estimator, importance_sampling
from slowfast_lara.attention.kernels import choice, temporal
from slowfast_lara.attention.kernels.key_stats import key_stats
from slowfast_lara.attention.kernels.measure import Operator
from slowfast_lara.attention.kernels.tiles import tile
from slowfast_lara.attention.kernels.verdicts import Call
from slowfast_lara.config import load_config
from slowfast_lara.config.shipped import find_config
from slowfast_lara.errors import ConfigError
from slowfast_lara.models import build
from tests.helpers.small_models import small_config

ROOT = Path(__file__).resolve().parents[2]
# Not imported here: Triton selects its interpreter when it is imported.
INTERPRETED = "tests.helpers.interpreted"


def interpreted(group: str) -> dict[str, str]:
    """The result of each case of a group, from a process with the interpreter."""
    code = f"from {INTERPRETED} import *; main(list({group}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


def assert_passed(results: dict[str, str], least: int) -> None:
    assert len(results) >= least
    failed = {name: result for name, result in results.items() if result != "passed"}
    assert not failed, "\n".join(f"{name}: {result}" for name, result in failed.items())


def test_small_cases_in_the_interpreter():
    assert_passed(interpreted("FAST"), 8)


@pytest.mark.slow
def test_all_cases_in_the_interpreter():
    assert_passed(interpreted("SLOW"), 40)


@pytest.mark.slow
def test_all_ranks_use_the_choice_of_rank_0(tmp_path):
    """Rank 1 cannot measure; only the first rank of the node compiles the kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", f"from {INTERPRETED} import *; {call}"],
            env={
                **environment,
                "LOCAL_RANK": str(rank),
                "XDG_CACHE_HOME": str(tmp_path / f"cache{rank}"),
            },
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, call in enumerate(
            f"as_rank({rank}, {str(tmp_path / 'store')!r})" for rank in (0, 1)
        )
    ]
    output = [process.communicate(timeout=600)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0], output
    for lines, launches in zip(output, (2, 0)):
        assert f"decision True launches {launches}" in lines
        (line,) = (line for line in lines if line.startswith("  temporal"))
        assert " ".join(line.split()) == "temporal 2 float16 Triton 2.000 1.000 2.00 x"


def forms_of(name: str) -> tuple[list[Form], list[Form]]:
    """Forms of a training step of a shipped config, and those that its measurement compiles."""
    cfg = compiled_kernels.configs_with_kernels([name])[name]
    meta, launches = torch.device("meta"), []
    one_block = load_config(find_config(name), {"VIT.DEPTH": 1})
    for call in build.calls_of(one_block, ["TRAIN"], torch.bfloat16):
        operator = Operator(call.description(), meta)
        for batch in (1, operator.batch):
            launches += ahead_of_time.recorded_launches(operator.step("triton", batch))
    step = compiled_kernels.step_launches(cfg, torch.bfloat16)
    return ahead_of_time.forms(step), ahead_of_time.forms(launches)


@pytest.mark.parametrize("name", ["K400/lara_224_16x4", "K400/merged_336_16x8"])
def test_the_measurement_compiles_what_a_step_launches(name):
    step, measured = forms_of(name)
    assert len(step) >= 12 and step == measured


@pytest.mark.slow
def test_every_shipped_config_compiles_its_kernels_before_the_first_step():
    names = list(compiled_kernels.configs_with_kernels())
    assert len(names) > 40
    for name in names:
        step, measured = forms_of(name)
        assert len(step) >= 6 and step == measured, name


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_kernels_compile_without_spills(arch):
    names = ["combine_forward", "key_stats_forward", "temporal_scores"]
    rows = compiled_kernels.compiled_kernels(names, [arch]).kernels
    assert {row.form.kernel.split(".")[1] for row in rows} == set(names)
    assert all(row.fits() for row in rows), rows


def test_the_committed_table():
    """Kernels fit into shared memory and do not spill registers."""
    text = (ROOT / "results" / "kernels_ahead_of_time.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    assert {row["GPU"] for row in rows} == {f"sm_{arch}" for arch in ahead_of_time.SHARED_MEMORY}
    for row in rows:
        limit = ahead_of_time.SHARED_MEMORY[int(row["GPU"].removeprefix("sm_"))]
        assert int(row["shared memory"]) <= limit and row["spills"] == "0", row


@pytest.mark.parametrize("frames", [3, 20, 40])
def test_temporal_tiles_have_16_frames_except_for_the_scores(frames, monkeypatch):
    blocks = {}

    def record(kernel, on, *args, **constants):
        name = kernel.removeprefix("temporal.")
        blocks[name] = {**tile(name, element_size=on.element_size()), **constants}.get("BLOCK_F")

    monkeypatch.setattr(temporal, "launch", record)
    tokens = (torch.zeros(1, 5, 2, 8), torch.zeros(1, frames, 5, 16))
    weights = (torch.zeros(32, 16), torch.zeros(32), True)
    attention = temporal.temporal(*tokens, *weights)[1]
    temporal.temporal_backward(*tokens, *weights, attention, tokens[0])
    assert blocks.pop("temporal_scores") == (16 if frames == 3 else 32)
    assert set(blocks.values()) == {16} and len(blocks) == 3


@pytest.mark.parametrize("kernels", choice.KERNELS)
def test_torch_compile_traces_the_choice_in_one_graph(kernels):
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if choice.uses_triton(kernels, "temporal", [x], {}) else x

    whole = torch.compile(chosen, fullgraph=True, backend="eager")
    assert whole(torch.zeros(2)).tolist() == ([1, 1] if kernels == "triton" else [0, 0])


def test_torch_compile_and_fake_tensors_obey_the_decision(monkeypatch):
    half = torch.zeros(3, 2, dtype=torch.float16)
    call = Call("temporal", {"project_values": True}, [half])
    monkeypatch.setattr(choice, "DECISIONS", {(half.device, *call.key()): True})

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if choice._decision(call._replace(tensors=[x])) else x

    whole = torch.compile(chosen, fullgraph=True, backend="eager")
    assert whole(half).tolist() == [[1, 1]] * 3
    assert whole(half[:1]).tolist() == [[1, 1]]  # the batch size is not part of the key
    assert whole(half.bfloat16()).sum() == 0
    with FakeTensorMode():
        for width, decision in ((2, True), (4, False)):
            x = torch.empty(5, width, dtype=torch.float16)
            assert choice._decision(call._replace(tensors=[x])) is decision


def test_estimators_work_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import slowfast_lara.attention as a, torch;"
        "estimator = a.build_estimator('lara', head_dim=8, num_landmarks=4);"
        "print(estimator(*torch.ones(3, 1, 1, 8, 8)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "torch.Size([1, 1, 8, 1, 8])" in done.stdout, done.stderr


def test_kernels_triton_raises_where_it_is_unsupported(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.ones(1, 1, 8, 8)
    for name in ESTIMATORS:
        for kernels in ("auto", "torch"):  # on a CPU both run PyTorch's operations
            estimator = build_estimator(name, head_dim=8, num_landmarks=4, kernels=kernels)
            assert estimator(q, q, q).shape == (1, 1, 8, 1, 8)
    with pytest.raises(ValueError, match="triton.* does not support nystrom"):
        build_estimator("nystrom", head_dim=8, kernels="triton")
    with pytest.raises(ValueError, match="'fast'; must be one of auto, torch, triton"):
        build_estimator("lara", head_dim=8, kernels="fast")
    with pytest.raises(ValueError, match="more than 256 landmarks or samples \\(400\\)"):
        options = {"num_landmarks": 200, "features": "hyperbolic"}
        build_estimator("performer", head_dim=8, kernels="triton", **options)
    with pytest.raises(ValueError, match="head size above 128"):
        build_estimator("lara", head_dim=160, kernels="triton")
    for options, size in (
        ({"num_landmarks": 129}, "groups than 128 \\(129\\)"),
        ({"num_landmarks": 34, "rounds": 1}, "centres in a round than 32 \\(33\\)"),
    ):
        with pytest.raises(ValueError, match=f"does not support more {size}"):
            build_estimator("merged", head_dim=8, kernels="triton", **options)
    merged = build_estimator("merged", head_dim=8, num_landmarks=4, kernels="triton")
    half = torch.empty(1, 1, 1025, 8, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match="more keys in a frame than 1024 \\(1025\\)"):
        merged(half, half, half)
    with pytest.raises(ValueError, match="does not support merged keys in float32"):
        merged(q, q, q)
    estimator = build_estimator("lara", head_dim=8, num_landmarks=4, kernels="triton")
    with pytest.raises(ValueError, match="NVIDIA GPU, got device 'cpu' .*TRITON_INTERPRET=1"):
        estimator(q, q, q)
    with pytest.raises(ValueError, match="does not support float64"):
        estimator(q.double(), q.double(), q.double())
    assert not choice.uses_triton("auto", "temporal", [q.to("meta")], {})


@pytest.mark.parametrize(
    "layer, attention, allowed",
    [
        ("trajectory", "none", True),
        ("trajectory", "nystrom", True),
        ("joint", "lara", True),
        ("joint", "merged", True),
        ("joint", "nystrom", False),
        ("divided", "none", False),
    ],
)
def test_kernels_triton_in_a_config_requires_a_kernel(tmp_path, layer, attention, allowed):
    import yaml

    file = tmp_path / "config.yaml"
    vit = {"ATTN_LAYER": layer, "APPROX_ATTN_TYPE": attention, "KERNELS": "triton"}
    file.write_text(yaml.safe_dump(small_config(**vit)))
    if allowed:
        assert load_config(file).VIT.KERNELS == "triton"
    else:
        with pytest.raises(ConfigError, match="VIT.KERNELS is 'triton'.*kernel"):
            load_config(file)


@pytest.mark.parametrize(
    "vit, size",
    [
        ({"APPROX_ATTN_TYPE": "performer", "APPROX_ATTN_DIM": 300}, "samples \\(300\\)"),
        (
            {
                "APPROX_ATTN_TYPE": "performer",
                "APPROX_ATTN_DIM": 200,
                "PERFORMER": {"FEATURES": "hyperbolic"},
            },
            "samples \\(400\\)",
        ),
        ({"APPROX_ATTN_TYPE": "lara", "EMBED_DIM": 320, "NUM_HEADS": 2}, "128 \\(160\\)"),
        ({"APPROX_ATTN_TYPE": "merged", "ATTN_LAYER": "joint", "PATCH_SIZE": 1}, "1024 \\(2048\\)"),
    ],
)
def test_the_config_rejects_sizes_without_a_kernel(tmp_path, vit, size):
    import yaml

    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(small_config(**{"APPROX_ATTN_DIM": 8, **vit})))
    load_config(file)
    with pytest.raises(ConfigError, match=f"VIT.KERNELS is 'triton'.*{size}"):
        load_config(file, ["VIT.KERNELS", "triton"])


def test_amd_gpus_are_rejected(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choice.obstacle(torch.device("cuda", 0)) == ""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD" in choice.obstacle(torch.device("cuda", 0))


def test_the_interpreter_rejects_bfloat16(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.ones(1, 1, 8, 8)
    assert choice.uses_triton("triton", "temporal", [q])
    with pytest.raises(ValueError, match="interpreter .*bfloat16"):
        choice.uses_triton("triton", "temporal", [q.bfloat16()])


def operators_of(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name
            if name in traffic.OPERATORS:
                found.append(name)
                launches = traffic.OPERATORS[name](*args)
                assert launches and all(x.bytes > 0 and x.flops > 0 for x in launches)
            return function(*args, **(kwargs or {}))

    with Record():
        model(*inputs, num_frames=2).sum().backward()
    return found


def test_every_operator_has_a_traffic_model():
    q, k, v = (torch.empty(2, 2, 12, 8, device="meta", requires_grad=True) for _ in range(3))
    lara = build_estimator("lara", head_dim=8, num_landmarks=5, kernels="triton")
    forward = ["landmarks", "landmarks", "proposals", "key_stats", "combine"]
    backward = [f"{name}_backward" for name in reversed(forward)]
    expected = [f"slowfast_lara::{name}" for name in forward + backward]
    assert operators_of(lara, (q, k, v)) == expected
    merged = build_estimator("merged", head_dim=8, num_landmarks=3, kernels="triton")
    expected = ["slowfast_lara::merged", "slowfast_lara::merged_backward"]
    assert operators_of(merged, (x.bfloat16() for x in (q, k, v))) == expected
    wide, half = (traffic.combine_forward(8, 12, 1568, 8, 128, 64, size, True) for size in (4, 2))
    assert sum(x.bytes for x in half) < 0.6 * sum(x.bytes for x in wide)


def test_keys_and_values_are_converted_to_the_dtype_of_the_queries(monkeypatch):
    """The kernels do not compile for half-precision queries with float32 values."""
    dtypes = []

    def record(w, k, v, *rest):
        dtypes.extend([k.dtype, v.dtype])
        return key_stats(w, k, v, *rest)

    monkeypatch.setattr(importance_sampling, "key_stats", record)
    q, k, v = torch.empty(3, 1, 2, 12, 8, device="meta").unbind()
    lara = build_estimator("lara", head_dim=8, num_landmarks=5, kernels="triton")
    assert lara(q.half(), k.half(), v, num_frames=2).dtype == torch.float16
    assert dtypes == [torch.float16] * 2
