"""The step compiled for machines that are not here: what is told of it, and what is refused."""

import dataclasses
from importlib.util import find_spec

import pytest

from model.paths import by_path
from tests.processes import refusals, run
from train import chips, compile_only
from train import config as configs
from train.run import prepare

DEBUG = "configs/debug.py"


def row_of(spec: str, topology: str, **changed: str) -> dict:
    config = configs.load(spec, [(key.replace("__", "."), value) for key, value in changed.items()])
    return compile_only.measure(config, chips.parse(topology))[0]


def test_memory_is_what_the_compiled_step_says():
    config = configs.load(DEBUG)
    row = row_of(DEBUG, "cpu:8")
    built = prepare(config)
    step = built.train_step.lower(built.abstract, compile_only.abstract_batch(built))
    m = step.compile(compiler_options=compile_only.ESTIMATED).memory_analysis()
    held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    assert row["memory"] == held > row["state"] == m.argument_size_in_bytes
    # Products of attention that is not masked away, and 6 a token and parameter, are all that a step has.
    assert row["flops"] == pytest.approx(row["useful_flops"], rel=0.2)
    assert {each["axes"] for each in row["collectives"]} == {"data"}


@pytest.mark.quick
def test_scores_count_by_the_dims_of_their_heads():
    """4 heads on rows of 64 tokens, 32 rows a step; a token's queries meet half of the row, or 8 tokens."""

    def of_scores(**changed: str) -> float:
        built = prepare(configs.load(DEBUG, [(key.replace("__", "."), value) for key, value in changed.items()]))
        L, c = max(built.objective.lengths), built.config
        return compile_only.useful(built) / (6 * c.batch_size * L) - compile_only.active(built), L, c.model.layers

    found, L, layers = of_scores(model__attention__head_dim="24")
    assert found == pytest.approx(layers * L / 2 * 4 * (24 + 24))
    found, L, layers = of_scores(model__attention__window="8")
    assert found == pytest.approx(layers * 8 * 4 * (8 + 8))
    mla = dict(model__mixers="mla", model__mla__shared_dim="8", model__mla__head_dim="16", model__mla__v_dim="32")
    found, L, layers = of_scores(**mla)
    assert found == pytest.approx(layers * L / 2 * 4 * (16 + 8 + 32))
    assert of_scores(model__mixers="s4d", model__position="none")[0] == 0


def test_a_step_is_built_once(monkeypatch):
    built = []
    monkeypatch.setattr(
        compile_only, "prepare", lambda config, devices=None: built.append(prepare(config)) or built[-1]
    )
    monkeypatch.setattr(compile_only, "compiled_here", lambda run: None)
    monkeypatch.setattr(compile_only, "figures", lambda run, topology, compiled: {"fits": run is built[0]})
    assert row_of(DEBUG, "cpu:8")["fits"] and len(built) == 1


@pytest.mark.parametrize("of", ["model.mlp", "model.own.mlp"])
def test_of_experts_those_that_are_chosen_are_active(of):
    """Whether all layers have them or those of one name."""
    layers = [("model.mixers", "attention,own"), ("model.own.mixer", "attention"), ("model.layers", "4")]
    experts = [(of, "experts"), ("model.experts.n_experts", "8"), ("model.experts.top_k", "2")]
    run = prepare(configs.load(DEBUG, [*layers, *experts]))
    paths = by_path(run.abstract.params).items()
    of_one = sum(x.size // 8 for path, x in paths if path.endswith(("/mlp/up", "/mlp/gate", "/mlp/down")))
    assert of_one > 0 and compile_only.active(run) == run.params - 6 * of_one


@pytest.mark.scale
@pytest.mark.parametrize(("topology", "platform"), [("v5e:2x4", "tpu"), ("2xv5p:2x2x1", "tpu"), ("h100:8", "cuda")])
def test_a_step_is_lowered_for_chips_whose_compiler_is_not_here(monkeypatch, topology, platform):
    monkeypatch.setattr(
        compile_only.importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name)
    )
    row = row_of(DEBUG, topology, mesh__data="2", mesh__fsdp="4")
    assert row["lowered_for"] == platform and row["why"] and row["fits"] and row["step_s"] >= row["overlapped_s"] > 0
    far = sum(each["far_bytes"] for each in row["collectives"])
    assert (far > 0) == topology.startswith("2x")  # `data` lies across the slices


