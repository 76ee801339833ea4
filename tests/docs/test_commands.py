"""Every command that the documentation names is there, and takes the flags that it is given."""

import contextlib
import importlib.util
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness import index, load
from rrfp_jax.commands.overrides import override
from rrfp_jax.commands.verbs import VERBS
from rrfp_jax.errors import UsageError
from rrfp_jax.runs.config import load_config
from tests.docs.pages import FENCE, INLINE, PAGES, REPOSITORY, blocks_of, files_of, name_of, text_of

SHELL = ("", "bash")


@cache
def targets():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


@cache
def project():
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["project"]


def source_of(module):
    """The text of a module that `python -m` runs; None if there is none."""
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:  # a package
            found = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).read_text(encoding="utf-8")
    ours = REPOSITORY in Path(found.origin).parents
    return None if ours and '__name__ == "__main__"' not in text else text


def unknown_commands(text):
    """What a text tells to run and what is not there."""
    code = "\n".join([*(block[3] for block in FENCE.finditer(text)), *INLINE.findall(text)])
    modules = re.findall(r"(?:python|rrfp launch[^\n]*) -m ([\w.]+\w)", code)
    wrong = [module for module in modules if module != "module" and source_of(module) is None]
    benches = re.findall(r"-m benchmarks +([\w.]+)", code)
    wrong += [name for name in benches if name != "NAME" and name not in index()]
    wrong += set(re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE)) - targets()
    named = set(re.findall(r"(?:^|[\s/])rrfp ([a-z]+)|(?:^|\s)(rrfp-(?!jax)[a-z]+)", code))
    return wrong + sorted({verb or old for verb, old in named} - VERBS.keys())


def command_lines(page):
    """The command lines of a page's blocks, and those in its prose, as lists of words."""
    blocks = [block.code for block in blocks_of(page) if block.language in SHELL]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [code for code in INLINE.findall(FENCE.sub("", text_of(page))) if " " in code]
    for line in lines:
        with contextlib.suppress(ValueError):  # what is no command line
            yield shlex.split(line, comments=True)


def commands_in(words):
    """The commands of ours in a line, such as one after `srun -n 4`, each with its arguments."""
    for at, word in enumerate(words):
        follows, module = words[at + 1 : at + 2], words[max(at - 2, 0) : at] == ["python", "-m"]
        verb = follows[0] if word in ("rrfp", "rrfp_jax") and follows and follows[0] in VERBS else None
        benchmark = (
            follows[0] if module and word == "benchmarks" and follows and follows[0] in index() else None
        )
        own = words[at + 1 + bool(verb or benchmark) :]
        if benchmark:
            yield f"benchmarks {benchmark}", own
        elif verb or (module and source_of(word)):
            # What follows a script or a module is that one's.
            scripts = [i for i, a in enumerate(own) if a == "-m" or (a.endswith(".py") and a[0] != "-")]
            yield verb or word, own[: min(scripts, default=len(own))]


def is_known(command, flag):
    """Whether the command takes the flag; verifications have theirs in their sources."""
    if command in VERBS:
        return flag in {"--help", *(own.name for own in VERBS[command].flags)}
    if command.startswith("benchmarks "):
        return flag in load(command.partition(" ")[2]).parser().format_help()
    if command == "benchmarks":  # any of them
        return flag in ("--json", "--check", "--write")
    return flag in source_of(command) or flag in text_of(REPOSITORY / "benchmarks/harness.py")


def wrong_flags(command, arguments):
    """The flags that a command would refuse."""
    flags = [re.sub(r"[\[\]]", "", a).partition("=")[0] for a in arguments if a.lstrip("[").startswith("--")]
    own = [flag for flag in flags if not flag.startswith("--config.") and flag != "--config"]
    return [f"{command} {flag}" for flag in own if not is_known(command, flag)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_what_there_is(page):
    assert unknown_commands(text_of(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_take_their_flags(page):
    found = [command for words in command_lines(page) for command in commands_in(words)]
    assert [wrong for command, arguments in found for wrong in wrong_flags(command, arguments)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configs_take_the_fields_that_they_are_given(page, tmp_path, monkeypatch):
    """Each `--config=FILE --config.x=y`, with a file of the repository or of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for title, code in files_of(page).items():
        (tmp_path / title).write_text(code, encoding="utf-8")
    for words in command_lines(page):
        files = [word.partition("=")[2] for word in words if word.startswith("--config=")]
        fields = [word for word in words if re.fullmatch(r"--config\.[\w.]+=[^\[\].]\S*", word)]
        file = next((f for f in [*files, "configs/quickstart.py"] if (REPOSITORY / f).is_file()), None)
        own = next((f for f in files if (tmp_path / f).is_file()), None)
        if fields and (own or file):
            assert refused(own or str(REPOSITORY / file), fields) is None


def refused(file, fields):
    """What the config of a file says against its fields; nothing if it names a file that comes later."""
    try:
        override(load_config(file), fields)
    except UsageError as error:
        return None if "No such file" in str(error) else str(error)


def test_a_field_that_is_not_there_is_found():
    assert "no such flag" in refused(str(REPOSITORY / "configs/quickstart.py"), ["--config.stages=3"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_extras_are_there(page):
    extras = set(re.findall(r"(?:rrfp-jax|\.)\[([\w,]+)\]", "\n".join(INLINE.findall(text_of(page)))))
    named = {extra for found in extras for extra in found.split(",")}
    assert sorted(named - project()["optional-dependencies"].keys()) == []


@pytest.mark.parametrize(
    "text",
    [
        "`python -m benchmarks.no_such_thing`",
        "`python -m benchmarks no_such_thing`",
        "`make no-such-target`",
        "`rrfp nothing --help`",
        "`rrfp-something --help`",
        "```\nrrfp launch -n 2 -m tests.no_such_thing\n```",
        "`python -m rrfp_jax.errors`",
    ],
)
def test_commands_that_are_not_there_are_found(text):
    assert unknown_commands(text)


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("rrfp sim --family=log-normal --speed=3", "sim --speed"),
        ("srun -n 4 rrfp doctor --nothing", "doctor --nothing"),
        ("python -m rrfp_jax top runs/x --slow", "top --slow"),
        ("python -m benchmarks padding --fast --check", "benchmarks padding --fast"),
        ("rrfp launch -n 4 --name=x --slow train.py --fast", "launch --slow"),
    ],
)
def test_flags_that_are_not_there_are_found(line, flag):
    assert [wrong for own in commands_in(shlex.split(line)) for wrong in wrong_flags(*own)] == [flag]


def test_eleven_environment_variables_are_for_users():
    """One shows frames that are hidden: whoever reports a defect of ours needs them, at once."""
    named = {name for page in PAGES for name in re.findall(r"RRFP_(?!TEST)[A-Z_]+", text_of(page))}
    asked = {"COORDINATOR", "PROCESSES", "RANK", "BIND", "TOKEN_FILE", "KEY_FILE"}
    limits = {f"{name}_SECONDS" for name in ("SILENCE", "SAVE", "JOIN", "EXIT")}
    assert named - {"RRFP_"} == {f"RRFP_{name}" for name in asked | limits | {"TRACEBACK"}}
