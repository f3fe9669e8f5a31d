"""A stack of layers: a cycle of blocks, repeated by a scan, and the layers left over."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from model import placement
from model.block import Block
from model.contract import SOWN, Context, State
from model.errors import choose


class Cycle(nn.Module):
    """One block of each kind, in turn."""

    blocks: tuple[Callable[..., Block], ...]

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        states = []
        for i, block in enumerate(self.blocks):
            x, new = block(name=f"block_{i}")(x, ctx, None if state is None else state[i])
            states.append(new)
        return x, None if state is None else tuple(states)


KERNELS = ("ffi_call", "pallas_call")


def matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether what an operation makes is kept: products with parameters, and what kernels make, which costs as much.

    Not so the scores of dense attention, products of one token with another: those grow with the square of the length.
    """
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *_, **params)
    return kept or primitive.name in KERNELS


# What of a layer is kept for its backward pass -> the policy by which the rest is computed anew; None: nothing is.
KEPT = {"all": None, "matmuls": matmuls, "nothing": jax.checkpoint_policies.nothing_saveable}

SHALLOW = 16  # layers up to which a GPU's are unrolled


def loops(layers: int) -> bool:
    """Whether layers are looped over unless a config says so: not where a loop's copies of what it keeps take time."""
    return placement.platform() != "gpu" or layers > SHALLOW


class Stack(nn.Module):
    """`layers` blocks, cycling over the kinds. Looped or unrolled, the parameters and results are the same."""

    blocks: tuple[Callable[..., Block], ...]
    layers: int
    scan: bool | None = None  # None picks
    kept: str = "all"  # for the backward pass: a key of KEPT

    @property
    def repeats(self) -> int:
        return self.layers // len(self.blocks)

    @property
    def rest(self) -> tuple[Callable[..., Block], ...]:
        return self.blocks[: self.layers % len(self.blocks)]

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        scan = loops(self.layers) if self.scan is None else self.scan
        policy = choose("kept", self.kept, KEPT)
        cycle = Cycle if policy is None else nn.remat(Cycle, prevent_cse=not scan, policy=policy)
        looped = rest = None
        if self.repeats:
            body = nn.scan(
                cycle,
                variable_axes={"params": 0, **dict.fromkeys(SOWN, 0)},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0),
                length=self.repeats,
                unroll=1 if scan else self.repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, looped = body(self.blocks, name="layers")(x, ctx, None if state is None else state["layers"])
        if self.rest:
            x, rest = cycle(self.rest, name="rest")(x, ctx, None if state is None else state["rest"])
        return x, None if state is None else dict(layers=looped, rest=rest)

    @property
    def causal(self) -> bool:
        """Whether every layer can go on from a state."""
        return all(block(parent=None).causal for block in self.blocks)

    @property
    def sees_ahead(self) -> bool:
        """Whether a layer sees what comes later."""
        return any(block(parent=None).sees_ahead for block in self.blocks)

    def init_state(self, batch: int, max_len: int) -> State:
        def opened(blocks):
            return tuple(block(parent=None).init_state(batch, max_len) for block in blocks)

        def stacked(leaf):
            return jnp.broadcast_to(leaf, (self.repeats, *leaf.shape))

        return dict(
            layers=jax.tree.map(stacked, opened(self.blocks)) if self.repeats else None,
            rest=opened(self.rest) if self.rest else None,
        )

    def state_bytes(self, length: int, memory: int = 0) -> int:
        each = [block(parent=None).state_bytes(length, memory) for block in self.blocks]
        return self.repeats * sum(each) + sum(each[: len(self.rest)])
