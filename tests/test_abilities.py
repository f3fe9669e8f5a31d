"""The tables of abilities: their settings as published, their means, their second metrics."""

import pytest

from configs import mad as mad_config
from experiments.running import campaign, folders
from experiments.tables import formats
from experiments.tables.definitions import TABLES
from experiments.tables.layout import Layout, sheet
from experiments.tables.table import layout
from model.errors import UserError
from tests.processes import call
from tests.test_report import row
from train import config as configs


def scored(arch: str, setting: str, lr: float, validation: float, test: float | None, seed: int = 0) -> dict:
    made = row({"arch": arch, "setting": setting, "lr": lr}, seed, test, data_fingerprint=setting)
    made["metrics"] |= {"validation/accuracy": validation} if test is not None else {}
    return made


@pytest.mark.quick
def test_a_mean_over_settings_is_that_of_the_best_run_of_each():
    found = [
        scored("a", "short", 1, validation=0.5, test=0.4),
        scored("a", "short", 2, validation=0.6, test=0.3),
        scored("a", "long", 1, validation=0.9, test=0.7),
        scored("a", "long", 2, validation=0.8, test=0.9),
        *(
            scored("b", setting, lr, 0.5, 0.5, seed)
            for setting in ("short", "long")
            for lr in (1, 2)
            for seed in (0, 1)
        ),
        scored("c", "short", 1, validation=0.5, test=0.4),
        scored("c", "long", 1, validation=0.5, test=None),
    ]
    found[4]["metrics"]["test/accuracy"] = 0.9  # b, short, rate 1, seed 0
    made = sheet(found, Layout("test/accuracy", ("arch",), tuned=("lr",), averaged=("setting",)))
    (a,), (b,), (c,) = made.lines.values()
    assert a.summary.mean == pytest.approx((0.3 + 0.7) / 2), "short at rate 2, long at rate 1"
    assert (a.summary.n, a.summary.failed) == (1, 0)
    assert b.summary.mean == pytest.approx(((0.9 + 0.5) / 2 + 0.5) / 2), "seeds are averaged after settings"
    assert b.summary.spread == pytest.approx(0.2 / 2**0.5) and b.summary.n == 2
    assert c.summary.mean is None and c.summary.failed == 1, "a mean of some settings is none"
    assert "Mean over every setting" in formats.markdown(made)
    with pytest.raises(UserError, match="rows of one cell differ in setting"):
        sheet(found, Layout("test/accuracy", ("arch",), tuned=("lr",)))


@pytest.mark.quick
def test_a_mean_names_the_rate_that_all_its_settings_chose_and_counts_the_other_runs():
    found = [
        scored("a", setting, lr, validation=lr / 4, test=0.5 if setting == "short" else 0.25 * lr)
        for setting in ("short", "long")
        for lr in (1, 2)
    ]
    shown = Layout("test/accuracy", ("arch",), tuned=("lr",), averaged=("setting",))
    cells = formats.arrange(sheet(found, shown)).body[0]
    assert cells[1:4] == ["50.0 (lr 2)", "0 of 1", "0 of 2"]
    found[1] = scored("a", "short", 2, validation=0.5, test=None)  # so that its rate is 1
    made = sheet(found, shown)
    assert formats.arrange(made).body[0][1:4] == ["50.0", "0 of 1", "1 of 2"]
    assert ",,2,1," in formats.comma_separated(made), "no rate, two other runs, one of which failed"


