"""The largest batch that fits, on one process: what is tried, what counts, what is put back, and what is refused."""

import gc
import math
import pickle
import weakref

import pytest
import torch
from helpers import assert_same_state, make_data, make_learner, make_model, mostly_slow, raises, state_of
from PIL import Image
from scaling_jobs import Counts
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from learnerkit import Callback, DataLoaders, GradientAccumulation, Learner, TextClassifier, TextData, scaled_lr
from learnerkit.data.lengths import LengthBatches
from learnerkit.explain import is_out_of_memory
from learnerkit.scaling import batch_size
from learnerkit.scaling.batch_size import BatchSize
from learnerkit.utils import memory_of
from learnerkit.values import tensors_in


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes of memory that there are."""

    def set_to(size):
        monkeypatch.setattr(batch_size, "memory_of", lambda device: size)

    set_to(2**40)
    return set_to


def wide(train=100, valid=8, bs=4, opt_func=SGD, n_in=64, **kwargs):
    """A learner whose weights are about as large as the activations of a small batch."""
    dls = DataLoaders.from_datasets(
        make_data(train, n_in), None if valid is None else make_data(valid, n_in, seed=1), bs=bs, device="cpu"
    )
    return make_learner(dls, make_model(n_in), opt_func=opt_func, **kwargs)


def least(learn):
    """The bytes of steps of four samples."""
    return learn.find_batch_size().tried[4]


class Ragged(Dataset):
    """Samples of different lengths, of which the longest is somewhere; it knows which ones were read."""

    def __init__(self, lengths, tell=False):
        self.of, self.read = list(lengths), []
        if tell:
            self.lengths = self.of

    def __len__(self):
        return len(self.of)

    def __getitem__(self, i):
        self.read.append(i)
        return torch.ones(self.of[i]), torch.ones(1)


class Sums(nn.Module):
    """A model of rows of any length."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1)

    def forward(self, x):
        return self.body(x.sum(1, keepdim=True))


def pad(samples):
    return nn.utils.rnn.pad_sequence([x for x, _ in samples], True), torch.stack([y for _, y in samples])


def ragged(ds, valid=None, bs=4, seen=None, **kwargs):
    """A learner of ragged rows; `seen` gets the shape of each batch."""
    loaders = [DataLoader(d, bs, collate_fn=pad, **kwargs) for d in (ds, valid) if d is not None]
    cb = Callback(before_batch=lambda cb: seen is not None and seen.append((cb.training, tuple(cb.xb[0].shape))))
    return Learner(DataLoaders(*loaders, device="cpu"), Sums(), nn.MSELoss(), opt_func=SGD, lr=0.1, cbs=cb)


# What is found


@pytest.mark.parametrize("bs", mostly_slow([1, 4, 16], 4))
def test_it_is_the_largest_size_that_fits(memory, bs):
    learn = wide(train=20, valid=None, bs=bs)
    limit = wide(train=15, valid=None, bs=bs).find_batch_size(share=1).tried[15]
    memory(limit)
    found = learn.find_batch_size(share=1)
    memory(limit - 1)
    smaller = learn.find_batch_size(share=1)
    assert (found.batch_size, smaller.batch_size) == (15, 14)
    assert all((size <= 15) == (peak is not None and peak <= limit) for size, peak in found.tried.items())
    assert (found.limit, found.tried[16]) == (limit, None)
    doubled = [bs * 2**i for i in range(8) if bs * 2**i <= 16]
    assert list(found.tried)[: len(doubled)] == doubled  # then it bisects


def test_share_is_of_the_memory(memory):
    memory(100_001)
    assert wide(train=4).find_batch_size(share=0.5).limit == 50_000
    assert wide(train=4).find_batch_size().limit == 90_000


def test_it_never_has_more_samples_than_the_training_set_or_than_are_wanted(memory):
    found = wide(train=41).find_batch_size()
    assert list(found.tried) == [4, 8, 16, 32, 41]
    assert (found.batch_size, found.effective, found.n_batches) == (41, 41, None)
    found = wide(train=41).find_batch_size(bs=20)
    assert list(found.tried) == [4, 8, 16, 20]
    assert (found.batch_size, found.effective, found.n_batches) == (20, 20, 1)


def test_a_size_that_leaves_one_sample_over_is_tried_with_batch_norm(memory):
    norms = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    found = make_learner(DataLoaders(DataLoader(make_data(13), 5), device="cpu"), norms).find_batch_size(bs=12)
    assert list(found.tried) == [5, 10, 12]


