"""Pathfinder: the tables are safe to round, snakes grow by the published law, and nothing but the curves tells."""

import itertools
import math

import numpy as np
import pytest

from data import build, pipeline
from data.kept import FixedSets
from data.paddles import (
    DEGREES,
    LAWS,
    ONE,
    OVERLAP,
    circle_places,
    free_seats,
    paddles,
    raw_taps,
    raw_weights,
    rounded_sines,
)
from data.pathfinder import FAR_APART
from data.pipeline import batch_at
from data.prepare import prepare
from data.rng import Stream
from data.snakes import Canvas, Drawn, blank, draw, follow
from model.errors import UserError
from tests import sets
from tests.sets import small
from tests.test_data import examples, same

TABLES = [(side, margin) for side, law in LAWS.items() for margin in law.margins]
RULE = [(32, 1, 14), (128, 2, 6)]  # side, margin, paddles of a long snake


@pytest.fixture(scope="module", params=RULE, ids=str)
def drawn(request) -> Drawn:
    side, margin, contour = request.param
    return draw(side, margin, contour, 48, Stream(0, "tests").at(side))


@pytest.fixture(scope="module")
def many() -> Drawn:
    """1,280 images of side 32."""
    return build("pathfinder", {}).drawn(1280, Stream(0, "tests").at(0))


def tables_of(images: Drawn):
    return paddles(*next(rule[:2] for rule in RULE if rule[0] == images.images.shape[1]))


# --- tables ---


def from_step(x: np.ndarray) -> np.ndarray:
    """How far numbers are from a whole one, those that are one left out."""
    off = np.abs(x - np.rint(x))
    return off[off > 0]


@pytest.mark.quick
@pytest.mark.parametrize("side, margin", TABLES)
def test_no_double_is_close_to_where_a_table_would_change(side, margin):
    """What is rounded, up, down or to the nearest, lies on a step exactly or far from any."""
    law, degrees = LAWS[side], rounded_sines()
    radius = law.length + margin
    ends = circle_places(radius)
    units = np.concatenate([degrees, ends / np.sqrt((ends**2).sum(1))[:, None]])
    for distance in (law.length, radius, law.length + 2 * margin, 2 * law.length):
        assert from_step(distance * units).min() > 1e-6
    assert from_step(law.seed_distance * degrees - 0.5).min() > 1e-6
    angles = [k / radius for k in range(math.ceil(2 * math.pi * radius))]
    assert from_step(np.array([(radius * math.sin(a), radius * math.cos(a)) for a in angles])).min() > 1e-6
    assert from_step(raw_weights(units, ends, law.continuity) - 0.5).min() > 1e-6
    reach, room = law.length + (law.thickness + 1) // 2 + margin, law.radius // 2 + 5
    for n, out in ((4 * reach + 1, 2 * reach + 1), (4 * room + 2, 2 * room + 1)):
        assert from_step(raw_taps(n, out) - 0.5).min() > 1e-6


def published(radius: int, angle: float, continuity: float) -> dict[tuple[int, int], float]:
    """By the formula: how likely a paddle after one of this angle ends in each pixel about the pivot."""
    weights = {}
    for k in range(math.ceil(2 * math.pi * radius)):
        y, x = math.floor(radius * math.sin(k / radius)), math.floor(radius * math.cos(k / radius))
        turn = abs(math.remainder(math.atan2(y, x) - angle, 2 * math.pi))
        weights[y, x] = math.cos(min(continuity * turn, math.pi / 2)) ** 2
    return {place: weight / sum(weights.values()) for place, weight in weights.items()}


@pytest.mark.quick
@pytest.mark.parametrize("side, margin", TABLES)
def test_a_paddle_turns_as_the_published_formula_says(side, margin):
    t, law = paddles(side, margin), LAWS[side]
    ends = circle_places(law.length + margin)
    assert np.array_equal(t.circle, ends @ (t.width, 1))
    turns = [0, 30, 101, 270, DEGREES, DEGREES + 5]
    angles = [math.radians(turn) if turn < DEGREES else math.atan2(*ends[turn - DEGREES]) for turn in turns]
    for turn, angle in zip(turns, angles, strict=True):
        want = published(law.length + margin, angle, law.continuity)
        got = dict(zip(map(tuple, ends.tolist()), t.weights[turn] / t.weights[turn].sum(), strict=True))
        assert got == pytest.approx(want, abs=2 / ONE)


