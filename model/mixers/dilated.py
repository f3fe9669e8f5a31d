"""Dilated attention: a window with gaps."""

from model.mixers.sparse import Sparse
from model.ops.mask import Mask
from model.ops.patterns import Dilated as DilatedMask
from model.settings import Length


class Dilated(Sparse):
    """A token sees every `dilation`-th one, itself included: Longformer's dilated window (arXiv:2004.05150).

    `seen` counts the tokens that it sees before it, and as many after it where it sees ahead, itself each time: it
    reaches over `seen * dilation`.
    """

    seen: Length = 64  # tokens, to one side
    dilation: Length = 4  # from one of them to the next; 1: no gaps

    @property
    def masks(self) -> tuple[Mask, ...]:
        reach = self.seen - 1
        return (DilatedMask(self.dilation, reach, 0 if self.causal else reach),)