@pytest.mark.slow
def test_the_accumulation_and_the_rate_are_those_of_the_effective_batch(memory, capsys):
    learn = wide(train=24, valid=None, lr=0.1)
    found = learn.find_batch_size(bs=1000)
    assert (found.batch_size, found.n_batches, found.effective) == (24, 1, 24)  # as many as an epoch has
    memory(found.tried[8])
    found = learn.find_batch_size(share=1, bs=24)
    assert (found.batch_size, found.n_batches, found.effective) == (8, 3, 24)
    assert found.lr == pytest.approx(0.1 * 24 / 4)  # SGD, whose loader has batches of 4
    assert str(found) in capsys.readouterr().out.splitlines()
    assert "GradientAccumulation(n_batches=3) makes 24 of them, lr 0.6" in str(found)
    assert str(found).startswith("8 samples fit (")
    other = wide(train=24, bs=found.batch_size, cbs=GradientAccumulation(n_batches=found.n_batches))
    assert other.effective_batch_size == found.effective
    with other.no_logging():
        other.fit(1, found.lr)
    found = learn.find_batch_size(share=1, bs=17)  # 8 fit, so three batches: of as few as are needed
    assert (found.batch_size, found.n_batches, found.effective) == (6, 3, 18)
    assert found.tried[6] is not None
    assert pickle.loads(pickle.dumps(found)) == found


def test_rates_follow_the_optimizers_rule(memory):
    assert wide(lr=0.1, opt_func=AdamW).find_batch_size(bs=8).lr == pytest.approx(0.1 * math.sqrt(8 / 4))
    assert wide(lr=scaled_lr(0.1, at=4)).find_batch_size(bs=8).lr is None
    groups = wide(splitter=lambda model: [list(model[0].parameters()), list(model[3].parameters())], lr=slice(0.1, 0.2))
    assert groups.find_batch_size(bs=8).lr == pytest.approx([0.2, 0.4])
    accumulate = GradientAccumulation(n_batches=2)
    assert wide(lr=0.1, cbs=accumulate).find_batch_size(bs=16).lr == pytest.approx(0.1 * 16 / 8)
    accumulate.run = False
    assert wide(lr=0.1, cbs=accumulate).find_batch_size() == wide(lr=0.1).find_batch_size()


# What counts


def test_the_optimizers_state_counts(memory):
    params = sum(p.nbytes for p in wide().model.parameters())
    without, two = least(wide(train=4)), least(wide(train=4, opt_func=AdamW))
    assert 2 * params <= two - without <= 2 * params + 200  # a count of steps for each parameter


def test_the_state_that_an_optimizer_has_already_counts_once(memory):
    learn = wide(train=4, opt_func=AdamW)
    before = least(learn)
    with learn.no_logging():
        learn.fit(1)
    assert least(learn) == before


def test_validation_counts_and_is_scaled_alike(memory):
    def learner(valid_bs):
        learn = wide(train=8, valid=None, bs=4)
        valid = DataLoader(make_data(100, 64, seed=1), valid_bs)
        learn.dls.loaders[1] = valid
        learn.add_cb(Callback(before_batch=lambda cb: cb.training or seen.append(cb.batch_size)))
        return learn

    seen = []
    small = learner(4).find_batch_size()
    assert seen == [4, 8]
    large = learner(40).find_batch_size()
    assert seen == [4, 8, 40, 80]
    assert large.tried[8] > small.tried[8]
    learn = learner(4)
    learn.dls.loaders[1] = [make_data(7, 64)[:7], make_data(5, 64)[:5]]  # these cannot be changed
    learn.find_batch_size()
    assert seen[4:] == [7, 7]


def test_gradients_of_a_step_of_several_batches_count(memory):
    gradients = sum(p.nbytes for p in wide().model.parameters())
    alone, cb = least(wide(train=4)), GradientAccumulation(n_batches=8)
    assert least(wide(train=4, cbs=cb)) - alone > gradients / 2
    assert wide(train=4, cbs=cb).find_batch_size(bs=4).tried[4] == alone  # in the place of the learner's


