"""Fine-tuning of a transformer encoder, with the recipe of ELECTRA (Clark et al. 2020, arXiv:2003.10555).

Rates fall from the head to the embeddings by a factor for each layer; they warm up and decrease along a line. Biases
and norms have no weight decay. The encoder stands for a pretrained one; the task is the language of a line of chat.
The best of the validated models is kept, and training stops when it gets no better.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from learnerkit import (
    DataLoaders,
    EarlyStoppingCallback,
    GradientClip,
    Learner,
    SaveModelCallback,
    accuracy,
    layer_decay,
    linear_warmup,
)
from learnerkit.callbacks.schedule import SchedLin
from learnerkit.datasets import chat_lines

EPOCHS, PATIENCE, BATCH, LENGTH = 9, 2, 24, 24
WIDTH, HEADS, DEPTH = 12, 2, 2
RATE, OF_LAYERS, DECAY, WARM_UP, NORM = 3e-2, 0.8, 0.01, 5, 1.0


def samples():
    """Pairs of bytes and a language, mixed."""
    lines, languages = chat_lines()
    names = sorted(set(languages))
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(1)).tolist()
    return [(torch.tensor(list(lines[i].encode()[:LENGTH])), names.index(languages[i])) for i in order]


def collate(pairs):
    """A batch by names, padded to the longest line."""
    texts, labels = zip(*pairs, strict=True)
    ids = pad_sequence(texts, batch_first=True)
    return {"ids": ids, "is_padding": ids == 0, "labels": torch.tensor(labels)}


def loaders():
    found = samples()
    order = torch.Generator().manual_seed(2)
    train = DataLoader(found[:120], BATCH, shuffle=True, generator=order, collate_fn=collate)
    return train, DataLoader(found[240:320], BATCH, collate_fn=collate)


class Encoder(nn.Module):
    """Scores of the languages, from the mean of what the encoder makes of the bytes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = partial(nn.TransformerEncoderLayer, dropout=0.0, activation="gelu", batch_first=True)
        self.blocks = nn.ModuleList(layer(WIDTH, HEADS, 2 * WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, ids, is_padding):
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, src_key_padding_mask=is_padding)
        counts = ~is_padding.unsqueeze(2)
        return self.head((x * counts).sum(1) / counts.sum(1))


def network():
    torch.manual_seed(3)
    return Encoder().double()


# The loop


def groups_of(model):
    groups = {}
    for name, p in model.named_parameters():
        if name.startswith("head"):
            layer = DEPTH + 1
        elif name.startswith("blocks"):
            layer = int(name.split(".")[1]) + 1
        else:
            layer = 0
        decay = 0.0 if name.endswith("bias") or "norm" in name else DECAY
        rate = RATE * OF_LAYERS ** (DEPTH + 1 - layer)
        group = groups.setdefault((layer, decay), {"params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(p)
    return list(groups.values())


@torch.no_grad()
def validate(model, batches):
    model.eval()
    total, right = 0.0, 0
    for batch in batches:
        pred = model(batch["ids"], batch["is_padding"])
        total += F.cross_entropy(pred, batch["labels"], reduction="sum").item()
        right += (pred.argmax(1) == batch["labels"]).sum().item()
    n = len(batches.dataset)
    return total / n, right / n


def loop():
    model = network()
    train, valid = loaders()
    opt = AdamW(groups_of(model), lr=RATE)
    steps = EPOCHS * len(train)

    def share(step):
        return step / WARM_UP if step < WARM_UP else (steps - step) / (steps - WARM_UP)

    scheduler = LambdaLR(opt, share)
    losses, most, best, since = [], -1.0, None, 0
    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            pred = model(batch["ids"], batch["is_padding"])
            loss = F.cross_entropy(pred, batch["labels"])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
            opt.step()
            scheduler.step()
            losses.append(loss.item())
        found, right = validate(model, valid)
        print(f"epoch {epoch}: train {losses[-1]:.4f}, valid {found:.4f}, accuracy {right:.4f}")
        if right > most:
            most, best, since = right, copy.deepcopy(model.state_dict()), 0
        else:
            since += 1
            if since == PATIENCE:
                break
    model.load_state_dict(best)
    return model, losses


# The Learner


def learner(*cbs):
    best = [SaveModelCallback("accuracy"), EarlyStoppingCallback("accuracy", patience=PATIENCE)]
    return Learner(
        DataLoaders(*loaders(), device="cpu"),
        network(),
        F.cross_entropy,
        splitter=partial(layer_decay, decay=OF_LAYERS),
        wd={"*bias": 0, "*norm*": 0, "*": DECAY},
        metrics=accuracy,
        cbs=[*cbs, GradientClip(NORM), *best],
    )


def fit(learn):
    steps = EPOCHS * len(learn.dls.train)
    learn.fit(EPOCHS, linear_warmup(WARM_UP / steps, SchedLin(RATE, 0)))
