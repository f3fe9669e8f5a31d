"""The algebra of masks against its definition, pair by pair; and what the tiles take from it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.mixers.attention import Attention
from model.ops import attention as op
from model.ops import tiled_attention
from model.ops.dense_attention import reference, xla
from model.ops.fused_attention import splash
from model.ops.mask import CAUSAL, FULL, Band, Block, Either, Mask, Prefix, window
from model.ops.patterns import Chunk

pytestmark = pytest.mark.quick


def drawn(rng: np.random.Generator, depth: int = 3) -> tuple[Mask, object]:
    """A mask of the algebra, and the same by its definition: a function of the distance and the key."""
    kind = rng.choice(["band", "prefix", "chunk", "and", "or"] if depth else ["band", "prefix", "chunk"])
    if kind == "band":
        back, ahead = (None if rng.random() < 0.3 else int(rng.integers(0, 20)) for _ in range(2))
        low, high = -np.inf if ahead is None else -ahead, np.inf if back is None else back
        return Band(back, ahead), lambda q, k: (q - k >= low) & (q - k <= high)
    if kind == "prefix":
        n = int(rng.integers(0, 40))
        return Prefix(n), lambda q, k: (k < n) & (q >= 0)
    if kind == "chunk":
        n = int(rng.integers(1, 20))
        return Chunk(n), lambda q, k: q // n == k // n
    (one, of_one), (other, of_other) = drawn(rng, depth - 1), drawn(rng, depth - 1)
    if kind == "and":
        return one & other, lambda q, k: of_one(q, k) & of_other(q, k)
    return one | other, lambda q, k: of_one(q, k) | of_other(q, k)


def pairs_of(mask: Mask, q, k) -> np.ndarray:
    """What the mask says of every pair."""
    seen = mask.sees(q[:, None], k[None, :])
    return np.broadcast_to(True if seen is None else np.asarray(seen), (len(q), len(k)))


@pytest.mark.parametrize("seed", range(10))
def test_a_mask_is_its_definition(seed):
    """On positions in any order, numpy's and JAX's."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        mask, truth = drawn(rng)
        q, k = rng.integers(0, 50, size=13), rng.integers(0, 50, size=17)
        want = truth(q[:, None], k[None, :])
        np.testing.assert_array_equal(pairs_of(mask, q, k), want, err_msg=str(mask))
        np.testing.assert_array_equal(pairs_of(mask, jnp.asarray(q), jnp.asarray(k)), want, err_msg=str(mask))


@pytest.mark.parametrize("seed", range(10))
def test_a_block_is_never_wrong_and_of_one_rule_exact(seed):
    rng = np.random.default_rng(100 + seed)
    for _ in range(50):
        mask, truth = drawn(rng)
        (q_low, k_low), (q_more, k_more) = rng.integers(0, 50, size=2), rng.integers(0, 12, size=2)
        q, k = np.arange(q_low, q_low + q_more + 1), np.arange(k_low, k_low + k_more + 1)
        seen = truth(q[:, None], k[None, :])
        block, told = mask.block(q[0], q[-1], k[0], k[-1]), f"{mask}, {q}, {k}"
        assert block.some or not seen.any(), told
        assert seen.all() or not block.every, told
        if isinstance(mask, Band | Prefix | Chunk):
            assert (bool(block.some), bool(block.every)) == (seen.any(), seen.all()), told
        traced = mask.block(*(jnp.asarray(x) for x in (q[0], q[-1], k[0], k[-1])))
        assert (bool(traced.some), bool(traced.every)) == (bool(block.some), bool(block.every)), told


def test_masks_are_values():
    assert CAUSAL & window(5) == Band(4, 0) and hash(CAUSAL & window(5)) == hash(Band(4, 0))
    assert Band(3, 0) | Band(0, 3) == window(4) and CAUSAL | Band(0, None) == FULL
    assert FULL & Prefix(3) == Prefix(3) & FULL == Prefix(3) and FULL | Prefix(3) == Prefix(3) | FULL == FULL
    assert CAUSAL | Prefix(3) == Either(CAUSAL, Prefix(3)) != CAUSAL | Prefix(4)
    assert FULL.sees(np.arange(3), np.arange(3)) is None
    assert (CAUSAL & window(5)).band() == (4, 0) and (CAUSAL | Prefix(3)).band() is None
    assert CAUSAL.by_order() and FULL.by_order()
    assert not any(mask.by_order() for mask in (window(3), CAUSAL & window(3), CAUSAL | Prefix(3)))
    with pytest.raises(UserError, match="window 0 must be at least 1"):
        window(0)
    with pytest.raises(UserError, match="reaches -1 ahead; allowed: at least 0, or None"):
        Band(None, -1)


