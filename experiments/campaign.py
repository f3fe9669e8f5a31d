"""Many runs under one folder, from checked configs to rows: what `sweep` and `reproduce` have in common."""

import shlex
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from experiments import folders, rows
from experiments.launch import LAUNCHERS, Job, default_slots
from experiments.progress import Tally, follow
from experiments.runs import Run, command, names, texts
from model.errors import UserError, choose
from train import config as configs


def plan(runs: Iterable[Run], out: Path) -> dict[str, Run]:
    """The runs by folder name, each different config once; mistakes are told here, before any run starts."""
    found: dict[str, tuple[Run, ConfigDict]] = {}
    for run in runs:
        config = configs.load(run.config, texts(run))
        configs.check(config)
        found.setdefault(configs.digest(config), (run, config))
    kept = [run for run, _ in found.values()]
    planned = dict(zip(names(kept), kept, strict=True))
    for name, (_, config) in zip(planned, found.values(), strict=True):
        _refuse_other_config(out / name, config)
    return planned


def repeats(runs: Iterable[Run], planned: Mapping[str, Run]) -> list[str]:
    """The runs that were left out because another has their config, by their coordinates."""
    kept = {id(run) for run in planned.values()}
    left = [run for run in runs if id(run) not in kept]
    return [", ".join(f"{key}={value}" for key, value in run.coordinates.items()) for run in left]


def commands(planned: Mapping[str, Run], out: Path) -> list[str]:
    """The shell command of every run, for reading or for another scheduler."""
    return [shlex.join(command(run, out / name)) for name, run in planned.items()]


def carry_out(
    planned: Mapping[str, Run], out: Path, slots: int | None = None, launcher: str = "local"
) -> Tally:
    """Runs what is not finished yet and leaves everyone's row, the failed ones' too, in `rows.jsonl`."""
    launch = choose("launcher", launcher, LAUNCHERS)
    if slots is not None and slots < 1:
        raise UserError(f"--jobs={slots} would never start a run; give 1 or more")
    for name, run in planned.items():
        folders.claim(out / name, run)
    # Every setting's first seed first: later seeds find its program compiled, and a table fills evenly.
    ordered = sorted(planned.items(), key=lambda item: item[1].overrides.get("seed", 0))
    jobs = [Job(name, command(run, out / name), out / name) for name, run in ordered]
    tally = follow(launch(jobs, slots or default_slots()), out, len(jobs))
    made = rows.collect(out)
    rows.write(out / "rows.jsonl", made)
    for row in made:
        if row["status"] == "nonfinite":
            print(f"diverged: {out / row['run']}: non-finite loss at step {row['steps']}")
    return tally


def exit_code(tally: Tally) -> int:
    """As shells have it: 0 all well, 1 a run failed, 128 + number ended by a signal."""
    return 128 + signal.Signals[tally.stopped] if tally.stopped else int(bool(tally.failed))


def _refuse_other_config(folder: Path, config: ConfigDict) -> None:
    """A row must come from its config alone, so not even what a resumed run may change may differ here."""
    found = configs.tuples(folders.read_json(folder / "config.json") or {})
    old, new = configs.flatten(found), configs.flatten(config)
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise UserError(
                f"{folder} holds a run with {key}={old[key]}, not {key}={new[key]}; choose another --out"
            )
