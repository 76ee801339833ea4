"""What is printed of an error that nobody catches: the user's own frames, and the sentence."""

import subprocess
import sys

import pytest

import rrfp_jax as rrfp
from rrfp_jax.errors import REFUSED, TrainingError
from rrfp_jax.launcher.end import RankEnd, diagnose, render_end
from rrfp_jax.tracebacks import FULL, VARIABLE, shown_error

SCRIPT = """
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_path

def mine():
    check_path("--out", "")

mine()
"""
SENTENCE = "rrfp_jax.errors.UsageError: --out='': is empty; give a path"
HINT = "  (RRFP_TRACEBACK=full shows all frames, and the error behind it)"


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def caught():
    with pytest.raises(rrfp.UsageError) as error:
        rrfp.Mesh(pp=-1)
    return error.value


def test_our_frames_are_hidden():
    lines = "".join(shown_error(caught())).splitlines()
    assert [line for line in lines if "File" in line] == [lines[1]] and __file__ in lines[1]
    assert lines[0] == "Traceback (most recent call last):" and lines[2].strip() == "rrfp.Mesh(pp=-1)"
    assert lines[-1].startswith("rrfp_jax.errors.UsageError: Mesh(pp=-1): a pipeline needs")
    assert lines[-2] == HINT


def test_a_launcher_reads_it_as_a_refusal():
    found = diagnose([RankEnd(rank=0, status=1, log_tail=tuple("".join(shown_error(caught())).splitlines()))])
    assert found.status == REFUSED and render_end(found).startswith("Mesh(pp=-1): a pipeline needs")


def test_all_are_shown_if_asked_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, FULL)
    assert 'rrfp_jax/runtime/mesh/topology.py", line' in "".join(shown_error(caught()))


def test_what_was_raised_inside_is_not_told_twice():
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise TrainingError("step 3: the sentence") from error
    except TrainingError as error:
        error.add_note("a note")
        shown = "".join(shown_error(error))
    assert "inner" not in shown
    assert shown.endswith(f"a note\n{HINT}\nrrfp_jax.errors.TrainingError: step 3: the sentence\n")


def test_an_error_that_was_being_handled_is_shown_before():
    try:
        try:
            raise KeyError("the first")
        finally:
            rrfp.Mesh(pp=-1)
    except rrfp.UsageError as error:
        shown = "".join(shown_error(error))
    first, second = shown.split("\nDuring handling of the above exception, another exception occurred:\n\n")
    assert first.endswith("KeyError: 'the first'\n") and "Mesh(pp=-1): a pipeline" in second


def test_notebooks_show_the_same():
    error = caught()
    assert error._render_traceback_() == "".join(shown_error(error)).splitlines()


def test_a_script_ends_with_its_own_frames_and_the_sentence(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, tmp_path / "mine.py"], capture_output=True, text=True, timeout=60, check=False
    )
    said = ran.stderr.splitlines()
    assert ran.returncode == 1 and said[-2:] == [HINT, SENTENCE]
    assert [line.split(", in ")[1] for line in said if "File" in line] == ["<module>", "mine"]
    assert all("mine.py" in line for line in said if "File" in line)


def test_a_hook_that_was_there_before_is_told_of_our_errors(tmp_path):
    """As Sentry and rich have one. Our sentence is last: a launcher reads that."""
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print('told of', kind.__name__)\n"
    (tmp_path / "mine.py").write_text(hook + SCRIPT)
    ran = subprocess.run(
        [sys.executable, tmp_path / "mine.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == "told of UsageError\n"
    assert ran.returncode == 1 and ran.stderr.splitlines()[-2:] == [HINT, SENTENCE]


def test_other_errors_are_shown_as_ever(tmp_path):
    (tmp_path / "other.py").write_text("import rrfp_jax\n1 / 0\n")
    ran = subprocess.run(
        [sys.executable, tmp_path / "other.py"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n") and HINT not in ran.stderr