SETTINGS = [(causal, w, p) for causal in (True, False) for w in (None, 1, 7, 40) for p in (0, 1, 16)]


@pytest.mark.parametrize(("causal", "w", "p"), SETTINGS)
def test_a_mixer_s_settings_are_one_mask(causal, w, p):
    """(causal | key < prefix) & window."""
    mask = Attention(width=8, causal=causal, window=w, prefix=p).mask
    q, k = np.mgrid[:50, :50]
    want = (q >= k if causal else np.ones((50, 50), bool)) | (k < p)
    if w is not None:
        want &= abs(q - k) < w
    np.testing.assert_array_equal(pairs_of(mask, np.arange(50), np.arange(50)), want)


# Tiles of 64 x 128 over 1,024 tokens: 16 x 8 of them
TILES = {
    "full": (FULL, 128),
    "causal": (CAUSAL, 72),
    "window": (window(100), 44),
    "window of a tile and one": (window(65), 30),
    "causal window": (CAUSAL & window(100), 30),
    "causal window of one": (CAUSAL & window(1), 16),
    "prefix": (CAUSAL | Prefix(200), 74),
    "prefix in a window": ((CAUSAL | Prefix(200)) & window(100), 32),
}


@pytest.mark.parametrize(("mask", "count"), TILES.values(), ids=TILES.keys())
def test_only_tiles_with_something_to_see_are_gone_through(mask, count):
    l, m = 64, 128
    form, o = op.prepare(*(jnp.zeros((1, 1024, 1, 1)),) * 3, mask=mask)
    found = tiled_attention.candidates(form, 16, 8, l, m)
    tiles = pairs_of(mask, np.arange(1024), np.arange(1024)).reshape(16, l, 8, m).any((1, 3))
    np.testing.assert_array_equal(found, np.argwhere(tiles))
    assert len(found) == count
    # The same where positions are known only when the program runs.
    every = tiled_attention.Pairs(np.argwhere(np.ones((16, 8))).astype(np.int32), True)
    wanted = tiled_attention.needed(form, tiled_attention.in_tiles(o, (l, m)), every)
    np.testing.assert_array_equal(np.asarray(wanted).reshape(16, 8), tiles)


@pytest.mark.parametrize(
    ("mask", "masked"), [(FULL, False), (window(1024), False), (CAUSAL, True), (window(1023), True)], ids=str
)
def test_tiles_that_see_all_are_not_masked(mask, masked, monkeypatch):
    asked, plain = [], tiled_attention.tile_mask
    monkeypatch.setattr(tiled_attention, "tile_mask", lambda *args: asked.append(plain(*args)) or asked[-1])
    form, o = op.prepare(*(jnp.zeros((1, 1024, 1, 1)),) * 3, mask=mask)
    tiled_attention.tiled(form, o, (64, 128))
    assert [mask is not None for mask in asked] == [masked]


@dataclasses.dataclass(frozen=True)
class Apart(Mask):
    """Keys at a distance that n divides."""

    n: int

    def sees(self, q, k):
        return (q - k) % self.n == 0

    def block(self, q_low, q_high, k_low, k_high):
        return Block(True, False)


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", [Apart(7) & CAUSAL | Prefix(5), Chunk(128), Chunk(100) & CAUSAL | window(9)], ids=str)
def test_a_new_mask_is_served_as_it_is(mask):
    """Values and gradients of every implementation that takes any mask; of chunks of 128, no block is seen in part."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(1, 384, heads, 8)), jnp.float32) for heads in (2, 1, 1, 2))

    def both(run):
        def objective(q, k, v):
            y = run(*op.prepare(q, k, v, mask=mask))[0].reshape(weight.shape)
            return jnp.sum(y * weight), y

        grads, y = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return y, *grads

    want = both(reference)
    tiled = partial(tiled_attention.tiled, block=(64, 128))
    for run in (xla, tiled, partial(splash, interpret=True)):
        for got, truth in zip(both(run), want, strict=True):
            np.testing.assert_allclose(got, truth, atol=2e-4)
