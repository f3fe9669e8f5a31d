"""Runs a config many times: every combination of the settings given, a few at a time.

    python -m experiments.sweep --config=configs/debug.py --grid=optim.lr=1e-3,3e-3 --seeds=3 --out=runs/lr

experiments/running/expand.py has the notation of --grid, --zip and --list; --config.KEY=VALUE holds for all. Call it
again to take up where it stopped: finished runs are skipped, others continue. Rows are in OUT/rows.jsonl.

    --launcher=local   on this machine, each run on its share of the cores and accelerators
    --launcher=slurm   as tasks of job arrays, with sbatch's options, such as
                       --slurm='--partition=gpu --time=8:00:00 --nodes=2 --gpus-per-node=8 --ntasks-per-node=8';
                       each run has as many processes as these ask for tasks. They save before the time is up and
                       queue again. Ctrl-C ends the watching, not the jobs.
    --launcher=print   nowhere: a line of shell for each run that is not finished, for an engine of your own; once they
                       are through, the same sweep with --launcher=local finds them finished and writes the rows
"""

from pathlib import Path
from typing import Literal

from absl import flags

from experiments.running import campaign, cost
from experiments.running.expand import expand
from experiments.running.runs import read_value
from model.errors import UserError
from model.settings import Count, Name
from train import cli
from train.workdir import refuse_remote

LAUNCHERS = (*campaign.LAUNCHERS, "print")

CONFIG = cli.flag("config", Name, None, "Config file of every run, with its argument if any.")
GRID = flags.DEFINE_multi_string("grid", [], "KEY=VALUE,VALUE: every value; may be repeated.")
ZIP = flags.DEFINE_multi_string("zip", [], "KEY=V1,V2;KEY=W1,W2: values side by side; may be repeated.")
LIST = flags.DEFINE_multi_string("list", [], "KEY=V,KEY=W;KEY=V: settings as written; may be repeated.")
SEEDS = cli.flag("seeds", Count, 1, "Runs of each setting, with seeds 0, 1, ...")
OUT = cli.flag("out", Name, None, "Folder of the sweep; each run gets a folder in it.")
JOBS = cli.flag(
    "jobs", Count, None, "Runs at once; default one per accelerator, or one per core; of Slurm as many as it lets."
)
LAUNCHER = cli.flag(
    "launcher", Literal[*LAUNCHERS], "local", "How runs are started; print: not, their commands are shown."
)
SLURM = cli.flag("slurm", str, None, "Options for sbatch, with --launcher=slurm.")
flags.declare_key_flag("override")


def main(argv: list[str]) -> int:
    if argv[1:]:
        raise UserError(f"unexpected argument {argv[1]!r}; sweep takes flags only, such as --grid=optim.lr=1e-3,3e-3")
    if SLURM.value is not None and LAUNCHER.value != "slurm":
        raise UserError(f"--slurm={SLURM.value} is for --launcher=slurm, and --launcher is {LAUNCHER.value}")
    if not (CONFIG.value and OUT.value):
        raise UserError("give both --config=FILE.py and --out=FOLDER")
    refuse_remote("--out", OUT.value)
    out = Path(OUT.value)
    common = {key: read_value(text) for key, text in cli.overrides()}
    runs = expand(CONFIG.value, GRID.value, ZIP.value, LIST.value, SEEDS.value, common)
    planned = campaign.plan(runs, out)
    local = LAUNCHER.value == "local"  # elsewhere data may lie on other disks
    if local:
        campaign.refuse_unprepared((planned, out))
    cost.check(campaign.unfinished(planned, out), elsewhere=not local)
    if LAUNCHER.value == "print":
        print("\n".join(campaign.commands(planned, out)))
        return 0
    for repeat in campaign.repeats(runs, planned):
        print(f"left out, same config as another run: {repeat}")
    options = {} if SLURM.value is None else {"options": SLURM.value}
    return campaign.exit_code(campaign.carry_out(planned, out, JOBS.value, LAUNCHER.value, **options))


if __name__ == "__main__":
    cli.run(main)