def test_what_does_not_fit_is_told_and_ends_in_1(monkeypatch, capsys):
    tiny = dataclasses.replace(chips.CHIPS["v5e"], hbm=1e5)
    monkeypatch.setitem(chips.CHIPS, "v5e", tiny)
    assert compile_only.main(configs.load(DEBUG), chips.parse("v5e:2x4")) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.scale
def test_long_convolutions_gather_no_rows():
    """Of a Fourier transform the compiler would gather all rows on every device."""
    row = row_of(f"{DEBUG}:arch=s4d", "cpu:8", data__mqar__length="512")
    assert {each["kind"] for each in row["collectives"]} == {"all-reduce"}


def temporary(**changed: str) -> int:
    """Bytes that a step holds beside its arguments, layers looped over and made anew."""
    given = dict(model__kept="nothing", model__scan="True", batch_size="8") | changed
    config = configs.load(DEBUG, [(key.replace("__", "."), value) for key, value in given.items()])
    built = prepare(config)
    return compile_only.compiled_here(built).temporary_bytes


@pytest.mark.scale
@pytest.mark.parametrize(("implementation", "heads", "short"), [("tiled", 8, 2048), ("ring", 4, 8192)])
def test_masks_of_tiles_are_not_all_held_at_once(implementation, heads, short):
    """JAX would make those of all tiles before the loop over layers."""
    shared = dict(mesh__data="1", mesh__sequence="8", model__width="64", batch_size="1")
    tiled = dict(model__attention__implementation=implementation, model__attention__n_heads=str(heads), **shared)
    once, twice = (temporary(data__mqar__length=str(n), **tiled) for n in (short, 2 * short))
    assert twice < 1.8 * once


@pytest.mark.scale
def test_of_a_cycle_one_block_is_made_anew_at_a_time():
    kinds = dict(model__layers="8", model__position="none", data__mqar__length="512")
    one = temporary(model__mixers="('mamba2',)", **kinds)
    four = temporary(model__mixers="('mamba2', 'mamba2', 'attention', 'mamba2')", **kinds)
    assert four < 2.3 * one  # attention's is larger; of all four together it is three times


@pytest.mark.scale
def test_many_layers_of_a_cycle_share_the_length_beside_another_axis():
    """Each asks which stretch its device has, by what the compiler can tell inside of what it calls several times."""
    kinds = dict(model__mixers=str((*["mamba2"] * 4, "attention")), model__layers="10", model__position="none")
    assert temporary(mesh__data="2", mesh__sequence="4", data__mqar__length="64", **kinds) > 0


@pytest.mark.scale
def test_the_command():
    ended = run("train", f"--config={DEBUG}", "--compile_only", "--topology=v5e:2x4")
    assert ended.returncode == 0, ended.stderr
    here = find_spec("libtpu") is not None
    for told in ("the TPU's compiler",) if here else ("TPU compiler", "estimate"):
        assert told in ended.stdout
    for told in ("of 16.0 GiB", "FLOPs", "all-reduce over data", "of peak", "compiled in"):
        assert told in ended.stdout
    assert ended.stdout.splitlines()[-1] == "fits"


LINES = {
    (f"--config={DEBUG}", "--compile_only"): "--topology is missing",
    (f"--config={DEBUG}", "--topology=v5e:2x4"): "--compile_only, which is not given",
    (f"--config={DEBUG}", "--compile_only", "--topology=v5e:3x5"): "closest: v5e:4x4",
    ("--compile_only", "--topology=v5e:2x4"): "--config is missing",
    ("--config=configs/pods.py:size=1b2", "--compile_only", "--topology=cpu:2"): "closest: 1b3",
    ("--config=configs/pods.py:length=1000", "--compile_only", "--topology=cpu:2"): "closest: 1024",
    (f"--config={DEBUG}", "--config.mesh.fsdp=3", "--compile_only", "--topology=cpu:2"): "there are 2",
}


def test_mistakes_are_told_in_one_line(tmp_path):
    for told, ended in zip(LINES.values(), refusals("train", list(LINES), tmp_path), strict=True):
        assert (ended["code"], ended["wrote"]) == (2, []), ended
        assert told in ended["stderr"] and len(ended["stderr"].splitlines()) == 1
