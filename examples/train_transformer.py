"""Train a model of transformers, as a classifier or as a language model; on any number of processes.

    python -m learnerkit.launch --nproc 2 examples/train_transformer.py                 # which language is it?
    python -m learnerkit.launch --nproc 2 examples/train_transformer.py --task next     # the next token
    torchrun --nproc-per-node 2 examples/train_transformer.py --model bert-base-uncased --bf16 --lr 5e-5

By default a small new model is trained on lines of chat in six languages, with a tokenizer of its own. `--model` takes
any of Hugging Face's, by name or directory, with its tokenizer; `--texts` a folder of .txt files in folders by class.
"""

import argparse
from pathlib import Path

from transformers import AutoConfig

from learnerkit import set_seed

SMALL = {
    "classify": AutoConfig.for_model(
        "bert", hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    ),
    "next": AutoConfig.for_model("gpt2", n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1),
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["classify", "next"], default="classify")
    parser.add_argument("--model", help="a pretrained model, by name or directory")
    parser.add_argument("--texts", type=Path, help="a folder of .txt files, in folders by class")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch of all processes together")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in an optimizer step")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again, to save memory")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main():
    args = parse_args()
    set_seed(args.seed)
    ...


if __name__ == "__main__":
    main()
