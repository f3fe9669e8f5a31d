"""An encoder and a decoder of any mixers: who sees whom, pieces and padding, what a state holds, what is refused."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from eval.accuracy import accuracy
from eval.attention import attention
from eval.continuation import continuation
from eval.generate import decode, generate
from eval.restore import restore
from eval.sample import Sampling
from model import build, entries
from model.asked import Asked
from model.errors import UserError
from model.groups import group_rules
from model.mixers import MIXERS
from tests import zoo
from tests.draws import HASH
from train import config as configs
from train import optim
from train.loop import train
from train.run import prepare

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, S, T = 11, 6, 5
ASKED = Asked(V, source=S)
KEY = jax.random.key(0, impl=HASH)
RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(0, V, (3, S)).astype(np.int32), RNG.integers(0, V, (3, T)).astype(np.int32)
# Sources of 6, 4 and 1 tokens.
READ = (np.arange(S) < np.array([[6], [4], [1]])).astype(np.int32)

# Decoders and encoders; layers that do not fill a cycle stand outside the scan.
SHAPES = {
    "attention": dict(mixers=("attention",), position="rope"),
    "mamba": dict(mixers=("mamba",), encoder_mixers=("attention",), encoder_layers=1, mlp="none"),
    "gru": dict(mixers=("gru",), layers=1),
    "mixed": dict(mixers=("attention", "mamba"), encoder_mixers=("s4d", "attention"), layers=3, position="t5"),
    "shared bias": dict(mixers=("attention",), position="t5", t5=dict(shared=True), encoder_layers=1),
    "post-norm": dict(mixers=("attention",), position="sinusoidal", norm_order="post", final_norm=False, scan=False),
}


def config(**changes) -> dict:
    c = base.get_config().model.to_dict() | dict(kind="encoder_decoder", width=16)
    own = {key: value for key, value in changes.items() if isinstance(value, dict)}
    c |= {key: value for key, value in changes.items() if key not in own}
    c |= entries.sections(c["mixers"], c["position"], c | own)
    return c | {name: c[name] | settings for name, settings in own.items()}


@cache
def made(shape: str):
    """A model, its parameters away from where they begin, and it compiled."""
    model = build.build(config(**SHAPES[shape]), ASKED)
    variables = nn.unbox(jax.jit(model.init)(KEY, TARGET, source=SOURCE))
    noise = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * noise.normal(size=x.shape), x.dtype), variables)
    return model, moved, jax.jit(model.apply, static_argnames=("train", "right_padded"))


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_in_pieces_is_the_target_whole(shape):
    """Behind sources of different lengths: one call, and a first one with the source and then single tokens."""
    model, variables, run = made(shape)
    whole, none = run(variables, TARGET, source=SOURCE, source_segments=READ)
    assert none is None and whole.shape == (3, T, V)
    state, pieces = model.init_state(3, T), []
    given = dict(source=SOURCE, source_segments=READ)
    for begin, end in ((0, 2), (2, 3), (3, 4), (4, 5)):
        logits, state = run(variables, TARGET[:, begin:end], state=state, **given)
        pieces.append(logits)
        given = {}
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", ["attention", "mixed"])
def test_targets_of_different_lengths_go_on_behind_their_padding(shape):
    model, variables, run = made(shape)
    whole, _ = run(variables, TARGET, source=SOURCE, source_segments=READ)
    given = np.array([3, 1, 2])
    segments = (np.arange(3) < given[:, None]).astype(np.int32)
    first, state = run(variables, TARGET[:, :3], segments, model.init_state(3, 6), None, SOURCE, READ)
    after = np.take_along_axis(TARGET, given[:, None], axis=1)
    then, _ = run(variables, after, state=state)
    for row, n in enumerate(given):
        np.testing.assert_allclose(first[row, :n], whole[row, :n], atol=2e-5)
        np.testing.assert_allclose(then[row, 0], whole[row, n], atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_of_the_source_changes_nothing(shape):
    _, variables, run = made(shape)
    padded, _ = run(variables, TARGET, source=SOURCE, source_segments=READ)
    alone, _ = run(variables, TARGET[1:2], source=SOURCE[1:2, :4])
    np.testing.assert_allclose(padded[1:2], alone, atol=2e-5)
    told, _ = run(variables, TARGET, source=SOURCE, source_segments=READ, right_padded=True)
    np.testing.assert_allclose(told, padded, atol=2e-5)
    assert np.abs(run(variables, TARGET, source=SOURCE)[0][1:2] - alone).max() > 1e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_who_sees_whom(shape):
    """Logits know all of the source, and of the target what has been read; the source is read bidirectionally."""
    _, variables, run = made(shape)
    whole, _ = run(variables, TARGET, source=SOURCE)
    for column in range(S):
        other = SOURCE.copy()
        other[:, column] = (other[:, column] + 1) % V
        assert (np.abs(run(variables, TARGET, source=other)[0] - whole).max(-1) > 1e-7).all()
    for column in range(T):
        other = TARGET.copy()
        other[:, column] = (other[:, column] + 1) % V
        changed = np.abs(run(variables, other, source=SOURCE)[0] - whole).max((0, 2)) > 1e-7
        np.testing.assert_array_equal(changed, np.arange(T) >= column)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["attention", "gru", "s4d"])
def test_the_encoder_is_bidirectional(kind):
    """The vector of the first token knows the last one."""
    model = build.build(config(mixers=(kind,), layers=1), ASKED)
    encoder, _ = model.sides()
    x = zoo.inputs(1, S)
    variables = nn.unbox(jax.jit(encoder.init)(KEY, x))
    reach = jax.jit(jax.grad(lambda x: encoder.apply(variables, x)[0][0, 0].sum()))(x)
    assert (np.abs(reach).max((0, 2)) > 1e-9).all()


def test_generating_runs_the_encoder_once():
    """The program of a step has no use for its parameters, nor for those of the keys and values it made."""
    model, variables, _ = made("attention")
    _, state = jax.eval_shape(lambda: model.apply(variables, TARGET[:, :1], None, model.init_state(3, T), None, SOURCE))
    step = jax.make_jaxpr(lambda v, state: model.apply(v, TARGET[:, :1], state=state))(variables, state).jaxpr
    names = ["/".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
    read = {str(v) for eqn in step.eqns for v in eqn.invars}
    idle = [name for name, var in zip(names, step.invars, strict=False) if str(var) not in read]
    encoders = [name for name in names if "/encoder" in name]
    assert encoders and set(encoders) <= set(idle)
    for (block,) in state["decoder"]["stack"]["layers"]:
        carried = jax.tree.leaves(block["cross_attention"])
        assert sorted(leaf.shape for leaf in carried) == [(3, S), (3, S, 4, 4), (3, S, 4, 4)]


@pytest.mark.scale
def test_generated_tokens_are_those_that_teacher_forcing_finds_likeliest():
    model, variables, run = made("mixed")
    state = model.init_state(3, T)
    begin = TARGET[:, :1]
    logits, state = run(variables, begin, state=state, source=SOURCE, source_segments=READ)
    token = jnp.argmax(logits[:, 0], -1).astype(jnp.int32)
    greedy = Sampling(temperature=0)
    _, _, rest = decode(model, greedy, T - 1, variables["params"], state, token, jax.random.key(0), 1, T - 1)
    written = np.concatenate([begin, token[:, None], np.asarray(rest).T], axis=1)
    forced, _ = run(variables, written[:, :T], source=SOURCE, source_segments=READ)
    np.testing.assert_array_equal(jnp.argmax(forced, -1), written[:, 1:])


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_state_is_as_large_as_it_says(shape):
    model, variables, run = made(shape)
    _, state = jax.eval_shape(run, variables, TARGET[:1, :1], None, model.init_state(1, T), None, SOURCE[:1], READ[:1])
    state["decoder"].pop("reading")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert size == model.state_bytes(T)


@pytest.mark.scale
def test_rows_that_hold_both():
    """The source and behind it the target, asked at places of the row; nothing is said of the source."""
    _, variables, run = made("attention")
    both = build.build(config(**SHAPES["attention"]), Asked(V, tail=T))
    read = jax.jit(both.apply)
    whole, _ = run(variables, TARGET, source=SOURCE)
    rows = np.concatenate([SOURCE, TARGET], axis=1)
    np.testing.assert_allclose(read(variables, rows)[0], whole, atol=1e-5)
    at = np.tile([S + 2, S, S - 1], (3, 1))
    some, _ = read(variables, rows, at=at)
    np.testing.assert_allclose(some[:, :2], whole[:, [2, 0]], atol=1e-5)
    assert np.isnan(some[:, 2]).all()
    first, state = read(variables, rows[:, : S + 1], state=both.init_state(3, T))
    then, _ = read(variables, TARGET[:, 1:], state=state)
    np.testing.assert_allclose(np.concatenate([first, then], axis=1), whole, atol=2e-5)


@pytest.mark.scale
def test_layers_looped_or_unrolled_have_the_same_gradients():
    """Also those that reach the encoder, and a bias that all layers share, from inside the loop."""
    found = []
    for scan, kept in ((True, "all"), (False, "all"), (True, "nothing")):
        c = config(**SHAPES["shared bias"], scan=scan, kept=kept)
        model = build.build(c, ASKED)
        variables = nn.unbox(jax.jit(model.init)(KEY, TARGET, source=SOURCE))

        def loss(variables, model=model):
            return jnp.sum(jnp.sin(model.apply(variables, TARGET, source=SOURCE)[0]))

        found.append(jax.jit(jax.grad(loss))(variables))
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0], other)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[0]))


def test_one_table_of_biases_for_each_side():
    _, variables, _ = made("shared bias")
    paths = ["/".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_leaves_with_path(variables["params"])]
    assert [path for path in paths if "table" in path] == ["decoder/position/table", "encoder/position/table"]
    _, own, _ = made("mixed")
    tables = [x for x in jax.tree_util.tree_leaves_with_path(own["params"]) if "table" in str(x[0])]
    assert sum(leaf.size // (32 * 4) for _, leaf in tables) == 2 + 1  # a layer with attention each


@pytest.mark.scale
def test_every_parameter_is_in_its_group():
    c = config(**SHAPES["mixed"])
    params = nn.unbox(jax.eval_shape(build.build(c, ASKED).init, KEY, TARGET, source=SOURCE))["params"]
    groups = optim.groups(params, group_rules(c))
    layers = {side: groups[side]["stack"]["layers"] for side in ("encoder", "decoder")}
    assert groups["embed"]["embedding"] == "no_decay" and groups["encoder_norm"]["scale"] == "no_decay"
    assert layers["encoder"]["block_0"]["mixer"]["log_dt"] == layers["decoder"]["block_1"]["mixer"]["A_log"] == "ssm"
    assert layers["decoder"]["block_0"]["cross_attention"]["q"]["kernel"] == "decay"


@pytest.mark.few(12)
@pytest.mark.usefixtures("quick_draws")
@pytest.mark.parametrize("name", zoo.ALONE)
def test_mixers_that_run_one_way_only_say_so(name):
    refused = zoo.refused((name, {"causal": False}, "none"))
    assert (refused is not None) == MIXERS[name].forward_only
    c = config(mixers=("attention",), encoder_mixers=(name,))
    if MIXERS[name].forward_only:
        with pytest.raises(
            UserError, match=f"'{name}' runs forward only, and an encoder is bidirectional; .*closest: "
        ):
            build.build(c, ASKED)
    else:
        jax.eval_shape(build.build(c, ASKED).init, jax.random.key(0), TARGET, source=SOURCE)
    if MIXERS[name].both_ways_only:
        with pytest.raises(UserError, match=f"'{name}' mixes whole rows and cannot be causal; .*closest"):
            build.build(config(mixers=(name,), encoder_mixers=("attention",)), ASKED)


@pytest.mark.quick
def test_refusals():
    for changes, asked, words in (
        (dict(mixers=("mamba",)), ASKED, "'mamba' runs forward only, .* set model.encoder_mixers to some of attention"),
        (dict(position="xpos"), ASKED, "position 'xpos' is for causal layers, .* closest: rope"),
        (dict(mlp="channel_mix"), ASKED, "mlp 'channel_mix' looks back only, .* closest: swiglu"),
        (dict(causal=False), ASKED, "model.causal is False, and a decoder writes forward"),
        (dict(mixers=("cross_attention",)), ASKED, "'cross_attention' reads a memory, .* closest: attention"),
        ({}, Asked(V), "reads a source .* asks at every token; .* such as reverse, .* closest: arch=attention"),
        ({}, Asked(V, n_classes=3), "asks for one of 3 classes; .* closest: arch=attention"),
        (dict(kind="stack"), ASKED, "reads one sequence, and this task brings a source .* arch=transformer_base"),
        (dict(kind="stack", encoder_layers=2), Asked(V), "model.encoder_layers is 2, and model.kind 'stack' has no"),
        (dict(kind="stack", mixers=("cross_attention",)), Asked(V), "closest: attention, with model.kind=encoder_deco"),
        (dict(position="t5", t5=dict(shared=True), mixers=("attention", "mla"), mla=dict(n_heads=2)), ASKED, "n_heads"),
    ):
        with pytest.raises(UserError, match=words):
            build.build(config(**changes), asked)


def test_a_decoder_without_a_source():
    model, variables, _ = made("attention")
    with pytest.raises(UserError, match="nothing to look at; pass source="):
        model.apply(variables, TARGET)


# --- from a config ---


@pytest.fixture(scope="module")
def base_model():
    run = configs.load("configs/seq2seq.py:task=translate,arch=transformer_base,size=base")
    return run, build.build(run.model.to_dict(), Asked(37_000, source=48))


def test_the_base_model_has_as_many_parameters_as_its_formula(base_model):
    """An encoder layer has four maps of attention, a decoder layer eight, both an MLP with biases, and norms with two
    vectors each; one matrix embeds sources and targets and unembeds."""
    _, model = base_model
    d, f, vocabulary = 512, 2048, 37_000
    mlp, norm = d * f + f + f * d + d, 2 * d
    encoder, decoder = 4 * d * d + mlp + 2 * norm, 8 * d * d + mlp + 3 * norm
    assert (encoder, decoder) == (3_150_336, 4_199_936)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), TARGET, source=SOURCE))["params"]
    made = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    assert made == {"embed": vocabulary * d, "encoder": 6 * encoder, "decoder": 6 * decoder}
    assert sum(made.values()) == 63_045_632
    block = shapes["decoder"]["stack"]["layers"]["block_0"]
    assert block["cross_attention"]["q"]["kernel"].shape == (6, 512, 8, 64)
    assert block["mlp"]["up"]["kernel"].shape == (6, 512, 2048)


def test_the_base_model_is_trained_as_published(base_model):
    """lr = d^-0.5 min(step^-0.5, step 4000^-1.5)."""
    rate = optim.schedule(base_model[0].optim, 100_000)
    for step in (1, 1000, 4000, 16_000, 100_000):
        wanted = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert float(rate(step - 1)) == pytest.approx(wanted, rel=2e-3)


REVERSE = "configs/seq2seq.py:task=reverse,arch=transformer,size=smoke"


@pytest.mark.quick
def test_sections_of_both_sides():
    own = {
        "model.mixers": "near,gru",
        "model.encoder_mixers": "far",
        "model.near.mixer": "attention",
        "model.near.window": "4",
        "model.far.mixer": "attention",
        "model.far.n_heads": "2",
        "model.cross_attention.n_heads": "1",
    }
    model = configs.load(REVERSE, own.items()).model
    assert (model.near.window, model.far.n_heads, model.cross_attention.n_heads) == (4, 2, 1)
    assert "attention" not in model and "hidden" in model.gru
    assert "cross_attention" not in configs.load("configs/debug.py").model


@pytest.mark.quick
def test_what_does_not_go_together_is_told(book):
    for spec, changes, words in (
        (f"configs/text.py:path={book},arch=transformer", {}, "asks at every token; .* closest: arch=attention"),
        ("configs/listops.py:arch=transformer", {}, "asks for one of 10 classes"),
        ("configs/debug.py", {"data.task": "reverse"}, "brings a source and a target; .* arch=transformer_base"),
        (REVERSE, {"model.position": "learned", "model.learned.max_len": "9"}, "length 12 is past the learned .* of 9"),
        (REVERSE, {"model.attention.prefix": "2"}, "a prefix lets it see the next; allowed: prefix 0"),
        (REVERSE, {"model.mixers": "mamba"}, "'mamba' runs forward only"),
        (REVERSE, {"model.encoder_mixers": "rwkw"}, "model.encoder_mixers is .* closest: "),
        (REVERSE, {"model.cross_attention.n_heads": "3"}, "cross_attention.n_heads 3 does not divide"),
        (REVERSE, {"data.reverse.min_length": "13"}, "min_length is 13; allowed: 2 to 12"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(configs.load(spec, changes.items()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reverse")
    small = {"steps": 8, "batch_size": 8, "eval_batches": 1, "model.width": 16, "test_lengths": "(4,)", "eval_every": 0}
    return str(folder), train(configs.load(REVERSE, [(k, str(v)) for k, v in small.items()]), str(folder))


@pytest.mark.scale
def test_a_run_and_what_it_can_be_asked(trained, capsys):
    folder, row = trained
    assert row["kind"] == "encoder_decoder" and {"test/exact", "test/length_4/exact"} <= row["metrics"].keys()
    restored = restore(folder, "latest")
    options = dict(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    continuation(restored, prompt="4 5 6", tokens=5, **options)
    assert len(capsys.readouterr().out.splitlines()) == 2
    accuracy(restored, split="test")
    assert "exact" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"suite attention looks into one stack .* not encoder_decoder"):
        attention(restored, split="test", examples=1, prompt="")
    with pytest.raises(UserError, match="takes token ids from 3 to 12"):
        continuation(restored, prompt="4 99", tokens=5, **options)


def test_generating_needs_a_source_that_has_room():
    model, variables, _ = made("attention")
    key, greedy, begin = jax.random.key(0), Sampling(temperature=0), TARGET[:, :1]
    with pytest.raises(UserError, match="answers a source, and is given none"):
        generate(model, variables["params"], begin, 2, greedy, key)
    short = build.build(config(position="learned", learned=dict(max_len=4)), ASKED)
    with pytest.raises(UserError, match="a source of 6 tokens is past the 4 positions that the encoder can place"):
        generate(short, {}, begin, 2, greedy, key, source=SOURCE)
    with pytest.raises(UserError, match="are past the 4 positions"):
        generate(short, {}, begin, 5, greedy, key, source=SOURCE[:, :4])


def test_blocks_of_generated_tokens_are_those_of_single_steps():
    model, variables, run = made("attention")
    greedy, key = Sampling(temperature=0), jax.random.key(0)
    given = dict(source=SOURCE, source_segments=READ)
    tokens = list(generate(model, variables["params"], TARGET[:, :1], 4, greedy, key, block=2, **given))
    written = np.concatenate([TARGET[:, :1], np.stack(tokens, axis=1)], axis=1)
    forced, _ = run(variables, written[:, :4], **given)
    np.testing.assert_array_equal(jnp.argmax(forced, -1), written[:, 1:])
