"""The delta rule: products against the loop, that against numpy, DeltaNet and RWKV-7 against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.deltanet import DeltaNet
from model.mixers.gated_deltanet import GatedDeltaNet
from model.mixers.kda import KDA
from model.mixers.rwkv7 import RWKV7
from model.ops import delta_rule as op
from model.ops.delta_rule import delta_rule, inverse
from model.ops.fused import say
from tests import zoo
from tests.test_fused_ssd import made_for
from tests.test_ssd import assert_same, both, normal

B, H, K, P = 2, 3, 4, 6
DECAYS = {"none": None, "head": (H,), "channel": (H, K)}
FORMS = ["beta", "a and b"]


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(op, "BLOCK", {"head": 8, "channel": 6})
    monkeypatch.setattr(op, "FEW", 3)


def unit(x, eps=0.0):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)


def arrays_of(L: int, decay: str, form: str) -> dict[str, jax.Array]:
    keys, head = (B, L, H, K), (B, L, H)
    made = normal(q=keys, k=keys, v=(B, L, H, P), h0=(B, H, K, P), w=(B, L, *(DECAYS[decay] or ())))
    made["k"] = unit(made["k"])
    made["w"] = -jnp.exp(2 * made["w"])
    if decay == "none":
        del made["w"]
    if form == "beta":
        return made | dict(beta=jax.nn.sigmoid(normal(1, beta=head)["beta"]))
    other = normal(1, b=keys, rate=keys)
    b = unit(other["b"])
    return made | dict(a=-b * jax.nn.sigmoid(other["rate"]), b=b)


def loop(q, k, v, h0, w=None, beta=None, a=None, b=None, keep=None):
    """The recurrence as it is written, a matrix at a time."""
    y, h = np.zeros((*q.shape[:3], v.shape[-1])), np.array(h0)
    for row, t, head in np.ndindex(q.shape[:3]):
        here = (row, t, head)
        state = h[row, head] if keep is None or keep[row, t] else np.zeros_like(h[row, head])
        decay = np.eye(q.shape[-1]) * (1 if w is None else np.exp(w[here]))
        if beta is None:
            change, written = decay + np.outer(a[here], b[here]), np.outer(k[here], v[here])
        else:
            change = (np.eye(q.shape[-1]) - beta[here] * np.outer(k[here], k[here])) @ decay
            written = beta[here] * np.outer(k[here], v[here])
        h[row, head] = change @ state + written
        y[here] = q[here] @ h[row, head]
    return y, h


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", DECAYS)
def test_products_are_the_loop(float64, small_blocks, decay, form):
    """Outputs, last state and every gradient, in documents, from a state that is not empty."""
    L = 47
    arrays, keep = arrays_of(L, decay, form), np.random.default_rng(1).random((B, L)) > 0.05

    def run(implementation, w=None, **arrays):
        return delta_rule(w=w, **arrays, keep=jnp.asarray(keep), implementation=implementation)

    slow, fast = both(run, arrays)
    assert_same(slow, fast, within=1e-11)
    assert_same(loop(**jax.device_get(arrays), keep=keep), fast[1], within=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_may_be_gone_through_at_once(float64, small_blocks, monkeypatch, form):
    """As on chips that do much at once: two chunks of five blocks."""
    monkeypatch.setattr(op, "blocks", lambda *sizes: 5)
    L = 47
    arrays, keep = arrays_of(L, "channel", form), np.random.default_rng(1).random((B, L)) > 0.05

    def run(implementation, **arrays):
        return delta_rule(**arrays, keep=jnp.asarray(keep), implementation=implementation)

    assert_same(*both(run, arrays), within=1e-11)


@pytest.mark.parametrize("decay", DECAYS)
def test_one_document_at_the_real_size_of_blocks(decay):
    """In float32, and from the first token to the last: a CPU's compiler has got such products wrong."""
    arrays = arrays_of(300, decay, "a and b" if decay == "none" else "beta")
    arrays = {name: leaf.astype(jnp.float32) for name, leaf in arrays.items()}
    got = jax.jit(lambda w=None, **arrays: delta_rule(w=w, **arrays, implementation="chunked"))(**arrays)
    assert_same(loop(**{name: np.asarray(leaf, np.float64) for name, leaf in arrays.items()}), got, within=3e-6)


@pytest.mark.parametrize("decay", DECAYS)
def test_one_token_meets_no_other(decay):
    arrays = {"w": None} | arrays_of(1, decay, "beta")
    found = [delta_rule(**arrays, implementation=form) for form in ("chunked", "sequential")]
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_inverse_of_alike_keys():
    """Powers of such a matrix reach 1e17; its inverse is of zeros and ones."""
    N = -np.tri(64, k=-1, dtype=np.float32)
    np.testing.assert_array_equal(inverse(jnp.asarray(N)), np.eye(64) - np.eye(64, k=-1))


@pytest.mark.parametrize("strength", [1e-30, 1e30])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_any_decay_has_finite_gradients(small_blocks, decay, strength):
    arrays = {name: leaf.astype(jnp.float32) for name, leaf in arrays_of(20, decay, "beta").items()}
    arrays["w"] = strength * arrays["w"]
    slow, fast = both(delta_rule, arrays)
    assert_same(slow, fast, within=1e-5)


@pytest.mark.scale
def test_memory_is_that_of_chunks_and_not_of_matrices():
    def memory(L, decay):
        tokens, n = jnp.zeros((1, L, 2, 32)), 32

        def objective(q, k, v, w, beta, h0):
            return sum(jnp.sum(x**2) for x in delta_rule(q, k, v, w, h0, beta=beta, implementation="chunked"))

        w = tokens if decay == "channel" else tokens[..., 0]
        arguments = (tokens, tokens, tokens, w, tokens[..., 0], jnp.zeros((1, 2, n, n)))
        step = jax.jit(jax.grad(objective, argnums=range(6)))
        return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / (n * tokens.nbytes)

    assert memory(2048, "head") < 0.5 and memory(2048, "channel") < 0.5


