"""Programs of torch.export: those of others that would run code are not read."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import make_classes, make_learner, make_model
from torch import nn
from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter

from learnerkit import CheckpointError, DataLoaders, load_learner
from learnerkit.export import programs


class Evil:
    """Leaves a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


ORDER = "__import__('os').mkdir('evil')"
SAMPLES, PROGRAM = "data/sample_inputs/model.pt", "models/model.json"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The parts of an exported program."""
    data = make_classes()
    dls = DataLoaders.from_datasets(data, data, bs=4, device="cpu")
    learn = make_learner(dls, make_model(n_out=3), nn.CrossEntropyLoss())
    path = learn.export(tmp_path_factory.mktemp("program") / "good.pt2")
    archive = PT2ArchiveReader(str(path))
    return {name: archive.read_bytes(name) for name in archive.get_file_names()}


def write(parts, name="bad.pt2"):
    with PT2ArchiveWriter(name) as archive:
        for part, content in parts.items():
            if not part.startswith((".data", "byteorder", "version")):
                archive.write_bytes(part, content)
    return Path(name)


def with_text(parts, part, old, new):
    assert old in parts[part].decode()
    return parts | {part: parts[part].decode().replace(old, new, 1).encode()}


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


HOSTILE = {
    "a pickle of example inputs": lambda p: p | {SAMPLES: saved(Evil())},
    "a bare pickle": lambda p: p | {SAMPLES: pickle.dumps(Evil())},
    "weights in a pickle": lambda p: with_text(p, WEIGHTS, '"use_pickle": false', '"use_pickle": true'),
    "weights of an older format": lambda p: p | {"data/weights/model.pt": saved(Evil())},
    "constants of an older format": lambda p: p | {"data/constants/model.pt": saved(Evil())},
    "an object": lambda p: p | {
        "data/constants/opaque_obj_0": pickle.dumps(Evil()),
        CONSTANTS: json.dumps({"config": {"x": {
            "path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}}}).encode(),
    },
    "a library": lambda p: p | {"data/aotinductor/model/model.so": b"\x7fELF"},
    "another program": lambda p: p | {"models/other.json": p[PROGRAM]},
    "a size that is code": lambda p: with_text(p, PROGRAM, "Symbol('s", ORDER + "+Symbol('s"),
    "a size that is never known": lambda p: with_text(p, PROGRAM, "Symbol('s", "9**9**9**9+Symbol('s"),
    "a size of characters": lambda p: with_text(p, PROGRAM, "Symbol('s", "eval(chr(49))+Symbol('s"),
    "a function by its name": lambda p: with_text(p, PROGRAM, "torch.ops.aten.tanh.default", "torch.os.mkdir"),
    "an operation on files": lambda p: with_text(
        p, PROGRAM, "torch.ops.aten.tanh.default", "torch.ops.aten.from_file.default"),
    "a name that is code": lambda p: p | {PROGRAM: p[PROGRAM].replace(b'"tanh"', b'"tanh=' + ORDER.encode() + b';x"')},
    "a check of inputs": lambda p: p | {
        PROGRAM: json.dumps(json.loads(p[PROGRAM]) | {"guards_code": [ORDER]}).encode()},
    "a type by its name": lambda p: with_text(p, PROGRAM, "builtins.tuple", "collections.defaultdict"),
    "an enumeration": lambda p: with_text(
        p, PROGRAM, r'\"context\": \"null\"', r'\"context\": \"{\\\"__enum__\\\": 1}\"'),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_run_code_is_refused_before_torch_reads_it(parts, name, monkeypatch):
    monkeypatch.setattr("learnerkit.torch_internals.read_archive", lambda file: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"bad\.pt2: it has .* which could run code"):
        load_learner(write(HOSTILE[name](parts)))
    assert not Path("evil").exists()


S = "Symbol('s27', positive=True, integer=True)"


@pytest.mark.parametrize(
    "size",
    ["9**9**9**9", "2**(2**40)", "Pow(10, 10000000)", "Pow(Pow(9, 9), 9)", "Pow(Integer(9), Pow(Integer(9), 9))",
     f"Pow({S}, Integer(65))", "1<<9999999999", "99999999!", "9!!", "Float('1e99999999', precision=53)",
     "Float('2.5', precision=9999999999)", "1" * 30, "+".join(["1"] * 9999), "(" * 500, "-" * 3000 + "1", "**"],
)  # fmt: skip
def test_a_size_that_would_take_long_is_refused(size):
    with pytest.raises(CheckpointError, match="it has the size"):
        programs._check_text(size, "expr_str")


@pytest.mark.parametrize(
    "size",
    [S, f"Add(Mod({S}, Integer(3)), Integer(-1))", f"Mul(Pow({S}, Integer(2)), Pow({S}, Integer(-3)))",
     "s0**2*s1**2 + 1",
     f"Max(Integer(1), TruncToInt(Mul(Float('2.5', precision=53), ToFloat({S}))))", "Float('1.0e-5', precision=53)"],
)  # fmt: skip
def test_sizes_as_torch_writes_them_pass(size):
    programs._check_text(size, "expr_str")


def test_a_good_one_written_again_is_read(parts):
    found = load_learner(write(parts, "again.pt2"))
    assert found.predict(make_classes().tensors[0][0]).pred.shape == (3,)


def test_the_file_has_no_data_and_no_paths(parts):
    assert parts[SAMPLES] == b""
    assert b"site-packages" not in parts[PROGRAM]
    assert str(Path(__file__).parent).encode() not in parts[PROGRAM]


def test_torch_itself_would_have_run_it(parts):
    """If this fails, torch has become safer: look whether the checks are still needed."""
    from torch.export.pt2_archive._package import load_pt2

    with pytest.raises((AssertionError, TypeError)):
        load_pt2(str(write(HOSTILE["a pickle of example inputs"](parts))))
    assert Path("evil").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_an_absent_device_is_no_damage(parts):
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        load_learner(write(parts), device="cuda")


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "zip"])
def test_damage_is_an_error_that_says_so(parts, damage):
    path = write(parts)
    content = path.read_bytes()
    if damage == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("version", "1")
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"hello" * 99,
                          "flipped": content.replace(b'"nodes"', b'"knots"')}[damage])  # fmt: skip
    with pytest.raises(CheckpointError, match=r"bad\.pt2 is damaged, or not made by learn\.export"):
        load_learner(path)
