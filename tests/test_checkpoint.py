"""A checkpoint is bit for bit what was saved or it is not used, whatever befalls the process or the disk."""

import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from model.errors import UserError
from tests.flags import FAST
from train import checkpoint, manifest
from train.checkpoint import Checkpoints
from train.manifest import MANIFEST

ROOT = Path(__file__).parent.parent


def make_state(step: int):
    """Small, and different in every bit pattern from step to step."""
    w = jax.random.normal(jax.random.key(step), (16, 8))
    return {"params": {"w": w, "b": w[0].astype(jnp.bfloat16)}, "step": jnp.int32(step)}


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


def bits(x) -> bytes:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y))


def save_all(directory, steps, keep=10, **scores):
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), score=scores.get(f"s{step}"))


@pytest.mark.quick
def test_round_trip_is_bit_exact(tmp_path):
    special = jnp.array([0x7FC00001, 0xFF800000, 0x80000000, 1], jnp.uint32)  # NaN with payload, -inf, -0, denormal
    params = {"w": jnp.ones((3, 5)), "odd/na.me": {"a b": jnp.arange(3)}, "none": None, "nothing": {}}
    state = {
        "params": params,
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        "f32": jax.lax.bitcast_convert_type(special, jnp.float32),
        "bf16": jnp.linspace(-3, 3, 11, dtype=jnp.bfloat16),
        "i32": jnp.int32(-7),
        "u32": jnp.uint32(2**32 - 1),
        "bool": jnp.array([True, False]),
        "c64": jnp.array([1 - 2j], jnp.complex64),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 4), jnp.float16),
        "list": [jnp.float32(1.5), (jnp.int8(3), None)],
    }
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(5, state, score=jnp.float32(0.5), extra=(extra := {"fingerprint": "abc"}))
        extra.clear()
        step, restored = checkpoints.restore(abstract(state))
        assert step == 5
        assert_same(restored, state)
    noted = manifest.read_manifest(manifest.step_folder(tmp_path / "c", 5))
    assert (noted["step"], noted["score"], noted["extra"]) == (5, 0.5, {"fingerprint": "abc"})


def test_keeps_the_newest_and_the_best(tmp_path):
    scores = {1: float("nan"), 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2, 7: 0.3}
    best, kept = [], []
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, make_state(step), score=score)
            checkpoints.wait()
            best.append(checkpoints.best_step())
            kept.append(checkpoints.steps())
    assert best == [None, 2, 2, 4, 4, 4, 4]
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [4, 5, 6], [4, 6, 7]]
    like = abstract(make_state(0))
    assert_same(checkpoint.load(tmp_path, like, 4), make_state(4))
    with pytest.raises(UserError, match=r"no checkpoint of step 5 .*there: \[4, 6, 7\]"):
        checkpoint.load(tmp_path, like, 5)
    with pytest.raises(UserError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_the_last_good_step_stands_until_the_next_is_committed(tmp_path, monkeypatch):
    seen = []
    seal = manifest.seal

    def watched(folder, record):
        seen.append(checkpoint.steps(tmp_path))
        seal(folder, record)

    monkeypatch.setattr(manifest, "seal", watched)
    save_all(tmp_path, [1, 2, 3], keep=1)
    assert seen == [[], [1], [2]]
    assert checkpoint.steps(tmp_path) == [3]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << (len(data) % 8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.few(3)
@pytest.mark.parametrize("harm", [flip, truncate, append, Path.unlink], ids=lambda f: f.__name__)
def test_any_harmed_file_is_named_and_the_step_before_taken(tmp_path, harm):
    save_all(tmp_path / "whole", [1, 2])
    names = [p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole/00000002").rglob("*") if p.is_file()]
    assert len(names) > 16 and any(n.name == MANIFEST for n in names)
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", directory)
        harm(directory / name)
        with Checkpoints(directory, keep=2) as checkpoints:
            step, restored = checkpoints.restore(abstract(make_state(0)))
            assert step == 1, name
            assert_same(restored, make_state(1))
            assert len(checkpoints.reports) == 1 and name.name in checkpoints.reports[0]
            label = "unsigned" if name.name == MANIFEST and harm is Path.unlink else "damaged"
            assert (directory / f"00000002.{label}").exists()  # nothing is lost
            if number % 5:
                continue
            # The run goes on and reaches the harmed step again.
            checkpoints.save(2, make_state(2))
        assert checkpoint.steps(directory) == [1, 2]
        assert manifest.damage(directory / "00000002") is None


@pytest.mark.quick
def test_every_bit_of_the_manifest_counts(tmp_path):
    save_all(tmp_path, [1])
    folder = tmp_path / "00000001"
    whole = (folder / MANIFEST).read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 500):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(data)
        with pytest.raises(manifest.DamagedManifest):
            manifest.read_manifest(folder)


def test_strange_files_and_repeated_damage(tmp_path, caplog):
    save_all(tmp_path, [1, 2])
    (tmp_path / "00000002.damaged").mkdir()
    (tmp_path / "00000002/rest/d/stray").write_text("garbage")
    (tmp_path / "notes.txt").write_text("not a step")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0)))[0] == 1
    assert "rest/d/stray does not belong there" in checkpoints.reports[0]
    assert "rest/d/stray does not belong there" in caplog.text
    assert (tmp_path / "00000002.damaged1/rest/d/stray").exists()


