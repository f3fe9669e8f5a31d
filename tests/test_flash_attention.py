"""Our own flash attention for GPUs, interpreted, against the definition in float64; and that it lowers for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.ops import tile_walk
from model.ops.attention import Bias, prepare
from model.ops.dense_attention import reference
from model.ops.flash_attention import flash
from model.ops.mask import CAUSAL, FULL, Band, Mask, Prefix, block_matrix, window
from model.ops.patterns import BigBird, Chunk, Columns, Table
from model.ops.tile_walk import LEAST, MOST, Walk, in_parts, long_tiles, tiles_met, tiles_of_a_document, walk
from model.positions.score_bias import FIRE_SHARED, ALiBiBias, FIREBias, KerpleLog, T5Bias
from tests.test_fused_ssd import made_for

B, L, H, G, K, V = 2, 150, 4, 2, 24, 16
SEGMENTS = np.asarray([[1] * 30 + [2] * 90 + [0] * 30, [3] * 150])
POSITIONS = np.asarray([[*range(30), *range(90), *[0] * 30], [*range(150)]])
PACKED = dict(q_positions=POSITIONS, k_positions=POSITIONS, q_segments=SEGMENTS, k_segments=SEGMENTS, gapless=True)

APART = PACKED | dict(gapless=False)  # who is how far away from whom is known by positions alone
GAPS = np.sort(np.random.default_rng(2).permutation(400)[: 2 * L].reshape(2, L), axis=1)  # padding stood between
CACHE = dict(  # the last tokens of a document, and a cache of more of them in another order, of which some are empty
    q_positions=np.arange(60, 60 + 37)[None],
    k_positions=np.roll(np.arange(L), 55)[None],
    q_segments=np.ones((1, 37), np.int32),
    k_segments=(np.roll(np.arange(L), 55) < 97)[None].astype(np.int32),
)

CALLS = {
    "causal": {},
    "bidirectional": {"mask": FULL},
    "window": {"mask": CAUSAL & window(33)},
    "farther ahead than back": {"mask": Band(2, 70)},
    "prefix": {"mask": CAUSAL | Prefix(17)},
    "chunks": {"mask": Chunk(40)},
    "soft cap": {"soft_cap": 2.0},
    "negative scale": {"scale": -0.3, "sinks": True},
    "sinks": {"sinks": True},
    "levels": {"levels": True},
    "bias": {"bias": ALiBiBias()},
    "learned bias": {"bias": KerpleLog(), "mask": window(50)},
    "buckets": {"bias": T5Bias(8, 40, causal=True)},
    "buckets bidirectional": {"bias": T5Bias(8, 40, causal=False), "mask": FULL},
    "MLP": {"bias": FIREBias()},
    "bias in the unit of a cap": {"bias": T5Bias(8, 40, causal=True), "soft_cap": 2.0, "levels": True, "sinks": True},
    "packed": PACKED,
    "cache": {**CACHE, "bias": ALiBiBias(), "mask": CAUSAL & window(50)},
    "cache, prefix": {**CACHE, "mask": CAUSAL | Prefix(17), "soft_cap": 2.0, "levels": True},
    "packed, any order": {**APART, "bias": KerpleLog(), "mask": CAUSAL & window(60)},
    "positions alone": {"q_positions": GAPS, "k_positions": GAPS, "bias": T5Bias(8, 40, causal=True)},
    "all": {**PACKED, "mask": CAUSAL & window(60), "soft_cap": 3.0, "bias": KerpleLog(), "sinks": True, "levels": True},
}


def arrays(dtype) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    made = dict(q=(B, L, H, K), k=(B, L, G, K), v=(B, L, G, V), sinks=(H,), q_levels=(B, L, H), k_levels=(B, L, H))
    made |= dict(m=(H,), r1=(H,), r2=(H,), table=(8, H), log_c=(H,), log_L=(H,), out=(3, H))
    made |= dict.fromkeys(("hidden", "hidden_bias"), (3, H))
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in made.items()}


def queries(call: dict) -> int:
    return call["q_positions"].shape[1] if "q_positions" in call else L


def operands(call: dict, values: dict[str, jax.Array]):
    options = dict(call)
    n = queries(call)
    values = values | dict(q=values["q"][:, :n], q_levels=values["q_levels"][:, :n])
    if options.pop("sinks", False):
        options["sinks"] = values["sinks"]
    if options.pop("levels", False):
        options |= {name: values[name] for name in ("q_levels", "k_levels")}
    if (fn := options.pop("bias", None)) is not None:
        own = {ALiBiBias: ("m",), KerpleLog: ("r1", "r2"), T5Bias: ("table",), FIREBias: (*FIRE_SHARED, "out")}
        shared = {name: jnp.broadcast_to(values[name][..., :1], values[name].shape) for name in FIRE_SHARED}
        options["bias"] = Bias({name: (values | shared)[name] for name in own[type(fn)]}, fn, None)
    return prepare(*(values[name] for name in "qkv"), **options)


def values_and_gradients(run, call: dict, dtype) -> dict[str, np.ndarray]:
    """Output, log-sum-exp, and the gradients of a weighted sum of both."""
    real = np.asarray(call["q_segments"] > 0 if "q_segments" in call else True)
    real = np.broadcast_to(real, (B, queries(call)))[..., None, None]

    def objective(values):
        out, lse = run(*operands(call, values))
        rng = np.random.default_rng(1)
        lse = jnp.where(real, lse, 0)
        return sum(jnp.sum(x * rng.normal(size=x.shape).astype(x.dtype)) for x in (out, lse)), dict(out=out, lse=lse)

    grads, found = jax.jit(jax.grad(objective, has_aux=True))(arrays(dtype))
    return {name: np.asarray(x, np.float64) for name, x in (grads | found).items()}


@pytest.mark.few(4)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_it_is_the_definition(call):
    with jax.enable_x64(True):
        truth = values_and_gradients(reference, call, jnp.float64)
    found = values_and_gradients(lambda *given: flash(*given, interpret=True), call, jnp.float32)
    for name, want in truth.items():
        np.testing.assert_allclose(found[name], want, atol=2e-5 * (1 + np.abs(want).max()), err_msg=name)


BLOCKS = CAUSAL & BigBird(16, first=1, near=1, random=1, seed=0)
PARTED = {
    "bidirectional": {"mask": FULL & BigBird(16, first=1, near=1, random=1, seed=0)},
    "sinks": {"sinks": True},
    "prefix": {"mask": CAUSAL & window(33) | Prefix(17), "levels": True, "bias": KerpleLog()},
    "packed": {**PACKED, "mask": BLOCKS, "soft_cap": 2.0},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("call", PARTED.values(), ids=PARTED.keys())
def test_a_tile_that_is_walked_in_parts_is_the_definition(call, monkeypatch):
    monkeypatch.setattr(tile_walk, "LEAST", 1)
    monkeypatch.setattr(tile_walk, "MOST", 1)
    test_it_is_the_definition(call)


def met(spans: Walk, others: int) -> tuple[np.ndarray, np.ndarray]:
    """The tiles that are visited, and those of them that are taken to be seen whole, `[n, others]`."""
    visited, whole = np.zeros((2, len(spans.spans), others), bool)
    for i, (a, b, c, d) in enumerate(spans.spans):
        places = np.arange(others) if spans.listed is None else spans.listed
        visited[i, places[a:d]], whole[i, places[b:c]] = True, True
    return visited, whole


MASKS = [CAUSAL, FULL, CAUSAL & window(33), Band(2, 70), Band(100, 5), CAUSAL | Prefix(17), Chunk(40), Columns(7, 2, 0)]
GAP = CAUSAL & Table(16, ("100", "010", "101"))  # a block between those that are met is not
MASKED_BETWEEN = CAUSAL | Table(16, ("010", "101", "010"))  # a block between those that are seen whole is not
MASKS += [BLOCKS, GAP, MASKED_BETWEEN]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("tile", [(32, 16), (16, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("by_key", [False, True])
def test_tiles_that_meet_are_visited_and_no_others(mask: Mask, tile, by_key):
    (l, m), n, M = tile, 192, 150  # so many keys are there
    visited, whole = met(walk(mask, tile, (n, n), M, by_key), n // (l if by_key else m))
    if by_key:
        visited, whole = visited.T, whole.T
    some = block_matrix(mask, n // l, n // m, l, m)
    assert (visited == some)[:, : M // m].all()
    seen = np.broadcast_to(mask.sees(np.arange(n)[:, None], np.arange(n)[None]) if mask != FULL else True, (n, n))
    seen = seen & (np.arange(n) < M)
    every = seen.reshape(n // l, l, n // m, m).all(axis=(1, 3))
    assert not (whole & ~every).any()
    if mask.band() is not None:
        assert (whole == every).all()


@pytest.mark.parametrize("by_key", [False, True])
def test_only_patterns_with_gaps_are_listed(by_key):
    found = {mask: walk(mask, (16, 16), (160, 160), 150, by_key).listed is not None for mask in (*MASKS, Prefix(100))}
    assert [mask for mask, listed in found.items() if listed] == [BLOCKS, GAP, MASKED_BETWEEN]


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize(
    "mask", [CAUSAL, CAUSAL & BigBird(64, first=2, near=2, random=3, seed=0), Prefix(100)], ids=str
)
def test_the_parts_of_a_walk_are_the_walk_and_none_is_far_longer_than_the_mean(mask: Mask, by_key):
    n = 128
    whole = walk(mask, (64, 64), (n * 64, n * 64), n * 64 - 10, by_key)
    parts = in_parts(whole)

    def pairs(spans: Walk) -> list[tuple[int, int, bool]]:
        places = np.arange(n) if spans.listed is None else spans.listed
        visits = zip(spans.tiles(), spans.spans, strict=True)
        return sorted((t, j, p in range(b, c)) for t, (a, b, c, d) in visits for p, j in enumerate(places[a:d], a))

    assert pairs(parts) == pairs(whole)
    lengths = (parts.spans[:, 3] - parts.spans[:, 0]).tolist()
    assert max(lengths) <= max(LEAST, MOST * (len(pairs(whole)) // n + 1))
    if parts.tile is not None:
        empty = len(parts.tile) - 1
        listed = {place for _, places in long_tiles(parts) for place in places.ravel()} - {empty}
        assert listed == set(range(n, empty)) | {t for t in range(n) if (parts.tile[:empty] == t).sum() > 1}


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("call", [CACHE, APART], ids=["cache", "packed"])
@pytest.mark.parametrize("mask", [CAUSAL & window(20), CAUSAL | Prefix(17)], ids=str)
def test_tiles_of_tokens_that_stand_anywhere_are_met_from_the_first_that_is_seen(mask, call, by_key):
    """A cache's empty end is not read, nor what a window has left."""
    n = queries(call) // 10 * 10
    q = {name: np.asarray(call[f"q_{name}"])[:, :n] for name in ("positions", "segments")}
    k = {name: np.asarray(call[f"k_{name}"]) for name in ("positions", "segments")}
    seen = (q["segments"][:, :, None] == k["segments"][:, None]) & (k["segments"][:, None] > 0)
    seen &= np.asarray(mask.sees(q["positions"][:, :, None], k["positions"][:, None]))
    tiles = seen.reshape(len(seen), n // 10, 10, L // 15, 15).any(axis=(2, 4))
    tiles = np.swapaxes(tiles, 1, 2) if by_key else tiles
    given = call | {f"q_{name}": x for name, x in q.items()}
    _, o = prepare(jnp.zeros((B, n, H, K)), *[jnp.zeros((B, L, G, K))] * 2, **given)
    first, end = np.moveaxis(np.asarray(tiles_met(o, (10, 15), mask, by_key)), -1, 0)
    some = tiles.any(axis=-1)
    assert some.any()
    assert (first <= tiles.argmax(axis=-1))[some].all()
    assert (end >= tiles.shape[-1] - tiles[..., ::-1].argmax(axis=-1))[some].all()
    assert np.maximum(end - first, 0).sum() < tiles.size


@pytest.mark.parametrize("by_key", [False, True])
def test_tiles_of_one_document_are_a_run_of_those_without_another_token(by_key):
    segments = {"q_segments": np.asarray([[2] * 4 + [1] * 23 + [2] * 9, [0] * 36, [5] * 36])}
    segments["k_segments"] = np.concatenate([segments["q_segments"][:, :-4], np.zeros((3, 4), int)], axis=1)
    _, o = prepare(jnp.zeros((3, 36, H, K)), *[jnp.zeros((3, 36, G, K))] * 2, **segments)
    same = segments["q_segments"][:, :, None] == segments["k_segments"][:, None]
    same = (same & (segments["k_segments"][:, None] > 0)).reshape(3, 9, 4, 6, 6).all(axis=(2, 4))
    same = np.swapaxes(same, 1, 2) if by_key else same
    found = np.asarray(tiles_of_a_document(o, (4, 6), by_key))
    assert same.any(axis=-1).sum() > 6
    for tiles, (first, end) in zip(same.reshape(-1, same.shape[-1]), found.reshape(-1, 2), strict=True):
        wanted = np.flatnonzero(tiles)
        assert range(first, end) == range(wanted[0], wanted[-1] + 1) if len(wanted) else first == end


LOWERED = CALLS | {
    "blocks": {"mask": Table(64, ("10", "11"))},
    "causal blocks": {"mask": CAUSAL & BigBird(16, first=1, near=2, random=1, seed=0)},
}


FEW = ("prefix", "buckets", "all", "blocks", "causal blocks")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        pytest.param("NVIDIA H200", "bfloat16", FEW, marks=pytest.mark.quick),
        ("NVIDIA H200", "bfloat16", LOWERED),
        pytest.param("NVIDIA A100-SXM4-80GB", "bfloat16", FEW, marks=pytest.mark.quick),  # has tiles of its own
        ("NVIDIA H200", "float32", LOWERED),
    ],
)
def test_kernels_lower_for_a_gpu(kind, dtype, names):
    def pulled(values):
        out = {}
        for name in names:
            call = LOWERED[name]
            found, pull = jax.vjp(lambda values, call=call: flash(*operands(call, values)), values)
            out[name] = found, pull(found)
        return out

    with made_for(kind):
        text = jax.jit(pulled).trace(arrays(dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert all(text.count(f'name = "flash_{kernel}') == len(names) for kernel in ("out", "queries", "keys"))
