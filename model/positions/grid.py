"""Positions in two dimensions: of patches, or pixels, that a row holds line by line."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from model.errors import UserError
from model.positions.position import Position
from model.positions.rotary import LAYOUTS, angles, inverse_frequencies, turn_pairs
from model.settings import Length, Positive, above


@dataclass(frozen=True)
class Grid:
    """Where an image lies in a row: behind the vectors in front, line by line, and before a text."""

    columns: int | None = None  # None: there is no image
    rows: int | None = None  # None: it goes on to the end of the row
    front: int = 0  # vectors before it: one if a class is read off the first


def coordinates(positions: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The line and the column of each position, and whether it has any: what stands in front of the grid has not.

    A text behind the image goes on from its larger side, the same in both coordinates, as in Qwen2-VL
    (https://arxiv.org/abs/2409.12191).
    """
    at = positions - grid.front
    line, column = at // grid.columns, at % grid.columns
    if grid.rows is not None:
        behind = at - grid.rows * grid.columns
        further = max(grid.rows, grid.columns) + behind
        line, column = (jnp.where(behind >= 0, further, inside) for inside in (line, column))
    return line, column, at >= 0


class OnGrid(Position):
    """What positions in two dimensions share: a grid, of the task's image or, where it brings none, of the user's."""

    columns: Length | None = None  # of the grid; None: as many as the task's image has patches in a line
    grid: Any = Grid()  # by whoever builds the model

    relative: ClassVar[bool] = False
    on_grid: ClassVar[bool] = True

    def coordinates(self, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        columns, name = self.grid.columns or self.columns, type(self).__name__.lower()
        if columns is None:
            raise UserError(
                f"position {name!r} needs the columns of a grid, and this task brings no image; set "
                f"model.{name}.columns, or use position {self.flat}"
            )
        if self.columns not in (None, columns):
            raise UserError(
                f"model.{name}.columns is {self.columns}, and the image has {columns} patches in a line; closest: None"
            )
        return coordinates(positions, replace(self.grid, columns=columns))


class SinCos2D(OnGrid):
    """Fixed sines and cosines added to the embeddings, half of the width for lines, half for columns.

    As in MAE and plain ViT baselines (https://arxiv.org/abs/2205.01580). What stands in front of the grid gets nothing.
    """

    theta: Annotated[float, above(1)] = 10_000.0
    amplitude: Positive = 1.0  # as large as patches are once embedded

    flat: ClassVar[str] = "sinusoidal"

    def embed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        D = x.shape[-1]
        if D % 4:
            near = max(4, round(D / 4) * 4)
            raise UserError(
                f"sincos2d has four waves a frequency, so model.width must be divisible by 4, not {D}; closest: {near}"
            )
        line, column, placed = self.coordinates(positions)
        inverse = inverse_frequencies(D // 2, self.theta)
        turns = [angles(one, inverse, self.dtype) for one in (line, column)]
        waves = jnp.concatenate([wave(turn) for turn in turns for wave in (jnp.sin, jnp.cos)], axis=-1)
        return x + jnp.where(placed[..., None], self.amplitude * waves, 0).astype(x.dtype)


class Axial(OnGrid):
    """Axial rotary positions: half of a head's pairs turn with the line, half with the column.

    As in https://arxiv.org/abs/2403.13298, whose base is 100. What stands in front of the grid is not turned.
    """

    theta: Annotated[float, above(1)] = 100.0
    layout: Literal[*LAYOUTS] = "half"  # which dims are a pair: (i, i + K/2), or (2i, 2i + 1)

    needs_attention: ClassVar[bool] = True
    flat: ClassVar[str] = "rope"

    def check(self, head_dim: int) -> None:
        if head_dim % 4:
            near = max(4, round(head_dim / 4) * 4)
            raise UserError(
                f"axial turns as many pairs by the line as by the column, so the head dim must be divisible by 4, "
                f"not {head_dim}; closest: {near}"
            )

    def rotate_queries(self, q: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(q, positions)

    def rotate_keys(self, k: jax.Array, positions: jax.Array, span: int) -> jax.Array:
        return self.rotate(k, positions)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        self.check(x.shape[-1])
        line, column, placed = self.coordinates(positions)
        inverse = inverse_frequencies(x.shape[-1] // 2, self.theta)
        turns = [angles(jnp.where(placed, one, 0), inverse, self.dtype) for one in (line, column)]
        angle = jnp.concatenate(turns, axis=-1)[..., None, :]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return turn_pairs(x.astype(sin.dtype), sin, cos, self.layout).astype(x.dtype)
