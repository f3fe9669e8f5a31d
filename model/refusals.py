"""What cannot work is refused by name, before anything is built."""

from collections.abc import Mapping
from typing import Any

from model.asked import Asked
from model.entries import entry, mlps
from model.errors import UserError, choose, closest
from model.mixers import MIXERS
from model.mlps import MLPS
from model.mlps.mlp import FORMS
from model.positions import POSITIONS


def check_stack(c: Mapping[str, Any], asked: Asked) -> None:
    for key in ("encoder_mixers", "encoder_layers"):
        if c[key]:
            raise UserError(
                f"model.{key} is {c[key]!r}, and model.kind 'stack' has no encoder; closest: kind encoder_decoder"
            )
    if asked.source:
        raise UserError(
            "model.kind 'stack' reads one sequence, and this task brings a source and a target; allowed: "
            "encoder_decoder, seq2seq; closest: arch=transformer_base"
        )
    if asked.pair and not asked.n_classes:
        raise UserError(
            "model.kind 'stack' reads both rows of a pair as one, and has no vector of each to compare; closest: towers"
        )
    check_turns("layers", c["layers"], c["mixers"])
    check_layers(c, c["mixers"])
    if c["causal"]:
        check_causal(c, c["mixers"])
    if c["tied"] and not asked.n_classes and asked.inputs and not asked.values:
        raise UserError(
            "model.tied is True, and no matrix embeds the tokens that this task asks for: its inputs are real numbers; "
            "closest: False"
        )
    if asked.classifies and c["pool"] == "cls" and c["causal"]:
        raise UserError("pool 'cls' reads the first position, which sees nothing in a causal model; use mean or last")


def over_batch(c: Mapping[str, Any]) -> bool:
    """Whether norms have statistics over the tokens of a batch."""
    return c["norm"] == "batchnorm"


def check_norm(c: Mapping[str, Any], asked: Asked) -> None:
    """Refuses statistics over a batch to models that write: in training they would tell of what is yet to come."""
    answers = asked.n_classes or asked.values or asked.pair
    if over_batch(c) and (c["kind"] in ("encoder_decoder", "seq2seq") or (c["causal"] and not answers)):
        raise UserError(
            f"model.norm 'batchnorm' has statistics of later tokens too, and a causal model (model.kind {c['kind']!r}) "
            "is asked for those; allowed: rmsnorm, layernorm; closest: model.norm=layernorm"
        )


def check_towers(asked: Asked) -> None:
    if not asked.pair:
        raise UserError(
            "model.kind 'towers' reads pairs of rows, and this task's stand alone; allowed: tasks of pairs, such as "
            "matching; closest: stack"
        )


def check_encoder_decoder(c: Mapping[str, Any], asked: Asked) -> None:
    needs_source("encoder_decoder", asked, closest="arch=attention")
    if not c["causal"]:
        raise UserError(
            "model.causal is False, and a decoder writes forward; allowed: True, the encoder is bidirectional"
        )
    check_turns("layers", c["layers"], c["mixers"])
    own = "encoder_layers" if c["encoder_layers"] else "layers"
    check_turns(own, c[own], c["encoder_mixers"] or c["mixers"])
    check_layers(c, (*c["mixers"], *c["encoder_mixers"]))
    check_causal(c, c["mixers"])
    check_bidirectional(c, c["encoder_mixers"] or c["mixers"])


def check_seq2seq(c: Mapping[str, Any], asked: Asked) -> None:
    if c["mixers"] or c["position"] != "none":
        raise UserError(
            f"model.kind 'seq2seq' takes no mixers and no position, and was given {tuple(c['mixers'])} and "
            f"{c['position']!r}; closest: arch=seq2seq"
        )
    needs_source("seq2seq", asked, closest="arch=gru")
    if c["width"] < 2:
        raise UserError(f"model.width {c['width']} must be at least 2: one for each direction of the reader")


