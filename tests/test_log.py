"""The log says exactly what happened, once, whatever interrupted it; and watching a run costs it nothing."""

import contextlib
import io
import json
import math
import resource
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from model.errors import UserError
from train import log
from train.log import MetricsLog, Progress, read_metrics


def log_steps(path, steps, resume_step=None, **kwargs):
    with MetricsLog(path, resume_step, **kwargs) as metrics:
        for step in steps:
            metrics.write(step, loss=1 / (step + 1))


@pytest.mark.quick
def test_bits_survive(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 300, dtype=np.uint32)
    floats = np.concatenate([words.view(np.float32), np.float32([0.1, -0.0, 1e-45, 3.4e38, 1 / 3, 1e16])])
    floats = floats[~np.isnan(floats)]
    with MetricsLog(path, None) as metrics:
        for step, value in enumerate(floats):
            metrics.write(step, numpy=value, jax=jnp.asarray(value), double=1 / (step + 3))
    for step, event in enumerate(read_metrics(path)):
        assert event["step"] == step
        for name in ("numpy", "jax"):
            assert np.float32(event[name]).tobytes() == floats[step].tobytes()
        assert event["double"] == 1 / (step + 3)


@pytest.mark.quick
def test_all_kinds_of_values(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as metrics:
        metrics.write(
            np.int64(3),
            nan=np.float32("nan"),
            up=math.inf,
            down=jnp.float32(-jnp.inf),
            half=jnp.bfloat16(1.5),
            count=jnp.int32(7),
            double=np.float64(0.1),
            flag=np.bool_(True),
            event="damaged: a\nb",
            row=jnp.arange(3),
            bins={"a": np.float32(0.5)},
            none=None,
        )
        assert len(read_metrics(path)) == 1  # there at once, not when the file is closed
        with pytest.raises(TypeError, match="object cannot be logged"):
            metrics.write(4, bad=object())
    (event,) = read_metrics(path)
    assert math.isnan(event.pop("nan"))
    assert event == {
        "step": 3,
        "up": math.inf,
        "down": -math.inf,
        "half": 1.5,
        "count": 7,
        "double": 0.1,
        "flag": True,
        "event": "damaged: a\nb",
        "row": [0, 1, 2],
        "bins": {"a": 0.5},
        "none": None,
    }
    assert type(event["count"]) is int and type(event["flag"]) is bool


@pytest.mark.quick
def test_a_killed_and_resumed_run_logs_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [0, 10, 20, 30, 40])
    whole = path.read_bytes()
    for cut in range(len(whole)):  # killed after any byte of it
        path.write_bytes(whole[:cut])
        assert [event["step"] for event in read_metrics(path)] == [0, 10, 20, 30, 40][: len(read_metrics(path))]
        if whole[:cut].count(b"\n") >= 2:  # there was a checkpoint at step 10
            log_steps(path, [20, 30, 40], resume_step=10)
        else:
            log_steps(path, [0, 10, 20, 30, 40], resume_step=None)
        assert path.read_bytes() == whole


@pytest.mark.quick
def test_resuming_drops_later_lines_and_keeps_earlier_ones_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2, 2, 3, 4])
    path.write_bytes(path.read_bytes().replace(b'{"step": 2', b'{  "step": 2'))
    before = path.read_bytes().splitlines(keepends=True)
    log_steps(path, [], resume_step=2)
    assert path.read_bytes() == b"".join(before[:3])
    log_steps(path, [], resume_step=None)
    assert path.read_bytes() == b""


@pytest.mark.quick
def test_a_broken_line_in_the_middle_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad in ("garbage", "[1]", '{"loss": 1}', '{"step": null}', '{"step": "2"}'):
        path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
        for use in (lambda: read_metrics(path), lambda: MetricsLog(path, 2)):
            with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not an event"):
                use()


