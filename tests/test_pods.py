"""Pod configs: as many parameters as their names say, and meshes that are as large as their machines."""

import math
import re

import flax.linen as nn
import jax
import pytest

import data
from configs import pods
from data import pipeline
from experiments.measurements import pods as bench
from model.errors import UserError
from tests.processes import run
from train import chips
from train import config as configs
from train.objective import arguments
from train.objectives import build as build_objective
from train.run import model_for
from train.sharding import AXES

SIZES = [(arch, size) for arch in pods.MATCHED for size in pods.SHAPES] + [("moe", "8x1b3")]


@pytest.mark.few(3)
@pytest.mark.parametrize(("arch", "size"), SIZES)
def test_a_size_is_within_4_percent_of_its_name(arch, size):
    c = configs.load(f"configs/pods.py:arch={arch},size={size},length=128")
    task = data.build(c.data.task, c.data[c.data.task].to_dict())
    objective = build_objective(c.objective.to_dict(), task)
    model, batch = model_for(objective, c), objective.view(pipeline.batch_at(task, 0, "train", 1, 0), None)
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), batch["inputs"], **arguments(batch)))["params"]
    assert sum(x.size for x in jax.tree.leaves(nn.unbox(made))) == pytest.approx(pods.PARAMS[size], rel=0.04)


@pytest.mark.quick
def test_what_a_compiler_says_is_one_cell_of_a_table():
    case = next(bench.cases()) | {"error": "XlaRuntimeError: f32[8] | f32[4]", "fits": False}
    (line,) = [line for line in bench.table([case]).splitlines() if "Xla" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == len(bench.TITLES) + 1


@pytest.mark.parametrize("target", pods.TARGETS)
def test_meshes_take_all_chips_and_batches_divide(target):
    topology = chips.parse(pods.TARGETS[target])
    assert topology.chips == pods.CHIPS[target]
    for arch, size in SIZES:
        if arch not in ("attention", "moe"):  # the others have the same meshes
            continue
        for length in (8192, 2**20):
            c = pods.get_config(f"arch={arch},size={size},target={target},length={length}")
            assert math.prod(c.mesh[axis] for axis in AXES) == topology.chips
            assert c.batch_size % (c.mesh.data * c.mesh.fsdp * c.mesh.expert) == 0
            assert length % c.mesh.sequence == 0


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("target=v5e-25", "closest: v5e-256"),
        ("size=8x1b3", "closest: 1b3"),
        ("arch=moe,size=7b", "8x1b3"),
        ("arch=mamba", "closest: mamba2"),
        ("length=3000", "closest: 2048"),
        ("length=8191", "closest: 8192"),
        ("length=1", "closest: 128"),
    ],
)
def test_what_is_no_pod_config_is_refused(argument, told):
    with pytest.raises(UserError, match=told):
        pods.get_config(argument)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("arch", "size", "target", "length"),
    [
        ("s4d", "1b3", "v5e-256", 8192),
        ("attention", "1b3", "v5e-256", 2**20),
        ("mamba2", "125m", "v6e-256", 8192),
        ("hybrid", "125m", "v5p-128", 8192),
        ("gated_deltanet", "125m", "h100-64", 8192),
        ("moe", "8x1b3", "h100-64", 8192),
    ],
)
def test_a_pod_config_fits_by_the_compilers_word(arch, size, target, length):
    """One of each architecture and machine; `make pods` has them all."""
    spec = f"configs/pods.py:arch={arch},size={size},target={target},length={length}"
    ended = run("train", f"--config={spec}", "--compile_only", f"--topology={pods.TARGETS[target]}", timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "fits"
