"""Softmax attention with a key-value cache, whole or a ring."""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full, Ring
from model.contract import Context, Mixer, State, wide
from model.errors import UserError
from model.layers import check_divides, dense, fan_in, norm
from model.ops.attention import IMPLEMENTATIONS, attention, attention_weights
from model.ops.mask import CAUSAL, FULL, Mask, Prefix, window
from model.ops.product import product
from model.positions.position import Position
from model.settings import Dim, Length, NotNegative, Whole


class Attention(Mixer):
    """Multi-head softmax attention; fewer key-value heads make it grouped-query, one makes it multi-query."""

    position: Any = Position  # builds the position encoding

    n_heads: Dim = 4
    n_kv_heads: Literal[0] | Dim = 0  # 0: as many as n_heads
    score: Literal["dot", "additive", "multiplicative"] = "dot"  # scaled; Bahdanau's; Luong's
    window: Length | None = None  # a token sees those less than this far away; None: all
    sink_tokens: Whole = 0  # first tokens that stay visible outside the window, positions counted in the cache
    prefix: Whole = 0  # the first tokens of a document see each other both ways
    qk_norm: bool = False  # queries and keys are normalised per head
    soft_cap: NotNegative = 0.0  # keeps scores within this by a tanh; 0: off
    sinks: bool = False  # a learned logit per head that takes weight and gives nothing
    gate: bool = False  # the output is gated, elementwise, by a sigmoid of the input
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    softmax: ClassVar[bool] = True
    groups: ClassVar[dict[str, str]] = {"sinks": "no_decay"}

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def mask(self) -> Mask:
        """Who sees whom: (causal | prefix) & window."""
        seen = CAUSAL if self.causal else FULL
        if self.prefix:
            seen = seen | Prefix(self.prefix)
        return seen if self.window is None else seen & window(self.window)

    @property
    def sees_ahead(self) -> bool:
        return not self.causal or self.prefix > 0

    def check(self, position: Position) -> None:
        check_heads("attention", self.n_heads, self.kv_heads, self.width)
        position.check(self.width // self.n_heads)
        if self.sink_tokens:
            self.check_streaming(position)
        name = type(position).__name__.lower()
        if self.window is not None and position.stretches:
            raise UserError(f"position {name!r} stretches with the length, and a window never grows; use scaling 'ntk'")
        if self.window is not None and self.causal and rotates(position) and not position.relative:
            raise UserError(f"position {name!r} is not relative, so it cannot be counted anew inside a window's cache")
        if self.score == "additive" and rotates(position):
            raise UserError(f"position {name!r} turns queries and keys, which additive scores do not compare by angle")
        if position.causal_only and not (self.causal and not self.prefix):
            raise UserError(f"position {name!r} is for causal models; set model.causal=True and no prefix")

    def check_streaming(self, position: Position) -> None:
        if self.window is None or not self.causal or self.prefix:
            raise UserError("model.attention.sink_tokens needs a window and a causal model without prefix")
        if not position.relative:
            name = type(position).__name__.lower()
            raise UserError(f"position {name!r} is not relative, so it cannot be counted anew inside a streaming cache")

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position = self.position(name="position", dtype=self.dtype)
        self.check(position)
        if state is not None and not self.causal:
            raise UserError("a bidirectional model cannot carry a state; set model.causal=True to generate")
        H, G, K = self.n_heads, self.kv_heads, self.width // self.n_heads
        q = dense((H, K), ("embed", "heads", None), self.dtype, "q")(x)
        k = dense((G, K), ("embed", "heads", None), self.dtype, "k")(x)
        v = dense((G, K), ("embed", "heads", None), self.dtype, "v")(x)
        if self.qk_norm:
            q, k = norm("rmsnorm", self.dtype, "q_norm")(q), norm("rmsnorm", self.dtype, "k_norm")(k)
        call = self.scoring(position)
        if self.score == "multiplicative":
            per_head = nn.with_logical_partitioning(nn.initializers.orthogonal(), ("heads", None, None))
            between = self.param("between", per_head, (H, K, K), wide(self.dtype))
            q, call["scale"] = product("blhk,hkj->blhj", q, between), 1.0

        # Keys in a ring are turned when read, each time counted from the ring's own beginning.
        streams = bool(self.sink_tokens) or (self.window is not None and state is not None)
        if not streams:
            at = arange(x) if ctx.positions is None else ctx.positions
            span = x.shape[1] if state is None else state["segments"].shape[1]
            q, k = position.rotate_queries(q, at, span), position.rotate_keys(k, at, span)
        if state is None:
            call |= whole_row(ctx, call)
        else:
            new = cacheable(ctx, x.shape, k=k, v=v)
            seen, state = self.cache.extend(state, new)
            k, v = seen["k"], seen["v"]
            call |= dict(q_positions=new["positions"], k_positions=seen["positions"])
            call |= dict(q_segments=new["segments"], k_segments=seen["segments"])
        y = stream(self, position, q, k, v, **call) if streams else look(self, q, k, v, **call)
        if self.gate:
            y = y * nn.sigmoid(dense((H, K), ("embed", "heads", None), self.dtype, "gate")(x))
        return dense(self.width, ("heads", None, "embed"), self.dtype, "out", inputs=2)(y), state

    def scoring(self, position: Position) -> dict[str, Any]:
        """How the op is to score: everything but queries, keys and their places."""
        H, K, f = self.n_heads, self.width // self.n_heads, wide(self.dtype)
        call = dict(mask=self.mask, soft_cap=self.soft_cap, bias=position.bias(H, self.causal))
        if self.sinks:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("heads",))
            call["sinks"] = self.param("sinks", zeros, (H,), f)
        if self.score == "additive":
            call["additive"] = self.param(
                "additive", nn.with_logical_partitioning(fan_in, (None, "heads")), (K, H), f
            ).T
        return call

    @property
    def cache(self) -> Cache:
        head = (self.kv_heads, self.width // self.n_heads)
        entries = (("k", head), ("v", head))
        if self.window is None:
            return Full(entries, self.dtype)
        return Ring(entries, self.dtype, self.window, self.sink_tokens)

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)


