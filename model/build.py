"""From a config's model section to a model; what does not go together is told before anything is compiled."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from model.block import Block
from model.contract import Mixer
from model.errors import UserError, choose
from model.heads import SequenceModel
from model.layers import mlp_width
from model.mixers import MIXERS
from model.positions import POSITIONS, Position
from model.seq2seq import Seq2Seq
from model.settings import Section, defaults, section
from model.stack import Stack

Model = SequenceModel | Seq2Seq

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}


def declared(mixers: tuple[str, ...], position: str) -> Section:
    """The config sections that these choices bring."""
    found = {name: section(choose("mixer", name, MIXERS), without=Mixer) for name in mixers}
    own = section(choose("position", position, POSITIONS), without=Position)
    return found | ({position: own} if own else {})


def sections(mixers: tuple[str, ...], position: str) -> dict[str, dict[str, Any]]:
    """The same with their defaults."""
    return defaults(declared(mixers, position))


def build(config: Mapping[str, Any], vocab_size: int, n_classes: int = 0, tail: int = 0) -> Model:
    """The model that a config's model section describes, for what a task has: its vocabulary, classes and tail."""
    kind = choose("model kind", config["kind"], KINDS)
    return kind(config, vocab_size, n_classes, tail)


def stack(c: Mapping[str, Any], vocab_size: int, n_classes: int, tail: int) -> SequenceModel:
    """Layers of mixers. Wherever a task asks, they answer."""
    check(c, n_classes)
    dtype = DTYPES[c["dtype"]]
    position = partial(POSITIONS[c["position"]], **c.get(c["position"], {}))

    def block(name: str):
        cls = MIXERS[name]
        place = {"position": position} if hasattr(cls, "softmax") else {}
        mixer = partial(cls, width=c["width"], causal=c["causal"], dtype=dtype, **place, **c.get(name, {}))
        return partial(
            Block,
            mixer=mixer,
            norm=c["norm"],
            norm_order=c["norm_order"],
            mlp=c["mlp"],
            mlp_width=mlp_width(c["mlp"], c["width"], c["mlp_width"]),
            dropout=c["dropout"],
            dtype=dtype,
        )

    layers = partial(
        Stack,
        blocks=tuple(block(m) for m in c["mixers"]),
        layers=c["layers"],
        scan=c["scan"],
        remat=c["remat"],
    )
    return SequenceModel(
        vocab_size=vocab_size,
        width=c["width"],
        stack=layers,
        position=position,
        n_classes=n_classes,
        pool=c["pool"],
        norm=c["norm"],
        tied=c["tied"],
        dropout=c["dropout"],
        dtype=dtype,
    )


def seq2seq(c: Mapping[str, Any], vocab_size: int, n_classes: int, tail: int) -> Seq2Seq:
    """A reader of what comes before a row's tail, and a writer of the tail."""
    if c["mixers"] or c["position"] != "none":
        raise UserError(
            f"model.kind 'seq2seq' takes no mixers and no position, and was given {tuple(c['mixers'])} and "
            f"{c['position']!r}; closest: arch=seq2seq"
        )
    if not tail:
        asks = f"for one of {n_classes} classes" if n_classes else "at every token"
        raise UserError(
            f"model.kind 'seq2seq' answers at the end of a row, and this task asks {asks}; allowed: tasks that ask at "
            f"the end, such as selective_copying; closest: arch=gru"
        )
    if c["width"] < 2:
        raise UserError(f"model.width {c['width']} must be at least 2: one for each direction of the reader")
    # Half for each direction, so that an annotation, which holds both, has the width of a stack's vectors.
    return Seq2Seq(vocab_size, c["width"] // 2, tail, c["dropout"], DTYPES[c["dtype"]])


KINDS = {"stack": stack, "seq2seq": seq2seq}


def check(c: Mapping[str, Any], n_classes: int) -> None:
    """Refuses what cannot work in a stack, by name."""
    if not c["mixers"]:
        raise UserError(f"model.mixers is empty; choose from {', '.join(sorted(MIXERS))}")
    mixers = [choose("mixer", name, MIXERS) for name in c["mixers"]]
    position = choose("position", c["position"], POSITIONS)
    if position.needs_attention and not any(hasattr(m, "softmax") for m in mixers):
        free = ", ".join(name for name, p in POSITIONS.items() if not p.needs_attention)
        raise UserError(
            f"position {c['position']!r} acts on the scores of attention, and mixers {tuple(c['mixers'])} have none; "
            f"choose from {free}"
        )
    if n_classes and c["pool"] == "cls" and c["causal"]:
        raise UserError("pool 'cls' reads the first position, which sees nothing in a causal model; use mean or last")


# Parameters outside the mixers: norms, biases and embeddings are not decayed.
SHARED_GROUPS = {"scale": "no_decay", "bias": "no_decay", "embedding": "no_decay", "cls": "no_decay"}


def group_rules(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(pattern of a parameter's path, optimizer group); a path that none matches is in the group `decay`."""
    rules = [(rf"(.*/)?{name}", group) for name, group in SHARED_GROUPS.items()]
    rules += [(rf"(.*/)?position/{name}", group) for name, group in POSITIONS[config["position"]].groups.items()]
    for i, mixer in enumerate(config["mixers"]):
        for name, group in MIXERS[mixer].groups.items():
            rules.append((rf"stack/(layers|rest)/block_{i}/mixer/{re.escape(name)}", group))
    return rules
