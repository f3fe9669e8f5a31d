"""Softmax attention: one op, several implementations.

q: [B, L, H, K]; k: [B, M, G, K]; v: [B, M, G, V] with G dividing H (head h reads key-value head h // (H/G)).
A query sees a key of its own document (segment 0, padding, sees and is seen by nothing) where causality, window and
prefix allow it. `implementation` is speed, never meaning: `None` takes the best one that can serve the call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model.errors import UserError, choose
from model.ops.dense_attention import reference, weights_and_lse, xla
from model.ops.fused_attention import cudnn, splash
from model.ops.scores import Bias, Form, Operands
from model.ops.tiled_attention import tiled

FEATURES = {
    "window": "a window on the distance",
    "prefix": "a prefix that is seen both ways",
    "both ways": "no causal mask",
    "segments": "packed documents or padding",
    "positions": "positions other than 0, 1, 2, ... (a cache)",
    "bias": "a position bias",
    "soft cap": "soft-capped scores",
    "sinks": "attention sinks",
    "additive": "additive scores",
    "lse": "the log-sum-exp as a second output",
    "value dim": "values of another dim than the keys",
}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute attention and what it can serve."""

    run: Callable[[Form, Operands, bool], tuple[jax.Array, jax.Array | None]]
    summary: str
    lacks: frozenset[str] = frozenset()  # of FEATURES
    platform: str | None = None  # None: any
    dtypes: tuple[str, ...] = ()  # (): any
    head_dims: tuple[int, int] | None = None  # (multiple of, at most); None: any
    length: int = 1  # both lengths must be a multiple of this


IMPLEMENTATIONS = {
    "splash": Implementation(
        run=lambda form, o, contiguous: splash(form, o),
        summary="the TPU's fused kernel",
        lacks=frozenset(FEATURES) - {"window", "both ways", "segments", "soft cap"},
        platform="tpu",
        head_dims=(128, 256),
        length=128,
    ),
    "cudnn": Implementation(
        run=lambda form, o, contiguous: cudnn(form, o),
        summary="the GPU's fused kernel",
        lacks=frozenset(FEATURES) - {"window", "both ways"},
        platform="gpu",
        dtypes=("bfloat16", "float16"),
        head_dims=(8, 128),
        length=2,
    ),
    "xla": Implementation(
        run=lambda form, o, contiguous: xla(form, o), summary="all scores at once; memory grows with L M"
    ),
    "tiled": Implementation(run=tiled, summary="a tile of scores at a time, in plain XLA; memory grows with L"),
    "reference": Implementation(
        run=lambda form, o, contiguous: reference(form, o), summary="the definition, one head after another"
    ),
}

