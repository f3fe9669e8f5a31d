"""Runs a named table and prints it: mean and spread over seeds, and published numbers beside them.

    python -m experiments.reproduce quickstart [--scale=smoke] [--jobs=2] [--out=runs/quickstart]
    python -m experiments.reproduce lra --only='task=image;arch=s4d,s5' [--root=downloads]

It begins by saying what the runs take. Call it again to take up where it stopped. A table takes along those that are
part of it, unless --out names one folder: `positions` also fills `positions_text`. `python -m experiments.list` names
the tables. `--config.KEY=VALUE` holds for all runs, and the table's title says so. `--root` is where the sets lie that
`data.prepare` made, and may be another when runs go on. Runs of several revisions of the code go into one table only
with --mixed, and it says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from absl import flags

from experiments.running import campaign, cost, expand, folders
from experiments.running.runs import RunSpec, Value, read_value, texts
from experiments.tables import rows, sources
from experiments.tables.definitions import TABLES
from experiments.tables.layout import sheet
from experiments.tables.publish import publish, show
from experiments.tables.table import SCALES, Table, choose_scale, layout, with_a_place
from model.errors import UserError, choose
from model.settings import Count, Name
from train import cli
from train import config as configs
from train.revision import revision
from train.workdir import refuse_remote

SCALE = cli.flag("scale", Literal[*SCALES], None, f"One of {', '.join(SCALES)}, where the table has it.")
JOBS = cli.flag("jobs", Count, None, "Runs at once; default one per accelerator, or one per core.")
OUT = cli.flag(
    "out", Name, None, "Folder of TABLE alone; default runs/TABLE, or runs/TABLE-SCALE at another than its first scale."
)
ROOT = cli.flag("root", Name, None, "Where all prepared data lie, as given to data.prepare; default as configs say.")
ONLY = cli.flag("only", str, None, "LABEL=VALUE,VALUE;LABEL=VALUE: a part of the table, by what its runs are called.")
MIXED = flags.DEFINE_bool("mixed", False, "Allow runs of several revisions of the code, or makes of the data.")
flags.declare_key_flag("override")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError(f"reproduce takes one table; choose from {', '.join(sorted(TABLES))}")
    table = choose("table", argv[1], TABLES)
    if OUT.value is not None:
        refuse_remote("--out", OUT.value)
        parts = [part_of_plan(table, Path(OUT.value))]
    else:
        parts = [part_of_plan(part, None) for name, part in TABLES.items() if argv[1] in (name, part.part_of)]
    elsewhere = ", or say where they lie by --root=DIR"
    campaign.refuse_unprepared(*((part.planned, part.out) for part in parts), hint=elsewhere)
    told = [to_run(part) for part in parts]
    for part in parts:
        folders.make(part.out)  # the last mistake that there can be
    for line in filter(None, told):
        print(line, flush=True)
    codes = []
    for part in parts:
        codes.append(reproduce(part))
        if codes[-1] > 128:  # stopped by a signal
            break
    return max(codes)


@dataclass(frozen=True)
class Part:
    """One table at one scale, and the runs that fill it."""

    table: Table
    scale: str
    out: Path
    planned: campaign.Plan


def part_of_plan(table: Table, out: Path | None) -> Part:
    """What is asked for of a table; every mistake in it is told here."""
    scale = choose_scale(table, SCALE.value)
    out = out or Path("runs", table.name + (f"-{scale}" if scale != table.scales[0] else ""))
    asked = table.runs(scale) if ONLY.value is None else expand.pick(table.runs(scale), ONLY.value)
    runs = [replace(run, overrides={**run.overrides, **changed()}) for run in asked]
    runs = runs if ROOT.value is None else campaign.below(runs, out, ROOT.value)
    planned = campaign.plan(runs, out)
    for repeat in campaign.repeats(runs, planned):
        refuse_varied(table, asked)
        raise UserError(f"table {table.name} asks for one config twice, the second time as {repeat}")
    refuse_misnamed(table, asked)
    if not MIXED.value and campaign.unfinished(planned, out):
        there = [row for row in rows.collect(out) if row["run"] in planned] if out.is_dir() else []
        sources.refuse_other_code(there, revision(), str(out))
    return Part(table, scale, out, planned)


def changed() -> dict[str, Value]:
    """What the command line overrides in every run."""
    return {key: read_value(text) for key, text in cli.overrides()}


def refuse_varied(table: Table, asked: Sequence[RunSpec]) -> None:
    """Refuses what the command line overrides in every run and the table sets otherwise from run to run."""
    for key, value in changed().items():
        found = dict.fromkeys(own(run, key) for run in asked)
        if len(found) > 1:
            raise UserError(
                f"table {table.name} varies {key} itself ({', '.join(map(str, found))}), and --config.{key}={value} "
                f"makes its runs the same; leave it out, or pick some of them by --only"
            )


def refuse_misnamed(table: Table, asked: Sequence[RunSpec]) -> None:
    """Refuses to override in every run what its label says: the table would name a setting that it did not have."""
    for key, value in changed().items():
        label = key.rpartition(".")[2]
        named = {run.labels[label]: run for run in asked if label in run.labels and own(run, key) == run.labels[label]}
        if named.keys() - {value}:
            raise UserError(
                f"table {table.name} calls its runs by {label} ({', '.join(map(str, named))}), and "
                f"--config.{key}={value} makes them others; leave it out; closest: --config.{key}={next(iter(named))}"
            )


def own(run: RunSpec, key: str) -> Value:
    """What a run of the table has there itself."""
    return configs.flatten(configs.load(run.config, texts(run))).get(key)


def to_run(part: Part) -> str:
    """What is not finished yet, and what it takes; nothing where all is."""
    left = campaign.unfinished(part.planned, part.out)
    return f"{part.table.name}, scale {part.scale}, to run: {cost.of(left)}" if left else ""


def reproduce(part: Part) -> int:
    """Fills one table, prints it and writes its files; the exit code."""
    table, scale, out, planned = part.table, part.scale, part.out, part.planned
    tally = campaign.carry_out(planned, out, JOBS.value)
    if tally.stopped:
        return campaign.exit_code(tally)
    filled = with_a_place(table, (row for row in rows.read_rows(out / "rows.jsonl") if row["run"] in planned))
    shown = layout(table, scale)
    only = [f"only {ONLY.value}"] if ONLY.value is not None else []
    title = ", ".join([shown.title, *only, *(f"{key}={value}" for key, value in changed().items())])
    made = sheet(filled, replace(shown, title=title))
    if not MIXED.value:
        sources.refuse_mixture(made.mixed)
    show(made, [out / "rows.jsonl", *publish(made, out)])
    for metric, published in table.also.items():
        made = sheet(filled, replace(shown, title=title, metric=metric, published=published(scale)))
        show(made, publish(made, out / metric.rpartition("/")[2]))
    return campaign.exit_code(tally)


if __name__ == "__main__":
    cli.run(main)
