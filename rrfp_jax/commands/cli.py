"""The command `rrfp VERB ...`: finds the verb's row in the table, parses its flags, and ends as commands do.

Help needs no JAX, whatever the verb, unless a config is named whose fields are to be listed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rrfp_jax.commands.command_line import exit_status, leave, print_whole
from rrfp_jax.commands.config_line import FLAG, joined, read_config_line
from rrfp_jax.commands.flags import Flag, Verb
from rrfp_jax.commands.verbs import LAUNCH, VERBS
from rrfp_jax.errors import DONE, REFUSED, UsageError
from rrfp_jax.fields import check_not_read, near, output_of, path_of, printable
from rrfp_jax.printing import occupy_streams, settle_streams

HELP = frozenset({"help", "--help", "-h"})

OVERVIEW = """\
usage: rrfp COMMAND [ARGUMENT ...]

Readiness-driven pipeline-parallel training for JAX.

{commands}

rrfp COMMAND --help says what each takes; rrfp --version says which version this is."""


def main(arguments: Sequence[str]) -> int:
    """Run `rrfp`; its exit status."""
    name, *others = arguments or [""]
    if name in HELP and others and others[0] in VERBS:
        name, others = others[0], ["--help"]
    if name in VERBS:
        return run_verb(VERBS[name], others)
    return exit_status("rrfp", lambda: _without_verb(name))


def run_verb(verb: Verb, arguments: Sequence[str]) -> int:
    """Run a command; its exit status."""

    def body() -> int:
        own, script = _split_at_script(verb, arguments)
        if {"--help", "-h"} & {*own}:
            return _help(verb, own)
        options = parse(verb, own, script)
        with ExitStack() as stack:
            if verb.at_once:
                from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals  # --help does without

                stack.enter_context(heard_signals(signal.SIGINT, answer=ends_at_once(verb.command)))
            return int(import_module(f"rrfp_jax.commands.{verb.name}").main(options))

    return exit_status(verb.command, body)


def parse(verb: Verb, own: Sequence[str], script: Sequence[str] = ()) -> argparse.Namespace:
    """The options: a value of each flag by its `dest`; `line`, what is said of a config, and `script`.

    Args:
        verb: whose they are.
        own: its arguments.
        script: a script, or `-m MODULE`, with its own arguments.

    Raises:
        UsageError: what cannot be understood.
    """
    own = joined(own) if verb.config else own
    config = [text for text in own if verb.config and text.startswith(FLAG)]
    options, rest = Parser(verb).parse_known_args([text for text in own if text not in config])
    reads_config = bool(config) or (verb.config and not verb.script)
    _check_strays(verb, [text for text in rest if text.startswith("-") or not reads_config])
    options.line = read_config_line([*config, *rest, *script]) if reads_config else None
    options.script = script
    for flag in verb.flags:
        given = getattr(options, flag.dest)
        if isinstance(given, list):
            setattr(options, flag.dest, [flag.value(text) for text in given])
        elif isinstance(given, str):
            setattr(options, flag.dest, flag.value(given))
    _check_outputs(verb, options)
    return options


class Parser(argparse.ArgumentParser):
    """Of a verb's arguments, as text; refuses in one line, and takes whole flags only."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(
            prog=verb.command,
            description=verb.text,
            epilog=verb.notes,
            usage=verb.usage or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        if verb.config:
            self.add_argument(FLAG, metavar="FILE.py", help="the run; --config.FIELD=VALUE changes a field")
        groups = {flag.group: self.add_argument_group(flag.group) for flag in verb.flags if flag.group}
        for flag in verb.flags:
            _add(groups.get(flag.group, self), flag)
        fields = "; and the fields of --config, if it is given" * verb.config
        self.add_argument("--help", "-h", action="store_true", help=f"this text{fields}")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{printable(message)} (see --help)")


