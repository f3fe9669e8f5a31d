"""How mixers grow with the length: powers are recovered, the budget is kept, and what is measured is not lost."""

import json
import os
import threading
from functools import partial

import jax
import numpy as np
import pytest

from experiments.measurements import scaling
from experiments.measurements.elsewhere import elsewhere
from experiments.measurements.scaling import FAILED, MEASURED, NO_MEMORY, NO_TIME
from experiments.tables import scaling as growth
from model.contract import Context
from model.errors import UserError
from model.mixers import MIXERS
from model.ops.named import implementations
from tests import meshes
from tests.processes import call

LENGTHS = [1024, 4096, 16384, 65536]


def made(name: str, lengths=LENGTHS, time: float = 1, memory: float = 1, overhead: float = 0.0, **more) -> list[dict]:
    """Rows of a mixer that grows by these powers."""
    fixed = dict(claimed_time=time, claimed_memory=memory, revision="abc", date="2026-11-17", **scaling.setting())
    return [
        fixed
        | dict(mixer=name, length=n, status=MEASURED, compile_s=1.0, temp_bytes=int(100 * n**memory))
        | dict(seconds=1e-6 * (n**time + overhead), tokens_per_s=n / (1e-6 * (n**time + overhead)))
        | more
        for n in lengths
    ]


class Machine:
    """A clock that a measurement moves: compiling takes the same at every length, running grows by a power."""

    def __init__(self, **mixers: tuple[float, float, float]):
        self.mixers, self.now, self.asked = mixers, 0.0, []  # name -> seconds to compile, to run at 1,024, power

    def clock(self) -> float:
        return self.now

    def prepare(self, name: str, length: int):
        compile_s, first, power = self.mixers[name]
        seconds = first * (length / 1024) ** power
        self.asked.append((name, length))
        self.now += compile_s

        def run() -> dict:
            self.now += scaling.running(seconds)
            row = dict(status=MEASURED, compile_s=compile_s, temp_bytes=length, seconds=seconds)
            return row | dict(tokens_per_s=length / seconds)

        return run

    def survey(self, seconds: float, kept=(), workers: int = 1) -> list[dict]:
        claimed = {name: power for name, (_, _, power) in self.mixers.items()}
        return list(scaling.survey(claimed, LENGTHS, self.prepare, seconds, kept, workers, self.clock))


def reached(rows: list[dict], status: str = MEASURED) -> dict[str, int]:
    return {row["mixer"]: row["length"] for row in rows if row["status"] == status}


@pytest.mark.quick
@pytest.mark.parametrize("time, memory", [(1, 1), (1.5, 1), (2, 2), (1.2, 0.5)])
def test_powers_are_recovered(time, memory):
    rows = made("one", time=time, memory=memory)
    assert growth.power(rows, "seconds") == pytest.approx(time, abs=1e-3)
    assert growth.power(rows, "temp_bytes") == pytest.approx(memory, abs=1e-2)
    assert growth.power(rows[:1], "seconds") is None


@pytest.mark.quick
def test_overhead_in_short_rows_does_not_count():
    """A step that is all launching up to 4,096 tokens: the last lengths tell, in whatever order the rows stand."""
    rows = made("one", lengths=[64, 256, *LENGTHS, 2**18, 2**20], overhead=4096)[::-1]
    assert growth.power(rows, "seconds") == pytest.approx(1, abs=0.03)


@pytest.mark.quick
def test_the_next_is_the_one_that_had_least_time():
    machine = Machine(slow=(50, 0.001, 1), quick=(1, 0.001, 1), square=(1, 0.01, 2))
    rows = machine.survey(seconds=160)
    assert reached(rows) == {"slow": 4096, "quick": 65536, "square": 65536}
    assert reached(rows, NO_TIME) == {"slow": 16384}
    # The first lengths of all, then those that take little: what compiles long has its second turn behind them.
    assert machine.asked[-1] == ("slow", 4096)


@pytest.mark.quick
@pytest.mark.parametrize("seconds", [0.5, 10, 30, 100, 1000])
def test_the_budget_is_kept(seconds):
    machine = Machine(slow=(20, 0.1, 1), quick=(1, 0.001, 1), square=(1, 0.01, 2), cubic=(3, 0.1, 3))
    rows = machine.survey(seconds)
    firsts = sum(compile_s + scaling.running(first) for compile_s, first, _ in machine.mixers.values())
    assert machine.now <= max(seconds, firsts), "of what is not known yet, at most the first lengths are begun"
    assert reached(rows).keys() | reached(rows, NO_TIME).keys() == machine.mixers.keys()
    if seconds >= 30:
        assert machine.now > seconds / 2 or not reached(rows, NO_TIME), "and it is used"


