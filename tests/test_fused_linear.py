"""The GPU kernels of linear recurrences, interpreted, against a loop in float64; and that they lower for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops import fused_linear as op
from model.ops import scan
from model.ops.fused_selective import Shape
from model.ops.scan import linear_scan
from tests import meshes, zoo
from tests.host_mesh import mesh_of, on_mesh
from tests.jaxprs import equations
from tests.test_fused_selective import for_a_gpu, values_and_gradients

B = 2
SMALL = {"whole": Shape(16, 4, 8), "parted": Shape(8, 2, 32)}  # which are quicker to compile


@pytest.fixture
def small(monkeypatch):
    for name in ("OUT", "BACK"):
        monkeypatch.setattr(op, name, SMALL)
    monkeypatch.setattr(op, "SHORTEST", 16)


def inputs(L: int, *channels: int) -> dict[str, np.ndarray]:
    """With documents, of whose past nothing is left at their first token, and padding, which leaves states as they
    are."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 1, (B, L, *channels)), rng.normal(size=(B, L, *channels))
    opens, padding = rng.random((2, B, L, *[1] * len(channels))) < 0.1
    a, b = np.where(opens, 0, np.where(padding, 1, a)), np.where(padding & ~opens, 0, b)
    return dict(a=a, b=b, h0=rng.normal(size=(B, *channels)))


def recurrence(a, b, h0):
    def step(h, token):
        h = token[0] * h + token[1]
        return h, h

    last, h = lax.scan(step, h0, (jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0)))
    return jnp.moveaxis(h, 0, 1), last


def assert_the_recurrence(x, P):
    """Values and every gradient, in float32 and in float64."""
    with jax.enable_x64(True):
        truth = values_and_gradients(recurrence, jax.tree.map(jnp.asarray, x))
    found = values_and_gradients(partial(op.fused_linear, P=P, interpret=True), jax.tree.map(jnp.float32, x))
    for name, want in truth.items():
        assert found[name].shape == want.shape
        assert np.abs(found[name] - want).max() <= 2e-6 * np.abs(want).max(), name


@pytest.mark.few(5)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("L", "channels", "P"),
    [
        (64, (16,), 1),
        (1, (8,), None),
        (63, (20,), 3),
        (100, (5,), 1),
        (128, (8,), 8),
        (7, (3, 2), None),
        (100, (24,), None),
        (65, (16,), 2),
    ],
    ids=str,
)
def test_kernels_are_the_recurrence(L, channels, P):
    """Rows in one part and in several, the last of them cut short, and so the channels."""
    assert_the_recurrence(inputs(L, *channels), P)


@pytest.mark.scale
@pytest.mark.parametrize("P", [1, 3])
def test_kernels_as_they_are_tuned_are_the_recurrence(P):
    assert_the_recurrence(inputs(200, 96), P)


@pytest.mark.usefixtures("small")
def test_what_decays_to_nothing_is_nothing():
    """Of a part of many tokens the product of all a is no number that float32 has; nothing is divided by it."""
    L = 96
    a, b, h0 = jnp.full((1, L, 8), 1e-3), jnp.ones((1, L, 8)), jnp.full((1, 8), 1e30)
    h, pull = jax.vjp(lambda *x: op.fused_linear(*x, P=3, interpret=True)[0], a, b, h0)
    np.testing.assert_allclose(h[0, -1], 1 / (1 - 1e-3), rtol=1e-6)
    da, db, dh0 = pull(jnp.ones_like(h))
    np.testing.assert_allclose(db[0, :50], 1 / (1 - 1e-3), rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in (da, dh0))


