"""The safetensors format (https://github.com/huggingface/safetensors), read and written.

A file is 8 bytes that say how long the header is, the header in JSON (a tensor's name -> its dtype, shape and place)
and the numbers themselves, little-endian. Several files of one model are named by `model.safetensors.index.json`.
Files are mapped into memory, so that of a tensor nothing is read before it is used. Nothing in a file is ever run:
pickles, as in `pytorch_model.bin`, are refused by name.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model.errors import UserError

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
SHARD = 5 * 10**9  # bytes of a file, beyond which another is begun


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file

    def read(self) -> np.ndarray:
        """Its numbers, read as they are used."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)
        size = math.prod(self.shape) * self.dtype.itemsize
        return np.memmap(self.file, np.uint8, "r", self.begin, (size,)).view(self.dtype).reshape(self.shape)


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model, by name."""
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if (folder / ONE_FILE).is_file():
        return read_header(folder / ONE_FILE)
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickles:
        raise UserError(
            f"{folder} has {pickles[0]}, a pickle, which may run code when it is read, and no {ONE_FILE}; allowed: "
            "safetensors, as save_pretrained writes them"
        )
    raise UserError(f"no weights in {folder}: it has neither {ONE_FILE} nor {INDEX}")


def _read_shards(folder: Path) -> dict[str, Stored]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{folder / INDEX} is damaged: its weight_map names no files")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise UserError(f"{folder / INDEX} is damaged: {name!r} is no file of this folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder} is not whole: {INDEX} names {name}, which is not there")
        tensors |= read_header(folder / name)
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(f"{folder} is not whole: {INDEX} has {name} in {file}, which lacks it")
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Every tensor of one file. What the header says is held against the size of the file before it is believed."""

    def damaged(what: str) -> UserError:
        return UserError(f"{file} is damaged: {what}")

    size = file.stat().st_size
    with open(file, "rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, LONGEST_HEADER):
            raise damaged(f"{size:,} bytes are too few for its header, or it is no safetensors file")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError):
            raise damaged("its header is not JSON") from None
    if not isinstance(header, dict):
        raise damaged("its header is not an object of JSON")
    tensors, spans, start = {}, [], 8 + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
                type(n) is int and n >= 0 for n in shape
            ):
                pass
            case _:
                raise damaged(f"what its header says of {name} is {str(entry)[:60]}")
        if code not in DTYPES:
            raise UserError(f"{file} has {name} in {code}; allowed: {', '.join(DTYPES)}")
        if end - begin != math.prod(shape) * DTYPES[code].itemsize:
            raise damaged(f"{name} is {code} {shape}, and has {end - begin:,} bytes")
        tensors[name] = Stored(file, DTYPES[code], tuple(shape), start + begin)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            raise damaged(f"{name} begins at byte {begin:,} of the data, where {at:,} was due")
        at = end
    if start + at != size:
        raise damaged(f"it has {size:,} bytes, and by its header {start + at:,}")
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent} has no {file.name}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it holds {str(found)[:40]!r}, not an object")
    return found


@dataclass(frozen=True)
class Made:
    """A tensor to be written: what it will be, and its numbers once they are asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    numbers: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path, tensors: Iterable[Made], config: dict[str, Any], shard: int = SHARD) -> None:
    """A new folder with weights and `config.json`; one tensor is in memory at a time.

    All is written beside it under another name, so that it is there whole or not at all.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already, and not empty; give another folder")
    with whole(folder) as unfinished:
        parts = list(_shares(tensors, shard))
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        if len(parts) == 1:
            names = [ONE_FILE]
        else:
            places = {one.name: name for name, part in zip(names, parts, strict=True) for one in part}
            total = sum(one.bytes for part in parts for one in part)
            _write_json(unfinished / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        for name, part in zip(names, parts, strict=True):
            write_file(unfinished / name, part)
        _write_json(unfinished / "config.json", config)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which gets its name when the block ends and is removed where that fails."""
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        os.rename(unfinished, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_file(file: Path, tensors: Iterable[Made]) -> None:
    """One file of tensors, each asked for its numbers when its turn comes."""
    tensors, header, at = list(tensors), {"__metadata__": {"format": "pt"}}, 0
    for one in tensors:
        header[one.name] = {
            "dtype": CODES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.bytes],
        }
        at += one.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that numbers are aligned
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for one in tensors:
            numbers = np.asarray(one.numbers(), one.dtype, order="C")
            if numbers.shape != one.shape:
                raise ValueError(f"{one.name} was to be {one.shape}, and is {numbers.shape}")
            opened.write(numbers.reshape(-1).view(np.uint8).data)
        opened.flush()
        os.fsync(opened.fileno())


def _shares(tensors: Iterable[Made], limit: int) -> Iterator[list[Made]]:
    share: list[Made] = []
    for one in tensors:
        if share and sum(made.bytes for made in share) + one.bytes > limit:
            yield share
            share = []
        share.append(one)
    yield share


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
