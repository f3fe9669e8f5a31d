"""A Slurm cluster of this machine alone, in a folder, run by whoever asks for it."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
# Where Debian has them, which is not in everybody's PATH.
PLACES = {name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") for name in DAEMONS}
MISSING = [name for name, place in PLACES.items() if place is None]

# cred_expire: how long a job that was requeued waits; usually two minutes. The node has more cores than it has, so
# that a few small runs fit at once.
CONF = """
ClusterName=longview
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Starts the daemons and yields SLURM_CONF, which leads Slurm's commands to them."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, contextlib.ExitStack() as running:
        folder = Path(name)  # not pytest's: the name of a socket has room for a hundred characters
        for room in ("state", "spool"):
            (folder / room).mkdir()
        key, conf = folder / "munge.key", folder / "slurm.conf"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        conf.write_text(CONF.format(host=host, user=user, folder=folder, ports=free_ports(2)))
        munge = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
        munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
        running.enter_context(daemon("munged", "--foreground", "--force", *munge))
        running.enter_context(daemon("slurmctld", "-D", "-c", "-f", str(conf)))
        running.enter_context(daemon("slurmd", "-D", "-f", str(conf)))
        end = time.monotonic() + 60
        while ask(conf, "sinfo", "--noheader", "--format=%T") != "idle":
            assert time.monotonic() < end, "the cluster did not come up"
            time.sleep(0.2)
        try:
            yield str(conf)
        finally:
            ask(conf, "scancel", "--me")
            while ask(conf, "squeue", "--noheader") and time.monotonic() < end + 600:
                time.sleep(0.2)


def ask(conf: str | Path, *words: str) -> str:
    """What one of Slurm's commands says to a cluster."""
    done = subprocess.run(words, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def daemon(name: str, *options: str) -> Iterator[None]:
    process = subprocess.Popen([PLACES[name], *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
