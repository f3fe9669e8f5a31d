"""One layer: sub-layers in turn, each a branch of the residual stream with its norm and dropout."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, Mixer, State
from model.documents import looking_back
from model.layers import stream_norm

ACTIVATION = ("batch", "length", None)  # logical axes of [B, L, D]

SubLayers = tuple[tuple[str, Callable[..., Mixer]], ...]  # names, and what builds each

# Where the norms of a branch f stand: `x + f(norm(x))`, `norm(x + f(x))`, `x + norm(f(norm(x)))`, `x + f(x)`.
NORM_ORDERS = {"pre": ("before",), "post": ("after",), "sandwich": ("before", "inside"), "none": ()}


class Block(nn.Module):
    """Sub-layers that obey the contract of a mixer: as a rule a mixer and an MLP.

    `parallel`: they all read the first one's norm of the same vectors, and their outputs are added
    (https://arxiv.org/abs/2204.02311).
    """

    sublayers: SubLayers
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_momentum: float = 0.9  # of running statistics, where it has some
    norm_order: str = "pre"
    residual: bool = True
    branch_scale: float = 1.0  # of what a branch adds
    init_scale: float = 1.0  # of each branch's last kernel, when parameters are made
    parallel: bool = False
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        new: dict[str, State] = {}

        def branch(x: jax.Array, name: str, build: Callable[..., Mixer]) -> jax.Array:
            mixer = build(name=name)
            known = ctx if mixer.sees_ahead or mixer.counts_tokens else looking_back(ctx)
            y, new[name] = mixer(x, known, None if state is None else state[name])
            if self.init_scale != 1 and self.is_initializing():
                self.shrink(name, mixer.last)
            return y

        if self.parallel:
            first = self.sublayers[0][0]
            x = self.added(x, first, lambda x: sum(branch(x, *one) for one in self.sublayers), ctx)
        else:
            for name, build in self.sublayers:
                x = self.added(x, name, lambda x, one=(name, build): branch(x, *one), ctx)
        x = nn.with_logical_constraint(x, ACTIVATION)
        if not self.is_initializing():  # else `init` would return it beside the parameters
            self.sow("maps", "output", x)  # dropped unless the caller asks for it: `mutable=["maps"]`
        return x, None if state is None else new

    def added(self, x: jax.Array, name: str, branch: Callable[[jax.Array], jax.Array], ctx: Context) -> jax.Array:
        """The residual stream with a branch added to it."""
        order = NORM_ORDERS[self.norm_order]
        y = branch(self.normed(x, f"{name}_norm", ctx) if "before" in order else x)
        if "inside" in order:
            y = self.normed(y, f"{name}_out_norm", ctx)
        y = nn.Dropout(self.dropout, name=f"{name}_norm_dropout")(y, deterministic=not ctx.train)
        if self.branch_scale != 1:
            y = y * jnp.asarray(self.branch_scale, y.dtype)
        y = x + y if self.residual else y
        return self.normed(y, f"{name}_norm", ctx) if "after" in order else y

    def shrink(self, name: str, last: str) -> None:
        """Scales what was just drawn for a branch's last map, if it has one."""
        made = self.get_variable("params", name, {})
        if last in made:
            scaled = jax.tree.map(lambda leaf: self.init_scale * leaf, made[last])
            self.put_variable("params", name, {**made, last: scaled})

    def normed(self, x: jax.Array, name: str, ctx: Context) -> jax.Array:
        return stream_norm(self.norm, self.dtype, name, self.norm_eps, self.norm_momentum)(x, ctx)

    def parts(self) -> dict[str, Mixer]:
        """The sub-layers, unbound: good for questions that need no parameters."""
        return {name: build(parent=None) for name, build in self.sublayers}

    @property
    def causal(self) -> bool:
        """Whether it can go on from a state."""
        return all(part.causal for part in self.parts().values())

    @property
    def sees_ahead(self) -> bool:
        """Whether some token sees a later one, be it of a prefix alone."""
        return any(part.sees_ahead for part in self.parts().values())

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers here."""
        return self.dropout > 0 or any(getattr(part, "jitter", 0) > 0 for part in self.parts().values())

    def init_state(self, batch: int, max_len: int) -> State:
        return {name: part.init_state(batch, max_len) for name, part in self.parts().items()}

    def state_bytes(self, length: int, memory: int = 0) -> int:
        return sum(part.state_bytes(memory if part.reads_memory else length) for part in self.parts().values())
