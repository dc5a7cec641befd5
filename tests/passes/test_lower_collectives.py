import torch
from torch import nn

from fsdp_compile.layout.buckets import Placement, lay_out
from fsdp_compile.layout.options import GradientReduction
from fsdp_compile.layout.units import find_units
from fsdp_compile.passes import ops
from fsdp_compile.passes.forms import NO_REGIONS
from fsdp_compile.passes.lower_collectives import LowerCollectives
from tests.passes.tiny import (
    Chain,
    biased,
    linear,
    rows,
    two_layers,
)
from tests.passes.tracing import Drawing, Pictures, axes_of, trace


class TestLowerCollectives(Pictures):
    def test_packed_gathers_become_one_message_and_copies(self):
        graphs = trace(Chain(up=nn.Linear(4, 8)), rows(), reshard={"root": True})
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(primals_1: f32[20], primals_2: f32[3,4])
  all_gather_into_tensor_default: f32[40] = _c10d_functional.all_gather_into_tensor(primals_1, 2, shard)
  wait_tensor_default: f32[40] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[2,20] = view(wait_tensor_default, [2, 20])
  slice_copy_tensor: f32[2,16] = slice_copy(view_default, 1, 0, 16)
  view_default_1: f32[8,4] = view(slice_copy_tensor, [8, 4])
  permute: f32[4,8] = permute(view_default_1, [1, 0])
  slice_copy_tensor_1: f32[2,4] = slice_copy(view_default, 1, 16, 20)
  view_default_2: f32[8] = view(slice_copy_tensor_1, [8])
  addmm: f32[3,8] = addmm(view_default_2, primals_2, permute)
  return [addmm, primals_2]""",
        )

    def test_packed_gradients_become_one_message(self):
        graphs = trace(Chain(up=nn.Linear(4, 8)), rows())
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives, "backward")),
            """\
