"""The S4 family: HiPPO's facts, published vectors, and for every model a convolution, a recurrence and a scan."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.mixers.lru import ring
from model.mixers.s4 import dplr_kernel, dplr_recurrence, squares
from model.mixers.s4d import INITS, s4d_kernel, s4d_system
from model.mixers.s5 import into_state, mimo_system
from model.mixers.state_space import bilinear, convolved, powers, zoh
from model.ops.hippo import legs, legs_modes
from tests import zoo

# Every model, and both rules of discretisation.
SETTINGS = {
    "s4": {},
    "s4d": {},
    "s4d legs": {"A_init": "legs", "discretisation": "bilinear"},
    "s4d real": {"A_init": "real", "discretisation": "bilinear"},
    "dss": {},
    "s5": {"blocks": 2},
    "s5 bilinear": {"discretisation": "bilinear"},
    "lru": {},
}
SELECTIVE = {"b2s6": {"blocks": 3}}  # no convolution
FORMS = ("sequential", "convolution", "chunked")  # the first is the definition


def make(case: str, width: int = 3, **options):
    return MIXERS[case.split()[0]](width=width, **(SETTINGS | SELECTIVE)[case], **options)


def inputs(L: int, width: int = 3, B: int = 1):
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, L, width)))


def variables(mixer, L: int = 4):
    return nn.unbox(jax.jit(mixer.init)(jax.random.key(0), inputs(L, mixer.width), Context()))


# HiPPO


@pytest.mark.quick
def test_hippo_is_the_published_matrix():
    A, B = legs(4)
    rows = [[-1, 0, 0, 0], [-1.732051, -2, 0, 0], [-2.236068, -3.872983, -3, 0], [-2.645751, -4.582576, -5.916080, -4]]
    np.testing.assert_allclose(A, rows, atol=5e-7)
    np.testing.assert_allclose(B, np.sqrt([1, 3, 5, 7]))
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(legs(8)[0])), np.arange(-8, 0), rtol=1e-9)


FREQUENCIES = {
    4: ([4.603293, 0.556501], []),
    8: ([19.857410, 5.354209, 1.957794, 0.427489], []),
    16: ([80.966081, 25.629226, 13.834342, 8.362105], [0.352018]),
    64: ([1303.273843, 433.030757, 258.152210, 182.620411], [1.702968, 0.905859, 0.263857]),
}


@pytest.mark.quick
@pytest.mark.parametrize("N", FREQUENCIES)
def test_hippo_is_normal_plus_rank_one(N):
    A, B = legs(N)
    S = A + np.outer(B, B) / 2
    np.testing.assert_allclose(S + S.T, -np.eye(N), atol=2e-13)  # skew but for -1/2 on the diagonal
    Lambda, P, Bm, V = legs_modes(N)
    first, last = FREQUENCIES[N]
    np.testing.assert_allclose(Lambda.imag[: len(first)], first, atol=6e-7)
    np.testing.assert_allclose(Lambda.imag[N // 2 - len(last) :], last, atol=6e-7)
    np.testing.assert_array_equal(Lambda.real, -0.5)
    # Both halves of the basis give LegS back: A = V (Lambda - P P^*) V^* and B.
    both, modes = np.hstack([V, V.conj()]), np.hstack([Lambda, Lambda.conj()])
    np.testing.assert_allclose(both.conj().T @ both, np.eye(N), atol=1e-12)
    back = both @ (np.diag(modes) - np.outer(np.tile(P, 2), np.tile(P, 2))) @ both.conj().T
    np.testing.assert_allclose(back, A, atol=1e-10)
    np.testing.assert_allclose(2 * (V @ Bm).real, B, atol=1e-11)
    # V^T V = 0 is why a normal matrix, moved to the kept half of the basis, has independent parts of equal size.
    np.testing.assert_allclose(V.T @ V, 0, atol=1e-12)


@pytest.mark.quick
def test_s4d_starts_from_the_published_modes():
    np.testing.assert_allclose(INITS["inv"](np.arange(4), 4), [17.825354, 4.244132, 1.527887, 0.363783], atol=6e-7)
    np.testing.assert_allclose(INITS["inv"](np.arange(4), 32), [1283.425, 414.227, 240.388, 165.885], atol=6e-4)
    np.testing.assert_allclose(INITS["legs"](np.arange(4), 4), FREQUENCIES[8][0], atol=6e-7)
    starts = {name: variables(MIXERS["s4d"](width=3, A_init=name))["params"] for name in INITS}
    for name, params in starts.items():
        np.testing.assert_allclose(params["A_imag"][1], INITS[name](np.arange(32), 32), rtol=1e-6)
        decay = np.arange(1, 33) if name == "real" else np.full(32, 0.5)
        np.testing.assert_allclose(np.exp(params["A_real"][1]), decay, rtol=1e-6)
    # LegS brings the B of HiPPO, which is part of C.
    B = legs_modes(64)[2].astype(np.float32)
    np.testing.assert_allclose(starts["legs"]["C"], starts["lin"]["C"] * B, rtol=1e-6)


# Rules of discretisation


@pytest.mark.quick
def test_rules_of_discretisation_are_the_textbook_ones():
    with jax.enable_x64(True):
        A, dt = jnp.asarray([-0.5 + 3j, -2.0 + 0j, -0.5 + 1300j]), jnp.asarray([0.1, 0.02, 0.001])
        log_A, B = zoh(A, dt)
        np.testing.assert_allclose(jnp.exp(log_A), np.exp(A * dt), rtol=1e-12)
        np.testing.assert_allclose(B, (np.exp(A * dt) - 1) / A, rtol=1e-12)
        log_A, B = bilinear(A, dt)
        np.testing.assert_allclose(jnp.exp(log_A), (1 + dt * A / 2) / (1 - dt * A / 2), rtol=1e-12)
        np.testing.assert_allclose(B, dt / (1 - dt * A / 2), rtol=1e-12)


@pytest.mark.quick
def test_both_rules_agree_as_the_step_shrinks():
    """A differs by `(dt A)^3 / 12` and B by `dt (dt A)^2 / 12`: equal to first order and beyond."""
    with jax.enable_x64(True):
        A = jnp.asarray([-0.5 + 3j])
        for dt in (1e-2, 1e-3):
            (hold, B_hold), (trapezoid, B_trapezoid) = (rule(A, jnp.asarray(dt)) for rule in (zoh, bilinear))
            np.testing.assert_allclose((jnp.exp(trapezoid) - jnp.exp(hold)) / dt**3, A**3 / 12, rtol=0.05)
            np.testing.assert_allclose((B_trapezoid - B_hold) / dt**3, A**2 / 12, rtol=0.05)


# Kernels


@pytest.mark.quick
def test_s4_kernel_is_the_published_one():
    """HiPPO-LegS, N = 8, dt = 1/16, C = 1: to all printed digits, and the powers of the dense matrix to rounding."""
    N, L, dt = 8, 40, 1 / 16
    A, B = legs(N)
    inverse = np.linalg.inv(np.eye(N) - dt / 2 * A)
    A_bar, x, dense = inverse @ (np.eye(N) + dt / 2 * A), dt * inverse @ B, []
    for _ in range(L):
        dense.append(x.sum())
        x = A_bar @ x
    Lambda, P, Bm, V = legs_modes(N)
    with jax.enable_x64(True):
        weights = [jnp.asarray(w[None], jnp.complex128) for w in (Lambda, P, Bm, np.ones(N) @ V)]
        kernel = dplr_kernel(*weights, jnp.asarray([dt]), L)[:, 0]
        impulse, start = jnp.zeros((1, L, 1)).at[0, 0].set(1.0), jnp.zeros((1, 1, N // 2), complex)
        steps, _ = dplr_recurrence(impulse, *weights, jnp.asarray([dt]), start, Context(), "sequential")
    np.testing.assert_allclose(kernel[:6], [0.666474, -0.062048, -0.056764, 0.046880, 0.093282, 0.082909], atol=6e-7)
    np.testing.assert_allclose(kernel, dense, atol=1e-12)
    np.testing.assert_allclose(steps.ravel(), dense, atol=1e-14)


@pytest.mark.scale
def test_the_kernel_of_s4_does_not_depend_on_how_much_of_it_is_asked_for():
    Lambda, P, B, V = legs_modes(64)
    weights = [jnp.asarray(w[None], jnp.complex64) for w in (Lambda, P, B, np.ones(64) @ V)]
    kernels = [dplr_kernel(*weights, jnp.asarray([0.01]), L) for L in (300, 64, 1)]  # in 19, 8 and 1 rows
    for kernel in kernels[1:]:
        np.testing.assert_allclose(kernel, kernels[0][: len(kernel)], atol=1e-5)


@pytest.mark.quick
def test_powers_of_s4_keep_slow_and_fast_modes():
    """Near 1 and near -1, where powers of a rounded A go astray: as in float64, up to A^4096."""
    Lambda = np.asarray([[-0.5 + 0.25j, -0.5 + 2j], [-0.5 + 0.25j, -0.5 + 1300j]])
    P, dt = np.asarray([[0.25 + 0.125j, 0.25 - 0.5j]] * 2), np.asarray([2.0**-10, 0.125])
    units = np.concatenate([np.eye(2), 1j * np.eye(2)])
    powers = squares(*(jnp.asarray(x, jnp.complex64) for x in (Lambda, P)), jnp.asarray(dt, jnp.float32), 13)
    for d in range(2):
        moved = Lambda[d] * units - P[d] * 2 * (units @ P[d].conj())[:, None].real
        half = dt[d] / 2 * np.concatenate([moved.real, moved.imag], axis=1)
        A = (np.eye(4) + half) @ np.linalg.inv(np.eye(4) - half)
        for k, found in enumerate(powers):
            np.testing.assert_allclose(found[d], np.linalg.matrix_power(A, 2**k) - np.eye(4), atol=2e-5)


def test_no_kernel_holds_a_power_for_every_lag():
    """Nor its gradient: where the powers of all lags and modes would take 128 times as much as the kernel itself."""
    D, N, L = 32, 64, 4096
    modes, dt = jax.ShapeDtypeStruct((D, N), jnp.complex64), jax.ShapeDtypeStruct((D,), jnp.float32)

    def objective(A, C, dt):
        return jnp.sum(s4d_kernel(A, C, dt, L) ** 2)

    compiled = jax.jit(jax.grad(objective, argnums=(0, 1, 2))).lower(modes, modes, dt).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 8 * L * D * N


@pytest.mark.quick
@pytest.mark.parametrize("lag", [32_767, 32_768, 1_000_000])
def test_powers_keep_their_phase_at_long_lags(lag):
    """Where A hardly decays: value and gradient as in float64. A rounded product of phase and lag is off by 0.001."""
    rng = np.random.default_rng(0)
    phase = np.concatenate([rng.uniform(-np.pi, np.pi, 50), 10 ** rng.uniform(-4, 2, 50), [0, np.pi, 130.3]])
    parts = [p.astype(np.float32) for p in (-(10 ** rng.uniform(-8, -6, phase.shape)), phase)]
    weight = rng.normal(size=(2, 3, len(phase)))

    def objective(real, imag, weight):
        found = powers(jax.lax.complex(real, imag), 3, lag)
        return jnp.sum(weight[0] * found.real + weight[1] * found.imag), found

    grads, found = jax.jit(jax.grad(objective, (0, 1), has_aux=True))(*parts, weight.astype(np.float32))
    lags = lag * np.arange(3)[:, None]
    want = np.exp(lags * (parts[0].astype(np.float64) + 1j * parts[1].astype(np.float64)))
    np.testing.assert_allclose(found, want, atol=2e-6)
    pulled = np.sum(lags * want * (weight[0] - 1j * weight[1]), axis=0)  # d/dx exp(x l) = l exp(x l)
    for got, true in zip(grads, (pulled.real, -pulled.imag), strict=True):
        np.testing.assert_allclose(got / lag, true / lag, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_textbook_impulse(form):
    """`x_t = 0.9 x_{t-1} + 0.5 u_t`, `y = x`, as one channel of S4D and as one mode of S5 and LRU."""
    impulse = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
    A, one = jnp.log(jnp.asarray([[0.9 + 0j]])), jnp.ones((1, 1), jnp.complex64)
    C = 0.25 * A / (0.9 - 1)  # a step of 1 holds the input with (0.9 - 1) / A, and a mode counts twice
    unit = jnp.zeros((1, 6, 1)).at[0, 0].set(1.0)
    for system, shape in (
        (s4d_system(A, C, jnp.ones(1), "zoh"), (1, 1, 1)),
        (mimo_system(A[0], 0.5 * one, one), (1, 1)),
    ):
        start = jnp.zeros(shape, jnp.complex64)
        y = convolved([system], unit) if form == "convolution" else system.recurrence(unit, start, Context(), form)[0]
        np.testing.assert_allclose(y.ravel(), impulse, atol=1e-6)


# Models


def run(mixer, form, values, x):
    return jax.jit(mixer.clone(implementation=form).apply)(values, x, Context())[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", SETTINGS)
def test_convolution_recurrence_and_scan_are_one_map(case):
    mixer = make(case)
    values, x = variables(mixer), inputs(1024).astype(jnp.float32)
    truth = run(mixer, FORMS[0], values, x)
    assert np.abs(truth).max() > 0.1
    for form in FORMS[1:]:
        assert zoo.far(run(mixer, form, values, x), truth) < 1e-4, form
    with jax.enable_x64(True):
        mixer = make(case, dtype=jnp.float64)
        values, x = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), values), inputs(256)
        truth = run(mixer, FORMS[0], values, x)
        assert truth.dtype == jnp.float64
        for form in FORMS[1:]:
            assert zoo.far(run(mixer, form, values, x), truth) < 1e-10, form


@pytest.mark.scale
def test_documents_and_gradients_through_the_chunked_recurrence_of_s4():
    """Past one chunk, with documents that open and padding that lies inside chunks: as token by token."""
    mixer, L = make("s4", state=8), 150
    values, x = variables(mixer), inputs(L).astype(jnp.float32)
    ctx = zoo.context([[1] * 50 + [0] * 7 + [2] * 80 + [0] * 13])

    def value_and_grad(form):
        def objective(values, x):
            y, last = mixer.clone(implementation=form).apply(values, x, ctx, mixer.init_state(1, 0))
            return jnp.sum(jnp.sin(3 * y)) + jnp.sum(jnp.abs(last) ** 2)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(objective, (0, 1)))(values, x))

    for got, want in zip(value_and_grad(None), value_and_grad("sequential"), strict=True):
        assert np.abs(want).max() > 1e-3 and zoo.far(got, want) < 1e-5


@pytest.mark.scale
def test_s4_never_holds_all_its_states():
    mixer, L = make("s4", width=8), 16384
    values = variables(mixer)

    def memory(ctx, form):
        def objective(values, x):
            return jnp.sum(mixer.clone(implementation=form).apply(values, x, ctx)[0] ** 2)

        step = jax.jit(jax.grad(objective, (0, 1))).lower(values, inputs(L, 8).astype(jnp.float32))
        return step.compile().memory_analysis().temp_size_in_bytes

    one = 8 * 8 * 32  # bytes of one token's state
    assert memory(Context(), None) < one * 2 * L
    packed = zoo.context(np.ones((1, L)))
    assert memory(packed, None) < one * L / 2 < memory(packed, "sequential")


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["s4", "s4d", "dss", "s5", "lru", "b2s6"])
def test_backward_is_forward_read_from_the_end(case):
    """Both ways, the reversed input with the directions exchanged gives the reversed output; each has its own C."""
    mixer = make(case, causal=False)
    values, x = variables(mixer), inputs(20).astype(jnp.float32)
    name = "w" if case == "dss" else "C"
    assert values["params"][name].shape[0] == 2
    swapped = {"params": values["params"] | {name: values["params"][name][::-1]}}
    y = run(mixer, None, values, x)
    np.testing.assert_allclose(run(mixer, None, swapped, x[:, ::-1])[:, ::-1], y, atol=1e-5)
    assert np.abs(run(mixer, None, swapped, x) - y).max() > 1e-3
    # One direction silenced, the other is a causal model.
    forward = {"params": values["params"] | {name: values["params"][name].at[1].set(0)}}
    causal = {"params": values["params"] | {name: values["params"][name][:1]}}
    np.testing.assert_allclose(run(mixer, None, forward, x), run(make(case), None, causal, x), atol=1e-5)


@pytest.mark.quick
def test_dss_is_the_formula_of_its_paper():
    """`K_k = Re sum_i w_i (exp(lambda_i Delta) - 1) / lambda_i exp(lambda_i k Delta)`, with both modes of each pair."""
    mixer = make("dss", width=1, state=8)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables(mixer)["params"])
    Lambda, Delta = -np.exp(p["Lambda_real"][0]) + 1j * p["Lambda_imag"][0], np.exp(p["log_dt"][0])
    np.testing.assert_allclose(Lambda, legs_modes(8)[0], rtol=1e-6)
    w = p["w"][0, 0, 0] + 1j * p["w"][0, 1, 0]
    Lambda, w = np.concatenate([Lambda, Lambda.conj()]), np.concatenate([w, w.conj()])
    want = np.exp(np.outer(np.arange(30), Lambda * Delta)) @ (w * (np.exp(Lambda * Delta) - 1) / Lambda)
    half = jnp.asarray(Lambda[None, :4], jnp.complex64), jnp.asarray(w[None, :4], jnp.complex64)
    np.testing.assert_allclose(s4d_kernel(*half, jnp.asarray([Delta]), 30)[:, 0], want.real, atol=1e-5)


@pytest.mark.quick
def test_s5_starts_from_blocks_of_hippo():
    mixer = make("s5", width=256, state=32)
    params = variables(mixer)["params"]
    np.testing.assert_allclose(params["Lambda_imag"], np.tile(legs_modes(16)[0].imag, 2), rtol=1e-6)
    np.testing.assert_allclose(params["Lambda_real"], np.log(0.5), rtol=1e-6)
    assert params["log_dt"].shape == (16,)
    # A normal B, moved to the modes by V^*, and the B that is drawn there: parts of one size, 1 / (2 D), uncorrelated.
    V = legs_modes(32)[3]
    moved = V.conj().T @ np.random.default_rng(0).normal(0, 256**-0.5, (32, 256))
    for B in (moved, params["B"][0] + 1j * params["B"][1]):
        np.testing.assert_allclose(np.mean(B.real**2) * 512, 1, atol=0.1)
        np.testing.assert_allclose(np.mean(B.imag**2) * 512, 1, atol=0.1)
        np.testing.assert_allclose(np.mean(B.real * B.imag) * 512, 0, atol=0.1)


@pytest.mark.quick
def test_lru_starts_on_its_ring_with_a_state_of_the_size_of_its_input():
    nu_log = ring(0.4, 0.8)(jax.random.key(0), (20_000,), jnp.float32)
    radius = np.exp(-np.exp(nu_log))
    assert 0.4 <= radius.min() < 0.41 and 0.79 < radius.max() <= 0.8
    np.testing.assert_allclose(np.mean(radius**2 < 0.4), 0.5, atol=0.02)  # uniform in area: half of it below 0.4
    mixer = make("lru", width=64, state=256, max_phase=0.5)
    p = variables(mixer)["params"]
    radius = np.exp(-np.exp(p["nu_log"]))
    assert 0.9 <= radius.min() and radius.max() <= 0.999
    assert 0 < np.exp(p["theta_log"]).min() and 0.4 < np.exp(p["theta_log"]).max() <= 0.5
    np.testing.assert_allclose(np.exp(2 * p["gamma_log"]), 1 - radius**2, rtol=1e-3)
    # Under white noise the state has the variance of B u, in each mode: gamma undoes what the ring piles up.
    B = jnp.exp(p["gamma_log"])[:, None] * jax.lax.complex(*p["B"])
    noise = np.random.default_rng(0).normal(size=(4, 1000, 64))
    drive = np.asarray(into_state(jnp.asarray(noise, jnp.float32), B))
    powers = np.exp(np.outer(np.arange(1000), -np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"])))
    last = np.einsum("kn,bkn->bn", powers[::-1], drive)
    np.testing.assert_allclose(np.mean(np.abs(last) ** 2), 1, atol=0.2)


# Mistakes


@pytest.mark.quick
@pytest.mark.parametrize(
    "name,options,words",
    [
        *[(n, dict(state=7), "state is 7; allowed: .*even; closest: 8") for n in ("s4", "s4d", "dss", "s5", "lru")],
        *[(n, dict(state=0), "state is 0; allowed: .*even; closest: 2") for n in ("s4", "s5")],
        ("lru", dict(r_max=1.5), "LRU.r_max is 1.5; allowed: a number from 0 to 1; closest: 1"),
        ("s4", dict(dt_min=0.0), "S4.dt_min is 0.0; allowed: a number above 0; usual: 0.001"),
        *[
            (n, dict(dt_min=0.2), "dt_min 0.2 must be at most dt_max 0.1; closest: 0.1")
            for n in ("s4", "s4d", "dss", "s5")
        ],
        ("s4d", dict(A_init="leg"), "S4D.A_init is 'leg'; allowed: .*; closest: legs"),
        ("s5", dict(discretisation="zo"), "S5.discretisation is 'zo'; allowed: zoh, bilinear; closest: zoh"),
        ("s5", dict(blocks=3), "s5's blocks 3 does not divide .* 32; closest that does: 2"),
        (
            "s4",
            dict(implementation="associative"),
            "S4.implementation .* allowed: convolution, sequential, chunked, or None",
        ),
        ("dss", dict(implementation="convolutin"), "DSS.implementation is .*closest: convolution"),
        ("lru", dict(r_min=0.99, r_max=0.9), "r_min 0.99 to r_max 0.9 is empty"),
        ("lru", dict(max_phase=7.0), "LRU.max_phase is 7.0; allowed: a number above 0 and of at most 6.28"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(name, options, words):
    with pytest.raises(UserError, match=words) as error:
        jax.eval_shape(MIXERS[name](width=4, **options).init, jax.random.key(0), inputs(4, 4), Context())
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["s4", "s4d", "dss", "s5", "lru"])
def test_calls_that_cannot_work_are_refused(name):
    mixer = MIXERS[name](width=4, implementation="convolution")
    values = variables(mixer)
    with pytest.raises(UserError, match="kernel of length 0 was asked for; it needs at least 1"):
        mixer.apply(values, inputs(0, 4), Context())
    with pytest.raises(UserError, match=f"{name}'s convolution cannot carry a state"):
        mixer.apply(values, inputs(4, 4), Context(), mixer.init_state(1, 4))
    both = mixer.clone(causal=False, implementation=None)
    with pytest.raises(UserError, match="a bidirectional model cannot carry a state"):
        both.apply(values, inputs(4, 4), Context(), mixer.init_state(1, 4))
