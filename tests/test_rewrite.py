"""rewrite(): the graphs of any model for any number of ranks, on one process that runs nothing."""

import operator
import re

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import Shard

from fsdp_compile import CaptureError, ConfigError, rewrite
from tests.models import build
from tests.passes.tiny import biased

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Layers(nn.Module):
    """Units first, second, third."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0):
        return self.third(self.second(self.first(x))) * scale


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


class Constant(nn.Module):
    def forward(self, x):
        return 3


def example():
    return torch.ones(2, 4)


def graphs_of(model=None, *inputs, world_size=2, **options):
    return rewrite(model or Layers(), *(inputs or [example()]), world_size=world_size, **options)


def lines(graph, *words):
    """The printed lines that contain one of the words, without what is left of it."""
    return [line.strip() for line in str(graph).splitlines() if any(word in line for word in words)]


# What a call leaves behind: nothing


def state_of(model):
    modules = {name: (id(module), type(module), sorted(vars(module))) for name, module in model.named_modules()}
    parameters = {name: (id(p), p.data_ptr(), p._version, id(p.grad)) for name, p in model.named_parameters()}
    buffers = {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
    return modules, parameters, buffers


@pytest.mark.parametrize("name", ["odd_mlp", "gpt", "conv_net", "odd_parameters", "adapted"])
def test_the_model_is_untouched(name):
    model = build(name)
    inputs = model.inputs(4, seed=0)
    model(*inputs).backward()
    before, values = state_of(model), {key: value.clone() for key, value in model.state_dict().items()}
    graphs_of(model, *inputs)
    assert state_of(model) == before
    for key, value in model.state_dict().items():
        assert torch.equal(value, values[key]), key


def test_no_process_group_is_needed_or_made():
    assert not dist.is_initialized()
    graphs_of(world_size=64)
    assert not dist.is_initialized()


def test_the_mode_and_the_training_flag_of_the_model_are_kept():
    model = build("conv_net").eval()
    graphs = graphs_of(model, *model.inputs(4, seed=0))
    assert not any(module.training for module in model.modules())
    assert "= copy_(" not in str(graphs.forward)  # of running statistics


def test_the_same_model_can_be_rewritten_for_many_world_sizes():
    model = Layers()
    texts = [str(graphs_of(model, world_size=world_size)) for world_size in (1, 2, 3, 8, 2, 1)]
    assert texts[1] == texts[4]
    assert texts[0] == texts[5]
    assert len(set(texts)) == 4


# Meta


@pytest.mark.parametrize("name", ["odd_mlp", "gpt", "conv_net", "called_twice", "odd_parameters", "adapted"])
def test_a_model_on_the_meta_device_gives_the_same_text(name):
    model = build(name)
    inputs = model.inputs(4, seed=0)
    expected = graphs_of(model, *inputs)
    torch._dynamo.reset()
    with torch.device("meta"):
        on_meta = build(name)
    found = graphs_of(on_meta, *(value.to("meta") for value in inputs))
    assert str(found) == str(expected)
    assert found.schedule() == expected.schedule()
    assert all(parameter.is_meta for parameter in on_meta.parameters())


def test_a_model_larger_than_memory():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**18, 2**18, bias=False) for _ in range(3)])  # 256 GiB each
        graphs = graphs_of(model, torch.empty(1, 2**18), world_size=1024)
    assert "f32[67108864]" in str(graphs.forward)


def test_inputs_may_be_on_the_meta_device_while_the_model_is_not():
    assert str(graphs_of(Layers(), example().to("meta"))) == str(graphs_of(Layers(), example()))


# What the graphs contain


class TestGraphs(expecttest.TestCase):
    def test_two_ranks(self):
        graphs = graphs_of(biased())
        self.assertExpectedInline(
            str(graphs.backward),
            """\
backward(down.weight: f32[2,8], primals_2: f32[2,4], addmm: f32[2,8], tangents_1: f32[2,2])
  permute_1: f32[8,2] = permute(down.weight, [1, 0])
  permute_2: f32[2,8] = permute(permute_1, [1, 0])
  mm: f32[2,8] = mm(tangents_1, permute_2)
  fsdp.free(down.weight)
  permute_3: f32[2,2] = permute(tangents_1, [1, 0])
  mm_1: f32[2,8] = mm(permute_3, addmm)
  sum_1: f32[1,2] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[2] = view(sum_1, [2])
  down.packed: f32[24] = fsdp.pack([mm_1, view], [0, 8])
  down.grad.pending: f32[12] = fsdp.reduce_scatter(down.packed)
  permute_6: f32[8,2] = permute(mm, [1, 0])
  mm_2: f32[8,4] = mm(permute_6, primals_2)
  sum_2: f32[1,8] = sum.dim_IntList(mm, [0], True)
  view_1: f32[8] = view(sum_2, [8])
  down.grad: f32[12] = fsdp.wait(down.grad.pending)
  up.packed: f32[40] = fsdp.pack([mm_2, view_1], [0, 16])
  up.grad.pending: f32[20] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[20] = fsdp.wait(up.grad.pending)
  return [up.grad, None, down.grad]""",
        )
        self.assertEqual(str(graphs), f"{graphs.forward}\n\n{graphs.backward}")

    def test_a_single_rank_has_no_collective(self):
        graphs = graphs_of(biased(), world_size=1)
        self.assertExpectedInline(
            str(graphs),
            """\
