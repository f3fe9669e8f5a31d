"""Pathfinder as Long Range Arena released it: pictures of dashed curves, and whether the two dots are on one.

    pathfinderN/{curv_baseline,curv_contour_length_9,curv_contour_length_14}/{imgs/K/sample_I.png,metadata/K.npy}

The metadata, in spite of their name, are texts: a line names an image and, fourth, its label. Rows stand in the order
of K, then of the lines. An image without a byte, of which the release has one, is left out, and that is said.
"""

import functools
import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.prepared import Writer
from data.sets.lra import archive
from data.sets.reading import Entry, Files, lines
from data.sets.release import Release
from model.errors import UserError

DIFFICULTIES = {"curv_baseline": "easy", "curv_contour_length_9": "intermediate", "curv_contour_length_14": "hard"}
LARGEST = 1 << 20  # bytes of a picture


def convert(side: int, files: Files, writer: Writer) -> None:
    top = f"pathfinder{side}/({'|'.join(DIFFICULTIES)})"
    labels, sizes = {}, {}  # (difficulty, K) -> [(image, label)]; image -> bytes
    for match, entry in files.matching(rf"{top}/(?:metadata/(\d+)\.npy|(imgs/\d+/[^/]+\.png))"):
        if match[2]:
            labels[match[1], int(match[2])] = list(named(entry))
        else:
            sizes[match[1], match[3]] = entry.size
    places = {}
    for difficulty, name in DIFFICULTIES.items():
        rows = [row for key in sorted(labels) if key[0] == difficulty for row in labels[key]]
        if not rows:
            raise UserError(f"pathfinder{side}/{difficulty} is not in {files.where}")
        for image, _ in rows:
            if (difficulty, image) not in sizes:
                raise UserError(f"pathfinder{side}/{difficulty}/{image} is in the metadata but not in {files.where}")
            if not sizes[difficulty, image]:
                writer.note(f"pathfinder{side}/{difficulty}/{image} is empty and left out")
        kept = [(image, label) for image, label in rows if sizes[difficulty, image]]
        places |= {(difficulty, image): (name, i) for i, (image, _) in enumerate(kept)}
        writer.append(f"{name}_labels", np.array([label for _, label in kept], np.uint8))
        writer.fill(f"{name}_images", np.uint8, (len(kept), side, side))
    for match, entry in files.matching(rf"{top}/(imgs/\d+/[^/]+\.png)"):
        if (match[1], match[2]) in places:
            name, i = places[match[1], match[2]]
            writer.filled[f"{name}_images"][i] = picture(entry, side)


def named(entry: Entry) -> Iterator[tuple[str, int]]:
    """Images and labels of a file of metadata."""
    for number, line in lines(entry):
        words = line.split()
        if len(words) < 4 or words[3] not in (b"0", b"1"):
            raise UserError(f"{entry.where} row {number} is {line[:60]!r}; its fourth word is to be the label, 0 or 1")
        yield f"{words[0].decode('ascii', 'replace')}/{words[1].decode('ascii', 'replace')}", int(words[3])


def picture(entry: Entry, side: int) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(entry.read(LARGEST)), formats=["PNG"]) as image:
            if image.size != (side, side):
                sides = " x ".join(map(str, image.size))
                raise UserError(f"{entry.where} has {sides} pixels; an image of this set has {side} x {side}")
            return np.asarray(image.convert("L"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{entry.where} is no whole PNG ({error})") from None


def release(side: int, rows: dict[str, int]) -> Release:
    return Release(
        f"lra_pathfinder{side}",
        f"Pathfinder of Long Range Arena at {side} x {side}, three difficulties of 200,000 pictures.",
        (archive(f"pathfinder{side}"),),
        functools.partial(convert, side),
        rows=rows,
        passes=2,
    )


# How many: LRA's configs of 32 and 128 (160,000 + 20,000 + 20,000); S4's loader names the empty one.
PATHFINDERS = tuple(release(side, {"hard_labels": 200_000} if side in (32, 128) else {}) for side in (32, 64, 128, 256))
