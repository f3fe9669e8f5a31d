"""A table of names, both ways: what a parameter of ours is called elsewhere, and how its numbers lie there.

A row joins parameters of ours with tensors of theirs by a form, which turns the one into the other and back. Parameters
under `layer/`, or `encoder/layer/`, are those of a layer, and `{layer}` is its number. In a stack the layers of each
kind lie in one array (see model/stack.py), so a place is a path and an index along its first axis.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from model.errors import UserError
from model.paths import matching
from model.weights.safetensors import Made, Stored

Arrays = tuple[np.ndarray, ...]
Like = Mapping[str, jax.ShapeDtypeStruct]  # the parameters of a model by path: shapes, dtypes and shardings


@dataclass(frozen=True)
class Form:
    """Theirs to ours and back. Views where possible: what is not used is not read."""

    take: Callable[[Arrays], Arrays]
    give: Callable[[Arrays], Arrays]

    def __rshift__(self, other: "Form") -> "Form":
        """This form, then the other."""
        return Form(lambda x: other.take(self.take(x)), lambda x: self.give(other.give(x)))


def each(take: Callable[[np.ndarray], np.ndarray], give: Callable[[np.ndarray], np.ndarray]) -> Form:
    return Form(lambda arrays: tuple(map(take, arrays)), lambda arrays: tuple(map(give, arrays)))


def split(*sizes: int, axis: int = 0) -> Form:
    """One fused tensor of theirs, cut into several of ours."""
    cuts = list(np.cumsum(sizes)[:-1])
    return Form(lambda x: tuple(np.split(x[0], cuts, axis)), lambda x: (np.concatenate(x, axis),))


def stacked() -> Form:
    """Several tensors of theirs, as one of ours with an axis more in front."""
    return Form(lambda arrays: (np.stack(arrays),), lambda arrays: tuple(arrays[0]))


def into_heads(heads: int) -> Form:
    """The weight of a linear map to all heads, `[H K, D]`, as our kernel `[D, H, K]`; a bias `[H K]` as `[H, K]`."""

    def take(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x.reshape(heads, -1, *x.shape[1:]), (0, 1), (-2, -1))

    def give(x: np.ndarray) -> np.ndarray:
        moved = np.moveaxis(x, (-2, -1), (0, 1))
        return moved.reshape(-1, *moved.shape[2:])

    return each(take, give)


def out_of_heads(heads: int) -> Form:
    """The weight of a linear map from all heads, `[D, H K]`, as our kernel `[H, K, D]`."""
    return TRANSPOSED >> each(lambda x: x.reshape(heads, -1, x.shape[-1]), lambda x: x.reshape(-1, x.shape[-1]))


def shaped(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Form:
    return each(lambda x: x.reshape(ours), lambda x: x.reshape(theirs))


SAME = each(lambda x: x, lambda x: x)
TRANSPOSED = each(np.transpose, np.transpose)
ABOVE_ONE = each(lambda x: x.astype(np.float32) + 1, lambda x: x - 1)  # a norm's scale, kept as what it has over 1
DEPTHWISE = each(lambda x: x[:, 0].T, lambda x: x.T[:, None])  # a convolution's [E, 1, W] as [W, E]


@dataclass(frozen=True)
class Row:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form = SAME


def row(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], form: Form = SAME) -> Row:
    return Row(*(((names,) if isinstance(names, str) else names) for names in (ours, theirs)), form)


Place = tuple[str, int | None]  # a parameter's path, and the index along its first axis; None: all of it


@dataclass(frozen=True)
class Link:
    """A row of one layer."""

    ours: tuple[Place, ...]
    theirs: tuple[str, ...]
    form: Form

    def lay_out(self, like: Like) -> dict[str, tuple[int, ...]]:
        """The shapes that their tensors have to have."""
        blank = tuple(np.broadcast_to(np.float32(0), shape_at(like, place)) for place in self.ours)
        return {name: x.shape for name, x in zip(self.theirs, self.form.give(blank), strict=True)}


def shape_at(like: Like, place: Place) -> tuple[int, ...]:
    path, index = place
    return like[path].shape if index is None else like[path].shape[1:]


Stacks = Mapping[
    str, tuple[int, int]
]  # where a stack lies, as `encoder/`, -> its layers, and the kinds that take turns


def stacks(c: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Those of a model section."""
    own = (c["layers"], len(c["mixers"]))
    if c["kind"] != "encoder_decoder":
        return {"": own}
    return {"encoder/": (c["encoder_layers"] or c["layers"], len(c["encoder_mixers"] or c["mixers"])), "decoder/": own}


