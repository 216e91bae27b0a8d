"""`CheckpointCallback` on several processes: a run goes on from any of its checkpoints as if it had not ended there."""

import shutil
import warnings

import pytest
import torch
from helpers import make_classes, make_data, make_learner, make_model, weights
from resume_jobs import Carries, different
from torch import nn

from learnerkit import (
    EMA,
    Callback,
    CancelTrainException,
    CheckpointCallback,
    DataLoaders,
    SplitBatch,
    distributed,
    set_seed,
)

pytestmark = pytest.mark.ranks(2, soak=[3])


def fit(folder, dls, *cbs, parts=None, **distributed):
    """Train for two epochs, from the newest checkpoint in a folder if there is one."""
    set_seed(1)
    learn = make_learner(dls(), **parts or {}, cbs=[*cbs, CheckpointCallback(folder, every=4, keep=100, resume=True)])
    with learn.no_logging(), learn.distrib_ctx(sync_bn=False, **distributed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* processes each train a whole copy")
        learn.fit(2)
    return learn


def only(folder, name, other):
    """Another folder with one checkpoint of a run; every rank must reach this."""
    distributed.barrier()
    if distributed.is_main():
        [found] = folder.glob(name)
        shutil.copytree(found, other / found.name)
    distributed.barrier()
    return other


@pytest.mark.filterwarnings("ignore:.* processes each train a whole copy")
def test_a_strict_run_may_go_on_with_another_number_of_ranks(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_data(24), bs=4, device="cpu")  # noqa: E731
    fit(tmp_path / "whole", dls)
    one = only(tmp_path / "whole", "fit0-epoch1-step4", tmp_path / "one")
    set_seed(1)
    learn = make_learner(dls(), cbs=CheckpointCallback(one, every=4, keep=100, resume=True, strict=True))
    with learn.no_logging():
        learn.fit(2)
    assert learn.epoch == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* processes each train a whole copy")
def test_a_fit_of_more_steps_continues_inside_the_epoch(tmp_path):
    found = []
    for budgets in ((8,), (4, 8)):
        for n in budgets:
            set_seed(1)
            dls = DataLoaders.from_datasets(make_data(24), make_data(4, seed=1), bs=4, device="cpu")
            checkpoint = CheckpointCallback(tmp_path / str(len(budgets)), every=3, resume=True)
            learn = make_learner(dls, make_model(dropout=0.5), cbs=checkpoint)
            with learn.no_logging(), learn.distrib_ctx():
                learn.fit(n_steps=n)
        found.append(weights(learn.model))
    assert different(*found) == []


@pytest.mark.slow
def test_weights_of_classes_give_the_same_bits(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_classes(24), bs=4, device="cpu")  # noqa: E731
    parts = lambda: {"model": make_model(n_out=3), "loss_func": nn.CrossEntropyLoss(torch.tensor([0.2, 1, 3]))}  # noqa: E731
    whole = fit(tmp_path / "whole", dls, parts=parts())
    again = fit(only(tmp_path / "whole", "fit0-epoch1-step4", tmp_path / "again"), dls, parts=parts())
    assert different(weights(whole.model), weights(again.model)) == []


@pytest.mark.slow
def test_batches_in_parts_give_the_same_bits(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_data(13), bs=5, device="cpu")  # noqa: E731
    options = {"split_batches": True}
    whole = fit(tmp_path / "whole", dls, SplitBatch(2), **options)
    again = fit(only(tmp_path / "whole", "fit0-epoch1-step4", tmp_path / "again"), dls, SplitBatch(2), **options)
    assert different(weights(whole.model), weights(again.model)) == []


@pytest.mark.slow
def test_after_the_batch_that_ends_the_training_of_an_epoch_nothing_is_saved_in_it(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_data(24), bs=4, device="cpu")  # noqa: E731
    for ranks in ({0, 1, 2}, {1}):  # who cancels, after step 4

        def cancel(cb):
            if cb.training and cb.iter == 1 and distributed.rank() in ranks:  # noqa: B023
                raise CancelTrainException

        folder = tmp_path / str(len(ranks))
        fit(folder, dls, Callback(after_batch=cancel))
        distributed.barrier()
        assert [path.name for path in folder.glob("fit0-epoch?-step?")] == []


class NoisyGradients(Callback):
    """Adds random numbers to the gradients, by a hook on each parameter."""

    def before_fit(self):
        self._hooks = [p.register_hook(lambda grad: grad + torch.randn_like(grad)) for p in self.model.parameters()]

    def cleanup_fit(self):
        for hook in self._hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_sums_over_three_ranks_give_the_same_bits(tmp_path, views):
    dls = lambda: DataLoaders.from_datasets(make_data(48), bs=4, device="cpu")  # noqa: E731
    options = {"gradient_as_bucket_view": views}
    whole = fit(tmp_path / "whole", dls, NoisyGradients(), **options)
    folder = only(tmp_path / "whole", "fit0-epoch0-step4", tmp_path / "again")
    again = fit(folder, dls, NoisyGradients(), **options)
    assert different(weights(whole.model), weights(again.model)) == []


class Sums(Callback):
    """Adds up what its rank trains on, and says nothing of a state."""

    run_valid = False

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def after_batch(self):
        self.total += float(self.xb[0].sum())


def test_what_each_rank_has_of_its_own_comes_back(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_data(24), bs=4, device="cpu")  # noqa: E731
    whole = fit(tmp_path / "whole", dls, Carries(), Sums())
    again = fit(only(tmp_path / "whole", "fit0-epoch1-step4", tmp_path / "again"), dls, Carries(), Sums())
    assert again.sums.total == whole.sums.total
    assert len({*distributed.all_gather(again.sums.total)}) == distributed.world_size()
    assert again.train_iter == whole.train_iter
    assert different(weights(whole.model), weights(again.model)) == []


@pytest.mark.slow
def test_a_module_that_follows_the_model_comes_back(tmp_path):
    dls = lambda: DataLoaders.from_datasets(make_data(24), bs=4, device="cpu")  # noqa: E731
    found = []
    for folder in (tmp_path / "whole", tmp_path / "again"):
        follows = EMA(0.5, every=2, start=1, module=make_model(seed=10 * len(found) + distributed.rank()))
        if found:
            only(tmp_path / "whole", "fit0-epoch1-step4", folder)
        fit(folder, dls, follows)
        found.append(weights(follows.module))
    assert different(*found) == []
    assert all(different(found[0], other) == [] for other in distributed.all_gather(found[0]))