@pytest.mark.quick
@pytest.mark.parametrize("side", [32, 33, 128])
def test_seats_are_where_no_place_about_them_is_taken(side):
    rng = np.random.default_rng(side)
    taken, places = rng.random((side, side)) < 0.1, tuple(map(tuple, rng.integers(-5, 6, size=(9, 2)).tolist()))
    outside = np.pad(taken, 5)
    want = [[not any(outside[5 + i + y, 5 + j + x] for y, x in places) for j in range(side)] for i in range(side)]
    assert np.array_equal(free_seats(taken, places), want) and 0 < np.sum(want) < side**2


def test_ends_are_drawn_by_their_chances():
    t, n, turn = paddles(32, 1), 6000, 40
    canvas = Canvas(*(np.repeat(layer, n, axis=0) for layer in blank(t)))
    middle = np.full(n, t.width * t.width // 2 + t.width // 2)
    found, pivot, place, turns = follow(
        t, canvas, np.arange(n), middle, middle, np.full(n, turn), Stream(0, "tests").at(0)
    )
    assert found.size == n and np.array_equal(place, pivot + t.circle[turns - DEGREES])
    want = t.weights[turn] / t.weights[turn].sum()
    share = np.bincount(turns - DEGREES, minlength=want.size) / n
    assert (np.abs(share - want) <= 4 * np.sqrt(want * (1 - want) / n)).all()
    assert (canvas.taken.reshape(n, -1) != blank(t).taken).any(1).all(), "the paddle before is taken"


# --- images ---


def owned(images: Drawn, image: int) -> list[tuple[int, int, np.ndarray]]:
    """Of one image (snake, paddle, what it takes [W * W]); 0 and 1 are the long snakes."""
    t, out = tables_of(images), []
    for number, snakes in enumerate(images.snakes):
        for row in np.flatnonzero(snakes.row == image):
            for paddle, (place, turn) in enumerate(zip(snakes.places[row], snakes.turns[row], strict=True)):
                taken = np.zeros(t.width**2, np.int64)
                taken[place + t.taken.offsets[turn]] = t.taken.values[turn]
                out.append((number, paddle, taken))
    return out


def test_snakes_keep_clear_of_each_other(drawn):
    last = drawn.snakes[0].places.shape[1] - 1

    def let_pass(one: tuple, two: tuple) -> bool:
        (snake, paddle, _), (other, later, _) = one, two
        if snake == other:
            return abs(paddle - later) <= 1
        if other < 2:
            return paddle - later in (0, 1)  # the newest paddle of the other long snake
        return later == 0 or (snake, paddle) == (0, last)

    checked = 0
    for image in range(12):
        for one, two in itertools.combinations(owned(drawn, image), 2):
            if not let_pass(one, two):
                assert (one[2] + two[2]).max() < OVERLAP, (image, one[:2], two[:2])
                checked += 1
    assert checked > 1000


def test_snakes_are_of_paddles_one_after_another(drawn):
    t = tables_of(drawn)
    pitch = t.law.length + 2 * t.margin
    for snakes in drawn.snakes:
        where = np.stack(np.divmod(snakes.places, t.width), axis=-1)
        apart = np.sqrt((np.diff(where[:, 1:], axis=1) ** 2).sum(-1))  # from head to head
        assert (np.abs(apart - pitch) <= t.margin + 2).all()
    assert all(
        (snakes.places.shape[1], snakes.row.size) == (drawn.snakes[0].places.shape[1], 48)
        for snakes in drawn.snakes[:2]
    )
    short = drawn.snakes[0].places.shape[1] // 3
    assert len(drawn.snakes) - 2 == t.law.distractor_paddles // short
    assert all(snakes.places.shape[1] == short for snakes in drawn.snakes[2:])
    assert sum(snakes.row.size for snakes in drawn.snakes[2:]) > 0.7 * 48 * (len(drawn.snakes) - 2)


def test_every_paddle_is_lit_and_the_rest_is_black(drawn):
    t, side = tables_of(drawn), drawn.images.shape[1]
    lit, near = np.zeros((2, 48, t.width, t.width), bool)
    for snakes in drawn.snakes:
        for (image, paddle), place in np.ndenumerate(snakes.places):
            row, turn = snakes.row[image], snakes.turns[image, paddle]
            middle = (t.law.length / 2) * np.array([math.sin(a := angle(t, turn)), math.cos(a)])
            y, x = np.rint(np.array(divmod(place, t.width)) + (middle if turn < DEGREES else -middle)).astype(int)
            lit[row, y, x] = True
            near[row, y - 8 : y + 9, x - 8 : x + 9] = True
    inside = slice(t.edge, t.edge + side)
    spread = drawn.images.astype(int)
    for axis, shift in itertools.product((1, 2), (-1, 1)):
        spread = np.maximum(spread, np.roll(drawn.images, shift, axis))
    assert (spread[lit[:, inside, inside]] > 40).all()
    for (image, _), (y, x) in zip(np.ndindex(48, 2), drawn.markers.reshape(-1, 2), strict=True):
        near[image, t.edge + y - 8 : t.edge + y + 9, t.edge + x - 8 : t.edge + x + 9] = True
    assert not drawn.images[~near[:, inside, inside]].any()
    assert (drawn.images.max((1, 2)) == 255).all()


def angle(t, turn: int) -> float:
    return math.radians(turn) if turn < DEGREES else math.atan2(*circle_places(t.law.length + t.margin)[turn - DEGREES])


def test_the_label_says_whether_both_dots_are_the_tips_of_one_snake(drawn):
    t = tables_of(drawn)
    for i, snakes in enumerate(drawn.snakes[:2]):
        ends = np.stack(np.divmod(snakes.places[:, [0, -1]], t.width), axis=-1) - t.edge
        assert np.array_equal(drawn.tips[:, i], ends)
    owners = (drawn.tips[:, None] == drawn.markers[:, :, None, None]).all(-1)  # [n, marker, snake, tip]
    assert owners[:, 0, :, 0].any(1).all() and owners[:, 1, :, 1].any(1).all(), "one dot begins, the other ends"
    one_snake = (owners[:, 0, :, 0] & owners[:, 1, :, 1]).any(1)
    assert np.array_equal(one_snake, drawn.labels == 1)
    assert {0, 1} == set(owners[:, 0, :, 0].argmax(1).tolist()), "either long snake is marked"


def blobs(mask: np.ndarray) -> list[np.ndarray]:
    """Connected sets of pixels."""
    left, out = {tuple(p) for p in np.argwhere(mask)}, []
    while left:
        found, edge = [], [left.pop()]
        while edge:
            y, x = edge.pop()
            found.append((y, x))
            beside = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= beside
            edge += beside
        out.append(np.array(found))
    return out


def test_there_are_two_dots_brighter_than_the_snakes():
    drawn = draw(128, 2, 6, 24, Stream(0, "tests").at(1))
    inner = ((drawn.markers > 4) & (drawn.markers < 123)).all((1, 2))
    apart = np.sqrt(((drawn.markers[:, 0] - drawn.markers[:, 1]) ** 2).sum(1)) > 9
    assert (inner & apart).sum() > 12
    for image, markers in zip(drawn.images[inner & apart], drawn.markers[inner & apart], strict=True):
        dots = blobs(image > 0.97 * 255)  # a snake has 90 %
        assert len(dots) == 2 and all(15 <= len(dot) <= 30 for dot in dots)  # of radius 3
        middles = sorted(dot.mean(0).tolist() for dot in dots)
        np.testing.assert_allclose(middles, sorted(markers.tolist()), atol=0.6)


# --- shortcuts ---


def within_chance(right: np.ndarray) -> bool:
    return abs(right.mean() - 0.5) < 4 * 0.5 / math.sqrt(right.size)


def test_labels_are_a_fair_coin_and_no_count_of_pixels_tells_them(many):
    label = many.labels == 1
    assert within_chance(label)
    for count in (many.images.astype(int).sum((1, 2)), (many.images > 0).sum((1, 2)), (many.images > 127).sum((1, 2))):
        a, b = count[label], count[~label]
        assert abs(a.mean() - b.mean()) < 4 * math.sqrt(a.var() / a.size + b.var() / b.size)


def test_a_linear_probe_of_the_pixels_finds_nothing(many):
    x, y = many.images.reshape(1280, -1) / 255.0, 2 * many.labels - 1.0
    x, half = x - x.mean(0), 800
    probe = np.linalg.solve(x[:half].T @ x[:half] + 100 * np.eye(1024), x[:half].T @ y[:half])
    assert within_chance(np.sign(x[half:] @ probe) == y[half:])
    assert (np.sign(x[:half] @ probe) == y[:half]).mean() > 0.6, "the probe is one that can fit"


def test_the_distance_of_the_dots_tells_as_little_as_the_baseline_says(many):
    apart = np.sqrt(((many.markers[:, 0] - many.markers[:, 1]) ** 2).sum(1))
    pixels, accuracy = FAR_APART[32]
    right = (apart > pixels) == many.labels
    assert abs(right.mean() - accuracy) < 4 * 0.5 / math.sqrt(right.size)
    assert build("pathfinder", {}).baselines() == {"chance": 0.5, "dots far apart": accuracy}
    assert build("pathfinder", {"difficulty": "easy"}).baselines() == {"chance": 0.5}


# --- the task ---


def test_protocols_show_the_same_pixels_and_none_is_padding():
    levels, reals = (
        batch_at(build("pathfinder", {"difficulty": "easy", "protocol": p}), 0, "test", 8, 0) for p in ("lra", "s4")
    )
    np.testing.assert_allclose(reals["inputs"][..., 0], (levels["inputs"] / 255 - 0.5) / 0.5, atol=1e-6)
    assert not {"segments", "at"} & {*levels, *reals} and (levels["inputs"] == 0).mean() > 0.3
    assert same({k: v for k, v in levels.items() if k != "inputs"}, {k: v for k, v in reals.items() if k != "inputs"})


def test_real_pixels_are_kept_as_bytes_and_come_back_bit_for_bit(monkeypatch):
    monkeypatch.setattr(pipeline, "FIXED", FixedSets(1 << 20))
    task, places = (
        build("pathfinder", {"protocol": "s4", "difficulty": "easy", "n_train": 128}),
        np.array([3, 90, 3, 7]),
    )
    for _ in range(2):
        assert same(pipeline.fixed(task, 0, "train", places), pipeline.gather(task, 0, "train", 0, places, places))
    assert 128 * 1024 <= pipeline.FIXED.bytes < 1.1 * 128 * 1024


@pytest.mark.quick
def test_either_margin_is_as_likely_and_images_stay_in_their_order(monkeypatch):
    def labelled(side, margin, contour, n, rng):
        known = np.full(n, margin)
        return Drawn(known, known, known, known, ())

    monkeypatch.setattr("data.pathfinder.draw", labelled)
    margins = build("pathfinder", {"side": 128}).drawn(4000, Stream(0, "tests").at(0)).images
    assert abs((margins == 2).mean() - 0.5) < 4 * 0.5 / math.sqrt(4000) and set(margins.tolist()) == {2, 3}
    assert np.array_equal(margins, 2 + Stream(0, "tests").at(0).integers(2, size=4000))


def test_training_may_be_fresh_for_ever():
    task = build("pathfinder", {"n_train": 0, "difficulty": "easy"})
    assert task.sizes() == {"train": None, "validation": 20_000, "test": 20_000}
    assert len({row["inputs"].tobytes() for row in examples(task, "train", 130)}) == 130


@pytest.mark.quick
def test_released_images_are_divided_by_one_permutation(tmp_path):
    sets.put(tmp_path, sets.curves(10))
    prepare(small("lra_pathfinder32"), tmp_path)
    task = build("pathfinder", {"source": "released", "root": str(tmp_path)})
    assert task.sizes() == {"train": 16, "validation": 2, "test": 2}
    stored = task.stored.arrays
    whole = {
        image.tobytes(): int(label) for image, label in zip(stored["hard_images"], stored["hard_labels"], strict=True)
    }
    seen = {}
    for split, n in task.sizes().items():
        for row in examples(task, split, n):
            seen[row["inputs"].astype(np.uint8).tobytes()] = int(row["targets"])
    assert seen == whole and len(whole) == 20
    assert batch_at(task, 0, "train", 4, 0).keys() == {"inputs", "targets", "weights"}
    assert task.baselines() == {"chance": 0.5, "majority": 0.5} and task.attributes == {}
    with pytest.raises(UserError, match=r"n_train is 5, but source='released' has its own sizes; closest: 160000, or"):
        build("pathfinder", {"source": "released", "root": str(tmp_path), "n_train": 5})


@pytest.mark.quick
def test_a_release_too_small_to_be_divided_is_refused(tmp_path):
    sets.put(tmp_path, sets.curves(4))
    prepare(small("lra_pathfinder32"), tmp_path)
    says = r"data.pathfinder has no example in its validation split \(train 8, validation 0, test 0\); a larger set"
    with pytest.raises(UserError, match=says):
        build("pathfinder", {"source": "released", "root": str(tmp_path)})


@pytest.mark.quick
def test_a_release_that_is_not_there_names_the_command(tmp_path):
    command = f"python -m data.prepare lra_pathfinder128 --root={tmp_path}"
    with pytest.raises(UserError, match=command):
        build("pathfinder", {"source": "released", "side": 128, "root": str(tmp_path)})
    assert build("pathfinder", {"root": str(tmp_path)}).length == 1024, "the law needs no files"
    with pytest.raises(UserError, match=r"data.pathfinder.side is 100; allowed: 32, 64, 128, 256; closest: 128"):
        build("pathfinder", {"side": 100})
