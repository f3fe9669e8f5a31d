"""What each architecture can do, beside what length costs it: one table over those that there are; runs nothing.

    python -m experiments.overview --dir=experiments/results

The folder has that of a table under its name, as `reproduce TABLE --out=FOLDER/TABLE` leaves it, and the rows of
`bench scaling --out=FOLDER/bench_scaling.jsonl`. Prints Markdown: test accuracy in percent, mean and spread over seeds,
of the settings that validation chose; and milliseconds of a training step of one layer.
"""

from pathlib import Path

from experiments.tables.overview import overview
from model.errors import UserError
from model.settings import Name
from train import cli

DIR = cli.flag("dir", Name, None, "A folder of tables.")


def main(argv: list[str]) -> None:
    cli.refuse_arguments(argv, "overview", "one flag, --dir=FOLDER")
    if DIR.value is None:
        raise UserError("give --dir=FOLDER, one of tables; closest: --dir=experiments/results")
    if not Path(DIR.value).is_dir():
        raise UserError(f"--dir={DIR.value} is no folder; closest: --dir=experiments/results")
    print(overview(Path(DIR.value)), end="")


if __name__ == "__main__":
    cli.run(main)
