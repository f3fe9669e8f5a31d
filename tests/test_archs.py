"""Named architectures: at each size as many parameters, so that a table compares architectures and not sizes."""

import jax
import numpy as np
import pytest

from configs import archs, base
from model import build
from model.asked import Asked
from model.entries import entry
from model.errors import UserError
from model.mixers import MIXERS
from train import config as configs

TOLERANCE = 0.03
SECOND_MAP = {"s4", "s4d", "dss", "s5", "lru", "mega", "mega_chunk"}  # out of the state, where a model reads both ways
TOLERATED = {"tiny": 0.09, "small": 0.06}  # of these


def parameters(arch: str, size: str, both_ways: bool) -> int:
    """Of the layers: without the embeddings and the head, which go with the task."""
    c = base.get_config()
    archs.use_matched(c, arch, size, both_ways)
    if both_ways:
        archs.read_bidirectionally(c)
    section = configs.resolve(c).model.to_dict()
    model = build.build(section, Asked(vocab_size=2, n_classes=2 if both_ways else 0))
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    layers = {name: part for name, part in shapes.items() if name not in ("embed", "classes")}
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(layers))


def stacks() -> set[str]:
    return {arch for arch, changes in archs.ARCHS.items() if "kind" not in changes}


def test_every_architecture_that_reads_one_row_is_matched():
    assert archs.MATCHED.keys() == stacks()
    named = {entry(arch, name).mixer for arch in archs.ARCHS.values() for name in arch["mixers"]}
    assert MIXERS.keys() - named == {"cross_attention"}, "a mixer that no architecture has"


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("size", archs.SIZES)
def test_architectures_of_one_size_have_as_many_parameters(size, both_ways):
    asked = parameters("attention", size, both_ways)
    ratios = {arch: parameters(arch, size, both_ways) / asked for arch in archs.MATCHED}

    def allowed(arch):
        return TOLERATED.get(size, TOLERANCE) if both_ways and arch in SECOND_MAP else TOLERANCE

    assert {arch: ratio for arch, ratio in ratios.items() if abs(ratio - 1) > allowed(arch)} == {}


SPECS = (  # of every config that takes any architecture
    "debug.py:arch={}",
    "distance.py:arch={}",
    "enwik8.py:size=smoke,arch={}",
    "enwik8.py:arch={}",
    "listops.py:arch={}",
    "lra.py:task=listops,arch={}",
    "lra_speed.py:size=smoke,arch={}",
    "mad.py:arch={}",
    "recall.py:arch={}",
    "ruler.py:arch={}",
    "seq2seq.py:size=smoke,arch={}",
    "step_speed.py:size=64,arch={}",
    "synthetic.py:arch={}",
    "text.py:arch={}",
    "tracking.py:arch={}",
)


@pytest.mark.quick
@pytest.mark.parametrize("arch", [arch for arch in sorted(stacks()) if len(archs.ARCHS[arch]["mixers"]) > 1])
@pytest.mark.parametrize("spec", SPECS)
def test_every_mixer_of_an_architecture_has_its_turn(spec, arch):
    model = configs.load(f"configs/{spec.format(arch)}").model
    assert model.layers >= len(model.mixers) > 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("stack", dict(layers=1), r"model.layers is 1, and 2 mixers take turns \(attention, s4d\); .* at least 2"),
        ("encoder_decoder", dict(layers=1), "model.layers is 1, and 2 mixers take turns .*; closest: 2"),
        ("encoder_decoder", dict(encoder_layers=1), "model.encoder_layers is 1, and 2 mixers .*; closest: 2"),
    ],
)
def test_a_mixer_without_a_turn_is_refused(kind, changes, says):
    c = base.get_config()
    c.model.update(kind=kind, mixers=("attention", "s4d"), mlp="none", **changes)
    with pytest.raises(UserError, match=says):
        build.build(configs.resolve(c).model.to_dict(), Asked(vocab_size=2, source=kind == "encoder_decoder"))


def test_an_unknown_size_is_named():
    with pytest.raises(UserError, match=r"'smal'.*closest"):
        archs.use_matched(base.get_config(), "attention", "smal")
