"""State spaces whose kernel is cut to a window: a token sees those less than so far away, and no others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.archs import MATCHED
from model.contract import Context
from model.entries import entry
from model.errors import UserError
from model.mixers import MIXERS
from model.mixers.state_space import convolved, windowed
from model.ops.conv import long_conv, whole_conv, window_conv
from tests import zoo
from train import config as configs

CUT = ("s4", "s4d", "dss", "s5", "lru")  # those with a kernel
L, W = 20, 6
PACKED = zoo.context([[1] * L])  # a document in a row that may have several: one lag after another
ALONE = {"whole rows": Context(), "documents": PACKED}


def kernel(weights: jax.Array, L: int) -> jax.Array:
    return weights.T[:L]


@pytest.mark.quick
def test_a_cut_kernel_is_a_band_of_a_matrix():
    """Of all lags, by transforms and lag by lag: a dense Toeplitz matrix with zeros from lag W on."""
    rng = np.random.default_rng(0)
    u, weights = rng.normal(size=(2, L, 3)).astype(np.float32), rng.normal(size=(3, L)).astype(np.float32)
    lags = np.arange(L)[:, None] - np.arange(L)
    for cut in (1, W, L, L + 3):
        band = np.where((lags >= 0) & (lags < cut), weights[:, np.maximum(lags, 0)], 0)  # [D, L, L]
        want = np.einsum("dts,bsd->btd", band, u)
        for conv in (whole_conv, window_conv):
            np.testing.assert_allclose(conv(u, u[:, :0], kernel, (weights,), W=cut), want, atol=1e-5)


@pytest.mark.quick
def test_a_kernel_that_looks_ahead_is_the_upper_half_of_a_matrix():
    """Beside one that looks back: a dense Toeplitz matrix, the token itself in both."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(2, L, 3)).astype(np.float32)
    back, ahead = rng.normal(size=(2, 3, L)).astype(np.float32)
    lags = np.arange(L)[:, None] - np.arange(L)
    matrix = np.where(lags >= 0, back[:, np.abs(lags)], 0) + np.where(lags <= 0, ahead[:, np.abs(lags)], 0)
    want = np.einsum("dts,bsd->btd", matrix, u)
    np.testing.assert_allclose(long_conv(u, kernel, (back,), ahead=(ahead,)), want, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CUT)
def test_a_windowed_system_is_its_own_impulse_response_cut_off(name):
    """Both directions, both forms: what a unit in each channel gives at the first W lags, and then nothing."""
    D = 3

    class Systems(MIXERS[name]):
        @nn.compact
        def __call__(self, units, u):
            found = []
            for system in self.systems():
                cut, empty = windowed(system, W), u[:, :0]
                forms = convolved([cut], u), cut.recurrence(u, empty, Context(), None)[0]
                found.append((convolved([system], units), forms))
            return found

    with jax.enable_x64(True):
        units = jnp.zeros((D, L, D)).at[jnp.arange(D), 0, jnp.arange(D)].set(1.0)
        u = jnp.asarray(np.random.default_rng(0).normal(size=(2, L, D)))
        mixer = Systems(width=D, causal=False, dtype=jnp.float64, state=8)
        found, _ = jax.jit(mixer.init_with_output)(jax.random.key(0), units, u)
    assert len(found) == 2
    for response, forms in found:
        assert np.abs(response[:, W:]).max() > 1e-3
        behind = [np.pad(u, [(0, 0), (lag, 0), (0, 0)])[:, :L] for lag in range(W)]
        want = sum(np.einsum("de,btd->bte", response[:, lag], past) for lag, past in enumerate(behind))
        for y in forms:
            np.testing.assert_allclose(y, want, atol=1e-10)


@pytest.mark.few(4)
@pytest.mark.parametrize("ctx", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", [*CUT, "attention"])
def test_a_token_sees_those_in_its_window_and_no_others(name, causal, ctx):
    mixer, t = MIXERS[name](width=4, causal=causal, window=W), 11
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, L, 4)), jnp.float32)
    values = nn.unbox(jax.jit(mixer.init)(jax.random.key(0), x, Context()))
    pull = jax.jit(jax.grad(lambda x: jnp.sum(mixer.apply(values, x, ctx)[0][:, t] ** 2)))(x)
    size, distance = np.abs(pull[0]).sum(-1), t - np.arange(L)
    seen = (distance < W) & (distance >= 0 if causal else distance > -W)
    assert size[seen].min() > 1e-3 * size.max()
    # Transforms spread rounding over the whole length; lag by lag nothing gets there.
    assert size[~seen].max() < 1e-5 * size.max() if ctx.segments is None else not size[~seen].any()


