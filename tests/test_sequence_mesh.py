"""Devices that share the length: the same values and gradients as on one device, and each with its share to hold."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.contract import Context, Mixer
from model.documents import document_positions, open_reading
from model.mixers import MIXERS
from model.mixers.rwkv import wkv
from model.mixers.s4 import dplr_kernel, dplr_recurrence
from model.ops.conv import long_conv, shift, short_conv, window_conv
from model.ops.delta_rule import delta_rule
from model.ops.document_conv import document_conv
from model.ops.matrix_state import matrix_state
from model.ops.ssd import ssd
from model.ops.stretches import gathers
from model.ops.wkv import wkv6
from tests import zoo
from tests.host_mesh import mesh_of, on_mesh

pytestmark = pytest.mark.scale

B, L = 2, 48
# Documents, with padding before, inside and after them that fills whole stretches of 4 devices, and of 8.
SEGMENTS = np.asarray([[0] * 3 + [1] * 5 + [0] * 17 + [1, 0, 1] + [2] * 20, [1] * 2 + [0] * 40 + [1] * 6])
REAL = SEGMENTS > 0
POSITIONS = np.asarray(document_positions(jnp.asarray(SEGMENTS), open_reading(B))[0])
KEEP = (POSITIONS > 0) | ~REAL


def normal(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def mamba2(x, dt, A, Bs, Cs, h0):
    dt = jnp.where(REAL[..., None], jax.nn.softplus(dt), 0)
    return ssd(x, dt, -jnp.exp(A), Bs, Cs, h0, jnp.asarray(KEEP), implementation="chunked", chunk=8)


def rwkv6(r, k, v, w, u, h0):
    k, w = (jnp.where(REAL[..., None, None], x, 0) for x in (k, -jnp.exp(w)))
    return wkv6(r, k, v, w, u, h0, jnp.asarray(KEEP), implementation="chunked")


def gated_deltanet(q, k, v, w, beta, h0):
    w, beta = (jnp.where(REAL[..., None], x, 0) for x in (-jnp.exp(w), jax.nn.sigmoid(beta)))
    return delta_rule(q, k / 2, v, w, h0, jnp.asarray(KEEP), beta=beta, implementation="chunked")


def rwkv7(q, k, v, w, a, b, h0):
    k, w, a = (jnp.where(REAL[..., None, None], x, 0) for x in (k, -jnp.exp(w), a / 4))
    return delta_rule(q, k, v, w, h0, jnp.asarray(KEEP), a=a, b=b / 4, implementation="chunked")


def head_decay(q, k, v, w, h0):
    k, w = jnp.where(REAL[..., None, None], k, 0), jnp.where(REAL[..., None], -jnp.exp(w), 0)
    return matrix_state(q, k, v, w, h0, jnp.asarray(KEEP), implementation="chunked")


def channel_decay(q, k, v, w, h0):
    k, w = (jnp.where(REAL[..., None, None], x, 0) for x in (k, -jnp.exp(w)))
    return matrix_state(q, k, v, w, h0, jnp.asarray(KEEP), implementation="chunked")


def rwkv4(k, v, w, u, aa, bb):
    state = (aa, jnp.exp(bb), jnp.zeros_like(aa))
    y, (aa, bb, pp) = wkv(k, v, -jnp.exp(w), u, state, jnp.asarray(~KEEP), jnp.asarray(REAL), None)
    return jnp.where(REAL[..., None], y, 0), aa * jnp.exp(pp), bb * jnp.exp(pp)


def modes(real, imag, log_dt):
    return jax.lax.complex(-jnp.exp(real), imag), jnp.exp(log_dt - 2)


def s4(u, real, imag, P, B, C, log_dt):
    Lambda, dt = modes(real, imag, log_dt)
    return long_conv(u, dplr_kernel, (Lambda, *(jax.lax.complex(x, x) for x in (P, B, C)), dt))


def s4_in_documents(u, real, imag, P, B, C, log_dt, h0):
    Lambda, dt = modes(real, imag, log_dt)
    vectors = (jax.lax.complex(x, x) for x in (P, B, C))
    ctx = Context(positions=jnp.asarray(POSITIONS), segments=jnp.asarray(SEGMENTS))
    y, h = dplr_recurrence(u, Lambda, *vectors, dt, jax.lax.complex(h0, h0), ctx, None)
    return jnp.where(REAL[..., None], y, 0), h.real


def of_neighbours(x, kernel, past):
    marks = jnp.asarray(POSITIONS), jnp.asarray(REAL)
    return short_conv(x, kernel, kernel[0], past, *marks), shift(x, past[:, -1:], *marks)


def plain_neighbours(x, kernel, past):
    return short_conv(x, kernel, kernel[0], past), shift(x, past[:, -1:])


def in_window(u, kernel, past):
    """More lags than a device has tokens."""
    return window_conv(u, past, lambda k, W: k.T, (kernel,), W=15, reach=jnp.asarray(POSITIONS), real=jnp.asarray(REAL))


def in_documents(u, kernel, past):
    """A kernel as long as the row and what comes before it."""

    def waves(k, n):
        return jnp.cos(k * jnp.arange(n)[:, None, None]).sum(-1)

    return document_conv(u, past, waves, (kernel,), reach=jnp.asarray(POSITIONS), real=jnp.asarray(REAL))


CHANNELS, PAIR, HEADS = (B, L, 6), (B, L, 2, 5), (B, L, 4, 3)
VECTOR = (6, 4)  # six channels for eight devices, or three for four: they do not divide
MODES = dict(real=VECTOR, imag=VECTOR, P=VECTOR, B=VECTOR, C=VECTOR, log_dt=(6,))
OPS = {
    mamba2: dict(x=HEADS, dt=HEADS[:3], A=(4,), Bs=PAIR, Cs=PAIR, h0=(B, 4, 3, 5)),
    rwkv6: dict(r=HEADS, k=HEADS, v=HEADS, w=HEADS, u=(4, 3), h0=(B, 4, 3, 3)),
    gated_deltanet: dict(q=HEADS, k=HEADS, v=(B, L, 4, 5), w=HEADS[:3], beta=HEADS[:3], h0=(B, 4, 3, 5)),
    rwkv7: dict(q=HEADS, k=HEADS, v=HEADS, w=HEADS, a=HEADS, b=HEADS, h0=(B, 4, 3, 3)),
    head_decay: dict(q=HEADS, k=HEADS, v=(B, L, 4, 5), w=HEADS[:3], h0=(B, 4, 3, 5)),
    channel_decay: dict(q=HEADS, k=HEADS, v=(B, L, 4, 5), w=HEADS, h0=(B, 4, 3, 5)),
    rwkv4: dict(k=CHANNELS, v=CHANNELS, w=(6,), u=(6,), aa=(B, 6), bb=(B, 6)),
    s4: dict(u=CHANNELS) | MODES,
    s4_in_documents: dict(u=CHANNELS) | MODES | dict(h0=(B, *VECTOR)),
    of_neighbours: dict(x=CHANNELS, kernel=(4, 6), past=(B, 3, 6)),
    plain_neighbours: dict(x=CHANNELS, kernel=(4, 6), past=(B, 3, 6)),
    in_window: dict(u=CHANNELS, kernel=(6, 15), past=(B, 14, 6)),
    in_documents: dict(u=CHANNELS, kernel=VECTOR, past=(B, 5, 6)),
}


MESHES = [(op, dict(tensor=2, sequence=4)) for op in OPS] + [(op, dict(sequence=8)) for op in (s4, of_neighbours)]


@pytest.mark.parametrize(
    ("op", "sizes"), [pytest.param(op, sizes, id=f"{op.__name__}-{sizes}") for op, sizes in MESHES]
)
def test_sharing_the_length_changes_nothing(op, sizes):
    """Values, last states and gradients; and no device gets all tokens, though it may get all of some channels."""
    arrays, mesh = normal(**OPS[op]), mesh_of(**sizes)

    def step(arrays):
        def objective(arrays):
            out = jax.tree.leaves(op(**arrays))
            weights = normal(7, **{str(i): leaf.shape for i, leaf in enumerate(out)}).values()
            return sum(jnp.sum(leaf * w) + jnp.sum(leaf**2) for leaf, w in zip(out, weights, strict=True)), out

        return jax.grad(objective, has_aux=True)(arrays)

    def place(leaf):
        return NamedSharding(mesh, P("data", "sequence") if leaf.shape[:2] == (B, L) else P())

    placed = {name: jax.device_put(leaf, place(leaf)) for name, leaf in arrays.items()}
    out = jax.tree.map(place, jax.eval_shape(step, arrays))
    program = on_mesh(step, mesh, out_shardings=out).lower(placed).compile()
    for mine, want in zip(jax.tree.leaves(program(placed)), jax.tree.leaves(jax.jit(step)(arrays)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", program.as_text())
    assert all(np.prod([int(n) for n in size.split(",")]) < B * L * 3 for size in gathered), gathered


# What holds each token's past in a state, or reads it by a convolution, and can be taken apart.
LOOPS = ("rnn", "lstm", "gru", "slstm")  # one token after another
WHOLE = ("linformer", "sinkhorn", "synthesizer")  # have weights for every token of the longest row
APART = [name for name in zoo.ALONE if not MIXERS[name].softmax and name not in LOOPS + WHOLE]
LITTLE = {"fnet": 1.5}  # it keeps nothing but the numbers that devices exchange, and so these are seen
STRETCH = 4096  # as in the law of cost, whose program then serves


def memory(mixer: Mixer, length: int, devices: int, packed: bool) -> int:
    """Temporary bytes on a device of a mixer's gradient."""
    variables, mesh = zoo.params(mixer), mesh_of(sequence=devices)

    def objective(variables, x, segments):
        x = nn.with_logical_constraint(x, ("batch", "length", None))
        ctx = Context(positions=jnp.arange(length)[None])
        if packed:
            ctx = Context(positions=document_positions(segments, open_reading(1))[0], segments=segments)
        return jnp.sum(mixer.apply(variables, x, ctx)[0] ** 2)

    tokens, whole = (NamedSharding(mesh, spec) for spec in (P(None, "sequence"), P()))
    arguments = (
        jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole), variables),
        jax.ShapeDtypeStruct((1, length, zoo.WIDTH), jnp.float32, sharding=tokens),
        jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=tokens),
    )
    step = on_mesh(jax.grad(objective, argnums=(0, 1)), mesh, out_shardings=(whole, tokens))
    return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("name", "packed"), [(name, False) for name in APART] + [("s4", True), ("mamba", True)])
def test_memory_is_that_of_a_stretch(name, packed):
    """Of a sequence eight times as long, each of eight devices holds little more than one alone of one stretch."""
    mixer = zoo.make((name, {}, "none"))
    alone = memory(mixer, STRETCH, 1, packed) if packed else zoo.memory(mixer, STRETCH)
    assert memory(mixer, 8 * STRETCH, 8, packed) < LITTLE.get(name, 1.3) * alone


def test_what_cannot_be_shared_is_told_once(caplog):
    gathers.cache_clear()
    mixer, mesh = zoo.make(("gru", {}, "none")), mesh_of(sequence=8)
    variables = zoo.params(mixer)

    def two_layers(x):
        for _ in range(2):
            x, _ = mixer.apply(variables, x, Context())
        return x

    on_mesh(two_layers, mesh).lower(jax.device_put(zoo.inputs(1, 16), NamedSharding(mesh, P(None, "sequence"))))
    (record,) = caplog.records
    assert "the recurrence of gru needs all tokens on every device: mesh.sequence shares" in record.message
