"""A run from start to result: build, open the folder, restore, loop, report."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from model.errors import UserError
from train import checkpoint, hosts, identity, profile, start, streaming
from train import config as configs
from train.checkpoint import Checkpoints
from train.clock import Clock
from train.dispatch import apart, steps_from
from train.evaluate import fetch, mean
from train.feed import Feed
from train.goodput import Ledger
from train.identity import sign_run
from train.log import MetricsLog, Progress, say
from train.manifest import read_manifest, step_folder
from train.revision import revision, source_digest
from train.run import Run, at_length, prepare, say_what_is_decided
from train.scores import at_lengths, baselines_at, measure, validate
from train.sharding import replicated
from train.step import RunState
from train.watchdog import Watchdog
from train.workdir import graceful_stop, open_workdir, refuse_remote, write_json


def train(config: ConfigDict, workdir: str, traced: range = range(0)) -> dict[str, Any] | None:
    """Trains until done and returns the result row; None if stopped by a signal, with all that was done saved.

    Of the steps to be `traced` a profile is written.
    """
    refuse_remote("workdir", workdir)
    profile.check(traced, config.steps)
    clock = Clock()
    hosts.same(lambda: {"workdir": workdir, "jax": jax.__version__, "code": source_digest(), **configs.flatten(config)})
    # Of many processes any may be asked to stop, while others have not even begun.
    with graceful_stop() if jax.process_count() > 1 else contextlib.nullcontext():
        run = prepare(config)
        lengths = {length: at_length(run, length) for length in config.test_lengths}
        streaming.check_asked(run)
        there = Path(workdir)
        begun = hosts.agree(lambda: bool(checkpoint.steps(there / "checkpoints") or identity.ended(there)))
        source = None if begun else start.find(run)
        with open_workdir(workdir) as folder:
            fingerprint = run.task.fingerprint(config.data.seed)
            done = identity.open_run(run, folder, fingerprint)
            if done is not None:
                print(f"{workdir} is finished already: {done['status']} after {done['steps']} steps")
                return done
            with (
                Watchdog(clock, config.watchdog.factor, config.watchdog.seconds, folder),
                Ledger(clock, folder) as ledger,
                Checkpoints(folder / "checkpoints", config.keep) as checkpoints,
                profile.of(run, traced, folder / "profile", clock) as run,
            ):
                say_what_is_decided(run)
                return loop(run, folder, checkpoints, fingerprint, lengths, source, ledger)


class Begun(NamedTuple):
    """What a run goes on from."""

    step: int
    state: RunState
    scores: dict[str, float]  # of validation at this step; empty where it was not measured
    origin: dict[str, Any] | None  # of its first parameters, if they were not drawn
    revisions: list[str]  # of the code that trained it
    resumed: bool


def resume(run: Run, checkpoints: Checkpoints, source: start.Source | None, clock: Clock) -> Begun:
    """The newest good checkpoint, or a beginning."""
    clock.enter("restore")
    restored = checkpoints.restore(run.abstract)
    if restored is None:
        clock.enter("start")
        state = start.begin(run, source)
        return Begun(0, state, {}, source.origin if source else None, [revision()], resumed=False)
    step, state = restored
    if step > run.config.steps:
        raise UserError(f"steps is {run.config.steps}, and this run has taken {step} already; closest: {step}")
    say(f"resumed at step {step}")
    noted = read_manifest(step_folder(checkpoints.directory, step))["extra"]
    clock.resume(noted.get("wall_s", 0.0), noted.get("data_wait_s", 0.0), noted.get("steps_per_s"))
    revisions = list(dict.fromkeys([*noted.get("revisions", []), revision()]))
    asked = run.config.eval_batches  # may have changed, and then the scores are of other rows
    scores = noted.get("scores", {}) if noted.get("eval_batches", asked) == asked else {}
    return Begun(step, state, scores, noted.get("init"), revisions, resumed=True)


class Stopped(Exception):
    """A signal has asked the run to stop, and all that was done is saved."""


def loop(
    run: Run,
    folder: Path,
    checkpoints: Checkpoints,
    fingerprint: str,
    lengths: Mapping[int, Run] = MappingProxyType({}),
    source: start.Source | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any] | None:
    ledger = ledger or Ledger(Clock())
    clock = ledger.clock
    begun = resume(run, checkpoints, source, clock)
    extra = {"init": begun.origin, "revisions": begun.revisions}
    changes = sign_run(run, folder, fingerprint, begun.step, begun.origin)
    if begun.origin and not begun.resumed:  # so that whatever happens from here on, the source is not read again
        save(checkpoints, begun.step, begun.state, None, begun.scores, run, clock, extra)
    try:
        with graceful_stop() as stop_requested:
            trained = take_steps(run, folder, checkpoints, begun, extra, ledger, stop_requested)

            def begin() -> None:
                """Of each part of the tests, which may be long: a signal ends them there."""
                if stop_requested():
                    raise Stopped
                clock.enter("evaluate")

            clock.enter("save")
            checkpoints.wait()
            found = untested(run, trained) if trained.broke else tested(run, checkpoints, lengths, trained, begin)
    except Stopped:
        say(f"stopped at step {checkpoints.steps()[-1]}, saved; run the same command to go on")
        return None
    clock.enter("save")
    ended = {"status": trained.status, "steps": trained.step, "nonfinite": trained.nonfinite, **found}
    return finish(run, folder, ledger, fingerprint, ended | {"changes": changes, **extra})


class Trained(NamedTuple):
    """Where the steps have led."""

    status: str
    step: int
    state: RunState
    scores: dict[str, float]  # of validation at this step
    nonfinite: int  # steps that were

    @property
    def broke(self) -> bool:
        return self.status == "nonfinite"


def take_steps(
    run: Run,
    folder: Path,
    checkpoints: Checkpoints,
    begun: Begun,
    extra: dict[str, Any],
    ledger: Ledger,
    stop_requested: Callable[[], bool],
) -> Trained:
    """Trains to the last step, the target or a step that breaks the run, logging and saving; raises Stopped."""
    c, clock, (step, state, scores) = run.config, ledger.clock, begun[:3]
    best = checkpoints.best_score()
    pending, nonfinite = None, int(state.nonfinite)

    with (
        MetricsLog(folder / "metrics.jsonl", step if begun.resumed else None, c.tensorboard) as log,
        Progress(c.steps, step) as progress,
        Feed(run, state) as feed,
    ):
        ledger.begin(step, log.reached)
        for line in checkpoints.reports:
            log.write(step, event=line)
        if step >= c.steps and not scores:  # saved between evaluations, by a run that was to go further
            scores = evaluated(run, state, step, log, progress, clock)
        reached = has_reached(scores, c)
        while step < c.steps and not reached:
            with clock.waiting():
                batches = next(feed)
            clock.take_steps()
            n = steps_from(step, c, run.most)
            state, sums = run.train_steps(state, batches, n)
            step += n
            ledger.take(n)
            at_eval, at_save = due(step, c.eval_every, c.steps), due(step, c.checkpoint_every, c.steps)
            stop = stop_requested()
            checkpoints.check()
            # Metrics are fetched a dispatch late, so that the device always has the next one in hand,
            # except where those of the last are needed at once.
            at_once = at_eval or at_save or stop
            taken = range(step - n + 1, step + 1), sums
            broken = log_steps(run, log, progress, clock, filter(None, [pending, taken if at_once else None]))
            pending = None if at_once else taken
            nonfinite += len(broken)
            if broken and c.nonfinite != "skip":
                # What follows is reckoned from the step that broke, not from the one at which that was found.
                if c.nonfinite == "stop" or int(state.rollbacks) >= c.max_rollbacks:
                    logging.error("non-finite loss at step %d; the last good checkpoint is kept", broken[0])
                    return Trained("nonfinite", broken[0], state, scores, nonfinite)
                clock.pause()
                clock.enter("restore")
                step, state = roll_back(run, checkpoints, state, broken[0], nonfinite)
                ledger.go_back(step)
                log.rewind(step)
                log.write(step, event=f"step {broken[0]} was not finite: rolled back")
                feed.seek(state)
                pending, scores = None, {}
                continue
            if at_eval:
                try:
                    scores = evaluated(run, state, step, log, progress, clock)
                except Exception:
                    if jax.process_count() == 1:  # else one may have failed alone, and would wait for the others
                        log.sync()
                        save(checkpoints, step, state, None, {}, run, clock, extra)
                    raise
                reached = has_reached(scores, c)
            # A new best is saved wherever it is found, unless nothing is to be saved before the end.
            keeps_best = c.checkpoint_every or c.test_at == "best"
            at_best = at_eval and keeps_best and rank(scores, c.best) > best
            if at_best:
                best = rank(scores, c.best)
            if at_save or at_best or stop or reached:
                clock.enter("save")
                log.sync()  # on the disk before the step that vouches for it
                # The step to test is the first of equals, else a stop at a later one would change which it is.
                score = rank(scores, c.best) if at_eval and (at_best or c.test_at == "last") else None
                save(checkpoints, step, state, score, scores if at_eval else {}, run, clock, extra)
            if at_eval or at_save:
                clock.pause()
            if stop:
                checkpoints.wait()
                raise Stopped
    return Trained("target" if reached else "finished", step, state, scores, nonfinite)


def due(step: int, every: int, last: int) -> bool:
    """Whether something is to be done after a step: every so many, or never where that is 0, and after the last."""
    return step == last or (every > 0 and step % every == 0)


def evaluated(
    run: Run, state: RunState, step: int, log: MetricsLog, progress: Progress, clock: Clock
) -> dict[str, float]:
    """The validation scores of a step, logged and shown."""
    best = run.config.best
    clock.enter("evaluate")
    scores = validate(run, state, "validation")
    log.write(step, **scores)
    progress.update(step, **{f"val {best}": scores[f"validation/{best}"]})
    return scores


def has_reached(scores: dict[str, float], c: ConfigDict) -> bool:
    return bool(c.target) and scores.get("validation/accuracy", 0.0) >= c.target


def tested(
    run: Run, checkpoints: Checkpoints, lengths: Mapping[int, Run], trained: Trained, begin: Callable[[], None]
) -> dict[str, Any]:
    """What a result says of tests: those of the last step or of the best. `begin` is called before each part."""
    begin()
    at, scores, params = trained.step, trained.scores, None
    if run.config.test_at == "best":
        at, scores, params = chosen(run, checkpoints, trained)
    final = trained.state if params is None else trained.state.replace(params=params)
    found, (at_others, lacking) = measure(run, final, "test"), at_lengths(lengths, final, begin)
    begin()
    streamed, in_stream = streaming.scores(run, final.params)
    return {
        "metrics": scores | found.scores | at_others.scores | streamed,
        "targets": found.targets | at_others.targets | in_stream,
        "slices": found.slices | at_others.slices,
        "untested": lacking,
        "length_baselines": baselines_at(run, lengths),
        "test_at": run.config.test_at,
        "tested_step": at,
    }


def untested(run: Run, trained: Trained) -> dict[str, Any]:
    """The same where nothing was tested."""
    nothing = {"targets": {}, "slices": {}, "untested": {}}
    return {"metrics": trained.scores, **nothing, "test_at": run.config.test_at, "tested_step": None}


def chosen(run: Run, checkpoints: Checkpoints, trained: Trained) -> tuple[int, dict[str, float], Any | None]:
    """The step that validation chose, its scores and its parameters; None for these where it is the last one."""
    best = checkpoints.good_best()
    # The last step may have been saved without the score by which it is the best.
    last = rank(trained.scores, run.config.best)
    if best is None or best == trained.step or last > checkpoints.best_score():
        return trained.step, trained.scores, None
    params = checkpoint.load_params(checkpoints.directory, run.abstract.params, best)
    return best, read_manifest(step_folder(checkpoints.directory, best))["extra"]["scores"], params


def log_steps(
    run: Run, log: MetricsLog, progress: Progress, clock: Clock, taken: Iterable[tuple[range, dict]]
) -> list[int]:
    """Logs the metrics of steps where due, up to the first that ends the run; those that were not finite."""
    c, broken = run.config, []
    for steps, sums in taken:
        fetched = apart(fetch(sums), len(steps), run.most)
        clock.tick(len(steps))
        waited = functools.cache(clock.data_wait)  # one share for all that were waited for together
        for step, pairs in zip(steps, fetched, strict=True):
            values = {name: np.float32(mean(*pair)) for name, pair in pairs.items()}
            finite = values.pop("finite") == 1
            if step % c.log_every == 0 or not finite:
                log.write(step, **values, data_wait=waited())
            progress.update(step, loss=values["loss"])
            if not finite:
                broken.append(step)
                if c.nonfinite != "skip":
                    return broken
    return broken


def roll_back(run: Run, checkpoints: Checkpoints, state: RunState, broken: int, nonfinite: int) -> tuple[int, RunState]:
    """The last checkpoint, set to read the batches after that of the step that broke the run."""
    found = checkpoints.restore(run.abstract)
    good, restored = found if found is not None else (0, jax.block_until_ready(run.init()))
    counts = {
        "data_offset": int(state.data_offset) + broken - good,
        "nonfinite": nonfinite,
        "rollbacks": int(state.rollbacks) + 1,
    }
    sharding = replicated(run.mesh)
    return good, restored.replace(**{k: jax.device_put(np.int32(v), sharding) for k, v in counts.items()})


def save(
    checkpoints: Checkpoints,
    step: int,
    state: RunState,
    score: float | None,  # by which the best step is found
    scores: dict[str, float],
    run: Run,
    clock: Clock,
    extra: dict[str, Any],
) -> None:
    times = {"wall_s": clock.wall(), "data_wait_s": clock.waited, "steps_per_s": clock.steps_per_s()}
    noted = {**times, "scores": scores, "eval_batches": run.config.eval_batches, **extra}
    checkpoints.save(step, state, score, noted)


def rank(scores: dict[str, float], best: str) -> float:
    """The validation score by which steps are compared: higher is better."""
    score = scores[f"validation/{best}"]
    return -score if best == "loss" else score


def finish(run: Run, folder: Path, ledger: Ledger, fingerprint: str, ended: dict[str, Any]) -> dict[str, Any]:
    """Writes the result row: its presence says that the run is over. `ended` holds what only the loop knows."""
    c, clock, device, waited = run.config, ledger.clock, jax.devices()[0], ledger.clock.share_waited()
    result = {
        **ended,
        "config_hash": configs.digest(c),
        "revision": revision(),
        "data_fingerprint": fingerprint,
        "data": {"seed": c.data.seed, **run.task.parameters()},
        "task": c.data.task,
        "length": run.task.length,
        "kind": c.model.kind,
        "mixers": list(c.model.mixers),
        "position": c.model.position,
        "seed": c.seed,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "wall_s": round(clock.wall(), 2),
        "steps_per_s": clock.steps_per_s(),
        "data_wait": waited,
        "goodput": ledger.end(),
        "params": run.params,
        "state_bytes": run.model.state_bytes(streaming.longest(run)),
        "baselines": run.objective.baselines(),
    }
    written = hosts.agree(lambda: write_json(folder / "result.json", result) or result)
    if jax.process_index() == 0:
        took = f"{ended['steps']} steps and {result['wall_s']:.1f} s"
        say(f"{ended['status']} after {took}, {waited:.1%} of which it waited for data")
    return written
