"""Published recipes: each makes a model that reads the rows of its task."""

import itertools

import flax.linen as nn
import jax
import numpy as np
import pytest

from configs.recipes import BASELINES, IN_A_ROW, RECIPES, TRANSFORMER
from experiments.tables.benchmarks import PUBLISHED
from experiments.tables.definitions import TABLES
from model import build
from model.asked import Asked, Vectors
from model.errors import UserError
from model.groups import group_rules
from model.paths import by_path
from train import config as configs
from train import optim

ASKED = {
    "listops": (Asked(17, n_classes=10), 2048),
    "text": (Asked(257, n_classes=2), 4096),
    "retrieval": (Asked(257, n_classes=2, pair=True), 4000),
    "image": (Asked(0, n_classes=10, inputs=Vectors(1)), 1024),
    "pathfinder": (Asked(0, n_classes=2, inputs=Vectors(1)), 1024),
    "pathx": (Asked(0, n_classes=2, inputs=Vectors(1)), 128**2),
}
LEVELS = Asked(256, n_classes=10)  # pixels as released: grey levels
RELEASED = {"listops": 2000, "text": 1000}  # tokens of a row as LRA's own recipes read it; the others are as long


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("arch", "task"), [(arch, task) for arch, recipes in RECIPES.items() for task in ASKED if task in recipes]
)
def test_a_recipe_reads_the_rows_of_its_task(arch, task):
    c = configs.load(f"configs/lra.py:task={task},arch={arch},size=paper")
    (asked, L), recipe = ASKED[task], RECIPES[arch][task]
    assert (c.steps, c.batch_size, c.optim.lr, c.model.width) == (
        recipe.steps,
        recipe.batch_size,
        recipe.lr,
        recipe.width,
    )
    if arch == "attention" or arch in BASELINES:
        asked, L = LEVELS if asked.inputs else asked, RELEASED.get(task, L)
    assert c.data[c.data.task].protocol == ("lra" if arch == "attention" or arch in BASELINES else "s4")
    assert c.data[c.data.task].get("length", L) == L
    row = np.zeros((1, L, 1), np.float32) if asked.inputs else np.zeros((1, L), np.int32)
    pair = {"other": row} if asked.pair else {}
    model = build.build(c.model.to_dict(), asked)
    logits, _ = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), row, **pair))[0]
    assert logits.shape == (1, asked.n_classes)


PICTURES = [(arch, task) for arch, of_arch in IN_A_ROW.items() for task in of_arch]


@pytest.mark.few(2)
@pytest.mark.parametrize(("arch", "task"), PICTURES)
def test_a_recipe_reads_pictures_pixel_by_pixel(arch, task):
    c = configs.load(f"configs/seqimage.py:task={task},arch={arch},size=paper")
    recipe, channels = IN_A_ROW[arch][task], {"smnist": 1, "scifar": 3}[task]
    assert (c.steps, c.batch_size, c.optim.warmup) == (recipe.steps, recipe.batch_size, recipe.warmup)
    assert c.optim.lr * c.optim.ssm_lr == pytest.approx(recipe.ssm_lr)
    assert c.model.causal == (task == "smnist") and c.test_at == "best"
    asked = Asked(0, n_classes=10, inputs=Vectors(channels))
    model = build.build(c.model.to_dict(), asked)
    row = np.zeros((1, 64, channels), np.float32)
    assert jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), row))[0][0].shape == (1, 10)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arch", "task", "rows", "epochs"),
    [
        ("s4", "smnist", 54_000, 20),
        ("s5", "smnist", 54_000, 150),
        ("s4", "scifar", 45_000, 200),
        ("s4d", "scifar", 45_000, 200),
        ("s5", "scifar", 45_000, 250),
    ],
)
def test_pictures_are_read_for_the_published_epochs(arch, task, rows, epochs):
    recipe = IN_A_ROW[arch][task]
    assert recipe.steps == epochs * rows // recipe.batch_size


