"""Every position encoding by name. A new one is a class in a file beside this and a line here."""

from model.positions.added import Learned, Sinusoidal
from model.positions.grid import Axial, SinCos2D
from model.positions.position import Position
from model.positions.rotary import Rope, XPos
from model.positions.score_bias import FIRE, T5, ALiBi, Kerple

POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": Rope,
    "xpos": XPos,
    "alibi": ALiBi,
    "t5": T5,
    "kerple": Kerple,
    "fire": FIRE,
    "sincos2d": SinCos2D,
    "axial": Axial,
}
