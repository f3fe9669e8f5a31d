"""From a config's model section to a model; what does not go together is told before anything is compiled."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from model.asked import Asked, Image
from model.backbone import Backbone
from model.block import Block
from model.contract import Mixer
from model.encoder_decoder import EncoderDecoder
from model.errors import UserError, choose, closest
from model.heads import ClassHead, LabelHead, TokenHead, ValueHead
from model.inputs import input_for, n_values, patch_grid
from model.mixers import MIXERS
from model.mixers.cross_attention import CrossAttention
from model.mlps import MLPS, mlp_width
from model.mlps.experts import Experts
from model.mlps.mlp import FORMS, MLP
from model.positions import POSITIONS, Position
from model.positions.grid import Grid
from model.seq2seq import Seq2Seq, Settings
from model.sequence import SequenceModel
from model.settings import Section, defaults, section
from model.stack import Stack
from model.towers import CosineHead, PairHead, TowerInput

Model = SequenceModel | EncoderDecoder | Seq2Seq

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float64": jnp.float64}


# Sections that a model's kind brings.
KIND_SECTIONS = {"seq2seq": Settings}

INSIDE = [name for name, position in POSITIONS.items() if position.needs_attention]


@dataclass(frozen=True)
class Entry:
    """What a name in `model.mixers` stands for; a name of the user's own has these in its section, and its mixer's."""

    mixer: Literal[*MIXERS] = "attention"
    position: Literal["none", *INSIDE] | None = None  # acts inside this mixer alone; None: `model.position` does
    mlp: Literal[*MLPS] | None = None  # behind this mixer; None: `model.mlp`


def entry(c: Mapping[str, Any], name: str) -> Entry:
    given = c.get(name, {})
    if "mixer" not in given:
        return Entry(name)
    return Entry(**{field.name: given.get(field.name) for field in fields(Entry)})


def used(mixers: tuple[str, ...], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Every name whose section a model reads: those of `mixers`, and what its kind has besides."""
    if given.get("kind") == "encoder_decoder":
        return (*mixers, *given["encoder_mixers"], "cross_attention")
    return tuple(mixers)


def declared(mixers: tuple[str, ...], position: str, given: Mapping[str, Any] = MappingProxyType({})) -> Section:
    """The config sections that these choices bring; `given` has the model's kind, and the sections of the user's own
    names, with their choices."""
    found = {}
    for name in used(mixers, given):
        one = entry(given, name)
        found[name] = section(choose("mixer", one.mixer, MIXERS), without=Mixer)
        if one.mixer != name:
            found[name] = section(Entry) | found[name] | of_position(one.position or "none")
    if "experts" in mlps(given, used(mixers, given)):
        found["experts"] = section(Experts, without=MLP)
    if (kind := given.get("kind")) in KIND_SECTIONS:
        found[kind] = section(KIND_SECTIONS[kind])
    return found | of_position(position)


def mlps(c: Mapping[str, Any], mixers: tuple[str, ...]) -> list[str]:
    """The MLP behind each mixer."""
    return [entry(c, name).mlp or c.get("mlp", "none") for name in mixers]


def of_position(name: str) -> Section:
    own = section(choose("position", name, POSITIONS), without=Position)
    return {name: own} if own else {}


