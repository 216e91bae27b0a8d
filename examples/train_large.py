"""Train a GPT of any size whose parameters, gradients and moments are divided among the processes.

    python -m learnerkit.launch --nproc 2 examples/train_large.py                            # small, on a CPU
    python -m learnerkit.launch --nproc 2 examples/train_large.py --resume                   # goes on after a kill
    torchrun --nproc-per-node 8 examples/train_large.py --layers 24 --width 2048 --heads 16 \\
        --seq-len 1024 --vocab-size 32000 --bf16 --text corpus.txt                           # 1.3 billion parameters

The text is lines of chat in six languages, or a file. A run is saved in `--out`; `--resume` goes on from there, on any
number of processes. On one process nothing is divided, and the numbers are the same, up to rounding.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from learnerkit import (
    ActivationCheckpointing,
    Callback,
    CheckpointCallback,
    GradientClip,
    Learner,
    TextData,
    distributed,
    perplexity,
    set_seed,
    text_learner,
)
from learnerkit.datasets import chat_lines


class Block(nn.Module):
    """Attention and a perceptron: a unit, which is gathered when it is computed."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, vocab_size, seq_len, layers, width, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: both stay with the model, outside the units

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)  # (n, vocabulary, seq_len)


class PrintBytes(Callback):
    """Prints after the first step what this process has of the parameters, their gradients and their moments."""

    def after_step(self):
        if self.train_iter == 0 and self.epoch == 0:
            params = list(self.model.parameters())
            grads = [p.grad for p in params]
            states = [value for p in params for value in self.opt.state[p].values()]
            sizes = [sum(map(bytes_here, tensors)) / 2**20 for tensors in (params, grads, states)]
            self.learn.say(
                f"rank 0 of {distributed.world_size()} has {sizes[0]:.1f} MB of parameters, {sizes[1]:.1f} MB of "
                f"gradients and {sizes[2]:.1f} MB of optimizer state"
            )


def bytes_here(t):
    return (t.to_local() if hasattr(t, "to_local") else t).nbytes  # of a divided tensor the rows of this process


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch of all processes together")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--text", type=Path, help="a text file (UTF-8), instead of the lines of chat")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--recompute", action="store_true", help="compute activations twice, which saves memory")
    parser.add_argument("--keep-units", action="store_true", help="gather units once a step: quicker, takes memory")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument(
        "--out", type=Path, default=Path("models/large"), help="directory of the run and of the saved model"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the run in OUT/run")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_learner(args) -> Learner:
    set_seed(args.seed)
    texts = chat_lines()[0] if args.text is None else args.text.read_text(encoding="utf-8")
    data = TextData.from_texts(texts, vocab_size=args.vocab_size)
    dls = data.dataloaders(tokens=args.batch * args.seq_len, seq_len=args.seq_len)
    model = GPT(data.vocab_size, args.seq_len, args.layers, args.width, args.heads)
    if distributed.is_main():
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    cbs = [GradientClip(1.0), PrintBytes(), *([ActivationCheckpointing()] if args.recompute else [])]
    return text_learner(dls, model, perplexity, loss_func=nn.CrossEntropyLoss(), wd=0.01, cbs=cbs, model_dir=args.out)


def main():
    args = parse_args()
    learn = make_learner(args)
    if args.bf16:
        learn.to_bf16()
    saving = CheckpointCallback(args.out / "run", every=args.every, resume=args.resume)
    with learn.distrib_ctx(split_batches=True, shard=True, reshard_after_forward=not args.keep_units):
        learn.fit_one_cycle(args.epochs, args.lr, cbs=saving)
    path = learn.save("gpt")  # the file of a model that was never divided, written once, by rank 0
    if distributed.is_main():
        print(f"saved {path}")


if __name__ == "__main__":
    main()
