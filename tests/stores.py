"""Small prepared sets of pairs of texts."""

import numpy as np

Arrays = dict[str, np.ndarray]


def texts(n: int, rng: np.random.Generator, longest: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """n texts of printable bytes, one after another, and where each begins."""
    sizes = rng.integers(5, longest, n)
    return rng.integers(32, 127, sizes.sum(), dtype=np.uint8), np.cumsum([0, *sizes])


def papers(n: int) -> Arrays:
    out, rng = {}, np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for i in (1, 2):
            out[f"{split}_text{i}"], out[f"{split}_starts{i}"] = texts(n, rng)
        out[f"{split}_labels"] = (np.arange(n) % 3 == 0).astype(np.uint8)
    return out


def articles(n: int) -> Arrays:
    rng = np.random.default_rng(1)
    text, starts = texts(3 * n, rng)
    out = {"text": text, "starts": starts}
    for i, split in enumerate(("train", "validation", "test")):
        first = n * i + np.arange(n)
        out[f"{split}_pairs"] = np.stack([first, (first + 1) % (3 * n)], axis=1).astype(np.int32)
        out[f"{split}_labels"] = (np.arange(n) % 2).astype(np.uint8)
    return out


def stores() -> dict[str, Arrays]:
    return {"lra_aan": papers(25), "wiki_links": articles(25)}
