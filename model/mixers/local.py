"""Local attention: blocks that do not overlap."""

from model.mixers.sparse import Sparse
from model.ops.mask import CAUSAL, Mask
from model.ops.patterns import Chunk
from model.settings import Length


class Local(Sparse):
    """A token sees its own block of the document, as in Long Range Arena (https://arxiv.org/abs/2011.04006).

    Nothing passes from one block to another, however many layers there are.
    """

    block: Length = 64  # tokens

    @property
    def masks(self) -> tuple[Mask, ...]:
        return (Chunk(self.block) & CAUSAL if self.causal else Chunk(self.block),)
