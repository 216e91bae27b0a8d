"""Train with hyper-parameters from a file; the command line can change each of them.

    python examples/from_config.py --config examples/config.yaml
    python examples/from_config.py --config examples/config.yaml --fit.n_epoch 2 --model.hidden 32
    python examples/from_config.py --help                               # all values that can be set
    python -m learnerkit.launch --nproc 2 examples/from_config.py --config examples/config.yaml

Names and types are those of the signatures of `Learner`, of its method `fit_one_cycle`, and of `make_model` below. In a
search (`python -m learnerkit.sweep`) the values of the trial come before those of the file. The log is history.jsonl.

Needs pip install 'jsonargparse[signatures]'
"""

from jsonargparse import ArgumentParser
from torch import nn

from learnerkit import DataLoaders, JSONLogger, Learner, accuracy, set_seed, sweep
from learnerkit.datasets import fashion_mnist_sample


def make_model(hidden: int = 128, dropout: float = 0.2) -> nn.Module:
    """Make the network.

    Args:
        hidden: the size of the hidden layer.
        dropout: the share of its outputs that training sets to zero.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def parse_args():
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", action="config", help="a YAML file with any of the following")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bs", type=int, default=64, help="images in a batch of all processes together")
    parser.add_function_arguments(make_model, "model")
    objects = {"dls", "model", "loss_func", "opt_func", "splitter", "cbs", "metrics", "loss_weight"}
    parser.add_class_arguments(Learner, "learner", skip=objects)
    parser.add_method_arguments(Learner, "fit_one_cycle", "fit", skip={"cbs"})
    return parser.parse_args()


def main():
    args = parse_args()
    if args.fit.n_epoch is None and args.fit.n_steps is None:
        raise SystemExit("give --config FILE, or --fit.n_epoch N: how long to train")
    trial = sweep.params(lr_max=args.fit.lr_max, hidden=args.model.hidden)  # outside of a search these values
    args.fit.lr_max, args.model.hidden = trial.lr_max, trial.hidden
    set_seed(args.seed)
    dls = DataLoaders.from_datasets(*fashion_mnist_sample(), bs=args.bs)
    log = JSONLogger(every=None, config={"args": args.as_dict()})
    learn = Learner(dls, make_model(**args.model), nn.CrossEntropyLoss(), metrics=accuracy, cbs=log, **args.learner)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(**args.fit)


if __name__ == "__main__":
    main()
