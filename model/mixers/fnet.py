"""FNet: a Fourier transform in the place of attention."""

from typing import ClassVar, Literal

import jax

from model.contract import Context, State
from model.mixers.whole_row import WholeRow
from model.ops.fourier import IMPLEMENTATIONS
from model.settings import Positive


class FNet(WholeRow):
    """Tokens mixed by a transform without parameters (https://arxiv.org/abs/2105.03824).

    The real part of the discrete Fourier transform over the width and over the length of each document.
    """

    scale: Positive | Literal["unitary"] = 1.0  # factor on the transform; unitary: it keeps the size of its input
    implementation: Literal[*IMPLEMENTATIONS] | None = None  # None picks

    last: ClassVar[str] = ""

    def __call__(self, x: jax.Array, ctx: Context, state: State = None) -> tuple[jax.Array, State]:
        self.check(state)
        transform = IMPLEMENTATIONS[self.implementation or "fft"]

        def run(_, x, n):
            y = transform(x, n)
            if self.scale == "unitary":
                tokens = x.shape[1] if n is None else n.astype(y.dtype)[:, None, None]
                return y / (tokens * self.width) ** 0.5
            return self.scale * y

        return self.mixed(run, (), x, ctx).astype(self.dtype), None
