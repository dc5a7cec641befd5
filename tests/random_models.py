"""Random models: trees of modules, as hypothesis draws them, with everything that sharding can get wrong.

A tree is nested tuples, so that it prints, pickles and shrinks; `RandomModel(tree)` builds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.models import seeded

WIDTH = 5  # of all features: no number of ranks divides it

Tree = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Places:
    """A placement for any parameter, the first dimension or another by its shape and a seed."""

    seed: int

    def __call__(self, parameter: nn.Parameter) -> Shard | None:
        return Shard((self.seed + sum(parameter.shape)) % parameter.dim()) if parameter.dim() else None


def schedules() -> dict[str, st.SearchStrategy[Any]]:
    """Options of `fsdp_compile` and `rewrite` that fit every model here, and change graphs but no values."""
    by_size = partial(size_based_auto_wrap_policy, min_num_params=40)
    return {
        "auto_wrap_policy": st.sampled_from([{nn.Linear}, by_size, {RandomModel}, "auto"]),
        "forward_prefetch": st.integers(0, 3),
        "backward_prefetch": st.integers(0, 3),
        "collective_lowering": st.sampled_from(["packed", "grouped"]),
        "shard_placement_fn": st.builds(Places, st.integers(0, 1)),
    }


ODD_NAMES = (
    "a,b",
    "a/b",
    "a:b",
    "a b",
    "a%2Cb",
    "a+b",
    "1+2",
    "root",
    "a[0]",
    "*",
    "{x}",
    "it's",
    '"',
    "\\",
    "\n",
    "<ü>",
)
"""Names that modules may have: all that torch refuses is a dot."""


def trees(*, with_dropout: bool = True, with_rounding: bool = False) -> st.SearchStrategy[Tree]:
    """What `RandomModel` is built of; of what rounds, Inductor leaves a part out."""
    plain = st.one_of(
        st.tuples(st.just("linear"), st.booleans()),
        st.tuples(st.just("mlp"), st.integers(1, 9)),
        st.just(("norm",)),
        st.tuples(st.just("scale"), st.sampled_from([(), (1,), (WIDTH,), (1, WIDTH), (3, 1)])),
        st.tuples(st.just("adapter"), st.integers(1, 3)),
        st.tuples(st.just("embedding"), st.integers(1, 7)),
        st.tuples(st.just("tied"), st.integers(0, 3)),
        st.tuples(st.just("again"), st.integers(0, 5)),
        st.tuples(st.just("unused"), st.integers(1, 4)),
        st.just(("strided",)),
        st.just(("double",)),
    )
    plain |= st.tuples(st.just("named"), st.sampled_from(ODD_NAMES), plain)
    plain |= st.tuples(st.just("narrow"), st.integers(1, 9)) if with_rounding else st.nothing()
    inner = st.tuples(st.just("checkpoint"), plain)
    leaves = plain | st.just(("counted",))
    leaves |= st.just(("dropout",)) if with_dropout else st.nothing()

    def nested(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        some = st.lists(children, min_size=1, max_size=4).map(tuple)
        return st.one_of(
            st.tuples(st.just("sequence"), some),
            st.tuples(st.just("residual"), children),
            st.tuples(st.just("frozen"), children),
            st.tuples(st.just("sum"), children, children),
        )

    return st.recursive(leaves | inner, nested, max_leaves=8)


class RandomModel(nn.Module):
    """A tree between a linear layer that is always trained and a loss; also returns features if `is_double`."""

    def __init__(self, tree: Tree, is_double: bool = False) -> None:
        super().__init__()
        built: list[nn.Module] = []
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tree = _build(tree, [self.first], built)
        self.is_double = is_double

    def forward(self, x: Tensor, target: Tensor) -> Any:
        x = self.tree(torch.tanh(self.first(x)))
        loss = (x - target).square().mean()
        return (loss, x[:, :2] / 3) if self.is_double else loss

    @staticmethod
    def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded(seed)
        return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


class HeadedModel(RandomModel):
    """A random model with several outputs, of which a loss may take any."""

    def __init__(self, tree: Tree, num_heads: int) -> None:
        super().__init__(tree)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(num_heads))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        early = torch.tanh(self.first(x))
        late = self.tree(early)
        heads = [head((late, early, early + late)[index % 3]) for index, head in enumerate(self.heads)]
        return ((late - target).square().mean(), early.sum(0), *heads)

    @staticmethod
    def loss(outputs: Any, taken: Sequence[int]) -> Tensor:
        """Of the outputs with these numbers."""
        return torch.stack([outputs[index].square().mean() for index in taken]).sum()

    def freeze(self, seed: int) -> None:
        """Freeze a part of the parameters behind the first layer, and thaw the others."""
        generator = seeded(seed)
        for name, parameter in self.named_parameters():
            if not name.startswith("first.") and parameter.dtype != torch.bfloat16:
                parameter.requires_grad_(bool(torch.rand((), generator=generator) < 0.6))


def _build(tree: Tree, linears: list[nn.Linear], built: list[nn.Module], is_recomputed: bool = False) -> nn.Module:
    kind, *arguments = tree
    if kind == "named":
        name, child = arguments
        module: nn.Module = Named(name, _build(child, linears, built, is_recomputed))
    elif kind in _NESTED:
        children = arguments[0] if kind == "sequence" else arguments
        module = _NESTED[kind](*[_build(child, linears, built, kind == "checkpoint") for child in children])
    elif kind == "again":
        # Inductor's random numbers, by which it draws in a recomputed region, are its own; eager counts twice there.
        known = [module for module in built if not (is_recomputed and _draws_or_counts(module))]
        return known[arguments[0] % len(known)] if known else nn.Tanh()
    elif kind == "tied":
        module = nn.Linear(WIDTH, WIDTH, bias=False)
        module.weight = linears[arguments[0] % len(linears)].weight
    else:
        module = _LEAVES[kind](*arguments)
        if isinstance(module, nn.Linear):
            linears.append(module)
    built.append(module)
    return module


def _draws_or_counts(module: nn.Module) -> bool:
    return any(isinstance(each, (nn.Dropout, Counted)) for each in module.modules())


_SHAPES = [(), (1,), (2,), (1, 1), (3,), (0,)]


def tiny_units() -> st.SearchStrategy[list[tuple[tuple[int, ...], torch.dtype, bool]]]:
    """What `Tiny` is built of: the shape and dtype of each unit's parameter, and whether it is trained."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
    return st.lists(st.tuples(st.sampled_from(_SHAPES), dtypes, st.booleans()), min_size=1, max_size=6)


