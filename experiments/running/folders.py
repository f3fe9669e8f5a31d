"""A run's folder: the only thing experiments know a run by.

Training writes `config.json`, `metrics.jsonl` and, once finished, `result.json`. A sweep adds `run.json`
(what it asks for), `log.txt` (what training printed), `failed.json` (how it last ended, if badly) and `restarts.json`
(how often it was started again without coming further).
"""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.running.runs import RunSpec
from model.errors import UserError
from train import workdir
from train.manifest import steps


def make(folder: Path) -> None:
    """A folder to write into, which may be there already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; give another --out") from error


def check_writable(file: Path) -> None:
    """Refuses a file that `write_text` cannot replace, before there is anything to write; leaves it as it is."""
    try:
        for path in (file, file.with_name(f"{file.name}.tmp")):
            there = path.exists()
            with path.open("a"):
                pass
            if not there:
                path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; give another --out") from error


def claim(folder: Path, run: RunSpec, config_hash: str) -> None:
    """Makes a run's folder and notes in it what was asked for, so that a run that never starts is missed."""
    make(folder)
    write_json(folder / "run.json", {**asdict(run), "config_hash": config_hash})


def finished(folder: Path) -> bool:
    return (folder / "result.json").exists()


def strayed(folder: Path) -> bool:
    """Whether the result is of another config than was asked for: a config file was edited meanwhile."""
    asked, result = (read_json(folder / name, config_hash=str) for name in ("run.json", "result.json"))
    return bool(asked and result) and asked["config_hash"] != result["config_hash"]


def in_use(folder: Path) -> bool:
    """Whether some process is training there now: training holds a lock on `.lock` as long as it lives."""
    try:
        with (folder / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never trained there, or a file system without locks
        return False
    return False


def last_line(path: Path, size: int = 4096) -> str:
    """The last line of a text file that is not blank, or nothing."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def saved(folder: Path) -> int:
    """The newest step that a run would resume from; 0 where there is none."""
    return max(steps(folder / "checkpoints"), default=0)


def position(folder: Path) -> dict[str, Any]:
    """Where a run is: its newest metrics line, and in `steps` how far it will go; empty at first."""
    try:
        newest = dict(json.loads(last_line(folder / "metrics.jsonl")))
    except (ValueError, TypeError, RecursionError):  # none yet, or caught in the middle of a write
        return {}
    return {"steps": (read_json(folder / "config.json") or {}).get("steps"), **newest}


def read_json(path: Path, **kinds: type) -> dict | None:
    """As `train.workdir.read_json`; None where there is no such file."""
    return workdir.read_json(path, **kinds) if path.exists() else None


def write_json(path: Path, value: dict) -> None:
    """As `train.workdir.write_json`, where another sweep may write the same file at the same time."""
    workdir.write_json(path, value, ending=f".{os.getpid()}.tmp")
