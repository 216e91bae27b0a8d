"""The seams of the loop: methods that a subclass replaces, and optimizers of its own."""

import pytest
import torch
from helpers import TwoOpts, make_data, make_dls, make_learner, make_model, raising, same_weights, spy, weights, words
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from learnerkit import Callback, CancelTrainException, DataLoaders, Learner


def test_seams_are_called_inside_their_events():
    log = []

    class Seams(Learner):
        def _forward(self):
            log.append("_forward")
            super()._forward()

        def _loss(self):
            log.append("_loss")
            super()._loss()

        def _backward(self):
            log.append("_backward")
            super()._backward()

        def _step(self):
            log.append("_step")
            super()._step()

        def _zero_grad(self):
            log.append("_zero_grad")
            super()._zero_grad()

        def create_opt(self):
            log.append("create_opt")
            super().create_opt()

    learn = make_learner(make_dls(train=4), cls=Seams, cbs=spy(log))
    log.clear()
    learn.fit(1)
    batch = words("""
        before_batch _forward after_pred _loss after_loss before_backward _backward after_backward before_step _step
        after_step _zero_grad after_batch cleanup_batch
    """)
    assert log[: 4 + len(batch)] == ["create_opt", "before_fit", "before_epoch", "before_train", *batch]
    assert [s for s in log[4 + len(batch) :] if s.startswith("_") or "opt" in s] == ["_forward", "_loss"]


@pytest.mark.parametrize(
    ("name", "seam"),
    [("one_batch", "_forward, _loss, _backward"), ("_do_one_batch", "_forward"), ("_do_grad_opt", "_step"),
     ("all_batches", "before_train"), ("_do_epoch_train", "before_epoch"), ("_split", "n_inp"),
     ("__call__", "callback"), ("_end_cleanup", "cleanup_fit"), ("_set_device", "device=")],
)  # fmt: skip
def test_methods_that_fastai_would_call_are_refused_with_what_does_it_here(name, seam):
    class Mixin:
        pass

    setattr(Mixin, name, lambda self, *args: None)
    kind = type("Own", (Mixin, Learner), {})
    with pytest.raises(
        TypeError, match=rf"Mixin.{name} would never be called: it is a method of fastai's Learner. Here"
    ) as e:
        make_learner(cls=kind)
    assert seam in str(e.value)


def test_a_method_of_fastai_that_is_put_into_the_learner_itself_is_refused(monkeypatch):
    monkeypatch.setattr(Learner, "_do_one_batch", lambda self: None, raising=False)
    with pytest.raises(TypeError, match=r"Learner._do_one_batch would never be called"):
        make_learner()


def test_a_fit_of_a_subclass_may_have_the_arguments_of_fastai():
    class Counting(Learner):
        def fit(self, n_epoch, lr=None, wd=None, cbs=None, reset_opt=False, start_epoch=0):
            self.asked = n_epoch
            super().fit(n_epoch, lr, wd, cbs, reset_opt, start_epoch)

    learn = make_learner(cls=Counting)
    learn.fit_one_cycle(2, 0.1)
    assert (learn.asked, len(learn.recorder.values)) == (2, 2)
    with pytest.raises(TypeError, match="n_steps"):
        learn.fit_one_cycle(n_steps=3)


def test_each_seam_replaces_what_it_names():
    class Own(Learner):
        def _forward(self):
            self.output = self.pred = self.model(self.x) * 2

        def _loss(self):
            self.loss_grad = self.pred.abs().mean()
            self.loss = self.loss_grad.detach() + 100

        def _backward(self):
            (self.loss_grad * 3).backward()

        def _step(self):
            for p in self.model.parameters():
                p.data -= 0.5 * p.grad

        def _zero_grad(self):
            for p in self.model.parameters():
                p.grad = None

    learn, model = make_learner(cls=Own), make_model()
    learn.fit(1)
    losses = []
    for x, _ in DataLoader(make_data(), 4):
        loss = (model(x) * 2).abs().mean()
        losses.append(loss.item() + 100)
        (loss * 3).backward()
        for p in model.parameters():
            p.data -= 0.5 * p.grad
            p.grad = None
    assert same_weights(learn.model, model)
    assert learn.recorder.values[0][0] == pytest.approx(sum(losses) / 2)


def test_a_loss_of_ones_own_may_compare_a_part_of_the_targets():
    class Own(Learner):
        def _loss(self):
            if not self.training:
                return super()._loss()
            self.loss_grad = self.loss_func(self.pred, self.y[:, :2])
            self.loss = self.loss_grad.detach()

    x, y = torch.randn(2, 4, 4)
    dls = DataLoaders([(x, y)], [(x, y[:, :2])], device="cpu")
    learn = Own(dls, torch.nn.Linear(4, 2), torch.nn.MSELoss())
    first = learn.validate()
    learn.fit(1)
    assert learn.recorder.values[0][0] == pytest.approx(first[0])


def test_a_loss_of_ones_own_needs_no_targets():
    class Own(Learner):
        def _loss(self):
            self.loss_grad = self.pred.pow(2).mean()
            self.loss = self.loss_grad.detach()

    learn = make_learner(DataLoaders(list(make_data().tensors[0].split(4)), device="cpu"), cls=Own)
    before = learn.validate(0)
    learn.fit(3)
    assert learn.validate(0)[0] < before[0]


@pytest.mark.parametrize("returned", [False, True])
def test_a_dict_of_optimizers_trains_as_one(returned):
    class Returning(TwoOpts):
        def create_opt(self):
            super().create_opt()
            opt, self.opt = self.opt, None
            return opt

    learn, model = make_learner(cls=Returning if returned else TwoOpts, lr=0.01), make_model()
    learn.fit(2)
    opts = SGD(model[0].parameters(), lr=0.01, momentum=0.9), AdamW(model[3].parameters(), lr=0.01)
    for _ in range(2):
        for x, y in DataLoader(make_data(), 4):
            F.mse_loss(model(x), y).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    assert same_weights(learn.model, model)
    assert list(learn.opt) == ["first", "last"]
    assert type(learn.opt["first"]) is SGD
    seen = []

    def look(cb):
        first, last = (opt.param_groups[0] for opt in cb.opt.values())
        assert first["lr"] == last["lr"]
        assert first["momentum"] == last["betas"][0]
        seen.append(first["lr"])

    learn.fit_one_cycle(1, 0.02, cbs=Callback(before_step=look))
    assert seen[0] == pytest.approx(0.02 / 25)


@pytest.mark.parametrize("made", [3, {}, {"a": 3}, None])
def test_create_opt_must_make_an_optimizer(made):
    with pytest.raises(TypeError, match="must be a torch optimizer, or a dict of them"):
        make_learner(opt_func=lambda groups, lr: made).fit(1)


def test_a_list_of_optimizers_is_refused_in_one_line():
    both = lambda groups, lr: [SGD(groups, lr=lr), AdamW(groups, lr=lr)]  # noqa: E731
    with pytest.raises(TypeError, match=r"opt_func or create_opt made \(SGD, AdamW\); it must be a torch optimizer"):
        make_learner(opt_func=both).fit(1)


def test_two_networks_can_be_trained_by_turns():
    class Adversarial(TwoOpts):
        "As in a GAN: the optimizers step by turns."

        def _step(self):
            self.opt["first" if self.iter % 2 else "last"].step()

    learn = make_learner(cls=Adversarial)
    before = weights(learn.model)
    learn.fit(1, cbs=raising("after_batch", CancelTrainException))
    now = learn.model.state_dict()
    assert torch.equal(now["0.weight"], before["0.weight"])
    assert not torch.equal(now["3.weight"], before["3.weight"])