def place_of(path: str, layer: int, layers: int, cycle: int) -> Place:
    """Where a parameter `SIDE/layer/NAME` lies in a stack of `layers`, in which `cycle` kinds take turns."""
    side, _, name = path.partition("layer/")
    repeat, kind = divmod(layer, cycle)
    looped = repeat < layers // cycle
    room = "layers" if looped else "rest"
    return f"{side}stack/{room}/block_{kind}/{name}", repeat if looped else None


def links(rows: Sequence[Row], stacks: Stacks) -> list[Link]:
    """Every row, of every layer."""
    found = []
    for one in rows:
        side = next((side for side in stacks if one.ours[0].startswith(f"{side}layer/")), None)
        if side is None:
            found.append(Link(tuple((path, None) for path in one.ours), one.theirs, one.form))
            continue
        layers, cycle = stacks[side]
        for n in range(layers):
            ours = tuple(place_of(path, n, layers, cycle) for path in one.ours)
            theirs = tuple(name.replace("{layer}", str(n)) for name in one.theirs)
            found.append(Link(ours, theirs, one.form))
    return found


def load(path: str, like: jax.ShapeDtypeStruct, table: Sequence[Link], tensors: Mapping[str, Stored]) -> jax.Array:
    """One parameter, on the devices of its sharding; of each of its shards one at a time is in the host's memory."""
    parts = {
        index: (link, k) for link in table for k, (name, index) in enumerate(link.ours) if name == path
    }  # index along the first axis -> the link that gives it, and which of its results

    def numbers(index: int | None) -> np.ndarray:
        link, k = parts[index]
        return link.form.take(tuple(tensors[name].read() for name in link.theirs))[k]

    def shard(where: tuple[slice, ...]) -> np.ndarray:
        out = np.empty([len(range(*s.indices(n))) for s, n in zip(where, like.shape, strict=True)], like.dtype)
        if None in parts:
            out[...] = numbers(None)[where]
        else:
            for i, layer in enumerate(range(*where[0].indices(like.shape[0]))):
                out[i] = numbers(layer)[where[1:]]
        return out

    sharding = like.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    devices: dict[tuple, list[jax.Device]] = {}
    for device, where in sharding.addressable_devices_indices_map(like.shape).items():
        devices.setdefault(tuple((s.start, s.stop) for s in where), []).append(device)
    arrays = []
    for where, holders in devices.items():
        part = shard(tuple(slice(*ends) for ends in where))
        arrays += [jax.device_put(part, device) for device in holders]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, arrays)


def export(params: Mapping[str, jax.Array], table: Sequence[Link]) -> list[Made]:
    """Every tensor of theirs, to be asked for its numbers one by one."""
    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in params.items()}

    def numbers(link: Link, k: int) -> np.ndarray:
        ours = tuple(np.asarray(params[path] if index is None else params[path][index]) for path, index in link.ours)
        return link.form.give(ours)[k]

    return [
        Made(name, shape, np.dtype("<f4"), lambda link=link, k=k: numbers(link, k))
        for link in table
        for k, (name, shape) in enumerate(link.lay_out(shapes).items())
    ]


def check_fit(
    where: str, there: Mapping[str, str], here: Mapping[str, str], fresh: Sequence[str] | None = None
) -> list[str]:
    """The parameters to be taken from somewhere: all but the fresh ones; says which does not fit, if one does not.

    `there` and `here` say what each parameter is, in words.
    """
    left = matching(fresh or (), [*here, *(path for path in there if path not in here)], "init.fresh")
    for path in [*here, *there]:
        if path not in left and there.get(path) != here.get(path):
            this, that = here.get(path, "not a parameter"), there.get(path, "absent")
            hint = "" if fresh is None else f"; to leave it, --config.init.fresh={re.escape(path)}"
            raise UserError(f"weights {where} do not fit: {path} is {that} there and {this} here{hint}")
    return [path for path in here if path not in left]
