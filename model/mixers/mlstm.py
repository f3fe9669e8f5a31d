"""xLSTM's matrix memory: exponential input gates, and a forget gate for each head (https://arxiv.org/abs/2405.04517).

    C_t = f_t C_{t-1} + i_t k_t v_t^T    n_t = f_t n_{t-1} + i_t k_t    y_t = q_t C_t / max(|q_t n_t|, 1)

The layer around it is that of xLSTM 7B (https://arxiv.org/abs/2503.13427): keys of half the size, capped gates, a norm
of each head and an output gate.
"""

from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.contract import Context, State, wide
from model.documents import at_real, marks
from model.layers import dense
from model.mixers.decaying import NarrowKeys
from model.mixers.linear import with_ones
from model.ops.decays import stabilised
from model.ops.matrix_state import matrix_state
from model.settings import Positive

Array = jax.Array
ZEROS = nn.initializers.zeros_init()
LEAST = 1e-12  # that a normaliser is taken to be: where m is large e^-m is 0, and the sum of a query of zeros is too
FORGETS = {"sigmoid": jax.nn.log_sigmoid, "exp": lambda x: x}  # the logarithm of a forget gate


def mlstm(
    q: Array,
    k: Array,
    v: Array,
    log_i: Array,
    log_f: Array,
    state: dict[str, Array],
    real: Array | None,
    keep: Array | None,
    implementation: str | None,
) -> tuple[Array, dict[str, Array]]:
    """Outputs `[B, L, H, V]`, wide, and the state after.

    q, k: [B, L, H, K]; v: [B, L, H, V]; log_i, log_f: [B, L, H], wide. The state holds C, with n as its last column, as
    multiples of e^m, where m is no less than 0: then e^-m, which stands for 1, is in range too.
    """
    f = log_f.dtype
    w, m, last = stabilised(log_f, jnp.maximum(log_i, 0), state["m"], real, keep)
    k = at_real(real, k) * jnp.exp(at_real(real, log_i - m))[..., None]
    y, h = matrix_state(q, k, with_ones(v), at_real(real, w), state["h"], keep, implementation=implementation)
    y, n = y[..., :-1].astype(f), y[..., -1:].astype(f)
    least = jnp.maximum(jnp.exp(-m), LEAST)[..., None]
    return y / jnp.maximum(jnp.abs(n), least), dict(h=h, m=last)


def rising(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """From 3 to 6 over the heads: gates that are open, and more so in each."""
    return jnp.linspace(3, 6, shape[0], dtype=dtype)


class MLSTM(NarrowKeys):
    """xLSTM's mLSTM: a matrix memory whose gates are a head's, with a normaliser of its own."""

    forget: Literal[*FORGETS] = "sigmoid"
    gate_cap: Positive | None = 15.0  # gates are kept this far from 0 before their activations; None: as they are

    groups: ClassVar[dict[str, str]] = {"i_bias": "no_decay", "f_bias": "no_decay"}

    @nn.compact
    def __call__(self, x: Array, ctx: Context, state: State = None) -> tuple[Array, State]:
        self.check()
        (K, V), f = self.sides, wide(self.dtype)
        past = self.init_state(x.shape[0], 0) if state is None else state
        q, k, v = self.heads("q", x, K, out=f), self.heads("k", x, K, out=f), self.heads("v", x, V)
        log_i, log_f = self.gate("i", x, ZEROS), FORGETS[self.forget](self.gate("f", x, rising))
        y, after = mlstm(q * K**-0.5, k, v, log_i, log_f, past, *marks(ctx), self.implementation)
        y = self.head_norm(y, bias=False, eps=1e-6) * nn.sigmoid(self.heads("o", x, V))
        return self.close(y), None if state is None else after

    def gate(self, name: str, x: Array, start: nn.initializers.Initializer) -> Array:
        """One a head, wide; at the start the same for all tokens."""
        f = wide(self.dtype)
        gate = dense(self.n_heads, ("embed", "heads"), f, name, init=ZEROS)(x.astype(f))
        gate = gate + self.weight(f"{name}_bias", start, (self.n_heads,), ("heads",))
        return gate if self.gate_cap is None else self.gate_cap * jnp.tanh(gate / self.gate_cap)

    def init_state(self, batch: int, max_len: int) -> State:
        K, V = self.sides
        return dict(
            h=jnp.zeros((batch, self.n_heads, K, V + 1), wide(self.dtype)),
            m=jnp.zeros((batch, self.n_heads), wide(self.dtype)),
        )

    def state_bytes(self, length: int) -> int:
        K, V = self.sides
        return self.n_heads * (K * (V + 1) + 1) * jnp.dtype(wide(self.dtype)).itemsize
