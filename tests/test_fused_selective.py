"""The GPU kernels of Mamba's scan, interpreted, against the recurrence in float64; and that they lower for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.ops import fused_selective as op
from model.ops.scan import selective_scan
from tests.test_fused_ssd import made_for

B, E, N = 2, 64, 4


def inputs(L: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = dict(x=(B, L, E), dt=(B, L, E), A=(E, N), B=(B, L, N), C=(B, L, N), h0=(B, E, N))
    made = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return made | {"dt": np.exp(made["dt"] - 2), "A": -np.exp(made["A"])}


def values_and_gradients(run, x: dict) -> dict[str, np.ndarray]:
    """Outputs and last state, and gradients of a weighted sum of both."""

    def objective(x):
        found = run(**x)
        rng = np.random.default_rng(1)
        return sum(jnp.sum(leaf * rng.normal(size=leaf.shape).astype(leaf.dtype)) for leaf in found), found

    grads, (y, h) = jax.jit(jax.grad(objective, has_aux=True))(x)
    return {name: np.asarray(leaf, np.float64) for name, leaf in (grads | dict(y=y, h=h)).items()}


def for_a_gpu(run, x: dict) -> str:
    """The program of values and gradients."""

    def pulled(x):
        out, pull = jax.vjp(run, x)
        return out, pull(out)

    with made_for("NVIDIA H200"):
        return jax.jit(pulled).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("L", "P", "documents"),
    [(64, 1, False), (100, 1, True), (300, 4, False), (257, 2, True)],
    ids=["a chunk", "documents", "parts", "documents in parts"],
)
def test_kernels_are_the_recurrence(L, P, documents):
    x = inputs(L)
    keep = jnp.asarray(np.random.default_rng(2).random((B, L)) > 0.05) if documents else None
    with jax.enable_x64(True):
        truth = values_and_gradients(
            lambda **x: selective_scan(**x, keep=keep, implementation="sequential"), jax.tree.map(jnp.asarray, x)
        )
    found = values_and_gradients(
        lambda **x: op.fused_selective(**x, keep=keep, P=P, interpret=True), jax.tree.map(jnp.float32, x)
    )
    for name, want in truth.items():
        assert np.abs(found[name] - want).max() <= 2e-5 * np.abs(want).max(), name


@pytest.mark.quick
def test_rows_are_parted_until_the_chip_is_full():
    def parts(*sizes):
        return [op.cut(*sizes, shapes, None)[0] for shapes in (op.OUT, op.BACK)]

    assert parts(8, 2048, 2048) == [1, 1] and parts(2, 2048, 2048) == [4, 4]
    assert parts(1, 65_536, 2048) == [64, 32] and parts(1, 512, 2048) == [1, 1]
    for L in (100, 2048, 5000, 65_537, 10**6):
        filled = -(-L // (op.most_parts(L) * op.Q)) * op.most_parts(L) * op.Q
        assert filled - L < max(op.Q, L / 16)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.quick), "float32"])
def test_kernels_lower_for_a_gpu(dtype):
    x = {
        name: leaf.astype(dtype) if name in "xBC" else leaf
        for name, leaf in jax.tree.map(jnp.float32, inputs(256)).items()
    }

    text = for_a_gpu(lambda x: op.fused_selective(**x, keep=jnp.ones((B, 256), bool), P=2), x)
    assert all(f'name = "selective_{kernel}' in text for kernel in ("ends", "outputs", "adjoints", "gradients"))


@pytest.mark.quick
def test_asked_for_by_name_it_says_what_it_lacks():
    x = {name: leaf[..., :48] if name in ("x", "dt") else leaf for name, leaf in inputs(8).items()}
    x |= {"A": x["A"][:48], "h0": x["h0"][:, :48]}
    with pytest.raises(
        UserError, match=r"'fused' cannot serve the platform cpu .*; 48 channels of 4 numbers .*'chunked'"
    ):
        selective_scan(**jax.tree.map(jnp.float32, x), implementation="fused")
