"""Settings: each says in its type what it may be, a value that it may not be is told with the closest that it may."""

import math
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from configs.archs import ARCHS
from model.errors import UserError
from model.positions import POSITIONS
from model.settings import (
    Count,
    Dim,
    Fraction,
    Length,
    Name,
    NotNegative,
    Positive,
    admits,
    check,
    even,
    parsed,
    within,
)
from tests.test_fuzz import FILES, every_setting
from train import config as configs

pytestmark = pytest.mark.quick
SETTINGS = [(key, kind) for _, key, kind in every_setting()]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [1, 2**31 - 1], [0, 2**31, 1.0, True, "1", None]),
        (Count | None, [1, None], [0, "None", False]),
        (Literal[-1] | Count, [-1, 1], [0, -2, -1.0]),
        (NotNegative, [0, 0.0, 5, 3e38], [-1e-9, math.nan, math.inf, 1e39, 10**400, True, "0"]),
        (Positive, [1e-30, 1], [0, 0.0, 1e-60, -1]),
        (Fraction, [0, 0.5, 1], [1.1, -0.1]),
        (Annotated[int, within(2, 10), even], [2, 10], [0, 3, 12]),
        (bool, [True, False], [0, 1, None, "True"]),
        (Literal["a", "b"], ["a"], ["c", "", 1]),
        (Name, ["x"], ["", "  ", 1]),
        (tuple[Length, ...], [(), (1, 2)], [(0,), [1], 1, ("1",)]),
        (tuple[Literal["a"], tuple[Count, ...]], [("a", ()), ("a", (1,))], [("a",), ("b", ()), ("a", 1), ()]),
        (Any, [None, 1, "x"], []),
    ],
)
def test_what_a_type_admits(kind, good, bad):
    assert all(admits(kind, value) for value in good)
    assert not any(admits(kind, value) for value in bad)


def test_a_setting_may_be_of_another_type_than_its_default():
    key = "model.attention.qk_norm"
    values = {text: configs.flatten(configs.load("configs/debug.py", [(key, text)]))[key] for text in ("True", "all")}
    assert values == {"True": True, "all": "all"}
    with pytest.raises(UserError, match=rf"{key} is 'al'; allowed: True or False, or all; closest: all"):
        configs.load("configs/debug.py", [(key, "al")])


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (Count, 0, "x is 0; allowed: a whole number from 1 to 2147483647; closest: 1"),
        (Count, 10**20, "x is 1000.*; closest: 2147483647"),
        (Count, math.inf, "x is inf; .*; closest: 2147483647"),
        (Count, 2.6, "x is 2.6; .*; closest: 3"),
        (tuple[Name, ...], 1.5, "x is 1.5; allowed: a tuple, each item a text that is not empty"),
        (Count, "many", "x is 'many'; allowed: a whole number from 1 to 2147483647; usual: 7"),
        (Count | None, -3, "from 1 to 2147483647, or None; closest: 1"),
        (Literal[0] | Dim, -3, "allowed: 0, or a whole number from 1 to 1048576; closest: 0"),
        (NotNegative, -1, "x is -1; allowed: a number of at least 0; closest: 0.0"),
        (NotNegative, math.inf, "x is inf; allowed: a number of at least 0; usual: 7"),
        (NotNegative, math.nan, "x is nan; .*; usual: 7"),
        (Fraction, 1e400, "x is inf; allowed: a number from 0 to 1; closest: 1.0"),
        (Positive, 0, "x is 0; allowed: a number above 0; usual: 7"),
        (Annotated[int, within(2, 10), even], 3, "a whole number from 2 to 10 and that is even; closest: 4"),
        (Literal["cosine", "constant"], "cosin", "x is 'cosin'; allowed: cosine, constant; closest: cosine"),
        (Literal["cosine"] | None, "cosin", "allowed: cosine, or None; closest: cosine"),
        (tuple[Length, ...], (4, 0), r"x is \(4, 0\); allowed: a tuple, each item a whole .*; closest: \(4, 1\)"),
        (tuple[Literal["mamba"], ...], "mambo", r"x is 'mambo'; .*; closest: \('mamba',\)"),
        (bool, "maybe", "x is 'maybe'; allowed: True or False; usual: 7"),
        (Count, 16**5000, "x is a number of 20001 bits; .*; closest: 2147483647"),
        (Count, "9" * 5000, r"x is '9{76}\.\.\.; allowed"),
    ],
    ids=lambda part: part if isinstance(part, str) and len(part) < 100 else "",
)
def test_what_is_told(kind, value, told):
    with pytest.raises(UserError, match=f"{told}$" if "closest" in told or "usual" in told else told) as error:
        check("x", value, kind, 7)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1e3", Count, 1000),
        ("1_000", Count, 1000),
        ("3", NotNegative, 3.0),
        ("None", Count | None, None),
        ("none", Literal["xla"] | None, None),
        ("None", Name, "None"),
        ("true", bool, True),
        ("mamba,attention", tuple[Literal["mamba", "attention"], ...], ("mamba", "attention")),
        ("('mamba',)", tuple[Literal["mamba"], ...], ("mamba",)),
        ("mamba", tuple[Literal["mamba"], ...], ("mamba",)),
        ("64, 128", tuple[Length, ...], (64, 128)),
        ("64", tuple[Length, ...], (64,)),
        ("()", tuple[Length, ...], ()),
        ("64,long", tuple[Length, ...], (64, "long")),
        ("1.5", Count, 1.5),
        ("(((", Count, "((("),
    ],
)
def test_how_a_command_line_is_read(text, kind, value):
    read_as = parsed(text, kind)
    assert read_as == value and type(read_as) is type(value)


