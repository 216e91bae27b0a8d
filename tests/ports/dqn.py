"""Deep Q-learning: a network learns the values of moves from those it has made (Mnih et al. 2015).

A walker looks for the goal of a small grid with a pit. Each step adds a move to the replay memory and draws a batch of
old ones; their values are computed with a target network, a copy of an earlier state. All random numbers are one
generator's. https://doi.org/10.1038/nature14236
"""

import copy
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import EMA, DataLoaders, GradientClip, Learner

STEPS, FIRST, BATCH, MEMORY, COPY, DISCOUNT, RATE = 40, 12, 12, 40, 8, 0.9, 2e-3
SIDE, GOAL, PIT = 4, (3, 3), (1, 2)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2 * SIDE, 24), nn.ReLU(), nn.Linear(24, len(MOVES))).double()


def seen(place):
    """The state of the walker as the network sees it."""
    return F.one_hot(torch.tensor(place), SIDE).double().flatten()


def outcome(place, action):
    """Where the walker comes to, what it gets, and whether it is over."""
    place = tuple(min(max(at + by, 0), SIDE - 1) for at, by in zip(place, MOVES[action], strict=True))
    return place, float(place == GOAL) - float(place == PIT), place in (GOAL, PIT)


class Walks:
    """The moves of a walker, of which the last ones are remembered."""

    def __init__(self, values):
        self.values, self.generator = values, torch.Generator().manual_seed(3)
        self.memory, self.place, self.step = deque(maxlen=MEMORY), (0, 0), 0

    def move(self):
        """Make the best move, or a random one, which it mostly is in the beginning."""
        if torch.rand((), generator=self.generator) < max(0.1, 1 - self.step / 30):
            action = int(torch.randint(len(MOVES), (), generator=self.generator))
        else:
            with torch.no_grad():
                action = int(self.values(seen(self.place)).argmax())
        after, reward, over = outcome(self.place, action)
        self.memory.append((self.place, action, reward, after, over))
        self.place = (0, 0) if over else after
        self.step += 1

    def draw(self):
        """A batch of old moves: states, states afterwards, actions, rewards, and which were the last of a walk."""
        rows = torch.randint(len(self.memory), (BATCH,), generator=self.generator)
        before, actions, rewards, after, over = zip(*(self.memory[i] for i in rows), strict=True)
        states = (torch.stack([seen(place) for place in places]) for places in (before, after))
        return *states, torch.tensor(actions), torch.tensor(rewards, dtype=torch.float64), torch.tensor(over)


# The loop


def loop():
    values = network()
    target = copy.deepcopy(values).requires_grad_(False)
    opt = torch.optim.RMSprop(values.parameters(), lr=RATE)
    walks, losses = Walks(values), []
    for step in range(FIRST + STEPS):
        walks.move()
        if step < FIRST:
            continue
        states, following, actions, rewards, last = walks.draw()
        with torch.no_grad():
            wanted = rewards + DISCOUNT * target(following).amax(1) * ~last
        found = values(states).gather(1, actions[:, None])[:, 0]
        loss = F.smooth_l1_loss(found, wanted)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(values.parameters(), 0.05)
        opt.step()
        losses.append(loss.item())
        if len(losses) % COPY == 0:
            target.load_state_dict(values.state_dict())
        if len(losses) % 10 == 0:
            print(f"step {len(losses)}: loss {sum(losses[-10:]) / 10:.4f}")
    return values, losses


# The Learner


class Replay(Walks, IterableDataset):
    def __iter__(self):
        while True:
            self.move()
            if self.step > FIRST:
                yield self.draw()

    def state_dict(self):
        kept = {"memory": list(self.memory), "place": self.place, "step": self.step}
        return {**kept, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.memory.extend(state["memory"])
        self.place, self.step = tuple(state["place"]), state["step"]
        self.generator.set_state(state["generator"])


def learner(*cbs):
    values = network()
    target = copy.deepcopy(values)

    def loss(pred, following, actions, rewards, last):
        with torch.no_grad():
            wanted = rewards + DISCOUNT * target(following).amax(1) * ~last
        return F.smooth_l1_loss(pred.gather(1, actions[:, None])[:, 0], wanted)

    dls = DataLoaders(DataLoader(Replay(values), batch_size=None), device="cpu", n_inp=1)
    cbs = [*cbs, EMA(0, every=COPY, module=target), GradientClip(max_value=0.05)]
    return Learner(dls, values, loss, opt_func=torch.optim.RMSprop, cbs=cbs)


def fit(learn):
    learn.fit(lr=RATE, n_steps=STEPS)
