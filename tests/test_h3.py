"""H3 by its paper's definition, and what it refuses."""

import jax
import numpy as np
import pytest

from model.contract import Context
from model.errors import UserError
from model.mixers.h3 import H3
from tests import zoo


def definition(p, x, P, N):
    """One row, in float64, as two recurrences: a state that shifts, then a diagonal one a head for all its products."""
    q, k, v = (x @ p[name]["kernel"] for name in "qkv")
    D, W = p["shift_C"].shape
    dt = np.exp(p["log_dt"])[:, None]
    A = -np.exp(p["A_real"]) + 1j * p["A_imag"]
    C = p["C"][0] + 1j * p["C"][1]
    discrete, B = np.exp(dt * A), (np.exp(dt * A) - 1) / A
    last, h, rows = np.zeros((W, D)), np.zeros((D // P, P, P, N), complex), []
    for t in range(len(x)):
        last = np.concatenate([k[t][None], last[:-1]])
        seen = np.einsum("wd,dw->d", last, p["shift_C"]) + p["shift_D"] * k[t]
        out = np.zeros(D)
        for head in range(D // P):
            here = slice(head * P, head * P + P)
            product = np.outer(seen[here], v[t, here])
            h[head] = discrete[head] * h[head] + B[head] * product[..., None]
            found = 2 * np.real(h[head] @ C[head]) + p["D"][head] * product
            out[here] = q[t, here] @ found
        rows.append(out @ p["out"]["kernel"])
    return np.asarray(rows)


@pytest.mark.parametrize("settings", [{}, dict(head_dim=4, state=8, shift=3)], ids=str)
def test_h3_is_its_papers_definition(settings):
    mixer, x = H3(width=zoo.WIDTH, **settings), zoo.inputs(2, 80)
    variables = zoo.params(mixer)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    y, _ = zoo.apply(mixer)(variables, x, Context())
    for row in range(2):
        want = definition(p, np.asarray(x[row], np.float64), mixer.head_dim, mixer.state // 2)
        assert zoo.far(y[row], want) < 2e-5


def test_a_state_holds_the_last_keys_and_a_number_for_each_mode():
    mixer = H3(width=8, head_dim=2, state=6, shift=5)
    assert mixer.state_bytes(10) == mixer.state_bytes(10**6) == 4 * (4 * 8 + 8 * 2 * 6)


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(causal=False), "h3 runs forward only; set model.causal=True"),
        (dict(head_dim=3), "model.h3.head_dim 3 does not divide model.width 16; closest that does: 2"),
        (dict(state=7), "state is 7; allowed: .*even; closest: 8"),
    ],
)
def test_mistakes_are_told_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        zoo.params(H3(width=zoo.WIDTH, **settings))
