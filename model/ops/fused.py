"""What our own GPU kernels of recurrences need of a call, said in one way."""

from functools import cache

import jax
from absl import logging

from model import placement
from model.errors import UserError
from model.ops.stretches import stretches

AMPERE = (8, 0)  # compute capability that they need
DTYPES = ("bfloat16", "float16", "float32")  # that they take
SIDES = (16, 32, 64, 128)  # of the matrices that those made of products take


def needs_unmet(tokens: jax.Array, dtypes: tuple[str, ...] = DTYPES) -> list[str]:
    """Why no kernel can serve a call, whatever the recurrence; tokens: [B, L, ...]."""
    reasons = []
    if placement.capability() < AMPERE:
        reasons.append(f"the platform {placement.chip()} (it runs on gpu from {AMPERE[0]}.{AMPERE[1]})")
    if tokens.dtype not in dtypes:
        reasons.append(f"{tokens.dtype} (it takes {', '.join(dtypes)})")
    if stretches(tokens.shape[1]) > 1:
        reasons.append("devices that share the length")
    return reasons


def picked(op: str, tokens: jax.Array, misfits: list[str], knobs: str, other: str = "chunked") -> str:
    """`fused` where kernels serve a call that names no implementation, else the other.

    Where all that they lack is a shape, `misfits`, that is told with the knobs that change it.
    """
    if needs_unmet(tokens):
        return other
    if misfits:
        lacking = "; ".join(misfits)
        say(f"{op}: no kernel for {lacking}, so plain XLA takes its place, which is slower; set by {knobs}")
    return other if misfits else "fused"


@cache
def say(line: str) -> None:
    """Once, however many layers and programs there are."""
    logging.warning(line)


def refuse(op: str, reasons: list[str], instead: str = "chunked") -> None:
    if reasons:
        raise UserError(
            f"{op} implementation 'fused' cannot serve {'; '.join(reasons)}; leave it unset, or use {instead!r}"
        )


def refuse_kernels(op: str, implementation: str | None) -> None:
    """Where every token sees the whole row, no recurrence runs over it that kernels could serve."""
    if implementation == "fused":
        refuse(op, ["a row that all of its tokens see whole (causal=False), which is summed without a recurrence"])
