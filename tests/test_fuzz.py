"""Hundreds of wrong command lines: each ends in one line and exit code 2 before anything is built or written."""

import itertools
import json
import shutil
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

import data
from model.build import KINDS
from model.mixers import MIXERS
from model.positions import POSITIONS
from tests.processes import ROOT, refusals
from train import config as configs
from train.objectives import OBJECTIVES
from train.run import prepare

pytestmark = pytest.mark.scale

DEBUG = "configs/debug.py"
HUGE = "9" * 20
ENDLESS = "9" * 5000  # digits, more than Python reads
LONG = "x" * 5000  # letters, more than a file's name has


# From what is declared


@cache
def every_setting() -> tuple[tuple[tuple[str, ...], str, Any], ...]:
    """(flags that bring it, dotted key, type) of every setting there is."""
    choices = [
        (),
        *(("model.position=none", f"model.mixers={name}") for name in MIXERS),
        *((f"model.position={name}",) for name in POSITIONS),
        *((f"data.task={name}",) for name in data.TASKS),
        *((f"model.kind={name}",) for name in KINDS),
        *((f"objective.kind={name}",) for name in OBJECTIVES),
    ]
    seen, found = set(), []
    for choice in choices:
        config = configs.load(DEBUG, [item.split("=") for item in choice])
        for key, field in configs.declared(config).items():
            if key not in seen:
                found.append((tuple(f"--config.{item}" for item in choice), key, field.type))
            seen.add(key)
    return tuple(found)


def wrong(kind: Any) -> list[str]:
    """What no setting of a type may be, as it is typed; numbers below -1 and names such as `nonsense` are never."""
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    texts = [] if len(kinds) > 1 else ["None"]
    inner = [get_args(one)[0] if get_origin(one) is Annotated else one for one in kinds]
    if any(one is str for one in inner):
        return []
    if any(get_origin(one) is tuple for one in inner):
        if str in get_args(kind):
            return [*texts, "1.5", "(1,)", "{1:2}"]
        if get_args(get_args(kind)[0])[:1] == (float,):
            return [*texts, "fast", "-2", "(1.5,0)", "((1,),)", "(((", "(1,None)", "{1:2}"]
        return [*texts, "1.5", "((1,),)", "(((", "(1,2.5)", f"({HUGE},)", "{1:2}"]
    if bool in (*inner, *get_args(kind)):
        return [*texts, "2", "maybe", "", "1.0"]
    if float in inner:
        return [*texts, "fast", "nan", "inf", "-2", "1e400", "-1e400", "1e39", "", "(0.5,)", "True", "1j", ENDLESS]
    if all(isinstance(name, str) for one in inner if get_origin(one) is Literal for name in get_args(one)):
        texts += ["nonsense", "ünï", "", "1.5", "('a',)"]
    return [*texts, "many", "1.5", "nan", "-2", HUGE, f"-{HUGE}", "", "True", "(1,2)", "1e400", "0x" + "f" * 5000]


def from_declarations() -> list[list[str]]:
    """Four of the wrong values of each setting, all of them in turn."""
    turns: dict[str, Iterator[str]] = {}
    lines = []
    for flags, key, kind in every_setting():
        turn = turns.setdefault(str(wrong(kind)), itertools.cycle(wrong(kind)))
        texts = {text for _, text in zip(range(4), turn, strict=False)}
        lines += [[f"--config={DEBUG}", "--workdir=w", *flags, f"--config.{key}={text}"] for text in sorted(texts)]
    return lines


# By hand


def overrides(*items: str) -> list[list[str]]:
    return [[f"--config={DEBUG}", "--workdir=w", *(f"--config.{part}" for part in item.split())] for item in items]