def test_nothing_but_damage_is_an_error_that_stays(tmp_path):
    save_all(tmp_path, [1, 2])
    truncate(tmp_path / "00000001/rest/_METADATA")
    flip(tmp_path / "00000002" / MANIFEST)
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path, keep=2)
        with pytest.raises(
            UserError,
            match=f"every .* damaged .00000002: {MANIFEST}.*00000001: rest/_METADATA",
        ):
            checkpoints.restore(abstract(make_state(0)))
        checkpoints.close()
    with pytest.raises(UserError, match=r"00000001 is damaged: rest/_METADATA has \d+ bytes"):
        checkpoint.load(tmp_path, abstract(make_state(0)), 1)


@pytest.mark.quick
def test_a_state_that_does_not_fit_is_named(tmp_path):
    save_all(tmp_path, [1])
    state = make_state(1)
    wrong = {
        r"params/w is float32\[16,8\] there, float32\[16,9\] in this run": {"w": jnp.zeros((16, 9))},
        r"params/b is bfloat16\[8\] there, float32\[8\] in this run": {"b": jnp.zeros(8)},
        r"params/c is absent there, float32\[1\] in this run": {"c": jnp.zeros(1)},
        r"params/b is bfloat16\[8\] there, absent in this run": {"b": None},
    }
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for message, change in wrong.items():
            with pytest.raises(UserError, match=message) as caught:
                checkpoints.restore(abstract(state | {"params": state["params"] | change}))
            assert "\n" not in str(caught.value)


def test_the_state_may_be_donated_right_after_save(tmp_path):
    step_fn = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    copy = jax.jit(lambda s: jax.tree.map(lambda x: x + 0, s))
    original = {
        "w": [jax.random.normal(jax.random.key(i), (256, 1024)) for i in range(4)],
        "step": jnp.int32(1),
    }
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        for step in range(5):
            state = jax.block_until_ready(copy(original))
            checkpoints.save(step, state)
            for _ in range(3):
                state = step_fn(state)
            assert_same(checkpoints.restore(abstract(original))[1], original)
            # And what was restored is the caller's own, to be donated in turn.
            _, restored = checkpoints.restore(abstract(original))
            step_fn(restored)
            assert_same(checkpoints.restore(abstract(original))[1], original)


def test_restores_onto_another_mesh(tmp_path):
    def sharding(shape, spec):
        devices = jax.devices()[: int(np.prod(shape))]
        mesh = jax.make_mesh(shape, ("data", "model"), devices=devices, axis_types=(AxisType.Auto,) * 2)
        return NamedSharding(mesh, spec)

    def place(shape, spec):
        return {"w": sharding(shape, spec), "v": sharding(shape, P("model")), "step": sharding(shape, P())}

    state = {"w": jax.random.normal(jax.random.key(0), (16, 8)), "v": jnp.arange(8.0), "step": jnp.int32(3)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, jax.device_put(state, place((2, 2), P("data", "model"))))
        for shape, spec in [((4, 1), P("data")), ((1, 4), P("model", "data")), ((2, 1), P()), ((1, 1), P())]:
            target = place(shape, spec)
            like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, target)
            _, restored = checkpoints.restore(like)
            assert_same(restored, state)
            assert jax.tree.map(lambda x: x.sharding, restored) == target
        assert_same(checkpoints.restore(jax.eval_shape(lambda: state))[1], state)  # no sharding: one device


