"""Pathfinder's images: snakes of paddles that grow and keep clear of each other, many at once.

Two long snakes grow by turns, a paddle each, from seeds a set distance apart; if either comes to an end too early both
are begun anew. Shorter ones, the distractors, follow as long as there is room. What is taken is a number from 0 to 255
for each pixel. A paddle may end where, on a circle about the pivot before it, there is room, and the less it turns the
likelier it does; three ends are tried. A snake does not keep clear of its own last paddle, on which the next one
follows.

The published generator lets some more pass, and so does this one: a long snake keeps clear of all of the other one but
its newest paddle; distractors keep clear of all but the first long snake's last paddle, and their own first paddles lie
a pixel off where they were seen to fit.
"""

from typing import NamedTuple

import numpy as np

from data.paddles import DEGREES, FULL, LAWS, ONE, TAKEN, Paddles, Sprites, free_seats, paddles

TRIES = 3  # of a paddle's end, and of a seed
DISTRACTOR_TRIES = 5
DEAD_END = FULL * ONE // 10_000  # ends that weigh less than this in all are none
LEAST_FREE = 0.01  # of all pixels, for a distractor to be begun
SLOTS = {32: 512, 64: 256, 128: 64, 256: 16}  # attempts at two long snakes that are made side by side


class Canvas(NamedTuple):
    """What is taken in n images: [n, W * W]."""

    taken: np.ndarray  # uint8
    near: np.ndarray  # uint8, where a paddle must not end

    def of(self, rows: np.ndarray) -> "Canvas":
        """A copy of some images."""
        return Canvas(*(layer[rows] for layer in self))

    def put(self, rows: np.ndarray, other: "Canvas") -> None:
        for layer, new in zip(self, other, strict=True):
            layer[rows] = new


class Snakes(NamedTuple):
    """Snakes of P paddles in some images; a place is a pixel's number in a canvas, row by row."""

    row: np.ndarray  # [A] the image
    places: np.ndarray  # [A, P] of the paddles: the first one's tail, the others' heads
    turns: np.ndarray  # [A, P] their directions


class Drawn(NamedTuple):
    """Images, and what is known of them."""

    images: np.ndarray  # uint8 [n, side, side]
    labels: np.ndarray  # [n] whether both markers are on one snake
    tips: np.ndarray  # [n, 2, 2, 2] of both long snakes the first and the last pixel (down, right)
    markers: np.ndarray  # [n, 2, 2] the two of them that are marked
    snakes: tuple[Snakes, ...]  # the two long ones, then the distractors there was room for


def blank(t: Paddles) -> Canvas:
    """One image where only the border is taken."""
    layers = []
    for free in (t.law.padding, t.law.padding + t.margin):
        layer = np.full((t.width, t.width), FULL, np.uint8)
        layer[t.edge + free : -t.edge - free, t.edge + free : -t.edge - free] = 0
        layers.append(layer.reshape(1, -1))
    return Canvas(*layers)


def occupy(t: Paddles, canvas: Canvas, row: np.ndarray, place: np.ndarray, turn: np.ndarray) -> None:
    """Takes what one paddle [A] in each of these images keeps free."""
    at = (row * t.width**2 + place)[:, None]
    for layer, sprites in ((canvas.taken.reshape(-1), t.taken), (canvas.near.reshape(-1), t.near)):
        pixels = sprites.offsets.take(turn, axis=0)
        pixels += at
        layer[pixels] = np.maximum(layer.take(pixels), sprites.values.take(turn, axis=0))