class Tiny(nn.Sequential):
    """Units of a few bytes each."""

    def __init__(self, units: list[tuple[tuple[int, ...], torch.dtype, bool]]) -> None:
        super().__init__(*[TinyUnit(*unit) for unit in units])


class TinyUnit(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, is_trained: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.factor.float().sum())


class Narrow(nn.Module):
    """A product as autocast computes it: one weight and the bias are cast, another weight stays as it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, hidden))
        self.scale = nn.Parameter(torch.randn(hidden))
        self.down = nn.Parameter(torch.randn(hidden, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh((x.bfloat16() @ self.up.bfloat16()).to(x.dtype) * self.scale.to(x.dtype))
        z: Tensor = (y.bfloat16() @ self.down.bfloat16() + self.bias.bfloat16()).to(x.dtype)
        return z


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    """A parameter of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * (self.factor.sum(0) if self.factor.dim() == 2 else self.factor))


class Adapter(nn.Module):
    """A frozen weight in bf16, and an update of low rank in f32."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16() / 2, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(rank, WIDTH) / 2), nn.Parameter(torch.randn(WIDTH, rank) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.float().t() + x @ self.down.t() @ self.up.t())


class Lookup(nn.Module):
    """Rows of a table, chosen by the first feature: the sum of normed ones is zero but for rounding."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.table((x[:, 0] > 0).long() % self.table.num_embeddings))


class Unused(nn.Module):
    """A layer that takes part, and one that does not."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(WIDTH, rows), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Strided(nn.Module):
    """A parameter whose elements do not lie in memory in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Double(nn.Module):
    """A parameter in f64 in a model in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.double() + self.shift).float()


class Counted(nn.Module):
    """Buffers that are written and then used; copies are used, so that eager can go backward after another write."""

    num_calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = x * self.mean.cos()
        self.num_calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return torch.tanh(before + x * self.factor * self.mean.exp() / (self.num_calls.clone() + 1))


class Named(nn.Module):
    """A child by any name."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        (child,) = self.children()
        return torch.tanh(child(x))


class Residual(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.child(x))


class Frozen(Residual):
    def __init__(self, child: nn.Module) -> None:
        super().__init__(child)
        for parameter in child.parameters(recurse=True):
            parameter.requires_grad_(False)


class Sum(nn.Module):
    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x) + self.other(x))


class Checkpointed(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.child, x, use_reentrant=False)


_NESTED: dict[str, Any] = {
    "sequence": nn.Sequential,
    "residual": Residual,
    "frozen": Frozen,
    "sum": Sum,
    "checkpoint": Checkpointed,
}
_LEAVES: dict[str, Any] = {
    "linear": lambda bias: nn.Linear(WIDTH, WIDTH, bias=bias),
    "mlp": Mlp,
    "narrow": Narrow,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "scale": Scale,
    "adapter": Adapter,
    "embedding": Lookup,
    "unused": Unused,
    "counted": Counted,
    "strided": Strided,
    "double": Double,
    "dropout": lambda: nn.Dropout(0.3),
}