backward(primals_2: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[8] = view(sum_1, [8])
  view_default: f32[2,16] = view(mm, [2, 16])
  view_default_1: f32[2,4] = view(view, [2, 4])
  cat_default: f32[2,20] = cat([view_default, view_default_1], 1)
  view_default_2: f32[40] = view(cat_default, [40])
  reduce_scatter_tensor_default: f32[20] = _c10d_functional.reduce_scatter_tensor(view_default_2, avg, 2, shard)
  wait_tensor_default: f32[20] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  return [wait_tensor_default, None]""",
        )

    def test_a_grouped_gather_is_one_call_without_copies(self):
        graph = trace(Chain(up=nn.Linear(4, 8)), rows(), grouped=True).after(LowerCollectives)
        self.assertExpectedInline(
            str(graph),
            """\
forward(primals_1: f32[20], primals_2: f32[3,4])
  slice_tensor: f32[16] = slice(primals_1, 0, 0, 16)
  slice_tensor_1: f32[4] = slice(primals_1, 0, 16, 20)
  all_gather_into_tensor_coalesced_default = _c10d_functional.all_gather_into_tensor_coalesced([slice_tensor, slice_tensor_1], 2, shard)
  getitem: f32[32] = getitem(all_gather_into_tensor_coalesced_default, 0)
  getitem_1: f32[8] = getitem(all_gather_into_tensor_coalesced_default, 1)
  wait_tensor_default: f32[32] = _c10d_functional.wait_tensor(getitem)
  wait_tensor_default_1: f32[8] = _c10d_functional.wait_tensor(getitem_1)
  view_default: f32[8,4] = view(wait_tensor_default, [8, 4])
  permute: f32[4,8] = permute(view_default, [1, 0])
  view_default_1: f32[8] = view(wait_tensor_default_1, [8])
  addmm: f32[3,8] = addmm(view_default_1, primals_2, permute)
  return [addmm, primals_2]""",  # noqa: E501
        )

    def test_a_grouped_reduction_is_one_call_and_puts_the_pieces_into_place(self):
        graph = trace(Chain(up=nn.Linear(4, 8)), rows(), grouped=True).after(LowerCollectives, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(primals_2: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm: f32[8,4] = mm(permute_1, primals_2)
  sum_1: f32[1,8] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[8] = view(sum_1, [8])
  view_default: f32[32] = view(mm, [32])
  view_default_1: f32[8] = view(view, [8])
  reduce_scatter_tensor_coalesced_default = _c10d_functional.reduce_scatter_tensor_coalesced([view_default, view_default_1], avg, 2, shard)
  getitem: f32[16] = getitem(reduce_scatter_tensor_coalesced_default, 0)
  getitem_1: f32[4] = getitem(reduce_scatter_tensor_coalesced_default, 1)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(getitem)
  wait_tensor_default_1: f32[4] = _c10d_functional.wait_tensor(getitem_1)
  view_default_2: f32[1,16] = view(wait_tensor_default, [1, 16])
  view_default_3: f32[1,4] = view(wait_tensor_default_1, [1, 4])
  cat_default: f32[1,20] = cat([view_default_2, view_default_3], 1)
  view_default_4: f32[20] = view(cat_default, [20])
  return [view_default_4, None]""",  # noqa: E501
        )

    def test_the_only_parameter_of_a_bucket_is_not_copied(self):
        graph = trace(two_layers(), rows(), reshard={"down": True}).after(LowerCollectives)
        self.assertExpectedInline(
            str(graph),
            """\
forward(primals_1: f32[16], primals_2: f32[3,4], primals_3: f32[8])
  all_gather_into_tensor_default: f32[32] = _c10d_functional.all_gather_into_tensor(primals_1, 2, shard)
  all_gather_into_tensor_default_1: f32[16] = _c10d_functional.all_gather_into_tensor(primals_3, 2, shard)
  wait_tensor_default: f32[32] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[8,4] = view(wait_tensor_default, [8, 4])
  permute: f32[4,8] = permute(view_default, [1, 0])
  mm: f32[3,8] = mm(primals_2, permute)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
  view_default_1: f32[2,8] = view(wait_tensor_default_1, [2, 8])
  permute_1: f32[8,2] = permute(view_default_1, [1, 0])
  mm_1: f32[3,2] = mm(mm, permute_1)
  return [mm_1, primals_3, primals_2, mm]""",
        )

    def test_uneven_rows_are_padded_in_the_messages_and_cut_off_after_them(self):
        graphs = trace(Chain(up=nn.Linear(4, 3)), rows())
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives)),
            """\
forward(primals_1: f32[12], primals_2: f32[3,4])
  all_gather_into_tensor_default: f32[24] = _c10d_functional.all_gather_into_tensor(primals_1, 2, shard)
  wait_tensor_default: f32[24] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
  view_default: f32[2,12] = view(wait_tensor_default, [2, 12])
  slice_copy_tensor: f32[2,8] = slice_copy(view_default, 1, 0, 8)
  view_default_1: f32[4,4] = view(slice_copy_tensor, [4, 4])
  slice_tensor: f32[3,4] = slice(view_default_1, 0, 0, 3)
  permute: f32[4,3] = permute(slice_tensor, [1, 0])
  slice_copy_tensor_1: f32[2,2] = slice_copy(view_default, 1, 8, 10)
  view_default_2: f32[4] = view(slice_copy_tensor_1, [4])
  slice_tensor_1: f32[3] = slice(view_default_2, 0, 0, 3)
  addmm: f32[3,3] = addmm(slice_tensor_1, primals_2, permute)
  return [addmm, primals_2]""",
        )
        self.assertExpectedInline(
            str(graphs.after(LowerCollectives, "backward")),
            """\
backward(primals_2: f32[3,4], tangents_1: f32[3,3])
  permute_1: f32[3,3] = permute(tangents_1, [1, 0])
  mm: f32[3,4] = mm(permute_1, primals_2)
  sum_1: f32[1,3] = sum.dim_IntList(tangents_1, [0], True)
  view: f32[3] = view(sum_1, [3])
  view_default: f32[12] = view(mm, [12])
  constant_pad_nd_default: f32[16] = constant_pad_nd(view_default, [0, 4])
  view_default_1: f32[2,8] = view(constant_pad_nd_default, [2, 8])
  view_default_2: f32[3] = view(view, [3])
  constant_pad_nd_default_1: f32[4] = constant_pad_nd(view_default_2, [0, 1])
  view_default_3: f32[2,2] = view(constant_pad_nd_default_1, [2, 2])
  full_default: f32[2,2] = full([2, 2], 0, dtype=f32, device=cpu)
  cat_default: f32[2,12] = cat([view_default_1, view_default_3, full_default], 1)
  view_default_4: f32[24] = view(cat_default, [24])
  reduce_scatter_tensor_default: f32[12] = _c10d_functional.reduce_scatter_tensor(view_default_4, avg, 2, shard)
  wait_tensor_default: f32[12] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  return [wait_tensor_default, None]""",
        )

    def test_replicas_are_an_all_reduce(self):
        graph = trace(Chain(up=linear(4, 8)), rows(), replicas=2).after(LowerCollectives, "backward")
        self.assertExpectedInline(
            str(graph),
            """\
backward(primals_2: f32[3,4], tangents_1: f32[3,8])
  permute_1: f32[8,3] = permute(tangents_1, [1, 0])
  mm_1: f32[8,4] = mm(permute_1, primals_2)
  view_default: f32[2,16] = view(mm_1, [2, 16])
  view_default_1: f32[32] = view(view_default, [32])
  reduce_scatter_tensor_default: f32[16] = _c10d_functional.reduce_scatter_tensor(view_default_1, avg, 2, shard)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(reduce_scatter_tensor_default)
  all_reduce_default_1: f32[16] = _c10d_functional.all_reduce(wait_tensor_default, avg, replicate)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(all_reduce_default_1)
  return [wait_tensor_default_1, None]""",
        )

    def test_a_graph_without_the_dialect_is_left_alone(self):
        graph = trace(nn.Sequential(nn.Tanh()), rows().requires_grad_()).before(LowerCollectives)
        self.assert_left_alone(graph, LowerCollectives())

    def test_a_second_run_changes_nothing(self):
        for grouped in (False, True):
            for name in ("forward", "backward"):
                graph = trace(biased(), rows(), grouped=grouped).after(LowerCollectives, name)
                self.assert_left_alone(graph, LowerCollectives())


