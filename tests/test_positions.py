"""Position encodings: those added to embeddings, what the whole family promises, and mistakes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.positions import FIRE, POSITIONS, T5, Axial, Kerple, Learned, Position, Rope, Sinusoidal, XPos
from model.positions.rotary import LAYOUTS, inverse_frequencies
from tests.places import BIASES, HEADS, ROPES, at, embed, named, queries, random, score


@pytest.mark.quick
def test_sinusoid_numbers():
    waves = embed(Sinusoidal(amplitude=1.0), np.zeros((1, 2, 4), np.float32), at(0, 1))
    np.testing.assert_allclose(waves[0], [[0, 1, 0, 1], [0.84147, 0.54030, 0.01, 0.99995]], atol=1e-5)


@pytest.mark.quick
def test_sinusoids_turn_with_the_offset():
    D, k = 8, 7
    speeds = inverse_frequencies(D, 10_000.0)
    start, moved = (
        np.asarray(embed(Sinusoidal(amplitude=1.0), np.zeros((1, 3, D), np.float32), at(*p)))[0]
        for p in ((3, 103, 1003), (3 + k, 103 + k, 1003 + k))
    )
    # Inner products are a function of the offset alone ...
    np.testing.assert_allclose(np.sum(start * moved, axis=1), np.cos(speeds * k).sum(), rtol=1e-4)
    # ... because one rotation, the same everywhere, leads from each position to the one k later.
    R = np.zeros((D, D))
    for i, w in enumerate(speeds):
        R[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[np.cos(w * k), np.sin(w * k)], [-np.sin(w * k), np.cos(w * k)]]
    np.testing.assert_allclose(moved, start @ R.T, atol=1e-4)


@pytest.mark.quick
def test_learned_table_is_looked_up():
    learned = Learned(max_len=4)
    table = random(4, 2)
    out = embed(learned, np.ones((1, 3, 2), np.float32), at(3, 0, 3), {"params": {"table": table}})
    np.testing.assert_allclose(out[0], 1 + table[[3, 0, 3]], rtol=1e-6)
    assert learned.limit() == 4


# The family


@pytest.mark.quick
@pytest.mark.parametrize("position", [*ROPES, XPos(), Axial(columns=3), *BIASES], ids=named)
def test_relative_positions_know_differences_alone(position):
    x, places = random(1, 6, HEADS, 16), at(0, 1, 4, 9, 10, 15)

    @jax.jit
    def scores(places):
        q, k = (position.apply({}, x, places, 128, method=f"rotate_{what}") for what in ("queries", "keys"))
        added = nn.unbox(position.init_with_output(jax.random.key(0), HEADS, True, method="bias")[0])
        found = jnp.einsum("blhk,bmhk->bhlm", q, k)
        return found if added is None else found + added.fn(added.params, places, places)

    moved = np.abs(np.tril(scores(places + 50) - scores(places))).max()
    assert moved < 1e-3 if position.relative else moved > 1e-2


@pytest.mark.quick
@pytest.mark.parametrize("position", [*ROPES, XPos(), Axial(columns=3)], ids=named)
def test_only_a_stretching_position_depends_on_the_span(position):
    moved = score(position, 9, 2, span=512) - score(position, 9, 2, span=16)
    assert abs(moved) > 1e-3 if position.stretches else abs(moved) < 1e-4


@pytest.mark.quick
def test_what_each_position_says_of_itself():
    relative = {name for name, cls in POSITIONS.items() if cls.relative}
    assert relative == {"none", "rope", "xpos", "alibi", "t5", "kerple"}
    assert {name for name, cls in POSITIONS.items() if cls.causal_only} == {"xpos"}
    added = {"sinusoidal", "learned", "sincos2d"}
    assert {name for name, cls in POSITIONS.items() if not cls.needs_attention} == {"none", *added}
    assert {name for name, cls in POSITIONS.items() if cls.on_grid} == {"sincos2d", "axial"}
    hooks = {
        "embed": added,
        "rotate_queries": {"rope", "xpos", "axial"},
        "rotate_keys": {"rope", "xpos", "axial"},
        "sharpening": {"rope"},
        "bias": {"alibi", "t5", "kerple", "fire"},
    }
    for hook, users in hooks.items():
        assert {n for n, cls in POSITIONS.items() if getattr(cls, hook) is not getattr(Position, hook)} == users
    x, places = random(1, 3, 2, 8), at(0, 1, 2)
    assert Position().rotate_queries(x, places, 3) is x and Position().rotate_keys(x, places, 3) is x
    assert Position().embed(x, places) is x and Position().bias(2, True) is None and Position().limit() is None


@pytest.mark.quick
@pytest.mark.parametrize("position", BIASES, ids=named)
def test_parameters_are_wide_named_and_in_groups(position):
    boxed = jax.eval_shape(lambda: position.clone(dtype=jnp.bfloat16).init(jax.random.key(0), 4, True, method="bias"))
    params = boxed.get("params", {})
    assert set(position.groups) <= set(params) and set(position.groups.values()) <= {"no_decay"}
    assert (set(params) - set(position.groups)) <= {"hidden", "out"}  # weights of a network are decayed
    for name, box in params.items():
        leaf = nn.unbox(box)
        assert leaf.dtype == jnp.float32
        assert box.names == tuple("heads" if n == 4 else None for n in leaf.shape), name


# Mistakes


MISTAKES = [
    (Rope(), 3, "head dim must be even, not 3; closest: 2"),
    (Rope(fraction=0.5), 6, "fraction 0.5 of head dim 6 must be even, not 3; closest: 2, fraction=0.333"),
    (Rope(fraction=0.1), 8, "fraction 0.1 of head dim 8 must be even, not 0; closest: 2, fraction=0.25"),
    (Rope(factor=2.0), 8, "model.rope.factor 2.0 is read by no scaling; set it to 1.0, or the scaling to dynamic_ntk"),
    (Rope(scaling="ntk", factor=2.0), 2, "'ntk' needs at least 4 rotated dims, not 2; closest: linear"),
    (Rope(beta_fast=16.0), 8, "rope.beta_fast 16.0 is read by scaling 'yarn' alone; set it to 32.0, or the .* to yarn"),
    (
        Rope(scaling="yarn", low_freq_factor=2.0),
        8,
        "low_freq_factor 2.0 is read by scaling 'llama3' alone; set it to 1.0",
    ),
    (Rope(scaling="llama3", truncate=False), 8, "truncate False is read by scaling 'yarn' alone; set it to True"),
    (Rope(long_factor=(2.0,) * 4), 8, r"long_factor \(2.0, .*\) is read by scaling 'longrope' alone; set it to \(\)"),
    (Rope(scaling="yarn", beta_slow=32.0), 8, "model.rope.beta_slow 32.0 must be below model.rope.beta_fast 32.0"),
    (Rope(scaling="llama3", high_freq_factor=0.5), 8, "low_freq_factor 1.0 must be below .*high_freq_factor 0.5"),
    (Rope(scaling="longrope"), 8, "model.rope.short_factor has 0 factors, and 4 pairs turn; give one for each"),
    (Rope(scaling="longrope", short_factor=(1.0,) * 4), 8, "long_factor has 0 factors, and 4 pairs turn"),
    (
        Rope(scaling="longrope", original_length=1, short_factor=(1.0,), long_factor=(1.0,)),
        2,
        "'longrope' needs model.rope.original_length of at least 2; closest: 2",
    ),
    (XPos(), 5, "xpos rotates pairs, so the head dim must be even, not 5; closest: 4"),
    (Axial(columns=3), 6, "head dim must be divisible by 4, not 6; closest: 8"),
    (T5(max_distance=16), 8, "model.t5.max_distance 16 must be above 16, half of the buckets; closest: 17"),
]
IMPOSSIBLE = [
    (Rope, dict(fraction=0.0), "Rope.fraction is 0.0; allowed: a number above 0 and of at most 1; usual: 1.0"),
    (Rope, dict(fraction=1.5), "Rope.fraction is 1.5; allowed: .*; closest: 1.0"),
    (Rope, dict(layout="halves"), "Rope.layout is 'halves'; allowed: half, interleaved; closest: half"),
    (Rope, dict(scaling="yarm"), "Rope.scaling is 'yarm'; allowed: none, .*; closest: yarn"),
    (Rope, dict(scaling="linear", factor=0.5), "Rope.factor is 0.5; allowed: a number of at least 1; closest: 1.0"),
    (Rope, dict(scaling="yarn", original_length=0), "Rope.original_length is 0; allowed: .* from 1 to .*; closest: 1"),
    (Rope, dict(scaling="yarn", mscale=-1.0), "Rope.mscale is -1.0; allowed: a number of at least 0; closest: 0.0"),
    (Rope, dict(long_factor=(1.0, 0.0)), r"Rope.long_factor is \(1.0, 0.0\); allowed: a tuple, each .* above 0"),
    (Rope, dict(theta=1.0), "Rope.theta is 1.0; allowed: a number above 1; usual: 10000.0"),
    (XPos, dict(layout="interleave"), "XPos.layout is 'interleave'.*closest: interleaved"),
    (XPos, dict(scale_base=0), "XPos.scale_base is 0; allowed: .* from 1 to .*; closest: 1"),
    (XPos, dict(theta=0.0), "XPos.theta is 0.0; allowed: a number above 1"),
    (T5, dict(buckets=7), "T5.buckets is 7; allowed: a whole number from 4 to .*even; closest: 8"),
    (T5, dict(buckets=2), "T5.buckets is 2; .*even; closest: 4"),
    (Kerple, dict(variant="pow"), "Kerple.variant is 'pow'; allowed: log, power; closest: power"),
    (FIRE, dict(c=0.0), "FIRE.c is 0.0; allowed: a number above 0; usual: 0.1"),
    (FIRE, dict(threshold=-1.0), "FIRE.threshold is -1.0; allowed: a number above 0; usual: 512.0"),
    (FIRE, dict(width=0), "FIRE.width is 0; allowed: .* from 1 to .*; closest: 1"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("position", "settings", "words"), IMPOSSIBLE)
def test_a_setting_that_no_position_can_have_is_refused_when_it_is_made(position, settings, words):
    with pytest.raises(UserError, match=words) as raised:
        position(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.quick
@pytest.mark.parametrize(("position", "head_dim", "words"), MISTAKES)
def test_mistakes_are_named_when_checked_and_when_used(position, head_dim, words):
    with pytest.raises(UserError, match=words) as raised:
        position.check(head_dim)
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=words):
        queries(position, random(1, 2, 1, head_dim), at(0, 1))
        jax.eval_shape(lambda: position.init(jax.random.key(0), 2, True, method="bias"))


@pytest.mark.quick
def test_what_is_allowed_passes():
    for position in [*ROPES, XPos(), *BIASES, *(cls() for cls in POSITIONS.values())]:
        position.check(16)
    Rope(fraction=0.58).check(100)  # 58 dims, though the product is 57.99.. in floats
    assert LAYOUTS == ("half", "interleaved")
