"""Labels of sequences that are not aligned, after Graves et al. 2006 (CTC, doi:10.1145/1143844.1143891).

Utterances have different lengths, and a batch is padded to the longest. The network reads them forwards alone, so no
step depends on the padding behind it. The loss is a mean over utterances, each divided by the number of its labels.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD
from torch.utils.data import DataLoader

from learnerkit import DataLoaders, EarlyStoppingCallback, GradientClip, Learner, Metric, SaveModelCallback

EPOCHS, PATIENCE, BATCH, LABELS, FEATURES, WIDTH = 9, 2, 12, 3, 4, 12
RATE, MOMENTUM, NORM = 0.5, 0.9, 1.0


def utterances(n, seed):
    """Pairs of features (steps, features) and labels from 1; each label sounds for two to four steps."""
    generator = torch.Generator().manual_seed(seed)
    sounds = torch.randn(LABELS, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for _ in range(n):
        count = int(torch.randint(2, 6, (), generator=generator))
        labels = torch.randint(LABELS, (count,), generator=generator)
        steps = sounds[labels.repeat_interleave(torch.randint(2, 5, (count,), generator=generator))]
        found.append((steps + 0.3 * torch.randn(steps.shape, generator=generator, dtype=steps.dtype), labels + 1))
    return found


def collate(samples):
    """Features and labels, padded, and the lengths of both."""
    x, y = zip(*samples, strict=True)
    lengths = [torch.tensor(list(map(len, each))) for each in (x, y)]
    return pad_sequence(x, batch_first=True), lengths[0], pad_sequence(y, batch_first=True), lengths[1]


def loaders():
    order = torch.Generator().manual_seed(3)
    train = DataLoader(utterances(60, 1), BATCH, shuffle=True, generator=order, collate_fn=collate)
    return train, DataLoader(utterances(20, 2), BATCH, collate_fn=collate)


class Reader(nn.Module):
    """Log-probabilities of the blank and the labels at each step, of shape (utterances, steps, 1 + labels)."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, WIDTH, batch_first=True), nn.Linear(WIDTH, 1 + LABELS)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).log_softmax(2)


def network():
    torch.manual_seed(4)
    return Reader().double()


def ctc(pred, lengths, labels, counts):
    return F.ctc_loss(pred.transpose(0, 1), labels, lengths, counts)


def distance(a, b):
    """The least number of insertions, deletions and substitutions that make one list of the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def edits(pred, lengths, labels, counts):
    """Sum of the distances between labels and the best path: without repetitions, and without blanks."""
    total = 0
    for path, length, target, count in zip(pred.argmax(2), lengths, labels, counts, strict=True):
        kept = path[:length].unique_consecutive()
        total += distance(kept[kept > 0].tolist(), target[:count].tolist())
    return total


# The loop


@torch.no_grad()
def validate(model, batches):
    model.eval()
    total, wrong, samples, labels = 0.0, 0, 0, 0
    for x, *targets in batches:
        pred = model(x)
        total += ctc(pred, *targets).item() * len(x)
        wrong += edits(pred, *targets)
        samples += len(x)
        labels += targets[-1].sum().item()
    return total / samples, wrong / labels


def loop():
    model = network()
    train, valid = loaders()
    opt = SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses, least, best, since = [], float("inf"), None, 0
    for epoch in range(EPOCHS):
        model.train()
        total = 0.0
        for x, *targets in train:
            loss = ctc(model(x), *targets)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            opt.step()
            losses.append(loss.item())
            total += loss.item() * len(x)
        found, error = validate(model, valid)
        print(f"epoch {epoch}: train {total / len(train.dataset):.4f}, valid {found:.4f}, label error {error:.4f}")
        if found < least:
            least, best, since = found, copy.deepcopy(model.state_dict()), 0
        else:
            since += 1
            if since == PATIENCE:
                break
    model.load_state_dict(best)
    return model, losses


# The Learner


class LabelError(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("wrong", 0)
        self.add_state("labels", 0)

    def update(self, pred, *targets):
        self.wrong += edits(pred, *targets)
        self.labels += targets[-1].sum()

    def compute(self):
        return self.wrong / self.labels


def learner(*cbs):
    dls = DataLoaders(*loaders(), n_inp=1, device="cpu")
    cbs = [*cbs, GradientClip(NORM), SaveModelCallback(), EarlyStoppingCallback(patience=PATIENCE)]
    opt_func = partial(SGD, lr=RATE, momentum=MOMENTUM)
    return Learner(dls, network(), ctc, opt_func=opt_func, metrics=LabelError(), cbs=cbs)


def fit(learn):
    learn.fit(EPOCHS)
