"""BigBird: a window, tokens that see all, and random blocks."""

from model.mixers.sparse import Sparse
from model.ops.mask import CAUSAL, Mask
from model.ops.patterns import BigBird as BigBirdMask
from model.settings import Count, Length, Seed, Whole


class BigBird(Sparse):
    """Attention of blocks to near ones, to the first, which also see all, and to random ones (arXiv:2007.14062).

    The paper's ITC: global tokens are the sequence's own, here the first blocks of a document. Which random blocks a
    block sees must not change when a document grows, so each draws from those before it; both ways, the drawn see it
    too. All heads share the draws. Of packed documents it is found out at run time which tiles are seen.
    """

    block: Length = 64  # tokens
    first_blocks: Whole = 1  # that see all and that all see
    near_blocks: Count = 2  # a block sees those less than this far away; 2: its neighbours
    random_blocks: Whole = 3  # drawn by every block
    seed: Seed = 0  # of the draws

    @property
    def masks(self) -> tuple[Mask, ...]:
        seen = BigBirdMask(self.block, self.first_blocks, self.near_blocks, self.random_blocks, self.seed)
        return (seen & CAUSAL if self.causal else seen,)
