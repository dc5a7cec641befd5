"""Float8 training by torchao, as its users write it: sharded, it is equal to the unsharded model."""

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fsdp_compile import fsdp_compile
from tests.distributed.training import full, sgd
from tests.models import DEVICE, made, seeded
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 48, bias=False), nn.LayerNorm(48), nn.Linear(48, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x)))).square().mean()


def in_float8(recipe):
    return convert_to_float8_training(made(Net), config=Float8LinearConfig.from_recipe_name(recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_it_trains_as_the_unsharded_model(world_size, backend, recipe):
    """Scales are those of whole weights; ranks have the same rows, whose scales are those of the rows of a step."""
    model, expected = fsdp_compile(in_float8(recipe), backend=backend), in_float8(recipe)
    optimizers = sgd(model.parameters()), sgd(expected.parameters())
    close = {"rtol": 0, "atol": 0 if backend == "aot_eager" else 1e-7}
    for step in range(3):
        x = torch.randn(16, 32, generator=seeded(step), device=DEVICE)
        losses = model(x), expected(x)
        torch.testing.assert_close(*losses, **close)
        for loss in losses:
            loss.backward()
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full(found.grad), wanted.grad, **close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
