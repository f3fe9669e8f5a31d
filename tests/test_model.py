"""Scans, blocks, stacks and heads: textbook numbers, and forms that must agree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from model import build, entries
from model.asked import Asked
from model.block import NORM_ORDERS
from model.documents import document_positions, open_reading
from model.errors import UserError
from model.layers import dense
from model.mixers import MIXERS
from model.mixers.s4d import INITS, s4d_kernel
from model.mlps import MLPS, mlp_width
from model.ops.conv import fft_conv, short_conv
from model.ops.scan import IMPLEMENTATIONS, linear_scan, selective_scan
from model.stack import loops
from tests import meshes
from train import run as runs

SCANS = [name for name in IMPLEMENTATIONS if name != "sharded"]  # which has tests/test_scan.py


def model_config(**changes):
    config = base.get_config().model.to_dict() | dict(width=16, layers=2) | changes
    return config | entries.sections(config["mixers"], config["position"])


def init(model, tokens, **inputs):
    return nn.unbox(jax.jit(lambda: model.init(jax.random.key(0), tokens, **inputs))())


def run(model, variables, tokens, **inputs):
    static = {k: inputs.pop(k) for k in ("train", "right_padded") if k in inputs}
    return jax.jit(lambda v, t, i: model.apply(v, t, **i, **static))(variables, tokens, inputs)


pytestmark = pytest.mark.usefixtures("quick_draws")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 12)), jnp.int32)


# Scans, convolutions


@pytest.mark.quick
@pytest.mark.parametrize("implementation", SCANS)
def test_scan_is_the_textbook_recurrence(implementation):
    a, b = jnp.full((1, 6, 1), 0.9), jnp.asarray([0.5, 0, 0, 0, 0, 0]).reshape(1, 6, 1)
    impulse = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
    h, last = linear_scan(a, b, jnp.zeros((1, 1)), implementation=implementation)
    np.testing.assert_allclose(h.ravel(), impulse, rtol=1e-6)
    np.testing.assert_allclose(last.ravel(), impulse[-1:], rtol=1e-6)
    kernel = 0.5 * 0.9 ** jnp.arange(6.0)[:, None]
    unit = jnp.zeros((1, 6, 1)).at[0, 0].set(1.0)
    np.testing.assert_allclose(fft_conv(unit, kernel).ravel(), impulse, atol=1e-6)


@pytest.mark.parametrize("implementation", SCANS)
def test_scan_gradients_reach_the_first_state(implementation):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.uniform(0.5, 1, (2, 150, 3)), jnp.float32) for _ in range(2))
    h0 = jnp.ones((2, 3))

    def objective(a, b, h0, implementation):
        h, last = linear_scan(a, b, h0, implementation=implementation)
        return jnp.sum(jnp.sin(h)) + jnp.sum(last**2)

    grad = jax.jit(jax.grad(objective, argnums=(0, 1, 2)), static_argnums=3)
    for got, want in zip(grad(a, b, h0, implementation), grad(a, b, h0, "sequential"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


def test_the_chunked_selective_scan_never_holds_all_states():
    """Its memory is that of inputs and outputs and one chunk of states, not of L x N."""
    B, L, E, N = 1, 4096, 64, 16

    def memory(implementation):
        def objective(x, dt, A, B, C):
            return jnp.sum(selective_scan(x, dt, A, B, C, jnp.zeros((1, E, N)), implementation=implementation)[0])

        shapes = [(B, L, E), (B, L, E), (E, N), (B, L, N), (B, L, N)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.grad(objective, argnums=range(5))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    states = 4 * B * L * E * N
    assert memory("associative") > states
    for implementation in ("chunked", "chunked_serial", "stepped"):
        assert memory(implementation) < states / 2, implementation


@pytest.mark.quick
@pytest.mark.parametrize("length", [1, 5])
def test_a_map_whose_parts_are_arrays_of_their_own(length):
    """Has the parameters of one that is cut up afterwards, and their gradients."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, length, 3)), jnp.float32)
    whole, apart = (dense((2, 4), ("embed", None, "inner"), jnp.float32, "in", apart=parts) for parts in (False, True))
    params, same = (nn.unbox(layer.init_with_output(jax.random.key(0), x)[1]) for layer in (whole, apart))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, same))

    def value(params, x, layer):
        u, z = layer.apply(params, x) if layer is apart else jnp.moveaxis(layer.apply(params, x), -2, 0)
        return jnp.sum(jnp.sin(u) * jnp.cos(2 * z)), (u, z)

    want, got = (jax.grad(value, argnums=(0, 1), has_aux=True)(params, x, layer) for layer in (whole, apart))
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_short_convolution():
    x, kernel = jnp.arange(1.0, 6)[None, :, None], jnp.asarray([[100.0], [10.0], [1.0]])
    past = jnp.asarray([[[7.0], [8.0]]])
    y = short_conv(x, kernel, jnp.asarray([1000.0]), past)
    np.testing.assert_allclose(y.ravel(), [1781, 1812, 1123, 1234, 1345])
    reach = jnp.asarray([[0, 1, 2, 0, 1]])  # a document opens at the first and the fourth token
    np.testing.assert_allclose(short_conv(x, kernel, jnp.zeros(1), past, reach).ravel(), [1, 12, 123, 4, 45])


