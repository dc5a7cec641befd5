"""The communication of one layer with tensor parallelism, or with experts, as one schedule with that of sharding."""

import re

import expecttest
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fsdp_compile import rewrite
from tests.distributed.test_tensor_parallel import WIDTH, Block

SHOWN = re.compile(r"= (fsdp\.|_c10d_functional\.|mm\(|addmm\()|^  fsdp\.")

pytestmark = pytest.mark.usefixtures("four_ranks")


def communication(graphs):
    """Collectives, what is freed, and matmuls."""
    texts = []
    for side in graphs.sides:
        texts += [side.title, *(line for line in str(side).splitlines() if SHOWN.search(line))]
    return "\n".join(texts)


def test_a_layer_with_sequence_parallelism():
    """The unit's only gather and only reduction are on dp; on tp is what torch's plan says, and one all-reduce."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model = nn.Sequential(*[parallelize_module(Block(12), root["tp"], plan) for _ in range(2)])
    x = torch.randn(2, 2, WIDTH, requires_grad=True)
    graphs = rewrite(model, x, world_size=root["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}))
    expecttest.assert_expected_inline(
        communication(graphs),
        """\
forward
  0.pending: f32[128] = fsdp.all_gather(0)
  1.pending: f32[128] = fsdp.all_gather(1)
  0.gathered: f32[128] = fsdp.wait(0.pending)
  0.norm.weight: f32[8] = fsdp.copy_out(0.gathered, 0)
  fsdp.free(0.norm.weight)
  0.norm.bias: f32[8] = fsdp.copy_out(0.gathered, 4)
  fsdp.free(0.norm.bias)
  all_gather_into_tensor: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_1, 2, 3)
  wait_tensor: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor)
  0.up.weight: f32[6,8] = fsdp.copy_out(0.gathered, 8)
  0.up.bias: f32[6] = fsdp.copy_out(0.gathered, 32)
  addmm: f32[8,6] = addmm(0.up.bias, view_5, permute)
  fsdp.free(0.up.bias)
  fsdp.free(0.up.weight)
  0.down.weight: f32[8,6] = fsdp.copy_out(0.gathered, 36)
  0.down.bias: f32[8] = fsdp.copy_out(0.gathered, 60)
  fsdp.free(0.gathered)
  fsdp.free(0.down.bias)
  addmm_1: f32[8,8] = addmm(div, view_11, permute_1)
  fsdp.free(0.down.weight)
  reduce_scatter_tensor: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_1, sum, 2, 3)
  wait_tensor_1: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor)
  1.gathered: f32[128] = fsdp.wait(1.pending)
  1.norm.weight: f32[8] = fsdp.copy_out(1.gathered, 0)
  1.norm.weight.stored: f32[8] = fsdp.store(1.norm.weight)
  1.norm.bias: f32[8] = fsdp.copy_out(1.gathered, 4)
  fsdp.free(1.norm.bias)
  all_gather_into_tensor_1: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_4, 2, 3)
  wait_tensor_2: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)
  1.up.weight: f32[6,8] = fsdp.copy_out(1.gathered, 8)
  1.up.weight.stored: f32[6,8] = fsdp.store(1.up.weight)
  1.up.bias: f32[6] = fsdp.copy_out(1.gathered, 32)
  addmm_2: f32[8,6] = addmm(1.up.bias, view_19, permute_2)
  fsdp.free(1.up.bias)
  1.down.weight: f32[8,6] = fsdp.copy_out(1.gathered, 36)
  1.down.weight.stored: f32[8,6] = fsdp.store(1.down.weight)
  1.down.bias: f32[8] = fsdp.copy_out(1.gathered, 60)
  fsdp.free(1.gathered)
  fsdp.free(1.down.bias)
  addmm_3: f32[8,8] = addmm(div_1, view_25, permute_3)
  reduce_scatter_tensor_1: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_3, sum, 2, 3)
  wait_tensor_3: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_1)
backward
  0.pending: f32[128] = fsdp.all_gather(0)
  all_gather_into_tensor_2: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(tangents_1, 2, 3)
  wait_tensor_4: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_2)
  mm: f32[8,6] = mm(view_29, permute_4)
  fsdp.free(1.down.weight)
  mm_2: f32[8,8] = mm(view_33, permute_8)
  fsdp.free(1.up.weight)
  reduce_scatter_tensor_2: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_5, sum, 2, 3)
  mm_1: f32[8,6] = mm(permute_5, view_25)
  mm_3: f32[6,8] = mm(permute_9, view_19)
  wait_tensor_5: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_2)
  fsdp.free(1.norm.weight)
  mul_9.stored: f32[2,2,8] = fsdp.store(mul_9)
  all_reduce_default: f32[16] = _c10d_functional.all_reduce(cat_default, sum, 3)
  wait_tensor_default: f32[16] = _c10d_functional.wait_tensor(all_reduce_default)
  1.packed: f32[128] = fsdp.pack([view_default_1, view_default, mm_3, view_34, mm_1, view_30], [0, 4, 8, 32, 36, 60])
  1.grad.pending: f32[64] = fsdp.reduce_scatter(1.packed)
  all_gather_into_tensor_3: f32[4,2,8] = _c10d_functional.all_gather_into_tensor(add_11, 2, 3)
  wait_tensor_8: f32[4,2,8] = _c10d_functional.wait_tensor(all_gather_into_tensor_3)
  0.gathered: f32[128] = fsdp.wait(0.pending)
  0.down.weight: f32[8,6] = fsdp.copy_out(0.gathered, 36)
  mm_4: f32[8,6] = mm(view_37, permute_12)
  fsdp.free(0.down.weight)
  0.up.weight: f32[6,8] = fsdp.copy_out(0.gathered, 8)
  mm_6: f32[8,8] = mm(view_41, permute_16)
  fsdp.free(0.up.weight)
  reduce_scatter_tensor_3: f32[2,2,8] = _c10d_functional.reduce_scatter_tensor(cat_7, sum, 2, 3)
  mm_5: f32[8,6] = mm(permute_13, view_11)
  mm_7: f32[6,8] = mm(permute_17, view_5)
  wait_tensor_9: f32[2,2,8] = _c10d_functional.wait_tensor(reduce_scatter_tensor_3)
  0.norm.weight: f32[8] = fsdp.copy_out(0.gathered, 0)
  fsdp.free(0.gathered)
  fsdp.free(0.norm.weight)
  mul_16.stored: f32[2,2,8] = fsdp.store(mul_16)
  all_reduce_default_1: f32[16] = _c10d_functional.all_reduce(cat_default_1, sum, 3)
  wait_tensor_default_1: f32[16] = _c10d_functional.wait_tensor(all_reduce_default_1)
  1.grad: f32[64] = fsdp.wait(1.grad.pending)
  0.packed: f32[128] = fsdp.pack([view_default_3, view_default_2, mm_7, view_42, mm_5, view_38], [0, 4, 8, 32, 36, 60])
  0.grad.pending: f32[64] = fsdp.reduce_scatter(0.packed)
  0.grad: f32[64] = fsdp.wait(0.grad.pending)""",
    )
