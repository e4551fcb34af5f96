"""Loading of image models and of other runs' checkpoints into a model."""

import math

import numpy as np
import pytest
import torch

from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.weights.pretrained import load_pretrained
from tests.helpers.made_up_weights import (
    CLASSES,
    DEPTH,
    DIM,
    GRID,
    PATCH,
    build,
    refused,
    save,
    vit,
    vit_npz,
)


def check_image_weights(model, start, state, hidden=True):
    """Check that the model has the image model's weights, and initial weights elsewhere."""
    for name, new in model.state_dict().items():
        if (
            name in ("head.weight", "head.bias", "temp_embed")
            or "proj_q" in name
            or ("proj_kv" in name)
            or (name.startswith("pre_logits") and not hidden)
        ):
            assert torch.equal(new, start[name]), name
        elif name == "patch_embed_3d.proj.weight":
            assert torch.equal(new[:, :, 1], state["patch_embed.proj.weight"])
            assert not new[:, :, 0].any()
        else:
            assert torch.equal(new, state[name.replace("_3d", "")]), name


FORMATS = ("pth", "pth-old", "pth-ddp", "safetensors", "npz", "npz-optimiser")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_of_an_image_model_loads(tmp_path, form):
    state, model = vit(), build()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    report = load_pretrained(model, save(tmp_path, form, state))
    check_image_weights(model, start, state)
    assert "patch_embed_3d.proj.weight" in report.adapted
    assert {
        "head.weight",
        "head.bias",
        "temp_embed",
        "blocks.1.attn.proj_q.weight",
        "blocks.0.attn.proj_kv.bias",
    } <= set(report.initialised)
    everything = [*report.loaded, *report.adapted, *report.initialised]
    assert sorted(everything) == sorted(model.state_dict())
    assert set(report.unused) - {"step"} == {"head.weight", "head.bias"}


def test_image_model_without_pre_logits_and_classifier(tmp_path):
    state, model = vit(pre_logits=False, classes=0), build()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    report = load_pretrained(model, save(tmp_path, "pth", state))
    check_image_weights(model, start, state, hidden=False)
    assert "pre_logits.fc.weight" in report.initialised and not report.unused


def test_pre_logits_are_unused_by_a_plain_head(tmp_path):
    report = load_pretrained(build(hidden_head=False), save(tmp_path, "pth", vit()))
    assert "pre_logits.fc.weight" in report.unused


def test_a_classifier_of_the_same_size_is_loaded(tmp_path):
    state, model = vit(classes=CLASSES), build()
    report = load_pretrained(model, save(tmp_path, "pth", state))
    assert torch.equal(model.head.weight, state["head.weight"]) and not report.unused


