"""A user's script in which mypy and pyright find nothing to complain of."""

import torch
from torch import Tensor, nn

from learnerkit import EMA, Callback, CancelFitException, DataLoaders, Learner, SaveModelCallback, accuracy
from learnerkit.datasets import fashion_mnist_sample


class GradientNorm(Callback):
    "Reads the learner's attributes by their names, and has some of its own."

    def __init__(self, every: int = 10) -> None:
        super().__init__()
        self.every = every
        self.norms: list[float] = []

    def before_step(self) -> None:
        if self.train_iter % self.every == 0 and self.training:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            self.learn.log_metric("norm", norm)
            self.norms.append(norm.item())

    def after_loss(self) -> None:
        self.learn.loss_grad = self.loss_grad + 1e-3 * self.pred.square().mean()

    def after_epoch(self) -> None:
        share: float = self.pct_train
        loss: float | None = self.smooth_loss
        print(self.epoch, share, loss, self.recorder.losses[-1], len(self.dls.train), self.loss.item(), self.y)
        self.learn.say(f"{len(self.norms)} norms")


@Callback.on("after_batch")
def stop(cb: Callback) -> None:
    if cb.train_iter == 100:
        raise CancelFitException


def smooth_error(pred: Tensor, target: Tensor) -> Tensor:
    return 1 - pred.softmax(1).gather(1, target[:, None]).mean()


dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=64)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
learn = Learner(dls, model, nn.CrossEntropyLoss(), metrics=[accuracy, smooth_error], cbs=GradientNorm(every=5))
rate: float = learn.lr_find(show_plot=False).valley
learn.fit(1, rate, cbs=[stop, EMA(0.99)])
with learn.distrib_ctx(split_batches=True, sync_bn=False) as same, same.no_bar():
    same.fit_one_cycle(1, 3e-3, cbs=SaveModelCallback)
learn.to_distributed(find_unused_parameters=True, timeout=60.0).detach_distributed()
losses: list[float] = learn.recorder.losses
label, decoded, pred = learn.predict(dls.one_batch()[0][0])
values: list[float] = learn.validate()
is_well: bool = learn.check()
print(learn.summary(), learn.ema, learn.save_model.best, pred.softmax(0), losses, values, is_well)
