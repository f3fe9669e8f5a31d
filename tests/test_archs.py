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


def parameters(arch: str, size: str) -> int:
    """Of the layers: without the embeddings, which go with the task."""
    c = base.get_config()
    archs.use_matched(c, arch, size)
    section = configs.resolve(c).model.to_dict()
    model = build.build(section, Asked(vocab_size=2))
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes)) - 2 * section["width"]


def stacks() -> set[str]:
    return {arch for arch, changes in archs.ARCHS.items() if "kind" not in changes}


def test_every_architecture_that_reads_one_row_is_matched():
    assert archs.MATCHED.keys() == stacks()


@pytest.mark.scale
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("size", archs.SIZES)
def test_architectures_of_one_size_have_as_many_parameters(size):
    asked = parameters("attention", size)
    ratios = {arch: parameters(arch, size) / asked for arch in archs.MATCHED}
    assert {arch: ratio for arch, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE} == {}


def test_an_unknown_size_is_named():
    with pytest.raises(UserError, match=r"'smal'.*closest"):
        archs.use_matched(base.get_config(), "attention", "smal")
