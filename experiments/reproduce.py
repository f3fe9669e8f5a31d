"""Runs a named table and prints it: mean and spread over seeds, and published numbers beside them.

    python -m experiments.reproduce quickstart [--scale=smoke] [--jobs=2] [--out=runs/quickstart]

Call it again to take up where it stopped. `python -m experiments.list` names the tables.
"""

from pathlib import Path

from absl import flags

from experiments import campaign, rows
from experiments.layout import sheet
from experiments.publish import publish, show
from experiments.tables import SCALES, TABLES, choose_scale, layout
from model.errors import UserError, choose
from train import cli

SCALE = flags.DEFINE_string("scale", None, f"One of {', '.join(SCALES)}, where the table has it.")
JOBS = flags.DEFINE_integer("jobs", None, "Runs at once; default one per core, or one on an accelerator.")
OUT = flags.DEFINE_string(
    "out", None, "Folder; default runs/TABLE, or runs/TABLE-SCALE at another than its first scale."
)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError(f"reproduce takes one table; choose from {', '.join(sorted(TABLES))}")
    table = choose("table", argv[1], TABLES)
    scale = choose_scale(table, SCALE.value)
    out = Path(OUT.value or f"runs/{table.name}" + (f"-{scale}" if scale != table.scales[0] else ""))
    runs = table.runs(scale)
    planned = campaign.plan(runs, out)
    for repeat in campaign.repeats(runs, planned):
        raise UserError(f"table {table.name} asks for one config twice, the second time as {repeat}")
    tally = campaign.carry_out(planned, out, JOBS.value)
    if tally.stopped:
        return campaign.exit_code(tally)
    filled = [row for row in rows.read(out / "rows.jsonl") if row["run"] in planned]
    made = sheet(filled, layout(table, scale))
    show(made, [out / "rows.jsonl", *publish(made, out)])
    return campaign.exit_code(tally)


if __name__ == "__main__":
    cli.run(main)
