"""DistributedCallback on one process, and in processes that no launcher has started."""

import pytest
from helpers import make_learner
from launching import run_script

from learnerkit import DistributedCallback
from learnerkit.parallel.loaders import rank_loader


@pytest.mark.soak
def test_a_group_of_the_scripts_own_trains_also_in_a_thread_and_after_a_failure(tmp_path):
    assert "spawned well" in run_script("spawned.py", tmp_path, way="python")


def test_on_one_process_the_context_does_nothing():
    learn = make_learner()
    with learn.distrib_ctx(split_batches=True) as inner:
        assert inner is learn
        assert not any(isinstance(cb, DistributedCallback) for cb in learn.cbs)
        learn.fit(1)


def test_the_callback_itself_does_nothing_on_one_process():
    alone, learn = make_learner(), make_learner()
    alone.fit(1)
    learn.to_distributed()
    learn.fit(1)
    learn.detach_distributed()
    assert learn.recorder.values == alone.recorder.values


def test_nproc_in_a_script_names_the_launcher():
    with pytest.raises(ValueError, match=r"python -m learnerkit.launch --nproc 2"):
        make_learner().distrib_ctx(nproc=2)


def test_flags_are_no_texts_and_a_list_of_units_has_one():
    for name in ("split_batches", "sync_bn", "sharded", "find_unused_parameters"):
        with pytest.raises(ValueError, match=f"got {name}='no'; it is True or False"):
            make_learner().distrib_ctx(**{name: "no"})
    with pytest.raises(ValueError, match=r"got shard=\[\], and no unit to shard; it is True, False, or names and"):
        make_learner().to_distributed(shard=[])


def test_a_device_is_left_to_the_processes():
    with pytest.raises(TypeError, match="got the argument 'cuda_id'.*each process takes the device of its local rank"):
        make_learner().distrib_ctx(cuda_id=0)
    with pytest.raises(TypeError, match="got the argument 'device_ids'.*so leave the device out"):
        make_learner().distrib_ctx(device_ids=[0])
    with pytest.raises(TypeError, match="got the argument 'cuda_id'.*so leave the device out"):
        make_learner().to_distributed(cuda_id=0)
    with pytest.raises(ValueError, match="got nproc=0.*If a device was meant: each process takes the device"):
        make_learner().distrib_ctx(0)


def test_a_loader_of_fastai_under_ddp_says_what_to_do_with_its_data():
    loader = type("TfmdDL", (), {"__module__": "fastai.data.core"})()
    with pytest.raises(
        TypeError, match=r"the loader is a TfmdDL of fastai; under DDP it must be a torch DataLoader.*ds"
    ):
        rank_loader(loader, "the loader", training=True, split=False, least=1)


def test_a_stream_of_batches_under_ddp_is_told_how_it_becomes_a_loader():
    with pytest.raises(TypeError, match=r"the loader is a generator; .*make DataLoader\(\.\.\., batch_size=None\)"):
        rank_loader((x for x in []), "the loader", training=True, split=False, least=1)


def test_a_misspelled_argument_names_the_near_one():
    with pytest.raises(TypeError, match="did you mean 'split_batches'"):
        make_learner().distrib_ctx(split_batch=True)


def test_a_learner_is_distributed_once():
    learn = make_learner().to_distributed()
    with pytest.raises(ValueError, match="distributed already"):
        learn.distrib_ctx()
    with pytest.raises(ValueError, match="two DistributedCallbacks"):
        learn.to_distributed().fit(1)
    learn.detach_distributed().to_distributed().fit(1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "30", True])
def test_a_timeout_that_is_no_positive_number_of_seconds_is_refused(timeout):
    with pytest.raises(ValueError, match=f"got timeout={timeout!r}; it is a number of seconds greater than 0"):
        make_learner().distrib_ctx(timeout=timeout)