def needs_source(kind: str, asked: Asked, closest: str) -> None:
    """Refuses a task that has nothing for an encoder to read."""
    if asked.inputs or asked.image:
        raise UserError(f"model.kind {kind!r} reads token ids, and this task brings real numbers; closest: stack")
    if not asked.source and not asked.tail:
        asks = f"for one of {asked.n_classes} classes" if asked.n_classes else "at every token"
        raise UserError(
            f"model.kind {kind!r} reads a source and answers it, and this task asks {asks}; allowed: tasks with a "
            f"source, such as reverse, or that ask at the end of a row, such as selective_copying; closest: {closest}"
        )


def check_turns(key: str, layers: int, mixers: tuple[str, ...]) -> None:
    """Mixers cycle over the layers, and one that has no turn would be missed by nobody."""
    if layers < len(mixers):
        raise UserError(
            f"model.{key} is {layers}, and {len(mixers)} mixers take turns ({', '.join(mixers)}); allowed: at least "
            f"{len(mixers)}; closest: {len(mixers)}"
        )


def check_layers(c: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses what cannot work in layers of these mixers, by name."""
    if not c["mixers"]:
        raise UserError(f"model.mixers is empty; choose from {', '.join(sorted(MIXERS))}")
    mixers = [choose("mixer", entry(c, name).mixer, MIXERS) for name in names]
    for name, mixer in zip(names, mixers, strict=True):
        if entry(c, name).position is not None and not mixer.softmax:
            raise UserError(
                f"model.{name}.position is {entry(c, name).position!r}, and {entry(c, name).mixer} has no scores for "
                "it to act on; allowed: None"
            )
        if mixer.reads_memory:
            raise UserError(
                f"mixer {name!r} reads a memory, and as a mixer it is given none; allowed: "
                f"{', '.join(n for n in sorted(MIXERS) if not MIXERS[n].reads_memory)}; closest: attention, with "
                "model.kind=encoder_decoder"
            )
    without = [kind for kind in mlps(c, names) if kind not in FORMS]
    if c["mlp_bias"] is not None and without:
        raise UserError(
            f"model.mlp_bias is {c['mlp_bias']}, and mlp {without[0]!r} has no biases to choose; allowed: None"
        )
    position = choose("position", c["position"], POSITIONS)
    if position.needs_attention and not any(m.softmax for m in mixers):
        free = ", ".join(name for name, p in POSITIONS.items() if not p.needs_attention)
        raise UserError(
            f"position {c['position']!r} acts on the scores of attention, and mixers {tuple(names)} have none; "
            f"choose from {free}"
        )


def check_causal(c: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses, by name, what cannot stand where no token may see a later one."""
    for name in names:
        if MIXERS[entry(c, name).mixer].both_ways_only:
            raise UserError(
                f"{name!r} mixes whole rows and cannot be causal; set model.causal=False where the task allows it; "
                "closest mixer that can: attention"
            )


def check_bidirectional(c: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses, by name, what cannot stand in an encoder."""
    both = [name for name, mixer in sorted(MIXERS.items()) if not (mixer.forward_only or mixer.reads_memory)]
    for name in names:
        if MIXERS[entry(c, name).mixer].forward_only:
            near = closest(entry(c, name).mixer, both) or "; closest: attention"
            raise UserError(
                f"{name!r} runs forward only, and an encoder is bidirectional; set model.encoder_mixers to some of "
                f"{', '.join(both)}{near}"
            )
        inside = entry(c, name).position or c["position"]
        if MIXERS[entry(c, name).mixer].softmax and POSITIONS[inside].causal_only:
            raise UserError(
                f"position {inside!r} is for causal layers, and an encoder is bidirectional; closest: "
                f"{'rope' if inside == 'xpos' else 'none'}"
            )
    for kind in mlps(c, names):
        if MLPS[kind] and MLPS[kind](parent=None, width=1).forward_only:
            raise UserError(f"mlp {kind!r} looks back only, and an encoder is bidirectional; closest: swiglu")