def test_a_failed_background_save_is_not_lost(tmp_path):
    big = {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}  # 4 MB
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_without_room(checkpoints, step):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # acts like a full disk
        try:
            checkpoints.save(step, big)
            checkpoints._thread.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, big)
    for report in (
        checkpoints.check,  # asked at every step
        checkpoints.wait,
        lambda: checkpoints.save(3, big),
        lambda: checkpoints.restore(abstract(big)),
    ):
        checkpoints.wait()
        save_without_room(checkpoints, 2)
        with pytest.raises(UserError, match=r"00000002 could not be written: .*File too large$"):
            report()
        assert os.listdir(tmp_path) == ["00000001"]  # no rubble on a full disk
    checkpoints.save(2, big)  # once there is room it works again
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    save_without_room(checkpoints, 3)
    with pytest.raises(UserError, match="00000003 could not be written"):
        checkpoints.close()


def test_a_failed_save_does_not_hide_the_error_on_its_way(tmp_path, monkeypatch, caplog):
    def fail(folder, host, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "sign", fail)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, make_state(1))
        raise ZeroDivisionError
    assert "00000001 could not be written: No space left on device" in caplog.text
    with (
        pytest.raises(UserError, match="No space left on device"),
        Checkpoints(tmp_path, keep=2) as checkpoints,
    ):
        checkpoints.save(1, make_state(1))
    assert checkpoint.steps(tmp_path) == []


def test_saving_a_committed_step_again_changes_nothing(tmp_path):
    save_all(tmp_path, [1])
    before = (tmp_path / "00000001" / MANIFEST).read_bytes()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, make_state(2))
    assert (tmp_path / "00000001" / MANIFEST).read_bytes() == before


def test_a_kill_between_any_two_writes_of_a_commit_loses_no_signed_step(tmp_path, monkeypatch):
    moments = []

    def watched(call):
        def first_look(*args, **kwargs):
            moments.append(tmp_path / f"moment{len(moments)}")
            shutil.copytree(tmp_path / "run", moments[-1])
            return call(*args, **kwargs)

        return first_look

    with monkeypatch.context() as patch, Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for name in ("fsync", "replace", "rename"):
            patch.setattr(os, name, watched(getattr(os, name)))
        checkpoints.save(1, make_state(1))
        checkpoints.wait()
    signed = [moment for moment in moments if any(map(manifest.record_of, moment.iterdir()))]
    assert 0 < len(signed) < len(moments)
    assert any(list(moment.glob("*/manifest.json.tmp")) for moment in signed)  # torn in the middle of the last write
    for moment in moments:
        with Checkpoints(moment, keep=2) as checkpoints:
            found = checkpoints.restore(abstract(make_state(0)))
            assert (found is not None) == (moment in signed), moment
            if found is not None:
                assert_same(found[1], make_state(1))


def start(code: str, *args: object, **env: str) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(50, child.kill)  # a hang becomes a failure
    deadline.daemon = True
    deadline.start()
    return child


def said(child: subprocess.Popen, word: str) -> int:
    """The number a child prints after a word; libraries may print lines of their own before."""
    return next((int(line.split()[1]) for line in child.stdout if line.startswith(word)), -1)


SAVE_FOREVER = """
import sys
from tests.test_checkpoint import abstract, assert_same, make_state
from train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
found = checkpoints.restore(abstract(make_state(0)))
step = 0
if found is not None:
    step, state = found
    assert_same(state, make_state(step))
print("resumed", step, flush=True)
while True:
    step += 1
    checkpoints.save(step, make_state(step), score=step % 7)
"""


@pytest.mark.scale
def test_kill_at_any_moment_leaves_the_newest_committed_step_whole(tmp_path):
    rng = random.Random(0)
    newest, rubble, kills = 0, 0, 0
    # Six kills, and on a slow machine as many more as it takes for one to hit a save.
    while kills < 6 or (kills < 30 and not (newest > 3 and rubble)):
        kills += 1
        # Compiled as here: other optimisations make other bits.
        child = start(SAVE_FOREVER, tmp_path, XLA_FLAGS=FAST)
        try:
            assert said(child, "resumed") == newest
            time.sleep(rng.uniform(0.05, 0.6))
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        committed = checkpoint.steps(tmp_path)
        unfinished = list(tmp_path.glob(f"*{checkpoint.UNFINISHED}"))
        rubble += bool(unfinished)
        signed = [int(path.name[:8]) for path in unfinished if manifest.record_of(path)]
        assert max([*committed, *signed], default=0) >= newest
        newest = max([*committed, *signed], default=0)
        for step in committed:
            assert_same(checkpoint.load(tmp_path, abstract(make_state(0)), step), make_state(step))
    assert newest > 3
    assert rubble > 0  # else no kill hit a save and nothing was shown
