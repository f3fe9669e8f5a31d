"""Parameters by their paths, `stack/layers/block_0/mixer/q/kernel`, and patterns that name some of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from model.errors import UserError, closest


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of parameters."""
    return flatten_dict(tree, sep="/")


def as_tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    return unflatten_dict(flat, sep="/")


def matching(patterns: Sequence[str], paths: Iterable[str], key: str) -> set[str]:
    """The paths that one of the regular expressions matches whole; each must match one. `key` is the setting's."""
    paths, found = sorted(paths), set()
    for pattern in patterns:
        try:
            matched = {path for path in paths if re.fullmatch(pattern, path)}
        except re.error as error:
            raise UserError(f"{key} has {pattern!r}, which is no regular expression: {error}") from None
        if not matched:
            hint = closest(pattern, paths) or f"; there are {', '.join(paths[:3])}, ..."
            raise UserError(f"{key} has {pattern!r}, which matches the whole path of no parameter{hint}")
        found |= matched
    return found
