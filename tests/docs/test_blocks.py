"""Every Python block of the documentation is run as it stands, page by page, in order.

The blocks of a page share one namespace and one folder. One with a title is a file: it is written there and
imported, so that later ones can import it. `<!-- follows PAGE -->` says that files of that page are there,
too. What readers have and the page does not show, such as files of text, is made by a comment before the
block. A block without a language that follows at once is what it prints.
"""

import ast
import importlib
import os
import sys
from importlib.util import find_spec

import pytest

import rrfp_jax
from tests.docs.pages import PAGES, blocks_of, files_of, name_of, text_of

SMALLER = {"steps(1000)": "steps(1)", "repeat=24": "repeat=2"}
"""Sizes that would take minutes."""


OTHERS = ("tunix", "transformers", "equinox", "keras_hub", "penzai", "haiku")
NEEDED = {"benchmarks/results/other-models.md": OTHERS}
"""By page, packages that only the environment of `make other-models` has."""


def python_blocks(page):
    return [block for block in blocks_of(page) if block.language == "python"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current one, where blocks find what is written; modules from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if tmp_path.as_posix() in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def made_small(code):
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


def run(block, names, where):
    """Run a block of a page as its reader would."""
    exec(compile(block.given, f"{where}: given", "exec"), names)
    if block.title:
        importlib.invalidate_caches()
        importlib.import_module(block.title.removesuffix(".py"))
    else:
        exec(compile(made_small(block.code), where, "exec"), names)


def not_said(printed, said):
    """The lines that were to be printed and were not, whatever their spaces."""
    lines = [line.split() for line in said.splitlines()]
    return [line for line in printed.splitlines() if line.split() not in lines]


@pytest.mark.costly(reason="the first one imports JAX in a process")
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_python_runs_and_prints_what_the_page_says(page, folder, capsys):
    absent = [package for package in NEEDED.get(name_of(page), ()) if find_spec(package) is None]
    if absent and os.environ.get("RRFP_OTHER_MODELS") != "all":
        pytest.skip(f"needs {', '.join(absent)}: make other-models")
    for title, code in files_of(page).items():
        (folder / title).write_text(code, encoding="utf-8")
    names = {"__name__": "block"}
    for number, block in enumerate(python_blocks(page)):
        run(block, names, f"{name_of(page)}: block {number}")
        assert not_said(block.printed, capsys.readouterr().out) == []


def test_no_block_is_excused():
    """Nothing says that it is not run, and no Python hides behind another name."""
    for page in PAGES:
        assert "<!-- not run" not in text_of(page), name_of(page)
        assert {block.language for block in blocks_of(page)} <= {"", "python", "bash", "text", "diff"}, (
            name_of(page)
        )


def test_both_sides_of_a_diff_are_python_of_names_that_there_are():
    diffs = [(page, block) for page in PAGES for block in blocks_of(page) if block.language == "diff"]
    assert diffs
    for page, block in diffs:
        lines = block.code.splitlines()
        for side in "-+":
            own = ast.parse("\n".join(line[1:] for line in lines if line[:1] in (side, " ")))
            named = [node for node in ast.walk(own) if isinstance(node, ast.Attribute)]
            ours = [node.attr for node in named if getattr(node.value, "id", "") == "rrfp"]
            assert [name for name in ours if not hasattr(rrfp_jax, name)] == [], name_of(page)
        assert len(lines) <= 8, name_of(page)
