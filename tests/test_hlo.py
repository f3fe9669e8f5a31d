"""Programs whose work is known: products and exchanges count as often as the loops around them go round."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.measurements import speed
from tests.host_mesh import mesh_of
from train import hlo, roofline, windows
from train.compile_only import partitioned

ROWS, WIDTH, LAYERS, ROUNDS = 4, 16, 5, 3
EXCHANGES = {
    "all-reduce": lambda y: lax.psum(y, "tensor"),
    "all-gather": lambda y: lax.all_gather(y, "tensor")[0],
    "reduce-scatter": lambda y: jnp.tile(lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True), (1, 4)),
    "all-to-all": lambda y: lax.all_to_all(y, "tensor", 0, 0, tiled=True),
    "collective-permute": lambda y: lax.ppermute(y, "tensor", [(i, (i + 1) % 4) for i in range(4)]),
}


def lowered(exchange):
    """Layers in a loop, each of which multiplies and exchanges in a loop of its own, over the four of `tensor`."""
    mesh = mesh_of(data=2, tensor=4)

    def layer(x, w):
        return lax.fori_loop(0, ROUNDS, lambda _, x: exchange(jnp.tanh(x @ w)), x), None

    run = jax.shard_map(
        lambda x, ws: lax.scan(layer, x, ws)[0],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.bfloat16)
    return jax.jit(run).lower(x, jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16))


@pytest.mark.parametrize("kind", EXCHANGES)
def test_what_loops_hold_counts_as_often_as_they_go_round(kind):
    _, text = partitioned(lowered(EXCHANGES[kind]))
    found = hlo.work(text)
    times = LAYERS * ROUNDS
    assert found.flops == times * 2 * ROWS * WIDTH * WIDTH
    (each,) = found.collectives
    held = 2 * ROWS * WIDTH * (4 if kind == "all-gather" else 1)  # bytes, in bfloat16
    assert (each.kind, each.count, each.size) == (kind, times, times * held)
    assert roofline.axes_of(each.group, {"data": 2, "tensor": 4}) == ("tensor",)
    assert not found.open_loops


TUPLES = """
%body (state: (s32[], bf16[4,16], bf16[16,16])) -> (s32[], bf16[4,16], bf16[16,16]) {
  %state = (s32[], bf16[4,16]{1,0}, bf16[16,16]{1,0}) parameter(0)
  %one = s32[] constant(1)
  %next = s32[] add(%state#0, %one)
  %product = bf16[4,16]{1,0} dot(%state#1, %state#2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %all = (s32[], bf16[4,16]{1,0}, bf16[16,16]{1,0}) tuple(%next, %product, %state#2)
}

%more (at: (s32[], bf16[4,16], bf16[16,16])) -> pred[] {
  %at = (s32[], bf16[4,16]{1,0}, bf16[16,16]{1,0}) parameter(0)
  %end = s32[] constant(5)
  ROOT %less = pred[] compare(%at#0, %end), direction=LT
}

ENTRY %main (x: bf16[4,16], w: bf16[16,16]) -> bf16[4,16] {
  %x = bf16[4,16]{1,0} parameter(0)
  %w = bf16[16,16]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %first = (s32[], bf16[4,16]{1,0}, bf16[16,16]{1,0}) tuple(%zero, %x, %w)
  %loop = (s32[], bf16[4,16]{1,0}, bf16[16,16]{1,0}) while(%first), condition=%more, body=%body
  ROOT %y = bf16[4,16]{1,0} copy(%loop#1)
}
"""


@pytest.mark.quick
def test_a_part_of_a_tuple_may_have_no_instruction_of_its_own():
    found = hlo.work(TUPLES)
    assert (found.flops, found.open_loops) == (5 * 2 * 4 * 16 * 16, 0)


def test_a_program_that_was_compiled_before_is_read_as_at_first():
    """What the compiler writes on its way it does not write where a cache has the program."""
    with speed.fresh_cache():
        first, again = (partitioned(lowered(EXCHANGES["all-reduce"]))[1] for _ in range(2))
    assert hlo.work(first) == hlo.work(again)


MESH = {"data": 2, "fsdp": 4}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "group", "slices", "near", "far"),
    [
        ("all-gather", (0, 1, 2, 3), 1, 0.75, 0),
        ("all-reduce", (0, 1, 2, 3), 1, 1.5, 0),
        ("all-gather", (0, 1, 2, 3), 2, 0.75, 0),  # `data` lies across the slices, and fsdp within them
        ("all-reduce", (0, 4), 2, 0, 1),
        ("reduce-scatter", tuple(range(8)), 2, 0.75, 0.125),  # a quarter of the half that the other slice has
        ("all-to-all", (0, 4), 2, 0, 0.5),
        ("collective-permute", (0, 4), 2, 0, 1),
        ("collective-permute", (0, 1), 2, 1, 0),
    ],
)
def test_what_a_device_receives_of_an_exchange(kind, group, slices, near, far):
    each = hlo.Collective(kind, group, size=1.0, count=1)
    assert roofline.received(each, MESH, slices) == pytest.approx((near, far))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("told", "group"),
    [
        ("{{0,2},{1,3}}", (0, 2)),
        ("{}", ()),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
        ("mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
        ("mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
    ],
)
def test_every_way_to_name_a_group_is_read(told, group):
    line = f"%x = f32[8]{{0}} all-reduce(%y), channel_id=1, replica_groups={told}, use_global_device_ids=true"
    assert hlo.group_of(hlo.instruction(line))[0] == group


@pytest.mark.quick
def test_a_group_that_cannot_be_read_is_no_group_of_all():
    with pytest.raises(ValueError, match="cannot be read"):
        hlo.group_of(hlo.instruction("%x = f32[8]{0} all-reduce(%y), replica_groups=<new>"))


@pytest.mark.quick
def test_a_choice_counts_its_branches_alike():
    def choose(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    _, text = partitioned(jax.jit(choose).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)))
    assert hlo.work(text).flops == 8 * 8 * 8  # half of 2 x 8 x 8 x 8


def test_a_sum_of_which_each_device_takes_its_part_is_scattered():
    """As the gradients of parameters that are shared out."""
    mesh = mesh_of(fsdp=8)
    rows, parts = (jax.sharding.NamedSharding(mesh, P("fsdp")) for _ in range(2))

    def gradient(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(w)

    w = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=parts)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
    _, text = partitioned(jax.jit(gradient, out_shardings=parts).lower(w, x))
    found = {each.kind: each.size for each in hlo.work(text).collectives}
    assert found == {"all-gather": 16 * 32 * 4, "reduce-scatter": 16 * 32 * 4}


# As accelerators' compilers write: layouts with tiles, operands with types, fusions, exchanges in two halves, and what
# another core computes.
TEXT = """
HloModule step

%there (p: bf16[8,16]) -> bf16[8,8] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %g = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}, execution_thread="sparsecore"

%fused (p0: bf16[8,16], p1: bf16[16,32]) -> bf16[8,32] {
  %p0 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[16,32]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = bf16[8,32]{1,0:T(8,128)(2,1)} convolution(bf16[8,16]{1,0:T(8,128)(2,1)} %p0, %p1), dim_labels=bf_io->bf
}

%body (t: (s32[], bf16[8,16], bf16[4,32])) -> (s32[], bf16[8,16], bf16[4,32]) {
  %t = (s32[], bf16[8,16]{1,0:T(8,128)(2,1)}, /*index=2*/bf16[4,32]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%t), index=1
  %w = bf16[4,32]{1,0} get-tuple-element(%t), index=2
  %s = (bf16[4,32]{1,0}, bf16[16,32]{1,0}) all-gather-start(%w), replica_groups=[2,4]<=[8], dimensions={0}
  %d = bf16[16,32]{1,0} all-gather-done(%s)
  %f = bf16[8,32]{1,0} fusion(%x, %d), kind=kOutput, calls=%fused
  ROOT %r = (s32[], bf16[8,16]{1,0}, bf16[4,32]{1,0}) tuple(%i, %x, %w)
}

%condition (t: (s32[], bf16[8,16], bf16[4,32])) -> pred[] {
  %t = (s32[], bf16[8,16]{1,0}, bf16[4,32]{1,0}) parameter(0)
  ROOT %p = pred[] constant(false)
}

ENTRY %main (a: s32[], b: bf16[8,16], c: bf16[4,32]) -> (s32[], bf16[8,16], bf16[4,32]) {
  %a = s32[] parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  %c = bf16[4,32]{1,0} parameter(2)
  %k = bf16[8,16]{1,0} custom-call(%b), custom_call_target="tpu_custom_call"
  %o = ((bf16[8,16]{1,0}), bf16[8,8]{1,0}, u32[]) call-start(%b), async_execution_thread="sparsecore", to_apply=%there
  %t = (s32[], bf16[8,16]{1,0}, bf16[4,32]{1,0}) tuple(%a, %k, %c)
  ROOT %l = (s32[], bf16[8,16]{1,0}, bf16[4,32]{1,0}) while(%t), condition=%condition, body=%body, TRIPS
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"7"}}')


@pytest.mark.quick
def test_programs_of_accelerators_are_read():
    found = hlo.work(TEXT)
    assert (found.flops, found.kernels, found.open_loops) == (7 * 2 * 8 * 16 * 32 + 2 * 8 * 8 * 16, 1, 0)
    assert found.collectives == (hlo.Collective("all-gather", (0, 1, 2, 3), size=7 * 2 * 16 * 32, count=7),)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "kernel", "made", "told", "multiplied"),
    [
        # Eight products of 32 x 8 by 8 x 32, and twelve heads that read 64 channels each of 96 tokens.
        ([2, 4, 32, 8], [2, 4, 32, 8], [2, 4, 32, 32], "stride=1x3 lhs_dilate=2x4:01bf_01oi->01bf", 8 * 32 * 32 * 8),
        ([96, 768, 1], [12, 768, 64], [96, 12, 64], "pad=11_11 rhs_reversal=1:bf0_0io->b0f", 96 * 768 * 12 * 64),
        ([96, 12, 64], [12, 64, 768], [96, 768, 1], ":b0f_0io->bf0", 96 * 12 * 64 * 768),
        # Three numbers around each of 10, beside which nothing is; one of two of them; and what batches sum up.
        ([1, 10, 4], [3, 4, 5], [1, 10, 5], "pad=1_1:b0f_0io->b0f", 28 * 4 * 5),
        ([1, 10, 4], [3, 4, 5], [1, 5, 5], "stride=2 pad=0_1:b0f_0io->b0f", 14 * 4 * 5),
        ([1, 10, 4], [3, 4, 5], [1, 7, 5], "rhs_dilate=2 pad=1_0:b0f_0io->b0f", 20 * 4 * 5),
        ([6, 4], [4, 5], [6, 5], ":bf_io->bf", 6 * 4 * 5),
    ],
)
def test_a_window_multiplies_what_lies_in_it(given, kernel, made, told, multiplied):
    window, _, labels = told.partition(":")
    text = f", window={{size=0x0 {window}}}, dim_labels={labels}"
    assert windows.multiplied(text, given, kernel, made) == multiplied


