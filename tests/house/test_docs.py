"""The documentation: what it names exists, and what it shows runs.

A Python block is run as it stands. In the line before it a comment may say otherwise:

    <!-- with: NAME -->        with what `stand_in` gives
    <!-- not run: REASON -->   only compiled

Sizes are made small as `SMALLER` says. A block without a language that follows at once is what it prints.
"""

import ast
import importlib.util
import re
import sys
import tomllib
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import rrfp_jax as rrfp
from models import gpt
from rrfp_jax.core.schedules import NAMED

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rrfp_jax"
FOLDERS = [".", "docs", "launch", "benchmarks", "tests/verification", "rrfp_jax/core"]
PAGES = [page for folder in FOLDERS for page in sorted((REPOSITORY / folder).glob("*.md"))]
SOURCES = [
    path
    for folder in ("rrfp_jax", "models", "configs", "launch", "benchmarks", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
SUFFIXES = (".py", ".md", ".ipynb", ".sbatch", ".svg", ".toml")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (with|not run): (.+) -->\n$")
PRINTED = re.compile(r"\n\n```\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")

SMALLER = {"steps(1000)": "steps(1)", "repeat=24": "repeat=2"}
TINY = gpt.GPTConfig(d_model=8, n_heads=2, d_ff=16, n_layers=2, vocab_size=16)


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The code of a page in a language, with the mark before it ((None, None) without) and what it prints."""
    text = text_of(page)
    for found in FENCE.finditer(text):
        if found[1] == language:
            mark = MARK.search(text[: found.start()])
            printed = PRINTED.match(text, found.end())
            yield (mark.groups() if mark else (None, None)), found[2], printed[1] if printed else ""


def looks_like_a_path(word):
    return re.fullmatch(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*/?", word) is not None and (
        word.endswith(".md") or ("/" in word and (word.endswith(SUFFIXES) or is_in_a_folder_of_ours(word)))
    )


def is_in_a_folder_of_ours(word):
    folders = {path.name for path in (*REPOSITORY.iterdir(), *PACKAGE.iterdir()) if path.is_dir()}
    return word.split("/")[0] in folders - {"runs", "build"}


def exists(page, word):
    """Paths are given from the page, from the repository, or from the package on."""
    return any((folder / word).exists() for folder in (page.parent, REPOSITORY, PACKAGE))


@cache
def targets():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


@cache
def scripts():
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]["scripts"].keys()


def can_be_run(module):
    """Whether `python -m` runs it: it is there, and ours say what they do then."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if found is None or found.origin is None:
        return False
    ours = REPOSITORY in Path(found.origin).parents
    return not ours or '__name__ == "__main__"' in Path(found.origin).read_text(encoding="utf-8")


def unknown_commands(text):
    """What a text tells to run and what is not there."""
    code = "\n".join([*(block[2] for block in FENCE.finditer(text)), *INLINE.findall(text)])
    modules = re.findall(r"(?:python|rrfp-launch[^\n]*) -m ([\w.]+\w)", code)
    wrong = [module for module in modules if module != "module" and not can_be_run(module)]
    wrong += set(re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE)) - targets()
    return wrong + sorted(set(re.findall(r"(?:^|\s)(rrfp-(?!jax)[a-z]+)", code)) - scripts())


def stand_in(name):
    """What a block takes for granted, as modules and names."""
    if name == "mylib":
        module = types.ModuleType("mylib")
        module.Embed, module.Block, module.Head, module.cfg = gpt.Embed, gpt.Block, gpt.Head, TINY
        zeros, ones = np.zeros((1, 4), np.int32), np.ones((1, 4), np.float32)
        module.corpus = [{"tokens": zeros, "labels": zeros, "mask": ones}] * 4
        return {"modules": {"mylib": module}, "names": {}}
    assert name == "layers, loss"
    layers = [rrfp.layer(gpt.Embed, TINY), rrfp.layer(gpt.Head, TINY)]
    return {"modules": {}, "names": {"rrfp": rrfp, "layers": layers, "loss": lambda logits, mb: None}}


def made_small(code):
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    return code


def ids(page):
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_and_links_lead_somewhere(page):
    text = FENCE.sub("", text_of(page))
    links = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link}
    paths = {word for word in INLINE.findall(text) if looks_like_a_path(word)}
    assert sorted(word for word in links | paths if not exists(page, word)) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_name_what_there_is(page):
    assert unknown_commands(text_of(page)) == []


