"""Block-sparse attention by a table of blocks that is written out."""

from typing import ClassVar

import numpy as np

from model.errors import UserError
from model.mixers.sparse import Sparse
from model.ops.mask import CAUSAL, Mask
from model.ops.patterns import Table
from model.positions.position import Position
from model.settings import Length, Name


class BlockSparse(Sparse):
    """Which blocks of queries see which blocks of keys is any square table, a row for each block of queries.

    Beyond the table it goes on along its diagonal: the block after the last row's sees what the last row does, one
    block on, and what the table has at its corners is not seen again. So a token sees as many blocks in a longer row.
    """

    block: Length = 64  # tokens
    pattern: Name = "1000;1100;0110;1011"  # rows of 0 and 1, split by semicolons

    label: ClassVar[str] = "block_sparse"

    @property
    def masks(self) -> tuple[Mask, ...]:
        table = Table(self.block, tuple(self.pattern.split(";")))
        return (table & CAUSAL if self.causal else table,)

    def check(self, position: Position) -> None:
        super().check(position)
        table = Table(self.block, tuple(self.pattern.split(";"))).table
        if not table.diagonal().all():
            row = int(np.argmin(table.diagonal()))
            raise UserError(f"pattern {self.pattern!r} hides block {row} from itself; put 1 at all of its diagonal")
        if self.causal and np.triu(table, 1).any():
            row, column = np.argwhere(np.triu(table, 1))[0]
            raise UserError(
                f"pattern {self.pattern!r} lets block {row} see block {column}, which comes later; "
                f"put 0 above the diagonal, or set model.causal=False"
            )
