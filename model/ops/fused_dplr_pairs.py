"""What tokens of a chunk read of each other by the general delta rule, and get by that, in kernels for NVIDIA GPUs.

Tokens read the state by q and b, and write to it along a and k. M_ij, what token i reads of what token j < i writes, is
the sum over channels of the one times the other times what the tokens between them leave: found at once or by halves,
as in model/ops/fused_pairs.py. What reads after its own token's decay, q and given beta b, is multiplied by that first.
Queries also read what their own token writes. Kernels are of one head of one chunk. q, k, a, b, w: [Q, K];
m: [Q, K], log decays from the chunk's middle to after tokens; v, dy, u, e: [Q, V]; before, after: [K, V]. Letters and
names as in model/ops/fused_dplr.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.triton import dot

from model.ops.fused_delta import inverse
from model.ops.fused_pairs import between, kept_got, meeting, rows, same_document, summed
from model.ops.fused_state import Refs, sides

Array = jax.Array

READ = ("q", "b")  # of the state before; the others write, and see the gradient of the later state
# What is beside a name in what tokens add to states, a u^T + k v^T, and to their gradients, q dy^T + b e^T.
BESIDE = dict(a="u", k="v", q="dy", b="e")
PAIRS = dict(T=("b", "a"), R=("q", "a"), P=("b", "k"), G=("q", "k"))  # what reads and what is written; T by its N


def met(name: str, see: Refs) -> tuple[str, ...]:
    """The names that one meets; given beta, there is no k beside a."""
    if name not in READ:
        return READ
    return ("a",) if "beta" in see else ("a", "k")


def late(name: str, see: Refs) -> bool:
    """Whether tokens of a name read after their own decay."""
    return name == "q" or (name == "b" and "beta" in see)


def undecayed(name: str, see: Refs) -> Array:
    if "beta" not in see or name == "q":
        return see[name][...]
    return see["beta"][...] * see["key"][...] if name == "a" else -see["key"][...]


def token(name: str, see: Refs) -> Array:
    """What reads the state before a token's decay, or writes to that after it."""
    x = undecayed(name, see)
    return x * jnp.exp(see["w"][...]) if late(name, see) else x


def to_edge(name: str, see: Refs, narrow: Any) -> Array:
    """What is left at tokens of the state before the chunk, or at the end of the chunk of what they write, [Q, K]."""
    w = see["w"][...]
    row, column = sides(len(w))
    passed, document = (column < row, "first") if name in READ else (row < column, "last")
    return rows(jnp.exp(summed(passed, w, narrow)), see, document)


def in_middle(name: str, see: Refs) -> Array:
    """What tokens of a name are multiplied by where the chunk decays little, if late by their own decay too, [Q, K]."""
    m = see["m"][...]
    if name not in READ:
        return jnp.exp(-m)
    return jnp.exp(m) if late(name, see) else jnp.exp(m - see["w"][...])


def passed(level: Any, token: Array, other: Array) -> Array:
    """Whether another token lies between one and where its span of 2^level meets its neighbour, and is not itself."""
    return between(level, token, other) & (token != other)


def to_meetings(level: Any, see: Refs, narrow: Any) -> Array:
    """What is left of tokens where their spans of 2^level meet others, or there of these at them, [Q, K]."""
    w = see["w"][...]
    return jnp.exp(summed(passed(level, *sides(len(w))), w, narrow))


def pairs_of(see: Refs) -> dict[str, tuple[str, str]]:
    return {name: (reader, written) for name, (reader, written) in PAIRS.items() if written in met(reader, see)}


def products(see: Refs, scaled: Callable[[str], Array], narrow: Any) -> dict[str, Array]:
    """Of tokens, scaled by name to what is left of them somewhere, [Q, Q], by the name of the pair."""
    found = {name: scaled(name).astype(narrow) for name in (*READ, *met("q", see))}
    return {name: dot(found[one], found[other], trans_b=True) for name, (one, other) in pairs_of(see).items()}


def pairs_at_once(see: Refs, *made):
    """T, R, and where there is a k also P and G, [Q, Q]."""
    put_pairs(see, made, products(see, lambda name: undecayed(name, see) * in_middle(name, see), made[0].dtype))


def pairs_by_halves(see: Refs, *made):
    narrow, Q = made[0].dtype, see["w"].shape[0]

    def step(level, found):
        decay, pairs = to_meetings(level, see, narrow), meeting(level, *sides(Q))
        here = products(see, lambda name: token(name, see) * decay, narrow)
        return {name: M + jnp.where(pairs, here[name], 0) for name, M in found.items()}

    none = {name: jnp.zeros((Q, Q), see["w"].dtype) for name in pairs_of(see)}
    put_pairs(see, made, lax.fori_loop(0, (Q - 1).bit_length(), step, none))


def put_pairs(see: Refs, made: tuple[Any, ...], found: dict[str, Array]) -> None:
    """What is seen of products, and T of those of b and a.

    All is found before any is stored: after that, what names share would be fetched again.
    """
    narrow, wide = made[0].dtype, see["w"].dtype
    row, column = sides(see["w"].shape[0])
    seen = same_document(see, len(row)) & (row > column)
    found = {name: jnp.where(seen, M, 0) for name, M in found.items()}
    for name, (reader, written) in pairs_of(see).items():
        if reader == "q":
            own = jnp.sum(see["q"][...].astype(wide) * undecayed(written, see), axis=1)[:, None]
            found[name] = jnp.where(row == column, own, found[name])
    found["T"] = inverse(-found["T"], lax.Precision.HIGHEST if narrow == wide else None)
    for out, name in zip(made, pairs_of(see), strict=True):
        out[...] = found[name].astype(narrow)


