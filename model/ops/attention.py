"""Softmax attention: one op, several implementations.

q: [B, L, H, K]; k: [B, M, G, K]; v: [B, M, G, V] with G dividing H (head h reads key-value head h // (H/G)).
A query sees a key of its own document (segment 0, padding, sees and is seen by nothing) where the mask shows it.
`implementation` is speed, never meaning: `None` takes the best one that can serve the call.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model import placement
from model.contract import wide
from model.errors import UserError, choose
from model.ops import sharing
from model.ops.block_attention import blocks
from model.ops.decode_attention import decode, flash_decode
from model.ops.dense_attention import reference, weights_and_lse, xla
from model.ops.fused_attention import cudnn, flash, splash
from model.ops.mask import CAUSAL, FULL, Mask
from model.ops.named import running
from model.ops.ring_attention import ring
from model.ops.scores import Bias, Form, Operands, Pairwise
from model.ops.tiled_attention import tiled

FEATURES = {
    "window": "a window on the distance",
    "bidirectional": "no causal mask",
    "pattern": "a mask that is no band of distances (a prefix)",
    "uneven blocks": "a pattern of blocks in packed documents, or of blocks of no multiple of 16 tokens",
    "segments": "packed documents, or padding between tokens",
    "padding": "padding behind the tokens of a row",
    "positions": "positions other than 0, 1, 2, ... (a cache)",
    "stretch": "a device's own stretch of the queries",
    "bias": "a position bias",
    "network bias": "a position bias by a network (FIRE)",
    "other bias": "a position bias that is more than arithmetic on two positions",
    "soft cap": "soft-capped scores",
    "sinks": "attention sinks",
    "additive": "additive scores",
    "levels": "a decay that tokens decide (forgetting attention)",
    "lse": "the log-sum-exp as a second output",
    "value dim": "values of another dim than the keys",
    "ring": "keys and values that go round the devices of a shared length",
    "filled": "one query a row, to a cache that says how much it holds",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a kernel runs on."""

    platform: str
    head_dim: int  # the largest it takes there
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU, at least

    def __str__(self) -> str:
        return f"{self.platform} from {'.'.join(map(str, self.capability))}" if any(self.capability) else self.platform

    def meant(self) -> bool:
        """Whether programs are made for it."""
        return self.platform == placement.platform() and self.capability <= placement.capability()


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute attention and what it can serve."""

    run: Callable[[Form, Operands], tuple[jax.Array, jax.Array | None]]
    summary: str
    lacks: frozenset[str] = frozenset()  # of FEATURES
    needs: frozenset[str] = frozenset()  # of FEATURES, without which it cannot be called
    lacks_together: tuple[frozenset[str], ...] = ()  # features that it has, but not in one call
    slow: frozenset[str] = frozenset()  # of FEATURES, with which None passes it by: others are faster
    chips: tuple[Chip, ...] = ()  # (): any
    dtypes: tuple[str, ...] = ()  # (): any
    head_dims: int | tuple[int, ...] = 1  # they must be a multiple of this, or among these
    lengths: int = 1  # they must be a multiple of this
    queries: int = 1  # at least
    keys: int = 1  # likewise


IMPLEMENTATIONS = {
    "splash": Implementation(
        run=splash,
        summary="the TPU's fused kernel",
        lacks=frozenset(FEATURES)
        - {"window", "bidirectional", "pattern", "segments", "padding", "stretch", "soft cap", "value dim"},
        lacks_together=(frozenset({"pattern", "stretch"}),),
        chips=(Chip("tpu", head_dim=256),),
        dtypes=("bfloat16", "float32"),
        head_dims=8,
        lengths=128,
    ),
    "cudnn": Implementation(
        run=cudnn,
        summary="the GPU's fused kernel",
        lacks=frozenset(FEATURES) - {"window", "bidirectional", "padding"},
        lacks_together=(frozenset({"window", "bidirectional"}), frozenset({"window", "padding"})),
        chips=(Chip("gpu", capability=(8, 0), head_dim=128), Chip("gpu", capability=(9, 0), head_dim=256)),
        dtypes=("bfloat16", "float16"),
        head_dims=8,
    ),
    "flash": Implementation(
        run=flash,
        summary="our own kernel for GPUs, for what cuDNN's lacks",
        lacks=frozenset({"uneven blocks", "stretch", "other bias", "additive", "ring"}),
        slow=frozenset({"network bias"}),
        chips=(Chip("gpu", capability=(8, 0), head_dim=128),),
        dtypes=("bfloat16", "float16", "float32"),
        queries=2,
    ),
    "ring": Implementation(
        run=ring,
        summary="tiles of a device's own queries and keys that go round the devices",
        needs=frozenset({"ring"}),
    ),
    "flash_decode": Implementation(
        run=flash_decode,
        summary="our own kernel for GPUs, for one query a row to what a cache holds so far",
        lacks=frozenset({"uneven blocks", "other bias", "additive", "levels", "ring"}),
        needs=frozenset({"filled"}),
        chips=(Chip("gpu", capability=(8, 0), head_dim=256),),
        dtypes=("bfloat16", "float16", "float32"),
        head_dims=(16, 32, 64, 128, 256),
        keys=64,
    ),
    "decode": Implementation(
        run=decode,
        summary="a tile of what a cache holds so far at a time, in plain XLA",
        lacks=frozenset({"ring"}),
        needs=frozenset({"filled"}),
    ),
    "xla": Implementation(run=xla, summary="all scores at once; memory grows with L M", lacks=frozenset({"ring"})),
    "tiled": Implementation(
        run=tiled, summary="a tile of scores at a time, in plain XLA; memory grows with L", lacks=frozenset({"ring"})
    ),
    "blocks": Implementation(
        run=blocks,
        summary="the key blocks that a pattern lists, of all query blocks at once; work grows with the lists",
        lacks=frozenset({"ring"}),
    ),
    "reference": Implementation(
        run=reference, summary="the definition, one head after another", lacks=frozenset({"ring"})
    ),
}

# Bytes of scores on a device up to which the dense form is taken where no fused kernel serves; with gradient it holds
# three times as many. On 2 CPU cores both take as long up to 16 MiB, and dense 1.2 to 1.8 times at 32.
DENSE, DENSE_ON_CPU = 2**28, 2**24


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    with_lse: bool = False,
    implementation: str | tuple[str, ...] | None = None,
    **call: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, `[B, L, H, V]`; with `with_lse` also the log-sum-exp of the scores, `[B, L, H]`.

    Of several implementations, the first that can serve is taken.
    `call` is what `prepare` takes by keyword: places, mask, and how to score. On a mesh every device computes its own
    part, and what it is picked by is that part.
    """
    form, o = prepare(q, k, v, **call)
    share = partial(sharing.share, form, o, call["bias"].axes if form.bias else None)

    def can(name: str) -> bool:
        alone = share(name)
        return not lacking(name, alone.form, alone.seen, with_lse)

    shared = share(implementation)
    chosen = pick(implementation, shared.form, shared.seen, with_lse, can)
    with running("attention", next(name for name, each in IMPLEMENTATIONS.items() if each is chosen)):
        out, *lse = sharing.on_each_device(chosen.run, shared, outputs=2 if with_lse else 1)
    out = out.reshape(*q.shape[:3], v.shape[-1])
    return (out, lse[0].reshape(q.shape[:3])) if with_lse else out