@pytest.mark.parametrize("tell", [False, True])
def test_all_batches_have_the_largest_samples(memory, tell):
    lengths = [1 + 7 * i % 50 for i in range(50)]
    seen, train, valid = [], Ragged(lengths, tell), Ragged([3] * 7 + [30], tell)
    found = ragged(train, valid, seen=seen).find_batch_size()
    assert seen[:3] == [(True, (4, 50)), (True, (4, 50)), (False, (4, 30))]
    assert {shape[1] for training, shape in seen if training} == {50}
    assert found.samples == ("the longest samples" if tell else "the largest of all 50 samples")
    four = {i for i in range(50) if lengths[i] > 46}
    assert set(train.read[: 8 if tell else 58][0 if tell else 50 :]) == four
    ragged(Subset(Ragged(lengths, tell), [5, 9, 11]), seen=(seen := []), bs=1).find_batch_size()
    assert seen[0] == (True, (1, max(lengths[i] for i in (5, 9, 11))))


def test_the_largest_of_images_are_found(memory):
    sizes = []

    def collate(images):
        sizes.append([image.size for image in images])
        return torch.ones(len(images), 1), torch.ones(len(images), 1)

    images = [Image.new("L", (4 + i % 3, 4)) for i in range(9)]
    learn = make_learner(DataLoaders(DataLoader(images, 2, collate_fn=collate), device="cpu"), make_model(1))
    assert learn.find_batch_size(bs=2).samples == "the largest of all 9 samples"
    assert sizes == [[(6, 4)] * 2] * 2


@pytest.mark.parametrize("kind", [SubsetRandomSampler, list, tuple])
@pytest.mark.parametrize("tell", [False, True])
def test_a_sampler_of_a_part_leaves_the_others_out(memory, tell, kind):
    train = Ragged([9] * 40 + [50] * 60, tell)
    learn = ragged(train, seen=(seen := []), sampler=kind([*range(20), 30]))
    found = learn.find_batch_size()
    assert {shape[1] for _, shape in seen} == {9}
    assert set(train.read) <= {*range(20), 30}
    assert (found.batch_size, found.effective, found.lr) == (21, 21, pytest.approx(0.1 * 21 / 4))


def test_a_sampler_of_the_users_own_draws_keys_that_are_no_numbers(memory):
    class Keys(list):
        def __getitem__(self, key):
            few, many = key
            return torch.ones(4 + many[0] % 2), torch.ones(1)

    class Draws:
        drawn = 0

        def __iter__(self):
            for i in range(6):
                self.drawn += 1
                yield i, [i + 1]

        def __len__(self):
            return 6

    sizes, sampler = [], Draws()

    def collate(samples):
        sizes.append([len(x) for x, _ in samples])
        return torch.ones(len(samples), 1), torch.stack([y for _, y in samples])

    dl = DataLoader(Keys(range(6)), 2, sampler=sampler, collate_fn=collate)
    learn = make_learner(DataLoaders(dl, device="cpu"), make_model(1))
    assert learn.find_batch_size(bs=2).samples == "the largest of all 6 samples"
    assert (sizes, sampler.drawn) == ([[5, 5]] * 2, 0)


def test_a_batch_sampler_of_the_users_own_tells_its_size(memory):
    class Own:
        batch_size = 4

        def __iter__(self):
            yield from ([0, 1, 2, 3], [4, 5, 6, 7])

        def __len__(self):
            return 2

    learn = make_learner(DataLoaders(DataLoader(make_data(8), batch_sampler=Own()), device="cpu"))
    found = learn.find_batch_size(bs=6)
    assert (list(found.tried), found.effective, found.lr) == ([4, 6], 6, pytest.approx(0.1 * 6 / 4))


def test_of_many_samples_some_are_read(memory, monkeypatch):
    monkeypatch.setattr(batch_size, "READ", 60)
    train = Ragged(range(1, 201))
    found = ragged(train, bs=100, seen=(seen := [])).find_batch_size(bs=100)
    assert found.samples == "the largest of 60 of 200 samples"
    assert len(set(train.read)) == 60
    assert seen == [(True, (100, 200))] * 2  # the largest ones again, as if all were of these


def test_texts_have_a_budget_of_tokens(memory):
    texts = ["a word " * (1 + 5 * i % 23) for i in range(40)]
    data = TextData.from_texts(texts, [i % 2 for i in range(40)], vocab_size=300)
    dls = data.dataloaders(tokens=100, device="cpu")
    longest = int(dls.train.batch_sampler.lengths.max())
    learn = Learner(dls, TextClassifier(data.vocab_size, 2, pairs=64), nn.CrossEntropyLoss())
    found = learn.find_batch_size(share=1)
    assert found.tokens == found.batch_size * longest
    assert (found.effective, found.lr, found.samples) == (None, None, "the longest samples")
    assert f"tokens={found.tokens} allows as many of the longest" in str(found)
    assert list(found.tried)[0] == 100 // longest
    assert isinstance(dls.train.batch_sampler, LengthBatches)
    with raises(ValueError, "got bs=64", "budget of tokens", "GradientAccumulation(n_samples=...)"):
        learn.find_batch_size(bs=64)


