"""Softmax attention (https://arxiv.org/abs/1706.03762) with a key-value cache, whole or a ring."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.cache import Cache, Full, Ring, is_empty
from model.contract import Context, Mixer, State
from model.errors import UserError
from model.layers import Dense, check_divides, dense, fan_in, norm
from model.ops.attention import IMPLEMENTATIONS, attention, attention_weights
from model.ops.mask import CAUSAL, FULL, Mask, Prefix, window
from model.ops.product import product
from model.positions.position import Position
from model.settings import LONGEST, Dim, Length, NotNegative, Positive, Whole, within

Entries = tuple[tuple[str, tuple[int, ...]], ...]  # of a cache: names, and shapes per token
Biases = Literal["none", "qkv", "all"]  # on no projection; those of queries, keys and values; every one


class MultiHead(Mixer):
    """Softmax attention by heads, of which a few may share keys and values, over a cache of those."""

    position: Any = Position  # builds the position encoding

    n_heads: Dim = 4
    n_kv_heads: Literal[0] | Dim = 0  # 0: as many as n_heads
    head_dim: Literal[0] | Dim = 0  # 0: width / n_heads
    bias: Biases = "none"  # projections that have one

    softmax: ClassVar[bool] = True

    @property
    def heads(self) -> tuple[int, int, int]:
        """How many of queries, how many of keys and values, and their dim."""
        return self.n_heads, self.n_kv_heads or self.n_heads, self.head_dim or self.width // self.n_heads

    def check(self, position: Position) -> None:
        H, G, K = self.heads
        check_heads(self.label, H, G, self.width, self.head_dim)
        position.check(K)

    @property
    def entries(self) -> Entries:
        """What the cache holds of each token."""
        return ("k", self.heads[1:]), ("v", self.heads[1:])

    @property
    def cache(self) -> Cache:
        return Full(self.entries, self.dtype)

    def init_state(self, batch: int, max_len: int) -> State:
        return self.cache.open(batch, max_len)

    def state_bytes(self, length: int) -> int:
        return self.cache.bytes(length)


class Attention(MultiHead):
    """Multi-head softmax attention; fewer key-value heads make it grouped-query, one makes it multi-query."""

    score: Literal["dot", "additive", "multiplicative"] = "dot"  # scaled; Bahdanau's; Luong's
    scale: Positive | None = None  # factor on the scores; None: 1 / sqrt(head_dim) of dot, 1 of the others
    window: Length | None = None  # a token sees those less than this far away; None: all
    # First tokens that stay visible outside the window, positions counted in the cache.
    sink_tokens: Annotated[int, within(0, LONGEST)] = 0
    prefix: Whole = 0  # the first tokens of a document see each other bidirectionally
    qk_norm: bool | Literal["all"] = False  # queries and keys are normalised per head; all: over all heads together
    qk_norm_eps: Positive = 1e-5
    soft_cap: NotNegative = 0.0  # keeps scores within this by a tanh; 0: off
    sinks: bool = False  # a learned logit per head that takes weight and gives nothing
    gate: bool = False  # the output is gated, elementwise, by a sigmoid of the input
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # of the attention op; None picks

    work: ClassVar[float | None] = 2
    groups: ClassVar[dict[str, str]] = {"sinks": "no_decay"}

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
        super().check(position)
        if self.sink_tokens:
            self.check_streaming(position)
        name = type(position).__name__.lower()
        if self.window is not None and position.stretches:
            raise UserError(f"position {name!r} stretches with the length, and a window never grows; use scaling 'ntk'")
        if self.window is not None and self.causal and rotates(position) and not position.relative:
            raise UserError(f"position {name!r} is not relative, so it cannot be counted anew inside a window's cache")
        if self.score == "additive" and rotates(position):
            raise UserError(f"position {name!r} turns queries and keys, which additive scores do not compare by angle")

    def check_streaming(self, position: Position) -> None:
        if self.window is None or not self.causal or self.prefix:
            raise UserError("model.attention.sink_tokens needs a window and a causal model without prefix")
        if not position.relative:
            name = type(position).__name__.lower()
            raise UserError(f"position {name!r} is not relative, so it cannot be counted anew inside a streaming cache")

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        position, at, span = begin(self, x, ctx, state)
        H, _, K = self.heads
        q, k, v = queries_keys_values(self, self.heads, x, x)
        if self.qk_norm:
            normed = dict(eps=self.qk_norm_eps, axes=2 if self.qk_norm == "all" else 1)
            q = norm("rmsnorm", self.dtype, "q_norm", **normed)(q)
            k = norm("rmsnorm", self.dtype, "k_norm", **normed)(k)
        call = self.scoring(position, ctx)
        if self.score == "multiplicative":
            between = self.weight("between", nn.initializers.orthogonal(), (H, K, K), ("heads", None, None))
            q = product("blhk,hkj->blhj", q, between)

        # Keys in a ring are turned when read, each time counted from the ring's own beginning.
        streams = bool(self.sink_tokens) or (self.window is not None and state is not None)
        if not streams:
            q, k = position.rotate_queries(q, at, span), position.rotate_keys(k, at, span)
        levels = self.levels(x, ctx, state)
        if state is None:
            call |= whole_row(ctx, call) | dict(q_levels=levels, k_levels=levels)
        else:
            new = dict(k=k, v=v) | ({} if levels is None else dict(levels=levels))
            first = is_empty(state)
            seen, places, state = remember(self.cache, ctx, state, **new)
            if first:  # what is new is all there is
                seen, places = new, whole_row(ctx, call)
            else:
                places |= filled(state)
            k, v, call = seen["k"], seen["v"], call | places | dict(q_levels=levels, k_levels=seen.get("levels"))
        y = stream(self, position, q, k, v, **call) if streams else look(self, q, k, v, **call)
        if self.gate:
            y = y * nn.sigmoid(dense((H, K), INTO_HEADS, self.dtype, "gate", bias=self.bias == "all")(x))
        return out_of_heads(self, y), state

    def levels(self, x: jax.Array, ctx: Context, state: State) -> jax.Array | None:
        """What lowers scores by the distance between two tokens' own, `[B, L, H]`; None: nothing."""
        return None

    def scoring(self, position: Position, ctx: Context) -> dict[str, Any]:
        """How the op is to score: everything but queries, keys and their places."""
        H, _, K = self.heads
        scale = 1.0 if self.scale is None and self.score == "multiplicative" else self.scale
        bias = ctx.bias if position.shares else position.bias(H, self.causal)
        call = dict(mask=self.mask, scale=scale, soft_cap=self.soft_cap, bias=bias)
        if self.sinks:
            call["sinks"] = self.weight("sinks", nn.initializers.zeros_init(), (H,), ("heads",))
        if self.score == "additive":
            call["additive"] = self.weight("additive", fan_in, (K, H), (None, "heads")).T
        return call

    @property
    def cache(self) -> Cache:
        if self.window is None:
            return super().cache
        return Ring(self.entries, self.dtype, self.window, self.sink_tokens)


