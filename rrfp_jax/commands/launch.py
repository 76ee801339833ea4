"""`rrfp-launch -n 4 train.py [args]`: run a script in several processes on this machine; or a named run."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands import local
from rrfp_jax.commands.command_line import Parser, exit_status, interruptible, leave, path_argument
from rrfp_jax.commands.config_line import FLAG, names_a_run
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_name
from rrfp_jax.files import read_whole
from rrfp_jax.printing import occupy_streams, warn

COMMAND = "rrfp-launch"

MOST_PROCESSES = 4096
"""On one machine; each takes a gigabyte or so."""

LARGEST_SCRIPT = 2**24
"""Bytes of a script that is looked at."""

DESCRIPTION = """\
Runs a Python script in N processes on this machine. Its rrfp.Trainer joins them into one run, each process
training the pipeline stages of its rank. What they print appears with the rank before each line; it is also
kept in <directory>/<name>/rank-<r>.log.

With --config=FILE.py instead of a script it trains the run that FILE.py's get_config() describes, in as many
processes as its mesh asks for, or N. --config.FIELD=VALUE changes a field, such as its name and directory;
--config=FILE.py --help lists all fields. Modules beside FILE.py can be imported from it."""

EPILOG = """\
If a rank ends badly the others are ended too, and one diagnosis says which and why (also in diagnosis.txt).
Signals are passed on to all ranks; a second Ctrl-C or SIGTERM kills them. No process is left behind.
RRFP_SILENCE_SECONDS (25) is how long a rank may be silent, as when it is frozen, before it is given up;
RRFP_SAVE_SECONDS (120) how long ranks may take to save after SIGTERM or Ctrl-C.

With --max-restarts a failed run is started again, and must go on from what it has saved; RRFP_RESTARTS tells
it how often. It is given up after three restarts in a row that came no further. With --replace-after as
well, a named run of several replicas goes on from the machine's memory and loses no step.

exit status: 0 done, 1 failed, 2 refused, 130 interrupted

examples:
  rrfp-launch -n 4 train.py --steps=100
  rrfp-launch --config=my_run.py --config.steps=100
  rrfp-launch -n 2 --name=trial -m mylib.train"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, interruptible(COMMAND, lambda: _launch(arguments)))


def _launch(arguments: Sequence[str]) -> int:
    flags = ("-n", "--name", "--directory", "--max-restarts", local.REPLACE_AFTER)
    if names_a_run(arguments, with_values=flags):
        return local.launch_run(arguments, COMMAND, COMMAND)
    options = _parser().options(arguments)
    if options is None:
        return DONE
    command, stem = _command(options.module, options.script)
    if options.n is None:
        raise UsageError("-n: is missing; give the number of processes (--help tells more)")
    if not 1 <= options.n <= MOST_PROCESSES:
        raise UsageError(
            f"-n {options.n}: a run needs at least one process, and one machine runs at most {MOST_PROCESSES}"
        )
    name = stem if options.name is None else options.name
    check_name("--name", name, str(options.directory))
    if options.replace_after is not None:
        raise UsageError(
            f"{local.REPLACE_AFTER}={options.replace_after} with a script: only a named run keeps its state "
            f"in the machine's memory, and says how many replicas it has; write {FLAG}=FILE.py instead"
        )
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts={options.max_restarts}: give a number of restarts, 0 for none")
    from rrfp_jax.launcher.folders import RunFolder  # these import JAX
    from rrfp_jax.launcher.spawn import Launch
    from rrfp_jax.launcher.supervisor import Patience

    patience = Patience.of(ENVIRONMENT)
    folder = RunFolder(options.directory, name)
    if earlier := folder.begin():
        warn(f"{COMMAND}: an earlier run is kept as {earlier}")
    argv = [sys.executable, *command]
    launch = Launch(argv, options.n, folder, patience, COMMAND, max_restarts=options.max_restarts)
    return launch.run()


def _parser() -> Parser:
    parser = Parser(
        COMMAND,
        DESCRIPTION,
        EPILOG,
        usage=f"{COMMAND} -n N [--name NAME] [--directory DIR] [--max-restarts N] (SCRIPT.py | -m MODULE) "
        f"[ARGUMENT ...]\n       {COMMAND} {FLAG}=FILE.py [{FLAG}.FIELD=VALUE ...] [-n N]\n"
        f"                   [--max-restarts N [{local.REPLACE_AFTER} SECONDS]]",
    )
    parser.add_argument(FLAG, metavar="FILE.py", help="the run to train, instead of a script")
    parser.add_argument("-n", type=int, metavar="N", help="number of processes")
    parser.add_argument("--name", help="of the run (default: the script's name)")
    parser.add_argument(
        "--directory",
        type=path_argument,
        default="runs",
        metavar="DIR",
        help="where runs are kept (default: runs)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often a failed run is started again (default: 0)",
    )
    parser.add_argument(
        local.REPLACE_AFTER,
        metavar="SECONDS",
        help="with --config: go on without lost replicas from memory, and replace them after so long",
    )
    rest = argparse.REMAINDER
    parser.add_argument(
        "-m", dest="module", nargs=rest, metavar="MODULE", help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=rest, metavar="SCRIPT.py", help="script to run, and its arguments")
    return parser


def _command(module: Sequence[str] | None, script: Sequence[str]) -> tuple[list[str], str]:
    """What follows `python`, and the name that the run has if none is given."""
    if module is not None:
        if not module:
            raise UsageError("-m: no module given (--help tells more)")
        if "" not in sys.path:
            sys.path.insert(0, "")  # where `python -m` looks
        package = module[0].partition(".")[0]
        if not package.isidentifier() or importlib.util.find_spec(package) is None:
            raise UsageError(f"-m {module[0]}: no such module; is it in this directory, or installed?")
        return ["-m", *module], module[0].rpartition(".")[2]
    if not script:
        raise UsageError(f"no script given: {COMMAND} -n 4 train.py (--help tells more)")
    if not Path(script[0]).is_file():
        raise UsageError(f"{script[0]}: no such file; give a Python script, or -m and a module")
    if _is_config(Path(script[0])):
        raise UsageError(f"{script[0]}: has get_config() and nothing that runs; write {FLAG}={script[0]}")
    return list(script), Path(script[0]).stem


def _is_config(script: Path) -> bool:
    """Whether a file describes a run, so that as a script it would end at once and have done nothing."""
    try:
        text = read_whole(script, LARGEST_SCRIPT)
    except OSError:  # Python will say it
        return False
    return b"\ndef get_config(" in text and b"__main__" not in text


def run() -> None:
    """Entry point of the `rrfp-launch` command."""
    occupy_streams()
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