@pytest.mark.quick
def test_several_compile_at_once_and_run_alone():
    """Two do while a third thread waits for them; none runs before all of its batch are compiled."""
    both, events = threading.Barrier(2, timeout=60), []

    def prepare(name, length):
        both.wait()
        events.append("compiled")
        return lambda: events.append("ran") or dict(status=MEASURED, compile_s=1.0, seconds=0.1, temp_bytes=1)

    rows = list(scaling.survey(dict(one=1, two=1), LENGTHS[:2], prepare, 1000, workers=2))
    assert len(rows) == 4 and events == ["compiled", "compiled", "ran", "ran"] * 2
    wanted = dict(one=(9.0, 1.0), two=(2.0, 3.0), three=(1.0, 50.0), four=(1.0, 0.0))
    assert scaling.together(wanted, 13, 8) == ["one", "two"] and scaling.together(wanted, 1000, 3) == [*wanted][:3]


@pytest.mark.quick
def test_growth_beyond_the_claim_is_seen():
    cubic = made("one", lengths=LENGTHS[:2], time=3)
    assert scaling.grown(cubic, 1, 16384) == pytest.approx(1e-6 * 16384**3)
    # Claimed where there is one length only, or where overhead hides it.
    assert scaling.grown(cubic[:1], 2, 4096) == pytest.approx(16 * cubic[0]["seconds"])
    assert scaling.expected([], 1, 1024) == (0, 0)


@pytest.mark.quick
def test_compiling_is_expected_to_take_as_long_as_last():
    """Beside others a program takes several times as long as alone: its growth with the length means nothing."""
    rising = [row | {"compile_s": 8.0 * 4**i} for i, row in enumerate(made("one", lengths=LENGTHS[:2]))]
    assert scaling.expected(rising, 1, LENGTHS[2])[0] == rising[-1]["compile_s"]


@pytest.mark.quick
def test_a_mixer_that_ends_leaves_the_others_their_time():
    def prepare(name, length):
        if name == "large" and length > 1024:
            return lambda: {"status": NO_MEMORY, "compile_s": 1.0, "temp_bytes": 2**50}
        return partial(scaling.broken, ValueError("odd")) if name == "broken" else machine.prepare("fine", length)

    machine = Machine(fine=(1, 0.001, 1))
    claimed = dict.fromkeys(("large", "broken", "fine"), 1)
    rows = list(scaling.survey(claimed, LENGTHS, prepare, 1000, clock=machine.clock))
    assert reached(rows) == {"large": 1024, "fine": 65536}
    assert reached(rows, NO_MEMORY) == {"large": 4096} and reached(rows, FAILED) == {"broken": 1024}
    assert "failed (ValueError: odd)" in scaling.sentence(rows[1])


@pytest.mark.quick
def test_rows_of_before_are_not_measured_again():
    mixers = dict(one=(1, 0.001, 1), two=(1, 0.001, 1), three=(1, 0.001, 1))
    kept = made("one") + made("two", lengths=LENGTHS[:2]) + made("three", lengths=[1024], status=NO_MEMORY)
    machine = Machine(**mixers)
    machine.survey(1000, kept)
    assert machine.asked == [("two", 16384), ("two", 65536)]


