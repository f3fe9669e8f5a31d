"""What a user types: every mistake ends in one line and exit code 2; every command on the pages runs."""

import ast
import re
import sys
from pathlib import Path

import pytest

from model.command import run as run_main
from model.errors import LESS_MEMORY, NoRoom, UserError
from tests.pages import PAGES
from tests.processes import ROOT, fork, run

CONFIG = "--config=configs/debug.py"


MISTAKES = {
    "an unknown key": (["--config.optim.lrr=1"], "unknown config key 'optim.lrr'.*closest: optim.lr"),
    "an unknown section": (
        ["--config.modle.width=1"],
        "unknown config key 'modle.width'.*closest: model.width",
    ),
    "another task's key": (
        ["--config.data.text.path=x"],
        "unknown config key 'data.text.path': data.task is 'mqar', .* closest: data.task=text",
    ),
    "another mixer's key": (["--config.model.mamba.state=8"], "model.mixers is .*attention.*, .*model.mixers=mamba"),
    "an argument of the file": (["--config.arch=mamba"], "an argument of config files, .*--config=FILE.py:arch=mamba"),
    "a wrong type": (["--config.steps=many"], "steps is 'many'; allowed: a whole number from 1 to .*usual: 1000"),
    "an unknown flag": (["--workdri=x"], "unknown flag --workdri; closest: --workdir"),
    "an unknown mixer": (
        ["--config.model.mixers=mambo"],
        r"model.mixers is \('mambo',\); allowed: .*closest: \('mamba',\)",
    ),
    "an unknown position": (["--config.model.position=ropy"], "model.position is 'ropy'; allowed: .*closest: rope"),
    "an unknown task": (["--config.data.task=mqr"], "data.task is 'mqr'; allowed: .*closest: mqar"),
    "heads": (
        ["--config.model.attention.n_heads=5"],
        "n_heads 5 does not divide model.width 32; closest that does: 4",
    ),
    "a learned table": (
        ["--config.model.position=learned", "--config.model.learned.max_len=8"],
        "length 32 is past the learned position table of 8",
    ),
    "the mesh": (["--config.mesh.tensor=3"], "mesh .*tensor=3.* there are 1"),
    "no text": (["--config.data.task=text"], "text"),
    "an absent text": (["--config.data.task=text", "--config.data.text.path=nowhere.txt"], "nowhere.txt"),
    "an unknown objective": (
        ["--config.objective.kind=maskd"],
        "objective.kind is 'maskd'; allowed: task, .*closest: masked",
    ),
    "an objective of text": (
        ["--config.objective.kind=infilling"],
        "'infilling' needs running text, and task 'mqar' has none; .*closest: objective.kind=task",
    ),
    "a schedule": (["--config.optim.schedule=cosin"], "optim.schedule is 'cosin'; allowed: .*closest: cosine"),
    "accumulation": (["--config.optim.accumulate=3"], "optim.accumulate 3 does not divide batch_size 16"),
    "a policy": (["--config.nonfinite=ignore"], "nonfinite is 'ignore'; allowed: stop, skip, rollback; usual: stop"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_config(mistake, tmp_path):
    flags, words = MISTAKES[mistake]
    command = fork("train", CONFIG, f"--workdir={tmp_path / 'run'}", *flags)
    code, lines = command.wait(), command.stderr.strip().splitlines()
    assert code == 2 and len(lines) == 1 and re.search(words, lines[0]), command.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", ["train", "eval"])
def test_a_mistake_as_a_shell_sees_it(module):
    done = run(module, "--workdri=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown flag --workdri; closest: --workdir\n"


@pytest.mark.parametrize(
    "words,answer",
    [
        (
            ["train", "--config=configs/debg.py", "--workdir=x"],
            "no config file 'configs/debg.py'; closest: configs/debug.py",
        ),
        (
            ["train", "--config=configs/debug.py:arch=mamb", "--workdir=x"],
            "unknown arch 'mamb'.*closest: mamba",
        ),
        (["train", "--config=configs/debug.py:size=3", "--workdir=x"], "unknown config argument 'size=3'"),
        (
            ["train", "--config=configs/debug.py:arch=s4d,arch=gru", "--workdir=x"],
            "argument arch is given twice, as 's4d'",
        ),
        (["train", "--config=configs/recall.py:width=wide", "--workdir=x"], "width is 'wide'; it takes a whole number"),
        (["train", "--config=configs/recall.py:pairs=14", "--workdir=x"], "pairs 14; .* 4, 8, 16, 64; closest: 16"),
        (["train", CONFIG], "--workdir is missing"),
        (["train", CONFIG, "--workdir=LICENSE"], "LICENSE"),
        (["experiments.reproduce", "quickstrat"], "unknown table 'quickstrat'.*closest: quickstart"),
        (["eval", "--workdir=nowhere"], "nowhere"),
    ],
)
def test_mistakes_on_the_command_line(words, answer):
    command = fork(*words)
    assert command.wait() == 2 and re.search(answer, command.stderr), command.stderr
    assert "Traceback" not in command.stderr, command.stderr


def command_files() -> dict[str, Path]:
    """Module -> file of everything that `python -m` starts."""
    rooms = ("train", "eval", "data", "experiments")
    files = [
        path for room in rooms for path in (ROOT / room).rglob("*.py") if '__name__ == "__main__"' in path.read_text()
    ]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)
    return dict(zip((name.removesuffix(".__main__") for name in names), files, strict=True))


def flags_of(file: Path) -> set[str]:
    """The flags that a file defines, or takes along from another, by the first argument of the call that does."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call.args[0]) for call in calls]
    makes = re.compile("flag|declare_key_flag|DEFINE_.*")
    return {first.value for how, first in named if makes.fullmatch(how) and isinstance(first, ast.Constant)}


@pytest.mark.parametrize("module, file", command_files().items(), ids=command_files())
def test_help_lists_every_flag(module, file):
    wanted = flags_of(file)
    command = fork(module, "--help")
    assert command.wait() == 0 or not wanted  # what Slurm starts has no flags, and no help
    listed = re.findall(r"^  --(?:\[no\])?([\w-]+): \w", command.stdout, flags=re.MULTILINE)
    assert set(listed) == wanted, command.stdout + command.stderr
    takes_a_config = "cli.overrides()" in file.read_text() and module != "experiments.pack"  # which refuses them
    assert ("override" in wanted) == takes_a_config


LACKING = RuntimeError("Unable to initialize backend 'cuda': no GPU\n(set JAX_PLATFORMS='')")


@pytest.mark.quick
@pytest.mark.parametrize(
    "error, code, told",
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (LACKING, 2, "error: Unable to initialize backend 'cuda': no GPU (set JAX_PLATFORMS='')\n"),
        (MemoryError("a"), 1, f"error: out of memory: a; {LESS_MEMORY}\n"),
        (NoRoom("out of memory: a; lower b"), 1, "error: out of memory: a; lower b\n"),
        (UserError("batch_size is\n  3"), 2, "error: batch_size is 3\n"),
        (OSError("not a gzipped file"), 2, "error: not a gzipped file\n"),
        (OSError(28, "No space left on device", "runs/a"), 2, "error: cannot use runs/a: No space left on device\n"),
    ],
)
def test_what_is_no_mistake_of_ours_ends_in_one_line(error, code, told, capsys, monkeypatch):
    def main(argv):
        raise error

    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises((SystemExit, type(error))) as end:
        run_main(main)
    assert end.type is SystemExit and (end.value.code, capsys.readouterr().err) == (code, told)


def readme_commands() -> list[str]:
    """Commands in the shell blocks of all pages, continuation lines joined."""
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_in_the_readme_is_run_somewhere():
    """`make` targets are what CI runs; each `python -m` line is run below, at a small size."""
    for command in readme_commands():
        assert command.startswith(("make ", "python -m ", "git ", "cd ", "pip ")), command
        if command.startswith("python -m "):
            assert any(command.startswith(f"python -m {name}") for name in SMALL), command


# How to make a README command small enough for a test: extra flags, by module.
SMALL = {
    "train": ["--config.steps=2", "--config.eval_batches=1", "--config.batch_size=4"],
    "eval": ["--config.eval_batches=1"],
    "data.prepare": ["--help"],
    "experiments.list": [],
    "experiments.sweep": ["--launcher=print"],
    "experiments.reproduce": ["--help"],
    "experiments.report": ["--help"],
    "experiments.overview": [],
    "experiments.bench": ["--help"],
    "experiments.pack": [],
    "experiments.launch": [],
}
# And by what a command says.
SHORTER = {"--suite=context": "--targets=8", "train --config=configs/seq2seq.py": "--config.test_lengths=()"}


@pytest.mark.scale
@pytest.mark.long
def test_the_readme_commands_work(tmp_path):
    """In order, in one place, as a newcomer would paste them; folders moved under the test's own."""
    modules = set()
    for command in readme_commands():
        if not command.startswith("python -m "):
            continue
        words = re.findall(r'(?:[^\s"]|"[^"]*")+', command)[2:]
        words = [re.sub(r"\bruns/", f"{tmp_path}/runs/", word).replace('"', "") for word in words]
        if any("--distributed" in word for word in words):
            words = [word for word in words if "--distributed" not in word and "mesh" not in word]
        shorter = [flag for part, flag in SHORTER.items() if part in command]
        smaller = [] if "--compile_only" in words else SMALL[words[0]]  # of which nothing is run
        module, words = words[0], [*words, *smaller, *shorter]
        if module not in modules:  # each module once by an interpreter of its own
            done = run(*words)
            code, told = done.returncode, done.stderr
        else:
            done = fork(*words)
            code, told = done.wait(), done.stderr
        assert code == 0, (command, told)
        modules.add(module)
