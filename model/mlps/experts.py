"""A mixture of experts: many MLPs, of which each token goes through the few that a router chooses.

Shape letters besides those of the contract: X experts, F hidden width of each, k experts of one token.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from model import placement
from model.contract import Context, Mixer, State, wide
from model.errors import UserError
from model.layers import dense
from model.mlps.mlp import FORMS, MLP
from model.ops.grouped import LAYOUTS, Layout, bounded_layout, grouped, layout, moved
from model.settings import Dim, NotNegative, Whole, at_least, below

Activation = Callable[[jax.Array], jax.Array]
Kernels = dict[str, jax.Array]  # up and, if gated, gate [X, D, F]; down [X, F, D]


class Experts(Mixer):
    """A mixture of experts (https://arxiv.org/abs/1701.06538): each token goes through the MLPs that a router chooses.

    Without a capacity no token is dropped. With one (https://arxiv.org/abs/2006.16668) an expert takes, in training,
    so many times its even share of each row: first come, first served. Tests and generation drop none.
    """

    hidden: Dim = 1  # F

    n_experts: Dim = 8
    top_k: Dim = 2  # experts that a token goes through
    shared: Whole = 0  # experts that every token goes through besides (https://arxiv.org/abs/2401.06066)
    kind: Literal[*FORMS] = "swiglu"  # the experts' MLP, without biases
    weights: Literal["chosen", "all"] = "chosen"  # a softmax over the scores of the chosen, or of all
    jitter: Annotated[float, at_least(0), below(1)] = 0.0  # noise: the router's inputs times 1 +- this, in training
    capacity: NotNegative = 0.0  # factor on an expert's even share of a row; 0: no limit
    balance: NotNegative = 0.01  # weight of the load-balancing loss (https://arxiv.org/abs/2101.03961)
    router_z: NotNegative = 0.001  # weight of the router z-loss (https://arxiv.org/abs/2202.08906)
    implementation: Literal[*LAYOUTS] | None = None  # of the product of each expert with its tokens; None picks

    last: ClassVar[str] = "down"
    counts_tokens: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        check(self.n_experts, self.top_k)
        real = jnp.ones(x.shape[:2], bool) if ctx.segments is None else ctx.segments > 0
        logits = self.router(x, ctx)
        chosen, weight = route(logits, self.top_k, self.weights)
        kept = jnp.broadcast_to(real[..., None], chosen.shape)
        room = None
        if self.capacity and ctx.train:
            even = self.top_k * x.shape[1] / self.n_experts
            room = min(math.ceil(self.capacity * even), x.shape[1])
            kept &= arrival(chosen, kept, self.n_experts) < room
        if ctx.train:
            self.sow_reports(logits, chosen, kept, real)
        form: MLP = FORMS[self.kind](parent=None, width=self.width)
        kernels = self.kernels(form.gated)
        sent = jnp.where(kept, chosen, self.n_experts)
        y = through_experts(x, sent, weight, kernels, form.activation, room, self.implementation)
        if self.shared:
            options = dict(dtype=self.dtype, hidden=self.shared * self.hidden, bias=False)
            y = y + FORMS[self.kind](self.width, **options, name="shared")(x, ctx)[0]
        return y, state

    def router(self, x: jax.Array, ctx: Context) -> jax.Array:
        """Scores of all experts, `[B, L, X]`, wide: near a tie, rounding would decide who is chosen."""
        x = x.astype(wide(self.dtype))
        if self.jitter and ctx.train:
            x *= jax.random.uniform(self.make_rng("dropout"), x.shape, x.dtype, 1 - self.jitter, 1 + self.jitter)
        return dense(self.n_experts, ("embed", None), x.dtype, "router")(x)

    def kernels(self, gated: bool) -> Kernels:
        X, D, F = self.n_experts, self.width, self.hidden
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)

        def kernel(name: str, shape: tuple[int, int], *axes: str) -> jax.Array:
            return self.weight(name, init, (X, *shape), ("experts", *axes))

        into = {name: kernel(name, (D, F), "embed", "mlp") for name in ("up", "gate")[: 1 + gated]}
        return into | {"down": kernel("down", (F, D), "mlp", "embed")}

    def sow_reports(self, logits: jax.Array, chosen: jax.Array, kept: jax.Array, real: jax.Array) -> None:
        """Losses for the step to add, and how the router fares."""
        X, k, f = self.n_experts, self.top_k, logits.dtype
        tokens = jnp.maximum(real.sum(), 1).astype(f)
        probability = jax.nn.softmax(logits)
        load = jnp.einsum("blkx,bl->x", jax.nn.one_hot(chosen, X, dtype=f), real.astype(f)) / (k * tokens)
        mean = jnp.einsum("blx,bl->x", probability, real.astype(f)) / tokens
        z = jnp.where(real, jax.nn.logsumexp(logits, axis=-1), 0)
        entropy = jnp.where(real, -(probability * jax.nn.log_softmax(logits)).sum(-1), 0)
        self.sow("losses", "balance", self.balance * X * jnp.dot(load, mean))
        self.sow("losses", "router_z", self.router_z * jnp.square(z).sum() / tokens)
        self.sow("reports", "load", X * load.max())  # of the busiest, in even shares
        self.sow("reports", "dropped", 1 - kept.sum() / (k * tokens))
        self.sow("reports", "router_entropy", entropy.sum() / tokens)

    def init_state(self, batch: int, max_len: int) -> State:
        return {}

    def state_bytes(self, length: int) -> int:
        return 0


def check(n_experts: int, top_k: int) -> None:
    if top_k > n_experts:
        raise UserError(f"model.experts.top_k {top_k} is more than n_experts {n_experts}; closest: {n_experts}")
    devices = placement.shards("experts")
    if n_experts % devices:
        near = max(round(n_experts / devices), 1) * devices
        raise UserError(
            f"model.experts.n_experts {n_experts} does not divide over mesh.expert = {devices}; closest that does: "
            f"{near}"
        )


def route(logits: jax.Array, k: int, over: str) -> tuple[jax.Array, jax.Array]:
    """The k experts with the highest scores of each token, `[B, L, k]`, and their weights."""
    scores, chosen = lax.top_k(logits, k)
    if over == "chosen":
        return chosen, jax.nn.softmax(scores)
    return chosen, jnp.exp(scores - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def arrival(chosen: jax.Array, kept: jax.Array, X: int) -> jax.Array:
    """How many of a row's tokens, or higher choices of the same token, come to an expert before each, `[B, L, k]`."""
    B, L, k = chosen.shape
    came = jax.nn.one_hot(chosen, X, dtype=jnp.int32) * kept[..., None]
    before = jnp.cumsum(came.reshape(B, L * k, X), axis=1).reshape(came.shape) - came
    return jnp.take_along_axis(before, chosen[..., None], axis=-1)[..., 0]


def through_experts(
    x: jax.Array,
    sent: jax.Array,
    weight: jax.Array,
    kernels: Kernels,
    activation: Activation,
    room: int | None,
    implementation: str | None,
) -> jax.Array:
    """The weighted sum of what its experts make of each token, `[B, L, D]`.

    `sent` `[B, L, k]` names experts; X is nobody. `room`: tokens of a row that an expert takes at most; None: all.

    Each device holds some experts, and some of the tokens. With room for all of them, the tokens of an expert group of
    devices are gathered and each device's experts pick theirs; with bounded room, an all-to-all brings each expert its
    tokens (expert parallelism).
    """
    over = placement.axes("experts")
    rows = set(placement.axes("batch")) if placement.shards("batch", len(sent)) > 1 else set()
    apart = tuple(axis for axis in over if axis in rows)  # of an expert group, the devices that hold other tokens
    alike = tuple(axis for axis in over if axis not in rows)
    hidden = placement.axes("mlp") if placement.shards("mlp", kernels["down"].shape[1]) > 1 else ()
    if room is None or alike:
        run = partial(gathered, activation=activation, over=over, apart=apart, implementation=implementation)
    else:
        run = partial(exchanged, activation=activation, apart=apart, room=room)

    def on_device(*held: Any) -> jax.Array:
        y = run(*held)
        return lax.psum(y, (*alike, *hidden)) if alike or hidden else y

    along = None if set(placement.axes("length")) & set(over) else "length"
    tokens = placement.spec(("batch", along, None), x.shape)
    shapes = {name: ("experts", "mlp", None) if name == "down" else ("experts", None, "mlp") for name in kernels}
    kernel_specs = {name: placement.spec(axes, kernels[name].shape) for name, axes in shapes.items()}
    return placement.on_each_device(on_device, (tokens, tokens, tokens, kernel_specs), tokens)(x, sent, weight, kernels)


def gathered(
    x: jax.Array,
    sent: jax.Array,
    weight: jax.Array,
    kernels: Kernels,
    activation: Activation,
    over: tuple[str, ...],
    apart: tuple[str, ...],
    implementation: str | None,
) -> jax.Array:
    """What this device's experts, of those shared out over some axes, add to the tokens held along `apart`."""
    if apart:
        x, sent, weight = (lax.all_gather(a, apart, axis=0, tiled=True) for a in (x, sent, weight))
    X = len(kernels["down"])
    mine = sent.reshape(-1) - (lax.axis_index(over) * X if over else 0)
    slots = layout(jnp.where((mine >= 0) & (mine < X), mine, X), X, implementation)
    y = summed(x, sent, weight, slots, lambda taken: mlp(taken, kernels, activation, slots))
    return lax.psum_scatter(y, apart, scatter_dimension=0, tiled=True) if apart else y


def exchanged(
    x: jax.Array,
    sent: jax.Array,
    weight: jax.Array,
    kernels: Kernels,
    activation: Activation,
    apart: tuple[str, ...],
    room: int,
) -> jax.Array:
    """What all experts, wherever along `apart` they are, add to this device's tokens."""
    X, D = len(kernels["down"]) * math.prod(lax.axis_size(axis) for axis in apart), x.shape[-1]
    slots = bounded_layout(sent.reshape(-1), X, len(x) * min(room, x.shape[1]))

    def elsewhere(taken: jax.Array) -> jax.Array:
        taken = lax.all_to_all(taken.reshape(X, -1, D), apart, 0, 1, tiled=True)
        made = mlp(taken.reshape(-1, D), kernels, activation, slots)
        return lax.all_to_all(made.reshape(taken.shape), apart, 1, 0, tiled=True).reshape(-1, D)

    return summed(x, sent, weight, slots, elsewhere if apart else lambda taken: mlp(taken, kernels, activation, slots))


def summed(
    x: jax.Array, sent: jax.Array, weight: jax.Array, slots: Layout, made: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The weighted sum of what is made of each token in its slots, `[B, L, D]`."""
    each = jnp.repeat(x.reshape(-1, x.shape[-1]), sent.shape[-1], axis=0)
    back = moved(made(moved(each, slots.row, slots.slot)), slots.slot, slots.row).reshape(*sent.shape, -1)
    return jnp.einsum("blk,blkd->bld", weight, back, preferred_element_type=weight.dtype).astype(x.dtype)


def mlp(x: jax.Array, kernels: Kernels, activation: Activation, slots: Layout) -> jax.Array:
    """The MLP of each slot's expert, `[S, D]`."""
    h = activation(grouped(x, kernels["up"], slots))
    if "gate" in kernels:
        h = h * grouped(x, kernels["gate"], slots)
    return grouped(h, kernels["down"], slots)