@pytest.mark.quick
def test_rows_are_parted_until_the_chip_is_full():
    for shapes in (op.OUT, op.BACK):
        assert op.cut(32, 2048, 128, shapes, None).P == 1  # every row and channel has a program at once
        assert op.cut(1, op.SHORTEST, 256, shapes, None).P == 1
        for rows, L, E in ((1, 10**6, 256), (1, 2**20, 256), (1, 2**16, 256), (2, 5000, 40), (1, 129, 7)):
            P, T, F, U = op.cut(rows, L, E, shapes, None)
            assert (P - 1) * T < L <= P * T and T % U == 0 and F & (F - 1) == 0
            programs = rows * P * -(-E // F)
            assert programs <= 1.25 * shapes["parted"].programs
            assert programs >= 0.75 * shapes["parted"].programs or T <= 2 * op.SHORTEST


@pytest.mark.quick
@pytest.mark.parametrize("P", [1, 2])
def test_kernels_lower_for_a_gpu(P):
    x = jax.tree.map(jnp.float32, inputs(256, 64))
    text = for_a_gpu(lambda x: op.fused_linear(**x, P=P), x)
    named = [kernel for kernel in ("effects", "states", "adjoints", "gradients") if f'name = "linear_{kernel}' in text]
    assert named == (["states", "gradients"] if P == 1 else ["effects", "states", "adjoints", "gradients"])


@pytest.mark.quick
@pytest.mark.parametrize("P", [1, 2])
def test_channels_that_are_not_there_are_not_touched(P):
    """Beside a token's last channel lie the next token's, which an interpreted kernel, given a copy, cannot harm."""

    def touched(E: int) -> int:
        """How often kernels read or write all channels of a program."""
        x = jax.tree.map(jnp.float32, inputs(256, E))
        run = partial(op.fused_linear, P=P)
        program = jax.make_jaxpr(lambda x: jax.vjp(lambda x: run(**x), x)[1](run(**x)))(x)
        return sum(1 for name in ("get", "swap") for _ in equations(program.jaxpr, name))

    assert touched(64) > 0 and touched(40) == 0


def lowered(chip: str, sizes: dict, L: int = 512, channels: tuple = (64,), dtype=jnp.float32) -> str:
    """The gradient of a scan on a mesh."""
    mesh, rows = meshes.mesh_of(chip, **sizes), ("data", "fsdp")
    token, state = ((8, L, *channels), (rows, "sequence", "tensor")), ((8, *channels), (rows, "tensor"))
    arrays = {
        name: meshes.laid(mesh, jax.ShapeDtypeStruct(shape, dtype), *places)
        for name, (shape, places) in dict(a=token, b=token, h0=state).items()
    }

    def objective(arrays):
        h, last = linear_scan(**arrays)
        return jnp.sum(jnp.abs(h) ** 2) + jnp.sum(jnp.abs(last))

    return meshes.lowered(mesh, jax.value_and_grad(objective), arrays)


@pytest.mark.parametrize("sizes", [{}, dict(data=4), dict(fsdp=4), dict(tensor=4), dict(data=2, tensor=2)], ids=str)
def test_a_gpu_picks_kernels_on_every_mesh(sizes):
    for shape in (dict(), dict(L=1000, channels=(40, 2))):
        text = lowered("gpu", sizes, **shape)
        assert all(f'name = "linear_{kernel}' in text for kernel in ("states", "gradients"))


@pytest.mark.parametrize(
    ("chip", "sizes", "call"),
    [
        ("tpu", {}, {}),
        ("volta", {}, {}),
        ("amd", {}, {}),
        ("gpu", {}, dict(L=1)),
        ("gpu", {}, dict(dtype=jnp.complex64)),
        ("gpu", dict(sequence=4), {}),
    ],
    ids=str,
)
def test_what_kernels_do_not_take_goes_without(chip, sizes, call):
    assert "linear_states" not in lowered(chip, sizes, **call)


@pytest.mark.usefixtures("small")
def test_devices_keep_their_rows_and_channels(monkeypatch):
    """On a mesh values and gradients are the same, and no device is sent another's tokens."""
    monkeypatch.setattr(scan, "linear_kernels_lack", lambda *arrays: [])
    monkeypatch.setattr(op, "fused_linear", partial(op.fused_linear, interpret=True))
    x = jax.tree.map(jnp.float32, inputs(40, 12, 2))

    def step(x):
        def objective(x):
            h, last = linear_scan(**x)
            return jnp.sum(jnp.sin(h)) + jnp.sum(last**2), (h, last)

        return jax.grad(objective, has_aux=True)(x)

    mesh = mesh_of(data=2, tensor=2)
    spread = dict(a=PartitionSpec("data", None, "tensor"), h0=PartitionSpec("data", "tensor"))
    spread["b"] = spread["a"]
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, spread[name])) for name, leaf in x.items()}
    run = on_mesh(step, mesh).lower(placed).compile()
    found, text = run(placed), run.as_text()
    monkeypatch.undo()
    for mine, want in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(x)), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-5)
    assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["rglru", "rwkv"])
def test_mixers_by_kernels_are_what_they_are(monkeypatch, name):
    """Of rows of documents and padding."""
    mixer = MIXERS[name](width=16)
    x, ctx = zoo.inputs(2, 9), zoo.context([[1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 1, 1, 1, 1, 2, 3, 3, 3]])
    variables = zoo.params(mixer)

    def run(variables, x):
        return jnp.where(ctx.segments[..., None] > 0, mixer.apply(variables, x, ctx)[0], 0)

    def values(x):
        y, pull = jax.vjp(run, variables, x)
        return y, pull(jnp.cos(y))

    want = jax.jit(values)(x)
    monkeypatch.setattr(scan, "linear_kernels_lack", lambda *arrays: [])
    monkeypatch.setattr(op, "fused_linear", partial(op.fused_linear, interpret=True))
    assert "linear_states" in str(jax.make_jaxpr(lambda x: run(variables, x))(x))
    for mine, other in zip(jax.tree.leaves(jax.jit(values)(x)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["rglru", "rwkv"])
def test_asked_for_by_name_it_says_what_it_lacks(name):
    mixer = MIXERS[name](width=16, implementation="fused")
    with pytest.raises(UserError, match=r"'fused' cannot serve the platform cpu .*; leave it unset") as told:
        jax.eval_shape(mixer.init, jax.random.key(0), zoo.inputs(1, 4), Context())
    assert "\n" not in str(told.value)


@pytest.mark.quick
def test_numbers_of_other_dtypes_are_named():
    x = jax.tree.map(jnp.float32, inputs(4, 8))
    with meshes.in_force(meshes.mesh_of("gpu")):
        assert scan.linear_kernels_lack(**x) == []
        narrow = {name: leaf.astype(jnp.bfloat16) for name, leaf in x.items()}
        assert scan.linear_kernels_lack(**narrow) == ["bfloat16 (it takes float32)"]
        assert scan.linear_kernels_lack(**x | dict(a=narrow["a"])) == [
            "a of bfloat16 and a first state of float32 beside b of float32"
        ]