@pytest.mark.parametrize("inflate", ["centre", "average"])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_inflated_patches_embed_a_still_video_like_the_image(tmp_path, inflate, frames):
    state, model = vit(), build(patch_size_temp=frames)
    load_pretrained(model, save(tmp_path, "pth", state), inflate=inflate)
    image = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    still = image.unsqueeze(2).repeat(1, 1, frames, 1, 1)
    ours, expected = model.double().patch_embed_3d(still), model.patch_embed(image)
    # Outputs are about 100, and a third of a float32 weight is rounded.
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    per_frame = model.patch_embed_3d.proj.weight.abs().sum(dim=(0, 1, 3, 4))
    expected = frames if inflate == "average" else 1
    assert (per_frame > 0).sum() == expected and (per_frame[frames // 2] > 0)


def test_linear_patch_embedding(tmp_path):
    state, model = vit(), build()
    flat = {**state, "patch_embed.proj.weight": state["patch_embed.proj.weight"].flatten(1)}
    load_pretrained(model, save(tmp_path, "pth", flat))
    weight = state["patch_embed.proj.weight"]
    assert torch.equal(model.patch_embed.proj.weight, weight)
    assert torch.equal(model.patch_embed_3d.proj.weight[:, :, 1], weight)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("grid", [7, 14, 24])
def test_position_embeddings_of_another_crop(tmp_path, grid, joint):
    """Bicubic interpolation keeps a plane over the image approximately."""
    centres, own = ((torch.arange(n) + 0.5) / n for n in (grid, 14))
    plane = (2 * centres[:, None] - 3 * centres).flatten()[:, None].repeat(1, DIM)
    state = vit(patch=16)
    state["pos_embed"] = torch.cat((torch.full((1, DIM), 9.0), plane))[None]
    model = build(patch_size=16, pos_embed="joint" if joint else "separate")
    report = load_pretrained(model, save(tmp_path, "pth", state))
    positions = model.positions((14, 14))[0]
    assert torch.equal(positions[0], torch.full((DIM,), 9.0))
    expected = 2 * own[:, None] - 3 * own
    # The error of PyTorch's cubic kernel (a = -0.75) is at most 0.05 of the step to the next patch.
    # It repeats the border values, so the outer patches are not compared.
    atol = 1e-6 if grid == 14 else 0.05 * 5 / grid
    for frame in positions[1:, 0].reshape(4, 14, 14):
        torch.testing.assert_close(frame[4:-4, 4:-4], expected[4:-4, 4:-4], atol=atol, rtol=0)
    assert ("pos_embed" in report.adapted) == (grid != 14)


@pytest.mark.parametrize("pos_embed", ["separate", "joint"])
@pytest.mark.parametrize("layer", ["trajectory", "joint", "divided"])
def test_checkpoint_of_a_run_loads_completely(tmp_path, layer, pos_embed):
    """Motionformer, PySlowFast and this package: `model_state`, with or without DDP's prefix."""
    options = {"attn_layer": layer, "pos_embed": pos_embed, "estimator": "performer"}
    source = build(**options)
    torch.nn.init.normal_(source.head.bias)
    path = tmp_path / "checkpoint_epoch_00035.pyth"
    state = {f"module.{name}": x for name, x in source.state_dict().items()}
    torch.save({"epoch": 34, "model_state": state, "optimizer_state": {}, "cfg": "A: 1\n"}, path)
    target = build(**options)
    for x in target.state_dict().values():
        x.zero_()
    report = load_pretrained(target, path)
    assert not (report.adapted or report.initialised or report.unused)
    for name, x in target.state_dict().items():
        assert torch.equal(x, source.state_dict()[name]), name


def test_verb_and_noun_classifiers(tmp_path):
    """A model of one classifier starts one of two, whose checkpoint then loads completely."""
    one, two = build(), build(num_classes=[3, 4])
    torch.save({"model_state": one.state_dict()}, tmp_path / "one.pyth")
    heads = {f"head{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}
    report = load_pretrained(two, tmp_path / "one.pyth")
    assert set(report.initialised) == heads and set(report.unused) == {"head.weight", "head.bias"}
    torch.save({"model_state": two.state_dict()}, tmp_path / "two.pyth")
    report = load_pretrained(build(num_classes=[3, 4]), tmp_path / "two.pyth")
    assert not (report.adapted or report.initialised or report.unused)
    report = load_pretrained(build(num_classes=[3, 6]), tmp_path / "two.pyth")
    assert report.initialised == ["head1.weight", "head1.bias"]


def test_checkpoint_with_other_numbers_of_frames_and_classes(tmp_path):
    source, target = build(num_frames=4), build(num_frames=8, num_classes=9)
    with torch.no_grad():
        source.temp_embed.copy_(torch.arange(4.0)[None, :, None].expand(1, 4, DIM))
    path = tmp_path / "short.pyth"
    torch.save({"model_state": source.state_dict()}, path)
    head = target.head.weight.clone()
    report = load_pretrained(target, path)
    assert report.adapted == ["temp_embed"]
    assert sorted(report.initialised) == ["head.bias", "head.weight"]
    assert torch.equal(target.head.weight, head)
    expected = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3])
    torch.testing.assert_close(target.temp_embed[0, :, 0], expected)


def test_joint_positions_are_initialised_from_space_and_time(tmp_path):
    source, target = build(), build(pos_embed="joint")
    torch.nn.init.normal_(source.temp_embed)
    path = tmp_path / "separate.pyth"
    torch.save({"model_state": source.state_dict()}, path)
    load_pretrained(target, path)
    torch.testing.assert_close(target.positions((GRID, GRID)), source.positions((GRID, GRID)))


def test_joint_positions_for_another_number_of_frames(tmp_path):
    source, target = build(pos_embed="joint", num_frames=2), build(pos_embed="joint")
    path = tmp_path / "joint.pyth"
    torch.save(source.state_dict(), path)
    report = load_pretrained(target, path)
    assert report.adapted == ["st_embed"]
    first, last = source.st_embed[0, 1:].reshape(2, -1, DIM)
    new = target.st_embed[0, 1:].reshape(4, -1, DIM)
    torch.testing.assert_close(new[0], first)
    torch.testing.assert_close(new[1], 0.75 * first + 0.25 * last)


def test_another_number_of_samples_keeps_the_initial_samples(tmp_path):
    source = build(estimator="performer", estimator_args={"num_landmarks": 6})
    target = build(estimator="performer", estimator_args={"num_landmarks": 8})
    torch.save(source.state_dict(), tmp_path / "six.pyth")
    report = load_pretrained(target, tmp_path / "six.pyth")
    assert all("estimator.projection" in name for name in report.initialised)
    assert len(report.initialised) == DEPTH


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("pre_logits, classes", [(True, 21843), (False, 1000)])
def test_vit_b_16_of_timm_by_its_public_names_and_shapes(tmp_path, pre_logits, classes):
    """The tensors are expanded from one number, to keep the file small."""
    state = vit(768, 12, 16, 14, classes, pre_logits, lambda *shape: torch.ones(1).expand(shape))
    torch.save(state, tmp_path / "jx_vit.pth")
    with torch.device("meta"):
        model = VisionTransformer(num_classes=400)
    report = load_pretrained(model, tmp_path / "jx_vit.pth")
    table = report.table().splitlines()
    hidden = "loaded" if pre_logits else "initialised"
    for name, outcome in {
        "pos_embed": "loaded",
        "blocks.*.attn.qkv.weight x 12": "loaded",
        "patch_embed_3d.proj.weight": "adapted",
        "blocks.*.attn.proj_kv.weight x 12": "initialised",
        "pre_logits.fc.weight": hidden,
        "temp_embed": "initialised",
    }.items():
        assert any(line.startswith(outcome) and name in line for line in table), (name, outcome)
    assert any(line.startswith("unused") and "head.weight" in line for line in table)
    assert len(table) < 60


# Files that do not fit


def drop(state, prefix):
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]