forward(primals_1: f32[8,4], primals_2: f32[8], primals_3: f32[2,4], primals_4: f32[2,8], primals_5: f32[2])
  permute: f32[4,8] = permute(primals_1, [1, 0])
  addmm: f32[2,8] = addmm(primals_2, primals_3, permute)
  permute_1: f32[8,2] = permute(primals_4, [1, 0])
  addmm_1: f32[2,2] = addmm(primals_5, addmm, permute_1)
  return [addmm_1, primals_3, primals_4, addmm]

backward(primals_3: f32[2,4], primals_4: f32[2,8], addmm: f32[2,8], tangents_1: f32[2,2])
  permute_1: f32[8,2] = permute(primals_4, [1, 0])
  permute_2: f32[2,8] = permute(permute_1, [1, 0])
  mm: f32[2,8] = mm(tangents_1, permute_2)
  permute_3: f32[2,2] = permute(tangents_1, [1, 0])
  mm_1: f32[2,8] = mm(permute_3, addmm)
  sum_1: f32[1,2] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[2] = view(sum_1, [2])
  permute_6: f32[8,2] = permute(mm, [1, 0])
  mm_2: f32[8,4] = mm(permute_6, primals_3)
  sum_2: f32[1,8] = sum.dim_IntList(mm, [0], True)
  view_1: f32[8] = view(sum_2, [8])
  return [mm_2, view_1, None, mm_1, view]""",
        )
        for lowered in (graphs.lowered.forward, graphs.lowered.backward):
            self.assertNotIn("_c10d_functional", lowered.code)
            self.assertNotIn("fsdp", lowered.code)

    def test_parts_along_another_dimension_are_put_side_by_side(self):
        graphs = graphs_of(nn.Linear(4, 6), shard_placement_fn=lambda parameter: Shard(-1))
        self.assertExpectedInline(
            str(graphs),
            """\
forward(root: f32[16], primals_2: f32[2,4])
  root.pending: f32[32] = fsdp.all_gather(root)
  root.gathered: f32[32] = fsdp.wait(root.pending)
  weight: f32[4,6] = fsdp.copy_out(root.gathered, 0)
  view: f32[2,6,2] = view(weight, [2, 6, 2])
  permute: f32[6,2,2] = permute(view, [1, 0, 2])
  clone: f32[6,2,2] = clone(permute, memory_format=torch.contiguous_format)
  fsdp.free(weight)
  view_1: f32[6,4] = view(clone, [6, 4])
  permute_1: f32[4,6] = permute(view_1, [1, 0])
  bias: f32[6] = fsdp.copy_out(root.gathered, 12)
  fsdp.free(root.gathered)
  addmm: f32[2,6] = addmm(bias, primals_2, permute_1)
  fsdp.free(bias)
  return [addmm, primals_2]

