"""The paddles of Pathfinder's snakes: what they look like, what they keep free, how one follows another.

The law is that of the generator behind Long Range Arena's images (https://github.com/drewlinsley/pathfinder, snakes.py
and snakes2.py; Linsley et al., 2018, https://arxiv.org/abs/1805.08315). Its places are whole pixels and its directions
are whole degrees, or from one whole pixel to another: a finite number of them, so all that it computes with angles is
tabulated here once and as whole numbers. Doubles decide only how a table is rounded, and none of them comes close to
where that would change (tests/test_pathfinder.py), so images are the same bytes everywhere.

Shape letters: O directions (360 degrees, then the K of a circle), K places of a circle, C those of them that one
direction leads to, W side of a canvas, which is the image with an edge all around.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

DEGREES = 360
FULL = 255  # a pixel that is all white, or all taken
ONE = 1 << 16  # what the largest weight of a direction is
TAPS = 1 << 14  # what the taps of a filter add up to
TAKEN = FULL * 3 // 10  # a first paddle lies where no more than this is taken
OVERLAP = FULL * 18 // 10  # two paddles overlap if somewhere what both take adds up to this
FAINT = FULL // 50  # what is taken no more than this is free to end a paddle in
SCALE = 2  # pixels are drawn in as many parts a side


class Law(NamedTuple):
    """How images of one side are drawn; lengths in pixels, `thickness` and `radius` in half ones, contrasts in %."""

    side: int
    padding: int  # kept free along the border
    margins: tuple[int, ...]  # kept free around a paddle; one of them in each image
    seed_distance: int  # between the first paddles of the two long snakes
    radius: int  # of a marker
    length: int  # of a paddle
    thickness: int  # of a paddle
    continuity: float  # the larger, the straighter
    distractor_paddles: int  # in all distractors
    snake_contrast: int
    paddle_contrast: int


# The changes to the generator's defaults in lra_benchmarks/data/pathfinder.py of
# https://github.com/google-research/long-range-arena, and the defaults of snakes2_wrapper.py where it names none.
LAWS = {
    32: Law(32, 1, (1,), 7, 3, 2, 1, 1.0, 20, 200, 75),
    64: Law(64, 1, (1,), 12, 5, 5, 2, 1.8, 22, 80, 100),
    128: Law(128, 1, (2, 3), 20, 6, 5, 3, 1.8, 35, 90, 100),
    256: Law(256, 22, (3,), 27, 10, 5, 4, 1.8, 30, 100, 100),
}


class Sprites(NamedTuple):
    """A few pixels for each direction: offsets in a canvas and values, [O, P]; short ones repeat a pixel of theirs."""

    offsets: np.ndarray
    values: np.ndarray


class Paddles(NamedTuple):
    """All tables of one law and margin."""

    law: Law
    margin: int
    edge: int  # pixels of the canvas around the image
    width: int  # W
    first: np.ndarray  # [360, 2, 2] from a first paddle's place to its head and to its pivot (down, right)
    roomy: np.ndarray  # [360, 2, 2] the least place where both are in the image, and the one past the last
    step: np.ndarray  # [O] from one pivot to the next
    circle: np.ndarray  # [K] from a pivot to where the paddle may end
    weights: np.ndarray  # [O, K] how likely each end is, from 0 to ONE
    ahead: Sprites  # [O, C] of each direction those ends that are likely at all; values: how likely
    ahead_turns: np.ndarray  # [O, C] the directions of paddles that end there
    drawn: Sprites  # light
    taken: Sprites  # what a paddle keeps free, as far as it matters to others
    near: Sprites  # what it keeps free of others' ends
    core: Sprites  # those pixels of `taken` that matter when two overlap; values: what the other may not reach
    fits: tuple[tuple[tuple[int, int], ...], ...]  # of each degree the pixels that must be free for a first paddle
    marker: Sprites
    aside: np.ndarray  # [360, 2] from the first seed to the second, not yet rounded
    seats: np.ndarray  # [P, 2] where the first seed may lie, degree by degree
    seat_counts: np.ndarray  # [360] of each degree how many
    seat_starts: np.ndarray  # [360] of each degree its first


def rounded_sines() -> np.ndarray:
    """Directions (down, right) `[360, 2]` of the whole degrees; 0, 1/2 and 1 are exact."""
    angles = [math.radians(degree) for degree in range(DEGREES)]
    return np.array([(round(math.sin(a), 12), round(math.cos(a), 12)) for a in angles])


def circle_places(radius: int) -> np.ndarray:
    """The pixels `[K, 2]` on a circle about one: where its points, one pixel apart, round down to; each once."""
    angles = [k / radius for k in range(math.ceil(2 * math.pi * radius))]
    return np.unique(np.floor([(radius * math.sin(a), radius * math.cos(a)) for a in angles]).astype(np.int64), axis=0)


def raw_weights(units: np.ndarray, ends: np.ndarray, continuity: float) -> np.ndarray:
    """cos^2 of the turn times the continuity, 0 from a right angle on; [O, 2] before it, [K, 2] after it -> [O, K]."""
    turn = np.arctan2(*units.T)[:, None] - np.arctan2(*ends.T)
    turn = np.minimum(np.abs(turn), 2 * np.pi - np.abs(turn))
    return ONE * np.cos(np.minimum(turn * continuity, np.pi / 2)) ** 2


def raw_taps(n: int, out: int) -> np.ndarray:
    """Lanczos's filter, three lobes a side, that makes `out` pixels of `n`: [out, n]."""
    scale = n / out
    x = (np.arange(n) + 0.5 - (np.arange(out)[:, None] + 0.5) * scale) / scale
    taps = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    return TAPS * taps / taps.sum(1, keepdims=True)