INTO_HEADS = ("embed", "heads", None)  # logical axes of a kernel [D, H, K]


def queries_keys_values(
    mixer: Mixer, heads: tuple[int, int, int], x: jax.Array, source: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[B, L, H, K]` of x, and keys and values `[B, M, G, K]` of a source that may be another sequence."""
    H, G, K = heads
    made = partial(into_heads, mixer)
    return made("q", (H, K))(x), made("k", (G, K))(source), made("v", (G, K))(source)


def into_heads(mixer: Mixer, name: str, heads: tuple[int, int]) -> Dense:
    """A projection `[B, L, D]` -> `[B, L, H, K]`."""
    return dense(heads, INTO_HEADS, mixer.dtype, name, bias=mixer.bias != "none")


def out_of_heads(mixer: Mixer, y: jax.Array) -> jax.Array:
    """The last projection, `[B, L, D]`; y: [B, L, H, V]."""
    return dense(mixer.width, ("heads", None, "embed"), mixer.dtype, "out", inputs=2, bias=mixer.bias == "all")(y)


def begin(mixer: Mixer, x: jax.Array, ctx: Context, state: State) -> tuple[Position, jax.Array, int]:
    """How every softmax mixer begins: its position encoding, checked; where the tokens stand; the context's span."""
    position = mixer.position(name="position", dtype=mixer.dtype)
    mixer.check_direction(state)
    mixer.check(position)
    if position.causal_only and mixer.sees_ahead:
        name = type(position).__name__.lower()
        raise UserError(f"position {name!r} is for causal models; set model.causal=True and no prefix")
    at = arange(x) if ctx.positions is None else ctx.positions
    return position, at, x.shape[1] if state is None else state["segments"].shape[1]


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
        options = call | special | dict(k_segments=jnp.where(kept, call["k_segments"], 0), right_padded=False)
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


def whole_row(ctx: Context, call: dict[str, Any]) -> dict[str, Any]:
    """Where queries and keys of a whole row stand.

    Without bias, and by a mask that asks no more, only their order counts, which is that in the row; None says so, and
    lets fused kernels serve packed documents. Of one document with padding behind it the order is all there is.
    """
    by_order = ctx.right_padded or (call["bias"] is None and call["mask"].by_order())
    at = None if by_order else ctx.positions
    documents = dict(q_segments=ctx.segments, k_segments=ctx.segments, right_padded=ctx.right_padded)
    return dict(q_positions=at, k_positions=at, **documents)


def remember(
    cache: Cache, ctx: Context, state: State, **entries: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], State]:
    """Writes tokens into a cache: what there is to attend to, where queries and keys stand, and the state after."""
    B, L = next(iter(entries.values())).shape[:2]
    segments = jnp.ones((B, L), jnp.int32) if ctx.segments is None else ctx.segments
    new = dict(**entries, positions=jnp.broadcast_to(ctx.positions, (B, L)), segments=segments)
    seen, state = cache.extend(state, new)
    places = dict(q_positions=new["positions"], k_positions=seen["positions"])
    return seen, places | dict(q_segments=new["segments"], k_segments=seen["segments"]), state


def filled(state: State) -> dict[str, jax.Array]:
    """How much of a cache is written, from its first slot on, where it is filled in that order."""
    return dict(k_filled=state["written"]) if "written" in state else {}


def rotates(position: Position) -> bool:
    return type(position).rotate_queries is not Position.rotate_queries


def check_heads(section: str, heads: int, kv_heads: int, width: int, head_dim: int) -> None:
    if not head_dim:
        check_divides(f"model.{section}.n_heads", heads, "model.width", width)
    if kv_heads > heads:
        raise UserError(f"n_kv_heads {kv_heads} is more than n_heads {heads}; closest: {heads}")
    check_divides(f"model.{section}.n_kv_heads", kv_heads, f"model.{section}.n_heads", heads)
