"""python -m train --config=configs/debug.py --workdir=runs/debug [--config.optim.lr=3e-3 ...] [--profile=100:5]"""

from collections.abc import Sequence

from absl import flags

from model.errors import UserError
from model.settings import Name
from train import cli, config, hosts, profile
from train.loop import train

CONFIG = cli.flag("config", Name, None, "A config file, FILE.py[:key=value,...] or a run's config.json.")
WORKDIR = cli.flag("workdir", Name, None, "The run's folder; a run found there is resumed.")
PROFILE = cli.flag("profile", Name, None, "STEP:N writes a trace of N steps from STEP on, to WORKDIR/profile.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster job.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
    for flag in (CONFIG, WORKDIR):
        if not flag.value:
            raise UserError(
                f"--{flag.name} is missing; e.g. python -m train --config=configs/debug.py --workdir=runs/debug"
            )
    traced = profile.parse(PROFILE.value)
    with hosts.joined(DISTRIBUTED.value):
        resolved = config.load(CONFIG.value, cli.overrides())
        cli.use_compilation_cache()
        result = train(resolved, WORKDIR.value, traced)
    return 1 if result is not None and result["status"] == "nonfinite" else 0


if __name__ == "__main__":
    cli.run(main)