def shard_of_rank(parameters, layout, rank):
    """What `rank` keeps of full parameters, written without the code under test."""
    shard = torch.zeros(layout.numel, dtype=layout.dtype)
    for slot in layout.slots:
        chunks = torch.atleast_1d(parameters[slot.parameter]).chunk(layout.shards.size)  # as DTensor's Shard(0) cuts
        if rank < len(chunks):
            shard[slot.offset : slot.offset + chunks[rank].numel()] = chunks[rank].reshape(-1)
    return shard


def layouts_of(model, world_size):
    return lay_out(find_units(model, "auto"), Placement(axes_of(world_size), GradientReduction()))


class TestLoweredLayout(Pictures):
    """The copies on both sides of a collective, run on tensors; the collectives themselves run in tests/distributed."""

    def each_layout(self):
        for world_size in (1, 2, 3, 4, 8):
            for rows_of_weight in (1, 3, 7, 15, 16):
                model = Chain(up=nn.Linear(5, rows_of_weight), down=nn.Linear(rows_of_weight, 2))
                for layout in layouts_of(model, world_size):
                    yield dict(model.state_dict()), layout

    def test_copy_out_takes_each_parameter_out_of_the_gathered_shards(self):
        for parameters, layout in self.each_layout():
            world_size = layout.shards.size
            drawing = Drawing()
            gathered = drawing.input("gathered", world_size * layout.numel)
            outs = [
                drawing.call(
                    ops.COPY_OUT, gathered, slot.parameter, slot.offset, list(slot.shape), world_size, None, None
                )
                for slot in layout.slots
            ]
            graph = drawing.returns(*outs).then(LowerCollectives())
            shards = [shard_of_rank(parameters, layout, rank) for rank in range(world_size)]
            for slot, found in zip(layout.slots, graph.gm(torch.cat(shards)), strict=True):
                self.assertTrue(torch.equal(found, parameters[slot.parameter]), (slot, world_size))

    def test_pack_puts_each_gradient_into_the_shards_and_zeros_between_them(self):
        for parameters, layout in self.each_layout():
            world_size = layout.shards.size
            drawing = Drawing()
            gradients = [drawing.input(f"gradient_{i}", *slot.shape) for i, slot in enumerate(layout.slots)]
            names, offsets = ([getattr(slot, of) for slot in layout.slots] for of in ("parameter", "offset"))
            packed = drawing.call(
                ops.PACK,
                gradients,
                None,
                None,
                layout.bucket,
                names,
                offsets,
                layout.numel,
                world_size,
                torch.float32,
                *NO_REGIONS,
            )
            graph = drawing.returns(packed).then(LowerCollectives())
            [found] = graph.gm(*(parameters[name] for name in names))
            shards = [shard_of_rank(parameters, layout, rank) for rank in range(world_size)]
            self.assertTrue(torch.equal(found, torch.cat(shards)), layout)
