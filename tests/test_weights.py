"""Safetensors: what is written is read back, and what is damaged, unknown or a pickle is refused in one line."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from eval.attention import attention
from eval.export import exported, find
from eval.imported import Prompts, imported
from eval.restore import Restored, restore
from model.asked import Asked
from model.errors import UserError
from model.paths import by_path
from model.weights import FAMILIES
from model.weights.folder import open_weights
from model.weights.names import ABOVE_ONE, DEPTHWISE, TRANSPOSED, into_heads, out_of_heads, place_of, shaped, split
from model.weights.safetensors import DTYPES, INDEX, Made, read_folder, read_header, write_folder
from tests.test_train import load
from train.loop import train
from train.run import at_length, prepare
from train.workdir import read_json

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def made(**arrays: np.ndarray) -> list[Made]:
    return [Made(name, x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()]


def written(folder, shard: int = 10**9, **arrays: np.ndarray):
    write_folder(folder, made(**arrays), {"model_type": "llama"}, shard)
    return folder


@pytest.mark.quick
def test_every_dtype_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {code: (100 * rng.random((3, 5))).astype(dtype) for code, dtype in DTYPES.items()}
    arrays |= {"empty": np.zeros((0, 4), np.float32), "scalar": np.float32(7).reshape(())}
    found = read_folder(written(tmp_path / "out", **arrays))
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        back = found[name].read()
        assert back.dtype == x.dtype and back.shape == x.shape
        np.testing.assert_array_equal(back, x)


@pytest.mark.quick
def test_shards_hold_no_more_than_they_may(tmp_path):
    arrays = {f"t{i}": np.full(100 + i, i, np.float32) for i in range(6)}
    folder = written(tmp_path / "out", shard=1000, **arrays)
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(sum(x.begin > 0 for x in read_header(file).values()) == 2 for file in files)
    for name, stored in read_folder(folder).items():
        np.testing.assert_array_equal(stored.read(), arrays[name])
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in arrays.values())


@pytest.mark.quick
def test_a_write_that_fails_leaves_nothing(tmp_path):
    def fails():
        raise OSError(28, "No space left on device")

    arrays = [*made(a=np.ones(3, np.float32)), Made("b", (3,), np.dtype("<f4"), fails)]
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        write_folder(tmp_path / "out", arrays, {})
    assert not list(tmp_path.iterdir())
    written(tmp_path / "out", a=np.ones(3, np.float32))
    with pytest.raises(UserError, match="is there already, and not empty"):
        written(tmp_path / "out", a=np.ones(3, np.float32))


def header(file, change) -> None:
    """Writes a file again with another header."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = change(json.loads(raw[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


LIES = {
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has .* bytes, and by its header"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "has .* bytes, and by its header"),
    "nothing": (lambda file: file.write_bytes(b""), "too few for its header"),
    "no header": (lambda file: file.write_bytes(b"\xff" * 100), "too few for its header, or it is no safetensors"),
    "no JSON": (lambda file: header(file, lambda h: b"{]"), "its header is not JSON"),
    "deep": (lambda file: header(file, lambda h: b"[" * 99_999), "its header is not JSON"),
    "a list": (lambda file: header(file, lambda h: [1]), "not an object"),
    "shape": (lambda file: header(file, lambda h: h | {"a": h["a"] | {"shape": [4]}}), r"a is F32 \[4\], and has"),
    "negative": (lambda file: header(file, lambda h: h | {"a": h["a"] | {"shape": [-3]}}), "what its header says of a"),
    "offsets": (lambda file: header(file, lambda h: h | {"b": h["a"]}), "b begins at byte 0 of the data, where 12"),
    "beyond": (lambda file: header(file, lambda h: {"a": h["a"] | {"data_offsets": [12, 24]}}), "where 0 was due"),
    "dtype": (
        lambda file: header(file, lambda h: h | {"a": h["a"] | {"dtype": "F8_E4M3"}}),
        "in F8_E4M3; allowed: F64",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(tmp_path, lie):
    folder = written(tmp_path / "out", a=np.ones(3, np.float32), b=np.ones(2, np.float32))
    damage, words = LIES[lie]
    damage(folder / "model.safetensors")
    with pytest.raises(UserError, match=words) as error:
        open_weights(folder)
    assert "\n" not in str(error.value)


@pytest.mark.quick
def test_no_pickle_is_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"has pytorch_model\.bin, a pickle, which may run code"):
        open_weights(tmp_path)


@pytest.mark.quick
def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    folder = written(tmp_path / "out", shard=12, a=np.ones(3, np.float32), b=np.ones(2, np.float32))
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "aside")
    with pytest.raises(UserError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        open_weights(folder)
    (tmp_path / "aside").rename(folder / "model-00002-of-00002.safetensors")
    index = json.loads((folder / INDEX).read_text())
    for places, words in [
        ({"a": "../a"}, "no file of this folder"),
        ({"c": "model-00001-of-00002.safetensors"}, "lacks"),
    ]:
        (folder / INDEX).write_text(json.dumps(index | {"weight_map": places}))
        with pytest.raises(UserError, match=words):
            open_weights(folder)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}


