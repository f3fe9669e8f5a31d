"""One training command on a pod, written down for engines that start such things: gcloud, GKE and SkyPilot.

Each function turns the same description into one file. All run the image that the Containerfile builds, once a host,
and all start again what ends with `train.exit_codes.RESTART`. Names and fields are as these had them in November 2026:

    runtimes and types of TPUs   docs.cloud.google.com/tpu/docs/runtimes, /v5e, /v5p, /v6e
    gcloud, containers           docs.cloud.google.com/tpu/docs/jax-pods, /run-in-container
    TPU and GPU nodes of GKE     docs.cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice, /how-to/gpus
    JobSet, as XPK submits it    jobset.sigs.k8s.io/docs, github.com/AI-Hypercomputer/xpk (commands/workload.py)
    SkyPilot                     docs.skypilot.co/en/latest/reference/yaml-spec.html, /reference/tpu.html
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from model.errors import UserError
from train.chips import Topology
from train.exit_codes import RESTART

HOME = "/longview"  # in the image
PORT = 8476  # at which the first of several GPU nodes is found
GRACE_S = 120  # for runs to save
RESTARTS = 100  # of a pod's job by engines that do not know whether it has come further


@dataclass(frozen=True)
class Pod:
    """What is trained, and where."""

    name: str
    command: tuple[str, ...]  # as every host runs it
    workdir: str
    topology: Topology
    image: str
    storage: str = ""  # what all hosts mount at the workdir's parent, as the engine names it
    zone: str = ""
    spot: bool = False

    @property
    def mount(self) -> str:
        return str(PurePosixPath(self.workdir).parent)


class Names(NamedTuple):
    """What a TPU is called."""

    kind: str  # gcloud's, before a number
    cores: int  # of a chip, which that number counts
    runtime: str
    node: str  # GKE's


TPUS = {
    "v5e": Names("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Names("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Names("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}
GPUS = {"h100": ("H100", "nvidia-h100-80gb")}  # SkyPilot's name, and GKE's
# What --storage is for each engine.
STORED = {
    "gcloud": (r"[^:/\s]+:/\S*", "an NFS export, HOST:/PATH"),
    "gke": (r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "the name of a persistent volume claim, in small letters"),
    "skypilot": (r"[a-z0-9]+://\S+", "the address of a bucket, as gs://NAME"),
}


def chips_of_host(topology: Topology) -> int:
    """A host holds four chips of a slice; of the flat kinds also all of one, two, four or eight."""
    if topology.name in GPUS:
        return topology.each
    return topology.each if len(topology.shape.split("x")) == 2 and topology.each <= 8 else 4


def hosts(topology: Topology) -> int:
    return topology.chips // chips_of_host(topology)


def accelerator_type(topology: Topology) -> str:
    names = TPUS[topology.name]
    return f"{names.kind}-{names.cores * topology.each}"


def supervised(pod: Pod) -> str:
    """A script that trains, passes SIGTERM on, and ends with the run's exit code."""
    return f"""\
child=
trap 'kill -TERM "$child"' TERM INT
{shlex.join(pod.command)} &
child=$!
code=0; wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do code=0; wait "$child" || code=$?; done
{over(pod)}
exit "$code"
"""


def over(pod: Pod) -> str:
    """A run that was stopped before its end has code 0, by which an engine would take it for done: it gets another."""
    return f'if [ "$code" -eq 0 ] && [ ! -e {shlex.quote(pod.workdir)}/result.json ]; then code={RESTART}; fi'


def gcloud(pod: Pod) -> str:
    """A shell script: makes the slice if it is not there, and trains on all its workers until the run is over."""
    refuse_unless(pod.topology.name in TPUS and pod.topology.slices == 1, "gcloud", "one slice of TPUs", pod, "gke")
    if not pod.zone:
        raise UserError("gcloud needs the --zone that the slice is in, such as --zone=us-west4-a")
    kind, runtime = accelerator_type(pod.topology), TPUS[pod.topology.name].runtime
    mount = shlex.quote(pod.mount)
    ready = [f"sudo mkdir -p {mount}", f"sudo docker pull {shlex.quote(pod.image)}"]
    if pod.storage:
        ready.insert(1, f"{{ mountpoint -q {mount} || sudo mount -t nfs {shlex.quote(pod.storage)} {mount}; }}")
    words = ["sudo", "docker", "run", "--rm", "--init", f"--name={pod.name}", "--privileged", "--network=host"]
    words += [f"--volume={pod.mount}:{pod.mount}", f"--workdir={HOME}", pod.image, *pod.command]
    # A container that an earlier call left behind is asked to save and end first.
    train = [f"sudo docker stop --time={GRACE_S} {pod.name} >/dev/null 2>&1"]
    train += [f"code=0; {shlex.join(words)} || code=$?", over(pod), f"echo $code > {pod.name}.code"]
    return f"""\
#!/bin/sh
# Trains on {pod.topology}, which is a {kind} here, on all its workers; started again it resumes.
set -eu
tpu() {{ verb=$1; shift; gcloud compute tpus tpu-vm "$verb" {pod.name} --zone={shlex.quote(pod.zone)} "$@"; }}
tpu describe >/dev/null 2>&1 || tpu create --accelerator-type={kind} --version={runtime}{" --spot" if pod.spot else ""}
tpu ssh --worker=all --command={shlex.quote(" && ".join(ready))}
for try in $(seq 0 {RESTARTS}); do
  [ "$try" -eq 0 ] || echo "starting again ($try)" >&2
  tpu ssh --worker=all --command={shlex.quote("; ".join(train))}
  code=$(tpu ssh --worker=0 --command='cat {pod.name}.code')
  [ "$code" -eq {RESTART} ] || exit "$code"
done
exit {RESTART}
"""


