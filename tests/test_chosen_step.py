"""The test score is that of the step which validation chose, whatever befalls the run."""

import pytest

from tests.processes import fork
from tests.test_hosts import command, pair
from tests.test_train import load, stop_after
from train import loop
from train.checkpoint import load_params, steps
from train.loop import train
from train.run import prepare
from train.scores import measure
from train.workdir import read_json

SMALL = [("steps", "20"), ("eval_every", "4"), ("eval_batches", "1"), ("model.layers", "1"), ("keep", "1")]
VOLATILE = ("wall_s", "steps_per_s", "data_wait", "goodput", "date", "revision", "revisions")
SCORES = {4: 0.5, 8: 0.9, 12: 0.9, 16: 0.1, 20: 0.9}  # validation's word on each step


def config(**settings):
    return load(*SMALL, *((key, str(value)) for key, value in settings.items()))


@pytest.fixture
def scripted(monkeypatch):
    """Validation says what SCORES has."""
    monkeypatch.setattr(loop, "validate", lambda run, state, split: {"validation/accuracy": SCORES[int(state.step)]})


def scores_of(run, workdir, step: int) -> dict[str, float]:
    params = load_params(workdir / "checkpoints", run.abstract.params, step)
    return measure(run, run.abstract.replace(params=params), "test")[0]


def lasting(row: dict) -> dict:
    """What of a row does not depend on when, how fast and by which revision it was made."""
    return {key: value for key, value in row.items() if key not in VOLATILE}


@pytest.mark.scale
@pytest.mark.parametrize("every", [0, 4])  # saved at the end only, or also where the chosen score comes again
def test_the_first_step_of_the_best_validation_score_is_tested(every, tmp_path, scripted):
    asked = config(test_at="best", checkpoint_every=every)
    row = train(asked, str(tmp_path))
    assert (row["steps"], row["tested_step"], row["metrics"]["validation/accuracy"]) == (20, 8, 0.9)
    assert steps(tmp_path / "checkpoints") == [8, 20]
    tested = {name: value for name, value in row["metrics"].items() if name.startswith("test/")}
    run = prepare(asked)
    assert tested == scores_of(run, tmp_path, 8) != scores_of(run, tmp_path, 20)
    assert row["targets"] == dict.fromkeys(tested, 16 * 4)  # rows of a batch, pairs in a row

    again = train(config(test_at="last", checkpoint_every=every), str(tmp_path))
    tested = {name: value for name, value in again["metrics"].items() if name.startswith("test/")}
    assert again["tested_step"] == 20 and tested == scores_of(run, tmp_path, 20)
    assert [change["key"] for change in again["changes"]] == ["test_at"]


@pytest.mark.scale
def test_a_stop_where_the_best_score_comes_again_changes_nothing(tmp_path, scripted, monkeypatch):
    """And a row names every revision of the code that trained it."""
    asked = config(test_at="best", checkpoint_every=10)
    calm = train(asked, str(tmp_path / "calm"))
    for taken, at, revision in ((12, 12, "a"), (5, 17, "b"), (None, None, "c")):
        monkeypatch.setenv("LONGVIEW_REVISION", revision)
        monkeypatch.setattr(loop, "graceful_stop", stop_after(taken))
        row = train(asked, str(tmp_path / "stopped"))
        assert at is None or at in steps(tmp_path / "stopped" / "checkpoints")
    assert lasting(row) == lasting(calm) and calm["tested_step"] == 8
    assert (row["revisions"], row["revision"]) == (["a", "b", "c"], "c")


def test_the_last_line_says_how_much_of_the_time_was_waiting(tmp_path, capsys):
    row = train(config(eval_every=0), str(tmp_path))
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        said == f"finished after 20 steps and {row['wall_s']:.1f} s, {row['data_wait']:.1%} of which it waited for data"
    )


@pytest.mark.scale
@pytest.mark.long
def test_two_hosts_test_the_step_that_one_would(tmp_path):
    # At such a rate no answer changes, so that the first step asked is as good as any.
    settings = {"test_at": "best", "optim.lr": 1e-7, "eval_every": 5}
    hosts = pair(*[command(tmp_path / "two", **settings)] * 2)
    assert [host.wait(300) for host in hosts] == [0, 0], [host.stderr for host in hosts]
    assert sum("of which it waited for data" in host.stdout for host in hosts) == 1
    assert fork(*command(tmp_path / "one", **settings)).wait(300) == 0
    one, two = (read_json(tmp_path / name / "result.json") for name in ("one", "two"))
    assert two["tested_step"] == one["tested_step"] == 5
    assert two["targets"] == one["targets"] and two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
