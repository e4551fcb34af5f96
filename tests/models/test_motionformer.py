"""The model with every attention: settings, inputs, train and eval mode."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from benchmarks.kernel_counts import count_kernels
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.config import load_config
from slowfast_lara.models import VisionTransformer, build_model
from slowfast_lara.models.motionformer import PatchEmbed
from tests.helpers.comparing import OUTPUT, assert_close

LAYERS = ("trajectory", "joint", "divided")
EVERY_ATTENTION = list(itertools.product(LAYERS, ESTIMATORS))


def small(attn_layer="trajectory", estimator="softmax", **options):
    torch.manual_seed(0)
    sizes = {"num_classes": 5, "dim": 24, "depth": 2, "num_heads": 3, "num_frames": 2}
    return VisionTransformer(
        attn_layer=attn_layer,
        estimator=estimator,
        estimator_args={"num_landmarks": 9},
        **{**sizes, **options},
    )


def clip(batch=2, frames=4, height=64, width=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, frames, height, width, generator=generator)


@pytest.mark.parametrize("layer, estimator", EVERY_ATTENTION)
def test_every_parameter_receives_a_finite_gradient(layer, estimator):
    model = small(layer, estimator, drop_path=0.1)
    loss = functional.cross_entropy(model([clip()]), torch.tensor([1, 3]))
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"patch_embed.proj.weight", "patch_embed.proj.bias"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer, estimator", EVERY_ATTENTION)
def test_no_tensor_is_created_on_the_cpu(layer, estimator, training):
    """An operation on a CPU tensor and a meta tensor raises."""
    with FakeTensorMode(), torch.device("meta"):
        model = small(layer, estimator).train(training)
        out = model([torch.empty(2, 3, 4, 64, 64)])
        out.sum().backward()
        assert out.shape == (2, 5)
        assert out.device.type == "meta"


@pytest.mark.parametrize("layer, estimator", EVERY_ATTENTION)
def test_bfloat16_autocast(layer, estimator):
    model = small(layer, estimator).eval()
    with torch.no_grad():
        expected = model([clip()])
    with torch.autocast("cpu", torch.bfloat16):
        out = model([clip()])
    out.float().sum().backward()
    assert_close(out, expected, OUTPUT[torch.bfloat16], "scores")
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model([clip()]), torch.tensor([1, 3]))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "layer, estimator",
    [
        pytest.param(*both, marks=() if both[1] == "lara" else pytest.mark.slow)
        for both in EVERY_ATTENTION
    ],
)
def test_compiles_as_one_graph(layer, estimator):
    for training in (True, False):
        torch._dynamo.reset()
        model = small(layer, estimator, depth=1, dim=16, num_heads=2).train(training)
        torch.manual_seed(3)
        expected = model([clip(1)])
        torch.manual_seed(3)
        out = torch.compile(model, fullgraph=True, backend="eager")([clip(1)])
        assert_close(out, expected, 1e-6)


def test_activation_checkpointing_changes_nothing():
    grads = []
    for act_checkpoint in (False, True):
        model = small(estimator="lara", act_checkpoint=act_checkpoint, drop_path=0.5, drop=0.1)
        torch.manual_seed(5)
        model([clip()]).square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*grads):
        assert_close(recomputed, plain, 1e-6)


def test_eval_gives_scores_and_training_logits():
    model = small()
    logits = model([clip()])
    scores = model.eval()([clip()])
    assert_close(scores, logits.softmax(-1), 1e-6)
    assert_close(model(clip()), scores, 0.0)  # also accepts a bare tensor


@pytest.mark.parametrize("pos_embed", ["separate", "joint"])
def test_positions_are_resized_to_the_crop(pos_embed):
    model = small(pos_embed=pos_embed)
    for height, width in ((64, 64), (224, 224), (96, 32)):
        grid = (height // 16, width // 16)
        assert model.positions(grid).shape == (1, 1 + 2 * grid[0] * grid[1], 24)
        assert model([clip(1, 4, height, width)]).shape == (1, 5)
    base = model.positions((14, 14))[0, 1:].unflatten(0, (2, 14, 14))
    if pos_embed == "joint":
        assert_close(base.flatten(0, 2), model.st_embed[0, 1:], 0.0)
    else:
        expected = model.pos_embed[0, 1:].unflatten(0, (14, 14))
        assert_close(base[1], expected + model.temp_embed[0, 1], 0.0)


def test_joint_positions_freeze_the_separate_ones():
    model = small(pos_embed="joint")
    assert not model.pos_embed.requires_grad
    model([clip()]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_patches_of_one_frame_use_the_2d_embedding():
    model = small(patch_size_temp=1, num_frames=4)
    tokens = model.embed(clip())
    frames = [model.patch_embed(clip()[:, :, t]) for t in range(4)]
    positions = model.positions((4, 4))
    assert_close(tokens[:, 1:], torch.cat(frames, 1) + positions[:, 1:], 1e-6)
    assert not model.patch_embed_3d.proj.weight.requires_grad


@pytest.mark.parametrize("patch", [(2, 8, 8), (1, 16, 16), (3, 4, 6), (16, 16), (5, 3)])
def test_patch_embedding_equals_the_convolution(patch):
    """Outputs and gradients, for an input that is not contiguous."""
    embed = PatchEmbed(3, 10, patch).double()
    sizes = [3 * size for size in patch]
    x = torch.randn(2, *sizes, 3, dtype=torch.double).movedim(-1, 1).requires_grad_()
    inputs = (x, embed.proj.weight, embed.proj.bias)
    expected = embed.proj(x).flatten(2).transpose(1, 2)
    direction = torch.randn_like(expected)
    actual = embed(x)
    assert_close(actual, expected, 1e-12)
    gradients = (torch.autograd.grad(out, inputs, direction) for out in (actual, expected))
    for ours, theirs in zip(*gradients):
        assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("options", [{}, {"patch_size_temp": 1, "num_frames": 4}])
def test_no_convolution_runs(options):
    """cuDNN's half-precision Conv3d with stride = kernel size is slow or fails."""
    with torch.device("meta"):
        model, x = small(**options), torch.empty(2, 3, 4, 64, 64)
    kernels, _ = count_kernels(lambda: model([x]).sum().backward())
    assert not [kernel.name for kernel in kernels if "conv" in kernel.name]


