"""A stack of layers: a cycle of blocks, repeated by a scan, and the layers left over."""

from collections.abc import Callable, Mapping
from functools import partial
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
    policy: Callable[..., bool] | None = None  # of KEPT
    prevent_cse: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        states = []
        for i, block in enumerate(self.blocks):
            if self.policy is not None:  # block by block: together they would be made anew, and held, at once
                again = nn.remat(block.func, prevent_cse=self.prevent_cse, policy=self.policy)
                block = partial(again, *block.args, **block.keywords)
            x, new = block(name=f"block_{i}")(x, ctx, None if state is None else state[i])
            states.append(new)
        return x, None if state is None else tuple(states)


def layer(params: Any, i: int) -> Any:
    """Those of one turn of the cycle: of arrays that hold all turns, or of turns that lie apart (see `apart`)."""
    return params[str(i)] if "0" in params else jax.tree.map(lambda leaf: leaf[i], nn.unbox(params))


def apart(params: Any) -> Any:
    """The parameters of a model with every layer's in arrays of their own: to go on from a state takes them so."""
    if not isinstance(params, Mapping):
        return params
    made = {name: apart(held) for name, held in params.items()}
    if "stack" in made and "layers" in made["stack"]:
        layers = made["stack"]["layers"]
        turns = len(jax.tree.leaves(layers)[0])
        made["stack"] |= {"layers": {str(i): layer(layers, i) for i in range(turns)}}
    return made


KERNELS = ("ffi_call", "pallas_call")
CHEAP = ("conv_outputs",)  # kernels that do little more than read: what they make is made anew


def matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether what an operation makes is kept: products with parameters, and what kernels make, which costs as much.

    Not so the scores of dense attention, products of one token with another: those grow with the square of the length.
    """
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *_, **params)
    return kept or (primitive.name in KERNELS and params.get("name") not in CHEAP)


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
        if state is not None and not self.is_initializing():
            return self.go_on(x, ctx, state)
        # Parameters are drawn in a loop whatever runs: unrolled, the draws of every layer would be compiled anew.
        scan = self.is_initializing() or (loops(self.layers) if self.scan is None else self.scan)
        policy = choose("kept", self.kept, KEPT)
        kept = dict(policy=policy, prevent_cse=not scan or len(self.blocks) > 1)
        if self.repeats:
            body = nn.scan(
                Cycle,
                variable_axes={"params": 0, **dict.fromkeys(SOWN, 0)},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.repeats,
                unroll=1 if scan else self.repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
                check_constancy_invariants=self.draws(ctx),
            )
            x, _ = body(self.blocks, **kept, name="layers")(x, ctx)
        if self.rest:
            x, _ = Cycle(self.rest, **kept, name="rest")(x, ctx)
        return x, state

    def draws(self, ctx: Context) -> bool:
        """Whether layers draw random numbers, and so are traced twice: draws are numbered by how often they are."""
        return self.is_initializing() or (ctx.train and any(block(parent=None).draws for block in self.blocks))

    def go_on(self, x: jax.Array, ctx: Context, state: State) -> tuple[jax.Array, State]:
        """From a state, layer after layer, each with arrays of its own: a token is written into them where they lie.

        A loop over layers would take them out of one array and put them into another, all of them for every token.
        """
        params = self.variables["params"]
        asked = [name for name in SOWN if self.is_mutable_collection(name)]
        looped, sown = [], []
        for i, past in enumerate(state["layers"]):
            variables = {"params": layer(params["layers"], i)}
            (x, after), kept = Cycle(self.blocks, parent=None).apply(variables, x, ctx, past, mutable=asked)
            looped.append(after)
            sown.append(kept)
        for name in asked if sown and sown[0] else ():
            self.put_variable(name, "layers", jax.tree.map(lambda *leaves: jnp.stack(leaves), *(s[name] for s in sown)))
        rest = ()
        if self.rest:
            x, rest = Cycle(self.rest, name="rest")(x, ctx, state["rest"])
        return x, dict(layers=tuple(looped), rest=rest)

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

        return dict(layers=tuple(opened(self.blocks) for _ in range(self.repeats)), rest=opened(self.rest))

    def state_bytes(self, length: int, memory: int = 0) -> int:
        each = [block(parent=None).state_bytes(length, memory) for block in self.blocks]
        return self.repeats * sum(each) + sum(each[: len(self.rest)])
