"""A language model of bytes, after Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).

The model returns `(logits, loss)`. Each step takes several batches of random places of a text. AdamW decays matrices
alone; the rate warms up and falls along a cosine; now and then the model is validated, and the best one is kept.
"""

import copy
import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset

from learnerkit import (
    DataLoaders,
    GradientAccumulation,
    GradientClip,
    Learner,
    SaveModelCallback,
    ValidateEvery,
    linear_warmup,
)
from learnerkit.callbacks.schedule import SchedCos
from learnerkit.datasets import chat_lines

STEPS, EVERY, N_BATCHES, BATCH, LENGTH = 15, 3, 2, 6, 12
WIDTH, HEADS, DEPTH = 16, 2, 2
PEAK, LEAST, WARM_UP, BETAS, DECAY, NORM = 3e-2, 1e-3, 3, (0.9, 0.95), 0.1, 1.0


def text():
    """The bytes to train on, and those to validate on."""
    found = torch.tensor(list("\n".join(chat_lines()[0][:100]).encode()))
    return found.split(len(found) * 4 // 5)[:2]


class Places(IterableDataset):
    """Endless batches of places of a text, each with the bytes that follow."""

    def __init__(self, content, seed):
        self.content, self.generator = content, torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            starts = torch.randint(len(self.content) - LENGTH, (BATCH, 1), generator=self.generator)
            places = starts + torch.arange(LENGTH)
            yield self.content[places], self.content[places + 1]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def loaders():
    """Endless batches for training, and four to validate on."""
    train, valid = text()
    fixed = iter(Places(valid, seed=2))
    return DataLoader(Places(train, seed=1), batch_size=None), [next(fixed) for _ in range(4)]


class Block(nn.Module):
    """Attention to earlier places, and a network for each place."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A causal transformer, whose last layer shares its weights with the embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # where the residual stream is added to
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * DEPTH))
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.T
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def network():
    torch.manual_seed(3)
    return GPT().double()


# The loop


def rate(step):
    if step < WARM_UP:
        return PEAK * (step + 1) / (WARM_UP + 1)
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * share)) / 2


@torch.no_grad()
def validate(model, batches):
    model.eval()
    found = [model(x, y)[1].item() for x, y in batches]
    model.train()
    return sum(found) / len(found)


def loop():
    model = network()
    train, valid = loaders()
    batches = iter(train)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    opt = AdamW(groups, lr=PEAK, betas=BETAS)
    losses, least, best = [], math.inf, None
    model.train()
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = rate(step)
        for _ in range(N_BATCHES):
            x, y = next(batches)
            _, loss = model(x, y)
            (loss / N_BATCHES).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0:
            found = validate(model, valid)
            print(f"step {step + 1}: train {losses[-1]:.4f}, valid {found:.4f}")
            if found < least:
                least, best = found, copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return model, losses


# The Learner


def learner(*cbs):
    step = [GradientAccumulation(n_batches=N_BATCHES), GradientClip(NORM)]
    return Learner(
        DataLoaders(*loaders(), device="cpu"),
        network(),
        opt_func=partial(AdamW, betas=BETAS),
        wd=DECAY,
        loss_weight="samples",  # a mean over bytes, of which each sample has as many
        cbs=[*cbs, *step, ValidateEvery(EVERY), SaveModelCallback()],
    )


def fit(learn):
    schedule = linear_warmup(WARM_UP / STEPS, SchedCos(PEAK, LEAST), PEAK / (WARM_UP + 1))
    learn.fit(n_steps=STEPS, lr=schedule)
