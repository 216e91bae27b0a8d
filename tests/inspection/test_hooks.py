"""Hooks, and the statistics of activations."""

import pickle

import pytest
import torch
from helpers import make_data, make_dls, make_learner, make_model, raising
from torch import nn

from learnerkit import ActivationStats, Callback, CancelBatchException, CheckpointCallback, Hook, Hooks


def hooked(model):
    return any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_hooks_keep_what_passes_and_go():
    model, x = make_model(), torch.randn(3, 4)
    with Hooks(list(model)[:2]) as hooks, Hook(model[3], lambda m, x, y: (m, x[0].shape), cpu=True) as last:
        with Hook(model[3], is_forward=False) as back, Hook(model[0], detach=False) as graph:
            model(x).sum().backward()
        assert len(hooks) == 2
        assert torch.equal(hooks.stored[1], model[0](x).tanh())
        assert not hooks[0].stored.requires_grad
        assert graph.stored.requires_grad
        assert back.stored[0].shape == (3, 1)
        assert last.stored == (model[3], (3, 6))
    with pytest.raises(ZeroDivisionError), Hook(model[0]):
        1 / 0  # noqa: B018
    in_place = nn.Sequential(model[0], nn.ReLU(inplace=True))
    with Hook(model[0]) as changed, Hook(model[0], lambda module, inputs, output: output.clone()) as kept:
        in_place(x)
    assert torch.equal(changed.stored, model[0](x).relu())
    assert torch.equal(kept.stored, model[0](x))
    with pytest.raises(AttributeError, match="register_forward_hook"):
        Hooks([model[0], "no module"])
    assert not hooked(model)


class Direct(Callback):
    """The outputs of layers by running them again, in eval mode as there is no dropout."""

    order = 20
    run_valid = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def before_batch(self):
        with torch.no_grad():
            x, outputs = self.xb[0], []
            for layer in self.model:
                x = layer(x)
                outputs.append(x)
        self.seen.append(outputs)


def test_the_statistics_are_those_of_the_outputs():
    learn, stats, direct = make_learner(dls=make_dls(train=20)), ActivationStats(every=2, with_hist=True), Direct()
    learn.fit(2, cbs=[stats, direct])
    assert (stats.layers, stats.steps) == (["0", "3"], [0, 2, 4, 6, 8])
    for place, layer in ((0, "0"), (3, "3")):
        outputs = [direct.seen[step][place] for step in stats.steps]
        expected = {
            "mean": [float(x.mean()) for x in outputs],
            "std": [float(x.std(correction=0)) for x in outputs],
            "near_zero": [float((x.abs() <= 0.05).float().mean()) for x in outputs],
        }
        for name, values in expected.items():
            assert stats.stats[layer][name] == pytest.approx(values, abs=1e-6)
    counts = stats.state_dict()["counts"].view(5, 2, -1)
    assert counts.sum(-1).tolist() == [[24, 4]] * 5
    powers = direct.seen[2][0].abs().log10()
    expected = torch.histc(powers.clamp(-4, 2), bins=48, min=-4, max=2)
    assert (counts[1, 0] - expected).abs().sum() <= 2  # on the edge of a bin
    assert not hooked(learn.model)
    again = pickle.loads(pickle.dumps(stats))
    assert again.stats == stats.stats
    learn.fit(1, cbs=stats)
    assert stats.steps == [0, 2, 4]


class Twice(nn.Module):
    """Calls a layer twice, another one never, and one that returns a tuple."""

    def __init__(self):
        super().__init__()
        self.first, self.never, self.cell = nn.Linear(4, 4), nn.Linear(4, 4), nn.GRU(4, 1)

    def forward(self, x):
        return self.cell(self.first(self.first(x)))[0]


def test_modules_by_class_and_what_is_not_called():
    learn = make_learner(model=Twice())
    stats = ActivationStats([nn.Linear, learn.model.cell])
    once = learn.model.first(make_data(8)[:4][0]).detach()
    learn.fit(1, cbs=stats)
    assert stats.stats["first"]["mean"][0] == pytest.approx(float(once.mean()), abs=1e-6)  # of its first call
    assert stats.layers == ["first", "never", "cell"]
    assert torch.tensor(stats.stats["never"]["mean"]).isnan().all()
    assert torch.tensor([stats.stats[name]["std"] for name in ("first", "cell")]).gt(0).all()
    for modules in (nn.Linear(1, 1), [nn.Conv2d]):
        with pytest.raises(ValueError, match=r"does not have.*Conv2d|does not have.*Linear"):
            learn.fit(1, cbs=ActivationStats(modules))
    with pytest.raises(ValueError, match="got every=0"):
        ActivationStats(every=0)


@pytest.mark.parametrize("error", [CancelBatchException, ZeroDivisionError])
def test_hooks_go_after_an_error_and_a_cancel(error):
    learn, stats = make_learner(), ActivationStats()
    hooks = []
    look = Callback(before_batch=lambda cb: hooks.append(hooked(cb.model)), order=90)
    handle = learn.model[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    try:
        learn.fit(1, cbs=[stats, look])
    except ZeroDivisionError:
        assert error is ZeroDivisionError
    assert hooks[0]
    handle.remove()
    assert not hooked(learn.model)
    assert stats.steps == []


def test_they_take_part_in_a_fit_alone_and_go_on(plt, tmp_path):
    learn, stats = make_learner(), ActivationStats(with_hist=True)
    learn.add_cb(stats)
    learn.lr_find(num_it=10, show_plot=False, stop_div=False)
    assert (stats.steps, stats.stats) == ([], {})
    with pytest.raises(ValueError, match="nothing was recorded"):
        stats.plot_layer_stats()
    learn.fit(1)
    other = ActivationStats(with_hist=True)
    other.load_state_dict(stats.state_dict())
    assert (other.stats, other.steps, other.layers) == (stats.stats, [0, 1], ["0", "3"])
    axes = other.plot_layer_stats()
    assert [ax.get_title() for ax in axes] == ["Mean", "Standard deviation", "Share within 0.05 of zero"]
    assert [line.get_label() for line in axes[1].lines] == ["0", "3"]
    assert list(axes[1].lines[1].get_ydata()) == stats.stats["3"]["std"]
    (ax,) = other.color_dim("3")
    assert ax.images[0].get_array().shape == (48, 2)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", "magnitude", "layer 3")
    for wrong in ("4", 2):
        with pytest.raises(ValueError, match="got layer "):
            other.plot_hist(wrong)
    with pytest.raises(ValueError, match="with_hist=True"):
        learn.remove_cb(stats).fit(1, cbs=(without := ActivationStats())) or without.plot_hist()


def test_a_run_that_goes_on_has_the_statistics_of_all_of_it():
    whole, broken, rest = (ActivationStats(every=2, with_hist=True) for _ in range(3))
    make_learner().fit(3, cbs=whole)
    stop = raising("before_batch", ZeroDivisionError(), when=lambda cb: cb.training and cb.train_iter == 3)
    with pytest.raises(ZeroDivisionError):
        make_learner().fit(3, cbs=[broken, stop, CheckpointCallback("run", every=1)])
    make_learner().fit(3, cbs=[rest, Callback(), CheckpointCallback("run", every=1, resume=True)])
    assert (broken.steps, rest.steps) == ([0, 2], [0, 2, 4])
    assert rest.stats == whole.stats
    assert torch.equal(rest.state_dict()["counts"], whole.state_dict()["counts"])