# DeltaNet


def test_deltanet_is_its_definition():
    """Convolved, activated and normalised, then corrected token by token."""
    L, W, D, K = 9, 4, zoo.WIDTH, 4
    mixer = DeltaNet(width=D)
    variables, x = zoo.params(mixer), zoo.inputs(2, L)
    p, u = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"]), np.asarray(x, np.float64)

    def heads(name):
        rows = np.pad(u @ p[name]["kernel"], [(0, 0), (W - 1, 0), (0, 0)])
        c = sum(rows[:, i : i + L] * p[f"conv_{name}"][i] for i in range(W))
        return (c / (1 + np.exp(-c))).reshape(2, L, D // K, K)

    beta = 1 / (1 + np.exp(-u @ p["beta"]["kernel"]))
    q, k = unit(heads("q"), 1e-6) / K**0.5, unit(heads("k"), 1e-6)
    y, _ = loop(q, k, heads("v"), np.zeros((2, D // K, K, K)), beta=beta)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]["scale"]
    got, _ = zoo.apply(mixer)(variables, x, Context())
    np.testing.assert_allclose(got, np.einsum("blhp,hpd->bld", y, p["out"]["kernel"]), atol=1e-5)


# RWKV-7


def test_rwkv7_is_its_definition():
    """The equations of the paper, one token and one head at a time; the state is its S transposed."""
    L, D, K = 9, zoo.WIDTH, 4
    H = D // K
    mixer = RWKV7(width=D, head_dim=K, decay_rank=3, rate_rank=2, gate_rank=5)
    variables, x = zoo.params(mixer), zoo.inputs(1, L)
    p, u = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"]), np.asarray(x[0], np.float64)
    before = np.concatenate([np.zeros((1, D)), u[:-1]])
    for_r, for_w, for_k, for_v, for_a, for_g = (u + (before - u) * mu for mu in p["mix"])

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def heads(x, name):
        return np.einsum("lr,rhk->lhk", x, p[name]["kernel"])

    r, k, v = heads(for_r, "r"), heads(for_k, "k"), heads(for_v, "v")
    w = np.exp(-np.exp(-0.5) * sigmoid(p["decay"] + heads(np.tanh(for_w @ p["decay_down"]["kernel"]), "decay_up")))
    a = sigmoid(p["rate"] + heads(for_a @ p["rate_down"]["kernel"], "rate_up"))
    g = heads(sigmoid(for_g @ p["gate_down"]["kernel"]), "gate_up")
    kappa, k = unit(k * p["removal"], 1e-6), k * (1 + (a - 1) * p["replacement"])
    y = np.zeros((L, H, K))
    for head in range(H):
        S = np.zeros((K, K))
        for t in range(L):
            now = (t, head)
            S = S @ (np.diag(w[now]) - np.outer(kappa[now], a[now] * kappa[now])) + np.outer(v[now], k[now])
            y[now] = S @ r[now]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 64e-5)
    y = y * p["norm"]["scale"] + p["norm"]["bias"] + (r * k * p["bonus"]).sum(-1, keepdims=True) * v
    got, _ = zoo.apply(mixer)(variables, x, Context())
    np.testing.assert_allclose(got[0], np.einsum("lhk,hkd->ld", y * g, p["out"]["kernel"]), atol=1e-5)


@pytest.mark.parametrize(
    ("mixer", "told"),
    [
        (
            DeltaNet(width=16, head_dim=3),
            "model.deltanet.head_dim 3 does not divide the width 16; .*: 2",
        ),
        (GatedDeltaNet(width=16, head_dim=5), "model.gated_deltanet.head_dim 5 does not divide .*: 4"),
        (RWKV7(width=16, head_dim=3), "model.rwkv7.head_dim 3 does not divide the width 16; .*: 2"),
        (KDA(width=16, causal=False), "kda runs forward only; set model.causal=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told(mixer, told):
    with pytest.raises(UserError, match=told):
        mixer.init(jax.random.key(0), zoo.inputs(1, 4), zoo.context(L=4))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mixer", "kind", "told"),
    [
        (DeltaNet(width=96, head_dim=48), "NVIDIA H200", ["[48]"]),
        (GatedDeltaNet(width=128, head_dim=128), "NVIDIA H200", ["[128, 256]"]),
        (KDA(width=96), "NVIDIA H200", ["[24]"]),
        (RWKV7(width=96, head_dim=8), "NVIDIA H200", ["[8]"]),
        (DeltaNet(width=64), "NVIDIA H200", []),
        (DeltaNet(width=96), "Tesla V100", []),  # which has no kernels at all, and says so when a run is made
    ],
    ids=lambda value: type(value).__name__.lower() if hasattr(value, "width") else None,
)
def test_a_gpu_says_once_that_a_shape_keeps_kernels_away(mixer, kind, told, caplog):
    say.cache_clear()
    x = jax.ShapeDtypeStruct((1, 64, mixer.width), jnp.bfloat16)
    with made_for(kind), caplog.at_level("WARNING"):
        for _ in range(2):
            jax.eval_shape(mixer.clone(dtype=jnp.bfloat16).init, jax.random.key(0), x, Context())
    rest = "so plain XLA takes its place, which is slower; set by head_dim, of gated_deltanet by expand too"
    assert [record.message for record in caplog.records] == [
        f"delta_rule: no kernel for heads of {sides} channels (it takes 16, 32, 64, 128), {rest}" for sides in told
    ]