# What a runtime carries between two slices of four: each half of an exchange is told apart.
SLICED = """
ENTRY %main (a: f32[8,16], b: f32[4,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %b = f32[4,16]{1,0:T(8,128)} parameter(1)
  %t = token[] after-all()
  %s.1 = (f32[8,16]{1,0:T(8,128)}, u32[], token[]) send(%a, %t), channel_id=1, is_host_transfer=true, TO="ALL_REDUCE"}
  %r.1 = (f32[8,16]{1,0:T(8,128)}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, TO="ALL_REDUCE"}
  %s.2 = (f32[8,16]{1,0}, u32[], token[]) send(%a, %t), channel_id=3, is_host_transfer=true, TO="REDUCE_SCATTER"}
  %r.2 = (f32[4,16]{1,0}, u32[], token[]) recv(%t), channel_id=4, is_host_transfer=true, TO="REDUCE_SCATTER"}
  %s.3 = (f32[4,16]{1,0}, u32[], token[]) send(%b, %t), channel_id=5, is_host_transfer=true, TO="ONE_TO_ONE"}
  %r.3 = (f32[4,16]{1,0}, u32[], token[]) recv(%t), channel_id=6, is_host_transfer=true, TO="ONE_TO_ONE"}
  %s.4 = (f32[4,16]{1,0}, u32[], token[]) send(%b, %t), channel_id=7
  ROOT %g = f32[8,16]{1,0} all-gather(%b), channel_id=8, replica_groups={{0,1,2,3}}, dimensions={0}
}
""".replace("TO=", "frontend_attributes={_xla_megascale_transfer_type=")


