"""Microseconds a training step, and a batch of a validation: a hand-written loop against a Learner; see run.py.

Processor time, which with one thread is the time it takes, and which a busy machine blurs less.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from run import take_turns
from torch import nn

from learnerkit import DataLoaders, Learner, SplitBatch, accuracy

EPOCHS = 3
LOSS = nn.CrossEntropyLoss()


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def conv():
    return nn.Sequential(
        *[nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU()],
        *[nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()],
        *[nn.Flatten(), nn.Linear(16 * 7 * 7, 10)],
    )


def by_hand(model, batches):
    "Train, recording the loss of every step on the device and its mean over each epoch."
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.train()
    losses, means = [], []
    for _ in range(EPOCHS):
        for x, y in batches:
            loss = LOSS(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        means.append(torch.stack(losses[-len(batches) :]).mean().item())
    return means


def by_learner(model, batches, cbs=None):
    "The same, with the callbacks every Learner has."
    learn = Learner(
        DataLoaders(batches), model, LOSS, cbs=cbs,
        opt_func=lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    )  # fmt: skip
    learn.fit(EPOCHS, 1e-3)
    return [row[0] for row in learn.recorder.values]


def with_split_batch(model, batches):
    "The same, with a callback that takes a batch in parts where it does not fit, as none does here."
    return by_learner(model, batches, SplitBatch())


def validated_by_hand(model, batches):
    "The mean loss and the accuracy, as numbers."
    model.eval()
    losses, right, n = 0.0, 0, 0
    with torch.no_grad():
        for x, y in batches:
            pred = model(x)
            losses += LOSS(pred, y).item() * len(x)
            right += (pred.argmax(1) == y).sum().item()
            n += len(x)
    return losses / n, right / n


def validated_by_learner(model, batches):
    return Learner(DataLoaders(batches, batches), model, LOSS, metrics=accuracy).validate()


def compare_validations(rounds, steps=10_000):
    "Microseconds a batch of the MLP in each of `rounds` rounds; that both have the same results is checked."
    torch.manual_seed(0)
    batches, model, outcome = [(torch.randn(32, 16), torch.randint(4, (32,))) for _ in range(steps)], mlp(), {}

    def timed(validate):
        start = time.process_time()
        outcome[validate] = validate(model, batches)
        return (time.process_time() - start) / steps * 1e6

    found = take_turns(rounds, *(partial(timed, each) for each in (validated_by_hand, validated_by_learner)))
    assert torch.allclose(*(torch.tensor(list(result)) for result in outcome.values()))
    return found


def compare(rounds, make, shape, classes, steps):
    "Times of `rounds` rounds; that both trained the same is checked."
    torch.manual_seed(0)
    batches = [(torch.randn(shape), torch.randint(classes, shape[:1])) for _ in range(steps)]
    outcome = {}

    def timed(train):
        torch.manual_seed(0)
        model = make()
        start = time.process_time()
        means = train(model, batches)
        took = time.process_time() - start
        outcome[train] = (means, model.state_dict())
        return took / EPOCHS / steps * 1e6

    contestants = by_hand, by_learner, with_split_batch
    found = take_turns(rounds, *(partial(timed, contestant) for contestant in contestants))
    means, weights = outcome[by_hand]
    for others, twins in (outcome[by_learner], outcome[with_split_batch]):
        assert torch.allclose(torch.tensor(means), torch.tensor(others))
        assert all(torch.equal(weights[k], twins[k]) for k in weights), "they did not do the same"
    return found


def main(rounds, file):
    torch.set_num_threads(1)
    steps = {
        "MLP": compare(rounds, mlp, (32, 16), 4, steps=3000),
        "conv net": compare(rounds, conv, (32, 1, 28, 28), 10, steps=300),
    }
    Path(file).write_text(json.dumps({"steps": steps, "validations": compare_validations(rounds)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