@pytest.mark.quick
def test_s4d_initial_frequencies():
    np.testing.assert_allclose(INITS["lin"](np.arange(3), 32), [0, np.pi, 2 * np.pi])
    np.testing.assert_allclose(INITS["inv"](np.arange(4), 4), [17.825354, 4.244132, 1.527887, 0.363783], atol=1e-6)
    np.testing.assert_allclose(INITS["inv"](np.arange(2), 32), [1283.425, 414.227], atol=1e-3)


@pytest.mark.quick
def test_s4d_kernel_is_the_sampled_impulse_response():
    A, C, dt = jnp.asarray([[-0.5 + 3j]]), jnp.asarray([[0.7 - 0.2j]]), jnp.asarray([0.1])
    steps = np.exp(np.complex128(-0.5 + 3j) * 0.1) ** np.arange(50)
    B = (steps[1] - 1) / np.complex128(-0.5 + 3j)
    np.testing.assert_allclose(s4d_kernel(A, C, dt, 50)[:, 0], 2 * ((0.7 - 0.2j) * B * steps).real, atol=1e-6)


# Documents


@pytest.mark.quick
def test_document_positions_carry_over():
    rows = np.asarray([[1, 1, 0, 1, 2, 2, 0, 0, 2, 3], [0, 0, 4, 4, 4, 0, 5, 5, 5, 5]])
    want = [[0, 1, 0, 2, 0, 1, 0, 0, 2, 0], [0, 0, 0, 1, 2, 0, 0, 1, 2, 3]]
    read = jax.jit(document_positions)
    for cuts in ([10], [3, 7], [1] * 10, [7, 1, 2]):
        reading, found, start = open_reading(2), [], 0
        for n in cuts:
            part, reading = read(rows[:, start : start + n], reading)
            found.append(part)
            start += n
        np.testing.assert_array_equal(np.concatenate(found, axis=1), want)


# Blocks, stacks, heads


@pytest.mark.quick
def test_swiglu_width():
    assert mlp_width("swiglu", 64, 0) == 192 and mlp_width("gelu", 64, 0) == 256
    assert mlp_width("swiglu", 4096, 11008) == 11008


@pytest.mark.quick
@pytest.mark.parametrize(("chip", "looped"), [("cpu", (4, 16, 17)), ("gpu", (17,)), ("tpu", (4, 16, 17))])
def test_a_gpu_loops_over_many_layers_only(chip, looped):
    with meshes.in_force(meshes.mesh_of(chip)):
        assert tuple(n for n in (4, 16, 17) if loops(n)) == looped