def test_images():
    model = small("joint", video_input=False, patch_size_temp=1)
    assert model(clip()[:, :, 0]).shape == (2, 5)
    model(clip()[:, :, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("shape", [(2, 3, 5, 64, 64), (2, 3, 4, 60, 64), (2, 4, 4, 64, 64)])
def test_clip_of_a_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"expected.*\[batch, 3, 4, height, width\]"):
        small()([torch.zeros(shape)])


def test_drop_path_keeps_the_expectation():
    model = small(drop_path=0.4)
    drop_path = model.blocks[-1].drop_path
    torch.manual_seed(0)
    kept = drop_path(torch.ones(20000, 1))
    assert kept.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert abs(kept.mean().item() - 1) < 4 * (0.4 / 0.6 / 20000) ** 0.5
    assert model.blocks[0].drop_path.rate == 0


@pytest.mark.parametrize("head_act", ["tanh", "gelu", "relu"])
def test_every_setting_of_the_config_reaches_the_model(tmp_path, head_act):
    path = tmp_path / "c.yaml"
    path.write_text(
        "VIT: {EMBED_DIM: 24, DEPTH: 3, NUM_HEADS: 2, MLP_RATIO: 2, QKV_BIAS: false, "
        "TEMPORAL_RESOLUTION: 2, USE_MLP: true, DROP: 0.1, DROP_PATH: 0.2, HEAD_DROPOUT: 0.3, "
        "POS_DROPOUT: 0.4, ATTN_DROPOUT: 0.5, POS_EMBED: joint, "
        "USE_ORIGINAL_TRAJ_ATTN_CODE: false, "
        f"HEAD_ACT: {head_act}, PATCH_SIZE: 32, PATCH_SIZE_TEMP: 4}}\n"
        "DATA: {NUM_FRAMES: 8, TEST_CROP_SIZE: 224}\nMODEL: {NUM_CLASSES: 11}\nNUM_GPUS: 0\n"
    )
    model = build_model(load_config(path))
    block = model.blocks[2]
    assert len(model.blocks) == 3
    assert block.attn.num_heads == 2
    assert block.attn.qkv.bias is None
    assert block.attn.project_values
    assert block.attn.estimator.dropout == 0.5
    assert block.mlp.fc1.out_features == 48
    assert block.mlp.drop.p == 0.1
    assert block.drop_path.rate == pytest.approx(0.2)
    assert model.head_drop.p == 0.3
    assert model.pos_drop.p == 0.4
    assert model.st_embed.shape == (1, 1 + 2 * 49, 24)
    assert model.pre_logits.act.__class__.__name__.lower() == head_act
    assert model.patch_embed_3d.proj.weight.shape == (24, 3, 4, 32, 32)
    assert model([clip(1, 8, 224, 224)]).shape == (1, 11)


def test_verb_and_noun_classifiers():
    """Motionformer's names; the outputs are concatenated, and scores are normalised by part."""
    model = small(num_classes=[3, 5])
    assert {"head0.weight", "head0.bias", "head1.weight", "head1.bias"} <= set(model.state_dict())
    assert model.layers_after("head1.bias") == 0 and not hasattr(model, "head")
    logits, features = model([clip()]), model.forward_features([clip()])
    expected = torch.cat([model.head0(features), model.head1(features)], dim=1)
    assert logits.shape == (2, 8) and torch.equal(logits, expected)
    scores = torch.cat([logits[:, :3].softmax(1), logits[:, 3:].softmax(1)], dim=1)
    assert_close(model.eval()([clip()]), scores, OUTPUT[torch.float32])


def test_scores_of_several_classes_are_sigmoid():
    model = small(multi_label=True)
    logits = model([clip()])
    assert_close(model.eval()([clip()]), logits.sigmoid(), OUTPUT[torch.float32])
