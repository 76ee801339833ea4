"""What `--help` says of a config's fields, and what a config file finds beside it."""

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rrfp_jax.commands.field_help import listed, sentences_of
from rrfp_jax.runs.config import fields_of, load_config
from tests.support.commands import train as main

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if "def get_config" in path.read_text())


@pytest.fixture(autouse=True)
def search_path_as_before(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


@dataclass(frozen=True)
class Outer:
    """Of a base.

    Attributes:
        size: in rows: one to
            many.
        left, right: edges.
        said: here.

    Raises:
        Nothing: ever.
    """

    size: int = 1
    left: int = 2
    right: int = 3
    said: str = ""


@dataclass(frozen=True)
class Inner(Outer):
    """No attributes here."""

    said: str = ""  # by the one who inherits
    several: tuple[int, ...] = (
        1,
        2,
    )  # on the last line of its own
    kept: Outer = Outer()  # type: ignore[assignment]
    bare: int = 0


def test_what_is_changed_first_comes_first():
    names = re.findall(r"--config\.([\w.]+)=", listed(load_config(str(ROOT / "configs" / "quickstart.py"))))
    first = [
        "path",
        "batch",
        "model.d_model",
        "steps",
        "mesh.pp",
        "schedule",
        "clip_norm",
        "remat",
        "protocol",
    ]
    assert sorted(first, key=names.index) == first


def test_sentences_are_those_of_docstrings_and_comments():
    assert sentences_of(Inner) == {
        "size": "in rows: one to many.",
        **dict.fromkeys(("left", "right"), "edges."),
        "said": "by the one who inherits",
        "several": "on the last line of its own",
    }


def test_a_class_of_a_function_may_have_a_line_at_the_margin():
    @dataclass(frozen=True)
    class Inside:
        rate: float = 0.1  # of the optimizer
        text: str = """
at the margin"""

    assert sentences_of(Inside) == {"rate": "of the optimizer"}


def test_what_has_no_sentence_says_how_it_gets_one():
    said = listed(Inner())
    assert "  --config.kept.left=2\n        edges.\n" in said
    assert "  --config.bare=0\n  --config.kept.size=1\n" in said
    assert "  --config.kept.said=\n        here.\n\nOuter: Of a base.\n  --config.size=1\n" in said
    assert said.startswith("Inner: No attributes here.\n  --config.several=")
    assert said.index("--config.said") > said.index("Outer")  # although Inner gives it another sentence
    assert "\n\nA field without a sentence" in said
    assert "A field without" not in listed(Outer())


def test_classes_without_source_are_no_obstacle():
    made = dataclasses.make_dataclass("Made", [("size", int, 3)])
    assert listed(made()).startswith("  --config.size=3\n")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_field_of_our_runs_has_a_sentence(path):
    config = load_config(str(path))
    said = listed(config)
    names = re.findall(r"^  --config\.([\w.]+)=", said, re.MULTILINE)
    assert sorted(names) == sorted(name for name, *_ in fields_of(config))
    groups = re.findall(r"^(\w+): ", said, re.MULTILINE)
    assert groups[-2:] == ["RunConfig", "Settings"]
    assert names.index("name") < names.index("mesh.pp") < names.index("seed") < names.index("remat")
    assert "A field without" not in said


RUN = """
from configs.quickstart import Quickstart, get_config as quickstart
{imports}

def get_config():
    return Quickstart(**{{**vars(quickstart()), "steps": STEPS}})
"""


def test_a_config_finds_the_modules_beside_it(tmp_path):
    """From whatever folder; and a package there may have relative imports of its own."""
    (tmp_path / "run.py").write_text(RUN.format(imports="from own_module import STEPS"))
    (tmp_path / "own_module.py").write_text("from own_package import STEPS\n")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from .inner import STEPS\n")
    (tmp_path / "own_package" / "inner.py").write_text("STEPS = 77\n")
    assert load_config(str(tmp_path / "run.py")).steps == 77


def test_an_import_relative_to_a_config_is_refused_with_what_works(tmp_path, capsys):
    file = tmp_path / "run.py"
    file.write_text(RUN.format(imports="from .own_steps import STEPS"))
    assert main([f"--config={file}", "--help"]) == 2
    said = capsys.readouterr().err
    assert "write `from my_model import ...` for a my_model.py beside it" in said
    assert "from .own_steps import STEPS" in said  # the line
    (tmp_path / "own_steps.py").write_text("STEPS = 78\n")
    file.write_text(RUN.format(imports="from own_steps import STEPS"))
    assert load_config(str(file)).steps == 78