@pytest.mark.quick
@pytest.mark.parametrize(
    ("chip", "lines"),
    [
        ("cpu", ["2 layers, looped over"]),
        ("gpu", ["2 layers, unrolled"]),
        (
            "volta",
            [
                "2 layers, unrolled",
                "gpu of compute capability 7.0: kernels need 8.0, so plain XLA takes their place, which is slower",
            ],
        ),
    ],
)
def test_what_the_platform_decides_is_said(chip, lines, monkeypatch):
    said, config = [], base.get_config()
    monkeypatch.setattr(runs.logging, "warning", lambda line, *args: said.append(line % args))
    with meshes.in_force(meshes.mesh_of(chip)):
        runs.warn_of_slowness()
        assert runs.decided(config, most=1) + said == lines
        assert runs.decided(config, most=8)[1:] == ["8 steps in a dispatch"]
        config.model.layers = 1  # nothing to loop over
        assert runs.decided(config, most=1) == []
        config.model.layers = 2
        config.model.scan = True
        assert runs.decided(config, most=1) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("mixers,layers", [(("attention",), 3), (("mamba", "attention"), 5), (("s4d", "mamba"), 2)])
def test_looped_unrolled_and_rematerialised_agree(mixers, layers):
    config = model_config(mixers=mixers, layers=layers)
    models = [
        build.build(config | dict(scan=scan, kept=kept), Asked(20))
        for scan, kept in ((True, "all"), (False, "all"), (True, "nothing"), (True, "matmuls"))
    ]
    variables = [init(m, TOKENS) for m in models]
    for other in variables[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, variables[0])

    def loss(model, variables):
        return jnp.sum(jax.nn.log_softmax(run(model, variables, TOKENS)[0])[..., 0])

    grads = [jax.jit(jax.grad(lambda v, m=m: loss(m, v)))(variables[0]) for m in models]
    for other in grads[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), other, grads[0])


CHOICES = [{"norm_order": order} for order in NORM_ORDERS] + [{"mlp": mlp} for mlp in MLPS if mlp != "swiglu"]
CHOICES += [{"parallel": True}, {"residual": False}]
SCALARS = {"norm_eps": 0.1, "final_norm": False, "embed_scale": 4.0, "branch_scale": 0.5, "logit_scale": 0.5}
CHOICES += [{key: value} for key, value in SCALARS.items()]
CHOICES += [dict(embed_norm="before", unembed_bias=True, mlp_bias=True, mlp_multiple=7, depth_init=True)]


@pytest.mark.few(3)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_block_choices(choice):
    """Each makes a model that drops out, skips padding, and in pieces gives what it gives whole."""
    config = model_config(norm="layernorm", tied=False, dropout=0.1, **choice)
    model = build.build(config, Asked(20))
    variables = init(model, TOKENS)
    logits, _ = run(model, variables, TOKENS)
    dropped, _ = run(model, variables, TOKENS, train=True, rngs={"dropout": jax.random.key(1)})
    assert logits.shape == (2, 12, 20) and np.isfinite(logits).all() and not np.allclose(logits, dropped)
    block = variables["params"]["stack"]["layers"]["block_0"]
    assert ("mlp" in block) == (choice.get("mlp") != "none")
    assert ("mlp_norm" in block) == (
        not choice.keys() & {"parallel"} and choice not in ({"norm_order": "none"}, {"mlp": "none"})
    )
    assert "unembed" in variables["params"]
    segments = jnp.asarray([[1] * 4 + [0] + [1] * 3 + [2] * 4, [0] + [3] * 11], jnp.int32)
    whole, _ = run(model, variables, TOKENS, segments=segments)
    state, parts = model.init_state(2, 12), []
    for start in (0, 6):
        some = slice(start, start + 6)
        y, state = run(model, variables, TOKENS[:, some], segments=segments[:, some], state=state)
        parts.append(y)
    real = segments > 0
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1)[real], whole[real], atol=2e-5)
    np.testing.assert_allclose(whole[0, 8:], run(model, variables, TOKENS[:1, 8:])[0][0], atol=2e-5)  # document 2
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(model.init_state(1, 12)["stack"])) == model.state_bytes(12)