@pytest.mark.parametrize(
    "corrupt, word",
    [
        (lambda s: drop(s, "blocks"), "blocks.0.norm1.weight"),
        (lambda s: drop(s, "blocks.1"), "blocks.1.norm1.weight"),
        (lambda s: s.pop("blocks.1.attn.qkv.bias"), "missing blocks.1.attn.qkv.bias"),
        (lambda s: s.pop("cls_token"), "missing cls_token"),
        (lambda s: s.pop("pos_embed"), "missing pos_embed"),
        (lambda s: s.pop("norm.weight"), "missing norm.weight"),
        (lambda s: s.pop("patch_embed.proj.weight"), "missing patch_embed.proj.weight"),
        (lambda s: s.pop("pre_logits.fc.bias"), "missing pre_logits.fc.bias"),
        (lambda s: s.update(pos_embed=torch.zeros(1, 19, DIM)), "pos_embed is [1, 19, 24]"),
        (lambda s: s.update(cls_token=torch.zeros(1, 1, DIM).long()), "cls_token has dtype"),
        (lambda s: s.update(pos_embed=torch.ones(1, 10, DIM).long()), "pos_embed has dtype"),
        (lambda s: s.update(cls_token=torch.ones(1, 1, DIM).double() * 1e300), "finite"),
        (lambda s: s.update(cls_token=torch.full((1, 1, DIM), math.nan)), "finite"),
        (
            lambda s: s.update({"norm.bias": torch.zeros(DIM + 1)}),
            "norm.bias is [25], expected [24]",
        ),
        (
            lambda s: s.update({"blocks.0.attn.proj_q.weight": torch.zeros(DIM, DIM)}),
            "missing temp_embed, blocks.0.attn.proj_q.bias, blocks.0.attn.proj_kv.weight",
        ),
        (lambda s: s.update({"patch_embed.proj.weight": torch.zeros(DIM, 3, 8, 8)}), "3, 8, 8]"),
        (lambda s: s.update({"patch_embed.proj.weight": torch.zeros(DIM, 768)}), "768]"),
        (
            lambda s: s.update({"patch_embed.proj.weight": torch.zeros(3 * PATCH**2, DIM)}),
            "is [9408, 24]",
        ),
        (lambda s: s.update({"blocks.1.ls1.gamma": torch.ones(DIM + 1)}), "ls1.gamma is [25]"),
        (lambda s: s.update({"blocks.1.ls1.beta": torch.ones(DIM)}), "no blocks.1.ls1.beta"),
        (lambda s: s.update({"blocks.0.mlp.w12.bias": torch.ones(DIM)}), "no blocks.0.mlp.w12"),
        (lambda s: s.update({"norm_pre.bias": torch.ones(DIM)}), "no norm_pre.bias"),
        (
            lambda s: s.update({"reg_token": torch.ones(1, 4, DIM)}),
            "no register_tokens; set VIT.NUM_REGISTERS 4",
        ),
        (lambda s: s.update({"blocks.0.attn.k\nnorm": torch.ones(8)}), "k\\nnorm'"),
        (lambda s: s.update({"module.cls_token": s["cls_token"]}), "cls_token twice"),
    ],
)
def test_missing_or_mismatched_weights_are_reported(tmp_path, corrupt, word):
    state = vit()
    corrupt(state)
    assert word in refused(build(), save(tmp_path, "pth", state))