backward(primals_2: f32[2,4], tangents_1: f32[2,6])
  permute_2: f32[6,2] = permute(tangents_1, [1, 0])
  mm: f32[6,4] = mm(permute_2, primals_2)
  sum_1: f32[1,6] = sum.dim_IntList(tangents_1, [0], True)
  view_2: f32[6] = view(sum_1, [6])
  view_3: f32[6,2,2] = view(mm, [6, 2, 2])
  permute_5: f32[2,6,2] = permute(view_3, [1, 0, 2])
  clone_1: f32[2,6,2] = clone(permute_5, memory_format=torch.contiguous_format)
  view_4: f32[4,6] = view(clone_1, [4, 6])
  root.packed: f32[32] = fsdp.pack([view_4, view_2], [0, 12])
  root.grad.pending: f32[16] = fsdp.reduce_scatter(root.packed)
  root.grad: f32[16] = fsdp.wait(root.grad.pending)
  return [root.grad, None]""",
        )

    def test_without_gradients_there_is_no_backward(self):
        for mode in (torch.no_grad, torch.inference_mode):
            torch._dynamo.reset()
            with mode():
                graphs = graphs_of()
            self.assertIsNone(graphs.backward)
            self.assertIsNone(graphs.lowered.backward)
            self.assertIn("fsdp.all_gather(third)", str(graphs))

    def test_keyword_arguments_go_to_the_model(self):
        self.assertNotEqual(str(graphs_of(scale=2.0).forward), str(graphs_of(scale=3.0).forward))


def test_statistics_of_a_batch_norm_are_updated_in_the_forward():
    model = build("conv_net")
    graphs = graphs_of(model, *model.inputs(4, seed=0))
    num_buffers = len(list(model.buffers()))
    assert len(lines(graphs.forward, "= copy_(")) == num_buffers
    assert lines(graphs.backward, "= copy_(") == []


def test_only_the_shards_depend_on_the_world_size():
    small, large = (str(graphs_of(world_size=world_size).forward).splitlines() for world_size in (2, 4))
    differing = [one for one, other in zip(small, large, strict=True) if one != other]
    assert [line.partition(":")[0].strip() for line in differing[1:]] == [
        "first.pending",
        "second.pending",
        "first.gathered",
        "first.bias",
        "third.pending",
        "second.gathered",
        "second.bias",
        "third.gathered",
        "third.bias",
    ]


# Options


def test_forward_prefetch_starts_gathers_earlier():
    def begins(**options):
        return "".join(
            {"all_gather": "g", "wait": "w", "addmm": "m"}[line.split()[0]]
            for line in graphs_of(**options).forward.schedule().splitlines()
            if line.split()[0] in ("all_gather", "wait", "addmm")
        )

    assert begins(forward_prefetch=0) == begins(forward_prefetch=False) == "gwmgwmgwm"
    assert begins(forward_prefetch=1) == begins(forward_prefetch=True) == begins() == "ggwmgwmwm"
    assert begins(forward_prefetch=2) == begins(forward_prefetch="auto", backward_prefetch=1).replace("ggwmg", "gggwm")
    assert begins(backward_prefetch=2) == begins()


def test_backward_prefetch_starts_gathers_earlier_and_delays_waits_for_gradients():
    def begins(**options):
        graph = graphs_of(reshard_after_forward=True, **options).backward
        words = ("fsdp.all_gather(", "fsdp.wait(", "fsdp.reduce_scatter(")
        return [line.partition("fsdp.")[2] for line in lines(graph, *words)]

    behind = begins(backward_prefetch=0)
    assert behind == begins(backward_prefetch=None) == begins(backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert [text.partition("(")[0] for text in behind[1::2]] == 5 * ["wait"]  # at once, whatever it was
    ahead = begins(backward_prefetch=1)
    assert ahead == begins() == begins(backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
    assert ahead[:3] == ["all_gather(third)", "all_gather(second)", "wait(third.pending)"]
    assert sorted(ahead) == sorted(behind)


def test_reshard_after_forward_says_what_is_kept():
    def kept(**options):
        (signature,) = lines(graphs_of(**options).backward, "backward(")
        return [name for name in ("first", "second", "third") if f"{name}.weight: " in signature]

    assert kept() == kept(reshard_after_forward=None) == ["third"]
    assert kept(reshard_after_forward=True) == []
    assert kept(reshard_after_forward=False) == [
        "second",
        "third",
    ]  # the input needs no gradient, hence no first.weight
    assert kept(reshard_after_forward={"second": False}) == ["second", "third"]
    assert kept(reshard_after_forward={"*": True}) == []
    assert kept(reshard_after_forward={"*": True, "second": False}) == ["second"]


def test_the_lowering_is_packed_or_grouped():
    packed, grouped = (graphs_of(collective_lowering=lowering) for lowering in ("packed", "grouped"))
    assert str(packed) == str(graphs_of())
    assert lines(packed, "_grouped", "fsdp.view_out") == []
    assert lines(grouped, "fsdp.copy_out", "fsdp.pack", "fsdp.all_gather(", "fsdp.reduce_scatter(") == []
    assert "all_gather_into_tensor_coalesced" in grouped.lowered.forward.code
    assert "reduce_scatter_tensor_coalesced" in grouped.lowered.backward.code


def test_a_policy_chooses_the_units():
    graphs = graphs_of(auto_wrap_policy=["second"])
    assert [line.partition("(")[2] for line in lines(graphs.forward, "fsdp.all_gather")] == [
        "first)",
        "second)",
        "third)",
    ]
    graphs = graphs_of(auto_wrap_policy=[Layers])
    assert [line.partition("(")[2] for line in lines(graphs.forward, "fsdp.all_gather")] == ["root)"]


# Refusals


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2", None])
def test_a_world_size_that_is_none(world_size):
    with pytest.raises(ConfigError, match="world_size is a positive int"):
        graphs_of(world_size=world_size)


def test_the_automatic_lowering_needs_a_process_group():
    with pytest.raises(ConfigError, match="choose 'packed' or 'grouped'"):
        graphs_of(collective_lowering="auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collective_lowering": "fast"}, "collective_lowering is one of"),
        ({"forward_prefetch": -1}, "forward_prefetch is one of"),
        ({"backward_prefetch": "far"}, "backward_prefetch is one of"),
        ({"gradient_reduction": "median"}, "gradient_reduction is 'mean', 'sum', or a positive number"),
        ({"reshard_after_forward": "sometimes"}, "reshard_after_forward is None, a bool"),
        ({"reshard_after_forward": {"encoder.*": True}}, r"'encoder.\*' matches none of the units"),
        ({"auto_wrap_policy": ["encoder.*"]}, r"no module of the model matches 'encoder.\*'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_means_nothing(options, words):
    with pytest.raises(ConfigError, match=words):
        graphs_of(**options)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "this process has none: `fsdp-compile emulate SCRIPT`"),
        ("xpu", "'cpu' or 'cuda', not 'xpu'"),
        (1.5, "not 1.5"),
    ],
)
def test_a_device_that_nothing_is_traced_for(device, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        rewrite(nn.Linear(2, 2).to("meta"), torch.zeros(1, 2, device="meta"), world_size=2, device=device)


def test_a_gpu_is_for_what_is_on_the_meta_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    x, model = torch.zeros(1, 2, device="meta"), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"0\.weight is on cpu"):
        rewrite(model, x, world_size=2, device="cuda")
    with pytest.raises(ConfigError, match="for inputs on the meta device, and one is on cpu"):
        rewrite(model.to("meta"), x=torch.zeros(1, 2), world_size=2, device="cuda")


def test_a_parameter_that_is_no_number():
    model = Layers()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.bool), requires_grad=False)
    with pytest.raises(ConfigError, match="table is bool; FSDP shards parameters of floating point numbers and"):
        graphs_of(model)


def test_something_that_is_no_module():
    with pytest.raises(ConfigError, match="model is an nn.Module, not function"):
        graphs_of(lambda x: x)


def test_a_graph_break_is_named():
    with pytest.raises(CaptureError, match=r"cannot be traced as one graph(.|\n)*graph_break") as caught:
        graphs_of(Breaks())
    assert "test_rewrite.py" in str(caught.value)  # where it is


def test_a_call_that_computes_nothing():
    with pytest.raises(CaptureError, match="computes nothing with tensors"):
        graphs_of(Constant())


def test_a_call_with_wrong_inputs():
    with pytest.raises(CaptureError, match="cannot be traced"):
        graphs_of(Layers(), torch.ones(2, 5))


@pytest.mark.parametrize("model", [Breaks(), Constant()], ids=["breaks", "constant"])
def test_the_model_is_untouched_by_a_failure(model):
    before = state_of(model)
    with pytest.raises(CaptureError):
        graphs_of(model)
    assert state_of(model) == before


# The same text always


class Clamped(nn.Module):
    """Writes to its weight in forward, in one of several ways."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.linear.weight)
        return self.linear(x)


