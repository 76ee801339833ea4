"""A named run in several processes on this machine: `rrfp-launch --config=configs/quickstart.py`.

`python -m launch.local` in the checkout does the same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rrfp_jax.commands.command_line import asks_for_usage, exit_status, interruptible, leave
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, INTERRUPTED, REFUSED, UsageError
from rrfp_jax.fields import printable
from rrfp_jax.printing import occupy_streams
from rrfp_jax.runtime.run.host_memory import lent_folder

if TYPE_CHECKING:
    from rrfp_jax.launcher.restarts import Elastic
    from rrfp_jax.runs.config import RunConfig

COMMAND = "launch.local"
REPLACE_AFTER = "--replace-after"
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
"""JAX's own variable."""

USAGE = """\
usage: {command} --config=FILE.py [--config.FIELD=VALUE ...] [-n N] [--max-restarts=N]
       [--replace-after=SECONDS]

Trains the run that FILE.py's get_config() describes in as many processes on this machine as its mesh asks
for, or N, and keeps its files in runs/<name>/. With --config=FILE.py --help, lists the fields of that run:
their values, and what they are for. If the run fails it is started again, up to --max-restarts times (0).
With --replace-after the state of each step is kept in this machine's memory. If a rank is lost, the run goes
on from there with fewer replicas, and so many seconds later with all of them.
Exit status: 0 done, 1 failed, 2 refused, 130 interrupted."""


def main(argv: Sequence[str]) -> int:
    """Run `python -m launch.local`; its exit status."""
    typed = f"python -m {COMMAND}"
    return exit_status(COMMAND, interruptible(COMMAND, lambda: launch_run(argv, COMMAND, typed)))


def launch_run(argv: Sequence[str], command: str, typed: str) -> int:
    """Train a named run in several processes; the exit status.

    Args:
        argv: `--config=FILE.py` and what else there is.
        command: that messages begin with.
        typed: how one calls it.

    Raises:
        UsageError: what cannot be run, before anything is started.
    """
    usage = USAGE.format(command=typed)
    if asks_for_usage(argv):
        print(usage)
        return DONE
    asked, rest = _taken("-n", "processes", argv)
    max_restarts, rest = _taken("--max-restarts", "restarts", rest)
    replace_after, rest = _taken(REPLACE_AFTER, "seconds", rest)
    line = read_config_line(rest)
    leave_accelerators_alone()  # the config is read here too: the devices are the ranks'
    from rrfp_jax.commands.overrides import configured  # these import JAX
    from rrfp_jax.launcher.folders import RunFolder
    from rrfp_jax.launcher.spawn import Launch
    from rrfp_jax.launcher.supervisor import Patience

    config = configured(line, usage)
    if config is None:
        return DONE
    most = config.processes
    count = most if asked is None else asked
    if not 1 <= count <= most or most % count:
        raise UsageError(
            f"-n {count}: the run's mesh has {most} devices, which are shared out evenly; give a number that "
            f"divides {most}"
        )
    config.mesh.groups(count)  # refuses what cannot be
    patience = Patience.of(ENVIRONMENT)
    argv = [sys.executable, "-m", "rrfp_jax.commands.train", *rest]
    with _elastic(replace_after, max_restarts or 0, config, count) as elastic:
        launch = Launch(
            argv,
            count,
            RunFolder(Path(config.directory), config.name),
            patience,
            command,
            env=with_cpu_devices(config.mesh.devices_of_process(count), ENVIRONMENT),
            max_restarts=max_restarts or 0,
            elastic=elastic,
            discards=(DONE, REFUSED, INTERRUPTED),  # done without having begun: nothing was left to do
        )
        return launch.run()


@contextmanager
def _elastic(
    seconds: int | None, max_restarts: int, config: RunConfig, count: int
) -> Iterator[Elastic | None]:
    """What lets the run go on without lost ranks, if it is to.

    Raises:
        UsageError: it never could.
    """
    if seconds is None:
        yield None
        return
    from rrfp_jax.launcher.restarts import Elastic
    from rrfp_jax.runs.replicas import ranks_of_replicas, save_latest
    from rrfp_jax.runs.stopping import checkpoints_of

    if not max_restarts:
        raise UsageError(
            f"{REPLACE_AFTER}={seconds} with --max-restarts=0: a run goes on after the loss of a rank by a "
            f"restart; give --max-restarts=N, the number of losses that it may have"
        )
    mesh = config.mesh
    needs = ranks_of_replicas(mesh, count)
    if len(needs) < 2:
        raise UsageError(
            f"{REPLACE_AFTER}={seconds} with mesh.dp={mesh.dp} in {count} processes: no replica can be done "
            f"without; give --config.mesh.dp=2 or more and a process for each device, or leave it out"
        )
    checkpoints = checkpoints_of(config) if config.checkpoint.wanted else None
    with lent_folder() as folder:
        yield Elastic(
            needs, seconds, folder, lambda memory, status, say: save_latest(memory, checkpoints, status, say)
        )


def with_cpu_devices(count: int, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which JAX has so many virtual CPU devices, unless it says how many.

    Ranks could not ask for them any more if their config uses JAX when it is read.
    """
    asked = CPU_DEVICES in environment or "xla_force_host_platform" in environment.get("XLA_FLAGS", "")
    return {**environment, **({} if asked else {CPU_DEVICES: str(count)})}


def leave_accelerators_alone() -> None:
    """Whatever this process computes, it computes on the CPU; the ranks it starts are not concerned."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def _taken(flag: str, things: str, argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number that a flag gives, as FLAG N or FLAG=N, if it is there; and the other arguments."""
    rest = list(argv)
    at = next((i for i, argument in enumerate(rest) if argument.partition("=")[0] == flag), None)
    if at is None:
        return None, rest
    joined = "=" in rest[at]
    value = rest[at].partition("=")[2] if joined else "".join(rest[at + 1 : at + 2])
    if not re.fullmatch("[0-9]{1,9}", value):
        raise UsageError(f"{flag} {printable(value)}: give a number of {things}, of at most nine digits")
    return int(value), rest[:at] + rest[at + (1 if joined else 2) :]


def run() -> None:
    """Entry point of `python -m launch.local`."""
    occupy_streams()
    leave(main(sys.argv[1:]))
