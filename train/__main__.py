"""python -m train --config=configs/debug.py --workdir=runs/debug [--config.optim.lr=3e-3 ...] [--profile=100:5]

With --compile_only --topology=v5e:16x16 nothing is trained: the step is compiled for that machine, and told about.
"""

from collections.abc import Sequence

from absl import flags

from model.errors import UserError
from model.settings import Name
from train import chips, cli, compile_only, config, hosts, profile
from train.loop import train

CONFIG = cli.flag("config", Name, None, "A config file, FILE.py[:key=value,...] or a run's config.json.")
WORKDIR = cli.flag("workdir", Name, None, "The run's folder; a run found there is resumed.")
PROFILE = cli.flag("profile", Name, None, "STEP:N writes a trace of N steps from STEP on, to WORKDIR/profile.")
COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "Compile the step for --topology and say whether it fits.")
TOPOLOGY = cli.flag("topology", Name, None, "compile_only: CHIP:SHAPE, such as v5e:16x16, 2xv5p:4x4x4, h100:64, cpu:8.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Join the other hosts of a pod or cluster job.")
flags.declare_key_flag("override")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
    if TOPOLOGY.value and not COMPILE_ONLY.value:
        raise UserError(f"--topology={TOPOLOGY.value} is for --compile_only, which is not given")
    for flag in (CONFIG, TOPOLOGY) if COMPILE_ONLY.value else (CONFIG, WORKDIR):
        if not flag.value:
            raise UserError(
                f"--{flag.name} is missing; e.g. python -m train --config=configs/debug.py "
                + ("--compile_only --topology=v5e:2x4" if COMPILE_ONLY.value else "--workdir=runs/debug")
            )
    if COMPILE_ONLY.value:
        topology = chips.parse(TOPOLOGY.value)
        compile_only.play_devices(topology)
        return compile_only.main(config.load(CONFIG.value, cli.overrides()), topology)
    traced = profile.parse(PROFILE.value)
    with hosts.joined(DISTRIBUTED.value):
        resolved = config.load(CONFIG.value, cli.overrides())
        cli.use_compilation_cache()
        result = train(resolved, WORKDIR.value, traced)
    return 1 if result is not None and result["status"] == "nonfinite" else 0


if __name__ == "__main__":
    cli.run(main)