@contextlib.contextmanager
def room_for(path, more: int):
    """Lets files grow to `more` bytes over the size of this one: as a disk that fills, but for one process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.quick
@pytest.mark.parametrize("more", [0, 1, 12])
def test_a_full_disk_tears_no_line(tmp_path, more):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as metrics:
        metrics.write(1, loss=0.5)
        with room_for(path, more), pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: File too large"):
            metrics.write(2, loss=0.25)
        assert [event["step"] for event in read_metrics(path)] == [1]
        metrics.write(2, loss=0.25)  # once there is room again
        metrics.write(3, loss=0.125)
    assert [event["step"] for event in read_metrics(path)] == [1, 2, 3]
    log_steps(path, [2], resume_step=1)
    assert [event["step"] for event in read_metrics(path)] == [1, 2]


@pytest.mark.quick
def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, None) as metrics:
        whole = metrics._file

        class Reluctant:
            fileno, truncate, close = whole.fileno, whole.truncate, whole.close

            def write(self, data):
                return whole.write(data[:5])

        metrics._file = Reluctant()
        metrics.write(1, loss=0.5)
        metrics.write(2, loss=0.25)
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_tensorboard_reads_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2, 3], tensorboard=True)
    time.sleep(1.1)  # its files are named by the second
    with MetricsLog(path, resume_step=2, tensorboard=True) as metrics:
        metrics.write(3, loss=jnp.float32(7), note="text", accuracy=np.float32(0.5))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "accuracy"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, np.float32(1 / 3)), (3, 7.0)]
    assert [(e.step, e.value) for e in events.Scalars("accuracy")] == [(3, 0.5)]


@pytest.mark.quick
def test_a_missing_tensorboard_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        MetricsLog(tmp_path / "metrics.jsonl", None, tensorboard=True)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


def run(progress, clock, steps, seconds_per_step):
    for step in steps:
        clock.now += seconds_per_step
        progress.update(step, loss=jnp.float32(1 / step), **({"val accuracy": 0.875} if step == 250 else {}))


@pytest.mark.quick
def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(log, "time", clock)
    with Progress(1000, start=200, stream=stream) as progress:
        clock.now += 50  # compiling
        run(progress, clock, range(201, 501), seconds_per_step=0.125)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 200/1000"
    assert lines[1] == "step 201/1000 | loss 0.004975"
    # 300 steps of 1/8 s: start, first, every ten seconds, end. Compiling is not in the rate.
    assert lines[2] == "step 281/1000 | loss 0.003559 | val accuracy 0.875 | 8 steps/s | 1:30 left"
    assert [line.split("/")[0] for line in lines] == [f"step {n}" for n in (200, 201, 281, 361, 441, 500)]
    assert all(line.isprintable() for line in lines)


@pytest.mark.quick
def test_a_rate_takes_more_than_the_first_step(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(log, "time", clock)
    with Progress(201, start=200, stream=stream) as progress:
        progress.update(201, loss=0.5)
        clock.now += 30  # evaluating
    assert stream.getvalue().splitlines() == ["step 200/201", *["step 201/201 | loss 0.5"] * 2]


@pytest.mark.quick
def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(log, "time", clock)
    with Progress(400, stream=stream) as progress:
        clock.now += 50
        run(progress, clock, range(1, 401), seconds_per_step=20)
    shown = stream.getvalue()
    assert "\x1b[" in shown and "━" in shown  # drawn over and over in place
    assert "step 200/400" in shown and "val accuracy 0.875" in shown
    assert "0.05 steps/s" in shown and "1:06:40 left" in shown
    assert "step 400/400" in shown.splitlines()[-2]


@pytest.mark.quick
def test_progress_costs_next_to_nothing(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True  # a bar, the dearer of the two to draw
    monkeypatch.setenv("TERM", "xterm")
    with Progress(10**6, stream=stream) as progress:
        loss = jnp.float32(1)
        progress.update(0, loss=loss)
        costs = []
        for step in range(1, 2001):
            began = time.perf_counter()
            progress.update(step, loss=loss)
            costs.append(time.perf_counter() - began)
    assert np.median(costs) < 50e-6


def test_lines_are_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(path, [1, 2])
    assert [json.loads(line) for line in path.read_text().splitlines()] == read_metrics(path)
