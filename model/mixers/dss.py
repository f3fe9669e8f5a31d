"""DSS: S4 without the low-rank part of its state matrix (https://arxiv.org/abs/2203.14343).

This is the paper's DSS-exp, whose kernel is that of S4D. Its DSS-softmax divides each mode by a sum over the length it
is trained on, so the same token would be read differently in a longer sequence.
"""

from typing import ClassVar, Literal

import flax.linen as nn

from model.mixers.s4d import s4d_system
from model.mixers.state_space import DISCRETISATIONS, Continuous, System
from model.ops.hippo import legs_modes


class DSS(Continuous):
    """DSS-exp: the modes of HiPPO-LegS, and one weight w for what S4 has as B and C."""

    discretisation: Literal[*DISCRETISATIONS] = "zoh"

    groups: ClassVar[dict[str, str]] = {
        "log_dt": "ssm",
        "Lambda_real": "ssm",
        "Lambda_imag": "ssm",
        "w": "no_decay",
        "D": "no_decay",
    }

    def systems(self) -> list[System]:
        D, N, channels = self.width, self.state // 2, ("inner", None)
        dt = self.steps(D)
        Lambda = self.modes("Lambda", legs_modes(self.state)[0], (D, N), channels)
        both = self.readout("w", nn.initializers.normal(0.5**0.5), channels)
        return [s4d_system(Lambda, w, dt, self.discretisation) for w in both]
