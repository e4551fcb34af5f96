"""Image models of Hugging Face, timm and Meta: DINOv2, DeiT III and ViT."""

import pytest
import torch
import transformers
from torch import nn

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.weights.pretrained import load_pretrained
from tests.helpers.comparing import assert_close
from tests.helpers.made_up_weights import refused

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}


def dinov2(registers=0, **changes):
    """A model of transformers with random weights, and images."""
    torch.manual_seed(3)
    config = {"image_size": 224, "patch_size": 14, "mlp_ratio": 4, **SIZES, **changes}
    if registers:
        config = transformers.Dinov2WithRegistersConfig(num_register_tokens=registers, **config)
        model = transformers.Dinov2WithRegistersModel(config)
    else:
        model = transformers.Dinov2Model(transformers.Dinov2Config(**config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval(), torch.randn(1, 3, 224, 224)


def image_model(**changes):
    arguments = {"patch_size": 14, "dim": 24, "depth": 2, "num_heads": 3, **changes}
    images = {"video_input": False, "attn_layer": "joint", "patch_size_temp": 1}
    return VisionTransformer(num_classes=5, hidden_head=False, **images, **arguments).eval()


def file_weights(model, tmp_path):
    """The weights as transformers saves them."""
    from safetensors.torch import load_file

    model.save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


def timm_names(weights):
    """The same weights with the names of timm and Meta."""
    renamed = {
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.register_tokens": "register_tokens",
        "embeddings.": "",
        "encoder.layer.": "blocks.",
        "attention.output.dense": "attn.proj",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        "layernorm.": "norm.",
    }
    ours = {}
    for name, x in weights.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        ours[name] = x
    for i in range(2):
        for kind in ("weight", "bias"):
            names = [
                f"blocks.{i}.attention.attention.{x}.{kind}" for x in ("query", "key", "value")
            ]
            ours[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat([ours.pop(name) for name in names])
    return ours


def compare(model, images, weights, tmp_path, **changes):
    torch.save(weights, tmp_path / "weights.pth")
    ours = image_model(**changes)
    report = load_pretrained(ours, tmp_path / "weights.pth")
    with torch.no_grad():
        expected = model(images).last_hidden_state[:, 0]
        assert_close(ours.forward_features(images), expected, 1e-5 * expected.abs().max().item())
    return report


@pytest.mark.parametrize("registers", [0, 3])
@pytest.mark.parametrize("names", ["saved", "state_dict", "timm", "prefixed"])
def test_dinov2(tmp_path, names, registers):
    model, images = dinov2(registers)
    weights = dict(model.state_dict()) if names == "state_dict" else file_weights(model, tmp_path)
    if names == "timm":
        weights = timm_names(weights)
    if names == "prefixed":  # a classifier of Hugging Face
        weights = {f"dinov2.{name}": x for name, x in weights.items()}
        weights["classifier.weight"], weights["classifier.bias"] = torch.ones(9, 48), torch.ones(9)
    report = compare(model, images, weights, tmp_path, num_registers=registers)
    unused = [name for name in report.unused if "mask_token" not in name]
    assert unused == (["head.weight", "head.bias"] if names == "prefixed" else [])


def test_positions_without_cls(tmp_path):
    """timm adds CLS's position to the token in models with registers; DeiT III has none."""
    model, images = dinov2(registers=4)
    weights = timm_names(file_weights(model, tmp_path))
    positions = weights.pop("pos_embed")
    weights["cls_token"] = weights["cls_token"] + positions[:, :1]
    weights["pos_embed"] = positions[:, 1:]
    weights["reg_token"] = weights.pop("register_tokens")
    compare(model, images, weights, tmp_path, num_registers=4)


def test_layer_scale_of_deit_iii(tmp_path):
    model, images = dinov2()
    weights = timm_names(file_weights(model, tmp_path))
    for i in range(2):
        for number in (1, 2):
            gamma = weights.pop(f"blocks.{i}.ls{number}.gamma")
            weights[f"blocks.{i}.gamma_{number}"] = gamma
    compare(model, images, weights, tmp_path)


def test_vit_of_hugging_face(tmp_path):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=224, patch_size=32, intermediate_size=96, layer_norm_eps=1e-6, **SIZES
    )
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(1, 3, 224, 224)
    compare(model, images, file_weights(model, tmp_path), tmp_path, patch_size=32)


@pytest.mark.parametrize("attn_layer", ["trajectory", "joint", "divided"])
def test_dinov2_starts_a_video_model(tmp_path, attn_layer):
    """Every estimator runs with registers, and gradients reach them."""
    model, _ = dinov2(registers=3, patch_size=56)
    torch.save(file_weights(model, tmp_path), tmp_path / "weights.pth")
    clip = torch.randn(2, 3, 4, 112, 112)
    for estimator in ESTIMATORS:
        network = VisionTransformer(
            num_classes=5,
            attn_layer=attn_layer,
            estimator=estimator,
            estimator_args={"num_landmarks": 3},
            patch_size=56,
            dim=24,
            depth=2,
            num_heads=3,
            num_frames=2,
            num_registers=3,
        )
        report = load_pretrained(network, tmp_path / "weights.pth")
        assert "register_tokens" in report.loaded
        network(clip).square().sum().backward()
        grad = network.register_tokens.grad
        assert grad.isfinite().all() and grad.abs().max() > 0, estimator


def test_registers_follow_cls():
    torch.manual_seed(0)
    with_registers = image_model(num_registers=2, patch_size=56)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        tokens = with_registers.embed(images)
        assert tokens.shape[1] == 1 + 2 + 16
        assert torch.equal(tokens[:, 1:3], with_registers.register_tokens)


@pytest.mark.parametrize(
    "change, word",
    [
        (
            lambda w: w.pop("encoder.layer.1.attention.attention.key.bias"),
            "qkv.bias needs q, k and v",
        ),
        (
            lambda w: w.update({"encoder.layer.0.mlp.weights_in.weight": torch.ones(2)}),
            "weights_in",
        ),
        (lambda w: w.update({"embeddings.register_tokens": torch.ones(1, 4, 24)}), "REGISTERS 4"),
        (lambda w: w.update({"layers.0.norm1.bias": torch.ones(24)}), "exists twice"),
        (lambda w: w.update({"encoder.layer.0.layer_scale1.lambda1": torch.ones(2)}), "lambda1 is"),
        (lambda w: w.pop("encoder.layer.0.mlp.fc2.bias"), "missing blocks.0.mlp.fc2.bias"),
        (lambda w: w.pop("encoder.layer.0.mlp.fc2.bias"), "0.ls2.lambda1; the file"),
        (
            lambda w: w.update(
                {"encoder.layer.0.attention.attention.key.weight": torch.ones(2, 24)}
            ),
            "equal shapes",
        ),
    ],
)
def test_incomplete_or_foreign_files_are_refused(tmp_path, change, word):
    model, _ = dinov2()
    weights = file_weights(model, tmp_path)
    change(weights)
    torch.save(weights, tmp_path / "weights.pth")
    assert word in refused(image_model(), tmp_path / "weights.pth")
