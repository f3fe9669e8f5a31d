"""Which implementation of an op runs: its operations carry the name, in profiles and in programs to be compiled."""

import re
from contextlib import AbstractContextManager

import jax

NAMED = re.compile(r"/(\w+)\[([a-z]\w*)\]")


def running(op: str, implementation: str) -> AbstractContextManager[None]:
    """What is traced in this context is of an op's implementation."""
    return jax.named_scope(f"{op}[{implementation}]")


def implementations(program: jax.stages.Lowered) -> list[str]:
    """Of every op that has several, the one that a program runs: `attention flash`."""
    return sorted({" ".join(found) for found in NAMED.findall(program.as_text(debug_info=True))})