def look(mixer: Mixer, q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """The attention op, `[B, L, H, V]`; its weights are kept if someone wants to look at them."""
    if mixer.looked_into():
        mixer.sow("maps", "weights", attention_weights(q, k, v, **call))
    return attention(q, k, v, **call, implementation=mixer.implementation)


def stream(mixer: Attention, position: Position, q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """A window of a stream without end and, if there are sink tokens, its first ones.

    Those are StreamingLLM's (https://arxiv.org/abs/2309.17453): positions count inside the cache, where a query stands
    at most at the end, so the first tokens are never farther away than that. They and the window are two calls, put
    together by their log-sum-exps.
    """
    S, end = mixer.sink_tokens, mixer.sink_tokens + mixer.window - 1
    q_at = arange(q) if call["q_positions"] is None else call["q_positions"]
    k_at = arange(k) if call["k_positions"] is None else call["k_positions"]
    if call["k_segments"] is None:
        call |= dict(q_segments=jnp.ones(q.shape[:2], jnp.int32), k_segments=jnp.ones(k.shape[:2], jnp.int32))
    # Angles stay small however far the stream has come: counted from where the first query's window may begin.
    earliest = jnp.min(jnp.where(call["q_segments"] > 0, q_at, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    shift = jnp.maximum(earliest - end, 0)
    span = end + 1 + q.shape[1]

    def part(q_turn: jax.Array, k_turn: jax.Array, kept: jax.Array, **special: Any):
        """Output, log-sum-exp and, if wanted, weights of attention to some of the keys."""
        turned = position.rotate_queries(q, q_turn, span), position.rotate_keys(k, k_turn, span)
        options = call | special | dict(k_segments=jnp.where(kept, call["k_segments"], 0))
        weights = attention_weights(*turned, v, **options) if mixer.looked_into() else None
        return *attention(*turned, v, **options, with_lse=True, implementation=mixer.implementation), weights

    near = dict(q_positions=q_at, k_positions=k_at)
    parts = [part(jnp.maximum(q_at - shift, 0), jnp.maximum(k_at - shift, 0), k_at >= S, **near)]
    if S:
        first = dict(q_positions=jnp.minimum(q_at, end), k_positions=jnp.minimum(k_at, end))
        parts.append(part(*first.values(), k_at < S, **first, mask=CAUSAL, sinks=None))
    outputs, lses, weights = zip(*parts, strict=True)
    share = jax.nn.softmax(jnp.stack(lses), axis=0)  # [parts, B, L, H]
    if weights[0] is not None:
        mixer.sow("maps", "weights", jnp.einsum("pblh,pbhlm->bhlm", share, jnp.stack(weights)))
    return jnp.einsum("pblh,pblhv->blhv", share.astype(q.dtype), jnp.stack(outputs))


def arange(x: jax.Array) -> jax.Array:
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None]


def whole_row(ctx: Context, call: dict[str, Any]) -> dict[str, jax.Array | None]:
    """Where queries and keys of a whole row stand.

    Without bias, and by a mask that asks no more, only their order counts, which is that in the row; None says so, and
    lets fused kernels serve packed documents.
    """
    at = None if call["bias"] is None and call["mask"].by_order() else ctx.positions
    return dict(q_positions=at, k_positions=at, q_segments=ctx.segments, k_segments=ctx.segments)


def cacheable(ctx: Context, shape: tuple[int, ...], **entries: jax.Array) -> dict[str, jax.Array]:
    """The entries of these tokens with their positions and documents, as a cache takes them."""
    B, L = shape[:2]
    segments = jnp.ones((B, L), jnp.int32) if ctx.segments is None else ctx.segments
    return dict(**entries, positions=jnp.broadcast_to(ctx.positions, (B, L)), segments=segments)


def rotates(position: Position) -> bool:
    return type(position).rotate_queries is not Position.rotate_queries


def check_heads(section: str, heads: int, kv_heads: int, width: int) -> None:
    check_divides(f"model.{section}.n_heads", heads, "model.width", width)
    if kv_heads > heads:
        raise UserError(f"n_kv_heads {kv_heads} is more than n_heads {heads}; closest: {heads}")
    check_divides(f"model.{section}.n_kv_heads", kv_heads, f"model.{section}.n_heads", heads)