@pytest.mark.quick
def test_pictures_have_no_recipe_but_these():
    assert {(run.labels["arch"], run.labels["task"]) for run in TABLES["seqimage"].runs("paper")} == set(PICTURES)
    with pytest.raises(UserError, match=r"task with a published recipe of arch 's4d' 'smnist'; choose from scifar$"):
        configs.load("configs/seqimage.py:task=smnist,arch=s4d,size=paper")


def test_the_ssm_rate_is_the_published_one():
    c = configs.load("configs/lra.py:task=image,arch=s5,size=paper")
    assert c.optim.lr * c.optim.ssm_lr == pytest.approx(1e-3) and (c.model.s5.state, c.model.s5.blocks) == (384, 3)


def test_what_is_decayed_and_at_which_rate_is_published():
    """S4's steps have the rate of all parameters on four tasks; S5's B is decayed on two, its steps on two others."""

    def groups(arch, task):
        c = configs.load(f"configs/lra.py:task={task},arch={arch},size=paper")
        model = build.build(c.model.to_dict(), ASKED[task][0])
        row = np.zeros((1, 64, 1), np.float32) if ASKED[task][0].inputs else np.zeros((1, 64), np.int32)
        pair = {"other": row} if ASKED[task][0].pair else {}
        params = nn.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), row, **pair)))["params"]
        found = optim.groups(params, group_rules(c.model), c.optim.groups)
        mixers = {path: group for path, group in by_path(found).items() if "/mixer/" in path}
        return {path.split("/mixer/")[1]: group for path, group in mixers.items()}

    s4d = {task: groups("s4d", task) for task in ("listops", "image", "pathfinder")}
    assert {task: found["log_dt"] for task, found in s4d.items()} == dict(
        listops="no_decay", image="no_decay", pathfinder="ssm"
    )
    assert {(found["A_real"], found["C"], found["D"]) for found in s4d.values()} == {("ssm", "decay", "decay")}
    assert groups("s4", "text")["B"] == "ssm"
    s5 = {task: groups("s5", task) for task in ("listops", "text", "pathfinder")}
    assert {task: (found["B"], found["log_dt"]) for task, found in s5.items()} == dict(
        listops=("decay", "ssm"), text=("ssm", "decay"), pathfinder=("ssm", "ssm")
    )


def test_s4_reads_a_path_off_its_last_pixel():
    pools = {task: configs.load(f"configs/lra.py:task={task},arch=s4d,size=paper").model.pool for task in ASKED}
    assert [task for task, pool in pools.items() if pool == "last"] == ["pathfinder"]


def test_norms_are_the_published_ones():
    """Of the batch, but where S4 reads images; torch's momentum is 0.1, S5's 0.95 or 0.9 as Flax counts."""
    for arch, task in itertools.product(("s4", "s4d", "s5", "lru"), ASKED):
        m = configs.load(f"configs/lra.py:task={task},arch={arch},size=paper").model
        assert m.norm == ("layernorm" if arch in ("s4", "s4d") and task == "image" else "batchnorm"), (arch, task)
        assert m.final_norm == (m.norm_order == "pre" and arch != "s5"), (arch, task)
        if m.norm == "batchnorm":
            slow = arch == "s5" and task not in ("pathfinder", "pathx")
            assert m.batchnorm.momentum == (0.95 if slow else 0.9), (arch, task)
    assert configs.load("configs/lra.py:task=text,arch=attention,size=paper").model.norm == "layernorm"


@pytest.mark.parametrize(("task", "n"), [("image", 45_000), ("pathfinder", 160_000), ("pathx", 160_000)])
def test_the_transformer_reads_pixels_for_200_epochs_and_warms_up_for_one(task, n):
    recipe = RECIPES["attention"][task]
    assert recipe.warmup == n // recipe.batch_size and recipe.steps == 200 * recipe.warmup
    c = configs.load(f"configs/lra.py:task={task},arch=attention,size=paper")
    assert (c.model.position == "learned") == (task != "pathfinder")