def test_code_names_pages_that_there_are():
    named = {(path, page) for path in SOURCES for page in re.findall(r"docs/[\w-]+\.md", text_of(path))}
    assert named
    assert [(ids(path), page) for path, page in sorted(named) if not (REPOSITORY / page).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page, "python"))], ids=ids)
def test_python_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for (kind, what), code, printed in blocks(page, "python"):
        names = {"__name__": "block"}
        if kind == "with":
            given = stand_in(what)
            names |= given["names"]
            for name, module in given["modules"].items():
                monkeypatch.setitem(sys.modules, name, module)
        program = compile(made_small(code), f"{ids(page)}: a block", "exec")
        if kind != "not run":
            exec(program, names)
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert [line for line in printed.splitlines() if line.split() not in lines] == []


def test_the_index_lists_every_page():
    listed = set(LINK.findall(text_of(REPOSITORY / "docs" / "README.md")))
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
    assert pages <= listed, "each page has one line in docs/README.md"


@pytest.mark.parametrize("folder", ["benchmarks", "tests/verification"])
def test_every_measurement_and_verification_is_listed(folder):
    listed = set(re.findall(r"python -m ([\w.]+\w)", text_of(REPOSITORY / folder / "README.md")))
    commands = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if "parse(__doc__)" in text_of(path)
    }
    assert len(commands) >= 5
    assert commands - listed == set()


@pytest.mark.parametrize(
    ("file", "begin", "end"),
    [
        ("README.md", "| hints |", "| planned |"),
        ("docs/simulator.md", "| `--policy=NAME` |", "\n"),
        ("rrfp_jax/runs/config.py", "        schedule: ", "planned or"),
    ],
)
def test_lists_of_schedules_name_every_one(file, begin, end):
    text = text_of(REPOSITORY / file).partition(begin)[2].partition(end)[0]
    assert sorted(NAMED.keys() - re.findall(r"[\w-]+", text)) == []


def test_phony_targets_have_rules():
    phony = re.search(r"^\.PHONY: (.+)$", text_of(REPOSITORY / "Makefile"), re.MULTILINE)
    assert set(phony[1].split()) <= targets()


@cache
def definitions():
    """All names that sources define, members also as `Class.member`."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(text_of(path))):
            found |= defined(node)
            if isinstance(node, ast.ClassDef):
                members = set().union(*(defined(inner) for inner in ast.walk(node)))
                found |= {f"{node.name}.{member}" for member in members}
    return found


def defined(node):
    """The names that one node of a syntax tree defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    flat = [inner for target in targets if isinstance(target, ast.AST) for inner in ast.walk(target)]
    names = {inner.id for inner in flat if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in flat if isinstance(inner, ast.Attribute)}


def test_names_in_extending_exist():
    text = FENCE.sub("", text_of(REPOSITORY / "docs" / "extending.md"))
    words = {re.sub(r"^(rrfp\.)?(schedules\.(?!py))?|\(.*\)$", "", word) for word in INLINE.findall(text)}
    names = {word for word in words if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", word)}
    assert len(names) > 10
    files = {name for name in names if name.endswith((".jsonl", ".md", ".py"))}
    assert sorted(names - files - definitions()) == []


@pytest.mark.parametrize(
    "text",
    [
        "`python -m benchmarks.no_such_thing`",
        "`make no-such-target`",
        "`rrfp-nothing --help`",
        "```\nrrfp-launch -n 2 -m tests.no_such_thing\n```",
        "`python -m rrfp_jax.errors`",
    ],
)
def test_commands_that_are_not_there_are_found(text):
    assert unknown_commands(text)


def test_paths_are_told_from_other_words():
    ours = ["docs/data.md", "data.md", "runtime/engine.py", "rrfp_jax/core/", "launch/slurm.sbatch"]
    others = ["runs/quickstart", "train.py", "4/n", "tokens/s", "a / b", "config.json", "--tp=2"]
    assert [word for word in ours + others if looks_like_a_path(word)] == ours
