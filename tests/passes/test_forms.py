"""What is sent as integers or in a narrower dtype: what arrives of it, the graphs, and what is refused."""

import math

import pytest
import torch
from torch import nn

from fsdp_compile import CommunicationDtype, ConfigError, rewrite
from fsdp_compile.costs import HARDWARE, formulas_of, predict
from fsdp_compile.passes import forms, metadata
from fsdp_compile.passes.errors import PassError
from fsdp_compile.passes.forms import Region, eagerly, into_form, out_of_form
from tests.models import seeded
from tests.passes.tracing import Pictures, trace

INT8, INT4 = CommunicationDtype("int8", "int8"), CommunicationDtype("int4", "int4")


def arrived(value, region, lead=(), dtype=torch.float32):
    """What arrives of elements, [*lead, n], that are sent in the form of a region."""
    parts = into_form(eagerly, value, list(lead), region, value.dtype)
    message = torch.cat(parts, len(lead))
    assert message.shape[-1] * message.dtype.itemsize == region.num_bytes
    return out_of_form(eagerly, message, list(lead), region, dtype)


@pytest.mark.parametrize("form", ["int8_blocks", "int4_blocks"])
@pytest.mark.parametrize(
    ("rows", "inner", "lead"), [(3, 16, ()), (5, 300, (2,)), (4, 1024, (3,)), (2, 777, ()), (0, 32, ())]
)
def test_what_arrives_is_within_half_a_step(form, rows, inner, lead):
    value = 3 * torch.randn(*lead, rows * inner, generator=seeded(0))
    region = Region(0, rows * inner, inner, form)
    found = arrived(value, region, lead)
    count = math.ceil(inner / forms.BLOCK)
    size = math.ceil(inner / count) + (math.ceil(inner / count) % 2 if form == "int4_blocks" else 0)
    padded = torch.nn.functional.pad(value.view(*lead, rows, inner), (0, count * size - inner))
    most = {"int8_blocks": 127, "int4_blocks": 7}[form]
    steps = padded.view(*lead, rows, count, size).abs().amax(-1, keepdim=True) / most
    error = torch.nn.functional.pad((found - value).view(*lead, rows, inner), (0, count * size - inner))
    assert (error.view(*lead, rows, count, size).abs() <= steps * 0.50001).all()
    assert torch.equal(arrived(found, region, lead), found)  # what was rounded once is not rounded again


def test_zeros_arrive_and_what_is_not_finite_is_not_lost():
    value = torch.zeros(4, 32)
    value[1, 5], value[2, 6], value[3, 7] = torch.nan, -torch.inf, torch.finfo(torch.float32).tiny
    found = arrived(value.view(-1), Region(0, 128, 32, "int8_blocks")).view(4, 32)
    assert torch.equal(found[0], value[0])
    assert found[1:3].isnan().all()
    assert found[3].isfinite().all()


def test_a_row_has_the_same_blocks_wherever_it_is():
    value = torch.randn(6, 520, generator=seeded(1))
    region = Region(0, 520, 520, "int8_blocks")
    alone = torch.cat([arrived(row, region) for row in value])
    assert torch.equal(arrived(value.view(-1), Region(0, 6 * 520, 520, "int8_blocks")), alone)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 6), nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


def traced(communication, is_input_trained=False, **options):
    x = torch.ones(3, 32, requires_grad=is_input_trained)
    return trace(Tiny(), x, policy=["up", "down"], communication=communication, **options)


