"""From a config's model section to a model; what does not go together is told before anything is compiled."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model.asked import Asked, Image
from model.backbone import Backbone
from model.block import Block
from model.contract import Mixer
from model.encoder_decoder import EncoderDecoder
from model.entries import entry
from model.errors import UserError, choose
from model.heads import ClassHead, DecodedHead, LabelHead, TokenHead, ValueHead
from model.inputs import input_for, n_values, patch_grid
from model.mixers import MIXERS
from model.mixers.cross_attention import CrossAttention
from model.mlps import MLPS, mlp_width
from model.positions import POSITIONS, Position
from model.positions.grid import Grid
from model.refusals import check_encoder_decoder, check_norm, check_seq2seq, check_stack, check_towers, over_batch
from model.seq2seq import Seq2Seq
from model.sequence import SequenceModel
from model.settings import section
from model.stack import Stack
from model.towers import CosineHead, PairHead, TowerInput

Model = SequenceModel | EncoderDecoder | Seq2Seq

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float64": jnp.float64}


def build(config: Mapping[str, Any], asked: Asked) -> Model:
    """The model that a config's model section describes, for what a task asks."""
    kind = choose("model kind", config["kind"], KINDS)
    check_norm(config, asked)
    return kind(config, with_vocabulary(config, asked))


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
    check_stack(c, asked)
    c = with_grid(c, asked)
    backbone = backbone_of(c, c["mixers"], c["layers"], causal=c["causal"])
    backbone = partial(backbone, cls=has_cls(c, asked))
    if asked.labels:
        labels = DecodedHead if asked.from_last else LabelHead
        head = partial(labels, **shared_by_heads(c), n_classes=asked.n_classes)
    elif asked.values:
        head = partial(ValueHead, **shared_by_heads(c), n_values=n_values(asked.inputs, c["patch"]))
    elif asked.classifies:
        head = partial(ClassHead, **shared_by_heads(c), n_classes=asked.n_classes, pool=c["pool"])
    else:
        head = token_head(c, asked)
    return SequenceModel(input_for(c, asked, dtype_of(c)), backbone, head)


def towers(c: Mapping[str, Any], asked: Asked) -> SequenceModel:
    """The layers of a stack over each row of a pair, and a head that compares what comes of both."""
    check_towers(asked)
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
    """Layers that read a source bidirectionally, and layers that write its target and attend to what was read."""
    check_encoder_decoder(c, asked)
    reading = c["encoder_mixers"] or c["mixers"]
    model = EncoderDecoder(
        vocab_size=asked.vocab_size,
        width=c["width"],
        encoder=backbone_of(c, reading, c["encoder_layers"] or c["layers"], causal=False),
        decoder=backbone_of(c, c["mixers"], c["layers"], causal=True, attends=True),
        head=token_head(c, asked),
        source=asked.source,
        target=asked.tail,
        embed_init=c["embed_init"],
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
        stack=partial(Stack, blocks=blocks, layers=layers, scan=c["scan"], kept=c["kept"]),
        position=position_of(c, c["position"]),
        bias_heads=bias_heads(c, mixers),
        **stream_norms(c),
        final_norm=c["final_norm"] and over_batch(c),
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
    each = {name: c[name].get("n_heads", 1) for name in mixers if shares_position(c, name)}
    if len(set(each.values())) > 1:
        raise UserError(f"model.{c['position']}.shared needs as many heads in every layer, and n_heads are {each}")
    return next(iter(each.values()), 0)


def shares_position(c: Mapping[str, Any], name: str) -> bool:
    """Whether `model.position` acts inside the mixer of that name."""
    one = entry(c, name)
    return MIXERS[one.mixer].softmax and one.position is None


def stream_norms(c: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config says how vectors between layers are normed."""
    momentum = dict(norm_momentum=c["batchnorm"]["momentum"]) if over_batch(c) else {}
    return dict(norm=c["norm"], norm_eps=c["norm_eps"], **momentum)


def shared_by_heads(c: Mapping[str, Any]) -> dict[str, Any]:
    """What every head takes of a config. Statistics over a batch are of all tokens, not of those that a head picks."""
    norm = c["norm"] if c["final_norm"] and not over_batch(c) else "none"
    return dict(norm=norm, norm_eps=c["norm_eps"], dtype=dtype_of(c))


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
        **stream_norms(c),
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
    check_seq2seq(c, asked)
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
