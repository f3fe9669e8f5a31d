"""The Sparse Transformer's attention (https://arxiv.org/abs/1904.10509): two patterns that heads take turns in.

A token reaches any other in two steps, one of each pattern. With a stride near the root of the length n, a token sees
about that many in each, and all of them n^1.5.
"""

from typing import ClassVar

from model.errors import UserError
from model.mixers.sparse import Sparse
from model.ops.mask import CAUSAL, Band, Mask
from model.ops.patterns import Chunk, Columns, Dilated
from model.positions.position import Position
from model.settings import Length


class Strided(Sparse):
    """Even heads see the last `stride` tokens and themselves; odd heads every `stride`-th token before."""

    stride: Length = 64  # best near the root of the length

    work: ClassVar[float | None] = 1.5

    @property
    def masks(self) -> tuple[Mask, ...]:
        n, ahead = self.stride, 0 if self.causal else None
        return Band(n, 0 if self.causal else n), Dilated(n, None, ahead)


class Fixed(Sparse):
    """Even heads see their own stretch of the document; odd heads the last few tokens of every stretch.

    Those few sum their stretch up for all that come later. A token of an odd head also sees itself, which the paper
    does not say: in a document's first stretch it would else see nothing.
    """

    stride: Length = 64  # tokens of a stretch; best near the root of the length
    summary: Length = 8  # how many at its end all others see

    work: ClassVar[float | None] = 1.5

    @property
    def masks(self) -> tuple[Mask, ...]:
        own = Chunk(self.stride)
        return own & CAUSAL if self.causal else own, Columns(self.stride, self.summary, 0 if self.causal else None)

    def check(self, position: Position) -> None:
        super().check(position)
        if self.summary > self.stride:
            raise UserError(
                f"model.fixed.summary {self.summary} is more than model.fixed.stride {self.stride}; "
                f"allowed: up to the stride; closest: {self.stride}"
            )
