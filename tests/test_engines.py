"""Launch files for pods: each engine's form, what they start, and what they do when it ends or is lost."""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from experiments.running import engines
from experiments.running.engines import Pod
from model.errors import UserError
from tests.processes import ROOT, fork, wait_until
from train import chips

STAND_IN = """#!/bin/sh
# Trains a little: notes its words, saves when asked to stop, ends as the file says, and in the end has a result.
folder=$(printf '%s\\n' "$@" | sed -n 's/--workdir=//p')
mkdir -p "$folder"
printf '%s\\n' "$*" >> "$folder/words"
env | grep ^JAX_ > "$folder/env" || true
trap 'touch "$folder/saved"; exit 0' TERM
if [ -e "$folder/wait" ]; then touch "$folder/waiting"; while :; do sleep 0.05; done; fi
code=$(head -n 1 "$folder/codes" 2>/dev/null || echo 0)
sed -i 1d "$folder/codes" 2>/dev/null || true
[ "$code" != 0 ] || touch "$folder/result.json"
exit "$code"
"""


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder that all hosts mount, on a machine whose `python` is a stand-in for training."""
    tools = tmp_path / "tools"
    tools.mkdir()
    program(tools / "python", STAND_IN)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    return tmp_path / "runs"


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def pod(topology: str = "v5e:16x16", runs: str | Path = "/runs", **more) -> Pod:
    command = ("python", "-m", "train", f"--workdir={runs}/a", "--config.model.mixers=('mamba', 'attention')")
    given = dict(name="a", command=command, workdir=f"{runs}/a", topology=chips.parse(topology), image="reg/longview")
    return Pod(**given | dict(zone="us-west4-a") | more)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# What every file runs


def supervise(runs: Path, *codes: int) -> subprocess.Popen:
    (runs / "a" / "codes").write_text("".join(f"{code}\n" for code in codes))
    return subprocess.Popen(["sh", "-c", engines.supervised(pod(runs=runs))])


@pytest.mark.quick
@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_end_of_a_run_is_passed_on(code, runs):
    assert supervise(runs, code).wait(20) == code
    assert lines(runs / "a" / "words") == [f"-m train --workdir={runs}/a --config.model.mixers=('mamba', 'attention')"]


@pytest.mark.quick
def test_a_run_that_was_stopped_is_not_over(runs):
    """A container's first process has no default for signals: the shell passes them on and waits until it is saved."""
    (runs / "a" / "wait").touch()
    process = supervise(runs)
    wait_until(lambda: (runs / "a" / "waiting").exists(), 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75 and (runs / "a" / "saved").exists()


# gcloud

GCLOUD = """#!/bin/sh
# Keeps what it was asked for, and runs what it was asked to run there, here, on worker 0.
printf '%s\\n' "$*" >> "$LOG"
[ "$1 $2 $3" = "compute tpus tpu-vm" ] || exit 9
case $4 in
describe) test -e there ;;
create) touch there ;;
ssh) for word in "$@"; do case $word in --command=*) sh -c "${word#--command=}" ;; esac; done ;;
*) exit 9 ;;
esac
"""
# The words after the image are run.
DOCKER = """#!/bin/sh
printf 'docker %s\\n' "$*" >> "$LOG"
[ "$1" = run ] || exit 0
while [ "$1" != reg/longview ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def google(runs, tmp_path, monkeypatch):
    tools, log = tmp_path / "tools", tmp_path / "log"
    for name, text in {"gcloud": GCLOUD, "docker": DOCKER, "sudo": '#!/bin/sh\nexec "$@"\n'}.items():
        program(tools / name, text)
    program(tools / "mount", '#!/bin/sh\nprintf "mount %s\\n" "$*" >> "$LOG"\n')
    program(tools / "mountpoint", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("LOG", str(log))
    home = tmp_path / "home"
    home.mkdir()

    def call(made: Pod, *codes: int) -> SimpleNamespace:
        (runs / "a" / "codes").write_text("".join(f"{code}\n" for code in codes))
        log.unlink(missing_ok=True)
        done = subprocess.run(["sh", "-c", engines.gcloud(made)], cwd=home, capture_output=True, text=True, timeout=60)
        return SimpleNamespace(code=done.returncode, told=done.stderr, log=lines(log))

    return call


@pytest.mark.quick
def test_gcloud_makes_the_slice_and_trains_until_the_run_is_over(google, runs):
    done = google(pod(runs=runs, storage="10.0.0.2:/runs", spot=True), 75, 75, 0)
    assert done.code == 0, done.told
    first = "compute tpus tpu-vm {} a --zone=us-west4-a"
    assert done.log[0] == first.format("describe")
    made = first.format("create") + " --accelerator-type=v5litepod-256 --version=v2-alpha-tpuv5-lite --spot"
    assert done.log[1] == made
    assert done.log[2].startswith(first.format("ssh") + " --worker=all --command=sudo mkdir -p")
    assert f"mount -t nfs 10.0.0.2:/runs {runs}" in done.log and "docker pull reg/longview" in done.log
    ran = [line for line in done.log if line.startswith("docker run")]
    assert len(ran) == 3 == len(lines(runs / "a" / "words")) and done.told.count("starting again") == 2
    assert {"--privileged", "--network=host", "--init", f"--volume={runs}:{runs}"} <= set(ran[0].split())
    # Once more: the slice is there, a container left behind is stopped first, and a mistake is not tried again.
    (runs / "a" / "result.json").unlink()
    done = google(pod(runs=runs), 2)
    assert done.code == 2 and not any("create" in line for line in done.log)
    kinds = [line.split()[1] for line in done.log if line.startswith("docker")]
    assert kinds == ["pull", "stop", "run"]


@pytest.mark.quick
def test_gcloud_gives_up_in_the_end(google, runs, monkeypatch):
    monkeypatch.setattr(engines, "RESTARTS", 2)
    assert google(pod(runs=runs), *[75] * 9).code == 75 and len(lines(runs / "a" / "words")) == 3


# The forms of the other two. Of each field that we write: the type that these have for it.
# Kubernetes' API (batch/v1 Job, PodSpec, Container) and JobSet's, as the models of kubeflow-trainer-api 2.3.0 have
# them, which are made from their schemas; SkyPilot's, as sky/utils/schemas.py of skypilot 0.14.1 does.

RESOURCE = {"google.com/tpu": int, "nvidia.com/gpu": int}
CONTAINER = {
    "name!": str,
    "image": str,
    "workingDir": str,
    "command": [str],
    "resources": {"requests": RESOURCE, "limits": RESOURCE},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
POD_SPEC = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {str: str},
    "tolerations": [{"key": str, "operator": ("Exists", "Equal"), "effect": ("NoSchedule", "NoExecute")}],
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}}],
}
CODES = {"containerName": str, "operator!": ("In", "NotIn"), "values!": [int]}
JOB_SPEC = {
    "parallelism": int,
    "completions": int,
    "completionMode": ("NonIndexed", "Indexed"),
    "backoffLimit": int,
    "podFailurePolicy": {"rules!": [{"action!": ("FailJob", "FailIndex", "Ignore", "Count"), "onExitCodes": CODES}]},
    "template!": {"spec": POD_SPEC},
}
RULE = {"action!": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"), "onJobFailureReasons": [str]}
JOBSET = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
    "kind!": ("JobSet",),
    "metadata!": {"name!": str, "annotations": {str: str}},
    "spec!": {
        "failurePolicy": {"maxRestarts": int, "rules": [RULE]},
        "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"spec": JOB_SPEC}}],
    },
}
SKY = {
    "name": str,
    "num_nodes": int,
    "resources": {
        "infra": str,
        "accelerators": str,
        "accelerator_args": {"runtime_version": str},
        "image_id": str,
        "use_spot": bool,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
    "file_mounts": {str: {"source": str, "mode": ("MOUNT", "COPY", "MOUNT_CACHED")}},
    "run": str,
}


def odd(value, form, where: str = "") -> str:
    """What of a value is not of its form; nothing where all is."""
    if isinstance(form, type):
        return "" if type(value) is form else f"{where} is {value!r}"
    if isinstance(form, tuple):
        return "" if value in form else f"{where} is {value!r}"
    if isinstance(form, list):
        found = [odd(item, form[0], f"{where}[{i}]") for i, item in enumerate(value)]
        return next(filter(None, found), "") if isinstance(value, list) else f"{where} is {value!r}"
    if str in form:
        return next(filter(None, (odd(item, form[str], f"{where}.{key}") for key, item in value.items())), "")
    known = {key.rstrip("!"): inner for key, inner in form.items()}
    missing = [key for key in form if key.endswith("!") and key[:-1] not in value]
    if missing or value.keys() - known.keys():
        return f"{where} has {sorted(value)}, of {sorted(form)}"
    return next(filter(None, (odd(item, known[key], f"{where}.{key}") for key, item in value.items())), "")


@pytest.mark.quick
def test_forms_notice():
    made = yaml.safe_load(engines.gke(pod()))
    assert odd(made, JOBSET) == ""
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = job.pop("backoffLimit")
    assert "backofLimit" in odd(made, JOBSET)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("topology", "jobs", "pods", "chips_each", "node"),
    [
        ("v5e:16x16", 1, 64, 4, "tpu-v5-lite-podslice"),
        ("2xv5e:16x16", 2, 64, 4, "tpu-v5-lite-podslice"),
        ("v5e:2x4", 1, 1, 8, "tpu-v5-lite-podslice"),
        ("v5p:4x4x4", 1, 16, 4, "tpu-v5p-slice"),
        ("v6e:16x16", 1, 64, 4, "tpu-v6e-slice"),
        ("h100:64", 1, 8, 8, "nvidia-h100-80gb"),
        ("h100:8", 1, 1, 8, "nvidia-h100-80gb"),
    ],
)
def test_a_jobset_has_a_pod_a_host(topology, jobs, pods, chips_each, node, runs):
    made = yaml.safe_load(engines.gke(pod(topology, runs, storage="claim", spot=True)))
    assert odd(made, JOBSET) == ""
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    assert (replicated["replicas"], job["parallelism"], job["completions"]) == (jobs, pods, pods)
    assert set(container["resources"]["limits"].values()) == {chips_each}
    assert node in spec["nodeSelector"].values() and spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert topology.rpartition(":")[2] in spec["nodeSelector"].values() or topology.startswith("h100")
    assert bool(made["metadata"].get("annotations")) == (jobs > 1)
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [str(runs)]
    # Codes 1 and 2 end the set, and 75 begins it anew.
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2] and job["backoffLimit"] == 0
    (runs / "a" / "codes").write_text("75\n")
    environ = os.environ | {"JOB_COMPLETION_INDEX": "3"}
    assert subprocess.run(container["command"], env=environ, timeout=20).returncode == 75
    joined = ["JAX_COORDINATOR_ADDRESS=a-train-0-0.a:8476", "JAX_NUM_PROCESSES=8", "JAX_PROCESS_ID=3"]
    told = [line for line in lines(runs / "a" / "env") if line.split("=")[0] in {one.split("=")[0] for one in joined}]
    assert sorted(told) == (joined if topology == "h100:64" else [])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("topology", "nodes", "accelerators", "runtime"),
    [
        ("v5e:16x16", 1, "tpu-v5litepod-256:1", "v2-alpha-tpuv5-lite"),
        ("v5p:4x4x4", 1, "tpu-v5p-128:1", "v2-alpha-tpuv5"),
        ("v6e:256", 1, "tpu-v6e-256:1", "v2-alpha-tpuv6e"),
        ("h100:64", 8, "H100:8", None),
    ],
)
def test_a_skypilot_task(topology, nodes, accelerators, runtime, runs):
    made = yaml.safe_load(engines.skypilot(pod(topology, runs, storage="gs://bucket")))
    assert odd(made, SKY) == ""
    resources = made["resources"]
    assert (made["num_nodes"], resources["accelerators"]) == (nodes, accelerators)
    assert resources.get("accelerator_args") == (runtime and {"runtime_version": runtime})
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75]
    assert made["file_mounts"] == {str(runs): {"source": "gs://bucket", "mode": "MOUNT"}}
    script = made["run"].replace(f"cd {engines.HOME}\n", "")
    environ = os.environ | {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "5"}
    assert subprocess.run(["bash", "-c", script], env=environ, timeout=20).returncode == 0
    joined = {"JAX_COORDINATOR_ADDRESS=10.0.0.7:8476", "JAX_NUM_PROCESSES=8", "JAX_PROCESS_ID=5"}
    assert joined <= set(lines(runs / "a" / "env")) or nodes == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("engine", "topology", "told"),
    [
        (engines.gcloud, "2xv5e:16x16", "gcloud is written for one slice of TPUs; closest: gke"),
        (engines.gcloud, "h100:8", "gcloud is written for one slice of TPUs; closest: gke"),
        (engines.skypilot, "2xv5e:16x16", "skypilot is written for one slice of TPUs, or GPUs; closest: gke"),
        (engines.gke, "cpu:8", "gke is written for TPUs or GPUs"),
    ],
)
def test_what_an_engine_is_not_written_for(engine, topology, told):
    with pytest.raises(UserError, match=told):
        engine(pod(topology))


LAUNCH = ["--config=configs/debug.py", "--workdir=/runs/a_B", "--topology=v5e:4x4", "--image=reg/longview"]


def test_the_command_writes_a_file():
    made = fork("experiments.launch", "gke", *LAUNCH, "--config.optim.lr=1e-3")
    assert made.wait() == 0, made.stderr
    read = yaml.safe_load(made.stdout)
    script = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    words = "python -m train --config=configs/debug.py --workdir=/runs/a_B --distributed --config.optim.lr=1e-3 &\n"
    assert words in script and read["metadata"]["name"] == "a-b"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gck", *LAUNCH], "unknown engine 'gck'; choose from gcloud, gke, skypilot; closest: gke"),
        (LAUNCH, "launch takes one engine; choose from gcloud, gke, skypilot"),
        (["gke", *LAUNCH[:3]], "--image is missing"),
        (["gke", *LAUNCH, "--workdir=gs://b/a"], "--workdir is 'gs://b/a'; it takes the path of a folder"),
        (["gke", *LAUNCH, "--config.optim.lrr=1"], "unknown config key 'optim.lrr'.*closest: optim.lr"),
        (["gke", *LAUNCH, "--topology=v5e:3x3"], "closest: v5e:2x4"),
        (
            ["gke", *LAUNCH, "--topology=v5e:8x8"],
            "batch_size 16 .* does not divide over .* = 64; closest that does: 64",
        ),
        (
            ["gke", *LAUNCH, "--config.mesh.tensor=3"],
            "multiple of 3 devices, and there are 16; closest: mesh.data",
        ),
        (["gke", *LAUNCH, "--storage=gs://b"], "--storage is 'gs://b'; it takes the name of a persistent volume claim"),
        (["gcloud", *LAUNCH], "gcloud needs the --zone"),
        (["gke", *LAUNCH, "--name=A_b"], "--name is 'A_b'; .*closest: a-b"),
    ],
)
@pytest.mark.few(3)
def test_mistakes(words, told):
    command = fork("experiments.launch", *words)
    assert command.wait() == 2 and len(command.stderr.splitlines()) == 1 and re.search(told, command.stderr)


# The image


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_image_holds_what_is_run_in_it(tmp_path):
    """It cannot be built here; what it copies is enough for the commands, and what it installs is there to be had."""
    found = instructions()
    assert found[0][0] == "ARG" and found[1][0] == "FROM"
    assert ("WORKDIR", engines.HOME) in found
    for name, rest in found:
        if name == "COPY":
            source, target = rest.split()
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / (source if target == "." else target))
    (install,) = [rest for name, rest in found if name == "RUN"]
    assert "-r requirements.txt" in install and '"jax[${JAX}]"' in install
    assert {"tpu", "cuda12", "cuda13"} <= set(importlib.metadata.metadata("jax").get_all("Provides-Extra"))
    (shown,) = [rest for name, rest in found if name == "CMD"]
    assert shown == '["python", "-m", "train", "--help"]'
    words = [sys.executable, "-c", "import train.loop, eval.suites, experiments.running.campaign"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
