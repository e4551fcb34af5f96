"""Training steps and evaluation on the code paths of NVIDIA GPUs, with fake tensors.

Fake tensors have no data, so these tests find crashes, wrong devices and wrong dtypes, and which
backend computes the attention. They cannot find wrong values.
"""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fake_cuda import build_library
from slowfast_lara.attention import ESTIMATORS, has_kernels
from slowfast_lara.models.space_time import ATTENTION_LAYERS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
ATTENTIONS = ["none", *(name for name in ESTIMATORS if name != "softmax")]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    """The library of the fake device."""
    library = tmp_path_factory.mktemp("fake") / "a.so"
    build_library(library)
    return str(library)


def run(library: str, cases: list[str]) -> dict[str, dict[str, int]]:
    """Run cases in a process of their own; return the SDPA backends and operators of each case."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.fake_cuda", *cases]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": library}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    failed = [f"{case}: {result}" for case, result, _ in rows if result != "passed"]
    assert not failed, "\n".join(failed)
    assert [case for case, *_ in rows] == cases
    return {case: ast.literal_eval(used) for case, _, used in rows}


def assert_fused(used: dict[str, dict[str, int]]) -> None:
    """Every call of every case is computed by flash or memory-efficient attention."""
    for case, calls in used.items():
        assert "math" not in calls, (case, calls)
        if not case.startswith("trajectory:none:float32"):
            assert calls, case


def test_training_on_the_code_paths_of_a_gpu(library):
    used = run(
        library,
        [
            "trajectory:none:float16:auto",
            "trajectory:lara:bfloat16:torch",
            "joint:merged:bfloat16:triton",
            "timesformer:none:float32:auto",
        ],
    )
    assert_fused(used)
    assert set(used["trajectory:none:float16:auto"]) == {"flash", "temporal", "temporal_backward"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
def test_every_attention_in_pytorch(library, layer, precision):
    used = run(library, [f"{layer}:{name}:{precision}:torch" for name in ATTENTIONS])
    assert_fused(used)
    if precision != "float32":  # exact attention, also that of the CLS token, is flash
        assert set(used[f"{layer}:none:{precision}:torch"]) == {"flash"}


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_every_attention_with_kernels(library, kernels):
    """`auto` stands for a GPU on which Triton was measured to be faster."""
    pairs = itertools.product(ATTENTION_LAYERS, ATTENTIONS)
    with_kernels = [
        (layer, name)
        for layer, name in pairs
        if layer == "trajectory" or (name != "none" and has_kernels(name))
    ]
    cases = [f"{layer}:{name}:bfloat16:{kernels}" for layer, name in with_kernels]
    used = run(library, cases)
    assert_fused(used)
    for (layer, name), calls in zip(with_kernels, used.values()):
        expected = {"temporal", "temporal_backward"} if layer == "trajectory" else set()
        if name == "merged":
            expected |= {"merged", "merged_backward"}
        elif name != "none" and has_kernels(name):
            expected |= {"combine", "combine_backward", "key_stats", "key_stats_backward"}
        assert expected <= set(calls), (layer, name, calls)


@pytest.mark.slow
def test_compiled_steps(library):
    """One graph without breaks, with the kernels that were chosen before."""
    chosen = ("trajectory:none", "trajectory:lara", "joint:merged")
    cases = [f"{case}:bfloat16:auto:MODEL.COMPILE=True" for case in chosen]
    cases += ["trajectory:lara:bfloat16:torch:MODEL.COMPILE=True"]
    used = run(library, cases)
    combined = {"key_stats", "combine"}
    expected = [{"temporal"}, {"temporal", *combined}, {"merged"}, set()]
    for calls, operators in zip(used.values(), expected):
        assert operators <= set(calls) and bool(operators) == bool(calls)


@pytest.mark.slow
def test_options_of_training_and_of_estimators(library):
    assert_fused(
        run(
            library,
            [
                "trajectory:none:bfloat16:torch:MODEL.ACT_CHECKPOINT=True",
                "trajectory:lara:bfloat16:triton:MODEL.ACT_CHECKPOINT=True",
                "trajectory:none:bfloat16:auto:VIT.USE_ORIGINAL_TRAJ_ATTN_CODE=False",
                "trajectory:none:bfloat16:torch:VIT.NUM_HEADS=4",  # head size 12
                "joint:none:float32:torch:VIT.NUM_HEADS=16",  # head size 3
                "joint:ra:bfloat16:torch:VIT.RA.BIASED=True",
                *(
                    f"trajectory:lara:bfloat16:{kernels}:VIT.LARA.PROPOSAL={proposal}"
                    f":VIT.LARA.LANDMARKS=farthest:VIT.LARA.WEIGHTING={weighting}"
                    for kernels in ("torch", "triton")
                    for proposal, weighting in (
                        ("global", "balance"),
                        ("mixed", "coupled"),
                        ("mixture", "decoupled"),
                        ("single", "balance"),
                    )
                ),
            ],
        )
    )