def follow(
    t: Paddles,
    canvas: Canvas,
    row: np.ndarray,
    pivot: np.ndarray,
    place: np.ndarray,
    turn: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """After each last paddle [A] one more, where there is room for it: which found it, pivot, place, direction.

    The last paddle of those that did is taken from now on.
    """
    base = row * t.width**2
    pivot = pivot + t.step[turn]
    ends = t.ahead.offsets.take(turn, axis=0)
    ends += (base + pivot)[:, None]
    chances = t.ahead.values.take(turn, axis=0)
    chances *= FULL - canvas.near.reshape(-1).take(ends)
    np.cumsum(chances, axis=1, out=chances)
    total = chances[:, -1]
    taken, place_after, turn_after = canvas.taken.reshape(-1), np.empty_like(pivot), np.full_like(turn, -1)
    left = (total >= DEAD_END).nonzero()[0]
    for _ in range(TRIES):
        if not left.size:
            break
        draws = (rng.random(left.size) * total[left]).astype(np.int32)
        pick = (chances.take(left, axis=0) <= draws[:, None]).sum(1)
        end, turned = ends[left, pick], t.ahead_turns[turn[left], pick]
        pixels = t.core.offsets.take(turned, axis=0)
        pixels += end[:, None]
        clear = (taken.take(pixels) < t.core.values.take(turned, axis=0)).all(1)
        place_after[left], turn_after[left] = end, np.where(clear, turned, -1)
        left = left[~clear]
    found = (turn_after >= 0).nonzero()[0]
    occupy(t, canvas, row[found], place[found], turn[found])
    return found, pivot[found], (place_after - base)[found], turn_after[found]


def within(t: Paddles, tails: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Whether first paddles, from these pixels [..., 2] on, have head and pivot in the image."""
    bounds = t.roomy[turns]
    inside = (tails >= bounds[..., 0, :]) & (tails < bounds[..., 1, :])
    return inside[..., 0] & inside[..., 1]


def two_seeds(t: Paddles, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """First paddles of the two long snakes, for n attempts or fewer: pixels [A, 2, 2] and directions [A, 2]."""
    turns, around = rng.integers(DEGREES, size=(n, 1 + TRIES)), rng.integers(DEGREES, size=(n, TRIES))
    # Any seat of a direction is as likely.
    pick = (rng.random(n) * t.seat_counts[turns[:, 0]]).astype(np.int64) + t.seat_starts[turns[:, 0]]
    tails = np.empty((n, 1 + TRIES, 2), np.int64)
    tails[:, 0] = t.seats.take(pick, axis=0)
    tails[:, 1:] = np.rint(tails[:, :1] + t.aside[around])
    fit = within(t, tails, turns)
    good = (fit[:, 0] & fit[:, 1:].any(1)).nonzero()[0]
    both = np.zeros((good.size, 2), np.int64)
    both[:, 1] = 1 + fit[good, 1:].argmax(1)
    good = good[:, None]
    return tails[good, both], turns[good, both]


def long_pairs(t: Paddles, contour: int, n: int, rng: np.random.Generator) -> tuple[Canvas, Snakes, Snakes]:
    """Two snakes of `contour` paddles in each of n images: the first n attempts that succeed.

    Few do, so a new one takes the slot of one that has failed. All that succeed take as long, so none is preferred.
    """
    S, last, empty = SLOTS[t.law.side], 2 * (contour - 1), blank(t)
    canvas = Canvas(*(np.repeat(layer, S, axis=0) for layer in empty))
    step = np.full(S, -1)  # paddles that have followed; -1: nothing is here
    # Of the paddles as they come, now of one snake, now of the other: the one before is two back.
    pivots, places, turns = np.zeros((3, S, 2 * contour), np.int64)
    pivot, place, turn = (array.reshape(-1) for array in (pivots, places, turns))
    made, count = [], 0
    while count < n:
        idle = (step < 0).nonzero()[0]
        if idle.size:
            tails, directions = two_seeds(t, idle.size, rng)
            idle = idle[: len(tails)]
            canvas.put(idle, empty)
            step[idle], turns[idle, :2] = 0, directions
            places[idle, :2] = (tails + t.edge) @ (t.width, 1)
            pivots[idle, :2] = (tails + t.first[directions, 1] + t.edge) @ (t.width, 1)

        row = (step >= 0).nonzero()[0]
        at = 2 * contour * row + step[row]
        found, *new = follow(t, canvas, row, pivot[at], place[at], turn[at], rng)
        step[row] = -1
        row, at = row[found], at[found]
        step[row] = at - 2 * contour * row + 1
        pivot[at + 2], place[at + 2], turn[at + 2] = new

        done = (step == last).nonzero()[0]
        if done.size:
            occupy(t, canvas, done, places[done, -1], turns[done, -1])
            made.append((*canvas.of(done), places[done], turns[done]))
            step[done] = -1
            count += done.size
    taken, near, places, turns = (np.concatenate(arrays)[:n] for arrays in zip(*made, strict=True))
    one, two = (Snakes(np.arange(n), places[:, i::2], turns[:, i::2]) for i in range(2))
    return Canvas(taken, near), one, two


def one_of(free: np.ndarray, draw: float) -> np.ndarray | None:
    """The pixel (down, right) so far, from 0 to 1, through the free ones of a square; None: there is none."""
    ends = np.count_nonzero(free, axis=1).cumsum()
    number = int(draw * ends[-1])
    if not ends[-1]:
        return None
    y = int(ends.searchsorted(number, side="right"))
    before = int(ends[y - 1]) if y else 0
    return np.array([y, free[y].nonzero()[0][number - before]])


def seated(t: Paddles, canvas: Canvas, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The images where a first paddle of some direction fits, where, by pixel, and that direction."""
    e, side = t.edge, t.law.side
    taken = canvas.taken.reshape(-1, t.width, t.width)[:, e : e + side, e : e + side] > TAKEN
    left = np.flatnonzero(np.count_nonzero(taken, axis=(1, 2)) <= (1 - LEAST_FREE) * side**2)
    rows, tails, turns = [], [], []
    for _ in range(TRIES):
        again = []
        draws = zip(left, rng.integers(DEGREES, size=left.size), rng.random(left.size), strict=True)
        for row, turn, draw in draws:
            tail = one_of(free_seats(taken[row], t.fits[turn]), draw)
            if tail is None:
                continue
            if within(t, tail, turn):
                rows.append(row)
                tails.append(tail)
                turns.append(turn)
            else:
                again.append(row)
        left = np.array(again, np.int64)
    return np.array(rows, np.int64), np.array(tails, np.int64).reshape(-1, 2), np.array(turns, np.int64)


def distractor(t: Paddles, canvas: Canvas, length: int, rng: np.random.Generator) -> Snakes:
    """One short snake in each image where there is room, which it takes; a few tries each."""
    none = np.empty((0, length), np.int64)
    made, left = [Snakes(none[:, 0], none, none)], np.arange(len(canvas.taken))
    for _ in range(DISTRACTOR_TRIES):
        if not left.size:
            break
        trial = canvas.of(left)
        row, tails, turn = seated(t, trial, rng)
        pivot = (tails + t.first[turn, 1] + t.edge) @ (t.width, 1)
        places, turns = ((tails + t.edge) @ (t.width, 1))[:, None], turn[:, None]
        for _ in range(length - 1):
            found, pivot, place, turn = follow(t, trial, row, pivot, places[:, -1], turns[:, -1], rng)
            row = row[found]
            places, turns = np.column_stack([places[found], place]), np.column_stack([turns[found], turn])
        occupy(t, trial, row, places[:, -1], turns[:, -1])
        canvas.put(left[row], trial.of(row))
        made.append(Snakes(left[row], places, turns))
        left = np.delete(left, row)
    return Snakes(*(np.concatenate(arrays) for arrays in zip(*made, strict=True)))


def paint(light: np.ndarray, sprites: Sprites, at: np.ndarray, kinds: np.ndarray, contrast: int) -> None:
    """Draws sprites of these kinds at places of a flat canvas; where there is light, the brighter stays."""
    np.maximum.at(light, (at[:, None] + sprites.offsets[kinds]).ravel(), (contrast * sprites.values[kinds]).ravel())


def draw(side: int, margin: int, contour: int, n: int, rng: np.random.Generator) -> Drawn:
    """n images with two snakes of `contour` paddles each, and distractors of a third of that."""
    law, t = LAWS[side], paddles(side, margin)
    canvas, one, two = long_pairs(t, contour, n, rng)
    short = contour // 3
    others = [distractor(t, canvas, short, rng) for _ in range(law.distractor_paddles // short)]

    light = np.zeros(n * t.width**2, np.int64)
    long_contrast = law.snake_contrast * law.paddle_contrast // 100
    for snakes, contrast in ((one, long_contrast), (two, long_contrast), *((s, law.snake_contrast) for s in others)):
        at = snakes.row[:, None] * t.width**2 + snakes.places
        paint(light, t.drawn, at.ravel(), snakes.turns.ravel(), contrast)

    labels, begin, row = rng.integers(2, size=n), rng.integers(2, size=n), np.arange(n)
    ends = np.stack([snakes.places[:, [0, -1]] for snakes in (one, two)], axis=1)  # [n, 2, 2]
    marked = np.stack([ends[row, begin, 0], ends[row, np.where(labels == 1, begin, 1 - begin), 1]], axis=1)
    paint(light, t.marker, (row[:, None] * t.width**2 + marked).ravel(), np.zeros(2 * n, np.int64), 100)

    inside = slice(t.edge, t.edge + side)
    light = light.reshape(n, t.width, t.width)[:, inside, inside]
    top = light.max((1, 2), keepdims=True)
    images = ((2 * FULL * light + top) // (2 * top)).astype(np.uint8)  # the brightest pixel is white
    tips, markers = (np.stack(np.divmod(places, t.width), axis=-1) - t.edge for places in (ends, marked))
    return Drawn(images, labels, tips, markers, (one, two, *others))
