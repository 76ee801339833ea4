"""What benchmark commands share."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import REGISTRY, Aim, Found, bench, index, load, run, table


@pytest.mark.parametrize(
    ("value", "limit", "said"),
    [
        (1.021, 1.02, "MISSED  it: 1.021 x (aim: 1.02)"),
        (1.019, 1.02, "met     it: 1.019 x (aim: 1.02)"),
        (1.00004, 1.0, "MISSED  it: 1.00004 x (aim: 1)"),
        (26.31, 25, "MISSED  it: 26.3 x (aim: 25)"),
        (25.04, 25, "MISSED  it: 25.04 x (aim: 25)"),
        (1234.5, 3000, "met     it: 1234.5 x (aim: 3000)"),
        (3, 0, "MISSED  it: 3 x (aim: 0)"),
        (float("inf"), 1.0, "MISSED  it: inf x (aim: 1)"),
        (float("nan"), 1.0, "MISSED  it: nan x (aim: 1)"),
    ],
)
def test_an_aim_shows_on_which_side_of_its_limit_a_figure_is(value, limit, said):
    assert str(Aim("it", value, limit, "x")) == said


def test_an_aim_from_below():
    assert str(Aim("it", 0.9496, 0.95, "", at_least=True)) == "MISSED  it: 0.9496 (aim: at least 0.95)"


def test_a_table_shows_cells_as_text_and_empty_ones_as_such():
    assert table(["", "s"], [("a", 1.5), ("", "-")]) == "| | s |\n|---|---|\n| a | 1.5 |\n| | - |"


def test_a_row_must_have_a_cell_for_each_head():
    with pytest.raises(ValueError, match="3 cells under 2 heads"):
        table(["a", "b"], [(1, 2, 3)])


@pytest.fixture
def toy(monkeypatch):
    """A benchmark whose aim is missed where its flag says more than two."""
    monkeypatch.setattr("benchmarks.harness.load", REGISTRY.get)

    @bench("How many?", minutes="0", aims="at most 2")
    def toy_bench(many: int = 1, names: tuple[str, ...] = ("a", "b"), quick: bool = False):
        figures = {"many": many, "names": names, "quick": quick}
        tables, pictures = {"page.md toy": "| a |"}, {"drawn.svg": lambda path: path.write_text("<svg/>")}
        return Found(figures, [Aim("many", many, 2, "")], tables, pictures)

    yield "toy_bench"
    del REGISTRY["toy_bench"]


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 0), (["--check"], 0), (["--many=3"], 0), (["--many=3", "--check"], 1)]
)
def test_a_missed_aim_is_named_and_fails_a_check(toy, arguments, status, capsys):
    assert run(toy, arguments) == status
    assert ("missed: many" in capsys.readouterr().err) == (status == 1)


def test_flags_are_the_functions_parameters(toy, tmp_path):
    file = tmp_path / "found.json"
    assert run(toy, [f"--json={file}", "--many=2", "--names=b", "--quick"]) == 0
    found = json.loads(file.read_text())
    assert found["figures"] == {"many": 2, "names": ["b"], "quick": True}
    assert found["aims"][0]["met"] and found["machine"]["jax"]
    for wrong in (["--names=c"], ["--names=b", "--names=a"]):
        with pytest.raises(SystemExit, match="2"):
            run(toy, wrong)


def test_tables_and_pictures_are_written_if_that_is_asked_for(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.harness.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.harness.REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- toy -->\nold\n<!-- end of toy -->\nafter\n")
    assert run(toy, []) == 0 and "old" in page.read_text() and not (tmp_path / "drawn.svg").exists()
    assert run(toy, ["--write"]) == 0 and "| a |" in capsys.readouterr().out
    assert page.read_text() == "before\n<!-- toy -->\n\n| a |\n\n<!-- end of toy -->\nafter\n"
    assert (tmp_path / "drawn.svg").read_text() == "<svg/>"


def test_every_benchmark_has_a_question_aims_and_flags(capsys):
    for name in index():
        own = load(name)
        assert own.run.__name__ == name and own.question.endswith("?") and own.minutes and own.aims
        assert {"--json", "--check"} <= set(own.parser()._option_string_actions)
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in index())


def test_an_unknown_benchmark_is_refused(capsys):
    assert command.main(["nothing"]) == 2
    assert "no 'nothing' among" in capsys.readouterr().err
