"""A config file, `FILE.py[:argument]` or a run's `config.json`: read, and its mistakes told with file and line."""

import ast
import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from model.errors import UserError
from model.settings import shown
from train.workdir import parse_json


def read_config(spec: str) -> Mapping[str, Any]:
    """What a config file holds."""
    path, _, argument = spec.partition(":")
    file = Path(path)
    try:
        if not file.is_file():
            near = difflib.get_close_matches(path, [str(p) for p in Path("configs").glob("*.py")], n=1)
            near = [str(file / "config.json")] if (file / "config.json").is_file() else near
            raise UserError(f"no config file {path!r}" + (f"; closest: {near[0]}" if near else ""))
        if file.suffix not in (".py", ".json"):
            raise UserError(f"config {path!r} must be a .py file with get_config, or a .json file")
        if file.suffix == ".json" and argument:
            raise UserError(f"config {path!r} is resolved and takes no argument {argument!r}; use --config.KEY=VALUE")
        held = read_json(file) if file.suffix == ".json" else call(file, argument)
    except OSError as error:
        raise UserError(f"config {shown(path)} cannot be read: {error.strerror}") from None
    if not isinstance(held, ConfigDict | dict):
        raise UserError(f"config {path!r} holds {type(held).__name__}; allowed: a ConfigDict, or an object in JSON")
    return held


def read_json(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"config {str(file)!r} is not JSON: {error}") from None


def call(file: Path, argument: str) -> Any:
    """What `get_config(argument)` returns; whatever goes wrong in the file is told with its line."""
    module_spec = spec_from_file_location(file.stem, file)
    module = module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        return entry(file, module, argument)()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError):  # the frames are those of the parser
            frames.append((error.filename or "", error.lineno))
        lines = [line for name, line in frames if Path(name).resolve() == file.resolve()]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(f"config {str(file)!r}{where}: {type(error).__name__}: {error}") from None


def entry(file: Path, module: ModuleType, argument: str) -> Callable[[], Any]:
    """`get_config` with what it is to be called with."""
    function = getattr(module, "get_config", None)
    if not callable(function):
        raise UserError(f"config {str(file)!r} defines no get_config()")
    given = (argument,) if argument else ()
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        takes = f"get_config{inspect.signature(function)}"
        raise UserError(f"config {str(file)!r} has {takes}, which cannot be called with {given}") from None
    return lambda: function(*given)


def place(file: str, key: str) -> str:
    """Where a config file sets a key: the file's name and, where it can be found, the line; no file, no place."""
    if not file:
        return ""
    *_, room, name = ("", *key.split("."))
    found = []
    if file.endswith(".py"):
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(attr=attr, ctx=ast.Store(), value=ast.Attribute(attr=section)) if attr == name:
                    found.append((section == room, node.lineno))
                case ast.Attribute(attr=attr, ctx=ast.Store()) if attr == name:
                    found.append((not room, node.lineno))
                case ast.keyword(arg=arg) if arg == name:
                    found.append((False, node.value.lineno))
                case ast.Dict(keys=keys):
                    found += [(False, k.lineno) for k in keys if isinstance(k, ast.Constant) and k.value == name]
    return f" in {file}" + (f", line {max(found)[1]}" if found else "")