# Up to this many scores per head the dense form is taken where no fused kernel serves.
DENSE_SCORES = 1024 * 1024


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    with_lse: bool = False,
    implementation: str | None = None,
    **call: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention, `[B, L, H, V]`; with `with_lse` also the log-sum-exp of the scores, `[B, L, H]`.

    `call` is what `prepare` takes by keyword: places, masks, and how to score.
    """
    form, o, contiguous = prepare(q, k, v, **call)
    chosen = pick(implementation, o, features(form, o, contiguous, with_lse))
    out, lse = chosen.run(form, o, contiguous)
    out = out.reshape(*q.shape[:3], v.shape[-1])
    return (out, lse.reshape(q.shape[:3])) if with_lse else out


def attention_weights(q: jax.Array, k: jax.Array, v: jax.Array, **call: Any) -> jax.Array:
    """The weights `[B, H, L, M]` of a call, all of them: for looking at."""
    form, o, _ = prepare(q, k, v, **call)
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
    causal: bool = True,
    window: int = 0,
    prefix: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
    bias: Bias | None = None,
    sinks: jax.Array | None = None,
    additive: jax.Array | None = None,
) -> tuple[Form, Operands, bool]:
    """A call in the shape the implementations take, and whether its positions are 0, 1, 2, ... in every row.

    Positions and segments are `[B or 1, L]` and `[B or 1, M]`; no positions at all means 0, 1, 2, ... A query sees
    keys less than `window` away (0: any), and keys at positions below `prefix` even if they are later. `scale` is
    1/sqrt(K) unless given, and 1 for additive scores. `soft_cap` c turns a score s into c tanh(s/c); then `bias` is
    added. `sinks` `[H]` are logits that take part in the softmax and have no value; `additive` `[H, K]` are the
    weights of Bahdanau's score.
    """
    (B, L, H, K), G = q.shape, k.shape[2]
    if H % G:
        raise UserError(f"{G} key-value heads do not divide {H} heads")
    if window < 0:
        raise UserError(f"window {window} must be at least 1, or 0 for none")
    if scale is None:
        scale = K**-0.5 if additive is None else 1.0
    contiguous = q_positions is None and k_positions is None
    if contiguous:
        q_positions = jnp.arange(L, dtype=jnp.int32)[None]
        k_positions = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    form = Form(causal, window, prefix, float(scale), float(soft_cap), None if bias is None else bias.fn)
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
    )
    return form, operands, contiguous


def features(form: Form, o: Operands, contiguous: bool, with_lse: bool) -> set[str]:
    """The names in FEATURES that a call makes use of."""
    used = {
        "window": form.window > 0,
        "prefix": form.prefix > 0,
        "both ways": not form.causal,
        "segments": o.k_segments is not None,
        "positions": not contiguous,
        "bias": form.bias is not None,
        "soft cap": form.soft_cap > 0,
        "sinks": o.sinks is not None,
        "additive": o.additive is not None,
        "lse": with_lse,
        "value dim": o.v.shape[-1] != o.q.shape[-1],
    }
    return {name for name, given in used.items() if given}


def lacking(name: str, o: Operands, used: set[str]) -> list[str]:
    """Why an implementation cannot serve a call; empty if it can."""
    can, K, dtype = IMPLEMENTATIONS[name], o.q.shape[-1], jnp.dtype(o.q.dtype).name
    lengths = (o.q.shape[1], o.k.shape[1])
    reasons = [FEATURES[feature] for feature in FEATURES if feature in used & can.lacks]
    if can.platform and jax.default_backend() != can.platform:
        reasons.append(f"the platform {jax.default_backend()} (it runs on {can.platform})")
    if can.dtypes and dtype not in can.dtypes:
        reasons.append(f"{dtype} (it takes {', '.join(can.dtypes)})")
    if can.head_dims and (K % can.head_dims[0] or can.head_dims[1] < K):
        reasons.append(f"a head dim of {K} (it takes multiples of {can.head_dims[0]} up to {can.head_dims[1]})")
    if any(n % can.length for n in lengths):
        reasons.append(f"lengths {lengths[0]} and {lengths[1]} (it takes multiples of {can.length})")
    return reasons


def pick(given: str | None, o: Operands, used: set[str]) -> Implementation:
    """The implementation asked for, if it can serve; else the first of the fused ones that can, else by size."""
    if given is not None:
        chosen = choose("attention implementation", given, IMPLEMENTATIONS)
        if reasons := lacking(given, o, used):
            raise UserError(
                f"attention implementation {given!r} cannot serve {'; '.join(reasons)}; "
                f"leave it unset, or choose from {', '.join(n for n in IMPLEMENTATIONS if not lacking(n, o, used))}"
            )
        return chosen
    for name in ("splash", "cudnn"):
        if not lacking(name, o, used):
            return IMPLEMENTATIONS[name]
    return IMPLEMENTATIONS["xla" if o.q.shape[1] * o.k.shape[1] <= DENSE_SCORES else "tiled"]


def support_matrix() -> dict[str, dict[str, str]]:
    """Feature or requirement -> implementation -> what it says to it: what `None` decides from."""
    table: dict[str, dict[str, str]] = {}
    for feature, meaning in FEATURES.items():
        table[meaning] = {name: "-" if feature in can.lacks else "yes" for name, can in IMPLEMENTATIONS.items()}

    def line(show: Callable[[Implementation], str]) -> dict[str, str]:
        return {name: show(can) for name, can in IMPLEMENTATIONS.items()}

    table["platform"] = line(lambda can: can.platform or "any")
    table["dtype"] = line(lambda can: "/".join(can.dtypes) or "any")
    table["head dim"] = line(lambda can: f"{can.head_dims[0]}n, to {can.head_dims[1]}" if can.head_dims else "any")
    table["length"] = line(lambda can: f"{can.length}n" if can.length > 1 else "any")
    return table
