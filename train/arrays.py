"""A state's arrays in files, by Orbax: written by all hosts at once, read onto any mesh.

The parameters lie in a folder of their own, `params`, and all else in `rest`, so that a model can be read, and proven
good, without the optimizer's moments, which are twice its size.
"""

import asyncio
import errno
import functools
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
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
    """Makes the folders that `write` fills, if there is room for it. One host does, for all."""
    need, free = sum(x.nbytes for x in flat.values()), shutil.disk_usage(folder.parent).free
    if free < need:
        raise OSError(errno.ENOSPC, f"it takes {need:,} bytes, and the disk has {free:,} left")
    folder.mkdir()
    for part, _ in _parts(flat):
        (folder / part).mkdir()


def write(folder: Path, flat: dict[str, Any]) -> list[Any]:
    """Begins to write this host's shards; returns once they are copied off the devices, with what is to be awaited."""
    _hush()
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


def wait(writing: list[Any]) -> None:
    """Returns once all is written; raises the first error, but only when nothing is being written any more."""
    errors = []
    for future in writing:
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def merge(folder: Path) -> None:
    """Makes one tree of what the hosts have written: an index, without their arrays. One host does, for all."""
    for part in (PARAMS, REST):
        if (folder / part).is_dir():
            _handler().finalize(epath.Path(folder / part))


def read_arrays(folder: Path, like: State, prefix: str = "", whole: bool = True) -> State:
    """The state on the shardings of `like`; its leaves are found under the paths that `flatten` gives with `prefix`.

    If not `whole`, the files may have more.
    """
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    flat = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one_device)
        for path, x in flatten(like, prefix).items()
    }
    arrays = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in flat.items() if not _stored(x)}
    for part, leaves in _parts(flat):
        restore_args = ocp.checkpoint_utils.construct_restore_args(leaves)
        args = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=not whole)
        arrays |= _handler().restore(epath.Path(folder / part), args=args)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in flat])


@functools.cache
def _hush() -> None:
    """A write that fails is raised, to be told in one line: the layers below are not to print their stacks as well."""
    logging.get_absl_logger().addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
    raised, dropped = sys.excepthook, sys.unraisablehook

    # Orbax leaves its event loop at the first error; TensorStore then has nobody to tell of the others, and says so
    # by either hook.
    def late(kind: type[BaseException], error: BaseException | None) -> bool:
        return kind is RuntimeError and str(error) == "Event loop is closed"

    sys.excepthook = lambda kind, error, trace: None if late(kind, error) else raised(kind, error, trace)
    sys.unraisablehook = lambda args: None if late(args.exc_type, args.exc_value) else dropped(args)


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
