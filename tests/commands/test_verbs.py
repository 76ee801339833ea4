"""The command `rrfp`: its table, its list of commands, what it refuses, and the completion of shells."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from rrfp_jax.commands.cli import _split_at_script, main, parse
from rrfp_jax.commands.sim import STAGES
from rrfp_jax.commands.simulation import MICROBATCHES, SCHEDULES
from rrfp_jax.commands.verbs import VERBS
from rrfp_jax.core.schedules import NAMED
from rrfp_jax.errors import UsageError
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS, MEASURED, TARGETS
from rrfp_jax.studies.families import FAMILIES
from rrfp_jax.trace.jitter import LEVELS
from rrfp_jax.weights import families


def launched(*given):
    """The options of `rrfp launch` with these arguments."""
    own, script = _split_at_script(VERBS["launch"], given)
    return parse(VERBS["launch"], own, script)


def flag_of(verb, name):
    return next(flag for flag in VERBS[verb].flags if flag.name == name)


@pytest.mark.parametrize(
    ("verb", "name", "words"),
    [
        ("sim", "--family", FAMILIES),
        ("sim", "--jitter", LEVELS),
        ("sim", "--schedule", NAMED),
        ("plan", "--card", (*ACCELERATORS, MEASURED)),
        ("plan", "--link", LINKS),
        ("compile", "--card", TARGETS),
        ("export", "--as", families.FAMILIES),
    ],
)
def test_choices_are_those_that_there_are(verb, name, words):
    assert flag_of(verb, name).choices == [*words]


def test_defaults_that_stand_in_the_help():
    assert "fixed orders hold what they hold" in flag_of("sim", "--limit").help
    assert f"(default: {STAGES})" in flag_of("sim", "--stages").help
    assert f"(default: {MICROBATCHES})" in flag_of("sim", "--microbatches").help
    assert f"(default: {' and '.join(SCHEDULES)})" in flag_of("sim", "--schedule").help


def test_what_cannot_be_written_is_told():
    with open("/dev/full", "w") as full:
        for given in (["--help"], ["sim", "--help"]):
            command = [sys.executable, "-m", "rrfp_jax", *given]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 2 and done.stderr.endswith(
                "cannot be written: No space left on device\n"
            )


@pytest.mark.parametrize(
    "given",
    [
        *(["report", "shut/a"], ["report", "a", "shut/a"], ["report", "shut"], ["top", "shut/a", "--once"]),
        *(["why", "shut/a"], ["export", "shut/a", "--to=b"], ["sim", "--workload=shut/a"]),
        *(["launch", "-n", "1", "shut/a.py"], ["train", "--config=shut/a.py"]),
    ],
    ids=" ".join,
)
def test_a_folder_that_may_not_be_searched(given, tmp_path, monkeypatch, capsys):
    def looked_up(path, *how, **more):
        if str(path).startswith("shut/"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return stat(path, *how, **more)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "shut").mkdir()
    stat = os.stat
    monkeypatch.setattr("os.stat", looked_up)
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "is in a folder that you have no permission to search" in said and said.count("\n") == 1


def test_the_commands_are_listed(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {verb.name} " in listed and verb.line in listed for verb in VERBS.values())
    assert main(["help"]) == 0 and capsys.readouterr().out == listed
    assert main(["help", "sim"]) == 0 and capsys.readouterr().out.startswith("usage: rrfp sim ")
    assert main([]) == 2 and capsys.readouterr().out == listed
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("rrfp_jax ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tran"], "rrfp: tran: no such command; did you mean rrfp train?"),
        (["xyz\x1b"], "rrfp: xyz\\x1b: no such command; choose one of train, launch, sim, "),
        (["train.py"], "rrfp: train.py: to run a script write rrfp launch -n 4 train.py"),
        (["top"], "rrfp top: the following arguments are required: RUN (see --help)"),
        (["sim", "--stags=4"], "rrfp sim: --stags=4: no such flag; did you mean --stages?"),
        (["sim", "--outt=r.json"], "rrfp sim: --outt=r.json: no such flag; did you mean --out?"),
        (["sim", "w.json"], "rrfp sim: w.json: to name the file write --workload=w.json"),
        (["plan", "--crad=h100"], "rrfp plan: --crad=h100: no such flag; did you mean --card?"),
        (["train", "--step=3"], "--step=3: no such flag; a field gets a value by --config.step=3"),
        (["sim", "--seeds=1_6"], "rrfp sim: --seeds=1_6: give a whole number"),
        (["sim", "--seeds=x"], "rrfp sim: --seeds=x: give a whole number"),
        (["sim", "--family=x"], "rrfp sim: --family=x: choose one of constant, log-normal, "),
        (["sim", "--out=a", "--plot=a"], "rrfp sim: --plot=a: is the file of --out, too; give another"),
        (["plan", "--efficiency=2"], "rrfp plan: no --config given: name one run"),
        (["doctor", "--limit=inf"], "rrfp doctor: --limit=inf: give a number of seconds above 0"),
        (["top", "x", "--every=0.05"], "rrfp top: --every=0.05: give seconds, from 0.1 to 3,600"),
        (["launch", "--name=x", "--config=configs/quickstart.py"], "did you mean --config.name?"),
    ],
)
def test_refusals(arguments, said, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_help_names_every_flag_and_needs_no_jax(verb):
    """Nor numpy, nor any other library."""
    code = (
        f"import sys; from rrfp_jax.commands.cli import main; status = main([{verb.name!r}, '--help'])\n"
        "sys.exit(status or bool({'jax', 'numpy', 'msgspec', 'rich', 'absl'} & {*sys.modules}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"usage: {verb.command} ") and all(f"  {flag.name}" in told for flag in verb.flags)


def test_a_script_takes_what_follows_it():
    given = ["-n", "2", "--name=x", "train.py", "-n", "3", "--config", "a", "--help"]
    options = launched(*given)
    assert (options.n, options.name, options.line) == (2, "x", None)
    assert options.script == ["train.py", "-n", "3", "--config", "a", "--help"]
    assert launched("-n", "2", "-m", "mine", "-m").script == ["-m", "mine", "-m"]
    assert launched("-n", "2", "--", "train.py", "--").script == ["train.py", "--"]


@pytest.mark.parametrize(
    ("typed", "is_one"),
    [
        ("--config=a.py", True),
        ("-n 2 --config a.py", True),
        ("--max-restarts=3 -n=2 --config.steps=3", True),
        ("-n 2 a.py --config=b.py", False),
        ("-n 2 -m a --config=b.py", False),
        ("--directory a --name b c.py", False),
        ("--name --config a.py", False),
        ("", False),
    ],
)
def test_what_follows_a_script_is_the_scripts(typed, is_one):
    own, _ = _split_at_script(VERBS["launch"], typed.split())
    assert any(text.startswith("--config") for text in own if own[own.index(text) - 1] != "--name") == is_one


def test_a_config_takes_its_fields_from_anywhere():
    given = ["--config.steps", "3", "-n=2", "--config", "configs/quickstart.py", "--config.name=x"]
    options = launched(*given)
    assert options.line.overrides == ("--config.steps=3", "--config.name=x") and options.n == 2
    assert options.line.file.endswith("configs/quickstart.py") and options.script == []
    with pytest.raises(UsageError, match="write --config=train"):
        launched("--config.steps=3", "train.py")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("rrfp tr", "train"),
        ("rrfp sim --fam", "--family="),
        ("rrfp sim --family = log", "log-normal"),
        ("rrfp export runs/x --as = q", "qwen3"),
        ("rrfp train --con", "--config="),
        ("rrfp completion b", "bash"),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_completes(typed, completed, capsys):
    assert main(["completion", "bash"]) == 0
    words = typed.split()
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _rrfp\n"
    shown = subprocess.run(
        ["bash", "-c", f'{script}printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == [completed]


def test_zsh_takes_the_same_functions(capsys):
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
