"""What others have published: numbers that stand beside ours, each with its source and its setting."""

from collections.abc import Mapping

from configs import extrapolation
from experiments.tables.layout import Published

Quotes = Mapping[tuple[str, ...], Published]  # (*by, across) values of a table -> number

MAMBA = "Gu and Dao 2023, Mamba (arXiv:2312.00752)"
QUICKSTART = {
    ("attention", "mqar"): Published(
        1.0,
        "Arora et al. 2023, Zoology (arXiv:2312.04927), figure 2, read off: length 64, 4 pairs,"
        " vocabulary 8192, learned positions",
    ),
    ("mamba", "selective_copying"): Published(
        0.998, f"{MAMBA}: length 4096, 16 tokens to copy, 2 layers of width 64, 400,000 steps"
    ),
    ("attention", "induction"): Published(
        1.0, f"{MAMBA}: trained and tested at length 256, rotary positions, 2 layers of width 128"
    ),
    ("mamba", "induction"): Published(1.0, f"{MAMBA}: trained and tested at length 256, 2 layers of width 64"),
    ("s4d", "induction"): Published(0.356, "Fu et al. 2022, H3 (arXiv:2212.14052): length 30, vocabulary 20, width 32"),
}


def positions(scale: str) -> Quotes:
    """Mamba's attention rows at the same multiples of the training length, which is 256 there."""
    accuracies = {
        "rope": (1.0, 0.836, 0.313, 0.184, 0.086, 0.09, 0.055),
        "xpos": (1.0, 0.996, 0.676, 0.254, 0.07, 0.09, 0.078),
    }
    setting = (
        "trained at length 256, tested at the same multiple of it, 2 layers of width 128, 409,600 steps of 8 examples"
    )
    length, _ = extrapolation.LENGTHS[scale]["induction"]
    return {
        (position, str(length * 2**i)): Published(value, f"{MAMBA}: {setting}")
        for position, values in accuracies.items()
        for i, value in enumerate(values)
    }


# Perplexities of words have no place among nats per byte, so they stand below the table.
ALIBI_TABLE = (
    "Published, in another unit: Press et al. 2021, ALiBi (arXiv:2108.12409), Table 5, perplexity of WikiText-103's"
    " words, 247M parameters, tested without overlap. ALiBi trained at 64: 28.46 at 64, 24.70 at 128, 22.88 at 256,"
    " 22.09 at 512, 21.73 at 1024, 21.59 at 2048; trained at 512: 19.73 at 512, 18.81 at 1024, 18.40 at 3072."
    " Trained at the length tested, 512: sinusoidal 20.05, rotary 20.07, T5 19.65; 3072: 18.67, 18.57, 18.01."
)


COPYING_SETTING = f"{MAMBA}: length 4096, 16 tokens to copy, 2 layers of width 64, 400,000 steps"
SELECTIVE_COPYING = {
    ("s4",): Published(0.183, f"{COPYING_SETTING}; S4 layers without gates"),
    ("mamba",): Published(0.998, COPYING_SETTING),
}


def induction_heads(scale: str) -> Quotes:
    """Mamba's table of induction heads, where it and ours were trained at the same length."""
    if scale == "smoke":
        return {}
    setting = f"{MAMBA}: trained at length 256 with 8 examples a step"
    accuracies = {
        "attention": ((1.0, 1.0, 1.0, 0.836, 0.313, 0.184, 0.086, 0.09, 0.055), "rotary, width 128, 409,600 steps"),
        "mamba": ((1.0,) * 15, "width 64, 204,800 steps"),
    }
    return {
        (arch, str(2 ** (6 + i))): Published(value, f"{setting}; {how}")
        for arch, (values, how) in accuracies.items()
        for i, value in enumerate(values)
    }


def recall(scale: str) -> Quotes:
    """Zoology's figure 2, read off by eye; its lengths and pairs are the table's columns."""
    if scale == "smoke":
        return {}
    setting = (
        "Arora et al. 2023, Zoology (arXiv:2312.04927), figure 2, read off to 0.03: vocabulary 8192, 100,000 examples,"
        " the best of four learning rates"
    )
    rwkv = {"4": (0.76, 0.93, 0.97, 0.98), "8": (0.18, 0.50, 0.75, 0.93), "16": (0.05, 0.06, 0.67, 0.79)}
    rwkv["64"] = (0.0, 0.0, None, 0.36)
    accuracies = {"attention": dict.fromkeys(rwkv, (1.0,) * 4), "rwkv": rwkv}
    return {
        (arch, width, pairs): Published(value, setting)
        for arch, columns in accuracies.items()
        for pairs, values in columns.items()
        for width, value in zip(("64", "128", "256", "512"), values, strict=True)
        if value is not None
    }


def enwik8(scale: str) -> Quotes:
    """Transformer-XL's, where ours is of its size."""
    if scale != "paper":
        return {}
    how = "12 layers, 41M parameters, with 512 bytes of memory carried from row to row"
    return {("attention",): Published(1.06, f"Dai et al. 2019, Transformer-XL (arXiv:1901.02860): {how}")}


ENWIK8 = (
    "Published, of larger models or with more context: 12 layers and 44M parameters 1.11, 64 layers and 235M 1.06"
    " (Al-Rfou et al. 2018, arXiv:1808.04444); Transformer-XL of 12 layers and 41M 1.06, of 24 layers 0.99 (Dai et al."
    " 2019, arXiv:1901.02860); Mega of 39M 1.02 (Ma et al. 2022, arXiv:2209.10655)."
)

# Perplexities of tokens have no place among bits per byte.
SINKS = (
    "A stretch ends at its length and begins where the one before ends. Published, in another unit: Xiao et al. 2023,"
    " StreamingLLM (arXiv:2309.17453), perplexity of a book of 65K tokens by Llama-2-13B: all 5641, 0+1024 5158.07,"
    " recompute 5.43, 4+1020 5.40; of 400K tokens of PG19 by Llama-2-7B with 0, 1, 2, 4, 8 first tokens in a cache of"
    " 4096: 3359.95, 11.88, 10.51, 9.59, 9.54."
)
EXTENSION = (
    "Published, in another unit: perplexity of Proof-pile by Llama-2-7B (4,096 tokens) made to read 8,192, fine-tuned,"
    " at 4,096, 8,192 and 16,384: linear 3.51, 3.34, 102.7; ntk 3.75, 3.59, 74.4; yarn 3.51, 3.36, 77.2 (Peng et al."
    " 2023, YaRN, arXiv:2309.00071, its released figures)."
)