WRITES = {
    "method": lambda weight: weight.clamp_(-0.1, 0.1),
    "data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "row": lambda weight: weight[0].zero_(),
    "item": lambda weight: weight.__setitem__(0, 0.0),
    "operator": lambda weight: operator.imul(weight, 2),
    "power": lambda weight: operator.ipow(weight, 2),
    "function": lambda weight: nn.init.zeros_(weight),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_parameter_in_forward_is_refused_by_name(write, dim):
    with pytest.raises(ConfigError, match=r"forward writes to the parameter linear\.weight"):
        rewrite(Clamped(write), torch.randn(2, 4), world_size=2, shard_placement_fn=lambda parameter: Shard(-dim))


@pytest.mark.parametrize("read", [operator.and_, operator.or_, operator.is_not])
def test_functions_of_python_whose_names_are_those_of_writes_are_reads(read):
    model = nn.Linear(4, 4)
    model.bits = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    model.forward = lambda x: x * model.weight.sum() * (model.bits if read is operator.is_not else read(model.bits, 1))
    assert rewrite(model, torch.ones(2, 4), world_size=2).forward is not None


class Scaled(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scales = torch.ones(4)

    def forward(self, x):
        return self.linear(x * self.scales)


def test_a_plain_tensor_of_a_meta_model_is_traced_like_the_rest():
    with torch.device("meta"):
        graphs = rewrite(Scaled(), torch.randn(2, 4), world_size=2)
    assert "all_gather" in str(graphs.forward)