def test_a_mode_of_the_lru_is_a_complex_number():
    """The source has 256 of them on Path-X, and trains what makes them at a quarter of the rate."""
    c = configs.load("configs/lra.py:task=pathx,arch=lru,size=paper")
    model = build.build(c.model.to_dict(), ASKED["pathx"][0])
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), np.zeros((1, 64, 1), np.float32)))["params"]
    shapes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert {shape for name, shape in shapes.items() if "nu_log" in name} <= {(256,), (6, 256)}
    assert any("nu_log" in name for name in shapes) and c.optim.ssm_lr == pytest.approx(0.25)


def test_an_architecture_without_a_recipe_is_named():
    with pytest.raises(
        UserError, match=r"published recipe 'mamba'; choose from attention, b2s6, bigbird, .*, lru, .*, s4, s4d, s5, "
    ):
        configs.load("configs/lra.py:task=image,arch=mamba,size=paper")


@pytest.mark.quick
@pytest.mark.parametrize("arch", BASELINES)
def test_a_baseline_has_the_transformers_settings_and_its_own_mixer(arch):
    theirs, ours = (
        configs.flatten(configs.load(f"configs/lra.py:task=listops,arch={name},size=paper,protocol=lra"))
        for name in ("attention", arch)
    )
    other = {key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]}
    assert other <= {"model.mixers"} and ours["model.mixers"] == (arch,)
    assert ours[f"model.{arch}.n_heads"] == TRANSFORMER["listops"].n_heads


@pytest.mark.quick
def test_a_baseline_has_no_recipe_for_path_x():
    allowed = "image, listops, pathfinder, retrieval, text"
    with pytest.raises(UserError, match=f"recipe of arch 'performer' 'pathx'; choose from {allowed}"):
        configs.load("configs/lra.py:task=pathx,arch=performer,size=paper")


@pytest.mark.quick
@pytest.mark.parametrize("task", ["image", "pathfinder"])
@pytest.mark.parametrize("arch", BASELINES)
def test_on_images_a_baseline_has_its_own_size_and_the_transformers_training(arch, task):
    theirs, ours = RECIPES["attention"][task], RECIPES[arch][task]
    training = ("lr", "schedule", "batch_size", "steps", "warmup", "clip")
    assert all(getattr(theirs, name) == getattr(ours, name) for name in training)
    c = configs.load(f"configs/lra.py:task={task},arch={arch},size=paper,protocol=lra")
    section = c.model[arch]
    assert (c.model.layers, c.model.width, c.model.mlp_width) == (ours.layers, ours.width, ours.mlp_width)
    assert (section.n_heads, section.head_dim) == (ours.n_heads, ours.head_dim)
    whole = arch == "reformer" or (arch, task) == ("sinkhorn", "image")
    assert section.n_heads * section.head_dim == (c.model.width if whole else c.model.width // 2)
    if task == "image":
        assert c.model.learned.max_len == 1024 + (c.model.pool == "cls")


@pytest.mark.quick
def test_published_scores_have_their_published_mean():
    """Over six tasks, as S4 (arXiv:2111.00396, table 10) prints it; Path-X is what guessing has."""
    means = dict(attention=53.66, local=46.71, fixed=51.03, longformer=52.88, linformer=51.14, reformer=50.56)
    means |= dict(sinkhorn=51.23, synthesizer=52.40, bigbird=54.17, linear=50.46, performer=51.18)
    assert means.keys() == {"attention", *BASELINES}
    for arch, mean in means.items():
        scores, source = PUBLISHED[arch]
        assert 100 * sum(scores) / 6 == pytest.approx(mean, abs=0.01) and "2011.04006" in source, arch


@pytest.mark.quick
def test_the_table_has_the_baselines_where_they_have_a_recipe():
    runs = [run for run in TABLES["lra"].runs("paper") if run.labels["arch"] in BASELINES]
    assert {run.labels["task"] for run in runs} == {"listops", "text", "retrieval", "image", "pathfinder"}
    assert len(runs) == 2 * 5 * len(BASELINES)
    assert all("protocol=lra" in run.config for run in runs)
