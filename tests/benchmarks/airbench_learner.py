"""airbench94 (Jordan, arXiv:2404.00498) as a Learner, with its images and its network; see airbench_duel.py."""

from math import ceil

import torch
from torch import nn

from learnerkit import Callback, DataLoaders, Learner
from learnerkit.callbacks.schedule import SchedLin, combine_scheds

BATCH, EPOCHS, SHIFT, WHITENED = 1024, 9.9, 2, 3  # WHITENED: epochs in which the first layer's bias is trained
RATE, BIASES, MOMENTUM, DECAY = 11.5, 64.0, 0.85, 0.0153  # of 1024 images; BIASES: how much faster the norms learn
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10's, which airbench takes for all images


def block(n_in, n):
    convs = [nn.Conv2d(k, n, 3, padding="same", bias=False) for k in (n_in, n)]
    norms = [nn.BatchNorm2d(n, eps=1e-12, momentum=0.4) for _ in convs]
    return nn.Sequential(convs[0], nn.MaxPool2d(2), norms[0], nn.GELU(), convs[1], norms[1], nn.GELU())


def make_model(device, dtype):
    blocks = [nn.Conv2d(3, 24, 2), nn.GELU(), block(24, 64), block(64, 256), block(256, 256)]
    head = [nn.MaxPool2d(3), nn.Flatten(), nn.Linear(256, 10, bias=False)]
    model = nn.Sequential(*blocks, *head).to(device, dtype).to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):  # the first channels begin as the identity
            nn.init.dirac_(module.weight.data[: module.in_channels])
        elif isinstance(module, nn.BatchNorm2d):
            module.float().weight.requires_grad = False
    model[-1].register_forward_hook(lambda linear, x, logits: logits * (1 / 9))
    nn.init.zeros_(model[0].bias)
    model[0].weight.requires_grad = False
    return model


class Images:
    """Batches on the device: all images are shifted and mirrored at once, in a new order in each epoch."""

    def __init__(self, file, device, dtype=torch.half, bs=BATCH):
        data = torch.load(file, map_location=device)
        self.labels, self.bs, self.random = data["labels"], bs, torch.Generator(device)
        mean, std = (torch.tensor(each, device=device, dtype=dtype).view(3, 1, 1) for each in (MEAN, STD))
        images = (data["images"].to(dtype) / 255).permute(0, 3, 1, 2).to(memory_format=torch.channels_last)
        self.images, self.epoch = (images - mean) / std, 0

    def __len__(self):
        return len(self.labels) // self.bs

    def __iter__(self):
        n, size, draw = *self.images.shape[::3], {"generator": self.random, "device": self.labels.device}
        if self.epoch == 0:
            mirror = torch.rand(n, **draw).view(-1, 1, 1, 1) < 0.5
            self.padded = nn.ReflectionPad2d(SHIFT)(torch.where(mirror, self.images.flip(-1), self.images))
        down, right = torch.randint(-SHIFT, SHIFT + 1, (n, 2), **draw).add(SHIFT).unbind(1)
        windows = self.padded.unfold(2, size, 1).unfold(3, size, 1)  # of each image, by (down, right); no copy
        images = windows[torch.arange(n, device=down.device), :, down, right]
        images = images.flip(-1) if self.epoch % 2 else images
        self.epoch += 1
        for rows in torch.randperm(n, **draw).split(self.bs)[: len(self)]:
            yield images[rows], self.labels[rows]


class Lookahead(Callback):
    """Every fifth step the weights become an average of theirs, to which new ones add less and less."""

    only_fit, run_valid = True, False

    def before_fit(self):
        own = [t for t in self.learn.model.state_dict().values() if t.is_floating_point()]
        kinds = [[t for t in own if t.dtype is dtype] for dtype in {t.dtype for t in own}]
        self.kinds = [([t.clone() for t in kind], kind) for kind in kinds]

    def after_batch(self):
        step, steps = self.learn.train_iter, self.learn.n_steps
        for past in [0.95**5 * (step / steps) ** 3] * (step % 5 == 0) + [1.0] * (step == steps):
            for averages, own in self.kinds:
                torch._foreach_lerp_(averages, own, 1 - past)
                torch._foreach_copy_(own, averages)


class Whiten(Callback):
    """The first layer whitens patches of the images, and its bias is trained in the first epochs alone."""

    order, only_fit = Lookahead.order + 1, True

    def before_fit(self):
        patches = self.learn.dls.train.images[:5000].unfold(2, 2, 1).unfold(3, 2, 1).transpose(1, 3)
        patches = patches.reshape(-1, 12).float()
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches), UPLO="U")
        filters = (vectors / (values + 5e-4).sqrt()).T.flip(0).view(12, 3, 2, 2)
        self.learn.model[0].weight.data[:] = torch.cat([filters, -filters])

    def before_epoch(self):
        self.learn.model[0].bias.requires_grad = self.learn.epoch < WHITENED


def train(images, seed, epochs=EPOCHS):
    torch.manual_seed(seed)
    images.epoch = 0
    images.random.manual_seed(seed)
    model, scale = make_model(images.labels.device, images.images.dtype), 1024 * (1 + 1 / (1 - MOMENTUM))
    rates, steps = [BIASES * RATE / scale, RATE / scale], ceil(len(images) * epochs)
    groups = [[m.bias for m in model.modules() if isinstance(m, nn.BatchNorm2d)]]
    groups.append([p for p in model.parameters() if p.requires_grad and all(p is not q for q in groups[0])])

    def sgd(groups, lr):  # what a step decays is the same for both groups, whatever their rates
        groups = [g | {"weight_decay": DECAY * images.bs / scale / rate} for g, rate in zip(groups, rates, strict=True)]
        return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=True)

    def loss(pred, y):
        return nn.functional.cross_entropy(pred, y, label_smoothing=0.2, reduction="none").sum()

    dls = DataLoaders(images, device=images.labels.device)
    cbs, more = [Lookahead(), Whiten()], {"loss_weight": "sum", "opt_func": sgd, "splitter": lambda _: groups}
    learn = Learner(dls, model, loss, cbs=cbs, **more)
    peak = int(0.23 * steps) / steps
    lines = [[SchedLin(0.2 * rate, rate), SchedLin(rate, 0.07 * rate)] for rate in rates]
    learn.fit(n_steps=steps, lr=[combine_scheds([peak, 1 - peak], each) for each in lines])
    return learn