HEAD = "from configs import base\n\n\ndef get_config():\n    c = base.get_config()\n"
FILES = {
    "raises.py": f"{HEAD}    c.steps = 1 // 0\n    return c\n",
    "syntax.py": "def get_config(:\n",
    "imports.py": "\nimport nowhere\n",
    "exits.py": "import sys\n\nsys.exit(0)\n",
    "bare.py": f"{HEAD}    return c\n",
    "needs.py": "def get_config(a, b):\n    return a\n",
    "returns.py": "def get_config():\n    return 5\n",
    "nothing.py": "x = 1\n",
    "constant.py": "get_config = 5\n",
    "key.py": f"{HEAD}    c.optim.lrr = 1.0\n    return c\n",
    "value.py": f"{HEAD}    c.optim.lr = -1.0\n    return c\n",
    "type.py": f"{HEAD}    c.optim.lr = 'fast'\n    return c\n",
    "section.py": f"{HEAD}    c.optim = 5\n    return c\n",
    "number.py": "def get_config():\n    return {1: 2}\n",
    "list.json": "[]",
    "five.json": "5",
    "null.json": "null",
    "text.json": '"a"',
    "open.json": "{",
    "empty.json": "",
    "dots.json": '{"a.b": 1}',
    "nan.json": '{"optim": {"lr": NaN}}',
    "huge.json": f'{{"steps": {HUGE}}}',
    "deep.json": "[" * 100_000,
    "deeper.json": f'{{"optim": {{"lr": {"[" * 500}{"]" * 500}}}}}',
    "sections.json": '{"a":' * 400 + "1" + "}" * 400,
    "nested.json": '{"steps": {"a": 1}}',
    "latin.json": b'{"a": "\xff"}',
    "latin.py": b'x = "\xff"\n',
    "notes.txt": "hello",
}
TRAIN = [
    [],
    ["--workdir=w"],
    ["--config=", "--workdir=w"],
    [f"--config={DEBUG}"],
    [f"--config={DEBUG}", "--workdir="],
    [f"--config={DEBUG}", "--workdir", "  "],
    [f"--config={DEBUG}", "--workdir"],
    [f"--config={DEBUG}", "--workdir=notes.txt"],
    [f"--config={DEBUG}", "--workdir=notes.txt/x"],
    [f"--config={DEBUG}", f"--workdir={LONG}"],
    [f"--config={DEBUG}", "--workdir=gs://bucket/x"],
    *(
        [f"--config={DEBUG}", "--workdir=w", f"--profile={text}"]
        for text in ("", "5", "0:1", "1:0", "5:x", "5000:1", HUGE)
    ),
    *([f"--config={DEBUG}", "--workdir=w", word] for word in ("extra", "--nonsense", "-x", "--verbosity=loud")),
    *([f"--config={DEBUG}", "--workdir=w", word] for word in ("--flagfile=nowhere", "--distributed=perhaps")),
    [f"--config={DEBUG}", "--workdir=w", "--stderrthreshold=loud"],
    *([f"--config={DEBUG}", "--workdir=w", f"--config.{word}"] for word in ("", "=5", "steps", ".=5", "optim.=5")),
    *([f"--config={DEBUG}", "--workdir=w", f"--config.{word}=5"] for word in ("optim", "optim.lr.x", "ünï", "lr\n")),
    *([f"--config={DEBUG}", "--workdir=w", f"--override={word}"] for word in ("", "steps", "=")),
    *([f"--config={file}", "--workdir=w"] for file in ("configs", "/dev/null", LONG, ":arch=mamba", "nowhere.py")),
    *([f"--config={DEBUG}:{word}", "--workdir=w"] for word in ("arch", "arch=", "=3", "arch=mamb", "size=3")),
    *([f"--config=configs/recall.py:width={n}", "--workdir=w"] for n in ("0", "-1", HUGE, ENDLESS, "²", "1.5", "")),
    *([f"--config=configs/{name}.py", "--workdir=w"] for name in ("argument", "archs")),
    ["--config=configs/synthetic.py:task=listops", "--workdir=w"],
    ["--config=bare.py:arch=mamba", "--workdir=w"],
    *([f"--config={name}", "--workdir=w"] for name in FILES if name != "bare.py"),
    *overrides(
        *(
            f"optim.{name}={value}"
            for name in ("lr", "weight_decay", "clip", "ssm_lr", "eps")
            for value in (-1, "1e400")
        ),
        *(f"optim.{name}={value}" for name in ("b1", "b2") for value in (1, 1.5, -0.1, 0.99999999999)),
        *("optim.eps=0", "optim.eps=1e-60", "optim.lr=1e39", "optim.final_lr=2", "optim.warmup=-1"),
        *("seed=-1", "seed=4294967296", "data.seed=-1", "target=5", "target=-0.1", "keep=0", "steps=0", "log_every=0"),
        *("model.width=0", "model.layers=-1", "model.mlp_width=-4", "model.dropout=1", "model.width=2147483647"),
        *("model.attention.window=1.5", "model.attention.window=abc", "model.attention.window=0"),
        *("model.attention.n_heads=0", "model.attention.n_heads=5", "model.attention.n_kv_heads=-1"),
        *("model.mixers=()", "model.mixers=", "model.mixers=cross_attention", "model.mixers=mamba,mambo"),
        *("mesh.tensor=0", "mesh.data=-2", "mesh.tensor=3", "optim.accumulate=0", "optim.accumulate=3"),
        *("test_lengths=0", "test_lengths=-4", "test_lengths=33", "test_lengths=32,long", f"test_lengths={HUGE}"),
        *(f"mesh.rules={rules}" for rules in ("5", "((1,2),)", "(('batch',),)", "(('batch','data'),)")),
        *(f"mesh.rules={rules}" for rules in ("(('batch',('data','data')),)", "(('mlp',()),('mlp',('data',)))")),
        *(f"mesh.rules={rules}" for rules in ("(('batch',('dta',)),)", "(('bacth',('data',)),)", "((5,('data',)),)")),
        *(f"steps={text}" for text in (ENDLESS, "(" * 5000, "{[]:1}", "[" * 5000, "-", "\\", "'")),
        *(f"data.task=text data.text.path={path}" for path in ("", "nowhere", "empty", "~nobody/x", LONG)),
        *(f"data.task=listops data.listops.max_{name}=100000000" for name in ("depth", "args")),
        *("data.task=reverse", "model.kind=encoder_decoder data.task=listops", "model.kind=encoder"),
        *("model.kind=encoder_decoder model.mixers=mamba", "model.encoder_layers=2", "model.encoder_mixers=gru"),
        "model.kind=encoder_decoder data.task=dates model.position=learned model.learned.max_len=39",
        *("data.mqar.length=31", "data.mqar.n_pairs=9", "data.mqar.vocab_size=5", "resume_safe=(1,2)", "resume_safe=5"),
    ),
]
GENERATE = ["--workdir=run", "--suite=generate"]
EVAL = [
    ["--workdir=gs://bucket/x"],
    [],
    *([f"--workdir={name}"] for name in ("", " ", "nowhere", "notes.txt", "empty", LONG)),
    ["--workdir=run", "extra"],
    ["--workdir=run", "--nonsense"],
    *([*GENERATE, f"--tokens={text}"] for text in ("-1", "0", "x", "1.5", "", HUGE)),
    *([*GENERATE, f"--temperature={text}"] for text in ("-1", "nan", "inf", "-inf", "1e400", "x", "")),
    *([*GENERATE, f"--top_k={text}"] for text in ("-1", "x", "1.5", "", HUGE)),
    *([*GENERATE, f"--top_p={text}"] for text in ("-1", "0", "1.5", "nan", "inf", "x", "")),
    *([*GENERATE, f"--seed={text}"] for text in ("-1", "x", "1.5", "", HUGE)),
    *(["--workdir=run", f"--suite={text}"] for text in ("", "accurac", "ünï")),
    *(["--workdir=run", f"--step={text}"] for text in ("", "-1", "lates", "1.5", "²", "None", HUGE, ENDLESS)),
    *(["--workdir=run", f"--split={text}"] for text in ("", "valid", "1")),
    *(["--workdir=run", "--suite=attention", f"--examples={text}"] for text in ("0", "-1", "x", "1.5", "", HUGE)),
    ["--workdir=run", "--tokens=3"],
    [*GENERATE, "--split=test"],
]
SWEPT = [f"--config={DEBUG}", "--out=o"]
SWEEP = [
    [],
    [f"--config={DEBUG}"],
    ["--out=o"],
    ["--config=", "--out=o"],
    *([f"--config={DEBUG}", f"--out={out}"] for out in ("", "notes.txt", "notes.txt/x", LONG, "gs://b/x")),
    *([f"--config={file}", "--out=o"] for file in ("nowhere.py", "raises.py", "syntax.py", "list.json", "configs")),
    *([*SWEPT, f"--jobs={text}"] for text in ("0", "-1", "x", "1.5", "", HUGE)),
    *([*SWEPT, f"--seeds={text}"] for text in ("0", "-3", "x", "1.5", "", "2147483647", HUGE)),
    [*SWEPT, *(f"--grid=optim.{key}={','.join(map(str, range(1, 101)))}" for key in ("warmup", "lr")), "--seeds=11"],
    *([*SWEPT, f"--launcher={text}"] for text in ("slrum", "")),
    [*SWEPT, "--launcher=slrum"],
    [*SWEPT, "--jobs=0", "--launcher=print"],
    [*SWEPT, "--launcher="],
    [*SWEPT, "extra"],
    [*SWEPT, "--nonsense"],
    *([*SWEPT, f"--grid={text}"] for text in ("", "=1", "optim.lr", "optim.lr=", "optim.lr=1,,2", "optim.lr=-1")),
    *([*SWEPT, f"--grid={text}"] for text in ("optim.lrr=1", "model.width=0", "steps=(", "steps='", "seed=-1")),
    *([*SWEPT, f"--grid=steps={text}"] for text in (HUGE, ENDLESS, "(" * 5000, "None", "1,0")),
    *([*SWEPT, f"--grid=:{text}"] for text in ("arch=mamb", "size=3", "=3")),
    *([*SWEPT, f"--grid=model.attention.window={text}"] for text in ("abc", "1.5")),
    [*SWEPT, "--grid=optim.lr=1", "--grid=optim.lr=2"],
    [*SWEPT, "--grid=seed=1,2", "--seeds=2"],
    *([*SWEPT, f"--zip={text}"] for text in ("", "optim.lr=1,2;steps=1", "optim.lr")),
    *([*SWEPT, f"--list={text}"] for text in ("", ";", "optim.lr=1,optim.lr=2")),
    *([*SWEPT, f"--config.{text}"] for text in ("optim.lr=-1", "steps=0", "optim.lrr=1", "target=5", "model.mixers=1")),
]
REPRODUCE = [
    [],
    *([name] for name in ("", "quickstrat", "ünï")),
    ["--out=o"],
    ["quickstart", "extra"],
    ["quickstart", "--launcher=local"],
    *(["quickstart", f"--scale={text}"] for text in ("smok", "", "paper")),
    *(["quickstart", f"--jobs={text}"] for text in ("0", "x", "", HUGE)),
    *(["quickstart", f"--out={text}"] for text in ("", "notes.txt", "notes.txt/x", LONG, "gs://b/x")),
    *(["quickstart", f"--config.{text}"] for text in ("steps=0", "steps=", "lr=1", "optim.lr=-1", "seed=-1")),
]
ROWS = "--rows=rows.jsonl"
REPORT = [
    [],
    ["extra"],
    *([f"--rows={name}"] for name in ("", "nowhere", "empty", "notes.txt", "latin.json", "five.json", "null.json")),
    *([f"--rows={name}"] for name in ("list.json", "deep.json", "empty.json", "key.jsonl", "labels.jsonl", LONG)),
    ["--rows=words.jsonl"],
    *([f"--dir={name}"] for name in ("", "nowhere", "notes.txt", "empty", LONG)),
    [ROWS, "--dir=empty"],
    *([ROWS, f"--out={name}"] for name in ("", "notes.txt", "notes.txt/x")),
    *([ROWS, f"--{flag}=nonsense"] for flag in ("by", "across", "tune", "metric")),
    *([ROWS, word] for word in ("--metric=", "--across=", "--config.steps=3", "--nonsense", "--by=,")),
]
OVERVIEW = [
    [],
    ["extra"],
    *([f"--dir={name}"] for name in ("", "nowhere", "notes.txt", "empty", LONG)),
    *(["--dir=empty", word] for word in ("--nonsense", "--config.steps=3", "--rows=words.jsonl")),
]
NO_CONFIG = ("scan", "attention", "features", "scaling")
BENCH = [
    [],
    ["lop"],
    ["loop", "extra"],
    ["loop", "--nonsense"],
    *(["loop", f"--steps={text}"] for text in ("0", "1", "-1", "x", "")),
    *([name, f"--rounds={text}"] for name in ("loop", "scan", "attention") for text in ("0", "-1", "x", "")),
    *([name, f"--out={text}"] for name in ("loop", "startup", "scan") for text in ("empty", "notes.txt/x", "")),
    *([name, "--out=/proc/x"] for name in ("loop", "scan", "determinism")),
    *([name, f"--config={text}"] for name in ("loop", "startup") for text in ("nowhere.py", "", "raises.py")),
    *([name, f"--config.{text}"] for name in ("loop", "startup") for text in ("lr=1", "steps=x", "optim.lr=-1")),
    *(["attention", f"--only={text}"] for text in ("", "case", "case=", "kase=fire", "case=fir", "n=7", "contender=x")),
    *([name, "--only=case=attention"] for name in ("loop", "kernels", "scaling")),
    *(["state", f"--only=contender={kind}"] for kind in ("hed", "head")),  # the last: there is no GPU here
    *(["attention", word] for word in ("--kills=2", "--mixed", "--minutes=3")),
    *([name, word] for name in NO_CONFIG for word in ("--config.steps=3", f"--config={DEBUG}")),
    *(["scaling", f"--minutes={text}"] for text in ("0", "-1", "x", "")),
    *(["scaling", f"--mixers={text}"] for text in ("", "mambo", "mamba,", "cross_attention")),
    *(["scaling", f"--longest={text}"] for text in ("0", "1023", "x", "", HUGE)),
    *(["scaling", f"--out={text}"] for text in ("empty", "notes.txt", "notes.txt/x", "")),
]
LIST = [["extra"], [""], ["a", "b"], ["--nonsense"], [f"--config={DEBUG}"], ["--config.steps=3"], ["--workdir=w"]]
PACK = [
    [],
    ["run"],
    ["--out=new"],
    ["run", "empty", "--out=new"],
    *([name, "--out=new"] for name in ("", "nowhere", "notes.txt", "empty", "run", LONG)),
    *([name, "--unpack", "--out=new"] for name in ("", "nowhere", "notes.txt", "empty", "run", LONG)),
    *(["run", f"--out={name}"] for name in ("", "notes.txt", "notes.txt/x", "run", ".")),
    *(["run", "--out=new", f"--size-mib={text}"] for text in ("0", "-1", "x", "", "1.5", HUGE)),
    *(["run", "--out=new", word] for word in ("--checkpoints=none", "--config.steps=3", "--nonsense")),
]
PREPARE = [
    [],
    ["--root=downloads"],
    *([name] for name in ("", "mnis", "ünï", ENDLESS, "--nonsense")),
    ["mnist", "mnits"],
    *(["mnist", f"--root={text}"] for text in ("", "notes.txt", "notes.txt/x", "/proc/x", LONG)),
]
POD = [f"--config={DEBUG}", "--workdir=/runs/a", "--topology=v5e:16x16", "--image=longview"]
LAUNCH = [
    [],
    POD,
    *([name, *POD] for name in ("", "gk", "ünï", "gcloud")),
    ["gke", "extra", *POD],
    *(["gke", *POD[:i], *POD[i + 1 :]] for i in range(4)),
    *(["gke", *POD, f"--config={text}"] for text in ("", "nowhere.py", "/etc/passwd", LONG)),
    *(
        ["gke", *POD, f"--workdir={text}"]
        for text in ("", "a", "/", "/a", "gs://a/b", "/a/../b", "/a b/c", "/a/b\n", "/ü/a")
    ),
    *(["gke", *POD, f"--topology={text}"] for text in ("", "v5e", "v5:16x16", "v5e:3x3", "0xv5e:16x16", "cpu:8", HUGE)),
    *(["gke", *POD, f"--image={text}"] for text in ("", "a b", "a'b", "a;b")),
    *(["gke", *POD, f"--name={text}"] for text in ("", "A", "a_b", "1", "-", "a" * 41)),
    *(["gke", *POD, f"--storage={text}"] for text in ("A", "gs://b", "a b")),
    *(["gke", *POD, word] for word in ("--spot=maybe", "--zone=a b", "--nonsense", "--config.steps=0")),
]
LINES = {
    "train": TRAIN + from_declarations(),
    "eval": EVAL,
    "experiments.sweep": SWEEP,
    "experiments.reproduce": REPRODUCE,
    "experiments.report": REPORT,
    "experiments.overview": OVERVIEW,
    "experiments.bench": BENCH,
    "experiments.list": LIST,
    "experiments.pack": PACK,
    "experiments.launch": LAUNCH,
    "data.prepare": PREPARE,
}


