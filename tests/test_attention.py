"""Every implementation of attention is the same function: values and gradients against the float64 definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import attention_speed, speed
from model.errors import UserError
from model.ops import attention as op
from model.ops import tiled_attention
from model.ops.attention import Bias, attention
from model.ops.dense_attention import reference
from model.ops.fused_attention import splash

B, L, H, G, K = 2, 100, 4, 2, 8
SEGMENTS = np.asarray([[1] * 30 + [2] * 50 + [0] * 20, [3] * 100])
POSITIONS = np.asarray([[*range(30), *range(50), *[0] * 20], [*range(100)]])


def slope(params, q_positions, k_positions):
    """A bias with a parameter per head, curved in the distance."""
    distance = q_positions[:, None, :, None] - k_positions[:, None, None, :]
    return -params[:, None, None] * jnp.log1p(jnp.abs(distance).astype(params.dtype))


CALLS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 13},
    "window both ways": {"window": 13, "causal": False},
    "prefix": {"prefix": 17},
    "soft cap": {"soft_cap": 2.0},
    "scale": {"scale": 0.7},
    "packed": {"packed": True},
    "packed window": {"packed": True, "window": 9},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "additive": {"additive": True},
    "all": {"packed": True, "window": 40, "prefix": 3, "soft_cap": 3.0, "bias": True, "sinks": True},
}


def arrays(seed: int = 0, value_dim: int = K):
    rng = np.random.default_rng(seed)
    return {
        "q": rng.normal(size=(B, L, H, K)),
        "k": rng.normal(size=(B, L, G, K)),
        "v": rng.normal(size=(B, L, G, value_dim)),
        "bias": rng.uniform(0.2, 1, size=H),
        "sinks": rng.normal(size=H),
        "additive": rng.normal(size=(H, K)),
    }


def run(values, call, implementation, dtype):
    """Output, log-sum-exp, and the gradients of a weighted sum of both."""
    options = dict(call)
    packed, biased = options.pop("packed", False), options.pop("bias", False)
    uses = {name: options.pop(name, False) for name in ("sinks", "additive")}
    values = {key: jnp.asarray(value, dtype) for key, value in values.items()}
    rng = np.random.default_rng(9)
    weight, weight_lse = rng.normal(size=(B, L, H, values["v"].shape[-1])), rng.normal(size=(B, L, H))
    real = (SEGMENTS > 0 if packed else np.ones((B, L), bool))[..., None]

    def objective(values):
        place = {}
        if packed:
            place = dict(q_positions=POSITIONS, k_positions=POSITIONS, q_segments=SEGMENTS, k_segments=SEGMENTS)
        out, lse = attention(
            *(values[key] for key in "qkv"),
            **place,
            **options,
            **{name: values[name] for name, used in uses.items() if used},
            bias=Bias(values["bias"], slope) if biased else None,
            with_lse=True,
            implementation=implementation,
        )
        lse = jnp.where(real, lse, 0)
        total = jnp.sum(out * jnp.asarray(weight, out.dtype)) + jnp.sum(lse * jnp.asarray(weight_lse, lse.dtype))
        return total, (out, lse)

    grads, (out, lse) = jax.jit(jax.grad(objective, has_aux=True))(values)
    return {key: np.asarray(value) for key, value in {"out": out, "lse": lse, **grads}.items()}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_attention, "tile_shape", lambda o: (16, 24))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_implementations_are_one_function(call):
    with jax.enable_x64(True):
        truth = run(arrays(), call, "reference", jnp.float64)
        assert truth["out"].dtype == jnp.float64
        for name in ("xla", "tiled"):
            got = run(arrays(), call, name, jnp.float64)
            for key, want in truth.items():
                np.testing.assert_allclose(got[key], want, atol=1e-9, err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", ["xla", "tiled"])
def test_narrow_dtypes_stay_close(name):
    values, call = arrays(), CALLS["all"]
    with jax.enable_x64(True):
        truth = run(values, call, "reference", jnp.float64)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.05)):
        got = run(values, call, name, dtype)
        for key, want in truth.items():
            error = np.linalg.norm(np.asarray(got[key], np.float64) - want) / max(np.linalg.norm(want), 1e-30)
            assert error < tolerance, (dtype, key, error)


# Which implementation serves


def call(n=64, dtype=jnp.float32, head_dim=64, **options):
    q, k = jnp.zeros((1, n, 4, head_dim), dtype), jnp.zeros((1, n, 2, head_dim), dtype)
    form, o, contiguous = op.prepare(q, k, k, **options)
    return o, op.features(form, o, contiguous, with_lse=False)


def picked(*args, **options):
    chosen = op.pick(None, *call(*args, **options))
    return next(name for name, can in op.IMPLEMENTATIONS.items() if can is chosen)


@pytest.mark.quick
def test_the_choice_follows_platform_dtype_length_and_features(monkeypatch):
    assert picked() == "xla" and picked(n=4096) == "tiled"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    half = dict(dtype=jnp.bfloat16)
    assert picked(**half) == picked(n=32_768, **half) == picked(n=4096, window=100, **half) == "cudnn"
    assert picked(n=4096) == picked(n=4096, soft_cap=5.0, **half) == picked(n=4096, head_dim=256, **half) == "tiled"
    assert picked(n=4096, k_segments=jnp.ones((1, 4096)), q_segments=jnp.ones((1, 4096)), **half) == "tiled"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    wide_heads = dict(n=4096, head_dim=128)
    assert picked(**wide_heads) == picked(soft_cap=5.0, **wide_heads) == "splash"
    assert picked(sinks=jnp.zeros(4), **wide_heads) == picked(n=4096, head_dim=64) == "tiled"


@pytest.mark.quick
def test_a_kernel_asked_for_by_name_says_what_it_lacks():
    q = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(
        UserError, match=r"'cudnn' cannot serve soft-capped scores; the platform cpu .*float32.*choose from xla, "
    ):
        attention(q, q, q, soft_cap=3.0, implementation="cudnn")
    with pytest.raises(UserError, match=r"'splash' cannot serve attention sinks; the platform cpu.*head dim of 8"):
        attention(q, q, q, sinks=jnp.zeros(2), implementation="splash")
    with pytest.raises(UserError, match=r"unknown attention implementation 'tile'.*closest: tiled"):
        attention(q, q, q, implementation="tile")


@pytest.mark.quick
def test_the_support_matrix_is_what_the_choice_reads():
    table = op.support_matrix()
    assert table["a position bias"] == dict(splash="-", cudnn="-", xla="yes", tiled="yes", reference="yes")
    assert set(table["platform"]) == set(op.IMPLEMENTATIONS)


# The fused kernels that run here, interpreted


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 50}, {"soft_cap": 2.0}, {"packed": True}], ids=str
)
def test_splash_is_the_same_function(options):
    rng = np.random.default_rng(0)
    options = dict(options)
    n, packed = 128, options.pop("packed", False)
    segments = jnp.asarray([[1] * 60 + [2] * 40 + [0] * 28]) if packed else None
    q, k, v, weight = (jnp.asarray(rng.normal(size=(1, n, h, 128)), jnp.float32) for h in (4, 2, 2, 4))

    def objective(q, k, v, run):
        form, o, _ = op.prepare(q, k, v, q_segments=segments, k_segments=segments, **options)
        y = run(form, o)[0].reshape(weight.shape)
        return jnp.sum(y * weight), y

    def both(run):
        grads, y = jax.jit(jax.grad(partial(objective, run=run), argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return y, *grads

    for got, want in zip(both(partial(splash, interpret=True)), both(reference), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


# Cost


@pytest.mark.parametrize("extra", [{}, {"bias": True, "sinks": True, "soft_cap": 5.0}], ids=["plain", "all"])
def test_the_tiled_gradient_needs_a_twentieth_of_the_memory(extra, monkeypatch):
    monkeypatch.undo()  # the real tiles
    n, extra = 16_384, dict(extra)
    bias = Bias(jnp.ones(8), slope) if extra.pop("bias", False) else None
    sinks = jnp.zeros(8) if extra.pop("sinks", False) else None
    q = jax.ShapeDtypeStruct((1, n, 8, 64), jnp.float32)

    def memory(implementation):
        def loss(q, k, v):
            return jnp.sum(attention(q, k, v, bias=bias, sinks=sinks, implementation=implementation, **extra) ** 2)

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory("tiled") < memory("xla") / 20


@pytest.mark.quick
def test_work_is_proportional_to_what_is_seen():
    def pairs(n, **options):
        form, _, contiguous = op.prepare(*(jnp.zeros((1, n, 1, 1)),) * 3, **options)
        return len(tiled_attention.candidates(form, n // 64, n // 64, 64, 64, contiguous))

    assert pairs(4096) == 64 * 65 / 2 and pairs(4096, causal=False) == 64 * 64
    assert pairs(8192, window=128) < 2.1 * pairs(4096, window=128) < 2.1 * 3 * 64
    # Documents packed in a row: only the tiles on the diagonal of documents are needed.
    segments = jnp.repeat(jnp.arange(1, 9), 64)[None]
    positions = jnp.tile(jnp.arange(64), 8)[None]
    places = dict(q_positions=positions, k_positions=positions, q_segments=segments, k_segments=segments)
    form, o, _ = op.prepare(*(jnp.zeros((1, 512, 1, 1)),) * 3, **places)
    every = tiled_attention.Pairs(tiled_attention.candidates(form, 8, 8, 64, 64, False), True)
    needed = tiled_attention.needed(form, tiled_attention.cut(o, (64, 64)), every)
    np.testing.assert_array_equal(np.asarray(needed).reshape(8, 8), np.eye(8, dtype=bool))


def test_the_bench_measures_every_contender(monkeypatch):
    tiny = dict(batches={64: 1}, heads=2, head_dim=8, dtype="float32")
    monkeypatch.setattr(attention_speed, "SHAPES", {"cpu": tiny})
    monkeypatch.setattr(attention_speed, "CASES", ("sinks",))
    monkeypatch.setattr(speed, "LEAST", 0.0)
    rows = list(speed.measure(attention_speed.settings(), attention_speed.contenders, rounds=1))
    assert [(row["case"], row["contender"]) for row in rows] == [
        ("sinks", f"longview {name}") for name in ("xla", "tiled")
    ]
    assert all(row["forward_ms"] > 0 and row["gradient_ms"] > 0 and row["temp_mib"] > 0 for row in rows)
    assert speed.table(rows, attention_speed.LEAD).count("\n") == 2 + len(rows)


def test_a_contender_that_breaks_down_is_a_row_and_one_that_cannot_serve_is_none(monkeypatch):
    def broken():
        raise RuntimeError("out of memory\nand more")

    def unable():
        raise UserError("it cannot")

    monkeypatch.setattr(speed, "LEAST", 0.0)
    fine = partial(speed.compiled, jnp.sin, jnp.ones(3), jnp.ones(3))
    rows = list(speed.measure([dict(n=3)], lambda setting: dict(broken=broken, fine=fine, unable=unable), rounds=1))
    assert [row["contender"] for row in rows] == ["broken", "fine"]
    assert rows[0]["error"] == "RuntimeError: out of memory" and rows[1]["forward_ms"] > 0
    assert "| 3 | broken | failed | failed | failed |" in speed.table(rows, {"n": "n"})
