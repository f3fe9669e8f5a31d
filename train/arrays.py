"""A state's arrays in files, by Orbax: written by all hosts at once, read onto any mesh.

The parameters lie in a folder of their own, `params`, and all else in `rest`, so that a model can be read, and proven
good, without the optimizer's moments, which are twice its size.
"""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

State = Any  # a pytree of jax.Array, or of jax.ShapeDtypeStruct
PARAMS, REST = "params", "rest"


def flatten(tree: State, prefix: str = "") -> dict[str, Any]:
    """Leaves by path. What has none (None, optax's EmptyState) comes back from `like` and is not stored."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {prefix + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have the same path")
    return flat


def describe(flat: dict[str, Any]) -> dict[str, str]:
    """Type and shape of every leaf, as text."""
    return {path: f"{x.dtype}[{','.join(map(str, x.shape))}]" for path, x in flat.items()}


def open_folder(folder: Path, flat: dict[str, Any]) -> None:
    """Makes the folders that `write` fills. One host does, for all."""
    folder.mkdir()
    for part, _ in _parts(flat):
        (folder / part).mkdir()


def write(folder: Path, flat: dict[str, Any]) -> list[Any]:
    """Begins to write this host's shards; returns once they are copied off the devices, with what is to be awaited."""
    handler, loop = _handler(), asyncio.new_event_loop()
    try:
        return [
            future
            for part, leaves in _parts(flat)
            for future in loop.run_until_complete(
                handler.async_save(epath.Path(folder / part), args=ocp.args.PyTreeSave(leaves))
            )
        ]
    finally:
        loop.close()


def merge(folder: Path) -> None:
    """Makes one tree of what the hosts have written: an index of a few kilobytes. One host does, for all."""
    for part in (PARAMS, REST):
        if (folder / part).is_dir():
            _handler().finalize(epath.Path(folder / part))


def read(folder: Path, like: State, prefix: str = "") -> State:
    """The state on the shardings of `like`; its leaves are found under the paths that `flatten` gives with `prefix`."""
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    flat = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one_device)
        for path, x in flatten(like, prefix).items()
    }
    arrays = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in flat.items() if not _stored(x)}
    for part, leaves in _parts(flat):
        args = ocp.args.PyTreeRestore(leaves, restore_args=ocp.checkpoint_utils.construct_restore_args(leaves))
        arrays |= _handler().restore(epath.Path(folder / part), args=args)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in flat])


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress (8 % of float32 noise), and trying takes seven times the processor time of writing them.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _parts(flat: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The leaves of each folder, where it has any."""
    for part in (PARAMS, REST):
        leaves = {
            path: x for path, x in flat.items() if _stored(x) and (path.split("/")[0] == PARAMS) == (part == PARAMS)
        }
        if leaves:
            yield part, leaves


def _stored(x: Any) -> bool:
    return math.prod(x.shape) > 0  # Orbax refuses empty arrays