def test_there_are_many():
    assert sum(map(len, LINES.values())) >= 400
    assert len({str(line) for line in from_declarations()}) == len(from_declarations()) > 300


@pytest.mark.parametrize("module", LINES)
def test_a_wrong_command_line_ends_in_one_line(module, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    shutil.copy(ROOT / "experiments/results/recall/rows.jsonl", tmp_path)
    (tmp_path / "key.jsonl").write_text("{}\n")
    row = {"run": "a", "status": "finished", "labels": {}, "seed": 0}
    (tmp_path / "words.jsonl").write_text(json.dumps(row | {"metrics": {"test/accuracy": "high"}}))
    (tmp_path / "labels.jsonl").write_text(json.dumps(dict(run="a", status="finished", labels=5, metrics={})))
    wrongly = [
        (words, end)
        for words, end in zip(LINES[module], refusals(module, LINES[module], tmp_path), strict=True)
        if (end["code"], end["stdout"], end["wrote"]) != (2, "", [])
        or not end["stderr"].startswith("error: ")
        or end["stderr"].count("\n") != 1
    ]
    assert not wrongly, "\n".join(
        f"{' '.join(words)[:200]}: {end['code']} {end['stderr'][-300:]}" for words, end in wrongly[:20]
    )


# What is right must pass: bounds are not too tight


EDGES = {
    "the least": "steps=1 batch_size=8 log_every=1 eval_every=0 eval_batches=1 checkpoint_every=0 keep=1 target=0 "
    "optim.lr=0 optim.warmup=0 optim.weight_decay=0 optim.b1=0 optim.b2=0 optim.eps=1e-30 optim.clip=0 optim.ssm_lr=0 "
    "model.layers=1 model.mlp_width=1 model.dropout=0 model.attention.window=1 max_rollbacks=0",
    "the most": "steps=2147483647 log_every=2147483647 optim.lr=1e30 optim.b1=0.99999 optim.b2=0.99999 target=1 "
    "seed=4294967295 data.seed=4294967295 model.dropout=0.99 optim.final_lr=1 optim.warmup=2147483647",
    "no window, no implementation": "model.attention.window=None model.attention.implementation=None",
    "other spellings": "steps=1e3 optim.lr=1 model.mixers=('attention','attention') model.causal=true test_lengths=32",
}


@pytest.mark.parametrize("edge", EDGES)
def test_the_edges_of_what_is_allowed(edge):
    prepare(configs.load(DEBUG, [item.split("=") for item in EDGES[edge].split()]))
