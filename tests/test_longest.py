"""Architectures with weights for every place of a row have them for the rows of each benchmark."""

import pytest

from configs import lra, seqimage
from train import config as configs
from train.run import prepare

ARCHS = ("linformer", "sinkhorn", "synthesizer")
ROWS = {
    **{f"configs/lra.py:task={task},": None for task in lra.TASKS},
    "configs/lra.py:task=pathx,protocol=lra,": None,
    **{f"configs/seqimage.py:task={task},": pixels for task, (_, _, _, pixels) in seqimage.TASKS.items()},
    "configs/listops.py:size=lra,": None,
    "configs/enwik8.py:size=small,": None,
    "configs/lra_speed.py:length=16384,": None,
}


@pytest.mark.quick
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("spec", ROWS)
def test_rows_are_no_longer_than_the_longest(spec, arch):
    config = configs.load(f"{spec}arch={arch}")
    section = config.data[config.data.task]
    assert config.model[arch].longest >= (ROWS[spec] or section.get("length") or section.get("side", 32) ** 2)


@pytest.mark.quick
def test_shorter_rows_leave_a_preset_as_it_is():
    assert configs.load("configs/lra.py:task=listops,arch=linformer,size=smoke").model.linformer.longest == 1024


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("task", ("listops", "pathfinder"))
def test_their_models_are_built(task, arch):
    assert prepare(configs.load(f"configs/lra.py:task={task},arch={arch}")).params > 700_000