@pytest.mark.quick
@pytest.mark.parametrize(
    "config,words",
    [
        ({}, "has no model_type; choose from bert, "),
        ({"model_type": "lama"}, "unknown model_type 'lama'; .*; closest: llama"),
        ({"model_type": "llama"}, "lacks 'hidden_size'"),
        ({"model_type": "llama", "hidden_size": None}, "hidden_size is None in .*; allowed: a whole number"),
        ({"model_type": "llama", "hidden_act": "relu"}, "has hidden_act 'relu'; allowed: 'silu'"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64' in .*config.json; allowed: a whole number from 1"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0 in .*; allowed: .*; closest: 1"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear' in .*; allowed: an object, or None"),
        (LLAMA | {"rope_parameters": {"rope_type": 3}}, "has rope_type '3'; allowed: default, "),
        (LLAMA | {"model_type": "gemma3_text", "layer_types": ["a", "b"]}, "unknown layer type 'a'; choose from "),
        (LLAMA | {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": 3}}, "allowed: an object"),
        (LLAMA | {"model_type": "vit", "patch_size": 0}, "patch_size is 0 in .*; closest: 1"),
    ],
)
def test_a_config_that_means_nothing_here_is_refused(tmp_path, config, words):
    folder = written(tmp_path / "out", a=np.ones(3, np.float32))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        open_weights(folder)


@pytest.mark.quick
def test_a_mamba2_that_clips_its_time_steps_is_refused():
    config = {"model_type": "mamba2", "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    config |= {"num_heads": 2, "head_dim": 8}
    for limit in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        FAMILIES["mamba2"].settings(config | {"time_step_limit": limit})
    for limit in ([0.01, float("inf")], [0.0, 0.1]):
        with pytest.raises(UserError, match=r"has time_step_limit .*; allowed: from 0 to infinity"):
            FAMILIES["mamba2"].settings(config | {"time_step_limit": limit})


FORMS = {
    "transposed": (TRANSPOSED, [(6, 4)], [(4, 6)]),
    "into heads": (into_heads(3), [(6, 4)], [(4, 3, 2)]),
    "a bias of heads": (into_heads(3), [(6,)], [(3, 2)]),
    "out of heads": (out_of_heads(3), [(4, 6)], [(3, 2, 4)]),
    "depthwise": (DEPTHWISE, [(6, 1, 4)], [(4, 6)]),
    "split": (split(2, 3, 1) >> TRANSPOSED, [(6, 4)], [(4, 2), (4, 3), (4, 1)]),
    "shaped": (shaped((6,), (1, 6)), [(6,)], [(1, 6)]),
    "above one": (ABOVE_ONE, [(6,)], [(6,)]),
}


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_form_goes_both_ways(form):
    form, theirs, ours = FORMS[form]
    given = tuple(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in theirs)
    taken = form.take(given)
    assert [x.shape for x in taken] == ours
    for a, b in zip(form.give(taken), given, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick
def test_layers_lie_where_a_stack_has_them():
    found = [place_of("layer/x", n, layers=7, cycle=3) for n in range(7)]
    assert found == [
        *((f"stack/layers/block_{kind}/x", repeat) for repeat in range(2) for kind in range(3)),
        ("stack/rest/block_0/x", None),
    ]


SMALL = [("steps", "1"), ("eval_batches", "1"), ("model.layers", "3")]
RUNS = {
    "llama": [("model.position", "rope"), ("model.attention.n_kv_heads", "2"), ("model.tied", "False")],
    "mamba": [("model.mixers", "mamba"), ("model.mlp", "none"), ("model.position", "none")],
    "mamba2": [("model.mixers", "mamba2"), ("model.mlp", "none"), ("model.position", "none")],
}


@pytest.mark.scale
@pytest.mark.parametrize("family", RUNS)
def test_a_run_is_exported_and_read_back(family, tmp_path, capsys):
    train(load(*SMALL, *RUNS[family]), str(tmp_path / "run"))
    ours = restore(str(tmp_path / "run"), "latest")
    exported(ours, out=str(tmp_path / "out"), family="")
    assert f"a {family}; transformers." in capsys.readouterr().out
    back = imported(str(tmp_path / "out"))
    theirs = by_path(back.params)
    for path, value in by_path(ours.params).items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
        assert value.dtype == theirs[path].dtype


@pytest.mark.parametrize(
    "changes,words",
    [
        ([("model.position", "none")], "layer 0's position 'none'; allowed: 'rope'"),
        ([("model.position", "rope"), ("model.attention.window", "8")], "layer 0's window 8; allowed: None"),
        ([("model.position", "rope"), ("model.mlp", "gelu")], "layer 0's mlp 'gelu'; allowed: 'swiglu'"),
        ([("model.position", "learned")], "model.position 'learned'; allowed: 'none'"),
        ([("model.mixers", "attention,mamba"), ("model.position", "rope")], "layer 1's"),
    ],
)
def test_what_a_family_has_no_words_for_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        find(load(*SMALL, *changes).model.to_dict(), Asked(64))


@pytest.mark.parametrize("begun", [("model.embed_init", "0.5"), ("model.depth_init", "True")])
def test_how_a_model_began_needs_no_words(begun):
    assert find(load(*SMALL, *RUNS["llama"], begun).model.to_dict(), Asked(64)).model_type == "llama"


@pytest.mark.scale
def test_one_half_of_the_bits_are_read_as_they_are(tmp_path):
    """A model saved in bfloat16 has its numbers, exactly, in float32."""
    train(load(*SMALL, *RUNS["llama"]), str(tmp_path / "run"))
    exported(restore(str(tmp_path / "run"), "latest"), out=str(tmp_path / "out"), family="llama")
    halves = {name: x.read().astype(ml_dtypes.bfloat16) for name, x in read_folder(tmp_path / "out").items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    write_folder(tmp_path / "half", made(**halves), config, shard=2000)
    params = by_path(imported(str(tmp_path / "half")).params)
    np.testing.assert_array_equal(params["embed/embedding"], halves["model.embed_tokens.weight"].astype(np.float32))


def test_weights_without_a_task_have_no_lengths_to_be_asked_at():
    run = prepare(load(("model.width", "16")), Prompts(Asked(64)))
    with pytest.raises(UserError, match="test_lengths has 8: weights come without a task; name one"):
        at_length(run, 8)


def test_weights_without_a_task_are_looked_into_by_a_prompt(tmp_path):
    config = load(("model.width", "16"), ("model.layers", "1"))
    run = prepare(config, Prompts(Asked(64)))
    restored = Restored(tmp_path, config, run, 0, run.init().params)
    attention(restored, split="test", examples=1, prompt="1 2 3 1 2")
    (report,) = map(read_json, (tmp_path / "eval").glob("attention-prompt-*.json"))
    assert (report["prompt"], report["data_fingerprint"]) == ("1 2 3 1 2", None)
    with pytest.raises(UserError, match=r"weights come without a task; .*, or give a --prompt"):
        attention(restored, split="train", examples=1, prompt="")


def test_weights_are_read_without_torch():
    check = (
        "import sys, eval.__main__, train.loop; assert not {'torch', 'transformers', 'safetensors'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
