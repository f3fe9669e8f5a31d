"""A product in a narrow dtype with a wide kernel, whose gradient is summed wide.

Each device holds a part of a kernel's gradient, the sum over its own rows; what is added up over devices is of the
dtype it is made in, and bfloat16 would round every partial sum.
"""

import string
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model import placement
from model.contract import wide

LARGE = 2**18  # numbers; with half as many, steps that sum over one axis took 1.05 times as long


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(spec: str, x: jax.Array, kernel: jax.Array, out: Any = None) -> jax.Array:
    """`einsum(spec, x, kernel)`, multiplied in x's dtype. The kernel is wide.

    `out` is the dtype of the result, x's own unless given.
    """
    return product_forward(spec, x, kernel, out)[0]


def linear(x: jax.Array, kernel: jax.Array, inputs: int = 1, out: Any = None) -> jax.Array:
    """The product of x `[..., *I]` and a kernel `[*I, *F]` over `inputs` axes, `[..., *F]`."""
    lead, rest = string.ascii_lowercase[: x.ndim - inputs], string.ascii_uppercase[: kernel.ndim]
    return product(f"{lead}{rest[:inputs]},{rest}->{lead}{rest[inputs:]}", x, kernel, out)


def product_forward(spec, x, kernel, out):
    # The wide kernel is kept, which is there anyway: of a narrow one, a loop over layers would keep a copy of each.
    return einsum(spec, x, kernel.astype(x.dtype), out or x.dtype), (x, kernel)


def product_backward(spec, out, saved, g):
    x, kernel = saved
    factors, of_y = spec.split("->")
    of_x, of_kernel = factors.split(",")
    g = g.astype(x.dtype)
    d_x = einsum(f"{of_y},{of_kernel}->{of_x}", g, kernel.astype(x.dtype), x.dtype)
    lead = sum(letter not in of_kernel for letter in of_x)
    if placement.one_cpu() and x.size >= LARGE and lead > 1 and of_x[:lead] == of_y[:lead]:
        # As a sum over one axis: of several, its compiler writes x anew, transposed, a number at a time.
        x, g = (array.reshape(-1, *array.shape[lead:]) for array in (x, g))
        of_x, of_y = of_x[lead - 1 :], of_y[lead - 1 :]
    return d_x, einsum(f"{of_x},{of_y}->{of_kernel}", x, g, wide(x.dtype))


def einsum(spec: str, x: jax.Array, y: jax.Array, out: Any) -> jax.Array:
    """Summed in float32 at least, and rounded at most once."""
    if placement.platform() == "cpu":  # XLA's has no product of narrow arrays that is wide
        x, y = x.astype(out), y.astype(out)
    return jnp.einsum(spec, x, y, preferred_element_type=out)


product.defvjp(product_forward, product_backward)
