"""The callback every Learner starts with: train and eval mode, counters, sample order."""

from contextlib import ExitStack

from torch.utils.data import DataLoader

from learnerkit.callback import Callback
from learnerkit.data import SampleOrder, draws_globally, seeded_samplers, with_own_stream


class TrainEvalCallback(Callback):
    """Puts the model into train or eval mode, counts steps, and seeds the sample order of each epoch."""

    order = -10
    run_valid = False

    def __init__(self):
        super().__init__()
        self.sample_order: SampleOrder | None = None
        self._seeded = ExitStack()
        self._twin: tuple[DataLoader, DataLoader] | None = None

    def before_fit(self):
        if self.learn.task == "fit":
            self.learn.train_iter, self.learn.pct_train = 0, 0.0
            self.sample_order, self._twin = SampleOrder(), None

    def before_train(self):
        learn = self.learn
        learn.model.train()
        learn.pct_train = learn.epoch / learn.n_epoch
        self._seeded.enter_context(seeded_samplers(learn.dl, self.sample_order.seed(learn.epoch)))
        if draws_globally(learn.dl) and not learn.sharded:  # with several ranks their loaders see to it
            if self._twin is None or self._twin[0] is not learn.dl:
                self._twin = learn.dl, with_own_stream(learn.dl)
            learn.dl = self._twin[1]

    def after_batch(self):
        learn = self.learn
        learn.train_iter += 1
        if learn.n_iter:  # a loader without length advances pct_train by whole epochs
            learn.pct_train = (learn.epoch + (learn.iter + 1) / learn.n_iter) / learn.n_epoch

    def cleanup_train(self):
        self._seeded.close()

    def before_validate(self):
        self.learn.model.eval()
