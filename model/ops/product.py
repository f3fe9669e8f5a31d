"""A linear map in a narrow dtype whose gradient is summed in a wide one.

Each device holds a part of a kernel's gradient, the sum over its own rows; what is added up over devices is of the
dtype it is made in, and bfloat16 would round every partial sum.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model import placement
from model.contract import wide


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: jax.Array, kernel: jax.Array, inputs: int = 1, out: Any = None) -> jax.Array:
    """`x` `[..., *I]` times `kernel` `[*I, *F]` over `inputs` axes, `[..., *F]`, multiplied in x's dtype.

    The kernel is wide. `out` is the dtype of the result, x's own unless given.
    """
    return product_forward(x, kernel, inputs, out)[0]


def product_forward(x, kernel, inputs, out):
    narrow = kernel.astype(x.dtype)
    return tensordot(x, narrow, inputs, out or x.dtype), (x, narrow)


def product_backward(inputs, out, saved, g):
    x, kernel = saved
    g, lead = g.astype(x.dtype), tuple(range(x.ndim - inputs))
    features = tuple(range(inputs - kernel.ndim, 0))
    d_x = tensordot(g, kernel, (features, features), x.dtype)
    return d_x, tensordot(x, g, (lead, lead), wide(x.dtype))


def tensordot(x: jax.Array, y: jax.Array, axes: Any, out: Any) -> jax.Array:
    """Summed in float32 at least, and rounded at most once."""
    if placement.platform() == "cpu":  # XLA's has no product of narrow arrays that is wide
        x, y = x.astype(out), y.astype(out)
    return jnp.tensordot(x, y, axes, preferred_element_type=out)


product.defvjp(product_forward, product_backward)
