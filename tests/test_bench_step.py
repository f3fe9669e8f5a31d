"""The benches of training steps and of kernels: programs compiled cold and warm, rows that make tables."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.measurements import attention_speed, part, scan_speed, speed, state_speed, step_speed
from experiments.measurements.sheet import Sheet
from model.errors import UserError


def test_the_second_time_a_program_comes_from_the_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    program, said = speed.compiled_twice(lambda: jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.ones(100)).compile())
    assert float(program(jnp.ones(100))) == 100 and 0 < said["compile_again_s"] < said["compile_s"]
    assert jax.config.jax_compilation_cache_dir == before


@pytest.mark.quick
def test_a_part_is_measured_by_what_names_its_rows():
    settings = [dict(case=case, n=n) for case in ("causal", "fire") for n in (64, 128)]
    entered = []

    def contenders(setting):
        return {name: lambda name=name: entered.append((*setting.values(), name)) or 1 / 0 for name in ("tiled", "xla")}

    def measured(text):
        entered.clear()
        list(speed.measure(settings, contenders, 1, part.read(text, attention_speed.SHEET.names, settings)))
        return entered

    assert measured("case=fire;n=128;contender=tiled") == [("fire", 128, "tiled")]
    assert len(measured("n=64")) == 4 and len(measured("contender=xla,tiled")) == 8
    with pytest.raises(UserError, match="unknown case 'fir'; choose from causal, fire; closest: fire"):
        measured("case=fir")
    with pytest.raises(UserError, match="unknown n 100; choose from 64, 128; closest: 128"):
        measured("n=100")
    with pytest.raises(UserError, match="write KEY=VALUE,VALUE, for example case=fire"):
        measured("fire")


@pytest.mark.quick
def test_a_part_takes_its_place_among_the_rows_of_before(tmp_path):
    file, names, here = tmp_path / "rows.jsonl", ("case", "n"), {"bench": "attention", "device": "cpu"}
    assert part.rows_before(file, here) == []
    before = [here | {"case": case, "n": n, "ms": 1} for case in ("causal", "fire") for n in (64, 128)]
    file.write_text("".join(json.dumps(row) + "\n" for row in before))
    rows = part.rows_before(file, here)
    part.put(rows, before[2] | {"ms": 2}, names)
    part.put(rows, before[2] | {"n": 256}, names)
    assert rows == [*before[:2], before[2] | {"ms": 2}, before[3], before[2] | {"n": 256}]
    with pytest.raises(UserError, match="has rows of device cpu, and these are of bench attention, device H200; "):
        part.rows_before(file, here | {"device": "H200"})


@pytest.mark.quick
@pytest.mark.parametrize("bench", [attention_speed, scan_speed, state_speed], ids=lambda bench: bench.__name__)
def test_kernels_say_how_long_they_compile_where_that_was_measured(bench):
    row = dict.fromkeys([*bench.SHEET.names, *bench.SHEET.figures], 2.5)
    peer = {key: value for key, value in row.items() if key not in speed.COMPILING}
    lines = bench.SHEET.table([row, peer]).splitlines()
    assert lines[0].endswith("| temporary MiB | s to compile | s from the cache |")
    assert lines[2].endswith("| 2 | 2.5 | 2.5 |") and lines[3].endswith("| 2 |  |  |")


@pytest.mark.scale
def test_steps_are_measured_and_make_a_table(monkeypatch):
    small = "configs/step_speed.py:size=64,rows=8,length=16"
    monkeypatch.setattr(step_speed, "CASES", {"cpu": [("attention", small, ("looped", "unrolled"))]})
    monkeypatch.setattr(step_speed.torch_step, "contenders", lambda *_: {"peer": lambda: 1 / 0})
    rows = list(step_speed.measure(rounds=1))
    assert [row["contender"] for row in rows] == ["longview looped", "longview unrolled", "peer"]
    for row in rows[:2]:
        assert row["tokens_per_s"] == pytest.approx(128 / (row["step_ms"] / 1e3))
        assert 0 < row["compile_again_s"] < row["compile_s"] and row["memory_gib"] > 0
    assert rows[0]["params"] == rows[1]["params"] and "ZeroDivisionError" in rows[2]["error"]
    lines = step_speed.SHEET.table(rows).splitlines()
    assert len(lines) == 5 and lines[-1].endswith("| peer | failed | failed | failed | failed | failed |")


@pytest.mark.scale
def test_kernels_are_those_of_every_contest():
    """In a process of its own: one may define the flags of one command."""
    state = dict(batch=1, length=8, contender="plain", forward_ms=1.0, gradient_ms=2.0, temp_mib=3.0)
    rows = [dict(bench="scan", **state | dict(case="mamba", contender="longview fused")), dict(bench="state", **state)]
    code = f"from experiments import bench; print(bench.kernels_table({rows!r}))"
    table = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "| mamba | 1 | 8 | longview fused |" in table and "| 1 | 8 | plain |" in table


@pytest.mark.quick
def test_a_figure_that_is_not_known_is_left_out():
    sheet = Sheet({"case": "case"}, {"ms": ("ms", ".1f"), "rate": ("steps/s", ".0f")})
    row = dict(case="a", ms=1.25, rate=None)
    assert sheet.sentence(row) == "a: 1.2 ms" and sheet.table([row]).splitlines()[-1] == "| a | 1.2 |  |"


@pytest.mark.quick
def test_any_text_is_one_cell_of_a_table():
    sheet = Sheet({"case": "case"}, {"ms": ("ms", ".1f")})
    assert sheet.table([dict(case="a|b\nc", ms=1.25)]).splitlines() == [
        "| case | ms |",
        "|---|---|",
        "| a\\|b c | 1.2 |",
    ]