@pytest.mark.quick
def test_rows_of_other_code_or_of_no_time_are_not_kept(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert scaling.kept(file) == []
    row = made("one", lengths=[1024])[0]
    changes = ({"source": "abd"}, {"width": 65}, {"status": NO_TIME}, {"device": "H200"}, {"jax": "0"})
    file.write_text("\n".join(map(json.dumps, [row, *(row | change for change in changes), {}, 5])))
    assert scaling.kept(file) == [row]
    assert scaling.kept(file, mixed=True) == [row, row | {"source": "abd"}]
    file.write_text("not rows")
    with pytest.raises(UserError, match="is not a file of rows"):
        scaling.kept(file)


@pytest.mark.quick
def test_long_calls_run_once_and_short_ones_in_queues():
    def timed(seconds):
        now, calls = [0.0], []

        def call():
            now[0] += seconds
            calls.append(1)

        found = scaling.seconds_of(call, lambda: now[0])
        assert found == pytest.approx(seconds)
        assert now[0] == pytest.approx(scaling.running(seconds)), "as is expected of it"
        return len(calls)

    assert timed(3.0) == 1 and timed(1.0) == 4 and timed(0.01) == 27
    assert timed(1e-4) == 2 + 5 * 500


@pytest.mark.quick
def test_a_table_and_a_picture(tmp_path):
    rows = [*made("linear"), *made("root", time=1.5, memory=1.5), *made("square", time=2)]
    ends = [dict(status=NO_TIME, length=2**18), dict(status=FAILED, length=2**18, error="ValueError: a|b")]
    rows += [row | end for row, end in zip(rows[7::4], ends, strict=True)]
    rows += [made("broken", lengths=[1024])[0] | dict(status=FAILED, error="TypeError: no")]
    rows += [row for i in range(20) for row in made(f"more{i}", overhead=i)]
    text = growth.table(rows)
    assert "| root | 1.5 | 1.50 | 1.5 | 1.50 | 65,536 | 16,777.22 | 3,906 | 1,600.0 | out of time at 262,144 |" in text
    assert "failed at 262,144: ValueError: a\\|b" in text
    assert "| broken | 1 |  | 1 |  |  |  |  |  | failed at 1,024: TypeError: no |" in text
    assert text.index("| linear") < text.index("| root") < text.index("| square")
    assert "width 64, float32" in text and rows[0]["revision"] in text
    curves = {name: growth.measured(mine) for name, mine in growth.by_mixer(rows).items() if growth.measured(mine)}
    panels = growth.grouped(curves)
    assert sorted(name for panel in panels for name in panel) == sorted(curves)
    assert max(map(len, panels)) <= growth.PANEL
    assert all(len({curves[name][0]["claimed_time"] for name in panel}) == 1 for panel in panels)
    growth.picture(rows, tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes()[1:4] == b"PNG"
    growth.picture(rows[-1:], tmp_path / "one.png")
    growth.picture([row for row in rows if row["status"] != MEASURED], tmp_path / "none.png")
    assert (tmp_path / "one.png").exists() and not (tmp_path / "none.png").exists()


@pytest.mark.quick
def test_every_mixer_claims_and_can_be_made():
    for name, cls in scaling.ALONE.items():
        mixer = scaling.make(name, 32, width=64, dtype="float32")
        assert mixer.causal != cls.both_ways_only
        assert 0 < scaling.claims(cls)["claimed_time"] <= 3
        assert getattr(mixer, "longest", 32) == 32
    strides = [scaling.make("fixed", length, width=64, dtype="float32").stride for length in (1024, 4096, 2**20)]
    assert strides == [32, 64, 1024]
    assert scaling.claims(MIXERS["attention"]) == {"claimed_memory": 1, "claimed_time": 2}
    assert scaling.lengths(20_000) == LENGTHS[:3] and scaling.lengths()[-1] == 2**14


@pytest.mark.quick
def test_there_is_a_worker_for_each_core_also_where_no_system_tells_which(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for there, found in ((3, 3), (500, scaling.MOST_WORKERS), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda there=there: there)
        assert scaling.workers() == found


def test_a_step_is_measured():
    mixer = scaling.make("s4d", 32, width=8, dtype="float32")
    row = scaling.measure(mixer, 32, scaling.room())
    assert row["status"] == MEASURED and row["seconds"] > 0 < row["compile_s"]
    assert row["tokens_per_s"] == 32 / row["seconds"]
    variables = scaling.opened(mixer)
    value, (by_params, by_inputs) = scaling.lowered(mixer, 32).compile()(variables, scaling.tokens(mixer, 32))
    assert np.isfinite(value) and by_inputs.shape == (1, 32, 8)
    assert jax.tree.structure(by_params) == jax.tree.structure(variables)

    tight = scaling.measure(mixer, 32, room=1024)
    assert tight["status"] == NO_MEMORY and tight["temp_bytes"] > 0 and "seconds" not in tight


PICKED = {
    "attention": "attention cudnn",
    "fixed": "attention blocks, attention flash, attention tiled",  # heads look near or far
    "gla": "matrix_state fused",
    "kda": "delta_rule fused",
    "mamba": "scan fused",
    "b2s6": "scan fused",
    "mamba2": "ssd fused",
    "moba": "chosen fused",
    "rglru": "scan fused",
    "rwkv": "scan fused",
    "rwkv6": "wkv6 fused",
}


def run_on_a_gpu(name, **changes):
    """By name the implementations that a mixer's program runs there, where there are others than here."""
    mixer = scaling.make(name, 1024, width=64, dtype="bfloat16").clone(**changes)

    def traced(variables, x):
        with meshes.in_force(meshes.mesh_of("gpu")):
            return mixer.apply(variables, x, Context(train=True))[0]

    variables = jax.eval_shape(partial(scaling.draw, mixer), jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, 1024, 64), mixer.dtype)
    return ", ".join(implementations(jax.jit(traced).trace(variables, x).lower(lowering_platforms=("cuda",))))


@pytest.mark.parametrize("name", PICKED)
def test_programs_say_which_implementation_runs(name):
    assert run_on_a_gpu(name) == PICKED[name]


@pytest.mark.parametrize("name", ["bigbird", "block_sparse", "dilated", "local", "longformer", "strided"])
def test_patterns_run_the_implementation_that_is_asked_for(name):
    assert run_on_a_gpu(name, implementation="blocks") == "attention blocks"


def test_what_breaks_down_is_a_row(monkeypatch):
    mixer = scaling.make("attention", 32, width=8, dtype="float32")

    def raises(error, *_):
        raise error

    monkeypatch.setattr(scaling, "lowered", partial(raises, RuntimeError("RESOURCE_EXHAUSTED: 5 bytes.\nmore")))
    assert scaling.measure(mixer, 32, 1e9) == {"status": NO_MEMORY, "error": "out of memory: 5 bytes"}
    monkeypatch.setattr(scaling, "lowered", partial(raises, UserError("no such length")))
    assert scaling.measure(mixer, 32, 1e9) == {"status": FAILED, "error": "UserError: no such length"}
    monkeypatch.undo()
    monkeypatch.setattr(scaling, "seconds_of", partial(raises, RuntimeError("RESOURCE_EXHAUSTED: 5 bytes.\nmore")))
    assert scaling.measure(mixer, 32, 1e9) == {"status": NO_MEMORY, "error": "out of memory: 5 bytes"}


def test_real_mixers_are_measured_and_not_again(monkeypatch):
    monkeypatch.setattr(scaling, "QUEUE", 0.0)
    monkeypatch.setitem(scaling.SIZES, "cpu", dict(width=8, dtype="float32"))
    names = scaling.asked("lru, attention")
    rows = list(scaling.rows(names, [16, 64], 300))
    assert {(row["mixer"], row["length"]) for row in rows} == {(m, n) for m in ("lru", "attention") for n in (16, 64)}
    assert all(row["status"] == MEASURED and row["width"] == 8 and row["device"] == "cpu" for row in rows)
    assert {row["claimed_time"] for row in rows if row["mixer"] == "attention"} == {2}
    by = {(row["mixer"], row["length"]): row["implementation"] for row in rows}
    assert by == {("attention", n): "attention xla" for n in (16, 64)} | {("lru", n): "scan serial" for n in (16, 64)}
    assert all(f"tokens by {row['implementation']}: " in scaling.sentence(row) for row in rows)
    assert list(scaling.rows(names, [16, 64], 300, rows)) == []
    with pytest.raises(UserError, match=r"unknown mixer 'mambo'; .*closest: mamba"):
        scaling.asked("mamba,mambo")


@pytest.mark.scale
def test_the_command_leaves_rows_a_table_and_a_picture_and_goes_on(tmp_path):
    out = tmp_path / "new" / "scaling.jsonl"
    words = ("experiments.bench", "scaling", "--mixers=rnn", "--longest=1024", f"--out={out}")
    code, printed, told = call(*words)
    assert code == 0 and printed.count("tokens/s") == 1, told
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["mixer"], row["length"], row["status"], row["bench"]) == ("rnn", 1024, MEASURED, "scaling")
    assert out.with_suffix(".md").read_text() == growth.table([row]) and out.with_suffix(".png").exists()
    assert call(*words)[:2] == (0, "") and json.loads(out.read_text()) == row
    code, printed, told = call(*words, "--longest=4096")
    assert code == 0 and printed.startswith("rnn, 4,096 tokens"), told
    assert [json.loads(line)["length"] for line in out.read_text().splitlines()] == [1024, 4096]


@pytest.mark.scale
def test_processes_make_ready_side_by_side_and_run_when_told():
    """What breaks down is a row, and another process takes its place."""
    with elsewhere(2, partial(partial, dict.fromkeys)) as prepare:
        first, second = prepare(("status", "length"), 1), prepare(["status"], 2)
        assert second() == {"status": 2} and first() == {"status": 1, "length": 1}
        assert prepare(["status"], 3)() == {"status": 3}
    with elsewhere(1, partial(partial, os._exit)) as prepare:
        for code in (3, 4):
            assert prepare(code)() == {"status": FAILED, "error": f"the process ended with exit code {code}"}