def test_sparse_gradients_are_no_obstacle(memory):
    ids = TensorDataset(torch.randint(9, (8, 5)), torch.ones(8, 1))
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1))
    learn = Learner(DataLoaders.from_datasets(ids, bs=4, device="cpu"), model, nn.MSELoss(), opt_func=SGD)
    assert learn.find_batch_size().batch_size == 8


# What is left


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(memory, fails):
    def learner():
        data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)), torch.ones(16, 1))
        own = torch.Generator().manual_seed(1)
        order = BatchSampler(RandomSampler(data, generator=own), 4, False)
        loaders = DataLoader(data, batch_sampler=order, generator=own), DataLoader(data, 4, generator=own)
        return make_learner(DataLoaders(*loaders, device="cpu"), make_model(dropout=0.5), opt_func=AdamW, cbs=Counts())

    def values(learn):
        state = [learn.model.state_dict(), *(opt.state_dict() for opt in learn.opts)]
        generators = [learn.dls.train.generator.get_state(), torch.get_rng_state()]
        return [*(t.clone() for t in tensors_in([state, generators])), torch.tensor(learn.recorder.lrs)]

    def fit(learn):
        with learn.no_logging():
            learn.fit(1)

    torch.manual_seed(0)
    plain = learner()
    fit(plain)
    fit(plain)
    expected = values(plain)
    torch.manual_seed(0)
    learn = learner()
    fit(learn)
    before, state, count = values(learn), state_of(learn), learn.counts.batches
    if fails:
        learn.counts.limit = count + 2
        with raises(OSError, "the disk is full"):
            learn.find_batch_size()
        learn.counts.limit = 10**9
    else:
        memory(3000)
        assert None in learn.find_batch_size().tried.values()
    assert_same_state(learn, state)
    assert all(torch.equal(a, b) for a, b in zip(before, values(learn), strict=True))
    assert (learn.counts.batches, len(learn.counts.seen)) == (count, count)
    fit(learn)
    assert all(torch.equal(a, b) for a, b in zip(expected, values(learn), strict=True))


def test_no_optimizer_is_left_where_none_was(memory):
    learn = wide(train=8)
    learn.find_batch_size()
    assert learn.opt is None
    assert all(p.grad is None for p in learn.model.parameters())


def test_what_did_not_fit_is_freed(memory):
    made, kept = [], []

    def run_out(cb):
        if cb.batch_size > 4:
            batch = torch.ones(cb.batch_size)  # which the frame refers to
            made.append(weakref.ref(batch))
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                kept.append(error.__traceback__)  # as a debugger does
                raise

    gc.disable()
    try:
        found = wide(train=8, cbs=Callback(after_loss=run_out)).find_batch_size()
        assert found.tried == {4: found.tried[4], 8: None, 6: None, 5: None}
        assert [ref() for ref in made] == [None] * 3
    finally:
        gc.enable()


# What does not fit, and what is refused


def test_where_nothing_fits_it_says_what_it_takes_and_what_to_do(memory):
    memory(1000)
    parts = "a batch of 1 does not fit", "1.", "KB or more", "900 bytes, 90% of the memory", "ActivationCheckpointing()"
    with raises(torch.OutOfMemoryError, *parts):
        wide().find_batch_size()
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))  # which fails with one sample
    learn = Learner(wide().dls, model, nn.MSELoss())
    with raises(torch.OutOfMemoryError, "a batch of 2 does not fit"):
        learn.find_batch_size()
    memory(2**30)
    learn = Learner(DataLoaders.from_datasets(make_data(8, 64), bs=1, device="cpu"), model, nn.MSELoss())
    assert list(learn.find_batch_size().tried) == [2, 4, 8]


