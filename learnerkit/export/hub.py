"""Exports on the Hugging Face Hub: `push_to_hub`, which adds a model card, and the download for `from_hub`."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from learnerkit import __version__, distributed
from learnerkit.export.writing import ONNX, export, exported_path
from learnerkit.files import SAFETENSORS
from learnerkit.marks import collective
from learnerkit.state import Learner
from learnerkit.text import escaped_line, first_few
from learnerkit.utils import unwrap

_CARD = """---
library_name: learnerkit
tags: [learnerkit, pytorch]
---

# {name}

A {model}, exported by learnerkit {version} with torch {torch_version}.

| | |
|---|---|
{rows}
{measured}
```python
{code}
```
"""
_MEASURED = """
The metrics are those of the last epoch. Where the weights of an earlier one were kept, as the best, they do not have
these metrics.
"""
_ONNX = """import onnxruntime
from huggingface_hub import hf_hub_download

session = onnxruntime.InferenceSession(hf_hub_download("{repo_id}", "{file}"))"""
_WEIGHTS = """

# make_model: the function or class that makes the model; the file has its weights alone"""


@collective
def push_to_hub(
    learn: "Learner",
    repo_id: str,
    fname: str = "model.safetensors",
    *,
    private: bool | None = None,
    token: str | None = None,
) -> str | None:
    """Export a learner to a repository of the Hugging Face Hub: `from_hub` loads it.

    Rank 0 alone writes. If the model is divided among the ranks, every rank must reach this.

    The repository is made if it is not there. With the file goes a model card (README.md), which replaces an older one:
    the classes, the metrics of the last epoch, versions, and how to load the file.

    Args:
        learn: the learner.
        repo_id: "user/name", or the name of one of your own.
        fname: of the file in the repository; its end says what is written, as for `Learner.export`.
        private: make a new repository private; by default as the settings of its owner say.
        token: of a user of the Hub who may write; by default that of `hf auth login`.

    Returns:
        The address of the repository; `None` on other ranks.

    Raises:
        ImportError: the extra `learnerkit[hub]` is missing.
        OSError: no connection, or no right to write.
        CheckpointError, TypeError, ValueError: as for `Learner.export`.
    """
    _require_hub()
    from huggingface_hub import HfApi

    name = exported_path(fname, Path()).name
    if not distributed.is_main():
        export(learn, Path(name))  # it writes nothing here, but gives rank 0 the rows of a model that is divided
        return None
    hub = HfApi(token=token)
    with TemporaryDirectory() as folder:
        export(learn, Path(folder, name))
        repo = hub.create_repo(repo_id, private=private, exist_ok=True)
        Path(folder, "README.md").write_text(model_card(learn, repo.repo_id, name), encoding="utf-8")
        hub.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=f"Export {name}")
    return str(repo)


def model_card(learn: "Learner", repo_id: str, file: str) -> str:
    """Write the model card of an exported file in Markdown: classes, metrics of the last epoch, versions, loading."""
    recorder: Any = getattr(learn, "recorder", None)
    measured = dict[str, str]()
    rows = {} if learn.dls.classes is None else {"classes": first_few(learn.dls.classes, n=100)}
    if recorder is not None:
        metrics = zip(recorder.metric_names[1:], recorder.final_record, strict=False)
        measured = {name: f"{value:.6g}" for name, value in metrics}
    data = [type(learn.dls.data).__name__] if hasattr(learn.dls, "data") else []
    is_weights = file.endswith(SAFETENSORS)
    given = [repr(repo_id), *["make_model"] * is_weights, f"fname={file!r}", *(f"data={name}" for name in data)]
    code = f"from learnerkit import {', '.join([*data, 'from_hub'])}\n\nlearn = from_hub({', '.join(given)})"
    if file.endswith(ONNX):
        code = _ONNX.format(repo_id=repo_id, file=file)
    rows |= measured
    cells = ([escaped_line(str(cell)).replace("|", "\\|") for cell in row] for row in rows.items())
    return _CARD.format(
        name=repo_id.rpartition("/")[2], model=type(unwrap(learn.model)).__name__, version=__version__,
        torch_version=torch.__version__,
        rows="\n".join(f"| {name} | {value} |" for name, value in cells),
        code=code + _WEIGHTS * is_weights, measured=_MEASURED if measured else "",
    )  # fmt: skip


@collective
def download(repo_id: str, fname: str, revision: str | None, token: str | None) -> Path:
    """Return the path of an exported file of the Hub, for `from_hub`; one process of each machine downloads it."""
    _require_hub()
    from huggingface_hub import hf_hub_download

    name = str(exported_path(fname, Path()))  # Other files are refused before the download.

    def get() -> str:
        return hf_hub_download(repo_id, name, revision=revision, token=token)

    return Path(distributed.rank0_first(get, per_node=True))  # type: ignore[arg-type]  # it returns what `get` does


def _require_hub() -> None:
    if find_spec("huggingface_hub") is None:
        raise ImportError("the Hugging Face Hub needs huggingface_hub: pip install 'learnerkit[hub]'")