@pytest.mark.quick
def test_mad_has_the_published_settings():
    table = TABLES["mad"]
    runs = [run for run in table.runs("paper") if run.labels["arch"] == "mamba"]
    settings = {(run.labels["task"], run.labels["setting"]): run for run in runs}
    counts = {task: sum(key[0] == task for key in settings) for task, _ in settings}
    published = {"recall": 11, "fuzzy_recall": 11, "noisy_recall": 14, "selective_copying": 13, "compression": 11}
    assert counts == published | {"memorization": 6} and len(runs) == 66 * 6
    for (task, setting), (name, value, steps) in {
        ("recall", "baseline"): ("length", 128, 20_000),
        ("recall", "n_train 800"): ("n_train", 800, 1250),
        ("noisy_recall", "noise 0.8"): ("noise", 0.8, 20_000),
        ("selective_copying", "n_tokens 96"): ("n_tokens", 96, 20_000),
        ("compression", "length 256"): ("length", 256, 20_000),
        ("memorization", "vocab_size 8192"): ("vocab_size", 8192, 400),
    }.items():
        config = configs.load(settings[task, setting].config)
        assert config.data.task == f"mad_{task}" and config.data[f"mad_{task}"][name] == value
        assert (config.steps, config.batch_size, config.model.width, config.model.dtype) == (
            steps,
            128,
            128,
            "bfloat16",
        )
    assert layout(table, "smoke").averaged == () and layout(table, "small").averaged == ("setting",)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("mad.py:task=recal", "unknown task 'recal'; .* closest: recall"),
        ("mad.py:task=recall,change=lenght,to=64", "unknown change 'lenght'; .* closest: length"),
        ("mad.py:task=noisy_recall,change=noise,to=much", "to is 'much'; noise takes a number, such as 0.2"),
        ("mad.py:task=recall,change=length", "to is ''; length takes a whole number, such as 128"),
        ("mad.py:task=recall,to=64", "to is '64', and no change is named; allowed: change=vocab_size, length, n_train"),
        ("mad.py:change=length,to=3,size=smoke", "length is 3 .*; closest: 4"),
        ("tracking.py:task=s6", "unknown task 's6'; .* s5"),
        ("distance.py:trained=maybe", "unknown trained 'maybe'; .* no, yes; closest: yes"),
    ],
)
def test_mistakes_are_told_in_one_line(config, says):
    with pytest.raises(UserError, match=says) as error:
        configs.load(f"configs/{config}")
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("size", mad_config.SIZES)
@pytest.mark.parametrize(("change", "to"), [("n_tokens", 8), ("length", 32), ("vocab_size", 24)])
def test_a_task_of_mad_is_changed_as_asked_at_any_size(change, to, size):
    spec = f"task=selective_copying,size={size}"
    usual, changed = (
        mad_config.get_config(text).data.mad_selective_copying for text in (spec, f"{spec},change={change},to={to}")
    )
    assert changed.to_dict() == usual.to_dict() | {change: to}


@pytest.mark.quick
@pytest.mark.parametrize(("arch", "own"), [("mqa", {"n_kv_heads": 1}), ("window", {"window": 64})])
def test_an_architecture_stays_itself_in_mad(arch, own):
    assert mad_config.get_config(f"arch={arch}").model.attention.to_dict() == own | {"n_heads": 16}


@pytest.mark.quick
def test_an_untrained_model_of_distances_stays_as_it_was():
    config = configs.load("configs/distance.py:arch=rnn,trained=no")
    assert (config.steps, config.optim.lr, config.objective.kind) == (1, 0.0, "reach")


def test_a_table_shows_its_other_metrics_beside_it(tmp_path):
    """Every run has its result already, so nothing is trained."""
    for name, item in campaign.plan(TABLES["distance"].runs("smoke"), tmp_path).items():
        folders.claim(tmp_path / name, item.run, item.config_hash)
        numbers = {"test/length_4/accuracy": 0.75, "test/length_4/reach": -7.25}
        made = row(dict(item.run.labels), 0, 0.5, steps=9, config_hash=item.config_hash)
        folders.write_json(tmp_path / name / "result.json", made | {"metrics": numbers})
    code, printed, errors = call("experiments.reproduce", "distance", "--scale=smoke", f"--out={tmp_path}")
    assert code == 0, errors
    assert "75.0" in printed and "-7.25" in printed
    assert "75.0" in (tmp_path / "table.md").read_text() and "-7.25" not in (tmp_path / "table.md").read_text()
    assert "-7.25" in (tmp_path / "reach" / "table.md").read_text() and (tmp_path / "reach" / "plot.png").exists()
