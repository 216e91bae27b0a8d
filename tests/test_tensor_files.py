"""Files of tensors: their content, byte by byte, and the memory it is taken from."""

import safetensors.torch
import torch

from learnerkit import tensor_files
from learnerkit.tensor_files import HostMemory, content


def test_a_file_is_as_the_library_writes_it(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor(True), "d": torch.zeros(0, 2).half()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    tensor_files.write(tmp_path / "ours", content(tensors, {"format": "pt"}))
    theirs, ours = (safetensors.torch.load_file(tmp_path / name) for name in ("theirs", "ours"))
    assert all(torch.equal(theirs[name], ours[name]) for name in tensors)
    assert (tmp_path / "ours").stat().st_size <= (tmp_path / "theirs").stat().st_size + 16


def test_nothing_is_copied_that_is_in_a_row_on_the_host():
    tensor = torch.randn(8)
    assert tensor_files.on_host(tensor).data_ptr() == tensor.data_ptr()
    piece = content({"a": tensor_files.on_host(tensor)})[1]
    tensor[0] = 7.0
    assert bytes(piece[:4]) == torch.tensor(7.0).numpy().tobytes()


def test_memory_is_used_again_and_copies_have_the_values():
    memory, places = HostMemory(), set()
    for factor in (1, 2, 1):
        tensors = {
            "a": factor * torch.ones(3, dtype=torch.int8), "b": factor * torch.randn(4, 5).t(), "c": torch.zeros(0),
            "d": torch.tensor(factor), "e": torch.randn(2, dtype=torch.complex128).conj(),
        }  # fmt: skip
        found = memory.copies(tensors)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert all(tensor.is_contiguous() for tensor in found.values())
        places.add(found["a"].data_ptr())
    assert len(places) == 1


def test_all_the_types_of_torch_are_kept(tmp_path):
    types = [t for t in vars(torch).values() if isinstance(t, torch.dtype) and t.itemsize and "bits" not in str(t)]
    tensors = {}
    for dtype in dict.fromkeys(types):
        try:
            tensors[str(dtype)] = torch.randint(0, 2, (16,), dtype=torch.uint8).view(dtype)
        except (RuntimeError, TypeError, ValueError):  # a type that has no values
            continue
    assert {"torch.complex32", "torch.float8_e4m3fnuz", "torch.uint64", "torch.bfloat16"} <= tensors.keys()
    tensor_files.write(tmp_path / "all", content(tensors))
    found = tensor_files.read(tmp_path / "all")
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
