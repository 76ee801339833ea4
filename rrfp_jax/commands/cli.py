"""The command `rrfp VERB ...`: finds the verb's row in the table, parses its flags, and ends as commands do.

Help needs no JAX, whatever the verb, unless a config is named whose fields are to be listed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from rrfp_jax.commands.command_line import exit_status, interruptible, leave
from rrfp_jax.commands.config_line import FLAG, joined, read_config_line
from rrfp_jax.commands.flags import Flag, Verb
from rrfp_jax.commands.verbs import LAUNCH, VERBS
from rrfp_jax.errors import DONE, REFUSED, UsageError
from rrfp_jax.fields import check_not_read, output_of, path_of, printable
from rrfp_jax.printing import occupy_streams, settle_streams

HELP = frozenset({"--help", "-h", "--helpfull"})

OVERVIEW = """\
usage: rrfp COMMAND [ARGUMENT ...]

Readiness-driven pipeline-parallel training for JAX.

{commands}

rrfp COMMAND --help says what each takes; rrfp --version says which version this is."""


def main(arguments: Sequence[str]) -> int:
    """Run `rrfp`; its exit status."""
    name, *others = arguments or [""]
    if name == "--version":
        return exit_status("rrfp", _print_version)
    if name in VERBS:
        return run_verb(VERBS[name], others)
    if name in HELP or not name:
        lines = (f"  {verb.name:<12}{verb.line}" for verb in VERBS.values())
        print(OVERVIEW.format(commands="\n".join(lines)))
        return DONE if name else REFUSED
    return exit_status("rrfp", lambda: _refuse(name))


def run_verb(verb: Verb, arguments: Sequence[str]) -> int:
    """Run a command; its exit status."""

    def body() -> int:
        options = parse(verb, arguments)
        if options is None:
            return DONE

        def run() -> int:
            return _function(verb.body)(options)

        return interruptible(verb.command, run)() if verb.at_once else run()

    return exit_status(verb.command, body)


def parse(verb: Verb, arguments: Sequence[str]) -> argparse.Namespace | None:
    """The options: a value of each flag by its `dest`; `line`, what is said of a config, and `script`, a
    script or `-m MODULE` with its own arguments, for the verbs that take them. None if help was asked for.

    Raises:
        UsageError: what cannot be understood.
    """
    own, script = _split_at_script(verb, arguments) if verb is LAUNCH else ([*arguments], [])
    own = joined(own) if verb.config else own
    config = [text for text in own if verb.config and text.startswith(FLAG)]
    parser = Parser(verb)
    if HELP & {*own}:
        parser.print_help()
        if config:
            _print_fields(config)
        return None
    options, rest = parser.parse_known_args([text for text in own if text not in config])
    reads_config = config or (verb.config and verb is not LAUNCH)
    if rest and not reads_config:
        _refuse_stray(parser, verb, rest)
    options.line = read_config_line([*config, *rest, *script]) if reads_config else None
    options.script = script
    for flag in verb.flags:
        given = getattr(options, flag.dest)
        if given is None:
            setattr(options, flag.dest, flag.default)
        elif isinstance(given, list):
            setattr(options, flag.dest, [flag.value(text) for text in given])
        elif isinstance(given, str):
            setattr(options, flag.dest, flag.value(given))
    _check_outputs(verb, options)
    return options


def _check_outputs(verb: Verb, options: argparse.Namespace) -> None:
    """Refuse to write to a file that is read, or twice to one.

    Raises:
        UsageError: naming both.
    """
    paths = {flag: path for flag in verb.flags if isinstance(path := getattr(options, flag.dest), Path)}
    read = [path for flag, path in paths.items() if flag.read is path_of]
    read += [Path(options.line.file)] if options.line else []
    written: dict[Path, Flag] = {}
    for flag, path in paths.items():
        if flag.read is output_of:
            check_not_read(flag.name, path, read)
            if (same := written.setdefault(path.resolve(), flag)) is not flag:
                raise UsageError(f"{flag.name}={path}: is the file of {same.name}, too; give another")


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
        self.add_argument(
            *("--help", "-h"),
            action="store_true",
            help="this" + "; and the fields of --config, if it is given" * verb.config,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{printable(message)} (--help tells more)")


def _add(parser: argparse._ActionsContainer, flag: Flag) -> None:
    """A flag's row as argparse has it."""
    if not flag.metavar:
        parser.add_argument(flag.name, action="store_true", help=flag.help_text())
    elif not flag.name.startswith("-"):
        nargs = None if flag.needed else "?"
        parser.add_argument(flag.dest, metavar=flag.metavar, nargs=nargs, help=flag.help_text())
    else:
        parser.add_argument(
            flag.name,
            dest=flag.dest,
            metavar=flag.metavar,
            action="append" if flag.many else "store",
            required=flag.needed,
            help=flag.help_text(),
        )


def _split_at_script(verb: Verb, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a verb is given itself, and the script or `-m MODULE` with what is theirs."""
    with_values = {flag.name for flag in verb.flags} | {FLAG}
    skips = False
    for number, argument in enumerate(arguments):
        if not skips and (argument == "-m" or not argument.startswith("-")):
            return [*arguments[:number]], [*arguments[number:]]
        named = argument in with_values or (argument.startswith(FLAG) and "=" not in argument)
        skips = not skips and named
    return [*arguments], []


def _refuse_stray(parser: Parser, verb: Verb, rest: Sequence[str]) -> NoReturn:
    """Raise UsageError for what is no flag; a file may be meant for one."""
    for flag in verb.flags:
        if flag.read is path_of and (Path(rest[0]).suffix or "/") in flag.metavar:
            parser.error(f"{rest[0]}: to name the file write {flag.name}={rest[0]}")
    parser.error(f"unrecognized arguments: {' '.join(rest)}")


def _print_fields(config: Sequence[str]) -> None:
    """The fields of the config that is named."""
    from rrfp_jax.commands.field_help import listed  # these import JAX
    from rrfp_jax.commands.launch import leave_accelerators_alone
    from rrfp_jax.commands.overrides import config_of

    line = read_config_line(config)
    leave_accelerators_alone()
    print(f"\nfields of {line.file}:\n\n{listed(config_of(line))}")


def _function(where: str) -> Callable[[argparse.Namespace], int]:
    """What `module:NAME` of this package is."""
    module, _, name = where.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(import_module(f"rrfp_jax.{module}"), name)
    return found


def _print_version() -> int:
    print(f"rrfp_jax {version('rrfp_jax')}")
    return DONE


def _refuse(name: str) -> NoReturn:
    """Raise UsageError for a word that is no command."""
    if name.endswith(".py"):
        raise UsageError(f"{printable(name)}: to run a script write rrfp launch -n 4 {printable(name)}")
    from difflib import get_close_matches

    near = get_close_matches(name, VERBS, 1, 0.5)
    hint = f"did you mean rrfp {near[0]}?" if near else f"choose one of {', '.join(VERBS)}"
    raise UsageError(f"{printable(name)}: no such command; {hint}")


def run() -> None:
    """Entry point of `rrfp`, and of `python -m rrfp_jax`."""
    occupy_streams()
    status = main(sys.argv[1:])
    if sys.argv[1:2] == [LAUNCH.name] and "rrfp_jax.runtime.run.signals" in sys.modules:
        leave(status)  # a body was run, which may have read a config
    settle_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has ended: nothing is left to be interrupted
    sys.exit(status)
