"""A small ResNet with a new head is fine-tuned, frozen and then whole: the ranks end with the same weights."""

import warnings
from functools import partial

import torch
from torch.utils.data import TensorDataset
from torchvision import models

from learnerkit import Callback, DataLoaders, set_seed, world
from learnerkit.vision import vision_learner


def check(model_fn, pretrained: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(28, 3, 32, 32, generator=generator), torch.arange(28) % 3)
    dls = DataLoaders.from_datasets(data, data, bs=8, device="cpu")
    set_seed(world.rank())  # heads that start differently: rank 0's is everybody's
    learn = vision_learner(dls, model_fn, 3, pretrained=pretrained)
    before = {k: v.clone() for k, v in learn.model.state_dict().items()}
    trained: list[int] = []
    look = Callback(before_train=lambda cb: trained.append(sum(p.requires_grad for p in cb.model.parameters())))
    with learn.distrib_ctx(split_batches=True, sync_bn=False):
        learn.fine_tune(1, cbs=look)
    n_params = len(list(learn.model.parameters()))
    assert trained[0] < trained[1] == n_params, trained
    assert world.same_everywhere([p.tolist() for p in learn.model.parameters()])
    after = learn.model.state_dict()
    assert all(not torch.equal(before[k], after[k]) for k, _ in learn.model.named_parameters())
    assert all(torch.isfinite(torch.tensor(learn.recorder.losses)))


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*[Bb]atch ?[Nn]orm.*")
    small = partial(models.ResNet, models.resnet.BasicBlock, [1, 1, 1, 1])
    vit = partial(
        models.VisionTransformer, image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    for model_fn in (small, vit):
        check(model_fn, pretrained=True)
    if world.is_main():
        print("all well")
