"""`rrfp-train --config=configs/quickstart.py [--config.x=y ...]`: train a named run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import asks_for_usage, exit_status
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import printable
from rrfp_jax.printing import occupy_streams, settle_streams
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals

COMMAND = "rrfp-train"

USAGE = """\
usage: rrfp-train --config=FILE.py [--config.FIELD=VALUE ...]

Trains the run that FILE.py's get_config() describes and keeps its files in runs/<name>/.
With --config=FILE.py --help, lists the fields of that run: their values, and what they are for. That takes
some seconds, as the file is read and imports JAX. Modules beside the file can be imported from it.

Ctrl-C stops the run after a step; it saves itself if checkpoints are on, and says how to go on. A second one
ends it at once."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, lambda: _train(argv))


def _train(argv: Sequence[str]) -> int:
    if asks_for_usage(argv):
        print(USAGE)
        return DONE
    line = read_config_line(argv)
    with heard_signals(signal.SIGINT, answer=ends_at_once(COMMAND)) as signals:
        from rrfp_jax.commands.overrides import configured  # these import JAX
        from rrfp_jax.runs.run import train
        from rrfp_jax.runtime.run.exits import fail
        from rrfp_jax.runtime.run.join import join

        if line.asks_help:
            configured(line, USAGE)
            return DONE
        world = join()  # before the file is read, which may use JAX
        with signals.answered_by(ends_at_once(COMMAND, lambda: fail(world, KeyboardInterrupt()))):
            before = _settings()
            config = configured(line, USAGE)
        if changed := sorted(name for name, _ in before ^ _settings()):
            names = printable(", ".join(dict.fromkeys(changed)))
            raise UsageError(
                f"{printable(line.file)}: sets {names}, but this process has joined its run already: set "
                f"such variables in the shell, before the command"
            )
        assert config is not None
        return train(config, signals, Path(line.file))


def _settings() -> set[tuple[str, str]]:
    """The environment variables of this package, with their values."""
    return {(name, value) for name, value in ENVIRONMENT.items() if name.startswith("RRFP_")}


def run() -> None:
    """Entry point of the `rrfp-train` command."""
    occupy_streams()
    status = main(sys.argv[1:])
    settle_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run has ended: nothing is left to be interrupted
    sys.exit(status)


if __name__ == "__main__":
    run()