@pytest.mark.quick
def test_what_goes_between_slices_is_read():
    found = {each.kind: each for each in hlo.work(SLICED).collectives}
    assert found.pop("all-gather") == hlo.Collective("all-gather", (0, 1, 2, 3), 8 * 16 * 4, 1)
    assert all(each.slices and each.count == 1 for each in found.values())
    assert {kind: each.size for kind, each in found.items()} == {
        "all-reduce": 8 * 16 * 4,
        "reduce-scatter": 8 * 16 * 4,
        "collective-permute": 4 * 16 * 4,
    }
    received = {kind: roofline.received(each, MESH, 2) for kind, each in found.items()}
    assert received == {"all-reduce": (0, 512), "reduce-scatter": (0, 256), "collective-permute": (0, 256)}
    assert roofline.axes_between(MESH, 2) == ("data",)


@pytest.mark.quick
def test_what_is_known_of_a_kernel_counts():
    known = {("k", ((8, 16),)): 1000.0}
    found, sealed = hlo.work(TEXT, known), hlo.work(TEXT)
    assert (found.flops - sealed.flops, found.kernels, sealed.kernels) == (1000, 0, 1)
    assert (
        found.moved
        == sealed.moved
        == hlo.work(TEXT.replace("tpu_custom_call", "AllocateBuffer")).moved + 2 * 8 * 16 * 2
    )


GROUPED = """
ENTRY %main (a: bf16[64,16], b: bf16[4,16,32], n: s32[4]) -> bf16[64,32] {
  %a = bf16[64,16]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,16,32]{2,1,0:T(8,128)(2,1)} parameter(1)
  %n = s32[4]{0:T(128)} parameter(2)
  %ragged-dot-metadata = (s32[5]{0:T(128)}) custom-call(%n), custom_call_target="tpu_custom_call"
  %t = s32[5]{0:T(128)} get-tuple-element(%ragged-dot-metadata), index=0
  ROOT %ragged-dot-none.1 = bf16[64,32]{1,0:T(8,128)} custom-call(%t, %a, %b), custom_call_target="tpu_custom_call"
}
"""


@pytest.mark.quick
def test_rows_in_groups_are_multiplied_each_by_one_matrix():
    found = hlo.work(GROUPED)
    assert (found.flops, found.kernels) == (2 * 64 * 16 * 32, 0)
