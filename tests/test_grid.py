"""Positions in two dimensions: sines and cosines of lines and columns, and axial rotary ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from model.positions import Axial, SinCos2D
from model.positions.grid import Grid, coordinates
from model.positions.rotary import LAYOUTS
from tests.places import at, embed, keys, queries, random


def flat(row: int, column: int, grid: Grid) -> int:
    return grid.front + row * grid.columns + column


@pytest.mark.quick
def test_a_row_is_read_line_by_line_behind_what_stands_in_front():
    line, column, placed = coordinates(jnp.arange(7), Grid(columns=3, rows=2, front=1))
    np.testing.assert_array_equal(placed, [False] + [True] * 6)
    np.testing.assert_array_equal(line[1:], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(column[1:], [0, 1, 2, 0, 1, 2])


@pytest.mark.quick
@pytest.mark.parametrize("grid", [Grid(columns=3, rows=2), Grid(columns=2, rows=3, front=1)], ids=str)
def test_a_text_goes_on_from_the_larger_side(grid):
    line, column, _ = coordinates(grid.front + 6 + jnp.arange(3), grid)
    np.testing.assert_array_equal(line, [3, 4, 5])
    np.testing.assert_array_equal(column, [3, 4, 5])


@pytest.mark.quick
def test_half_of_the_width_waves_with_the_line_half_with_the_column():
    """Against the formula, in float64, number by number."""
    D, grid = 12, Grid(columns=4, rows=3, front=1)
    found = embed(SinCos2D(grid=grid, amplitude=0.5), np.ones((1, 13, D), np.float32), at(*range(13)))[0]
    np.testing.assert_array_equal(found[0], 1)  # the vector in front
    for place in range(12):
        waves = []
        for one in divmod(place, 4):
            speeds = [one / 10_000 ** (i / 3) for i in range(3)]
            waves += [np.sin(s) for s in speeds] + [np.cos(s) for s in speeds]
        np.testing.assert_allclose(found[place + 1], 1 + 0.5 * np.asarray(waves), atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("front", [0, 1])
def test_axial_scores_know_offsets_of_lines_and_columns_alone(layout, front):
    grid = Grid(columns=9, rows=9, front=front)
    position, (q, k) = Axial(grid=grid, layout=layout), random(2, 1, 1, 1, 16)

    def score(query, key):
        return float(np.vdot(queries(position, q, at(flat(*query, grid))), keys(position, k, at(flat(*key, grid)))))

    for key in ((1, 2), (4, 0)):
        moved = [score((key[0] + 3 + i, key[1] + 1 + j), (key[0] + i, key[1] + j)) for i in (0, 1) for j in (0, 5)]
        np.testing.assert_allclose(moved, moved[0], atol=1e-4)
    assert abs(score((4, 4), (3, 4)) - score((4, 4), (4, 3))) > 1e-3, "lines and columns are not the same"


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
def test_axial_turns_the_first_half_of_the_pairs_with_the_line(layout):
    """By hand: pair i of each axis turns by theta^(-2i / (K/2)) a step; what stands in front does not turn."""
    K, grid = 8, Grid(columns=5, rows=5, front=1)
    x = random(1, 3, 1, K)
    turned = queries(Axial(grid=grid, layout=layout), x, at(0, 1 + 5 * 3, 1 + 2))[0, :, 0]
    np.testing.assert_array_equal(turned[0], x[0, 0, 0])
    pairs = [(i, i + K // 2) if layout == "half" else (2 * i, 2 * i + 1) for i in range(K // 2)]
    for place, (line, column) in ((1, (3, 0)), (2, (0, 2))):
        angles = [line, line / 10, column, column / 10]  # theta 100: speeds 1 and 100^(-1/2)
        for (a, b), angle in zip(pairs, angles, strict=True):
            z = complex(*x[0, place, 0, [a, b]]) * np.exp(1j * angle)
            np.testing.assert_allclose(turned[place, [a, b]], [z.real, z.imag], atol=1e-6)


@pytest.mark.quick
def test_without_a_grid_they_are_refused():
    x = random(1, 2, 1, 8)
    with pytest.raises(UserError, match=r"'axial' needs the columns of a grid, .*set model.axial.columns, or .* rope"):
        queries(Axial(), x, at(0, 1))
    with pytest.raises(UserError, match=r"'sincos2d' needs the columns .*set model.sincos2d.columns, or .* sinusoidal"):
        embed(SinCos2D(), x[:, :, 0], at(0, 1))
    with pytest.raises(UserError, match=r"model.width must be divisible by 4, not 6; closest: 8"):
        embed(SinCos2D(columns=2), x[:, :, 0, :6], at(0, 1))