class TestForms(Pictures):
    maxDiff = None

    def test_a_matrix_is_gathered_as_integers_and_a_bias_as_its_bytes(self):
        self.assertExpectedInline(
            str(traced(CommunicationDtype("int8")).graphs.forward),
            """\
forward(up: f32[100], primals_2: f32[3,32], down: f32[8])
  up.i8: i8[128] = fsdp.narrow(up, [0, 96], [int8_blocks, float32])
  up.pending: i8[256] = fsdp.all_gather(up.i8)
  down.pending: f32[16] = fsdp.all_gather(down)
  up.gathered: i8[256] = fsdp.wait(up.pending)
  up.weight: f32[6,32] = fsdp.copy_out(up.gathered, 0, int8_blocks)
  permute: f32[32,6] = permute(up.weight, [1, 0])
  up.bias: f32[6] = fsdp.copy_out(up.gathered, 112)
  fsdp.free(up.gathered)
  addmm: f32[3,6] = addmm(up.bias, primals_2, permute)
  fsdp.free(up.bias)
  fsdp.free(up.weight)
  relu: f32[3,6] = relu(addmm)
  down.gathered: f32[16] = fsdp.wait(down.pending)
  down.weight: f32[2,6] = fsdp.copy_out(down.gathered, 0)
  down.weight.stored: f32[2,6] = fsdp.store(down.weight)
  fsdp.free(down.gathered)
  permute_1: f32[6,2] = permute(down.weight.stored, [1, 0])
  mm: f32[3,2] = mm(relu, permute_1)
  return [mm, down.weight.stored, primals_2, relu]""",
        )

    def test_in_the_grouped_form_each_is_a_message_and_copied_out_as_well(self):
        forward = traced(CommunicationDtype("int4"), grouped=True).graphs.forward
        self.assertExpectedInline(
            str(forward),
            """\
forward(up: f32[100], primals_2: f32[3,32], down: f32[8])
  up.i8: i8[80] = fsdp.narrow(up, [0, 96], [int4_blocks, float32])
  up.pending: i8[160] = fsdp.all_gather_grouped([up.i8])
  down.pending: f32[16] = fsdp.all_gather_grouped([down])
  up.gathered: i8[160] = fsdp.wait(up.pending)
  up.weight: f32[6,32] = fsdp.copy_out(up.gathered, 0, int4_blocks)
  permute: f32[32,6] = permute(up.weight, [1, 0])
  up.bias: f32[6] = fsdp.copy_out(up.gathered, 64)
  fsdp.free(up.gathered)
  addmm: f32[3,6] = addmm(up.bias, primals_2, permute)
  fsdp.free(up.bias)
  fsdp.free(up.weight)
  relu: f32[3,6] = relu(addmm)
  down.gathered: f32[16] = fsdp.wait(down.pending)
  down.weight: f32[2,6] = fsdp.view_out(down.gathered, 0)
  permute_1: f32[6,2] = permute(down.weight, [1, 0])
  mm: f32[3,2] = mm(relu, permute_1)
  return [mm, down.weight, primals_2, relu]""",
        )

    def test_gradients_are_sent_as_integers_and_summed_up_behind_the_wait(self):
        self.assertExpectedInline(
            str(traced(CommunicationDtype(reduce="int8")).graphs.backward),
            """\
backward(down.weight: f32[2,6], primals_2: f32[3,32], relu: f32[3,6], tangents_1: f32[3,2])
  permute_2: f32[2,3] = permute(tangents_1, [1, 0])
  mm_1: f32[2,6] = mm(permute_2, relu)
  down.packed: f32[16] = fsdp.pack([mm_1], [0])
  down.grad.pending: f32[8] = fsdp.reduce_scatter(down.packed)
  permute_1: f32[6,2] = permute(down.weight, [1, 0])
  permute_4: f32[2,6] = permute(permute_1, [1, 0])
  mm_2: f32[3,6] = mm(tangents_1, permute_4)
  fsdp.free(down.weight)
  le: b8[3,6] = le.Scalar(relu, 0)
  full_default: f32[] = full([], 0.0, dtype=f32, layout=torch.strided, device=cpu, pin_memory=False)
  where: f32[3,6] = where.self(le, full_default, mm_2)
  permute_6: f32[6,3] = permute(where, [1, 0])
  mm_3: f32[6,32] = mm(permute_6, primals_2)
  sum_1: f32[1,6] = sum.dim_IntList(where, [0], True)
  view: f32[6] = view(sum_1, [6])
  down.grad: f32[8] = fsdp.wait(down.grad.pending)
  up.packed: i8[256] = fsdp.pack([mm_3, view], [0, 96], [int8_blocks, float32])
  up.grad.pending: i8[256] = fsdp.all_to_all(up.packed)
  up.grad.received: i8[256] = fsdp.wait(up.grad.pending)
  up.grad: f32[100] = fsdp.sum_up(up.grad.received, [0, 96], [int8_blocks, float32])
  return [up.grad, None, down.grad]""",
        )

    def test_what_messages_lose_is_packed_with_the_next_gradients(self):
        sent = CommunicationDtype(reduce="int8", error_feedback=True)
        backward = traced(sent).graphs.backward
        self.assertExpectedInline(
            "\n".join(line for line in str(backward).splitlines() if "up." in line),
            """\
backward(down.weight: f32[2,6], up.residual: bf16[200], primals_3: f32[3,32], relu: f32[3,6], tangents_1: f32[3,2])
  up.packed: i8[256] = fsdp.pack([mm_3, view], [0, 96], up.residual, [int8_blocks, float32])
  up.remainder: bf16[200] = fsdp.remainder([mm_3, view], [0, 96], up.residual, [int8_blocks, float32])
  up.grad.pending: i8[256] = fsdp.all_to_all(up.packed)
  fsdp.keep(up.remainder, up.residual)
  up.grad.received: i8[256] = fsdp.wait(up.grad.pending)
  up.grad: f32[100] = fsdp.sum_up(up.grad.received, [0, 96], [int8_blocks, float32])
  return [up.grad, None, None, down.grad]""",
        )
        self.assertExpectedInline(
            backward.schedule().partition("sum.dim")[2],
            """\
_IntList                                                   64
                            wait down.grad                          0
  pack up.packed                                                    256
  remainder up.remainder                                            256
                            all_to_all up                           256
  keep up.remainder                                                 256
                            wait up.grad.received                   0
  sum_up                                                            0""",
        )

    def test_gradients_are_sent_in_bfloat16_and_summed_up_in_float32(self):
        sent = CommunicationDtype(reduce=torch.bfloat16)
        self.assertExpectedInline(
            traced(sent).graphs.backward.schedule(),
            """\
backward
  mm                                                                48
  pack down.packed                                                  80
                            all_to_all down                         80
  mm                                                                80
                            free down.weight                        32
  le.Scalar                                                         32
  full                                                              32
  where.self                                                        32
  mm                                                                32
  sum.dim_IntList                                                   32
                            wait down.grad.received                 0
  sum_up                                                            0
  pack up.packed                                                    416
                            all_to_all up                           416
                            wait up.grad.received                   0
  sum_up                                                            0""",
        )

    def test_replicas_send_each_other_their_sums_and_each_sums_these_up(self):
        backward = traced(CommunicationDtype(all_reduce="int8"), replicas=2).graphs.backward
        self.assertExpectedInline(
            "\n".join(line for line in str(backward).splitlines() if "up." in line),
            """\
  up.packed: f32[200] = fsdp.pack([mm_3, view], [0, 96])
  up.grad.pending: f32[100] = fsdp.reduce_scatter(up.packed)
  up.grad: f32[100] = fsdp.wait(up.grad.pending)
  up.i8: i8[128] = fsdp.narrow(up.grad, [0, 96], [int8_blocks, float32])
  up.grad.pending#2: i8[256] = fsdp.all_gather_sums(up.i8)
  up.grad.received: i8[256] = fsdp.wait(up.grad.pending#2)
  up.grad#2: f32[100] = fsdp.sum_up(up.grad.received, [0, 96], [int8_blocks, float32])
  return [up.grad#2, None, down.grad#2]""",
        )
        self.assertExpectedInline(
            backward.schedule().partition("sum.dim")[2],
            """\
_IntList                                                   64
                            wait down.grad                          0
                            all_reduce down                         0
  pack up.packed                                                    800
                            reduce_scatter up                       800
                            wait down.grad#2                        800
                            wait up.grad                            0
  narrow                                                            0
                            all_gather_sums up                      0
                            wait up.grad.received                   0
  sum_up                                                            0""",
        )
        cast = traced(CommunicationDtype(all_reduce=torch.bfloat16), replicas=2, world_size=1).graphs.backward
        self.assertExpectedInline(
            "\n".join(line for line in str(cast).splitlines() if "up." in line),
            """\
  up.packed: f32[200] = fsdp.pack([mm_3, view], [0, 192])
  up.packed.bf16: bf16[200] = fsdp.cast(up.packed)
  up.grad.pending: bf16[400] = fsdp.all_gather_sums(up.packed.bf16)
  up.grad.received: bf16[400] = fsdp.wait(up.grad.pending)
  up.grad: f32[200] = fsdp.sum_up(up.grad.received, [0], [bfloat16])
  return [up.grad, None, down.grad]""",
        )

    def test_a_reduction_between_replicas_continues_the_one_within(self):
        """It starts when that has been waited for, before the next gradients are packed: not in a turn of its own."""
        backward = traced(CommunicationDtype(reduce=torch.bfloat16), replicas=2).graphs.backward
        self.assertExpectedInline(
            backward.schedule().partition("where.self")[2],
            """\
                                                        32
  mm                                                                32
  sum.dim_IntList                                                   32
                            wait down.grad.received                 0
  sum_up                                                            0
                            all_reduce down                         0
  pack up.packed                                                    416
                            all_to_all up                           416
                            wait down.grad#2                        416
                            wait up.grad.received                   0
  sum_up                                                            0
                            all_reduce up                           0
                            wait up.grad#2                          0""",
        )

    def test_what_is_not_sharded_is_not_sent_so(self):
        narrow, wide = (traced(sent, world_size=1, replicas=2).graphs for sent in (INT8, CommunicationDtype()))
        self.assertEqual(str(narrow), str(wide))

    def test_a_part_that_is_kept_is_refused(self):
        options = {"world_size": 4, "reshard": {"up": metadata.Part(2, "shard/2", 0)}, "is_input_trained": True}
        message = self.assert_raises(PassError, traced, CommunicationDtype("int8"), **options)
        self.assertIn("a part of up is kept, which is sent as integers", message)