def gke(pod: Pod) -> str:
    """A JobSet, for `kubectl apply -f -`: a job a slice, a pod a host."""
    topology, of_host = pod.topology, chips_of_host(pod.topology)
    refuse_unless(topology.name in TPUS or topology.name in GPUS, "gke", "TPUs or GPUs", pod, "v5e:16x16")
    tpu = topology.name in TPUS
    jobs = topology.slices if tpu else 1
    pods = hosts(topology) // jobs
    if tpu:
        selector = {
            "cloud.google.com/gke-tpu-accelerator": TPUS[topology.name].node,
            "cloud.google.com/gke-tpu-topology": topology.shape,
        }
    else:
        selector = {"cloud.google.com/gke-accelerator": GPUS[topology.name][1]}
    if pod.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    first = f"{pod.name}-train-0-0.{pod.name}:{PORT}"  # the DNS name that JobSet gives to the first pod
    join = "" if tpu or pods == 1 else joining(first, pods, "$JOB_COMPLETION_INDEX")
    resource = {"google.com/tpu" if tpu else "nvidia.com/gpu": of_host}
    container = {
        "name": "train",
        "image": pod.image,
        "workingDir": HOME,
        "command": ["sh", "-c", join + supervised(pod)],
        "resources": {"requests": resource, "limits": resource},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": selector,
        "tolerations": [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in resource],
        "containers": [container],
    }
    if pod.storage:
        container["volumeMounts"] = [{"name": "runs", "mountPath": pod.mount}]
        spec["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": pod.storage}}]
    # Codes that no restart helps with end the job, and a job that ended so ends the set.
    hopeless = {"containerName": "train", "operator": "In", "values": [1, 2]}
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": hopeless}]},
        "template": {"spec": spec},
    }
    each = "alpha.jobset.sigs.k8s.io/exclusive-topology"  # a job to itself on the node pool of a slice
    metadata = {"name": pod.name} | ({"annotations": {each: "cloud.google.com/gke-nodepool"}} if jobs > 1 else {})
    return dump(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "failurePolicy": {
                    "maxRestarts": RESTARTS,
                    "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
                },
                "replicatedJobs": [{"name": "train", "replicas": jobs, "template": {"spec": job}}],
            },
        }
    )


def skypilot(pod: Pod) -> str:
    """A task, for `sky jobs launch FILE`."""
    topology = pod.topology
    tpu = topology.name in TPUS and topology.slices == 1
    refuse_unless(tpu or topology.name in GPUS, "skypilot", "one slice of TPUs, or GPUs", pod, "gke")
    resources: dict[str, Any] = {"image_id": f"docker:{pod.image}"}
    if tpu:
        resources["infra"] = f"gcp/{pod.zone.rpartition('-')[0]}/{pod.zone}" if pod.zone else "gcp"
        resources["accelerators"] = f"tpu-{accelerator_type(topology)}:1"
        resources["accelerator_args"] = {"runtime_version": TPUS[topology.name].runtime}
    else:
        resources["accelerators"] = f"{GPUS[topology.name][0]}:{topology.each}"
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [RESTART]}
    resources |= {"use_spot": pod.spot, "job_recovery": recovery}
    first = f'$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}'
    nodes = 1 if tpu else hosts(topology)
    join = joining(first, nodes, "$SKYPILOT_NODE_RANK") if nodes > 1 else ""
    task = {"name": pod.name, "num_nodes": nodes, "resources": resources}
    if pod.storage:
        task["file_mounts"] = {pod.mount: {"source": pod.storage, "mode": "MOUNT"}}
    return dump(task | {"run": f"cd {HOME}\n{join}{supervised(pod)}"})


def joining(first: str, count: int, rank: str) -> str:
    """How GPU nodes find each other (see `train.join`); TPUs know."""
    return f'export JAX_COORDINATOR_ADDRESS="{first}" JAX_NUM_PROCESSES={count} JAX_PROCESS_ID="{rank}"\n'


def refuse_unless(holds: bool, engine: str, what: str, pod: Pod, near: str) -> None:
    if not holds:
        raise UserError(f"--topology is {pod.topology}; {engine} is written for {what}; closest: {near}")


class _Dumper(yaml.SafeDumper):
    """Scripts line by line, as they are read."""

    def represent_str(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)


def dump(value: Mapping[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)


ENGINES: Mapping[str, Callable[[Pod], str]] = {"gcloud": gcloud, "gke": gke, "skypilot": skypilot}
