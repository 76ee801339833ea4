"""Config files that raise, miss something or hold what cannot be: a sentence, and their own traceback."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest.mock import patch

import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.fields import check_fields
from tests.support.commands import train as main

ROOT = Path(__file__).parents[2]

START = """\
from configs.quickstart import get_config as quickstart
from dataclasses import dataclass, replace
"""

FILES = {
    "import": (
        "import no_such_module",
        "the file raised ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "syntax": ("def get_config(:", "the file raised SyntaxError: invalid syntax"),
    "bytes": ("\0", "the file raised"),
    "name": ("steps = unknown + 1", "the file raised NameError: name 'unknown' is not defined"),
    "exit": ("import sys\nsys.exit(0)", r"the file called sys.exit\(0\)"),
    "raises": ("def get_config():\n    return 1 / 0", r"get_config\(\) raised ZeroDivisionError"),
    "ends": ("def get_config():\n    return next(iter(()))", r"get_config\(\) raised StopIteration"),
    "exits": ("def get_config():\n    raise SystemExit('bye')", r"get_config\(\) called sys.exit\('bye'\)"),
    "argument": ("def get_config(size):\n    return size", r"get_config\(\) raised TypeError: .* 'size'"),
    "recursion": ("def get_config():\n    return get_config()", r"get_config\(\) raised RecursionError"),
    "nothing": ("def get_config():\n    pass", r"get_config\(\) returned None \(is a `return` missing\?\)"),
    "number": ("get_config = 3", r"has no function get_config\(\)"),
    "bind": (
        f"{START}\nimport os\nos.environ['RRFP_BIND'] = '127.0.0.1'\nget_config = quickstart",
        "own.py: sets RRFP_BIND, but this process has joined its run already: set such variables",
    ),
    "class": (
        f"{START}\ndef get_config():\n    return type(quickstart())()",
        r"get_config\(\) raised TypeError",
    ),
    "type": (
        f"{START}\ndef get_config():\n    return replace(quickstart(), steps='3')",
        "steps='3': is of type str",
    ),
    "unknown": (
        f"{START}\ndef get_config():\n    return replace(quickstart(), stps=3)",
        r"Quickstart\(stps=3\): no such argument; did you mean steps=\?",
    ),
    "pipeline": (
        f"{START}\n@dataclass(frozen=True, kw_only=True)\nclass Own(type(quickstart())):\n"
        "    def pipeline(self):\n        return {}['layers']\n"
        "def get_config():\n    return Own(**vars(quickstart()))",
        r"Own.pipeline\(\) raised KeyError: 'layers'",
    ),
    "data": (
        f"{START}\n@dataclass(frozen=True, kw_only=True)\nclass Own(type(quickstart())):\n"
        "    def train_data(self):\n        return open('/no/such/file')\n"
        "def get_config():\n    return Own(**vars(quickstart()))",
        r"Own.train_data\(\) raised FileNotFoundError",
    ),
}


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_work_gets_a_sentence_and_its_own_traceback(name, tmp_path, capsys):
    text, said = FILES[name]
    file = tmp_path / "own.py"
    file.write_text(text)
    with patch.dict(os.environ):
        status = main([f"--config={file}"])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    first, *frames = err.splitlines()
    assert re.search(said, first), err
    shown = {line.split('"')[1] for line in frames if line.startswith("  File ")}
    ours = {place for place in shown if place.startswith(str(ROOT / "rrfp_jax"))}
    assert ours <= {str(ROOT / "rrfp_jax" / "runs" / "config.py")}  # `RunConfig` refuses in their constructor
    assert "Traceback" not in err and len(frames) < 25, err


def test_a_folder_or_a_file_of_another_kind_is_no_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for given, said in ((tmp_path, "no such file"), (tmp_path / "config.json", "must end with .py")):
        assert main([f"--config={given}"]) == 2
        assert said in capsys.readouterr().err


WRONG = [
    ({"steps": "3"}, "steps='3': is of type str; give a whole number"),
    ({"steps": 3.0}, "steps=3.0: is of type float; give a whole number"),
    ({"steps": True}, "steps=True: is of type bool; give a whole number"),
    ({"steps": 10**30}, "beyond what a machine counts to"),
    ({"seed": "x"}, "seed='x': is of type str; give a whole number"),
    ({"mesh": 4}, "mesh=4: is of type int; give Mesh"),
    ({"clip_norm": "1"}, "clip_norm='1': is of type str; give a number or None"),
    ({"schedule": 3}, "schedule=3: is of type int; give text"),
    ({"executables": True}, "executables=True: is of type bool; give text or Path or None"),
    ({"checkpoint": {}}, r"checkpoint=\{\}: is of type dict; give Checkpointing"),
    ({"model": None}, "model=None: is of type NoneType; give GPTConfig"),
    ({"learning_rate": "1e-3"}, "learning_rate='1e-3': is of type str; give a number"),
    ({"name": "a\0b"}, r"name='a\\x00b': has the character '\\x00'"),
    ({"name": "a\nb"}, r"name='a\\nb': has the character '\\n'"),
    ({"name": "\x1b[2J"}, r"has the character '\\x1b'"),
    ({"name": "a" * 250}, "name=aaaa.*: is too long; give at most 200 bytes a name"),
    ({"directory": "a/" * 3000}, "directory=a/a/.*: is too long"),
    ({"directory": "a\0b"}, r"directory='a\\x00b': has the character '\\x00'"),
]


def test_none_means_no_folder_in_a_config_as_on_a_command_line():
    from configs.quickstart import get_config

    assert replace(get_config(), executables="none").settings.executables is None


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[str(changes)[:40] for changes, _ in WRONG])
def test_a_field_of_a_wrong_type_is_named(changes, said):
    from configs.quickstart import get_config

    with pytest.raises(rrfp.UsageError, match=said):
        replace(get_config(), **changes)


class Sized(Protocol):
    size: int


class Sizes:
    def __repr__(self):
        return "sizes"  # without an address: names of tests are equal in all processes

    @property
    def size(self):
        pytest.fail("asked before it is needed")


@dataclass(frozen=True, kw_only=True)
class Fields:
    anything: Any = None
    sized: Sized | None = None
    some: Callable[[], int] | None = None
    words: tuple[str, ...] = ()
    pair: tuple[int, str] = (1, "a")
    kinds: Mapping[str, int] | None = None
    literal: Literal["a"] = "a"
    rate: float = 1.0


@pytest.mark.parametrize(
    "given",
    [
        *({"anything": 3}, {"sized": Sizes()}, {"some": 3}, {"pair": (1, 2)}, {"kinds": 3}, {"literal": "b"}),
        *({"words": ["a"]}, {"rate": 1}, {"rate": np.float32(1)}),
    ],
    ids=str,
)
def test_types_that_cannot_be_told_are_left_alone(given):
    check_fields(Fields(**given))


@pytest.mark.parametrize(
    "given",
    [{"words": (1,)}, {"words": "a"}, {"sized": 3}, {"pair": 1}, {"rate": None}],
    ids=str,
)
def test_types_that_can_be_told_are(given):
    with pytest.raises(rrfp.UsageError, match=f"{next(iter(given))}="):
        check_fields(Fields(**given))


SPAWNS = """\
import multiprocessing
from configs.quickstart import get_config
def double(x): return 2 * x
if multiprocessing.parent_process() is None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("doubled", pool.apply(double, [21]))
"""


@pytest.mark.slow(reason="4 s: processes")
@pytest.mark.parametrize("name", ["with_workers", "with-workers"])
def test_what_spawned_workers_call_may_be_in_the_file(tmp_path, capfd, name):
    (tmp_path / f"{name}.py").write_text(SPAWNS)
    assert main([f"--config={tmp_path / name}.py", "--help"]) == 0
    assert "doubled 42" in capfd.readouterr().out


def test_a_file_that_is_called_like_a_module_takes_nothing_away(tmp_path):
    (tmp_path / "json.py").write_text("from configs.quickstart import get_config")
    assert main([f"--config={tmp_path / 'json.py'}", "--help"]) == 0
    assert sys.modules["json"].loads("3") == 3


def test_a_config_may_have_an_init_that_takes_any_fields():
    from configs.quickstart import get_config

    class Own(type(get_config())):
        def __init__(self, double, **fields):
            super().__init__(**vars(get_config()) | {"steps": 2 * double} | fields)

    own = dataclass(frozen=True, kw_only=True)(Own)(double=3, name="other")
    assert (own.steps, own.name) == (6, "other")