def _add(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """A flag's row as argparse has it."""
    words = f": {', '.join(flag.choices)}" if flag.choices else ""
    default = "" if flag.default is None else f" (default: {flag.default})"
    text = f"{flag.help}{words}{default}".replace("%", "%%")
    value: dict[str, Any] = {"metavar": flag.metavar, "default": flag.default, "help": text}
    if not flag.metavar:
        parser.add_argument(flag.name, action="store_true", help=text)
    elif flag.is_positional:
        parser.add_argument(flag.dest, nargs=None if flag.needed else "?", **value)
    else:
        action = "append" if flag.many else "store"
        parser.add_argument(flag.name, dest=flag.dest, action=action, required=flag.needed, **value)


def _split_at_script(verb: Verb, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a verb is given itself, and the script or `-m MODULE` with what is theirs, if it runs one."""
    with_values = {flag.name for flag in verb.flags if flag.metavar} | {FLAG}
    skips = False
    for number, argument in enumerate(arguments if verb.script else ()):
        if not skips and argument == "--":
            return [*arguments[:number]], [*arguments[number + 1 :]]
        if not skips and (argument == "-m" or not argument.startswith("-")):
            return [*arguments[:number]], [*arguments[number:]]
        names = argument in with_values or (argument.startswith(FLAG) and "=" not in argument)
        skips = not skips and names
    return [*arguments], []


def _check_strays(verb: Verb, strays: Iterable[str]) -> None:
    """Refuse what is no flag; a file may be meant for one.

    Raises:
        UsageError: with the flag that is meant, if that can be told.
    """
    for stray in strays:
        name, shown = stray.partition("=")[0], printable(stray)
        if not stray.startswith("-"):
            kinds = [flag for flag in verb.flags if flag.read is path_of and not flag.is_positional]
            takes = next((flag.name for flag in kinds if Path(stray).suffix in flag.suffixes), "")
            hint = f"to name the file write {takes}={shown}" if takes else "is no flag, nor the value of one"
            raise UsageError(f"{shown}: {hint} (see --help)")
        known = [*(flag.name for flag in verb.flags), *([FLAG] if verb.config else [])]
        hint = f"a field gets a value by {FLAG}.{shown.lstrip('-')}" if verb.config else "--help lists them"
        hint = f"did you mean {meant}?" if (meant := near(name, known)) else hint
        raise UsageError(f"{shown}: no such flag; {hint}")


def _check_outputs(verb: Verb, options: argparse.Namespace) -> None:
    """Refuse to write to a file that is read, or twice to one.

    Raises:
        UsageError: naming both.
    """
    given = [(flag, path) for flag in verb.flags if (path := getattr(options, flag.dest)) is not None]
    read = [path for flag, path in given if flag.read is path_of]
    read += [Path(options.line.file)] if options.line else []
    written: dict[Path, str] = {}
    for flag, path in given:
        if flag.read is output_of:
            check_not_read(flag.name, path, read)
            if (same := written.setdefault(path.resolve(), flag.name)) != flag.name:
                raise UsageError(f"{flag.name}={path}: is the file of {same}, too; give another")


def _help(verb: Verb, own: Sequence[str]) -> int:
    """Print what a verb takes; and the fields of the config, if one is named."""
    text = Parser(verb).format_help()
    if config := [argument for argument in joined(own) if verb.config and argument.startswith(FLAG)]:
        from rrfp_jax.commands.field_help import listed  # these import JAX
        from rrfp_jax.commands.launch import leave_accelerators_alone
        from rrfp_jax.commands.overrides import config_of

        line = read_config_line(config)
        leave_accelerators_alone()
        text += f"\nfields of {line.file}:\n\n{listed(config_of(line))}\n"
    print_whole(text.removesuffix("\n"))
    return DONE


def _without_verb(name: str) -> int:
    """What `rrfp` says without a verb, or with a word that is none.

    Raises:
        UsageError: there is no such command.
    """
    if name == "--version":
        print_whole(f"rrfp_jax {import_module('importlib.metadata').version('rrfp_jax')}")
        return DONE
    if name in HELP or not name:
        lines = (f"  {verb.name:<12}{verb.line}" for verb in VERBS.values())
        print_whole(OVERVIEW.format(commands="\n".join(lines)))
        return DONE if name else REFUSED
    if name.endswith(".py"):
        raise UsageError(f"{printable(name)}: to run a script write rrfp launch -n 4 {printable(name)}")
    meant = near(name, VERBS)
    hint = f"did you mean rrfp {meant}?" if meant else f"choose one of {', '.join(VERBS)}"
    raise UsageError(f"{printable(name)}: no such command; {hint}")


def run() -> None:
    """Entry point of `rrfp`, and of `python -m rrfp_jax`."""
    occupy_streams()
    status = main(sys.argv[1:])
    if sys.argv[1:2] == [LAUNCH.name] and "rrfp_jax.commands.launch" in sys.modules:
        leave(status)  # its body was imported: it may have started ranks, or read a config
    settle_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended: nothing is left to be interrupted
    sys.exit(status)
