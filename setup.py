"""Build configuration that pyproject.toml cannot express.

configs/ is installed as slowfast_lara/shipped_configs, where config/shipped.py finds it.
"""

from setuptools import find_packages, setup

CONFIGS = "slowfast_lara.shipped_configs"

setup(
    packages=[*find_packages(include=["slowfast_lara", "slowfast_lara.*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
    package_data={"slowfast_lara": ["py.typed"], CONFIGS: ["*/*.yaml"]},
)
