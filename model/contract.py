"""The contract every mixer obeys: `y, state = mixer(x, ctx, state=None)`.

Shape letters, used in every signature and einsum of the project:

    B batch     L length      D width (of the model)   V vocabulary
    H heads     G key-value heads   K head dim         M cache or memory length
    E inner width of a mixer  N state size per channel C outputs of a classifier

Padding (segment 0) is skipped, wherever it stands in a row: real tokens get what they would get were the padding not
there, their predecessors are the real tokens before them, and nothing of padding reaches them, in values or in
gradients. What a mixer returns at padding means nothing. It may stand between the tokens of a document, which it does
not end: a document ends where another begins, and its number does not come back in the row.

Rows that hold one document each, with their padding behind it, may be told to be so (`right_padded`): to a mixer that
sees no later token such padding is nothing, and to one that does it is where the row ends. No state is carried then.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from model.errors import UserError
from model.settings import Dim, check_fields

State = Any  # a pytree of arrays, or None

# Collections that modules sow into, dropped unless the caller asks for one by `mutable`: what they attend to, losses
# that the training step adds to the objective's, numbers for the log, and what the parameters that are measured, not
# trained, are to be after a batch.
SOWN = ("maps", "losses", "reports", "running")
RUNNING = ("running_mean", "running_var")  # the names of such parameters


@struct.dataclass
class Context:
    """What a mixer knows about the tokens besides their vectors."""

    positions: jax.Array | None = None  # [B or 1, L] int32, within each document; None: 0, 1, 2, ... in each row
    segments: jax.Array | None = None  # [B, L] int32, 0 is padding; None: one document a row, no padding
    memory: jax.Array | None = None  # [B, M, D], another sequence to attend to
    memory_segments: jax.Array | None = None  # [B, M] int32, whose documents it belongs to, 0 is padding; None: all
    bias: Any = None  # `model.ops.scores.Bias` that the layers share, where their position encoding does
    train: bool = struct.field(pytree_node=False, default=False)
    right_padded: bool = struct.field(pytree_node=False, default=False)  # whether segments only tell where rows end


class Mixer(nn.Module):
    """Mixes information along the length: `x, y: [B, L, D]`.

    `state=None` starts from an empty past and returns None for the state. A state opened by `init_state` makes any
    split of a sequence into calls equal to one call. Fields of a subclass are its section in the config, and their
    types say what they may be.
    """

    width: Dim
    causal: bool = True
    dtype: Any = jnp.float32

    # Whether it compares tokens by scores, in which a position encoding can act; `position` then builds that.
    softmax: ClassVar[bool] = False
    # Whether it reads another sequence, the context's memory, and so is no sequence mixer on its own.
    reads_memory: ClassVar[bool] = False
    # The parameters of the linear map that comes last, behind which is only the residual stream; "": there is none.
    last: ClassVar[str] = "out"
    # Whether it can only run from the first token to the last, and so not with causal=False.
    forward_only: ClassVar[bool] = False
    # What to use where that is in the way.
    instead: ClassVar[str] = "attention or s4d"
    # Whether it mixes whole rows, and so cannot run with causal=True, nor from a state.
    both_ways_only: ClassVar[bool] = False
    # Whether it counts the tokens of a batch, and so is told of all padding.
    counts_tokens: ClassVar[bool] = False
    # How memory grows with the length: 1 linearly, 2 quadratically.
    cost: ClassVar[float] = 1
    # How work does, where that is another.
    work: ClassVar[float | None] = None
    # Last component of a parameter's path -> optimizer group (see train/optim.py); what is not named is decayed.
    groups: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Its name in the zoo: the class's, unless that is of several words."""
        return type(self).__name__.lower()

    def check_direction(self, state: State = None) -> None:
        """Refuses a direction that it does not run in, and a state where tokens see later ones."""
        if self.forward_only and not self.causal:
            raise UserError(f"{self.label} runs forward only; set model.causal=True, or use {self.instead}")
        if state is not None and not self.causal:
            raise UserError("a bidirectional model cannot carry a state; set model.causal=True to generate")

    @property
    def sees_ahead(self) -> bool:
        """Whether some token sees a later one."""
        return not self.causal

    def weight(self, name: str, init: Callable, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
        """A parameter of its own, wide, and the logical axes by which it is shared out."""
        return self.param(name, nn.with_logical_partitioning(init, axes), shape, wide(self.dtype))

    def looked_into(self) -> bool:
        """Whether the caller wants maps of what this mixer attends to: `mutable=["maps"]`."""
        return self.is_mutable_collection("maps") and not self.is_initializing()

    def init_state(self, batch: int, max_len: int) -> State:
        """An empty past for `batch` rows with room for `max_len` tokens."""
        raise NotImplementedError

    def state_bytes(self, length: int) -> int:
        """Bytes that one row's past of `length` tokens takes."""
        raise NotImplementedError


def wide(dtype: Any) -> Any:
    """The dtype for parameters, softmax and recurrences: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)