@pytest.mark.quick
def test_what_scalars_do():
    """Each against the same parameters without it."""
    plain = build.build(model_config(), Asked(20))
    variables = init(plain, TOKENS)
    before, _ = run(plain, variables, TOKENS)

    def changed(**changes):
        return run(build.build(model_config(**changes), Asked(20)), variables, TOKENS)[0]

    np.testing.assert_allclose(changed(logit_scale=0.5), 0.5 * before, rtol=1e-6)
    np.testing.assert_allclose(changed(logit_cap=0.1), 0.1 * np.tanh(before / 0.1), atol=1e-6)
    embedding = variables["params"]["embed"]["embedding"]
    larger = {"params": variables["params"] | {"embed": {"embedding": 4 * embedding}}}
    np.testing.assert_allclose(changed(embed_scale=4.0), run(plain, larger, TOKENS)[0] / 4, atol=1e-5)  # tied
    # Nothing to speak of is added, so the last norm sees the embeddings alone.
    bare, loud = changed(branch_scale=1e-6, norm_eps=1e-12), changed(embed_scale=1e6, norm_eps=1e-12)
    np.testing.assert_allclose(bare, loud, atol=1e-4)
    for choice in ({"final_norm": False}, {"norm_eps": 0.1}):
        assert not np.allclose(changed(**choice), before, atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
def test_classifier_ignores_padding(pool):
    model = build.build(model_config(pool=pool, causal=False, position="sinusoidal"), Asked(20, n_classes=3))
    segments = jnp.ones((2, 12), jnp.int32)
    variables = init(model, TOKENS, segments=segments)
    alone, _ = run(model, variables, TOKENS, segments=segments)
    padded = jnp.pad(TOKENS, [(0, 0), (0, 4)], constant_values=7)
    with_padding, _ = run(model, variables, padded, segments=jnp.pad(segments, [(0, 0), (0, 4)]))
    assert alone.shape == (2, 3)
    np.testing.assert_allclose(with_padding, alone, atol=1e-5)


RIGHT_PADDED = [
    (dict(mixers=("attention",), causal=False, position="rope", pool="cls"), {}),
    (dict(mixers=("attention",), causal=False, position="alibi"), {}),
    (dict(mixers=("attention", "mamba"), mlp="experts"), {}),
    (dict(mixers=("s4d", "lru"), causal=False), {}),
    (dict(mixers=("gru", "b2s6"), causal=False, pool="last"), {}),
    (dict(mixers=("attention",), causal=False, position="alibi"), dict(pair=True)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("settings", "asked"), RIGHT_PADDED, ids=str)
def test_padding_told_to_be_behind_the_rows_changes_no_answer(settings, asked):
    """In float64, where rounding does not hide a difference."""
    c, asked_for = model_config(**settings), Asked(20, n_classes=3, **asked)
    segments = jnp.asarray(np.arange(12) < np.asarray([[12], [7]]), jnp.int32)
    given = dict(segments=segments)
    if asked:
        given |= dict(other=TOKENS[:, ::-1], other_segments=segments[::-1])
    variables = init(build.build(c, asked_for), TOKENS, **given)

    def answers(**told):
        def loss(variables):
            (logits, _), sown = exact.apply(variables, TOKENS, **given, **told, train=True, mutable=["losses"])
            return jnp.sum(jnp.sin(logits)) + sum(map(jnp.sum, jax.tree.leaves(sown))), logits

        gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(variables)
        return logits, *jax.tree.leaves(gradient)

    with jax.enable_x64(True):
        exact = build.build(c | dict(dtype="float64"), asked_for)
        variables = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), variables)
        for told, untold in zip(answers(right_padded=True), answers(), strict=True):
            np.testing.assert_allclose(told, untold, atol=1e-9)


@pytest.mark.quick
def test_logits_only_where_asked():
    model = build.build(model_config(), Asked(20))
    variables = init(model, TOKENS)
    everywhere, _ = run(model, variables, TOKENS)
    at = jnp.asarray([[3, 11], [0, 5]])
    some, _ = run(model, variables, TOKENS, at=at)
    np.testing.assert_allclose(some, jnp.take_along_axis(everywhere, at[..., None], axis=1), atol=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope", "alibi"])
def test_model_in_pieces(position):
    """The split law for what the model adds: positions that go on where the last call stopped."""
    model = build.build(model_config(position=position), Asked(20))
    variables = init(model, TOKENS)
    whole, _ = run(model, variables, TOKENS)
    state, parts = model.init_state(2, 12), []
    for start, n in ((0, 7), (7, 1), (8, 4)):
        y, state = run(model, variables, TOKENS[:, start : start + n], state=state)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), ("float16", 0.005)])