def test_it_is_predicted_to_take_less_and_has_no_formulas():
    model, x = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3))), torch.ones(8, 1024)
    graphs = [
        rewrite(model, x, world_size=64, communication_dtype=sent, auto_wrap_policy={nn.Linear})
        for sent in ("auto", CommunicationDtype(reduce=torch.bfloat16), INT8, INT4)
    ]
    times = [sum(predict(each, HARDWARE["h100"]).timeline.communication.values()) for each in graphs]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4
    peaks = [predict(each, HARDWARE["h100"]).memory.peak.total for each in graphs]
    assert peaks[3] < peaks[0]
    with pytest.raises(ConfigError, match="formulas have no communication_dtype, which 0 has"):
        formulas_of(graphs[2])


REFUSED = {
    "gather is None, 'int8' or 'int4', not 'int3'": lambda: CommunicationDtype("int3"),
    "gather is None, 'int8' or 'int4', not torch.bfloat16": lambda: CommunicationDtype(torch.bfloat16),
    "torch.bfloat16 or torch.float16, not torch.float32": lambda: CommunicationDtype(reduce=torch.float32),
    "all_reduce is None, .*, not 'int3'": lambda: CommunicationDtype(all_reduce="int3"),
    "all_reduce='int8' for up.weight, which has no replicas": lambda: rewritten(CommunicationDtype(all_reduce="int8")),
    "communication_dtype is 'auto', a CommunicationDtype, or a map .* not 'int8'": lambda: rewritten("int8"),
    "communication_dtype is 'auto', .* not {'up': 'int8'}": lambda: rewritten({"up": "int8"}),
    "communication_dtype: 'ip' matches none of the units": lambda: rewritten({"ip": INT8}),
    "the unit up cannot stay with 2 ranks, because communication_dtype gathers it as integers": lambda: rewritten(
        INT8, reshard_after_forward=2
    ),
}


def rewritten(sent, **options):
    model, x = Tiny(), torch.ones(3, 32)
    return rewrite(model, x, world_size=4, auto_wrap_policy=["up", "down"], communication_dtype=sent, **options)


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_meant_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


def test_the_last_glob_that_matches_a_unit_decides():
    graphs = rewritten({"*": INT8, "up": CommunicationDtype()})
    assert "i8[" not in str(graphs)  # down has rows of six elements
    assert "up.i8: i8[" in str(rewritten({"up": CommunicationDtype("int8")}))
