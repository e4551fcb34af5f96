from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="slowfast_lara",
    version="0.1.0",
    description="Video transformers with linear-complexity attention, on PySlowFast",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9",
    packages=find_packages(include=["slowfast_lara", "slowfast_lara.*"]),
    install_requires=[
        "pyslowfast==1.0",
        # PySlowFast imports these without declaring them.
        "torch>=2.4",
        "fvcore",
        "iopath",
        "opencv-python",
        # And these we use ourselves.
        "av",
        "simplejson",
        "numpy",
        "pyyaml",
        "matplotlib",
        "tqdm",
        "pillow",
        "tensorboard",  # the published configs ask for its logs
    ],
    entry_points={"console_scripts": ["slowfast-lara = slowfast_lara.cli:main"]},
    extras_require={"test": ["pytest"], "lint": ["ruff"]},
)