def test_narrow_dtypes_keep_parameters_and_logits_wide(dtype, tolerance):
    model = build.build(model_config(dtype=dtype, mixers=("mamba", "attention", "s4d"), layers=3), Asked(20))
    variables = init(model, TOKENS)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits, _ = run(model, variables, TOKENS)
    exact = build.build(model_config(mixers=("mamba", "attention", "s4d"), layers=3), Asked(20))
    wide, _ = run(exact, variables, TOKENS)
    assert logits.dtype == jnp.float32
    assert np.linalg.norm(logits - wide) / np.linalg.norm(wide) < tolerance


@pytest.mark.scale
@pytest.mark.quick
@pytest.mark.parametrize("mixers", [("attention",), ("near", "mamba")])
def test_ragged_generation_where_integers_are_wide(mixers):
    """Prompts of two lengths, then a token more, with 64 bits allowed: the state stays what it was opened as."""
    named = {"near": dict(mixer="attention", position="rope", window=3)}
    config = base.get_config().model.to_dict() | dict(width=16, mixers=mixers, **named)
    model = build.build(config | entries.sections(mixers, "none", named), Asked(20))
    variables, segments = init(model, TOKENS), jnp.asarray([[1] * 6, [1] * 4 + [0] * 2], jnp.int32)
    with jax.enable_x64(True):
        state = opened = model.init_state(2, 12)
        prompt, state = run(model, variables, TOKENS[:, :6], segments=segments, state=state)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, opened)
        more, _ = run(model, variables, TOKENS[:, 6:7], state=state)
    whole, _ = run(model, variables, TOKENS[:1, :7])
    np.testing.assert_allclose(jnp.concatenate([prompt[0], more[0]]), whole[0], atol=2e-5)
    short, _ = run(model, variables, jnp.concatenate([TOKENS[1:, :4], TOKENS[1:, 6:7]], axis=1))
    np.testing.assert_allclose(more[1, 0], short[0, -1], atol=2e-5)


@pytest.mark.quick
def test_float64_is_float64():
    """Where it is allowed; without it JAX would compute float32 and say nothing."""
    with jax.enable_x64(True):
        model = build.build(model_config(dtype="float64"), Asked(20))
        made = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        logits, _ = jax.eval_shape(model.apply, made, TOKENS)
    assert {leaf.dtype for leaf in (*jax.tree.leaves(made), logits)} == {jnp.dtype("float64")}


@pytest.mark.quick
def test_a_mixer_is_called_what_the_zoo_calls_it():
    assert [mixer(width=16).label for mixer in MIXERS.values()] == [*MIXERS]


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes,words",
    [
        (dict(mixers=("atention",)), "unknown mixer 'atention'.*closest: attention"),
        (dict(position="rop"), "unknown position 'rop'.*closest: rope"),
        (dict(mixers=("mamba",), position="rope"), "position 'rope' acts on the scores"),
        (dict(width=18), "n_heads 4 does not divide model.width 18; closest that does: 3"),
        (dict(width=12, position="rope"), "head dim must be even, not 3"),
        (dict(mixers=("mamba",), causal=False), "forward only"),
        (dict(pool="cls"), "pool 'cls'"),
        (dict(dtype="float64"), "model.dtype 'float64' needs JAX_ENABLE_X64=1"),
        (dict(kind="seq2seq", mixers=(), dtype="float64"), "model.dtype 'float64' needs JAX_ENABLE_X64=1"),
        (dict(mlp="none", mlp_bias=False), "model.mlp_bias is False, and mlp 'none' has no biases to choose"),
    ],
)
def test_mistakes_are_named_before_anything_compiles(changes, words):
    classes = 3 if "pool" in changes else 0
    tail = 4 if "kind" in changes else 0
    with pytest.raises(UserError, match=words):
        model = build.build(model_config(**changes), Asked(20, n_classes=classes, tail=tail))
        jax.eval_shape(model.init, jax.random.key(0), TOKENS)


@pytest.mark.quick
def test_a_length_past_the_learned_table():
    model = build.build(model_config(position="learned") | {"learned": {"max_len": 8}}, Asked(20))
    with pytest.raises(UserError, match="length 12 is past the learned position table of 8"):
        jax.eval_shape(model.init, jax.random.key(0), TOKENS)
