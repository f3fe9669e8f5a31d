"""HiPPO-LegS and its modes, in float64 when a model is made (https://arxiv.org/abs/2008.07669).

LegS is normal up to a matrix of rank one (https://arxiv.org/abs/2111.00396): `A = S - P P^T`, where S is -1/2 on the
diagonal and skew elsewhere. S alone is HiPPO-N (https://arxiv.org/abs/2208.04933).
"""

from functools import cache

import numpy as np


def legs(N: int) -> tuple[np.ndarray, np.ndarray]:
    """A `[N, N]` and B `[N]` of HiPPO-LegS, which keeps the Legendre coefficients of all its past."""
    n = np.arange(N)
    B = np.sqrt(2 * n + 1.0)
    return -np.tril(np.outer(B, B), -1) - np.diag(n + 1.0), B


@cache
def legs_modes(N: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """LegS in the basis V of its normal part, `A = V (Lambda - P P^*) V^*`: Lambda, P, B `[N/2]` and V `[N, N/2]`.

    One mode of each conjugate pair, fastest first; N is even. The phase of an eigenvector is free: here it is the one
    that makes B, and so P, real and positive.
    """
    A, B = legs(N)
    P = B / 2**0.5
    skew = A + np.outer(P, P) + np.eye(N) / 2
    frequencies, V = np.linalg.eigh(-1j * skew)
    frequencies, V = frequencies[: N // 2 - 1 : -1], V[:, : N // 2 - 1 : -1]
    phase = V.conj().T @ B
    V = V * (phase / np.abs(phase))
    return -0.5 + 1j * frequencies, np.abs(phase) / 2**0.5, np.abs(phase), V
