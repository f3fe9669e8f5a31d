"""The law of lowering: on any machine, every mixer and every attention implementation lowers for TPUs and GPUs, on
meshes of many devices, none of which need be here; and what `None` picks there can serve the call.
"""

import itertools
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from model.contract import Context
from model.mixers import MIXERS
from model.ops import attention as op
from model.ops.attention import Bias, attention
from model.ops.mask import CAUSAL, FULL, Mask, Prefix, window
from model.ops.patterns import Chunk
from model.positions import POSITIONS
from model.positions.score_bias import ALiBiBias, FIREBias
from tests import meshes, zoo
from tests.meshes import laid, lowered, mesh_of
from tests.test_attention import slope
from train.sharding import AXES, shardings

pytestmark = pytest.mark.scale

ROWS = ("data", "fsdp")
WIDTH, LENGTH = 64, 512
# Heads of sizes that kernels are made for; the defaults are for a small width.
SPLASH = ("attention", "cross_attention", "mla", "nsa", "synthesizer")  # whose heads a TPU's kernel serves
SETTINGS = {"mamba2": dict(head_dim=16, state=16)}


def settings_of(name: str) -> dict:
    cls = MIXERS[name]
    place = {"position": POSITIONS["rope"]} if cls.softmax else {"causal": False} if cls.both_ways_only else {}
    return SETTINGS.get(name, {}) | place


@lru_cache(4)  # one for the tests of a mixer
def declared(mixer):
    """The parameters of a mixer, with the names of their axes."""
    x = jax.ShapeDtypeStruct((1, 4, WIDTH), mixer.dtype)
    return jax.eval_shape(lambda x: mixer.init(jax.random.key(0), x, Context(memory=x)), x)


def mixer_step(mixer, mesh, packed=False):
    """The program of a mixer's value and gradients on a mesh."""
    x = jax.ShapeDtypeStruct((256, LENGTH, WIDTH), mixer.dtype)
    places = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)

    def objective(variables, x, positions, segments):
        here = Context(positions=positions, segments=segments, memory_segments=segments) if packed else Context()
        y, _ = mixer.apply(variables, x, here.replace(memory=x))
        return jnp.sum(y.astype(jnp.float32) ** 2)

    boxed = declared(mixer.clone(dtype=jnp.float32))  # what is computed in changes no parameter
    variables = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        nn.unbox(boxed),
        shardings(boxed, mesh, meshes.RULES),
    )
    tokens = [laid(mesh, leaf, ROWS, "sequence") for leaf in (x, places, places)]
    return lowered(mesh, jax.value_and_grad(objective, argnums=(0, 1)), variables, *tokens)


# Those that run the code of another are lowered for one platform and the next for the other, and that other for both.
OF_KIN = [name for name in MIXERS if name in sum(zoo.KIN.values(), ())]
EACH = [(name, chip) for name in MIXERS if name not in OF_KIN for chip in ("tpu", "gpu")]
EACH += [(name, ("tpu", "gpu")[i % 2]) for i, name in enumerate(OF_KIN)]


@pytest.mark.parametrize(("name", "chip"), EACH)
def test_every_mixer_lowers(name, chip):
    """In float32 on 4 devices that share rows and channels; in bfloat16, packed, on 256 that share the length too."""
    cls = MIXERS[name]
    settings = settings_of(name)
    few = mixer_step(cls(width=WIDTH, **settings), mesh_of(chip, data=2, tensor=2))
    many = mesh_of(chip, data=4, fsdp=4, tensor=4, sequence=4)
    mixer_step(cls(width=WIDTH, dtype=jnp.bfloat16, **settings), many, packed=True)
    assert ("splash" in few) == (chip == "tpu" and name in SPLASH)
    assert ("ssd_states" in few) == (chip == "gpu" and name in ("mamba2", "luna"))


PURE = [{axis: size} for axis in ("data", "fsdp", "tensor", "sequence") for size in (4, 256)]


IN_TURN = [*zoo.FIRST_OF_KIN, "cross_attention"]


@pytest.mark.parametrize(("name", "chip"), [(name, ("tpu", "gpu")[i % 2]) for i, name in enumerate(IN_TURN)])
def test_every_mixer_lowers_on_every_axis(name, chip):
    """Alone: for one platform and the other, of 4 devices and of 256, in turn."""
    cls = MIXERS[name]
    settings = settings_of(name)
    turns = [PURE[0], PURE[3], PURE[4], PURE[7]] if chip == "tpu" else [PURE[1], PURE[2], PURE[5], PURE[6]]
    assert sorted(axis for sizes in turns for axis in sizes) == ["data", "fsdp", "sequence", "tensor"]
    for sizes in turns:
        assert "stablehlo" in mixer_step(cls(width=WIDTH, dtype=jnp.bfloat16, **settings), mesh_of(chip, **sizes))


# The attention op


def arrays(mesh, dtype, heads=None, dims=(16, 16, 16)):
    """q, k and v for a mesh to share out; two heads a device unless told."""
    shape = mesh.shape
    H = heads or 2 * shape["tensor"] * shape["sequence"]
    made = (jax.ShapeDtypeStruct((shape["data"] * shape["fsdp"], LENGTH, H, dim), dtype) for dim in dims)
    return [laid(mesh, leaf, ROWS, "sequence", "tensor") for leaf in made]


def gradient(*arrays, **call):
    def objective(q, k, v):
        out = attention(q, k, v, **call)
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(out))

    return jax.grad(objective, argnums=(0, 1, 2))(*arrays)


