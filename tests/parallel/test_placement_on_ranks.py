"""Models that span devices: they stay where they are, and DDP takes them with devices of their own for each process."""

import pytest
import torch
from helpers import make_learner, raises, same_weights

from learnerkit import DataLoaders
from learnerkit.parallel.model_checks import check_devices


def placed(learn):
    """The learner's model as transformers would have placed it: on the host and, as the map says, on the disk."""

    def to(*args, **kwargs):
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")

    learn.model.hf_device_map = {"0": "cpu", "2": "disk"}
    learn.model.to = to
    return learn


def test_it_is_not_moved_and_its_inputs_go_to_its_first_device():
    learn, plain = placed(make_learner()), make_learner()
    dls = DataLoaders(learn.dls.train, learn.dls.valid)
    learn.dls = dls
    for each in (learn, plain):
        each.fit(1, 0.1)
    assert same_weights(learn.model, plain.model)
    assert dls.device == torch.device("cpu")


def test_a_device_that_was_given_stays():
    dls = DataLoaders([], device="cpu")
    dls.prefer(torch.device("cuda", 1))
    assert dls.device.type == "cpu"
    dls = DataLoaders([])
    dls.prefer(torch.device("cuda", 1))
    assert dls.device == torch.device("cuda", 1)


def test_two_processes_may_not_use_one_gpu_for_such_models():
    check_devices([("node0", []), ("node0", [])])
    check_devices([("node0", ["cuda:0", "cuda:1"]), ("node0", ["cuda:2", "cuda:3"]), ("node1", ["cuda:0", "cuda:1"])])
    check_devices([("node0", ["cpu", "meta"]), ("node0", ["cpu", "meta"])])
    with raises(ValueError, "the models of ranks 0 and 2 both span cuda:1 of node0", "CUDA_VISIBLE_DEVICES"):
        check_devices([("node0", ["cuda:0", "cuda:1"]), ("node1", ["cuda:1"]), ("node0", ["cuda:1", "cuda:2"])])


@pytest.mark.ranks(2)
def test_ddp_trains_it():
    learn, plain = placed(make_learner()), make_learner()
    for each in (learn, plain):
        with each.distrib_ctx(split_batches=True):
            each.fit(1, 0.1)
    assert same_weights(learn.model, plain.model)
