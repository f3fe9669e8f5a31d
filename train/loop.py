"""A run from start to result: build, open the folder, restore, loop, report."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from data import pipeline
from model.errors import UserError, out_of_memory
from train import checkpoint, hosts, start
from train import config as configs
from train.checkpoint import Checkpoints
from train.evaluate import evaluate, mean, scalars, slices
from train.feed import Feed
from train.log import MetricsLog, Progress
from train.manifest import read_manifest, step_folder
from train.revision import revision, source_digest
from train.run import Run, at_length, prepare
from train.sharding import replicated
from train.step import RunState
from train.workdir import graceful_stop, open_workdir, read_json, write_json


def train(config: ConfigDict, workdir: str) -> dict[str, Any] | None:
    """Trains until done and returns the result row; None if stopped by a signal, with all that was done saved."""
    hosts.same(lambda: {"workdir": workdir, "jax": jax.__version__, "code": source_digest(), **configs.flatten(config)})
    # Of many processes any may be asked to stop, while others have not even begun.
    with graceful_stop() if jax.process_count() > 1 else contextlib.nullcontext():
        run = prepare(config)
        lengths = {length: at_length(run, length) for length in config.test_lengths}
        begun = hosts.agree(lambda: bool(checkpoint.steps(Path(workdir) / "checkpoints")))
        source = None if begun else start.find(run)
        with open_workdir(workdir) as folder:
            done = open_run(run, folder)
            if done is not None:
                print(f"{workdir} is finished already: {done['status']} after {done['steps']} steps")
                return done
            with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
                return loop(run, folder, checkpoints, lengths, source)


def open_run(run: Run, folder: Path) -> dict[str, Any] | None:
    """Checks the folder against this run; the result, if there is nothing left to do."""
    config, fingerprint = run.config, run.task.fingerprint(run.config.data.seed)
    hosts.same(lambda: {"data fingerprint": fingerprint})

    def check() -> dict[str, Any] | None:
        file, data, result = folder / "config.json", folder / "data.json", folder / "result.json"
        if file.exists():
            refuse_changes(configs.changes(configs.tuples(read_json(file)), config), config, folder)
        if data.exists() and read_json(data, fingerprint=str)["fingerprint"] != fingerprint:
            raise UserError(
                f"the data of task {run.task.name} has changed since {folder} was started; give another --workdir"
            )
        done = read_json(result, status=str, config_hash=str, steps=int) if result.exists() else None
        over = done is not None and done["status"] != "nonfinite" and done["config_hash"] == configs.digest(config)
        return done if over else None

    return hosts.agree(check)


def refuse_changes(changes: dict[str, tuple[Any, Any]], config: ConfigDict, folder: Path) -> None:
    """Prints what differs from the config the run was started with; only keys declared safe may."""
    for key, (old, new) in changes.items():
        print(f"config change: {key}: {old!r} -> {new!r}")
    unsafe = [key for key in changes if not any(fnmatchcase(key, safe) for safe in config.resume_safe)]
    if unsafe:
        raise UserError(
            f"{folder} holds a run with another config ({', '.join(unsafe)} changed); give another --workdir, "
            f"or add the keys to --config.resume_safe"
        )


def sign_run(run: Run, folder: Path, step: int, origin: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Makes the folder this run's, once all that is in it fits; returns what was changed in the config on the way."""

    def sign() -> list[dict[str, Any]]:
        file, changes, result = folder / "config.json", folder / "changes.json", folder / "result.json"
        before = configs.flatten(configs.tuples(read_json(file))) if file.exists() else {}
        made = read_json(changes, changes=list)["changes"] if changes.exists() else []
        noted = configs.noted(made, before, configs.flatten(run.config), step)
        result.unlink(missing_ok=True)
        if origin:
            write_json(folder / "init.json", origin)
        write_json(changes, {"changes": noted})  # before the config: written again if the config is not
        write_json(file, run.config.to_dict())
        write_json(
            folder / "data.json", {"task": run.task.name, "fingerprint": run.task.fingerprint(run.config.data.seed)}
        )
        return noted

    return hosts.agree(sign)