def test_only_what_says_so_is_out_of_memory(memory):
    says = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
    assert is_out_of_memory(RuntimeError(says))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("not enough memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)

    def fail(cb):
        raise RuntimeError("a mistake of the user's")

    with raises(RuntimeError, "a mistake of the user's"):
        wide(cbs=Callback(after_loss=fail)).find_batch_size()


class Stream(IterableDataset):
    def __iter__(self):
        yield from make_data(8)


FIXED = {
    "is a list, whose batches are made already": lambda: [make_data(4)[:4]],
    "reads a Stream, an iterable dataset or one without a length": lambda: DataLoader(Stream(), 4),
    "has batch_size=None, or a batch sampler that does not tell": lambda: DataLoader(make_data(8), batch_size=None),
    "has batch_size=None, or": lambda: DataLoader(make_data(8), batch_sampler=[[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("says", FIXED)
def test_batches_that_cannot_be_of_another_size_are_refused(says):
    with raises(ValueError, f"the training loader {says}", "give a DataLoader with batch_size="):
        make_learner(DataLoaders(FIXED[says](), device="cpu")).find_batch_size()


def test_what_cannot_be_is_refused():
    with raises(ValueError, "got share=1.5", "at most 1"):
        make_learner().find_batch_size(1.5)
    with raises(ValueError, "got share=0"):
        make_learner().find_batch_size(0)
    with raises(ValueError, "got bs=0", "1 or more"):
        make_learner().find_batch_size(bs=0)
    with raises(RuntimeError, "find_batch_size was called during 'fit'"):
        make_learner(cbs=Callback(before_epoch=lambda cb: cb.learn.find_batch_size())).fit(1)
    valid = iter([make_data(4)[:4]])
    with raises(ValueError, "the validation loader is an iterator", "read only once"):
        make_learner(DataLoaders(DataLoader(make_data(8), 4), valid, device="cpu")).find_batch_size()


def test_an_optimizer_that_takes_no_accumulation_is_told_of_who_has_asked_for_it(memory):
    with pytest.raises(ValueError, match="GradientAccumulation does not go with an optimizer") as caught:
        wide(opt_func=torch.optim.LBFGS).find_batch_size(bs=64)
    (note,) = caught.value.__notes__
    assert note.startswith("find_batch_size(bs=64) has tried 16 batches of 4 a step, by GradientAccumulation; without")


# The memory


@pytest.mark.gpu
@pytest.mark.parametrize("real", [False, True])
def test_on_a_gpu_its_allocator_tells(monkeypatch, real):
    data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
    model = nn.Sequential(nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 1))
    learn = Learner(DataLoaders.from_datasets(data, bs=64, device="cuda"), model, nn.MSELoss())
    size, whole = 2**30, memory_of(torch.device("cuda"))
    if real:
        torch.cuda.set_per_process_memory_fraction(size / whole)
    else:
        monkeypatch.setattr(batch_size, "memory_of", lambda device: size)
    try:
        found = learn.find_batch_size()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 64 < found.batch_size < 4096
    assert 0.5 * size < found.tried[found.batch_size] <= (size if real else 0.9 * size)
    assert all((size > found.batch_size) == (peak is None) for size, peak in found.tried.items()) or not real


def test_the_memory_of_the_host_is_shared_by_its_processes(monkeypatch):
    whole = memory_of(torch.device("cpu"))
    assert 2**28 < whole < 2**50
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_of(torch.device("cpu")) == whole // 4


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_control_group_is_what_there_is(monkeypatch, tmp_path, version):
    from learnerkit import utils

    root = tmp_path / ("memory" if version == 1 else "")
    name = "memory.limit_in_bytes" if version == 1 else "memory.max"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / name).write_text("max\n")
    (root / "a" / name).write_text(f"{2**27}\n")
    (tmp_path / "cgroup").write_text("4:memory:/a/b\n3:cpu:/x\n" if version == 1 else "0::/a/b\n")

    def path(first, *more):
        first = first.replace("/proc/self", str(tmp_path)).replace("/sys/fs/cgroup", str(tmp_path))
        return type(tmp_path)(first, *more)

    monkeypatch.setattr(utils, "Path", path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory_of(torch.device("cpu")) == 2**27


def test_a_limit_of_the_process_is_what_there_is(monkeypatch):
    import resource

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**27, 2**30))
    assert memory_of(torch.device("cpu")) == 2**27


def test_one_sample_is_told_in_a_line():
    found = BatchSize(1, {1: 2**20, 2: None}, 2**21, None, 1, None, "samples of one size")
    assert str(found) == "1 sample fits (1 MB of 2 MB); 1 a step"