def attention_weights(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """The weights `[B, H, L, M]` of a call, all of them: for looking at."""
    form, o = prepare(q, k, v, **call)
    weights, _ = weights_and_lse(form, o)
    return weights.reshape(weights.shape[0], -1, *weights.shape[3:])


def prepare(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    soft_cap: float = 0.0,
    bias: Bias | None = None,
    sinks: jax.Array | None = None,
    additive: jax.Array | None = None,
    q_levels: jax.Array | None = None,
    k_levels: jax.Array | None = None,
    k_filled: jax.Array | None = None,
    right_padded: bool = False,
    gapless: bool = False,
) -> tuple[Form, Operands]:
    """A call in the shape the implementations take.

    Positions and segments are `[B or 1, L]` and `[B or 1, M]`; no positions at all means 0, 1, 2, ... By them, `mask`
    says who sees whom in a document. `scale` is 1/sqrt(K) unless given, and 1 for additive scores. `soft_cap` c turns
    a score s into c tanh(s/c); then `bias` is added. `sinks` `[H]` are logits that take part in the softmax and have no
    value; `additive` `[H, K]` are the weights of Bahdanau's score. `q_levels` `[B or 1, L, H]` and `k_levels`
    `[B or 1, M, H]` lower a score by the distance between the two. Of a cache `k_filled` `[]` says how much of it is
    written, from the first key on; what is behind that must be of no document. `right_padded`: segments are of one
    document a row, with padding behind it; what padding then gets means nothing. `gapless`: no padding stands inside
    documents, and keys are the queries' own, so that what the mask hides is known before positions are.
    """
    (B, L, H, K), G = q.shape, k.shape[2]
    if H % G:
        raise UserError(f"{G} key-value heads do not divide {H} heads")
    if scale is None:
        scale = K**-0.5 if additive is None else 1.0
    contiguous = q_positions is None and k_positions is None
    if contiguous:
        q_positions = jnp.arange(L, dtype=jnp.int32)[None]
        k_positions = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    form = Form(
        mask=mask,
        scale=float(scale),
        soft_cap=float(soft_cap),
        bias=None if bias is None else bias.fn,
        right_padded=right_padded,
        stretches=1 if contiguous else 0,
        gapless=gapless,
    )
    operands = Operands(
        q=q.reshape(B, L, G, H // G, K),
        k=k,
        v=v,
        q_positions=q_positions,
        k_positions=k_positions,
        q_segments=q_segments,
        k_segments=k_segments,
        bias=None if bias is None else bias.params,
        sinks=None if sinks is None else sinks.reshape(G, H // G),
        additive=None if additive is None else additive.reshape(G, H // G, K),
        q_levels=None if q_levels is None else jnp.broadcast_to(q_levels, (B, L, H)).reshape(B, L, G, -1),
        k_levels=None if k_levels is None else jnp.broadcast_to(k_levels, (B, k.shape[1], H)).reshape(B, -1, G, H // G),
        k_filled=k_filled,
    )
    return form, operands


def features(form: Form, o: Operands, with_lse: bool) -> set[str]:
    """The names in FEATURES that a call makes use of."""
    band, grain = form.mask.band(), form.mask.grain()
    back, ahead = band or (None, 0)
    used = {
        "window": back is not None or bool(ahead),
        "bidirectional": ahead != 0,
        "pattern": band is None,
        "uneven blocks": grain is not None and (grain % 16 > 0 or form.stretches == 0),
        "segments": o.k_segments is not None and not form.right_padded,
        "padding": o.k_segments is not None and form.right_padded,
        "positions": form.stretches == 0,
        "stretch": form.stretches > 1 and form.mask != FULL,
        "bias": form.bias is not None,
        "network bias": isinstance(form.bias, Pairwise) and form.bias.network,
        "other bias": form.bias is not None and not isinstance(form.bias, Pairwise),
        "soft cap": form.soft_cap > 0,
        "sinks": o.sinks is not None,
        "additive": o.additive is not None,
        "levels": o.q_levels is not None,
        "lse": with_lse,
        "value dim": o.v.shape[-1] != o.q.shape[-1],
        "ring": bool(form.ring),
        "filled": o.k_filled is not None and o.q.shape[1] == 1,
    }
    return {name for name, given in used.items() if given}


def lacking(name: str, form: Form, o: Operands, with_lse: bool) -> list[str]:
    """Why an implementation cannot serve a call on a device that holds `o`; empty if it can."""
    can, used, dtype = IMPLEMENTATIONS[name], features(form, o, with_lse), jnp.dtype(o.q.dtype).name
    reasons = [FEATURES[feature] for feature in FEATURES if feature in used & can.lacks]
    reasons += [together(features) for features in can.lacks_together if features <= used]
    reasons += [f"a call without {FEATURES[feature]}" for feature in sorted(can.needs - used)]
    chips = [chip for chip in can.chips if chip.meant()]
    if can.chips and not chips:
        reasons.append(f"the platform {placement.chip()} (it runs on {can.chips[0]})")
    if can.dtypes and dtype not in can.dtypes:
        reasons.append(f"{dtype} (it takes {', '.join(can.dtypes)})")
    most = max((chip.head_dim for chip in chips or can.chips), default=math.inf)
    some = can.head_dims if isinstance(can.head_dims, tuple) else ()
    taken = ", ".join(map(str, some)) if some else f"multiples of {can.head_dims} up to {most}"
    for dim in sorted({o.q.shape[-1], o.v.shape[-1]}):
        if dim not in some if some else dim % can.head_dims or dim > most:
            reasons.append(f"a head dim of {dim} (it takes {taken})")
    lengths = (o.q.shape[1], o.k.shape[1])
    if any(n % can.lengths for n in lengths):
        reasons.append(f"lengths {lengths[0]} and {lengths[1]} (it takes multiples of {can.lengths})")
    for what, given, least in zip(("queries", "keys"), lengths, (can.queries, can.keys), strict=True):
        if given < least:
            reasons.append(f"{given} {what} (it takes {least} or more)")
    return reasons


def together(features: frozenset[str]) -> str:
    return " with ".join(meaning for feature, meaning in FEATURES.items() if feature in features)


def pick(
    given: str | tuple[str, ...] | None,
    form: Form,
    o: Operands,
    with_lse: bool,
    can: Callable[[str], bool],
) -> Implementation:
    """The implementation asked for, if it can serve; else the first fused one that can and is fast, else by size.

    `o` is what one device holds; shapes are enough. `can`: whether one could serve if it were asked for, as the mesh
    then shares out the call.
    """
    call = (form, o, with_lse)
    if isinstance(given, tuple):
        given = next((name for name in given if not lacking(name, *call)), given[-1])
    if given is not None:
        chosen = choose("attention implementation", given, IMPLEMENTATIONS)
        if reasons := lacking(given, *call):
            raise UserError(
                f"attention implementation {given!r} cannot serve {'; '.join(reasons)}; "
                f"leave it unset, or choose from {', '.join(filter(can, IMPLEMENTATIONS))}"
            )
        return chosen
    for name in ("ring", "splash", "cudnn", "flash_decode", "flash"):
        if not lacking(name, *call) and not IMPLEMENTATIONS[name].slow & features(*call):
            return IMPLEMENTATIONS[name]
    # A GPU would ask its host at every turn of a loop whether there is another.
    if placement.platform() != "gpu" and not lacking("decode", *call):
        return IMPLEMENTATIONS["decode"]
    return IMPLEMENTATIONS["xla" if few_scores(o) else "tiled"]


def few_scores(o: Operands) -> bool:
    """Whether there is room for all of them at once."""
    scores = math.prod(o.q.shape[:4]) * o.k.shape[1] * wide(o.q.dtype).itemsize
    return scores <= (DENSE_ON_CPU if placement.platform() == "cpu" else DENSE)


def support_matrix() -> dict[str, dict[str, str]]:
    """Feature or requirement -> implementation -> what it says to it: what `None` decides from."""

    def line(show: Callable[[Implementation], str]) -> dict[str, str]:
        return {name: show(can) for name, can in IMPLEMENTATIONS.items()}

    def lacks(can: Implementation, features: frozenset[str]) -> bool:
        return bool(can.lacks & features) or any(some <= features for some in can.lacks_together)

    def head_dims(can: Implementation) -> str:
        if isinstance(can.head_dims, tuple):
            return "/".join(map(str, can.head_dims))
        return f"{can.head_dims}n, to {'/'.join(str(chip.head_dim) for chip in can.chips)}" if can.chips else "any"

    asked = [frozenset({name}) for name in FEATURES]
    asked += [features for can in IMPLEMENTATIONS.values() for features in can.lacks_together]

    def answer(can: Implementation, features: frozenset[str]) -> str:
        return "-" if lacks(can, features) else "slow" if features & can.slow else "yes"

    table = {together(features): line(lambda can, features=features: answer(can, features)) for features in asked}
    table["platform"] = line(lambda can: "/".join(map(str, can.chips)) or "any")
    table["dtype"] = line(lambda can: "/".join(can.dtypes) or "any")
    table["head dim"] = line(head_dims)
    table["length"] = line(lambda can: f"{can.lengths}n" if can.lengths > 1 else "any")
    table["queries"] = line(lambda can: f"{can.queries} or more" if can.queries > 1 else "any")
    table["keys"] = line(lambda can: f"{can.keys} or more" if can.keys > 1 else "any")
    return table