def loop(
    run: Run,
    folder: Path,
    checkpoints: Checkpoints,
    lengths: Mapping[int, Run] = MappingProxyType({}),
    source: start.Source | None = None,
) -> dict[str, Any] | None:
    c, clock = run.config, Clock()
    restored = checkpoints.restore(run.abstract)
    step, state = restored if restored is not None else (0, start.begin(run, source))
    scores: dict[str, float] = {}
    origin = source.origin if source and restored is None else None
    if restored is not None:
        print(f"resumed at step {step}")
        noted = read_manifest(step_folder(checkpoints.directory, step))["extra"]
        scores, origin = noted.get("scores", {}), noted.get("init")
        clock.resume(noted.get("wall_s", 0.0), noted.get("data_wait_s", 0.0))
    changes = sign_run(run, folder, step, origin)
    if origin and restored is None:  # so that whatever happens from here on, the source is not read again
        save(checkpoints, step, state, scores, c.best, clock, origin)
    best = checkpoints.best_score()
    reached = has_reached(scores, c)
    status, pending, untested, sliced = "finished", None, {}, {}

    with (
        MetricsLog(folder / "metrics.jsonl", step if restored is not None else None, c.tensorboard) as log,
        Progress(c.steps, step) as progress,
        graceful_stop() as stop_requested,
        Feed(run, state) as feed,
    ):
        for line in checkpoints.reports:
            log.write(step, event=line)
        while step < c.steps and not reached:
            with clock.waiting():
                batch = next(feed)
            state, sums = run.train_step(state, batch)
            step += 1
            at_eval = step == c.steps or (c.eval_every and step % c.eval_every == 0)
            at_save = step == c.steps or (c.checkpoint_every and step % c.checkpoint_every == 0)
            stop = stop_requested(step)
            checkpoints.check()
            # Metrics are fetched a step late, so that the device always has the next step in hand,
            # except where this step's are needed at once.
            due = [pending, (step, sums)] if at_eval or at_save or stop else [pending]
            pending = None if len(due) == 2 else (step, sums)
            broken = [n for n, sums in filter(None, due) if not log_step(log, progress, clock, c, n, sums)]
            if broken and c.nonfinite != "skip":
                if c.nonfinite == "stop" or int(state.rollbacks) >= c.max_rollbacks:
                    status = "nonfinite"
                    break
                step, state = roll_back(run, checkpoints, state, step)
                log.rewind(step)
                log.write(step, event=f"step {broken[0]} was not finite: rolled back")
                feed.seek(state)
                pending = None
                continue
            if at_eval:
                scores = validate(run, state, "validation")
                log.write(step, **scores)
                progress.update(step, **{f"val {c.best}": scores[f"validation/{c.best}"]})
                reached = has_reached(scores, c)
            # A new best is saved wherever it is found, unless nothing is to be saved before the end.
            at_best = at_eval and c.checkpoint_every and rank(scores, c.best) > best
            if at_best:
                best = rank(scores, c.best)
            if at_save or at_best or stop or reached:
                log.sync()  # on the disk before the step that vouches for it
                save(checkpoints, step, state, scores if at_eval else {}, c.best, clock, origin)
            if at_eval or at_save:
                clock.pause()
            if stop and step < c.steps and not reached:
                checkpoints.wait()
                print(f"stopped at step {step}, saved; run the same command to go on")
                return None
    if status == "nonfinite":
        logging.error("non-finite loss at step %d; the last good checkpoint is kept", step)
    else:
        status = "target" if reached else status
        at_others, untested, sliced = at_lengths(lengths, state)
        tested = measure(run, state, "test")
        scores = scores | scalars(tested, "test") | at_others
        sliced = slices(tested, run.objective.attributes, "test") | sliced
    checkpoints.wait()
    return finish(run, folder, status, step, int(state.nonfinite), scores, sliced, untested, clock, changes, origin)


def has_reached(scores: dict[str, float], c: ConfigDict) -> bool:
    return bool(c.target) and scores.get("validation/accuracy", 0.0) >= c.target


def validate(run: Run, state: RunState, split: str, prefix: str = "") -> dict[str, float]:
    """Scores on a split, named `SPLIT/METRIC`, or with another prefix for the split."""
    return scalars(measure(run, state, split), prefix or split)


def measure(run: Run, state: RunState, split: str) -> dict[str, np.ndarray]:
    """Means over a split, and over the bins of every attribute."""
    c = run.config
    batches = pipeline.eval_batches(run.task, c.data.seed, split, c.batch_size, c.eval_batches)
    return evaluate(run.eval_step, state.params, batches, run.batch_sharding)


def at_lengths(lengths: Mapping[int, Run], state: RunState) -> tuple[dict[str, float], dict[str, str], dict]:
    """Test scores at every length asked for, named `test/length_512/METRIC`; none where the model cannot go.

    Second, the lengths that this machine has no room for, with the reason: they count as failed, not as impossible.
    Third, the scores within the bins of every attribute, named `test/length_512/METRIC/ATTRIBUTE`.
    """
    scores: dict[str, float] = {}
    untested: dict[str, str] = {}
    sliced: dict[str, dict[str, float | None]] = {}
    for length, run in lengths.items():
        lacking, found = None, {}
        try:
            found = measure(run, state, "test")
        except UserError as error:
            print(f"not tested at length {length}: {error}")
            continue
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            lacking = out_of_memory(error)
            if lacking is None:
                raise
        lacking = next(filter(None, hosts.gather(f"test at length {length}", lacking)), None)
        if lacking is None:
            scores |= scalars(found, f"test/length_{length}")
            sliced |= slices(found, run.objective.attributes, f"test/length_{length}")
        else:
            print(f"not tested at length {length}: {lacking}")
            untested[str(length)] = "out of memory"
    return scores, untested, sliced