# What tokens of a name get, and log decays by them, on top of what these have got by other names. One name a launch,
# and what is summed up elsewhere fetched last: the registers hold no more. Given beta, keys get what b gets and then
# what a gets.


def scores_got(see: Refs, name: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """What M_ij get where tokens of a name meet others, by the name of those: at [i, j] for j < i, [Q, Q], and what
    queries read of their own token, [Q, 1]."""
    scores, own = {}, {}
    for other in met(name, see):
        reader, written = (name, other) if name in READ else (other, name)
        got = dot(see[BESIDE[reader]][...], see[BESIDE[written]][...], trans_b=True)
        row, column = sides(len(got))
        if reader == "q":
            own[other] = jnp.sum(jnp.where(row == column, got, 0), axis=1)[:, None]
        scores[other] = jnp.where(same_document(see, len(got)) & (row > column), got, 0).astype(see["u"].dtype)
    return scores, own


def of_tokens(name: str, scores: dict[str, Array], scaled: Callable[[str], Array]) -> Array:
    """What tokens of a name get by others, given what scores of both get and these, scaled, [Q, K]."""
    return sum(
        dot(score, scaled(other).astype(score.dtype), trans_a=name not in READ) for other, score in scores.items()
    )


def of_state(see: Refs, name: str) -> Array:
    """What tokens of a name get by the state before the chunk, or by the gradient of that after it, where it is."""
    beside, state = see[BESIDE[name]][...], see["before" if name in READ else "after"][...]
    return dot(beside, state, trans_b=True)


def gradient_at_once(see: Refs, *made, name: str, last: bool):
    """Log decays get what pairs give whose i is later, less what those do whose j is not earlier; so with the state.

    So each is given what tokens from it on give, added up in the last launch. What all of the chunk get is put at its
    last token.
    """
    d, dw, *d_beta = made
    (scores, own), reads, Q = scores_got(see, name), name in READ, see["m"].shape[0]
    first, second = see["w"][0, :] - see["m"][0, :], see["m"][Q - 1, :]  # log decays of the halves
    got = rows(of_state(see, name), see, "first" if reads else "last") * jnp.exp(first if reads else second)[None, :]
    scale = in_middle(name, see)
    scaled = undecayed(name, see) * scale
    to_all = jnp.zeros_like(first) if reads else jnp.sum(scaled * got, axis=0)
    if "dw" not in see:
        to_all += kept_got(see, first + second)
    got += of_tokens(name, scores, lambda other: undecayed(other, see) * in_middle(other, see))
    put_tokens(see, name, scale * got, own, d, *d_beta)
    row, column = sides(Q)
    to_w = scaled * got if reads else -scaled * got
    total = to_w + jnp.where(lax.broadcasted_iota(jnp.int32, to_w.shape, 0) == Q - 1, to_all[None, :], 0)
    total += see["dw"][...] if "dw" in see else 0
    if last:
        total = summed(row <= column, total, see["u"].dtype)
        total -= to_w if reads and not late(name, see) else 0  # which read before their own decay
    dw[...] = total


def gradient_by_halves(see: Refs, *made, name: str):
    """The decays get sums of what pairs of tokens give, never differences, which would lose small ones. None is left to
    a last launch."""
    d, dw, *d_beta = made
    w = see["w"][...]
    kept = jnp.zeros(w.shape[1:], w.dtype) if "dw" in see else kept_got(see, jnp.sum(w, axis=0))
    (scores, own), narrow = scores_got(see, name), see["u"].dtype
    row, column = sides(len(w))
    x = token(name, see)

    def step(level, found):
        to_x, to_w = found
        decay, pairs = to_meetings(level, see, narrow), meeting(level, row, column)
        here = {other: jnp.where(pairs, score, 0) for other, score in scores.items()}
        got = decay * of_tokens(name, here, lambda other: token(other, see) * decay)
        return to_x + got, to_w + summed(passed(level, column, row), x * got, narrow)

    none = jnp.zeros_like(w)
    to_x, to_w = lax.fori_loop(0, (len(row) - 1).bit_length(), step, (none, none + kept[None, :]))
    by_state = to_edge(name, see, narrow) * of_state(see, name)
    to_x, to_w = to_x + by_state, to_w + summed(row < column if name in READ else column < row, x * by_state, narrow)
    if late(name, see):
        to_w += x * to_x
        to_x *= jnp.exp(w)
    put_tokens(see, name, to_x, own, d, *d_beta)
    dw[...] = to_w + see["dw"][...] if "dw" in see else to_w


def put_tokens(see: Refs, name: str, to_x: Array, own: dict[str, Array], d: Any, *d_beta: Any) -> None:
    """What tokens before their decay get by others, and then by what queries read of their own token."""
    to_x += sum(score * undecayed(other, see) for other, score in own.items())
    if d_beta:
        d_beta[0][...] = jnp.sum(to_x * see["key"][...], axis=1)[:, None]
        to_x = see["dk"][...] + see["beta"][...] * to_x
    elif name == "b" and "beta" in see:
        to_x = -to_x
    d[...] = to_x.astype(d.dtype)
