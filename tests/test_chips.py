"""Topologies by name: what each stands for, and what is refused."""

import pytest

from model.errors import UserError
from train import chips

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "slices", "each", "name"),
    [
        ("v5e:16x16", 1, 256, "v5e:16x16"),
        ("v5e:256", 1, 256, "v5e:16x16"),
        ("2xv5e:16x16", 2, 256, "2xv5e:16x16"),
        ("v5p:4x4x4", 1, 64, "v5p:4x4x4"),
        ("4xv6e:8x8", 4, 64, "4xv6e:8x8"),
        ("h100:8", 1, 8, "h100:8"),
        ("h100:64", 8, 8, "h100:64"),
        ("cpu:256", 1, 256, "cpu:256"),
    ],
)
def test_a_topology_has_slices_of_chips(text, slices, each, name):
    found = chips.parse(text)
    assert (found.slices, found.each, found.chips, str(found)) == (slices, each, slices * each, name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("v5e", "closest: v5e"),
        ("v5x:16x16", "closest: v5"),
        ("v5e:16x15", "closest: v5e:16x16"),
        ("v5e:100", "closest: 128"),
        ("v5p:16x16", "closest: v5p:"),
        ("h100:12", "closest: h100:16"),
        ("h100:2x4", "closest: h100:8"),
        ("cpu:0", "allowed: 1 to 4096"),
        ("99xv5e:16x16", "allowed: 1 to 4096"),
        ("v5e:0x0", "closest: v5e:1x1"),
    ],
)
def test_what_is_no_topology_is_refused_with_the_closest(text, told):
    with pytest.raises(UserError) as error:
        chips.parse(text)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_every_chip_has_all_figures():
    for name, chip in chips.CHIPS.items():
        known = (chip.peak, chip.hbm, chip.hbm_rate, chip.near_rate, chip.far_rate)
        assert all(known) or (name == "cpu" and not any(known))