@pytest.mark.parametrize(
    "corrupt, word",
    [
        (lambda s: s.pop("patch_embed_3d.proj.weight"), "missing patch_embed_3d.proj.weight"),
        (lambda s: s.pop("patch_embed_3d.proj.bias"), "missing patch_embed_3d.proj.bias"),
        (lambda s: s.pop("temp_embed"), "missing temp_embed"),
        (
            lambda s: [
                s.pop(f"blocks.{i}.attn.proj_q.{part}")
                for i in range(DEPTH)
                for part in ("weight", "bias")
            ],
            "missing blocks.0.attn.proj_q.weight",
        ),
        (lambda s: s.update(temp_embed=torch.zeros(1, 0, DIM)), "temp_embed is [1, 0, 24]"),
    ],
)
@pytest.mark.parametrize("pos_embed", ["separate", "joint"])
def test_checkpoint_of_a_run_must_be_complete(tmp_path, pos_embed, corrupt, word):
    """A checkpoint of a run may not lack the parts that an image model lacks."""
    state = build().state_dict()
    corrupt(state)
    torch.save({"model_state": state}, tmp_path / "run.pyth")
    assert word in refused(build(pos_embed=pos_embed), tmp_path / "run.pyth")


@pytest.mark.parametrize(
    "shape", [(2, 33, DIM), (0, 33, DIM), (1, 32, DIM), (1, 33), (1, 0, DIM), (1, 1, DIM)]
)
def test_joint_positions_of_a_wrong_shape(tmp_path, shape):
    state = {**build(pos_embed="joint").state_dict(), "st_embed": torch.zeros(shape)}
    torch.save(state, tmp_path / "run.pyth")
    assert f"st_embed is {list(shape)}" in refused(build(pos_embed="joint"), tmp_path / "run.pyth")


