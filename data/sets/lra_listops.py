"""ListOps as Long Range Arena released it: expressions of MIN, MAX, MED and SM over digits, and their values."""

import numpy as np

from data.listops import CLOSE, MIN, TOKENS, ZERO, ListOps
from data.prepared import Writer
from data.sets.lra import archive
from data.sets.reading import Files
from data.sets.release import Release
from data.sets.tables import Texts, columns, each, rows

SPLITS = {"train": "train", "val": "validation", "test": "test"}
IDS = {token.encode(): i for i, token in enumerate(TOKENS)}


def parse(cells: list[bytes]) -> tuple[np.ndarray, int]:
    """Token ids and the value. Parentheses are the binary form's, and say nothing that the brackets do not."""
    source, target = columns(cells, 2)
    words = source.translate(None, b"()").split()
    unknown = next((word for word in words if word not in IDS or word == b"<pad>"), None)
    if unknown is not None:
        raise ValueError(f"it has {unknown[:20]!r}, which is no token; tokens are {' '.join(TOKENS[1:])}")
    ids = np.fromiter(map(IDS.__getitem__, words), np.uint8, len(words))
    depth = np.cumsum(np.where(ids == CLOSE, -1, ids >= MIN))
    if len(ids) < 2 or depth[-1] != 0 or (depth[:-1] < 1).any():
        raise ValueError("its brackets do not make one expression")
    if depth.max() >= ListOps.max_depth or len(ids) >= ListOps.max_length:
        levels, tokens = ListOps.max_depth, ListOps.max_length - 1
        raise ValueError(
            f"it has {depth.max() + 1} levels and {len(ids)} tokens; the law is up to {levels} and {tokens}"
        )
    if len(target) != 1 or not target.isdigit():
        raise ValueError(f"its value is {target[:20]!r}, not a digit")
    if (follows := value(ids)) != int(target):
        raise ValueError(f"its value is {int(target)}, where the expression gives {follows}")
    return ids, int(target)


def median(args: list[int]) -> int:
    """Rounded down."""
    ordered, n = sorted(args), len(args)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) // 2


OPERATORS = (min, max, median, lambda args: sum(args) % 10)


def value(ids: np.ndarray) -> int:
    """Of one expression, with a stack."""
    waiting, args = [], []
    for token in ids.tolist():
        if token < MIN:
            args.append(token - ZERO)
        elif token < CLOSE:
            waiting.append((token, args))
            args = []
        elif args:
            given, (operator, args) = args, waiting.pop()
            args.append(OPERATORS[operator - MIN](given))
        else:
            raise ValueError("it has an operator without arguments")
    return args[0]


def convert(files: Files, writer: Writer) -> None:
    for name, entry in each(files, r"basic_(train|val|test)\.tsv", tuple(SPLITS)):
        split, values = SPLITS[name], []
        tokens = Texts(writer, f"{split}_tokens", f"{split}_starts")
        for ids, value in rows(entry, parse, header=b"Source\tTarget"):
            tokens.append(ids)
            values.append(value)
        tokens.finish()
        writer.append(f"{split}_values", np.array(values, np.uint8))


LISTOPS = Release(
    "lra_listops",
    "ListOps of Long Range Arena, 96,000, 2,000 and 2,000 expressions.",
    (archive("listops-1000"),),
    convert,
    rows={"train_values": 96_000, "validation_values": 2000, "test_values": 2000},
)