def log_step(log: MetricsLog, progress: Progress, clock: "Clock", c: ConfigDict, step: int, sums: dict) -> bool:
    """Logs a step's metrics where due; whether the step was finite."""
    values = {name: np.float32(mean(*pair)) for name, pair in jax.device_get(sums).items()}
    clock.tick()
    finite = values.pop("finite") == 1
    if step % c.log_every == 0 or not finite:
        log.write(step, **values, data_wait=clock.data_wait())
    progress.update(step, loss=values["loss"])
    return bool(finite)


def roll_back(run: Run, checkpoints: Checkpoints, state: RunState, step: int) -> tuple[int, RunState]:
    """The last checkpoint, set to read the batches after the one that broke the run."""
    found = checkpoints.restore(run.abstract)
    good, restored = found if found is not None else (0, run.init())
    counts = {
        "data_offset": int(state.data_offset) + step - good,
        "nonfinite": int(state.nonfinite),
        "rollbacks": int(state.rollbacks) + 1,
    }
    sharding = replicated(run.mesh)
    return good, restored.replace(**{k: jax.device_put(np.int32(v), sharding) for k, v in counts.items()})


def save(
    checkpoints: Checkpoints,
    step: int,
    state: RunState,
    scores: dict[str, float],
    best: str,
    clock: "Clock",
    origin: dict[str, Any] | None,
) -> None:
    score = rank(scores, best) if scores else None
    extra = {"wall_s": clock.wall(), "data_wait_s": clock.waited, "scores": scores, "init": origin}
    checkpoints.save(step, state, score, extra)


def rank(scores: dict[str, float], best: str) -> float:
    """The validation score by which steps are compared: higher is better."""
    score = scores[f"validation/{best}"]
    return -score if best == "loss" else score


def finish(
    run: Run,
    folder: Path,
    status: str,
    steps: int,
    nonfinite: int,
    scores: dict[str, float],
    sliced: dict[str, dict[str, float | None]],
    untested: dict[str, str],
    clock: "Clock",
    changes: list[dict[str, Any]],
    origin: dict[str, Any] | None,
) -> dict[str, Any]:
    """Writes the result row: its presence says that the run is over."""
    c, device = run.config, jax.devices()[0]
    result = {
        "status": status,
        "config_hash": configs.digest(c),
        "changes": changes,  # of the config, on the way
        "revision": revision(),
        "data_fingerprint": run.task.fingerprint(c.data.seed),
        "task": c.data.task,
        "length": run.task.length,
        "kind": c.model.kind,
        "mixers": list(c.model.mixers),
        "position": c.model.position,
        "init": origin,  # where the first parameters came from, if they were not drawn
        "seed": c.seed,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "steps": steps,
        "wall_s": round(clock.wall(), 2),
        "steps_per_s": clock.steps_per_s(),
        "data_wait": round(clock.waited / clock.wall(), 4),
        "params": run.params,
        "state_bytes": run.model.state_bytes(run.task.length),
        "baselines": run.objective.baselines(),
        "nonfinite": nonfinite,
        "metrics": scores,
        "slices": sliced,  # of the test's metrics: by the bins of each attribute, at every length tested
        "untested": untested,
    }
    return hosts.agree(lambda: write_json(folder / "result.json", result) or result)


@dataclasses.dataclass
class Clock:
    """Wall time over all of a run's processes, that spent waiting for data, and the time of a step without pauses."""

    start: float = dataclasses.field(default_factory=time.monotonic)
    before: float = 0.0
    last: float | None = None
    steps: list[float] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    told: tuple[float, float] = (0.0, 0.0)  # wall and waited when `data_wait` was last asked

    def resume(self, wall: float, waited: float) -> None:
        """Goes on from what earlier processes noted."""
        self.before, self.waited = wall, waited
        self.told = self.wall(), waited

    def tick(self) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.steps.append(now - self.last)
        self.last = now

    def pause(self) -> None:
        """What happens until the next tick is not a step."""
        self.last = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data."""
        since = time.monotonic()
        try:
            yield
        finally:
            self.waited += time.monotonic() - since

    def data_wait(self) -> float:
        """The share of wall time spent waiting for data since this was last asked, or since the process began."""
        (wall, waited), self.told = self.told, (self.wall(), self.waited)
        return round((self.told[1] - waited) / max(self.told[0] - wall, 1e-9), 4)

    def wall(self) -> float:
        return self.before + time.monotonic() - self.start

    def steps_per_s(self) -> float | None:
        median = statistics.median(self.steps) if self.steps else math.nan
        return round(1 / median, 2) if median > 0 else None
