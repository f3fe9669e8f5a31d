"""Named architectures: at each size as many parameters, so that a table compares architectures and not sizes."""

import jax
import numpy as np
import pytest

from configs import archs, base
from model import build
from model.asked import Asked
from model.errors import UserError
from train import config as configs

TOLERANCE = 0.03
SECOND_MAP = {"s4", "s4d", "s5", "lru", "mega", "mega_chunk"}  # out of the state, where a model reads both ways
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


def test_an_unknown_size_is_named():
    with pytest.raises(UserError, match=r"'smal'.*closest"):
        archs.use_matched(base.get_config(), "attention", "smal")
