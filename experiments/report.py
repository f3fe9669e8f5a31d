"""Turns rows into a table and a picture; runs nothing.

    python -m experiments.report --dir=runs/lr --by=optim.lr --metric=test/accuracy
    python -m experiments.report --rows=runs/quickstart/rows.jsonl --by=arch --across=task --out=runs/again

Only seeds are averaged. A label that is neither in --by nor --across can be tuned away: `--tune=optim.lr` shows, for
each place of the table, the learning rate that validates best, and which it is. Rows of several revisions of the code,
or of the same data made differently, stand in one table only with --mixed, and it says so. `--across=length` has a
column for each of the `test_lengths` of the runs.
"""

from pathlib import Path

from absl import flags

from experiments.tables import rows, sources
from experiments.tables.layout import Layout, sheet
from experiments.tables.publish import publish, show
from model.errors import UserError
from model.settings import Name
from train import cli

ROWS = cli.flag("rows", Name, None, "A file of rows.")
DIR = cli.flag("dir", Name, None, "A sweep's folder; its rows are collected anew.")
BY = flags.DEFINE_list("by", None, "Labels that name the lines; default every swept label not used otherwise.")
ACROSS = cli.flag("across", Name, None, "Label that names the columns.")
TUNE = flags.DEFINE_list("tune", [], "Labels whose best value on the validation split is taken.")
METRIC = cli.flag("metric", Name, "test/accuracy", "The number shown.")
TITLE = flags.DEFINE_string("title", "", "Title of the table.")
MIXED = flags.DEFINE_bool("mixed", False, "Allow rows of several revisions of the code, or makes of the data.")
OUT = cli.flag("out", Name, None, "Folder for the files; default the folder of the rows.")


def main(argv: list[str]) -> None:
    cli.refuse_arguments(argv, "report", "flags only, such as --dir=runs/NAME")
    if (ROWS.value is None) == (DIR.value is None):
        raise UserError("give one of --rows=FILE and --dir=FOLDER")
    source = Path(ROWS.value or DIR.value)
    found = rows.read_rows(source) if ROWS.value else rows.collect(source)
    used = (*TUNE.value, ACROSS.value)
    by = (
        BY.value
        or [key for key in rows.varying(found) if key not in used]
        or list(found[0]["labels"] if found else [])[:1]
    )
    layout = Layout(METRIC.value, tuple(by), ACROSS.value, tuple(TUNE.value), title=TITLE.value)
    made = sheet(found, layout)
    if not MIXED.value:
        sources.refuse_mixture(made.mixed)
    show(made, publish(made, Path(OUT.value or (source.parent if ROWS.value else source))))


if __name__ == "__main__":
    cli.run(main)
