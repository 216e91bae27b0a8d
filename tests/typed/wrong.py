"""A user's script with mistakes, which mypy and pyright must find: a mark on a line without one is an error itself."""

from torch import nn

from learnerkit import Callback, DataLoaders, Learner
from learnerkit.datasets import fashion_mnist_sample


class Typo(Callback):
    def after_batch(self) -> None:
        print(self.lose)  # type: ignore[attr-defined]
        print(self.epoch.upper())  # type: ignore[attr-defined]
        print(self.learn.recorder.loses)  # type: ignore[attr-defined]


dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=64)
learn = Learner(dls, nn.Linear(784, 10), nn.CrossEntropyLoss())
learn.fit("3")  # type: ignore[arg-type]
learn.fit(1, lr_max=3)  # type: ignore[call-arg]
learn.fit_one_cycle(1, epochs=3)  # type: ignore[call-arg]
learn.fit(1, cbs="EMA")  # type: ignore[arg-type]
print(learn.lr_find().valey)  # type: ignore[attr-defined]
learn.lr_find().valley.upper()  # type: ignore[attr-defined]
learn.validate().upper()  # type: ignore[attr-defined]
learn.get_preds(with_inputs=True)  # type: ignore[call-arg]
learn.predict()  # type: ignore[call-arg]
learn.check().upper()  # type: ignore[attr-defined]
learn.tta(n="4")  # type: ignore[arg-type]
learn.summary().upper()  # type: ignore[attr-defined]
learn.scaling_report(steps=3)  # type: ignore[call-arg]
learn.fine_tune("3")  # type: ignore[arg-type]
with learn.distrib_ctx(split_batches="yes") as inner:  # type: ignore[arg-type]
    inner.fitt(1)  # type: ignore[attr-defined]
learn.to_distributed(timeout="1 h")  # type: ignore[arg-type]
learn.ema.every.upper()  # type: ignore[attr-defined]
print(learn.no_such_callback)  # type: ignore[attr-defined]
learn.save(3.5)  # type: ignore[arg-type]
