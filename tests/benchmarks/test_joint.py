"""Estimates for layers of models with joint attention."""

import csv

import pytest

from benchmarks.__main__ import main
from benchmarks.joint import ATTENTIONS, MODELS
from benchmarks.roofline import Sizes, rest_counts, spatial_counts, unsupported
from tests.helpers.small_models import only_error

# Tokens of a clip, by the models' papers (without CLS).
TOKENS = {
    ("VideoMAE-B", 16): 1568,
    ("ViViT-B", 32): 3136,
    ("V-JEPA 2-L", 64): 8192,
    ("V-JEPA 2-g", 64): 18432,
    ("DINOv2-B, joint", 8): 2048,
}


def test_flops_of_a_layer():
    sizes = Sizes(224, 16, 3, 128, width=384, heads=6, joint=True)
    N, D = 3136, 384
    forward, backward = spatial_counts("softmax", sizes)
    assert sum(k.flops for k in forward) == 3 * 4 * N * N * D
    assert sum(k.flops for k in backward) == 3 * 10 * N * N * D  # recomputes the weights
    forward, backward = rest_counts(sizes)
    assert sum(k.flops for k in forward) == 3 * (N + 1) * 24 * D * D
    assert sum(k.flops for k in backward) == 2 * 3 * (N + 1) * 24 * D * D


def test_kernels_of_merged_keys_do_not_support_long_sequences():
    long, short = (Sizes(crop, 8, 1, 128, joint=True) for crop in (224, 128))
    assert unsupported("merged", long, {}) and not unsupported("merged", short, {})
    assert not unsupported("lara", long, {})
    assert not unsupported("merged", long._replace(joint=False), {})


def test_command(tmp_path, capsys):
    flags = ["joint", "--devices", "A100", "--clips", "1", "--out", str(tmp_path / "joint")]
    assert main(flags) == 0
    assert "an estimate: counted, not measured" in capsys.readouterr().out
    lines = (tmp_path / "joint.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {row["model"] for row in rows} == set(MODELS)
    tokens = {(row["model"], int(row["frames"])): int(row["tokens"]) for row in rows}
    assert TOKENS.items() <= tokens.items()
    for row in rows:
        ratio = float(row["both_ratio"])
        assert ratio == 1 if row["attention"] == "exact" else 0 < ratio < 100
    # The longer the clip, the more an attention of linear cost saves.
    for name in ATTENTIONS:
        ratios = {
            int(row["tokens"]): float(row["both_ratio"])
            for row in rows
            if (row["model"], row["attention"]) == ("V-JEPA 2-L", name)
        }
        assert [ratios[n] for n in sorted(ratios)] == sorted(ratios.values(), reverse=True)
    text = (tmp_path / "joint.md").read_text()
    assert "| V-JEPA 2-g, 64 x 384 | 18,432 |" in text


def test_unknown_device(capsys):
    assert main(["joint", "--devices", "A100", "C64"]) == 2
    assert "'C64'; must be of A100" in only_error(capsys)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_joint_attention_has_one_group_of_keys(name):
    joint, frame = Sizes(64, 4, 2, 16, 8, joint=True), Sizes(128, 1, 2, 16, 8)
    assert joint.tokens == frame.tokens == 64
    assert spatial_counts(name, joint) == spatial_counts(name, frame)
    assert spatial_counts(name, joint) != spatial_counts(name, joint._replace(joint=False))
