"""What mixers of whole rows have in common: they see every token at once, so none is causal or carries a state."""

from typing import ClassVar

import jax

from model.contract import Context, Mixer, State
from model.errors import UserError
from model.ops.each_document import Run, Tree, each_document


class WholeRow(Mixer):
    """A mixer of whole documents, each of them alone."""

    both_ways_only: ClassVar[bool] = True

    def check(self, state: State) -> None:
        if self.causal:
            raise UserError(
                f"mixer {self.label!r} mixes whole rows, and model.causal is True; allowed: False; closest for a "
                "causal model: attention"
            )
        if state is not None:
            self.init_state(0, 0)

    def mixed(self, run: Run, weights: Tree, tokens: Tree, ctx: Context) -> jax.Array:
        """`run` on each document of the rows."""
        return each_document(run, weights, tokens, ctx.segments, ctx.right_padded)

    def init_state(self, batch: int, max_len: int) -> State:
        raise UserError(
            f"mixer {self.label!r} mixes whole rows, and can carry no state from one part to the next; closest mixer "
            "that can: attention, with model.causal=True"
        )

    def state_bytes(self, length: int) -> int:
        return 0


def check_length(name: str, longest: int, length: int) -> None:
    """Refuses rows past the longest that a mixer has weights for."""
    if length > longest:
        raise UserError(
            f"length {length} is past the longest row that mixer {name!r} has weights for, {longest}; "
            f"closest: model.{name}.longest={length}"
        )
