"""`bench profile`: every operation of a step counts once, in the module and the pass that it is of."""

import json

import pytest

from experiments.measurements import step_profile
from experiments.measurements.step_profile import Place, Spent, place, places, rows
from tests.processes import fork

MODULES = {"stack": {"encoder", "decoder"}, "layers": {"stack"}, "block_0": {"layers"}, "mixer": {"block_0"}}
MODULES |= {"q": {"mixer"}, "head": {""}, "encoder": {""}, "decoder": {""}}
LAYER = "stack/while/body/closed_call/layers/block_0/block_0.added"
BLOCK = "stack/layers/block_0"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"jit(step)/jvp(Model)/encoder/{LAYER}/mixer/q/ab,bc->ac/dot_general", f"encoder/{BLOCK}/mixer/q"),
        (f"jit(step)/jvp(Model)/decoder/{LAYER}/mixer/scan[fused]/mul", f"decoder/{BLOCK}/mixer/scan[fused]"),
        ("jit(step)/layers/block_0/block_0.added/mixer/cos", f"{BLOCK}/mixer"),  # moved out of the loop
        ("jit(step)/jvp(Model)/head/jit(take_along_axis)/gather", "head"),
        ("jit(step)/jvp()/reduce_sum", "none"),
    ],
)
def test_an_operation_is_of_the_modules_it_was_called_in(name, expected):
    assert place(name, MODULES) == Place(expected, "forward")
    assert place(name.replace("jvp(Model)", "transpose(jvp(Model))"), MODULES).module == expected


@pytest.mark.quick
def test_an_operation_is_of_one_pass():
    again = f"jit(step)/transpose(jvp(Model))/encoder/{LAYER}/mixer/layers/block_0/block_0.added/checkpoint"
    assert place(f"{again}/mixer/q/mul", MODULES) == Place(f"encoder/{BLOCK}/mixer/q", "backward")
    assert place(f"{again}/rematted_computation/mixer/q/mul", MODULES).phase == "recomputed"
    assert place("jit(step)/jit(clip)/mul", MODULES) == Place("none", "update")
    assert place("", MODULES) == Place("none", "by the compiler")


PROGRAM = """HloModule jit_step

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} add(%p, %p), metadata={op_name="jit(step)/jvp(Model)/head/add"}
  ROOT %b = f32[4]{0} bitcast(%a)
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%t), index=1
  %fusion.1 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %r = (s32[], f32[4]{0}) tuple(%i, %fusion.1)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4]{0}) tuple(%zero, %x.1)
  %while.1 = (s32[], f32[4]{0}) while(%start), condition=%cond, body=%body
  ROOT %out = f32[4]{0} get-tuple-element(%while.1), index=1
}
"""


@pytest.mark.quick
def test_a_loop_counts_by_what_is_in_it_and_a_fusion_by_what_was_fused():
    found = places(PROGRAM, MODULES, {"while.1", "fusion.1"})
    assert "while.1" not in found and found["fusion.1"] == Place("head", "forward")
    assert "while.1" in places(PROGRAM, MODULES, {"while.1"}), "where nothing in it is traced"
    traced = [Spent("while.1", "while.1", 9e6), Spent("fusion.1", "kernel", 5e6), Spent("other", "other", 1e6)]
    whole, one = rows(traced, found)
    assert (whole["ms"], whole["launches"]) == (one["ms"], one["launches"]) == (1.0, 1 / step_profile.STEPS)
    assert (one["module"], one["pass"], one["share"], one["kernels_ms"]) == ("head", "forward", 1.0, {"kernel": 1.0})
    assert rows([], found) == []


def test_bench_tells_the_modules_of_a_real_step(tmp_path):
    out = tmp_path / "rows.jsonl"
    asked = ("--config=configs/debug.py", "--config.model.kept=nothing", f"--out={out}")
    process = fork("experiments.bench", "profile", *asked)
    assert process.wait(300) == 0, process.stderr
    whole, *found = map(json.loads, out.read_text().splitlines())
    assert process.stdout.count("ms a step") == len(found) + 1
    assert whole["ms"] == pytest.approx(sum(row["ms"] for row in found)) and whole["step_ms"] > 0
    attention = {row["pass"]: row for row in found if row["module"].endswith("block_0/mixer/attention[xla]")}
    assert {"forward", "recomputed", "backward"} <= attention.keys()
    assert {"head", "input/embed", "backbone/stack"} <= {row["module"] for row in found}
    assert (tmp_path / "rows.md").read_text().count("\n") == len(found) + 3
