"""AAN as Long Range Arena released it: pairs of papers, and whether the first cites the second.

A row is a label, two numbers of papers and two texts, with tabs between them, no header and no quoting. Of a text,
16,000 bytes are kept: the benchmark reads 4,000 bytes, or 4,000 characters, which take at most as many.
"""

import numpy as np

from data.prepared import Writer
from data.sets.lra import archive
from data.sets.reading import Files
from data.sets.release import Release
from data.sets.tables import Texts, columns, each, rows

SPLITS = {"train": "train", "eval": "validation", "test": "test"}
KEPT = 16_000


def parse(cells: list[bytes]) -> tuple[int, bytes, bytes]:
    label, _, _, first, second = columns(cells, 5)
    if label not in (b"0", b"1", b"0.0", b"1.0"):
        raise ValueError(f"its label is {label[:20]!r}, not 0.0 or 1.0")
    return int(label[:1]), first, second


def convert(files: Files, writer: Writer) -> None:
    for name, entry in each(files, r"new_aan_pairs\.(train|eval|test)\.tsv", tuple(SPLITS)):
        split, labels = SPLITS[name], []
        texts = [Texts(writer, f"{split}_text{i}", f"{split}_starts{i}") for i in (1, 2)]
        for label, *pair in rows(entry, parse):
            labels.append(label)
            for run, text in zip(texts, pair, strict=True):
                run.append(text[:KEPT])
        for run in texts:
            run.finish()
        writer.append(f"{split}_labels", np.array(labels, np.uint8))


AAN = Release(
    "lra_aan",
    "AAN of Long Range Arena, 147,086, 18,090 and 17,437 pairs of papers.",
    (archive("tsv_data"),),
    convert,
    rows={"train_labels": 147_086, "validation_labels": 18_090, "test_labels": 17_437},
)