def shrunk(picture: np.ndarray, out: int) -> np.ndarray:
    """A square picture of whole numbers 0 to FULL, made smaller: across, then down, rounded each time."""
    taps = np.rint(raw_taps(len(picture), out)).astype(np.int64)
    for _ in range(2):
        picture = np.clip((taps @ picture.T + TAPS // 2) // TAPS, 0, FULL)
    return picture


def disc(radius: int) -> np.ndarray:
    """The offsets `[P, 2]` within a radius."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(x**2 + y**2 <= radius**2) - radius


def dilated(picture: np.ndarray, radius: int) -> np.ndarray:
    """Each pixel the largest within a radius."""
    out, (height, width) = picture.copy(), picture.shape
    room = np.pad(picture, radius)
    for y, x in disc(radius) + radius:
        np.maximum(out, room[y : y + height, x : x + width], out=out)
    return out


def stroke(reach: int, head: np.ndarray, thickness: int) -> np.ndarray:
    """A straight line from the middle of a picture, `2 reach + 1` pixels a side, to `head` (down, right) of it.

    Whole numbers alone: a pixel is of the line if it lies between both ends and if, to the side, it is at most half the
    thickness away. A thin line is measured along the axis that it leans to, so that it has one pixel for each step.
    """
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    along, across = y * head[0] + x * head[1], 2 * (y * head[1] - x * head[0])
    square = int(head @ head)
    limit = int(np.abs(head).max()) ** 2 if thickness == 1 else thickness**2 * square
    inside = np.where(across > 0, across**2 <= limit, across**2 < limit)
    return np.where((along >= 0) & (along <= square) & inside, FULL, 0)


def listed(pictures: list[np.ndarray], width: int, least: int = 1) -> Sprites:
    """The pixels of at least `least` of square pictures about their middle, as offsets in a canvas."""
    reach = len(pictures[0]) // 2
    found = [np.argwhere(picture >= least) for picture in pictures]
    most = max(map(len, found))
    found = [np.concatenate([places, np.repeat(places[:1], most - len(places), axis=0)]) for places in found]
    values = np.stack([picture[tuple(places.T)] for picture, places in zip(pictures, found, strict=True)])
    return Sprites((np.stack(found) - reach) @ (width, 1), values)


def likely(weights: np.ndarray, circle: np.ndarray) -> tuple[Sprites, np.ndarray]:
    """The ends [O, C] of a circle [K] that weigh more than nothing in [O, K], in their order, and their directions."""
    most = int((weights > 0).sum(1).max())
    which = np.argsort(weights == 0, axis=1, kind="stable")[:, :most]  # short rows end in some that weigh nothing
    return Sprites(circle[which], np.take_along_axis(weights, which, axis=1)), DEGREES + which


def bytes_of(sprites: Sprites) -> Sprites:
    return Sprites(sprites.offsets, sprites.values.astype(np.uint8))


@functools.cache
def paddles(side: int, margin: int) -> Paddles:
    """The tables of a law for one of its margins."""
    law = LAWS[side]
    length, step, radius = law.length, law.length + 2 * margin, law.length + margin
    edge = length + radius + 2 * margin + 2  # from a pivot outside the image its circle may reach so far
    width = side + 2 * edge
    ends = circle_places(radius)
    degrees = rounded_sines()
    units = np.concatenate([degrees, ends / np.sqrt((ends**2).sum(1))[:, None]])

    def moved(distance: int, back: bool = False) -> np.ndarray:
        """That far along each direction, up to the next whole pixel: [O, 2]."""
        return np.ceil(distance * (-units if back else units)).astype(np.int64)

    # A first paddle is drawn from its place on, any other from its end back.
    heads = np.concatenate([moved(SCALE * length)[:DEGREES], moved(SCALE * length, back=True)[DEGREES:]])
    kinds, kind = np.unique(heads, axis=0, return_inverse=True)
    reach = length + (law.thickness + 1) // 2 + margin
    lines = [stroke(SCALE * reach, head, law.thickness) for head in kinds]
    drawn = [shrunk(line, 2 * reach + 1) for line in lines]
    taken = [shrunk(dilated(line, SCALE * margin), 2 * reach + 1) for line in lines]
    near = [dilated(np.pad(picture, margin), margin) for picture in taken]

    def sprites(pictures: list[np.ndarray], least: int = 1) -> Sprites:
        return Sprites(*(table[kind.ravel()] for table in listed(pictures, width, least)))

    core = sprites(taken, OVERLAP - FULL)
    fits = []
    for k in kind.ravel()[:DEGREES]:
        places = np.argwhere(taken[k] == FULL) - reach + 1  # the generator's own is one pixel aside
        fits.append(tuple((int(y), int(x)) for y, x in places if max(abs(y), abs(x)) <= radius))

    room = law.radius // SCALE + 5
    y, x = np.mgrid[: 2 * (2 * room + 1), : 2 * (2 * room + 1)] - SCALE * room
    marker = shrunk(np.where(x**2 + y**2 <= law.radius**2, FULL, 0), 2 * room + 1)
    outer = np.ones((side, side), bool)
    outer[2 * law.seed_distance : -2 * law.seed_distance, 2 * law.seed_distance : -2 * law.seed_distance] = False
    seats = [np.argwhere(free_seats(outer, places)) for places in fits]
    seat_counts = np.array([len(places) for places in seats])
    assert seat_counts.min() > 0, "a first paddle of any direction has a seat"
    first = np.stack([moved(length), moved(length) + moved(radius, back=True)], axis=1)[:DEGREES]
    circle, weights = ends @ (width, 1), np.rint(raw_weights(units, ends, law.continuity)).astype(np.int32)
    ahead, ahead_turns = likely(weights, circle)
    return Paddles(
        law=law,
        margin=margin,
        edge=edge,
        width=width,
        first=first,
        roomy=np.stack([-first.min(1), side - first.max(1)], axis=1),
        step=moved(step) @ (width, 1),
        circle=circle,
        weights=weights,
        ahead=ahead,
        ahead_turns=ahead_turns,
        drawn=sprites(drawn),
        taken=bytes_of(sprites(taken, TAKEN + 1)),
        near=bytes_of(sprites(near, FAINT + 1)),
        core=bytes_of(Sprites(core.offsets, OVERLAP - core.values)),
        fits=tuple(fits),
        marker=listed([marker], width),
        aside=law.seed_distance * degrees,
        seats=np.ascontiguousarray(np.concatenate(seats)),
        seat_counts=seat_counts,
        seat_starts=seat_counts.cumsum() - seat_counts,
    )


def free_seats(taken: np.ndarray, places: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Where in a square of taken pixels a first paddle fits that needs these `places` about it.

    What is outside counts as free, as in the published generator; a last row or column may hold seats for that. The
    square is one long number, a bit a pixel, which is moved by a place at once; behind each row are bits that are free.
    """
    side, far = len(taken), max(max(abs(y), abs(x)) for y, x in places)
    width = side + far
    room = np.zeros((side, width), bool)
    room[:, :side] = taken
    square, blocked = int.from_bytes(np.packbits(room, bitorder="little").tobytes(), "little"), 0
    for y, x in places:
        by = y * width + x
        blocked |= square >> by if by >= 0 else square << -by
    kept = (blocked & ((1 << room.size) - 1)).to_bytes(-(-room.size // 8), "little")
    bits = np.unpackbits(np.frombuffer(kept, np.uint8), count=room.size, bitorder="little")
    return bits.reshape(side, width)[:, :side] == 0