@pytest.mark.parametrize("chip", ["tpu", "gpu"])
@pytest.mark.parametrize("sizes", PURE, ids=str)
def test_every_implementation_lowers(chip, sizes):
    mesh = mesh_of(chip, **sizes)
    names = ["xla", "tiled", "reference"] + ["splash"] * (chip == "tpu")

    def every(*arrays):
        return [gradient(*arrays, implementation=name) for name in names]

    text = lowered(mesh, every, *arrays(mesh, jnp.bfloat16))
    assert ("all_to_all" in text) == ("sequence" in sizes)
    # A GPU's compiler asks XLA's evaluator of constants where slices of loops begin, and that knows no barrier.
    assert "optimization_barrier" not in text


def standing_in(mesh):
    """The devices here in place of a mesh's: programs that hold cuDNN's kernel are not made for abstract ones."""
    devices = np.asarray(jax.devices()[: mesh.size]).reshape(tuple(mesh.shape.values()))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


@pytest.mark.parametrize("sizes", PURE[::2], ids=str)
def test_cudnn_lowers(sizes):
    mesh = mesh_of("gpu", **sizes)

    def every(*arrays):
        return [gradient(*arrays, mask=mask, implementation="cudnn") for mask in (CAUSAL, FULL, CAUSAL & window(5))]

    text = lowered(mesh, every, *arrays(standing_in(mesh), jnp.bfloat16))
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 3


def mask_of(some) -> Mask:
    mask = FULL if "bidirectional" in some else CAUSAL
    if "window" in some:
        mask = mask & window(40)
    if "uneven blocks" in some:
        mask = mask & Chunk(40)
    return mask | Prefix(7) if "pattern" in some else mask


def network(H: int) -> Bias:
    """FIRE's, of 4 units."""
    shapes = {"log_c": (H,), "log_L": (H,), "hidden": (4, H), "hidden_bias": (4, H), "out": (4, H)}
    axes = {name: (None,) * (len(shape) - 1) + ("heads",) for name, shape in shapes.items()}
    return Bias({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, FIREBias(), axes)


# Every way in which a call may differ from the plainest
FEATURES = {
    **dict.fromkeys(("window", "bidirectional", "pattern", "uneven blocks"), lambda n, H: {}),  # `mask_of` brings them
    "segments": lambda n, H: dict.fromkeys(("q_segments", "k_segments"), np.ones((1, n), np.int32)),
    "padding": lambda n, H: FEATURES["segments"](n, H) | dict(right_padded=True),  # which segments then are
    "positions": lambda n, H: dict.fromkeys(("q_positions", "k_positions"), np.arange(n, dtype=np.int32)[None]),
    "bias": lambda n, H: dict(bias=Bias({"m": np.ones(H, np.float32)}, ALiBiBias(), {"m": ("heads",)})),
    "network bias": lambda n, H: dict(bias=network(H)),
    "other bias": lambda n, H: dict(bias=Bias(np.ones(H, np.float32), slope, ("heads",))),
    "soft cap": lambda n, H: dict(soft_cap=3.0),
    "sinks": lambda n, H: dict(sinks=np.zeros(H, np.float32)),
    "additive": lambda n, H: dict(additive=np.ones((H, 16), np.float32)),
    "levels": lambda n, H: dict.fromkeys(("q_levels", "k_levels"), np.ones((1, n, H), np.float32)),
    "lse": lambda n, H: dict(with_lse=True),
    "value dim": lambda n, H: {},
}
FUSED = ("splash", "cudnn")
# What some fused kernel has is asked for in every combination; what none has leaves it to plain XLA, which has all.
HAD = [name for name in FEATURES if any(name not in op.IMPLEMENTATIONS[kernel].lacks for kernel in FUSED)]
ASKED = [some for n in range(len(HAD) + 1) for some in itertools.combinations(HAD, n)]
ASKED = [some for some in ASKED if not {"segments", "padding"} <= set(some)]
ASKED += [(name,) for name in FEATURES if name not in HAD] + [tuple(FEATURES)]


@pytest.mark.quick
def test_the_features_asked_for_are_those_there_are():
    assert set(FEATURES) | {"stretch", "ring", "filled"} == set(op.FEATURES)  # which a mesh brings, or a cache


@pytest.mark.parametrize(
    ("chip", "dtype", "sizes", "heads"),
    [
        ("tpu", "float32", dict(data=2, tensor=2), 4),
        ("tpu", "bfloat16", dict(sequence=4), 3),
        ("gpu", "bfloat16", dict(tensor=2, sequence=2), 4),
        ("gpu", "bfloat16", dict(sequence=4), 3),
        ("volta", "float16", dict(data=2, tensor=2), 4),
    ],
    ids=str,
)
def test_what_none_picks_serves_every_combination(chip, dtype, sizes, heads):
    mesh = mesh_of(chip, **sizes)
    values = arrays(standing_in(mesh), dtype, heads, dims=(16, 16, 16, 8))

    def every(q, k, v, narrow):
        def ask(some):
            call = dict(mask=mask_of(some))
            for name in some:
                call |= FEATURES[name](LENGTH, heads)
            return gradient(q, k, narrow if "value dim" in some else v, **call)

        return [ask(some) for some in ASKED if dtype != "float32" or len(some) < 2]

    text = lowered(mesh, every, *values)
    ring = heads == 3  # which devices that share the length cannot exchange it for
    served = ("splash" in text, "fmhaSoftmax" in text, "collective_permute" in text)
    assert served == (chip == "tpu" and not ring, chip == "gpu" and not ring, ring)