@pytest.mark.parametrize("name", ["s4d", "s5"])
def test_a_window_as_long_as_the_row_cuts_nothing(name):
    x, plain = zoo.inputs(2, L), MIXERS[name](width=zoo.WIDTH, causal=False, state=8)
    values = zoo.params(plain)
    whole, _ = zoo.apply(plain)(values, x, Context())
    wide, _ = zoo.apply(plain.clone(window=L))(values, x, Context())
    cut, _ = zoo.apply(plain.clone(window=L - 1))(values, x, Context())
    np.testing.assert_allclose(wide, whole, atol=2e-5)
    assert np.abs(cut[:, 0] - whole[:, 0]).max() > 1e-4  # the last token is out of sight


def test_a_state_holds_no_more_inputs_than_are_seen_or_there():
    mixer = MIXERS["s4d"](width=8, window=W)
    assert [mixer.init_state(2, n).shape for n in (3, 5, 100)] == [(2, 3, 8), (2, 5, 8), (2, 5, 8)]
    assert MIXERS["s4d"](width=8, window=1).state_bytes(100) == 0


def test_a_recurrence_of_a_cut_kernel_is_refused():
    mixer = MIXERS["s4"](width=8, window=W, implementation="chunked")
    with pytest.raises(UserError, match=r"'chunked' is of a recurrence.*window 6 has none; allowed: None, convolution"):
        mixer.init(jax.random.key(0), jnp.zeros((1, 4, 8)), Context())


@pytest.mark.parametrize("name", sorted(MIXERS.keys() - {*CUT, "attention", "cross_attention", "fox"}))
def test_a_mixer_without_a_window_says_so(name):
    with pytest.raises(UserError, match=rf"model\.{name}\.window"):
        configs.load("configs/debug.py", [("model.mixers", name), (f"model.{name}.window", "32")])


def loaded(arch: str, argument: str = "window=32"):
    return configs.load(f"configs/lra.py:task=listops,arch={arch},size=smoke,{argument}").model


@pytest.mark.parametrize("arch", MATCHED)
def test_a_benchmark_has_a_window_in_every_layer_or_refuses_the_mixer(arch):
    whole = loaded(arch, "window=0")
    kinds = [entry(whole.to_dict(), name).mixer for name in whole.mixers]
    if without := [kind for kind in kinds if kind not in (*CUT, "attention", "fox")]:
        with pytest.raises(UserError, match=rf"window is 32, and mixer '{without[0]}' has none; allowed: 0, or .*s4d"):
            loaded(arch)
        return
    cut = loaded(arch)
    assert {cut[name].window for name in cut.mixers} == {32}
    flat, other = configs.flatten(whole.to_dict()), configs.flatten(cut.to_dict())
    assert {key for key in flat if flat[key] != other[key]} == {f"{name}.window" for name in cut.mixers}


@pytest.mark.quick
def test_a_refusal_names_all_that_have_a_window_and_nothing_else():
    with pytest.raises(UserError, match="allowed: 0, or arch=") as error:
        loaded("mamba")
    named = str(error.value).partition("arch=")[2].split(", ")
    assert named == [arch for arch in MATCHED if accepted(arch)]


def accepted(arch: str) -> bool:
    try:
        return bool(loaded(arch))
    except UserError:
        return False


SPECS = (
    "seqimage.py:task=scifar",
    "listops.py:size=short",
    "mad.py:task=recall",
    "ruler.py:task=needle",
    "tracking.py:task=s3",
    "enwik8.py:size=small",
)


@pytest.mark.quick
@pytest.mark.parametrize("spec", SPECS)
def test_other_benchmarks_take_a_window_too(spec):
    whole, cut = (configs.load(f"configs/{spec},arch=s4d,window={window}").model for window in (0, 32))
    assert (whole.s4d.window, cut.s4d.window) == (None, 32)


def test_a_class_is_read_off_all_tokens_where_none_sees_all():
    spec = "configs/lra.py:task=listops,arch=attention,size=paper"
    assert configs.load(spec).model.pool == "cls" and configs.load(f"{spec},window=32").model.pool == "mean"