def sections(
    mixers: tuple[str, ...], position: str, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """The same with their defaults."""
    found = defaults(declared(mixers, position, given))
    for name in used(mixers, given):
        found[name] |= {key: value for key, value in asdict(entry(given, name)).items() if key in found[name]}
    return found


def build(config: Mapping[str, Any], asked: Asked) -> Model:
    """The model that a config's model section describes, for what a task asks."""
    return choose("model kind", config["kind"], KINDS)(config, with_vocabulary(config, asked))


def with_vocabulary(config: Mapping[str, Any], asked: Asked) -> Asked:
    """What a task asks of a model that may have more tokens than the task."""
    own = config.get("vocab_size") or asked.vocab_size
    if own < asked.vocab_size:
        raise UserError(
            f"model.vocab_size {own} is less than the task's {asked.vocab_size}; allowed: 0, or from "
            f"{asked.vocab_size} on; closest: {asked.vocab_size}"
        )
    return replace(asked, vocab_size=own)


def stack(c: Mapping[str, Any], asked: Asked) -> SequenceModel:
    """Layers of mixers. Wherever a task asks, they answer."""
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
    check(c, c["mixers"])
    if c["tied"] and not asked.n_classes and asked.inputs and not asked.values:
        raise UserError(
            "model.tied is True, and no matrix embeds the tokens that this task asks for: its inputs are real numbers; "
            "closest: False"
        )
    if has_cls(c, asked) and c["causal"]:
        raise UserError("pool 'cls' reads the first position, which sees nothing in a causal model; use mean or last")
    c = with_grid(c, asked)
    backbone = backbone_of(c, c["mixers"], c["layers"], causal=c["causal"])
    backbone = partial(backbone, cls=has_cls(c, asked))
    if asked.labels:
        head = partial(LabelHead, **shared_by_heads(c), n_classes=asked.n_classes)
    elif asked.values:
        head = partial(ValueHead, **shared_by_heads(c), n_values=n_values(asked.inputs, c["patch"]))
    elif asked.classifies:
        head = partial(ClassHead, **shared_by_heads(c), n_classes=asked.n_classes, pool=c["pool"])
    else:
        head = token_head(c, asked)
    return SequenceModel(input_for(c, asked, dtype_of(c)), backbone, head)


def towers(c: Mapping[str, Any], asked: Asked) -> SequenceModel:
    """The layers of a stack over each row of a pair, and a head that compares what comes of both."""
    if not asked.pair:
        raise UserError(
            "model.kind 'towers' reads pairs of rows, and this task's stand alone; allowed: tasks of pairs, such as "
            "matching; closest: stack"
        )
    one = stack(c, replace(asked, pair=False, n_classes=asked.n_classes or 2))
    shared = {key: value for key, value in one.head.keywords.items() if key != "n_classes"}
    head = partial(PairHead, n_classes=asked.n_classes) if asked.n_classes else CosineHead
    return one.clone(input=partial(TowerInput, **one.input.keywords), head=partial(head, **shared))


def has_cls(c: Mapping[str, Any], asked: Asked) -> bool:
    """Whether a vector stands in front of each row, for a class to be read off it."""
    return asked.classifies and c["pool"] == "cls"


def with_grid(c: Mapping[str, Any], asked: Asked) -> Mapping[str, Any]:
    """The same model section, in which positions in two dimensions know how the task's image lies in a row."""
    image, grid = asked.image or asked.inputs, Grid(front=int(has_cls(c, asked)))
    if isinstance(image, Image):
        rows, columns = patch_grid(image, c["patch"])
        grid = replace(grid, rows=rows, columns=columns)

    def placed(section: Mapping[str, Any]) -> dict[str, Any]:
        on_grid = {name for name in section if name in POSITIONS and POSITIONS[name].on_grid}
        return {**section, **{name: {**section[name], "grid": grid} for name in on_grid}}

    return placed(c) | {name: placed(c[name]) for name in c["mixers"] if name in c}


def encoder_decoder(c: Mapping[str, Any], asked: Asked) -> EncoderDecoder:
    """Layers that read a source both ways, and layers that write its target and attend to what was read."""
    needs_source("encoder_decoder", asked, closest="arch=attention")
    if not c["causal"]:
        raise UserError(
            "model.causal is False, and a decoder writes forward; allowed: True, the encoder reads both ways"
        )
    reading = c["encoder_mixers"] or c["mixers"]
    check(c, (*c["mixers"], *c["encoder_mixers"]))
    check_reads_both_ways(c, reading)
    model = EncoderDecoder(
        vocab_size=asked.vocab_size,
        width=c["width"],
        encoder=backbone_of(c, reading, c["encoder_layers"] or c["layers"], causal=False),
        decoder=backbone_of(c, c["mixers"], c["layers"], causal=True, attends=True),
        head=token_head(c, asked),
        source=asked.source,
        target=asked.tail,
        embed_scale=c["embed_scale"],
        dtype=dtype_of(c),
    )
    if asked.source and model.sees_ahead:
        raise UserError("the decoder reads its own answers, and a prefix lets it see the next; allowed: prefix 0")
    return model


def backbone_of(
    c: Mapping[str, Any], mixers: tuple[str, ...], layers: int, causal: bool, attends: bool = False
) -> Callable[..., Backbone]:
    """Layers that cycle over mixers; `attends`: to a memory as well."""
    blocks = tuple(block(c, name, causal, attends) for name in mixers)
    if c["depth_init"]:
        branches = sum(len(blocks[i % len(blocks)](parent=None).sublayers) for i in range(layers))
        blocks = tuple(partial(one, init_scale=branches**-0.5) for one in blocks)
    return partial(
        Backbone,
        width=c["width"],
        stack=partial(Stack, blocks=blocks, layers=layers, scan=c["scan"], remat=c["remat"]),
        position=position_of(c, c["position"]),
        bias_heads=bias_heads(c, mixers),
        norm=c["norm"],
        norm_eps=c["norm_eps"],
        embed_norm=c["embed_norm"],
        dropout=c["dropout"],
        dtype=dtype_of(c),
    )


def bias_heads(c: Mapping[str, Any], mixers: tuple[str, ...]) -> int:
    """Heads of the layers that share the position's bias; 0: they do not."""
    for name in mixers:
        own = entry(c, name).position
        if own is not None and position_of(c[name], own)(parent=None).shares:
            raise UserError(
                f"model.{name}.{own}.shared is True; allowed: False, layers share model.position's bias alone"
            )
    if not position_of(c, c["position"])(parent=None).shares:
        return 0
    each = {name: c[name]["n_heads"] for name in mixers if shares_position(c, name)}
    if len(set(each.values())) > 1:
        raise UserError(f"model.{c['position']}.shared needs as many heads in every layer, and n_heads are {each}")
    return next(iter(each.values()), 0)


def shares_position(c: Mapping[str, Any], name: str) -> bool:
    """Whether `model.position` acts inside the mixer of that name."""
    one = entry(c, name)
    return MIXERS[one.mixer].softmax and one.position is None


def shared_by_heads(c: Mapping[str, Any]) -> dict[str, Any]:
    """What every head takes of a config."""
    return dict(norm=c["norm"] if c["final_norm"] else "none", norm_eps=c["norm_eps"], dtype=dtype_of(c))


def token_head(c: Mapping[str, Any], asked: Asked) -> Callable[..., TokenHead]:
    logits = dict(
        tied=c["tied"],
        bias=c["unembed_bias"],
        map_to=c["head_map"],
        scale=c["logit_scale"],
        soft_cap=c["logit_cap"],
    )
    return partial(TokenHead, **shared_by_heads(c), **logits, vocab_size=asked.vocab_size)


def block(c: Mapping[str, Any], name: str, causal: bool, attends: bool = False) -> Callable[..., Block]:
    """A layer with the mixer of that name, or what the user calls so; `attends`: and with attention to a memory."""
    shared = dict(width=c["width"], causal=causal, dtype=dtype_of(c))
    given, one = c.get(name, {}), entry(c, name)
    cls = MIXERS[one.mixer]
    settings = {key: given[key] for key in section(cls, without=Mixer) if key in given}
    if cls.softmax:
        own = one.position is not None
        settings["position"] = position_of(given, one.position) if own else position_of(c, c["position"])
    sublayers = [("mixer", partial(cls, **shared, **settings))]
    if attends:
        sublayers.append(("cross_attention", partial(CrossAttention, **shared, **c["cross_attention"])))
    kind = one.mlp or c["mlp"]
    if mlp := MLPS[kind]:
        own = c.get(kind, {}) if kind == "experts" else {}
        hidden = mlp_width(own.get("kind", kind), c["width"], c["mlp_width"], c["mlp_multiple"])
        bias = {} if c["mlp_bias"] is None else dict(bias=c["mlp_bias"])
        sublayers.append(("mlp", partial(mlp, **shared, hidden=hidden, **own, **bias)))
    return partial(
        Block,
        sublayers=tuple(sublayers),
        norm=c["norm"],
        norm_eps=c["norm_eps"],
        norm_order=c["norm_order"],
        residual=c["residual"],
        branch_scale=c["branch_scale"],
        parallel=c["parallel"],
        dropout=c["dropout"],
        dtype=dtype_of(c),
    )


def dtype_of(c: Mapping[str, Any]) -> Any:
    """Of activations; JAX would take float32 for a float64 that it was not told to allow."""
    if c["dtype"] == "float64" and not jax.config.jax_enable_x64:
        raise UserError("model.dtype 'float64' needs JAX_ENABLE_X64=1 in the environment; closest: float32")
    return DTYPES[c["dtype"]]


def position_of(c: Mapping[str, Any], name: str) -> Callable[..., Position]:
    """A position encoding with the settings that a section has for it."""
    return partial(POSITIONS[name], **c.get(name, {}))


def seq2seq(c: Mapping[str, Any], asked: Asked) -> Seq2Seq:
    """A recurrent reader of a source, and a writer of its target."""
    if c["mixers"] or c["position"] != "none":
        raise UserError(
            f"model.kind 'seq2seq' takes no mixers and no position, and was given {tuple(c['mixers'])} and "
            f"{c['position']!r}; closest: arch=seq2seq"
        )
    needs_source("seq2seq", asked, closest="arch=gru")
    if c["width"] < 2:
        raise UserError(f"model.width {c['width']} must be at least 2: one for each direction of the reader")
    return Seq2Seq(
        vocab_size=asked.vocab_size,
        width=c["width"] // 2,  # for each direction, so that an annotation has the width of a stack's vectors
        target=asked.tail,
        dropout=c["dropout"],
        dtype=dtype_of(c),
        source=asked.source,
        **c["seq2seq"],
    )


KINDS = {"stack": stack, "towers": towers, "encoder_decoder": encoder_decoder, "seq2seq": seq2seq}


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


def check(c: Mapping[str, Any], names: tuple[str, ...]) -> None:
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


def check_reads_both_ways(c: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses, by name, what cannot stand in an encoder."""
    both = [name for name, mixer in sorted(MIXERS.items()) if not (mixer.forward_only or mixer.reads_memory)]
    for name in names:
        if MIXERS[entry(c, name).mixer].forward_only:
            near = closest(entry(c, name).mixer, both) or "; closest: attention"
            raise UserError(
                f"{name!r} runs forward only, and an encoder reads both ways; set model.encoder_mixers to some of "
                f"{', '.join(both)}{near}"
            )
        inside = entry(c, name).position or c["position"]
        if MIXERS[entry(c, name).mixer].softmax and POSITIONS[inside].causal_only:
            raise UserError(
                f"position {inside!r} is for causal layers, and an encoder reads both ways; closest: "
                f"{'rope' if inside == 'xpos' else 'none'}"
            )
    for kind in mlps(c, names):
        if MLPS[kind] and MLPS[kind](parent=None, width=1).forward_only:
            raise UserError(f"mlp {kind!r} looks back only, and an encoder reads both ways; closest: swiglu")


# Parameters outside the mixers: norms, biases and embeddings are not decayed.
SHARED_GROUPS = dict.fromkeys(("scale", "bias", "embedding", "cls", "mask", "unembed_bias"), "no_decay")


def group_rules(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(pattern of a parameter's path, optimizer group); a path that none matches is in the group `decay`."""
    rules = [(rf"(.*/)?{name}", group) for name, group in SHARED_GROUPS.items()]
    sides = {"": config["mixers"]}
    if config["kind"] == "encoder_decoder":
        sides = {"encoder/": config["encoder_mixers"] or config["mixers"], "decoder/": config["mixers"]}
    entries = [entry(config, name) for mixers in sides.values() for name in mixers]
    for position in {config["position"]: None} | {one.position or "none": None for one in entries}:
        rules += [(rf"(.*/)?position/{name}", group) for name, group in POSITIONS[position].groups.items()]
    for side, mixers in sides.items():
        for i, (name, kind) in enumerate(zip(mixers, mlps(config, mixers), strict=True)):
            mlp = MLPS[kind]
            of_mlp = mlp(parent=None, width=1).groups if mlp else {}
            for part, groups in (("mixer", MIXERS[entry(config, name).mixer].groups), ("mlp", of_mlp)):
                for last, group in groups.items():
                    rules.append((rf"{side}stack/(layers|rest)/block_{i}/{part}/{re.escape(last)}", group))
    return rules
