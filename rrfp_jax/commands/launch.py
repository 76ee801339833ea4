"""`rrfp launch`: a named run, or a script, in several processes on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.config_line import FLAG, ConfigLine
from rrfp_jax.commands.verbs import LAUNCH
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, INTERRUPTED, REFUSED, UsageError
from rrfp_jax.fields import check_name, path_of
from rrfp_jax.files import is_used, read_whole
from rrfp_jax.printing import warn
from rrfp_jax.runs.lent_folder import lent_folder

if TYPE_CHECKING:
    from rrfp_jax.launcher.restarts import Elastic
    from rrfp_jax.runs.config import RunConfig

CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
"""JAX's own variable."""

LARGEST_SCRIPT = 2**24
"""Bytes of a script that is looked at."""


def main(options: argparse.Namespace) -> int:
    """Start the processes and wait for them; the exit status.

    Raises:
        UsageError: what cannot be run, before anything is started.
    """
    return _launch_script(options) if options.line is None else _launch_run(options, options.line)


def _launch_script(options: argparse.Namespace) -> int:
    command, stem = _command(options.script)
    if options.n is None:
        raise UsageError("-n: is missing; give the number of processes, before the script (see --help)")
    name = stem if options.name is None else options.name
    directory = options.directory or Path("runs")
    check_name("--name", name, str(directory))
    if options.replace_after is not None:
        raise UsageError(
            f"--replace-after={options.replace_after} with a script: only a named run keeps its state in the "
            f"machine's memory, and says how many replicas it has; write {FLAG}=FILE.py instead"
        )
    from rrfp_jax.launcher.folders import RunFolder  # these import NumPy
    from rrfp_jax.launcher.restarts import Elastic
    from rrfp_jax.launcher.spawn import Launch
    from rrfp_jax.launcher.supervisor import Patience

    patience = Patience.of(ENVIRONMENT)
    folder = RunFolder(directory, name)
    if is_used(folder.final):
        folder.discard()
        raise UsageError(f"{folder.final}: another live run is there: give this one another --name")
    if earlier := folder.begin():
        warn(f"{LAUNCH.command}: an earlier run is kept as {earlier}")
    argv = [sys.executable, *command]
    return Launch(argv, Elastic({1: options.n}), folder, patience, max_restarts=options.max_restarts).run()


def _launch_run(options: argparse.Namespace, line: ConfigLine) -> int:
    for flag, value in (("name", options.name), ("directory", options.directory)):
        if value is not None:
            raise UsageError(f"--{flag}={value}: is for scripts; did you mean --config.{flag}?")
    leave_accelerators_alone()  # the config is read here too: the devices are the ranks'
    from rrfp_jax.commands.overrides import config_of  # these import JAX
    from rrfp_jax.launcher.folders import RunFolder
    from rrfp_jax.launcher.spawn import Launch
    from rrfp_jax.launcher.supervisor import Patience

    config = config_of(line)
    count = config.mesh.devices if options.n is None else options.n
    config.mesh.groups(count)  # refuses what cannot be
    patience = Patience.of(ENVIRONMENT)
    # Virtual CPU devices, unless somebody has said how many: ranks could not ask for them any more if their
    # config uses JAX when it is read.
    asked = CPU_DEVICES in ENVIRONMENT or "xla_force_host_platform" in ENVIRONMENT.get("XLA_FLAGS", "")
    cpus = {} if asked else {CPU_DEVICES: str(config.mesh.devices_of_process(count))}
    argv = [sys.executable, "-m", "rrfp_jax", "train", f"{FLAG}={line.file}", *line.overrides]
    with _replicas(options.replace_after, options.max_restarts, config, count) as replicas:
        launch = Launch(
            argv,
            replicas,
            RunFolder(Path(config.directory), config.name),
            patience,
            env={**ENVIRONMENT, **cpus},
            max_restarts=options.max_restarts,
            discards=(DONE, REFUSED, INTERRUPTED),  # done without having begun: nothing was left to do
        )
        return launch.run()


@contextmanager
def _replicas(seconds: int | None, max_restarts: int, config: RunConfig, count: int) -> Iterator[Elastic]:
    """The replicas of a run, without which it may go on after a loss, if it is to.

    Raises:
        UsageError: it never could.
    """
    from rrfp_jax.launcher.restarts import Elastic

    if seconds is None:
        yield Elastic({1: count})
        return
    from rrfp_jax.runs.run import checkpoints_of
    from rrfp_jax.runs.saving import ranks_of_replicas, save_latest

    if not max_restarts:
        raise UsageError(
            f"--replace-after={seconds} with --max-restarts=0: a run goes on after the loss of a rank by a "
            f"restart; give --max-restarts=N, the number of losses that it may have"
        )
    needs = ranks_of_replicas(config.mesh, count)
    if len(needs) < 2:
        raise UsageError(
            f"--replace-after={seconds} with mesh.dp={config.mesh.dp} in {count} processes: no replica can "
            f"be done without; give --config.mesh.dp=2 or more and a process for each device, or leave it out"
        )
    checkpoints = checkpoints_of(config) if config.checkpoint.wanted else None
    with lent_folder() as folder:
        yield Elastic(
            needs, seconds, folder, lambda memory, status, say: save_latest(memory, checkpoints, status, say)
        )


def leave_accelerators_alone() -> None:
    """Whatever this process computes, it computes on the CPU; the ranks it starts are not concerned."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _command(script: Sequence[str]) -> tuple[list[str], str]:
    """What follows `python`, and the name that the run has if none is given."""
    if script and script[0] == "-m":
        module = script[1:]
        if not module:
            raise UsageError("-m: no module given (see --help)")
        if "" not in sys.path:
            sys.path.insert(0, "")  # where `python -m` looks
        package = module[0].partition(".")[0]
        if not package.isidentifier() or importlib.util.find_spec(package) is None:
            raise UsageError(f"-m {module[0]}: no such module; is it in this directory, or installed?")
        return ["-m", *module], module[0].rpartition(".")[2]
    if not script:
        raise UsageError(f"no script given: {LAUNCH.command} -n 4 train.py (see --help)")
    if not path_of("script", script[0]).is_file():
        raise UsageError(f"{script[0]}: no such file; give a Python script, or -m and a module")
    with suppress(OSError):  # Python will say it
        text = read_whole(script[0], LARGEST_SCRIPT)
        if b"\ndef get_config(" in text and b"__main__" not in text:  # which ends with nothing done
            raise UsageError(f"{script[0]}: has get_config() and nothing that runs; write {FLAG}={script[0]}")
    return list(script), Path(script[0]).stem
