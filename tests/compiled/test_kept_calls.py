"""A second start finds what the first has compiled: in this process, Dynamo starts from nothing."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from fsdp_compile.compiler.kept_calls import Keep
from fsdp_compile.compiler.partitioner import Partitioner
from fsdp_compile.costs import HARDWARE
from fsdp_compile.runtime.pickled_graphs import runs_elsewhere
from tests.models import build, seeded
from tests.ranks import join_fake_group

pytestmark = pytest.mark.usefixtures("two_ranks")


@dataclasses.dataclass
class Start:
    """Of a job of two ranks that send nothing: what a step has computed, and what was found."""

    values: list[torch.Tensor | None]
    graphs: str
    plan: object
    was_found: bool


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def num_rewritten(monkeypatch):
    """How many joint graphs were rewritten so far."""
    rewritten: list[None] = []
    rewrite = Partitioner._rewritten

    def counted(*args, **kwargs):
        rewritten.append(None)
        return rewrite(*args, **kwargs)

    monkeypatch.setattr(Partitioner, "_rewritten", counted)
    return lambda: len(rewritten)


@pytest.fixture
def start(num_rewritten):
    """A start of a job: a step of a model with these options, and the parameters after it."""

    def start(model=None, inputs=None, loss_of=lambda output: output, backend="aot_eager", **options):
        torch._dynamo.reset()
        before = num_rewritten()
        model = Scaled() if model is None else model
        inputs = (rows(),) if inputs is None else inputs
        model = fsdp_compile(model, backend=backend, sync_module_states=False, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = loss_of(model(*inputs))
        loss.backward()
        gradients = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        values = [loss.detach(), *gradients, *(p.to_local().detach().clone() for p in model.parameters())]
        graphs = model.graphs[-1]
        return Start(values, f"{graphs}\n{graphs.schedule()}", graphs.plan, num_rewritten() == before)

    return start


class Scaled(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.factor = factor

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() * self.factor
        return x.sum()


@dataclasses.dataclass(frozen=True)
class Nothing:
    def __call__(self, gm):
        pass


class Halves(Scaled):
    """Its two results lead to different parameters."""

    def forward(self, x):
        return self.layers[0](x).sum(), self.layers[1](x).tanh().sum()


def rows(num=4):
    return torch.randn(num, 8, generator=seeded(0))


def assert_same(found, expected):
    for value, other in zip(found.values, expected.values, strict=True):
        assert (value is None) == (other is None)
        assert value is None or torch.equal(value, other)
    assert found.graphs == expected.graphs


backends = pytest.mark.parametrize("backend", ["inductor", "aot_eager"])


@backends
def test_a_second_start_finds_the_call_and_computes_the_same(start, backend):
    first = start(backend=backend)
    second = start(backend=backend)
    assert not first.was_found and second.was_found
    assert_same(second, first)


@backends
def test_a_transformer_is_found(start, backend):
    model = build("gpt")
    starts = [start(build("gpt"), model.inputs(4, seed=0), backend=backend) for _ in range(2)]
    assert [each.was_found for each in starts] == [False, True]
    assert_same(*starts)


@backends
def test_gradients_are_none_where_eager_has_none_after_a_second_start_too(start, backend):
    starts = [start(Halves(), loss_of=lambda results: results[0], backend=backend) for _ in range(2)]
    assert [each.was_found for each in starts] == [False, True]
    assert starts[0].values[3] is None
    assert_same(*starts)


class Checkpointed(Scaled):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x.sum()


@backends
def test_checkpointed_layers_are_found(start, backend):
    starts = [start(Checkpointed(), backend=backend) for _ in range(2)]
    assert [each.was_found for each in starts] == [False, True]
    assert_same(*starts)


@backends
def test_steps_that_keep_gradients_are_found(num_rewritten, backend):
    def accumulated():
        torch._dynamo.reset()
        before = num_rewritten()
        model = fsdp_compile(Scaled(), backend=backend, sync_module_states=False)
        with model.no_sync():
            model(rows()).backward()
        model(rows(4) + 1).backward()
        return [p.grad.to_local().clone() for p in model.parameters()], num_rewritten() - before

    (first, num_first), (second, num_second) = accumulated(), accumulated()
    assert (num_first, num_second) == (2, 0)
    assert all(map(torch.equal, first, second))


def test_a_second_model_of_the_process_hands_its_gradients_to_its_own_shards():
    models = [fsdp_compile(Scaled(), backend="inductor", sync_module_states=False) for _ in range(2)]
    for model in models:
        model(rows()).backward()
    gradients = [[p.grad.to_local() for p in model.parameters()] for model in models]
    assert all(torch.equal(one, other) and one is not other for one, other in zip(*gradients, strict=True))
    models[0](rows()).backward()
    assert not torch.equal(gradients[0][0], gradients[1][0])


@backends
def test_a_call_without_gradients_is_found(backend):
    def evaluated():
        torch._dynamo.reset()
        model = fsdp_compile(Scaled(), backend=backend, sync_module_states=False)
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        with torch.no_grad():
            value = model(rows())
        return value, str(model.graphs[0]), counters["aot_autograd"]["autograd_cache_hit"] - hits

    first, second = evaluated(), evaluated()
    assert (first[2], second[2]) == (0, 1)
    assert torch.equal(first[0], second[0]) and first[1] == second[1]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": Scaled(3.0)},
        {"inputs": (rows(5),)},
        {"reshard_after_forward": False},
        {"forward_prefetch": 0},
        {"collective_lowering": "grouped"},
        {"hardware": HARDWARE["h100"]},
        {"backend": "inductor"},
        {"gradient_reduction": "sum"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_call_is_compiled(start, changed):
    start()
    assert not start(**changed).was_found
    assert start().was_found


def test_other_options_of_inductor_compile(start):
    start(backend="inductor")
    assert not start(backend="inductor", options={"epilogue_fusion": False}).was_found
    assert start(backend="inductor").was_found


def test_another_number_of_ranks_is_compiled(start):
    start()
    join_fake_group(4)
    assert not start().was_found


@pytest.mark.parametrize(
    "versions", ["fsdp_compile.compiler.partitioner.generator_digest", "torch._inductor.codecache.torch_key"]
)
def test_another_version_of_torch_or_of_ours_compiles(start, monkeypatch, versions):
    start()
    monkeypatch.setattr(versions, lambda: b"another")
    assert not start().was_found


def test_what_passes_of_the_user_rewrite_is_never_kept(start):
    assert [start(passes=[Nothing()]).was_found for _ in range(2)] == [False, False]


def test_plans_are_found_with_their_calls(start):
    inputs = build("gpt").inputs(4, seed=0)
    starts = [start(build("gpt"), inputs, hardware=HARDWARE["h100"], memory_budget="1 GiB") for _ in range(2)]
    assert [each.was_found for each in starts] == [False, True]
    assert starts[0].plan == starts[1].plan is not None
    assert_same(*starts)


def kept_files():
    return list((Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fsdp_compile").iterdir())


def entries():
    return list((Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "aotautograd").glob("*/*"))


@pytest.mark.parametrize("files", [kept_files, entries])
def test_files_that_others_can_write_are_not_read(start, files):
    first = start()
    for path in files():
        path.chmod(0o666)
    second = start()
    assert not second.was_found
    assert_same(second, first)


@pytest.mark.parametrize("files", [kept_files, entries])
def test_folders_that_others_can_write_are_not_read_from(start, files):
    start()
    for path in files():
        path.parent.chmod(0o777)
    assert not start().was_found


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"something else")])
def test_files_that_are_gone_or_changed_are_made_again(start, lose):
    first = start()
    for path in kept_files():
        lose(path)
    second = start()
    assert not second.was_found
    assert_same(second, first)


def test_a_call_whose_code_is_gone_is_compiled(start):
    first = start(backend="inductor")
    for path in (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "fxgraph").glob("*/*/*"):
        path.unlink()
    second = start(backend="inductor")
    assert not second.was_found
    assert_same(second, first)


class Constant(Scaled):
    """Its graph holds a tensor that is neither parameter nor buffer."""

    def forward(self, x):
        return super().forward(x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]))


def test_graphs_that_run_as_they_are_are_found_with_what_they_hold(start):
    starts = [start(Constant(), backend="aot_eager") for _ in range(2)]
    assert [each.was_found for each in starts] == [False, True]
    assert_same(*starts)


@pytest.mark.parametrize("inside", [False, True])
def test_graphs_with_kernels_of_the_users_run_in_this_process_only(inside):
    """A node has the number of its kernel in a table of this process."""
    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation
    graph.call_function(kernel, kwargs={"kernel_idx": 0, "constant_args_idx": 0, "kwargs": {"out": value}})
    graph.output(value)
    gm = torch.fx.GraphModule({}, graph)
    if inside:
        outer = torch.fx.GraphModule({}, torch.fx.Graph())
        outer.inner = gm
        gm = outer
    assert not runs_elsewhere(gm)


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}], ids=str)
def test_nothing_is_kept_where_torch_keeps_nothing(start, setting):
    with torch._inductor.config.patch(setting):
        assert [start().was_found for _ in range(2)] == [False, False]


def test_nothing_is_kept_without_autograds_cache(start):
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert [start().was_found for _ in range(2)] == [False, False]


def test_nothing_is_kept_of_what_tensor_parallelism_has_split(monkeypatch):
    """Torch's key of a mesh is that of one process: nobody would find the call, and ranks would wait for each other."""
    written = []
    monkeypatch.setattr(Keep, "write", lambda *_: written.append(None))
    join_fake_group(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    model = fsdp_compile(model, mesh["dp"], backend="aot_eager", sync_module_states=False)
    model(rows()).sum().backward()
    assert model.graphs and not written


def test_graphs_of_a_first_start_keep_their_notes():
    """AOTAutograd empties those of the backward that it was given."""
    torch._dynamo.reset()
    model = fsdp_compile(Scaled(), backend="inductor", sync_module_states=False)
    model(rows()).backward()
    lowered = model.graphs[0].lowered
    assert all("val" in node.meta for node in lowered.backward.graph.nodes if node.op == "placeholder")
