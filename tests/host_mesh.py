"""Meshes of forced host devices, and of devices that no machine here has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from configs import base
from train.run import on_mesh as traced_on_mesh
from train.sharding import AXES, rules_of

CONFIG = base.get_config()
RULES = rules_of(CONFIG.mesh)


def mesh_of(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_mesh(function: Callable, mesh: Mesh, **options) -> Callable:
    """Jitted, with the mesh and the rules of the config in force."""
    return traced_on_mesh(function, mesh, CONFIG, **options)


@contextmanager
def made_for(platform: str, **sizes: int) -> Iterator[AbstractMesh]:
    """In here programs are made for a mesh of such devices."""
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    mesh = AbstractMesh(shape, AXES, (AxisType.Auto,) * len(AXES), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(RULES):
        yield mesh
