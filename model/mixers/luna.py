"""Luna: a few learned queries pack a sequence, and its tokens read what was packed."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State, wide
from model.layers import check_divides, dense, fan_in
from model.mixers.attention import INTO_HEADS
from model.ops.each_document import each_document
from model.ops.fused import refuse_kernels
from model.ops.product import product
from model.ops.ssd import IMPLEMENTATIONS, ssd
from model.settings import Dim

Arrays = dict[str, jax.Array]


def luna(weights: Arrays, tokens: Arrays, n: jax.Array | None) -> jax.Array:
    """`Attn(X, C, C)` of `C = Attn(P, X, X)`, `[B, L, H, K]`.

    weights: P's queries pq [P, H, K], scaled, and the maps of what is packed, k and v [D, H, K]; tokens: q, scaled,
    and what is packed of them, pk and pv, each [B, L, H, K].
    """

    @jax.checkpoint  # the weights of tokens, P a head, are made anew
    def attend(weights, tokens, n):
        f, v = wide(tokens["q"].dtype), tokens["pv"]
        scores = product("blhk,phk->blhp", tokens["pk"], weights["pq"], f)
        seen = None if n is None else (jnp.arange(v.shape[1]) < n[:, None])[..., None, None]
        packed = jnp.einsum("blhp,blhk->bphk", jax.nn.softmax(scores, axis=1, where=seen).astype(v.dtype), v)
        packed = packed.reshape(*packed.shape[:2], -1)
        k, v = (product("bpd,dhk->bphk", packed, weights[name]) for name in "kv")
        scores = jnp.einsum("blhk,bphk->bhlp", tokens["q"], k, preferred_element_type=f)
        return jnp.einsum("bhlp,bphk->blhk", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)

    return attend(weights, tokens, n)


def causal_luna(
    a: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, past: Arrays, ctx: Context, implementation: str | None
) -> tuple[jax.Array, Arrays]:
    """`y_t = w_t mean_{j<=t} a_j v_j^T` with `w_t = softmax(q_t mean_{j<=t} k_j a_j^T)`, and the sums after.

    a: [B, L, H, P], how much each token is packed where, not negative; q (scaled), k, v: [B, L, H, K].
    """
    f, (_, L, H, _) = wide(a.dtype), a.shape
    at, keep, there = jnp.arange(L)[None], None, jnp.ones((*a.shape[:2], H), f)
    if ctx.positions is not None:
        at = ctx.positions
    if ctx.segments is not None:
        real = ctx.segments > 0
        keep, there = (at > 0) | ~real, jnp.where(real[..., None], there, 0)
    share = 1 / (at + 1).astype(f)[..., None, None]  # of each token so far

    def summed(x, B, C, past):
        """`sum_{j<=t} (C_t . B_j) x_j`: a state space that forgets nothing."""
        return ssd(x, there, jnp.zeros(H, f), B, C, past, keep, implementation=implementation)

    scores, keys = summed(a, k, q, past["keys"])
    w = jax.nn.softmax(scores.astype(f) * share, axis=-1).astype(v.dtype)
    y, values = summed(v, a, w, past["values"])
    return (y.astype(f) * share).astype(v.dtype), dict(keys=keys, values=values)


class Luna(Mixer):
    """Linear unified nested attention (https://arxiv.org/abs/2106.01540).

    The extra sequence P is a parameter of the layer: what the paper hands on from layer to layer stays in it. A causal
    layer packs by `1 + elu` and running means in the place of a softmax, and its state is two matrices a head.
    """

    n_heads: Dim = 4
    packed: Dim = 16  # vectors of P, the paper's l
    tied: bool = True  # keys are values too, of tokens and of what is packed
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the running sums (the ssd op); None picks

    groups: ClassVar[dict[str, str]] = {"P": "no_decay"}

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        check_divides("model.luna.n_heads", self.n_heads, "model.width", self.width)
        self.check_direction(state)
        D, f = self.width, wide(self.dtype)
        P = self.weight("P", nn.initializers.normal(D**-0.5), (self.packed, D), (None, "embed"))
        pq = self.head_dim**-0.5 * jnp.einsum("pd,dhk->phk", P, self.kernel("pq"))
        own = [] if self.tied else ["v"] if self.causal else ["pv", "v"]
        kernels = {name: self.kernel(name) for name in ("q", "pk", "k", *own)}
        kernels = {"pv": kernels["pk"], "v": kernels["k"]} | kernels

        def of_tokens(name: str) -> jax.Array:
            return product("bld,dhk->blhk", x.astype(self.dtype), kernels[name])

        q, pk = self.head_dim**-0.5 * of_tokens("q"), of_tokens("pk")
        if self.causal:
            past = self.init_state(x.shape[0], 0) if state is None else state
            a = 1 + nn.elu(product("blhk,phk->blhp", pk, pq, f))
            pair = of_tokens("k"), of_tokens("v")
            y, past = causal_luna(a.astype(self.dtype), q, *pair, past, ctx, self.implementation)
        else:
            refuse_kernels("ssd", self.implementation)
            weights = dict(pq=pq, k=kernels["k"], v=kernels["v"])
            tokens = dict(q=q, pk=pk, pv=of_tokens("pv"))
            y, past = each_document(luna, weights, tokens, ctx.segments, ctx.right_padded), None
        out = dense(D, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y)
        return out, None if state is None else past

    def kernel(self, name: str) -> jax.Array:
        """A map into heads, `[D, H, K]`."""

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return fan_in(key, (shape[0], shape[1] * shape[2]), dtype).reshape(shape)

        return self.weight(name, init, (self.width, self.n_heads, self.head_dim), INTO_HEADS)

    def init_state(self, batch: int, max_len: int) -> State:
        H, K, P, f = self.n_heads, self.head_dim, self.packed, wide(self.dtype)
        return dict(keys=jnp.zeros((batch, H, P, K), f), values=jnp.zeros((batch, H, K, P), f))

    def state_bytes(self, length: int) -> int:
        return 2 * self.width * self.packed * jnp.dtype(wide(self.dtype)).itemsize
