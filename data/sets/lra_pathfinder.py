"""Pathfinder as Long Range Arena released it: pictures of dashed curves, and whether the two dots are on one.

    pathfinderN/{curv_baseline,curv_contour_length_9,curv_contour_length_14}/{imgs/K/sample_I.png,metadata/K.npy}

The metadata, in spite of their name, are texts: a line names an image and, fourth, its label. Rows stand in the order
of K, then of the lines. An image without a byte, of which one is known in the release, is left out, and that is said.

A process that is killed among the pictures leaves those that it has read to the next one, which goes on from there if
every file has the size, the time and the place that it had.
"""

import functools
import hashlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.prepared import Writer
from data.sets.lra import archive
from data.sets.reading import Entry, Files, lines
from data.sets.release import Release
from model.errors import UserError

DIFFICULTIES = {"curv_baseline": "easy", "curv_contour_length_9": "intermediate", "curv_contour_length_14": "hard"}
EVERY = 10_000  # pictures after which a process that is killed need not do them again
LARGEST = 1 << 20  # bytes of a picture
Labels = dict[tuple[str, int], list[tuple[str, int]]]  # (difficulty, K) -> (image, label) as the metadata have them
Sizes = dict[tuple[str, str], tuple[int, int]]  # (difficulty, image) -> bytes, and when it was changed
HEADER = struct.Struct(">8s4x4sII")  # of a PNG: its mark, the first chunk's length and name, width, height


def convert(side: int, files: Files, writer: Writer) -> None:
    labels, sizes = listing(side, files)
    places, kept = {}, {}
    for difficulty, name in DIFFICULTIES.items():
        rows = [row for key in sorted(labels) if key[0] == difficulty for row in labels[key]]
        if not rows:
            raise UserError(f"pathfinder{side}/{difficulty} is not in {files.where}")
        for image, _ in rows:
            if (difficulty, image) not in sizes:
                raise UserError(f"pathfinder{side}/{difficulty}/{image} is in the metadata but not in {files.where}")
            if not sizes[difficulty, image][0]:
                writer.leave_out(f"{name}_labels", f"pathfinder{side}/{difficulty}/{image} is empty and left out")
        some = [(image, label) for image, label in rows if sizes[difficulty, image][0]]
        places |= {(difficulty, image): (name, i) for i, (image, _) in enumerate(some)}
        kept[name] = np.array([label for _, label in some], np.uint8)
    of = hashlib.sha256(Path(__file__).read_bytes() + repr((side, labels, sizes)).encode()).hexdigest()
    done = writer.fill(of, {f"{name}_images": (len(kept[name]), side, side) for name in kept})
    for name in kept:
        writer.append(f"{name}_labels", kept[name])
    pictures = files.matching(rf"{top(side)}/(imgs/\d+/[^/]+\.png)")
    for number, (match, entry) in enumerate(pictures, 1):
        if number > done and (match[1], match[2]) in places:
            name, i = places[match[1], match[2]]
            writer.filled[f"{name}_images"][i] = picture(entry, side)
        if number > done and number % EVERY == 0:
            writer.note_done(number)


def top(side: int) -> str:
    return f"pathfinder{side}/({'|'.join(DIFFICULTIES)})"


def listing(side: int, files: Files) -> tuple[Labels, Sizes]:
    labels, sizes, seen = {}, {}, set()
    for match, entry in files.matching(rf"{top(side)}/(?:metadata/(\d+)\.npy|(imgs/\d+/[^/]+\.png))"):
        difficulty, k, image = match.groups()
        if image:
            sizes[difficulty, image] = entry.size, entry.changed
            continue
        rows = labels[difficulty, int(k)] = []
        for number, named_image, label in named(entry):
            if (difficulty, named_image) in seen:
                raise UserError(f"{entry.where} row {number} names {named_image} a second time")
            seen.add((difficulty, named_image))
            rows.append((named_image, label))
    return labels, sizes


def named(entry: Entry) -> Iterator[tuple[int, str, int]]:
    """Rows, by their numbers, with images and labels of a file of metadata."""
    for number, line in lines(entry):
        words = line.split()
        if len(words) < 4 or words[3] not in (b"0", b"1"):
            raise UserError(f"{entry.where} row {number} is {line[:60]!r}; its fourth word is to be the label, 0 or 1")
        yield number, f"{words[0].decode('ascii', 'replace')}/{words[1].decode('ascii', 'replace')}", int(words[3])


def picture(entry: Entry, side: int) -> np.ndarray:
    content = entry.read(LARGEST)
    check_sides(entry, declared(content), side)  # first: one of many pixels is not decoded
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            check_sides(entry, image.size, side)
            return np.asarray(image.convert("L"))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{entry.where} is no whole PNG ({error})") from None


def declared(content: bytes) -> tuple[int, int] | None:
    """Width and height as the header of a PNG has them; None where there is no such header."""
    if len(content) < HEADER.size:
        return None
    mark, chunk, *sides = HEADER.unpack_from(content)
    return tuple(sides) if (mark, chunk) == (b"\x89PNG\r\n\x1a\n", b"IHDR") else None


def check_sides(entry: Entry, found: tuple[int, int] | None, side: int) -> None:
    if found is None:
        raise UserError(f"{entry.where} is no whole PNG (it has no header of one)")
    if found != (side, side):
        raise UserError(f"{entry.where} has {found[0]} x {found[1]} pixels; an image of this set has {side} x {side}")


def release(side: int) -> Release:
    return Release(
        f"lra_pathfinder{side}",
        f"Pathfinder of Long Range Arena at {side} x {side}, three difficulties of 200,000 pictures.",
        (archive(f"pathfinder{side}"),),
        functools.partial(convert, side),
        rows=ROWS.get(side, {}),
        listed={f"{name}_labels": LISTED for name in DIFFICULTIES.values()},
        passes=2,
    )


# How many: LRA's configs (lra_benchmarks/image/configs/pathfinder*, one for each size, read for every difficulty) have
# 160,000 to train, which is 80 %, and 20,000 to validate. S4's loader, which reads all of the hard ones of 32 and 128,
# names the empty one, of pathfinder32's easy ones. Whether other sizes have such is not published.
LISTED = 200_000
ROWS = {
    32: {"easy_labels": LISTED - 1, "intermediate_labels": LISTED, "hard_labels": LISTED},
    128: {"hard_labels": LISTED},
}
PATHFINDERS = tuple(map(release, (32, 64, 128, 256)))