def test_a_deeper_model_fills_the_first_blocks(tmp_path):
    state, model = vit(depth=4), build()
    report = load_pretrained(model, save(tmp_path, "pth", state))
    assert torch.equal(model.blocks[1].mlp.fc1.weight, state["blocks.1.mlp.fc1.weight"])
    assert "blocks.2.mlp.fc1.weight" in report.unused


def test_biases_that_the_model_lacks_are_refused(tmp_path):
    message = refused(build(qkv_bias=False), save(tmp_path, "pth", vit()))
    assert "no blocks.0.attn.qkv.bias and 1 more" in message


def test_weights_of_another_estimator_are_optional(tmp_path):
    source = build(estimator="performer", estimator_args={"num_landmarks": 6})
    torch.save(source.state_dict(), tmp_path / "performer.pyth")
    learned = {"num_landmarks": 4, "learned": True}
    report = load_pretrained(
        build(estimator="lara", estimator_args=learned), tmp_path / "performer.pyth"
    )
    assert any("estimator" in name for name in report.initialised)
    assert all("estimator" in name for name in [*report.initialised, *report.unused])


def test_unrelated_model_is_refused_with_its_names(tmp_path):
    torch.save({"layer1.0.conv1.weight": torch.zeros(3)}, tmp_path / "resnet.pth")
    message = refused(build(), tmp_path / "resnet.pth")
    assert "missing cls_token" in message and "layer1.0.conv1.weight" in message


def test_npz_with_another_number_of_heads(tmp_path):
    np.savez(tmp_path / "x.npz", **vit_npz(vit(), heads=4))
    assert "4 attention heads, expected 3" in refused(build(), tmp_path / "x.npz")


_ATTENTION = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/"


@pytest.mark.parametrize(
    "name, shape, word",
    [
        ("embedding/kernel", (DIM, DIM), "embedding/kernel is [24, 24]"),
        ("head/kernel", (DIM,), "head/kernel is [24]"),
        (_ATTENTION + "query/bias", (DIM,), "query/bias is [24]"),
        (_ATTENTION + "query/kernel", (), "query/kernel is []"),
        (_ATTENTION + "out/kernel", (DIM,), "out/kernel is [24]"),
        (_ATTENTION + "key/kernel", (DIM, 3, 16), "query, key and value differ"),
        (_ATTENTION + "key/kernel", (DIM, 4, 6), "[3, 4]"),
        ("opt/target/cls", (1, 1, DIM), "cls exists twice"),
    ],
)
def test_npz_with_wrong_shapes(tmp_path, name, shape, word):
    np.savez(tmp_path / "x.npz", **{**vit_npz(vit()), name: np.zeros(shape, np.float32)})
    assert word in refused(build(), tmp_path / "x.npz")


def test_npz_without_attention(tmp_path):
    arrays = {n: x for n, x in vit_npz(vit()).items() if "MultiHead" not in n}
    np.savez(tmp_path / "x.npz", **arrays)
    message = refused(build(), tmp_path / "x.npz")
    assert "missing blocks.0.attn.qkv.weight" in message and "heads" not in message


def test_npz_without_the_value_projection(tmp_path):
    arrays = vit_npz(vit())
    del arrays["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/value/kernel"]
    np.savez(tmp_path / "x.npz", **arrays)
    assert "missing blocks.1.attn.qkv.weight" in refused(build(), tmp_path / "x.npz")


def test_joint_positions_are_refused_by_a_model_with_separate_ones(tmp_path):
    torch.save(build(pos_embed="joint").state_dict(), tmp_path / "joint.pyth")
    assert "VIT.POS_EMBED joint" in refused(build(), tmp_path / "joint.pyth")


def test_unknown_inflation(tmp_path):
    with pytest.raises(ValueError, match="centre, average"):
        load_pretrained(build(), save(tmp_path, "pth", vit()), inflate="center")
