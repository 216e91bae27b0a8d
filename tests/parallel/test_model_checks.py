"""What is checked of a model, and what is put into it for a while, without other ranks."""

import torch
from helpers import make_learner, raises
from torch import nn

from learnerkit import MixedPrecision
from learnerkit.parallel.model_checks import check_shardable, rank_norms, synchronised


class Nested(nn.Module):
    """Has a BatchNorm in two places, one inside a container, and one that is synchronised already."""

    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 4), shared)
        self.others = nn.ModuleDict({"again": shared, "own": nn.BatchNorm1d(4), "synced": nn.SyncBatchNorm(4)})


def test_batch_norms_are_synchronised_for_a_while_and_keep_what_they_have_learned():
    model = Nested()
    before, params = dict(model.named_modules(remove_duplicate=False)), set(model.parameters())
    assert list(rank_norms(model)) == ["body.1", "others.again", "others.own"]
    with synchronised(model):
        assert rank_norms(model) == {}
        assert model.others["synced"] is before["others.synced"]
        assert set(model.parameters()) == params
        model.body[1].running_mean.add_(1)
        model.others["own"].running_mean = torch.full((4,), 7.0)  # another tensor in its place
    after = dict(model.named_modules(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is module for name, module in before.items())
    assert model.body[1].running_mean.eq(1).all()
    assert model.others["own"].running_mean.eq(7).all()


def test_a_model_that_is_a_batch_norm_stays_one():
    model = nn.BatchNorm1d(3)
    with synchronised(model):
        assert list(rank_norms(model)) == [""]


def test_shards_on_the_host_do_not_go_with_the_scaler_of_float16():
    learn = make_learner(cbs=MixedPrecision("fp16"))
    check_shardable(learn, True)  # gradients and scale are both on the CPU
    learn.dls._device = torch.device("cuda")
    check_shardable(learn, False)
    with raises(ValueError, "offload=True", "to_bf16()"):
        check_shardable(learn, True)
