"""How large the house is, and which functions a walk enters."""

import ast
import json
import sys

import pytest

from rrfp_jax.core.tasks import FORWARD, Task
from tests.house import figures, walks


def test_functions_of_the_package_are_noted_while_the_walk_is_on():
    walk, before = walks.Walk(), sys.getprofile()
    walk.listen()
    try:
        str(Task(FORWARD, 0, 1))
        walk.on = True
        str(Task(FORWARD, 0, 1))
        walk.on = False
    finally:
        walks.threading.setprofile(None)
        sys.setprofile(before)
    named = [one.partition(" ")[2] for one in walk.plain()[walks.MAIN]]
    assert named == ["Task.__str__", "Kind.letter"]


class Settings:
    def __init__(self, budget):
        self.budget, self.memory = budget, object()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (walks.BUDGET, True),
        (walks.BUDGET - 123_456, True),
        (f"--config.activation_budget={walks.BUDGET}", True),
        ([None, {"a": walks.BUDGET}], True),
        (Settings(walks.BUDGET), True),
        (Settings(Settings(walks.BUDGET)), False),
        (1, False),
        (walks.BUDGET * 2, False),
        ("another", False),
    ],
)
def test_what_is_the_budget(value, expected):
    assert walks.is_budget(value) == expected


@pytest.mark.slow(reason="5 s: a run in a process of its own")
def test_a_step_is_walked_through():
    table = walks.counts(walks.traced("step"))
    main, engine = table[walks.MAIN], table[f"{walks.MAIN}, engine"]
    assert 5 < engine["files"] < main["files"] and 30 < engine["functions"] < main["functions"]
    assert table[walks.ALL]["functions"] >= main["functions"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1\n", 1),
        ('"""A docstring.\n\nOf three lines."""\n\nimport os\n\nx = 1  # a comment\n', 1),
        ('x = 1\n"""What it is."""\n', 1),
        ("from a import (\n    b,\n    c,\n)\n\n\ndef f():\n    # why\n    return b(c)\n", 2),
        ('x = """\n\na text"""\n', 3),
        ("f(\n    1,\n    2,\n)\n", 4),
    ],
)
def test_code_lines(source, lines):
    assert figures.code_lines(source) == lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("X = {FORWARD: 1, BACKWARD: 2}", 1),
        ("X = {Direction.FORWARD: 1, Direction.BACKWARD: 2}", 1),
        ("def f(kind):\n    return {INPUT: 1, **{FORWARD: 2, WEIGHT: 0}}.get(kind)", 1),
        ("X = {'F': 1, 'W': 2}", 1),
        ("X = (1, 2, 3, 4)\ny = X[task.kind]", 1),
        ("X = tuple(f(kind) for kind in Kind)\ny = X[kind]", 1),
        ("y = 'FBIW'[kind]", 1),
        ("X = {FORWARD: 1}", 0),
        ("X = {'F': 1, 'x': 2}", 0),
        ("X = (1, 2, 3, 4)\ny = X[index]", 0),
        ("X = {kind: 1 for kind in kinds}", 0),
    ],
)
def test_tables_by_kind(source, count):
    tree = ast.parse(source)
    indexed = figures.indexed_by_kind({"a.py": tree})["a.py"]
    assert len(list(figures.tables_by_kind(tree, indexed))) == count


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("kind is FORWARD", [True]),
        ("task.kind == Kind.WEIGHT", [True]),
        ("kind is not INPUT and 1 > 0", [True]),
        ("kind in (BACKWARD, WEIGHT)", [False]),
        ("direction is Direction.FORWARD", []),
        ("kind is other", []),
    ],
)
def test_comparisons_with_a_kind(source, found):
    assert [single for _, single in figures.comparisons(ast.parse(source))] == found


@pytest.fixture
def tree(tmp_path):
    """Two rooms and a folder beside them."""
    texts = {
        "rrfp_jax/__init__.py": "",
        "rrfp_jax/core/a.py": "class Same: ...\n\n\ndef once(): ...\n\n\ndef twice():\n    once()\n",
        "rrfp_jax/train/b.py": "import os\n\n\nclass Same:\n    x = os.environ\n\n\ntwice(twice())\n",
        "tests/long.py": "x = 1\n" * 601 + "def f():\n" + "    pass\n" * 50,
        "docs/extending.md": "four words are here\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures_by_room_and_in_sums(tree):
    found = figures.figures(tree)
    table = found["figures"]
    assert [table[room]["classes twice"] for room in ("core", "train", "= rrfp_jax")] == [0, 0, 1]
    assert [table[room]["reads environ"] for room in ("= engine", "= rest of rrfp_jax")] == [0, 1]
    assert table["core"]["named once"] == 1 and found["lists"]["named once"] == [
        ("rrfp_jax/core/a.py", "4 once")
    ]
    assert (table["tests"]["files over 600"], table["tests"]["functions over 50"]) == (1, 1)
    assert table["= all but tests"]["lines"] == 16 and table["= all but tests"]["files"] == 3
    assert found["docs words"] == {"docs/": 4, "all *.md": 4}


def test_both_commits_are_in_one_table(tree, monkeypatch, tmp_path_factory, capsys):
    file = tmp_path_factory.mktemp("figures") / "f.json"
    monkeypatch.setattr(figures, "ROOT", tree)
    assert figures.main([f"--json={file}", "--list"]) == 0
    assert "reads environ: rrfp_jax/train/b.py" in capsys.readouterr().out
    new = json.loads(file.read_text())["new"]
    old = {**new, "figures": {**new["figures"], "core": {**new["figures"]["core"], "lines": 100}}}
    row = next(line for line in figures.in_words(new, old).splitlines() if line.split()[0] == "core")
    assert "100>8" in row and "1>1" in row
