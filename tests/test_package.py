"""Public names of `slowfast_lara`, and the modules that importing it loads."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import slowfast_lara
from tests.helpers.preloaded import environment


def loaded_by(statement: str) -> set[str]:
    """Modules in a fresh interpreter after the statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_public_names():
    names = ["__version__", "build_estimator", "build_model", "load", "load_config", "load_views"]
    assert sorted(slowfast_lara.__all__) == dir(slowfast_lara) == names
    for name in names:
        assert getattr(slowfast_lara, name).__class__.__name__ in ("function", "str")
    with pytest.raises(AttributeError, match="'slowfast_lara' has no attribute 'nothing'"):
        _ = slowfast_lara.nothing


@pytest.mark.parametrize("package", ["slowfast_lara", "slowfast_lara.config", "slowfast_lara.data"])
def test_tab_completion_offers_the_public_names(package):
    program = f"import {package}; print({package}.__all__ == dir({package}), *dir({package}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    same, *names = done.stdout.split()
    assert same == "True" and "TYPE_CHECKING" not in names, done.stderr
    module = importlib.import_module(package)
    assert all(hasattr(module, name) for name in names)


def test_public_names_are_those_of_their_modules():
    from slowfast_lara.attention import build_estimator
    from slowfast_lara.config import load_config
    from slowfast_lara.data import load_views
    from slowfast_lara.inference.load import load
    from slowfast_lara.models import build_model

    assert slowfast_lara.build_estimator is build_estimator
    assert slowfast_lara.build_model is build_model
    assert slowfast_lara.load is load
    assert slowfast_lara.load_config is load_config
    assert slowfast_lara.load_views is load_views


def test_importing_the_package_is_cheap():
    loaded = loaded_by("import slowfast_lara")
    assert not {"torch", "slowfast", "fvcore", "numpy"} & loaded
    assert "torch" in loaded_by("from slowfast_lara import build_estimator")


def test_run_does_not_import_slow_modules():
    """PyTorch's compiler and matplotlib would double the start-up time."""
    loaded = loaded_by("import slowfast_lara.engine.run")
    assert not {"torch._dynamo", "matplotlib", "triton", "tensorboard"} & loaded


@pytest.mark.parametrize(
    "module", ["attention", "config", "models", "data.views", "runs.checkpoint"]
)
def test_lower_layers_do_not_import_the_engine(module):
    loaded = loaded_by(f"from slowfast_lara.{module} import *")
    assert f"slowfast_lara.{module}" in loaded
    assert not {"slowfast_lara.engine.launch", "slowfast_lara.engine.train"} & loaded


def test_attention_imports_only_errors():
    loaded = {name for name in loaded_by("import slowfast_lara.attention") if "slowfast" in name}
    ours = {name for name in loaded if not name.startswith("__editable__")}
    assert ours - {"slowfast_lara", "slowfast_lara.lazy", "slowfast_lara.errors"} == {
        name for name in ours if name.startswith("slowfast_lara.attention")
    }


# The package's requirements other than torch and numpy, by the names of their modules.
OTHERS = (
    "slowfast fvcore cv2 simplejson iopath av yaml safetensors matplotlib tqdm PIL tensorboard "
    "transformers"
)
WITHOUT_OTHERS = f"""
import sys
sys.modules.update(dict.fromkeys({OTHERS.split()}))  # importing them raises ImportError
import torch
from slowfast_lara import hf
from slowfast_lara.attention import ESTIMATORS, build_estimator

x = torch.randn(1, 2, 30, 8)
for name in ESTIMATORS:
    build_estimator(name, head_dim=8, num_heads=2, num_landmarks=4)(x, x, x)
    with hf.replace_sdpa(name, groups=4):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
"""


def test_attention_and_hf_need_only_torch_and_numpy():
    assert {"slowfast_lara.hf.swap", "slowfast_lara.hf.comparison"} <= loaded_by(WITHOUT_OTHERS)


def test_use_without_transformers_names_the_extra():
    program = (
        WITHOUT_OTHERS
        + """
class Config: _attn_implementation, hidden_size, num_heads = "sdpa", 8, 2
class Layer(torch.nn.Module):
    config = Config()
    def forward(self): return ALL_ATTENTION_FUNCTIONS
try:
    hf.use(Layer(), "merged")
except ValueError as error:
    assert "slowfast_lara[hf]" in str(error), error
else:
    raise AssertionError
"""
    )
    loaded_by(program)
