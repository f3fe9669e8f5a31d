"""Language byte by byte: architectures, caches, and contexts longer than those of training."""

from itertools import product

from configs import enwik8, extension, sinks
from experiments.running.runs import RunSpec
from experiments.tables import published
from experiments.tables.table import Table, over_arguments
from model.errors import choose

ARCHS = ("attention", "alibi", "window", "s4d", "mamba2", "rglru", "rwkv6", "griffin")


def enwik8_archs(scale: str) -> list[RunSpec]:
    return over_arguments("enwik8", scale, choose("scale", scale, {"small": 2, "smoke": 1, "paper": 1}), arch=ARCHS)


def heads(scale: str) -> list[RunSpec]:
    """Multi-head, grouped-query and multi-query attention, and latent vectors of several ranks."""
    H = enwik8.SIZES[scale]["heads"]
    K = enwik8.SIZES[scale]["width"] // H
    seeds = choose("scale", scale, {"small": 2, "smoke": 1})
    kinds = [("heads", H // 2**i) for i in range(H.bit_length())] + [("latent", 4 * K), ("latent", K)]
    return [
        RunSpec(f"configs/heads.py:keys={keys},n={n},size={scale}", {"seed": seed}, {"keys": keys, "n": n})
        for (keys, n), seed in product(kinds, range(seeds))
    ]


def caches(scale: str) -> list[RunSpec]:
    """One model trained, and asked to stream through every cache."""
    length, _ = sinks.SIZES[scale]
    seeds = choose("scale", scale, {"small": 2, "smoke": 1})
    named = {"all": "all", "recompute": "recompute"}
    named |= {str(n): f"{n}+{length - n}" for n in (0, 1, 2, 4, 8)}
    return [
        RunSpec(
            f"configs/sinks.py:cache={cache},size={scale}",
            {"seed": seed},
            {"cache": name},
            source=None if cache == "all" else {"cache": "all"},
        )
        for (cache, name), seed in product(named.items(), range(seeds))
    ]


def longer(scale: str) -> list[RunSpec]:
    """One model trained, and its positions scaled in every way, as it is and fine-tuned."""
    seeds = choose("scale", scale, {"small": 2, "smoke": 1})
    first = {"scaling": "none", "tuned": "no"}
    return [
        RunSpec(
            f"configs/extension.py:scaling={scaling},tuned={tuned},size={scale}",
            {"seed": seed},
            labels := {"scaling": scaling, "tuned": tuned},
            source=None if labels == first else first,
        )
        for tuned, scaling, seed in product(("no", "yes"), extension.SCALINGS, range(seeds))
    ]


TABLES = [
    Table(
        name="enwik8",
        description="the next byte of Wikipedia, bits per byte",
        runs=enwik8_archs,
        scales=("small", "smoke", "paper"),
        by=("arch",),
        across=None,
        metric="test/bits_per_byte",
        published=published.enwik8,
        note=published.ENWIK8,
    ),
    Table(
        name="heads",
        description="bits per byte with fewer key-value heads or a latent vector, as many parameters in all",
        runs=heads,
        scales=("small", "smoke"),
        by=("keys", "n"),
        across=None,
        metric="test/bits_per_byte",
        against="state_bytes",
        unpublished="the papers on fewer heads translate and summarise",
    ),
    Table(
        name="sinks",
        description="bits per byte along a long document, read through a cache of its first and last bytes",
        runs=caches,
        scales=("small", "smoke"),
        by=("cache",),
        across="length",
        metric="test/stream_bits_per_byte",
        note=published.SINKS,
        unpublished="published of Llama-2 with 7 and 13 billion parameters",
    ),
    Table(
        name="extension",
        description="rotary positions scaled for longer contexts, before and after fine-tuning, bits per byte",
        runs=longer,
        scales=("small", "smoke"),
        by=("tuned", "scaling"),
        across="length",
        metric="test/bits_per_byte",
        note=published.EXTENSION,
        unpublished="published of Llama-2 with 7 billion parameters",
    ),
]
