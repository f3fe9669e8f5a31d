"""Low-rank and whole-row mixers by their papers' definitions, written out in float64: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.mixers.sinkhorn import sinkhorn
from model.mixers.whole_row import WholeRow
from model.ops.fourier import product_mod
from tests import zoo
from tests.differences import check_slopes

L = 13


def alone(name, definition, length=L, **settings):
    """Whether a mixer and its gradients are a definition of one row: full rows, and rows with padding behind them."""
    mixer, x, weight = zoo.make((name, settings, "none")), zoo.inputs(2, length), zoo.inputs(2, length, 1)
    variables = zoo.params(mixer)
    given = (variables.get("params", {}), x, weight)
    p, wide, weight = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), given)
    short = [length, 2 * length // 3]
    segments = (np.arange(length) < np.asarray(short)[:, None]).astype(np.int32)
    padded = zoo.context(segments).replace(right_padded=True)
    for ctx, ends in [(Context(), [length] * 2), (padded, short)]:
        heard = weight * (np.arange(length) < np.asarray(ends)[:, None])[..., None]
        (grads, pull), y = zoo.gradient(mixer)(variables, x, ctx, heard.astype(np.float32))
        for row, n in enumerate(ends):
            assert zoo.far(y[row, :n], definition(p, wide[row, :n])) < 1e-5, (row, n)

        def weighted(at, ends=ends):
            p, x = at
            return sum(np.sum(weight[row, :n] * definition(p, x[row, :n])) for row, n in enumerate(ends))

        check_slopes(weighted, (p, wide), (grads.get("params", {}), pull))


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def heads(p, x):
    return (np.einsum("ld,dhk->hlk", x, p[name]["kernel"]) for name in "qkv")


def joined(p, y):
    return np.einsum("hlk,hkd->ld", y, p["out"]["kernel"])


def dft(x):
    """Sum over tokens t and channels c of `x_tc exp(-2 pi i (k t / n + e c / D))`, its real part."""
    (n, D), y = x.shape, np.zeros(x.shape)
    for k in range(n):
        for e in range(D):
            turns = k * np.arange(n)[:, None] / n + e * np.arange(D) / D
            y[k, e] = np.sum(x * np.cos(2 * np.pi * turns))
    return y


def test_fnet_is_its_papers_definition():
    alone("fnet", lambda p, x: dft(x))
    alone("fnet", lambda p, x: dft(x) / np.sqrt(x.size), scale="unitary")


def test_angles_are_exact_in_whole_numbers():
    rng = np.random.default_rng(0)
    a, b = rng.integers(2**26, size=(2, 500))
    m = rng.integers(1, 2**27, size=500)
    np.testing.assert_array_equal(product_mod(*map(jnp.asarray, (a, b, m))), a * b % m)


@pytest.mark.parametrize("share", ["none", "heads", "kv"])
def test_linformer_is_its_papers_definition(share):
    def definition(p, x):
        q, k, v = heads(p, x)
        E, F = p["E"], p["E" if share == "kv" else "F"]
        y = np.zeros(q.shape)
        for h in range(len(q)):
            Eh, Fh = (one[h] if share == "none" else one for one in (E, F))
            keys = sum(np.outer(Eh[t], k[h, t]) for t in range(len(x)))
            values = sum(np.outer(Fh[t], v[h, t]) for t in range(len(x)))
            y[h] = softmax(q[h] @ keys.T / np.sqrt(q.shape[-1])) @ values
        return joined(p, y)

    alone("linformer", definition, share=share, rank=5, longest=20)


def test_what_a_linformer_cannot_do_is_refused():
    with pytest.raises(UserError, match=r"length 9 is past the longest .* 'linformer' .* closest: .*longest=9"):
        zoo.make(("linformer", dict(longest=8, rank=4), "none")).init(jax.random.key(0), zoo.inputs(1, 9), Context())
    with pytest.raises(UserError, match=r"rank 9 is more than .*longest 8.* closest: .*rank=8"):
        zoo.shapes(zoo.make(("linformer", dict(longest=8, rank=9), "none")))


@pytest.mark.parametrize(("landmarks", "conv"), [(4, 3), (3, 0), (0, 33)])
def test_nystrom_is_its_papers_definition(landmarks, conv):
    """With stretches that differ by one token at most, and no more landmarks than tokens."""

    def inverse(A):
        one = np.eye(len(A))
        Z = A.T / (np.abs(A).sum(axis=0).max() * np.abs(A).sum(axis=1).max())
        for _ in range(6):
            Z = Z @ (13 * one - A @ Z @ (15 * one - A @ Z @ (7 * one - A @ Z))) / 4
        return Z

    def definition(p, x):
        q, k, v = heads(p, x)
        (H, n, K), M = q.shape, min(landmarks or 64, len(x))
        of = [[t for t in range(n) if t * M // n == m] for m in range(M)]
        y = np.zeros(q.shape)
        for h in range(H):
            near_q, near_k = (np.stack([one[h, ts].mean(axis=0) for ts in of]) for one in (q, k))
            F, A, B = (softmax(a @ b.T / np.sqrt(K)) for a, b in [(q[h], near_k), (near_q, near_k), (near_q, k[h])])
            y[h] = F @ inverse(A) @ B @ v[h]
            for t in range(n):
                for w in range(conv):
                    if 0 <= (s := t + w - conv // 2) < n:
                        y[h, t] += p["conv"][w, h] * v[h, s]
        return joined(p, y)

    alone("nystrom", definition, landmarks=landmarks, conv=conv)


def test_more_landmarks_than_tokens_are_refused():
    with pytest.raises(UserError, match=r"landmarks 9 is more than the 4 tokens of a row; .*closest: 4"):
        zoo.shapes(zoo.make(("nystrom", dict(landmarks=9), "none")))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["dense", "random", "factorized"])
def test_synthesizer_is_its_papers_definition(kind, causal):
    def definition(p, x):
        v = np.einsum("ld,dhk->hlk", x, p["v"]["kernel"])
        y = np.zeros(v.shape)
        for h in range(len(v)):
            for i in range(len(x)):
                scores = np.empty(i + 1 if causal else len(x))
                for j in range(len(scores)):
                    if kind == "dense":
                        hidden = np.maximum(x[i] @ p["W1"]["kernel"][:, h] + p["W1"]["bias"][h], 0)
                        scores[j] = hidden @ p["W2"][j, h]
                    else:
                        scores[j] = p["R"][h, i, j] if kind == "random" else p["R1"][i, h] @ p["R2"][j, h]
                y[h, i] = softmax(scores) @ v[h, : len(scores)]
        return joined(p, y)

    alone("synthesizer", definition, kind=kind, longest=20, causal=causal)


def test_what_a_synthesizer_cannot_do_is_refused():
    mixer = zoo.make(("synthesizer", dict(longest=8), "none"))
    for ask in (lambda: mixer.init(jax.random.key(0), zoo.inputs(1, 9), Context()), lambda: mixer.init_state(1, 9)):
        with pytest.raises(UserError, match=r"length 9 is past the longest .* 'synthesizer' .* closest: .*longest=9"):
            ask()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_luna_is_its_papers_definition(causal, tied):
    def definition(p, x):
        def of(name, x):
            return np.einsum("ld,dhk->hlk", x, p[{"v": "k", "pv": "pk"}.get(name, name) if tied else name])

        (n, D), H = x.shape, 4
        root, pq, pk, q = np.sqrt(D // H), of("pq", p["P"]), of("pk", x), of("q", x)
        if not causal:
            packed = [softmax(pq[h] @ pk[h].T / root) @ of("pv", x)[h] for h in range(H)]
            packed = np.concatenate(packed, axis=-1)
            k, v = of("k", packed), of("v", packed)
            return joined(p, np.stack([softmax(q[h] @ k[h].T / root) @ v[h] for h in range(H)]))
        k, v, y = of("k", x), of("v", x), np.zeros((H, n, D // H))
        for h in range(H):
            scores = pk[h] @ pq[h].T / root
            a = np.where(scores > 0, scores, np.exp(np.minimum(scores, 0)) - 1) + 1
            for t in range(n):
                keys = sum(np.outer(k[h, j], a[j]) for j in range(t + 1)) / (t + 1)
                values = sum(np.outer(a[j], v[h, j]) for j in range(t + 1)) / (t + 1)
                y[h, t] = softmax(q[h, t] @ keys / root) @ values
        return joined(p, y)

    alone("luna", definition, causal=causal, tied=tied, packed=5)


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if issubclass(mixer, WholeRow)])
def test_whole_rows_have_no_state(name):
    mixer = MIXERS[name](width=zoo.WIDTH, causal=False)
    for ask in (mixer.init_state, lambda *_: mixer.init(jax.random.key(0), zoo.inputs(1, 4), Context(), {})):
        with pytest.raises(UserError, match=rf"'{name}' mixes whole rows, and can carry no state .* closest mixer"):
            ask(1, 4)
    assert mixer.state_bytes(1024) == 0


@pytest.mark.scale
def test_sinkhorn_is_its_papers_definition():
    """Sums of blocks, two layers, Sinkhorn's normalisation, and attention to both blocks' keys at once."""
    b, tau = 4, 0.75

    def definition(p, x):
        q, k, v = heads(p, x)
        (H, n, K), N = q.shape, -(-len(x) // b)
        of = [list(range(i * b, min(n, i * b + b))) for i in range(N)]
        y = np.zeros(q.shape)
        for h in range(H):
            wants = np.empty((N, N))
            for i in range(N):
                hidden = np.maximum(x[of[i]].sum(axis=0) @ p["W1"] + p["b1"], 0)
                wants[i] = (hidden @ p["W2"][:, h, :N] + p["b2"][h, :N]) / tau
            S = np.exp(wants)
            for _ in range(8):
                S /= S.sum(axis=0, keepdims=True)
                S /= S.sum(axis=1, keepdims=True)
            for i in range(N):
                for t in of[i]:
                    weights = [np.exp(q[h, t] @ k[h, s] / np.sqrt(K)) for s in of[i]]
                    values = [v[h, s] for s in of[i]]
                    for j in range(b):
                        there = [m for m in range(N) if j < len(of[m])]
                        key, value = (sum((S[i, m] * one[h, of[m][j]] for m in there), np.zeros(K)) for one in (k, v))
                        weights.append(sum(S[i, m] for m in there) * np.exp(q[h, t] @ key / np.sqrt(K)))
                        values.append(value)
                    y[h, t] = np.asarray(weights) @ np.asarray(values) / np.sum(weights)
        return joined(p, y)

    for length in (12, L, 3):
        alone("sinkhorn", definition, length, block=b, longest=20)


def test_a_sorted_place_without_tokens_is_no_key():
    """However low the scores of those that are: one token has itself alone to look at."""
    q = jnp.full((1, 1, 2, 4), 50.0)
    tokens = dict(q=q, k=-q, v=jnp.ones_like(q), x=jnp.zeros((1, 1, 3)))
    weights = dict(W1=jnp.zeros((3, 3)), b1=jnp.zeros(3), W2=jnp.zeros((3, 2, 1)), b2=jnp.zeros((2, 1)))
    y = sinkhorn(weights, tokens, None, block=4, iterations=8, temperature=0.75)
    np.testing.assert_allclose(y, 1, rtol=1e-6)


def test_a_block_that_is_longer_than_the_row_takes_no_more_memory():
    long, short = (zoo.make(("sinkhorn", dict(block=2**n, longest=2**20), "none")) for n in (20, 3))
    assert zoo.memory(long, 8) <= zoo.memory(short.clone(longest=8), 8)


def test_what_sinkhorn_cannot_sort_is_refused():
    with pytest.raises(UserError, match=r"length 9 is past the longest .* 'sinkhorn' .* closest: .*longest=9"):
        zoo.make(("sinkhorn", dict(longest=8), "none")).init(jax.random.key(0), zoo.inputs(1, 9), Context())