# Laws of all the settings there are


def leaves(kind: Any) -> list[Any]:
    inside = () if get_origin(kind) in (None, Annotated, Literal) else get_args(kind)
    return [leaf for one in inside if one is not ... for leaf in leaves(one)] if inside else [kind]


def test_every_number_has_bounds_and_every_name_its_choices():
    said = (bool, type(None))
    bare = {key for key, kind in SETTINGS for leaf in leaves(kind) if leaf not in said and get_origin(leaf) is None}
    needles = {f"data.{name}.path" for name in ("needle", "multi_key", "multi_value", "multi_query")}
    assert bare == {"data.text.path", "init.path", "resume_safe"} | needles  # any text


def test_every_key_of_a_config_is_declared_and_its_default_allowed():
    for arch in ARCHS:
        config = configs.load(f"configs/debug.py:arch={arch}")
        assert configs.declared(config).keys() == configs.flatten(config).keys()
        assert all(admits(field.type, field.default) for field in configs.declared(config).values())


# Bounds are not too tight


RIGHT = [
    *(f"configs/{name}.py:arch={arch}" for name in ("debug", "listops", "induction_heads") for arch in ARCHS),
    *(f"configs/synthetic.py:task={task}" for task in ("mqar", "selective_copying", "induction")),
    *(f"configs/selective_copying.py:size={size}" for size in ("smoke", "small", "paper")),
    *(f"configs/recall.py:width={width},pairs={n},size=paper" for width in (64, 512) for n in (4, 64)),
    *(f"configs/extrapolation.py:task=text,position={name}" for name in POSITIONS),
    "configs/induction_heads.py:size=paper",
    "configs/listops.py:size=lra",
    "configs/base.py",
]


@pytest.mark.parametrize("spec", RIGHT)
def test_what_is_in_the_house_passes(spec):
    configs.check(configs.load(spec))


# Mistakes in a config file


TOLD = {
    "raises.py": "config 'raises.py', line 6: ZeroDivisionError: integer division or modulo by zero",
    "syntax.py": "config 'syntax.py', line 1: SyntaxError: invalid syntax",
    "imports.py": "config 'imports.py', line 2: ModuleNotFoundError: No module named 'nowhere'",
    "exits.py": "config 'exits.py', line 3: SystemExit: 0",
    "type.py": "config 'type.py', line 6: TypeError: .*'lr'.*fast",
    "key.py": "unknown config key 'optim.lrr' in key.py, line 6; optim has lr, .*closest: optim.lr",
    "value.py": "optim.lr is -1.0 in value.py, line 6; allowed: a number of at least 0; closest: 0.0",
    "needs.py": r"config 'needs.py' has get_config\(a, b\), which cannot be called with \(\)",
    "returns.py": "config 'returns.py' holds int; allowed: a ConfigDict",
    "nothing.py": r"config 'nothing.py' defines no get_config\(\)",
    "list.json": "config 'list.json' holds list; allowed: .*an object in JSON",
    "open.json": "config 'open.json' is not JSON: .*line 1 column 2",
    "nan.json": "optim.lr is nan in nan.json; allowed",
}


@pytest.mark.parametrize("name", TOLD)
def test_a_mistake_in_a_config_file_is_told_with_its_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(FILES[name])
    with pytest.raises(UserError, match=TOLD[name]) as error:
        configs.load(name)
    assert "\n" not in str(error.value)


def test_the_line_is_that_of_the_section(tmp_path):
    file = tmp_path / "c.py"
    file.write_text(
        "from configs import base\ndef get_config():\n    c = base.get_config()\n    c.seed = 3\n"
        "    c.data.seed = -1\n    c.model.attention = dict(\n        n_heads=4,\n        window=0,\n    )\n"
        "    return c\n"
    )
    with pytest.raises(UserError, match=r"data.seed is -1 in .*c\.py, line 5; allowed"):
        configs.load(str(file))
    file.write_text(file.read_text().replace("c.data.seed = -1", "c.data.seed = 1"))
    with pytest.raises(UserError, match=r"model.attention.window is 0 in .*c\.py, line 8; allowed"):
        configs.load(str(file))


def test_a_config_put_together_by_hand_is_checked_too():
    config = configs.load("configs/debug.py").unlock()
    config.optim.lr = -1.0
    with pytest.raises(UserError, match=r"optim.lr is -1\.0; allowed: a number of at least 0"):
        configs.check(config)


def test_a_config_that_was_not_filled_in_says_who_does_so():
    config = configs.base.get_config()
    config.model.mixers, config.model.mamba = ("mamba",), {"state": 16}
    with pytest.raises(UserError, match=r"lacks model.mamba.*; train.config.load fills in"):
        configs.check(config)


def test_a_runs_config_is_taken_as_it_is_and_found_in_its_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for spec, told in {
        f"{tmp_path}/config.json:arch=mamba": "takes no argument 'arch=mamba'; use --config.KEY=VALUE",
        str(tmp_path): f"no config file '{tmp_path}'; closest: {tmp_path}/config.json",
    }.items():
        with pytest.raises(UserError, match=told):
            configs.load(spec)
