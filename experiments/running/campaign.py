"""Many runs under one folder, from checked configs to rows: what `sweep` and `reproduce` have in common."""

import os
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ml_collections import ConfigDict

from data import prepared
from experiments.running import folders
from experiments.running.launch import Event, Job, local
from experiments.running.progress import Tally, follow
from experiments.running.runs import RunSpec, command, names, texts
from experiments.running.slurm import slurm
from experiments.tables import rows
from model.errors import UserError, choose
from train import config as configs
from train import places


@dataclass(frozen=True)
class Planned:
    run: RunSpec
    config: ConfigDict
    config_hash: str


Plan = Mapping[str, Planned]  # by folder name
LAUNCHERS: Mapping[str, Callable[..., Iterator[Event]]] = {"local": local, "slurm": slurm}


def below(runs: Sequence[RunSpec], out: Path, root: str) -> list[RunSpec]:
    """The runs, with all prepared data that they read below one root."""
    moved = (places.below(configs.load(run.config, texts(run, out)), root) for run in runs)
    return [replace(run, overrides={**run.overrides, **where}) for run, where in zip(runs, moved, strict=True)]


def plan(runs: Iterable[RunSpec], out: Path) -> dict[str, Planned]:
    """Each different config once; every mistake is told here, before any run starts.

    A finished run is the one that was asked for, wherever its data lay.
    """
    found: dict[str, tuple[RunSpec, ConfigDict]] = {}
    for run in runs:
        config = configs.load(run.config, texts(run, out))
        configs.check(config)
        found.setdefault(configs.digest(config), (run, config))
    made = names([run for run, _ in found.values()])
    for run, _ in found.values():
        if run.source_name and run.source_name not in made:
            raise ValueError(f"a run begins with the parameters of {run.source_name}, and no run is called so")
    return {
        name: Planned(run, config, _hash_of(out / name, config))
        for name, (run, config) in zip(made, found.values(), strict=True)
    }


def refuse_unprepared(*plans: tuple[Plan, Path], hint: str = "") -> None:
    """Refuses runs whose data are not there, all sets in one line; asks for each different section of data once."""
    left = [config for planned, out in plans for config in unfinished(planned, out).values()]
    sections = {str(sorted(configs.flatten(config.data).items())): config for config in left}
    lacks: dict[str, list[str]] = {}
    for root, name in dict.fromkeys(filter(None, map(places.lacking, sections.values()))):
        lacks.setdefault(root, []).append(name)
    if lacks:
        sets = " and ".join(f"{', '.join(names)} below {root!r}" for root, names in lacks.items())
        mend = " && ".join(prepared.command(root, " ".join(names)) for root, names in lacks.items())
        raise UserError(f"not prepared, or damaged: {sets}; make ready by: {mend}{hint}")


def unfinished(planned: Plan, out: Path) -> dict[str, ConfigDict]:
    """The configs of what is still to be run."""
    return {name: item.config for name, item in planned.items() if not folders.finished(out / name)}


def repeats(runs: Iterable[RunSpec], planned: Plan) -> list[str]:
    """The runs that were left out because another has their config, by their coordinates."""
    kept = {id(item.run) for item in planned.values()}
    left = [run for run in runs if id(run) not in kept]
    return [", ".join(f"{key}={value}" for key, value in run.coordinates.items()) for run in left]


def commands(planned: Plan, out: Path) -> list[str]:
    """What a shell anywhere that sees these folders takes to train each run that is not finished."""
    here = shlex.join(["cd", os.getcwd()])
    return [f"{here} && {shlex.join(command(planned[name].run, out / name))}" for name in unfinished(planned, out)]


def carry_out(planned: Plan, out: Path, slots: int | None = None, launcher: str = "local", **options: str) -> Tally:
    """Runs what is not finished yet and leaves everyone's row, the failed ones' too, in `rows.jsonl`.

    options: what this launcher takes beside the jobs and how many run at once.
    """
    launch = choose("launcher", launcher, LAUNCHERS)
    if slots is not None and slots < 1:
        raise UserError(f"--jobs={slots} would never start a run; give 1 or more")
    # Every setting's first seed first: later seeds find its program compiled, and a table fills evenly.
    ordered = sorted(planned, key=lambda name: planned[name].run.overrides.get("seed", 0))
    jobs = [
        Job(name, command(run, out / name), out / name, after=run.source_name)
        for name, run in ((name, planned[name].run) for name in ordered)
    ]
    events = launch(jobs, slots, **options)
    for name, item in planned.items():
        folders.claim(out / name, item.run, item.config_hash)
    tally = follow(events, out, len(jobs))
    made = rows.collect(out)
    rows.write(out / "rows.jsonl", made)
    for row in made:
        if row["status"] == "nonfinite":
            print(f"diverged: {out / row['run']}: non-finite loss at step {row['steps']}")
    return tally


def exit_code(tally: Tally) -> int:
    """As shells have it: 0 all well, 1 a run failed, 128 + number ended by a signal."""
    return 128 + signal.Signals[tally.stopped] if tally.stopped else int(bool(tally.failed))


def _hash_of(folder: Path, config: ConfigDict) -> str:
    """The hash that a result of this config has, of a finished run its own; a run of another config is refused.

    A row must come from its config alone, so not even what a resumed run may change may differ here. Which keys those
    are may: it grows with the code, and tells a run nothing. So may the place of prepared data, and keys that came or
    went with the code: one that came must have its default, by which all is as it was.
    """
    found = configs.tuples(folders.read_json(folder / "config.json") or {})
    if not found:
        return configs.digest(config)
    old, new = configs.flatten(found), configs.flatten(config)
    then = {key: field.default for key, field in configs.declared(config).items()} | old
    for key in sorted(new.keys() - {"resume_safe"}):
        if then[key] != new[key] and not places.moved(key, then[key], new[key]):
            told = f"with {key}={old[key]}" if key in old else f"of before there was {key}"
            raise UserError(f"{folder} holds a run {told}, not {key}={new[key]}; choose another --out")
    return configs.digest(found if folders.finished(folder) else config)
