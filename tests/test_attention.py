"""Every implementation of attention is the same function: values and gradients against the float64 definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.measurements import attention_speed, speed
from model.errors import UserError
from model.ops import attention as op
from model.ops import block_attention, sharing, tiled_attention
from model.ops.attention import Bias, attention
from model.ops.dense_attention import reference
from model.ops.fused_attention import splash
from model.ops.mask import CAUSAL, FULL, Band, Prefix, window
from model.ops.patterns import Chunk
from model.positions.score_bias import FIRE_SHARED, ALiBiBias, FIREBias
from tests import meshes

B, L, H, G, K = 2, 100, 4, 2, 8
SEGMENTS = np.asarray([[1] * 30 + [2] * 50 + [0] * 20, [3] * 100])
POSITIONS = np.asarray([[*range(30), *range(50), *[0] * 20], [*range(100)]])


def slope(params, q_positions, k_positions):
    """A bias with a parameter per head, curved in the distance."""
    distance = q_positions[:, None, :, None] - k_positions[:, None, None, :]
    return -params[:, None, None] * jnp.log1p(jnp.abs(distance).astype(params.dtype))


SOME = (CAUSAL | Prefix(3)) & window(40)
CALLS = {
    "causal": {},
    "bidirectional": {"mask": FULL},
    "window": {"mask": CAUSAL & window(13)},
    "window bidirectional": {"mask": window(13)},
    "farther ahead than back": {"mask": Band(2, 30)},
    "prefix": {"mask": CAUSAL | Prefix(17)},
    "prefix alone": {"mask": Prefix(17)},
    "beyond the length": {"mask": window(L)},
    "soft cap": {"soft_cap": 2.0},
    "scale": {"scale": 0.7},
    "packed": {"packed": True},
    "packed window": {"packed": True, "mask": CAUSAL & window(9)},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "additive": {"additive": True},
    "all": {"packed": True, "mask": SOME, "soft_cap": 3.0, "bias": True, "sinks": True},
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
            bias=Bias(values["bias"], slope, ("heads",)) if biased else None,
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
    monkeypatch.setattr(block_attention, "tile_size", lambda mask: 16)


@pytest.mark.few(4)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_implementations_are_one_function(call):
    with jax.enable_x64(True):
        truth = run(arrays(), call, "reference", jnp.float64)
        assert truth["out"].dtype == jnp.float64
        for name in ("xla", "tiled", "blocks"):
            got = run(arrays(), call, name, jnp.float64)
            for key, want in truth.items():
                np.testing.assert_allclose(got[key], want, atol=1e-9, err_msg=f"{name} {key}")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["xla", "tiled", "blocks"])
def test_narrow_dtypes_stay_close(name):
    values, call = arrays(), CALLS["all"]
    with jax.enable_x64(True):
        truth = run(values, call, "reference", jnp.float64)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.float16, 0.01), (jnp.bfloat16, 0.05)):
        got = run(values, call, name, dtype)
        for key, want in truth.items():
            error = np.linalg.norm(np.asarray(got[key], np.float64) - want) / max(np.linalg.norm(want), 1e-30)
            assert error < tolerance, (dtype, key, error)


@pytest.mark.parametrize("name", ["xla", "tiled", "reference"])
def test_scores_past_the_range_of_float16(name):
    """They are float32: here 100,000 apart from each other, where float16 ends at 65,504. Hidden keys too."""
    q, k = jnp.full((1, 3, 1, 1), 1000.0), jnp.asarray([100.0, 200, 0]).reshape(1, 3, 1, 1)
    v = jnp.asarray([1.0, 2, 3]).reshape(1, 3, 1, 1)
    half = (x.astype(jnp.float16) for x in (q, k, v))
    y = jax.jit(lambda *x: attention(*x, scale=1.0, implementation=name))(*half)
    assert y.dtype == jnp.float16 and y.ravel().tolist() == [1, 2, 2]


# Which implementation serves


def call(n=64, dtype=jnp.float32, head_dim=64, batch=2, value_dim=None, asked=None, **options):
    """What one device is asked for; `asked` names an implementation."""
    q, k, v = (
        jax.ShapeDtypeStruct((batch, n, heads, dim), dtype)
        for heads, dim in ((4, head_dim), (2, head_dim), (2, value_dim or head_dim))
    )
    made = []

    def trace(q, k, v):
        form, o = op.prepare(q, k, v, **options)
        bias = options.get("bias")
        made.append(sharing.share(form, o, None if bias is None else bias.axes, asked))
        return q

    jax.eval_shape(trace, q, k, v)
    return made[0].form, made[0].seen


def picked(chip="cpu", sizes=None, with_lse=False, **options):
    with meshes.in_force(meshes.mesh_of(chip, **(sizes or {}))):
        chosen = op.pick(None, *call(**options), with_lse, op.IMPLEMENTATIONS.__contains__)
    return next(name for name, can in op.IMPLEMENTATIONS.items() if can is chosen)


CURVED = Bias(jnp.ones(4), slope, ("heads",))
HALF = dict(dtype=jnp.bfloat16)
PACKED = dict(q_segments=jnp.ones((1, 4096), jnp.int32), k_segments=jnp.ones((1, 4096), jnp.int32))


@pytest.mark.quick
def test_on_a_gpu_the_choice_is_what_cudnn_can_serve_then_our_own():
    assert {picked("gpu", n=n, **HALF) for n in (64, 4096, 32_768)} == {"cudnn"}
    assert {picked("gpu", n=4096, mask=mask, **HALF) for mask in (CAUSAL & window(100), FULL, window(1))} == {"cudnn"}
    # A window on both sides cuDNN does not serve, though a window it does, and both directions.
    assert {picked("gpu", n=4096, mask=mask, **HALF) for mask in (window(100), Band(None, 5), Band(0, None))} == {
        "flash"
    }
    lacked = [
        dict(soft_cap=5.0),
        dict(bias=Bias({"m": jnp.ones(4)}, ALiBiBias(), {"m": ("heads",)})),
        dict(sinks=jnp.zeros(4)),
        dict(mask=CAUSAL | Prefix(3)),
        PACKED,
        dict(value_dim=32),
        dict(mask=Chunk(64)),
        dict.fromkeys(("q_positions", "k_positions"), jnp.zeros((1, 4096), jnp.int32)),
    ]
    assert {picked("gpu", n=4096, **HALF, **options) for options in lacked} == {"flash"}
    assert picked("gpu", n=4096, with_lse=True, **HALF) == picked("gpu", n=4096) == "flash"
    # What ours serves slowly it serves only by name: a network in a tile takes 15 times as long as in plain XLA.
    network = (*FIRE_SHARED, "out")
    units = dict.fromkeys(network, jnp.ones((8, 4)))
    fire = dict(bias=Bias(units, FIREBias(), dict.fromkeys(network, (None, "heads"))))
    assert picked("gpu", n=4096, **HALF, **fire) == "tiled"
    with meshes.in_force(meshes.mesh_of("gpu")):
        assert (
            op.pick("flash", *call(n=4096, **HALF, **fire), False, op.IMPLEMENTATIONS.__contains__)
            is op.IMPLEMENTATIONS["flash"]
        )
    # Neither does any bias, nor blocks that are no multiple of its tiles.
    others = [dict(bias=CURVED), dict(mask=Chunk(40))]
    assert {picked("gpu", n=4096, **HALF, **options) for options in others} == {"tiled"}
    # Of GPUs: none before Ampere, none of AMD's, and wide heads from Hopper on.
    assert {chip: picked(chip, n=4096, **HALF) for chip in ("gpu", "ampere", "volta", "amd")} == dict(
        gpu="cudnn", ampere="cudnn", volta="tiled", amd="tiled"
    )
    assert {chip: picked(chip, n=4096, head_dim=256, **HALF) for chip in ("gpu", "ampere")} == dict(
        gpu="cudnn", ampere="tiled"
    )
    # Devices that share the length exchange it for heads; four heads are not enough for eight of them.
    assert picked("gpu", dict(sequence=4), n=4096, **HALF) == "cudnn"
    assert {picked(chip, dict(sequence=8), n=4096, **HALF) for chip in ("cpu", "gpu", "tpu")} == {"ring"}


@pytest.mark.quick
def test_on_a_gpu_rows_of_any_length_with_padding_behind_them_are_served():
    padded = dict(PACKED, right_padded=True)
    assert {picked("gpu", n=4096, mask=mask, **padded, **HALF) for mask in (FULL, CAUSAL)} == {"cudnn"}
    assert picked("gpu", dict(sequence=4), n=4096, mask=FULL, **padded, **HALF) == "cudnn"
    assert picked("gpu", n=4096, mask=CAUSAL & window(9), **padded, **HALF) == "flash"
    assert {picked("gpu", n=n, mask=mask, **HALF) for n in (1, 63, 2001) for mask in (FULL, CAUSAL)} == {"cudnn"}


@pytest.mark.quick
def test_on_a_tpu_the_choice_is_what_splash_can_serve():
    served = [{}, dict(soft_cap=5.0), dict(mask=window(7)), dict(mask=SOME), dict(value_dim=64), HALF, PACKED]
    for head_dim in (64, 128, 256):
        assert {picked("tpu", n=4096, head_dim=head_dim, **options) for options in served} == {"splash"}
    lacked = [dict(sinks=jnp.zeros(4)), dict(bias=CURVED), dict(head_dim=20), dict(dtype=jnp.float16)]
    assert {picked("tpu", n=4096, **options) for options in lacked} == {"tiled"}
    assert picked("tpu", n=4100) == "tiled" and picked("tpu", n=100) == "xla"
    assert picked("tpu", dict(sequence=4), n=4096) == "splash" and picked("tpu", dict(sequence=4), n=516) == "xla"
    # A stretch of the queries, with all keys gathered, goes with a band, not with any mask.
    with meshes.in_force(meshes.mesh_of("tpu", sequence=8)):
        assert not op.lacking("splash", *call(n=4096, asked="splash"), False)
        assert op.lacking("splash", *call(n=4096, asked="splash", mask=SOME), False)


@pytest.mark.quick
def test_dense_or_tiles_by_what_one_device_holds():
    assert picked(n=512) == "xla" and picked(n=1024) == "tiled"
    assert picked(n=256, batch=16) == "xla" and picked(n=256, batch=64) == "tiled"
    for chip, batch in (("cpu", 16), ("gpu", 64), ("tpu", 64)):
        assert picked(chip, n=1024, batch=batch, bias=CURVED) == "tiled"
        for sizes in (
            dict(data=16),
            dict(fsdp=4, tensor=4),
            dict(data=4, sequence=4),
            dict(tensor=2, sequence=2, data=4),
        ):
            assert picked(chip, sizes, n=1024, batch=batch, bias=CURVED) == "xla"


@pytest.mark.quick
def test_a_tile_of_many_rows_and_heads_is_no_larger(monkeypatch):
    monkeypatch.undo()
    for chip, most in (("cpu", 2**21), ("gpu", 2**25)):
        for batch in (1, 8, 64):
            with meshes.in_force(meshes.mesh_of(chip)):
                l, m = tiled_attention.tile_shape(call(n=4096, batch=batch)[1])
            assert batch * 4 * l * m <= most


@pytest.mark.quick
def test_a_kernel_asked_for_by_name_says_what_it_lacks():
    q = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(
        UserError, match=r"'cudnn' cannot serve soft-capped scores; the platform cpu .*float32.*choose from xla, "
    ):
        attention(q, q, q, soft_cap=3.0, implementation="cudnn")
    with pytest.raises(UserError, match=r"'cudnn' cannot serve a window on the distance with no causal mask; the"):
        attention(q, q, q, mask=window(3), implementation="cudnn")
    with pytest.raises(UserError, match=r"'cudnn' cannot serve a mask that is no band of distances \(a prefix\); the"):
        attention(q, q, q, mask=CAUSAL | Prefix(3), implementation="cudnn")
    with pytest.raises(UserError, match=r"'splash' cannot serve attention sinks; the platform cpu.*lengths 8 and 8"):
        attention(q, q, q, sinks=jnp.zeros(2), implementation="splash")
    with pytest.raises(UserError, match=r"unknown attention implementation 'tile'.*closest: tiled"):
        attention(q, q, q, implementation="tile")
    with (
        meshes.in_force(meshes.mesh_of("volta")),
        pytest.raises(UserError, match=r"the platform gpu of compute capability 7.0 \(it runs on gpu from 8.0\)"),
    ):
        attention(q, q, q, implementation="cudnn")


@pytest.mark.quick
def test_the_support_matrix_is_what_the_choice_reads():
    table = op.support_matrix()
    plain = dict.fromkeys(("ring", "decode", "xla", "tiled", "blocks", "reference"), "yes")
    assert table["a position bias"] == dict(splash="-", cudnn="-", flash="yes", flash_decode="yes", **plain)
    windowed = table["a window on the distance with no causal mask"]
    assert windowed == dict(splash="yes", cudnn="-", flash="yes", flash_decode="yes", **plain)
    assert table["a position bias by a network (FIRE)"] == dict(
        splash="-", cudnn="-", flash="slow", flash_decode="yes", **plain
    )
    assert set(table["platform"]) == set(op.IMPLEMENTATIONS)


# The fused kernels that run here, interpreted


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": FULL, "head_dim": 128},
        {"mask": CAUSAL & window(50), "head_dim": 24},
        {"mask": window(50)},
        {"mask": (CAUSAL | Prefix(20)) & window(50)},
        {"mask": Prefix(20) & window(30)},  # the last queries see nothing
        {"mask": (CAUSAL | Prefix(20)) & window(50), "packed": True},
        {"soft_cap": 2.0, "value_dim": 32},
        {"packed": True},
        {"packed": True, "mask": FULL},
    ],
    ids=str,
)
def test_splash_is_the_same_function(options):
    rng = np.random.default_rng(0)
    options = dict(options)
    n, packed, dim = 128, options.pop("packed", False), options.pop("head_dim", 64)
    value_dim, places = options.pop("value_dim", dim), {}
    if packed:  # and a document that only queries have, which see nothing
        places = dict(q_segments=jnp.asarray([[1] * 60 + [2] * 40 + [3] * 8 + [0] * 20]))
        places["k_segments"] = jnp.where(places["q_segments"] == 3, 0, places["q_segments"])
    sizes = ((4, dim), (2, dim), (2, value_dim), (4, value_dim))
    q, k, v, weight = (jnp.asarray(rng.normal(size=(1, n, *size)), jnp.float32) for size in sizes)

    def objective(q, k, v, run):
        form, o = op.prepare(q, k, v, **places, **options)
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
    bias = Bias(jnp.ones(8), slope, ("heads",)) if extra.pop("bias", False) else None
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
        form, _ = op.prepare(*(jnp.zeros((1, n, 1, 1)),) * 3, **options)
        return len(tiled_attention.candidates(form, n // 64, n // 64, 64, 64))

    assert pairs(4096) == 64 * 65 / 2 and pairs(4096, mask=FULL) == 64 * 64
    near = CAUSAL & window(128)
    assert pairs(8192, mask=near) < 2.1 * pairs(4096, mask=near) < 2.1 * 3 * 64
    # Documents packed in a row: only the tiles on the diagonal of documents are needed.
    segments = jnp.repeat(jnp.arange(1, 9), 64)[None]
    positions = jnp.tile(jnp.arange(64), 8)[None]
    places = dict(q_positions=positions, k_positions=positions, q_segments=segments, k_segments=segments)
    form, o = op.prepare(*(jnp.zeros((1, 512, 1, 1)),) * 3, **places)
    every = tiled_attention.Pairs(tiled_attention.candidates(form, 8, 8, 64, 64), True)
    needed = tiled_attention.needed(form, tiled_attention.in_tiles(o, (64, 64)), every)
    np.testing.assert_array_equal(np.asarray(needed).reshape(8, 8), np.eye(8, dtype=bool))


@pytest.mark.scale
def test_the_bench_measures_every_contender(monkeypatch):
    tiny = dict(batches={64: 1}, heads=2, head_dim=8, dtype="float32")
    monkeypatch.setattr(attention_speed, "SHAPES", {"cpu": tiny})
    monkeypatch.setattr(attention_speed, "CASES", ("sinks", "bigbird"))
    monkeypatch.setattr(speed, "LEAST", 0.0)
    events = []
    jax.monitoring.register_event_listener(note := lambda name, **_: events.append(name))
    rows = list(speed.measure(attention_speed.settings(), attention_speed.contenders, rounds=1))
    jax.monitoring.unregister_event_listener(note)
    served = {"sinks": ("xla", "tiled"), "bigbird": ("xla", "tiled", "blocks")}
    assert [(row["case"], row["contender"]) for row in rows] == [
        (case, f"longview {name}") for case, names in served.items() for name in names
    ]
    assert all(row["forward_ms"] > 0 and row["gradient_ms"] > 0 and row["temp_mib"] > 0 for row in rows)
    assert all(row["compile_s"] > 0 and row["compile_again_s"] > 0 for row in rows)
    assert events.count("/jax/compilation_cache/cache_hits") >= len(rows)  # again from the cache, each
    assert attention_speed.SHEET.table(rows).count("\n") == 2 + len(rows)


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
    assert "| 3 | broken | failed | failed | failed |" in speed.sheet({"n": "n"}).table(rows)
