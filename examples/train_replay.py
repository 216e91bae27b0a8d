"""Learn to find the way through a grid with pits: a deep Q-network (Mnih et al. 2015) with a replay memory.

    python examples/train_replay.py
    python -m learnerkit.launch --nproc 2 examples/train_replay.py

The training data are made by the model: before each batch is drawn, walkers move as the present model says. All
processes watch the same walkers, and share each batch, so the numbers are those of one process.
"""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import Callback, DataLoaders, Learner, set_seed

SIDE, GOAL = 6, torch.tensor([5, 5])
PITS = torch.tensor([[1, 1], [1, 4], [2, 2], [3, 4], [4, 1], [4, 2]])
MOVES = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])
DISCOUNT = 0.9


def encode(places):
    return F.one_hot(places[:, 0] * SIDE + places[:, 1], SIDE * SIDE).float()


def move(places, actions):
    """Where walkers come to, what they get, and whether it is over: at the goal (1) or in a pit (-1)."""
    places = (places + MOVES[actions]).clamp(0, SIDE - 1)
    goal = (places == GOAL).all(1)
    pit = (places[:, None] == PITS).all(2).any(1)
    return places, goal.float() - pit.float(), goal | pit


class Replay(IterableDataset):
    """Lets walkers move, remembers what happens to them, and yields batches of (place, action, value to learn)."""

    def __init__(self, model, n, bs=64, walkers=8, size=4096):
        self.model, self.target = model, copy.deepcopy(model)
        self.n, self.bs, self.size, self.seen = n, bs, size, 0
        self.places = torch.randint(SIDE, (walkers, 2))
        self.memory = []

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            self.play()
            yield self.batch()

    @torch.no_grad()
    def play(self):
        "Let each walker make a move: that of the highest value, or at first often a random one."
        n = len(self.places)
        explores = torch.rand(n) < max(0.1, 1 - self.seen / 300)
        best = self.model.values(encode(self.places)).argmax(1)
        actions = torch.where(explores, torch.randint(len(MOVES), (n,)), best)
        places, rewards, over = move(self.places, actions)
        seen = self.places, actions, rewards, places, over
        kept = zip(self.memory or [part[:0] for part in seen], seen, strict=True)
        self.memory = [torch.cat(parts)[-self.size :] for parts in kept]
        self.places = torch.where(over[:, None], torch.randint(SIDE, (n, 2)), places)
        self.seen += 1

    @torch.no_grad()
    def batch(self):
        if self.seen % 50 == 1:  # the target network follows in steps
            self.target.load_state_dict(self.model.state_dict())
        rows = torch.randint(len(self.memory[0]), (self.bs,))
        places, actions, rewards, after, over = (part[rows] for part in self.memory)
        values = rewards + DISCOUNT * self.target.values(encode(after)).amax(1) * ~over
        return encode(places), actions, values


class Values(nn.Module):
    """The value of each move from a place; `forward` returns that of the move which was made."""

    def __init__(self, size=64):
        super().__init__()
        self.values = nn.Sequential(nn.Linear(SIDE * SIDE, size), nn.ReLU(), nn.Linear(size, len(MOVES)))

    def forward(self, places, actions):
        return self.values(places).gather(1, actions[:, None])[:, 0]


class Arrives(Callback):
    """Log the share of the places from which the best moves lead to the goal."""

    @torch.no_grad()
    def after_train(self):
        places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
        arrived = running = (places[:, None] != torch.cat([PITS, GOAL[None]])).any(2).all(1)
        total, arrived = running.sum(), torch.zeros(len(places))
        for _ in range(3 * SIDE):
            places, rewards, over = move(places, self.model.values(encode(places)).argmax(1))
            arrived += (rewards > 0) & running
            running = running & ~over
        self.learn.log_metric("arrives", arrived.sum() / total)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps in an epoch")
    args = parser.parse_args()
    set_seed(42)
    model = Values()
    data = DataLoader(Replay(model, args.steps), batch_size=None)  # it yields batches, not samples
    learn = Learner(DataLoaders(data, device="cpu"), model, nn.SmoothL1Loss(), lr=3e-3, cbs=Arrives)
    with learn.distrib_ctx(split_batches=True):
        learn.fit(args.epochs)


if __name__ == "__main__":
    main()
