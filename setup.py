"""All metadata is in pyproject.toml. Here is only what it cannot say: configs/ goes into the
wheel as slowfast_lara/shipped_configs, where config/shipped.py looks for it."""

from setuptools import find_packages, setup

CONFIGS = "slowfast_lara.shipped_configs"

setup(
    packages=[*find_packages(include=["slowfast_lara", "slowfast_lara.*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
    package_data={"slowfast_lara": ["py.typed"], CONFIGS: ["*/*.yaml"]},
)
