"""How two frameworks are compared: the same arrays in, the same values and gradients out."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch

Arrays = Mapping[str, np.ndarray]


def normal(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def agree(theirs: Callable[..., torch.Tensor], ours: Callable[..., jax.Array], arrays: Arrays, within: float = 1e-5):
    """Outputs, and the gradients of a weighted sum of them to every array, relative to their size."""
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in arrays.items()}
    out = theirs(**leaves)
    weight = np.random.default_rng(9).normal(size=tuple(out.shape)).astype(np.float32)
    (out * torch.tensor(weight)).sum().backward()

    def objective(arrays):
        y = ours(**arrays)
        return jnp.sum(y * weight), y

    given = {name: jnp.asarray(value) for name, value in arrays.items()}
    grads, y = jax.jit(jax.grad(objective, has_aux=True))(given)
    pairs = {"output": (y, out.detach())} | {name: (grads[name], leaf.grad) for name, leaf in leaves.items()}
    for name, (mine, other) in pairs.items():
        mine, other = np.asarray(mine, np.float64), other.double().numpy()
        assert mine.shape == other.shape, name
        error = np.linalg.norm(mine - other) / max(np.linalg.norm(other), 1e-30)
        assert error < within, f"{name}: {error:.2e}"
