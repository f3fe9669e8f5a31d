"""How far back an answer reaches: gradients of the last answer by what the layers read, token by token."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model.backbone import Backbone
from model.build import Model
from train.objective import Batch, arguments

FLOOR = 1e-30  # of a norm that float32 may have rounded to 0


def last_place(batch: Batch) -> jax.Array:
    """Where each row `[B]` is asked last; where it is asked nowhere in particular, its last token."""
    if "at" in batch:
        return jnp.max(jnp.where(batch["weights"] > 0, batch["at"], 0), axis=1)
    B, L = batch["inputs"].shape[:2]
    if "segments" not in batch:
        return jnp.full(B, L - 1, jnp.int32)
    return jnp.max(jnp.where(batch["segments"] > 0, jnp.arange(L, dtype=jnp.int32), 0), axis=1)


def sensitivity(model: Model, params: Any, batch: Batch) -> jax.Array:
    """The norm `[B, L]` of the gradient of each row's last answer by each of the vectors that the layers read.

    Of an answer's logits the gradient is taken along one random direction of signs, the same for all rows and in every
    call: the mean of its square is that of the whole Jacobian's.
    """
    given = {**arguments(batch), "at": last_place(batch)[:, None]}

    def answers(change: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def changed(call, args, kwargs, context):
            if isinstance(context.module, Backbone) and context.method_name == "__call__":
                args = (change(args[0]), *args[1:])
            return call(*args, **kwargs)

        with nn.intercept_methods(changed):
            logits, _ = model.apply({"params": params}, batch["inputs"], **given)
        return logits.reshape(logits.shape[0], -1)

    read = []
    answers(lambda x: read.append(x) or x)

    def along(x: jax.Array) -> jax.Array:
        logits = answers(lambda _: x)
        return (logits * jax.random.rademacher(jax.random.key(0), logits.shape[1:], logits.dtype)).sum()

    return jnp.linalg.norm(jax.grad(along)(read[0]).astype(jnp.float32), axis=-1)
