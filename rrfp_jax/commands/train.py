"""`rrfp train`: a named run, in this process or as one rank of several."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from rrfp_jax.commands.config_line import ConfigLine
from rrfp_jax.commands.verbs import TRAIN
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import printable
from rrfp_jax.runtime.run.signals import ends_at_once, heard_signals


def main(options: argparse.Namespace) -> int:
    """Train it; the exit status."""
    line: ConfigLine = options.line
    with heard_signals(signal.SIGINT, answer=ends_at_once(TRAIN.command)) as signals:
        from rrfp_jax.commands.overrides import config_of  # these import JAX
        from rrfp_jax.runs.run import train
        from rrfp_jax.runtime.run.exits import fail
        from rrfp_jax.runtime.run.join import join

        world = join()  # before the file is read, which may use JAX
        with signals.answered_by(ends_at_once(TRAIN.command, lambda: fail(world, KeyboardInterrupt()))):
            before = _settings()
            config = config_of(line)
        if changed := sorted(name for name, _ in before ^ _settings()):
            names = printable(", ".join(dict.fromkeys(changed)))
            raise UsageError(
                f"{printable(line.file)}: sets {names}, but this process has joined its run already: set "
                f"such variables in the shell, before the command"
            )
        return train(config, signals, Path(line.file))


def _settings() -> set[tuple[str, str]]:
    """The environment variables of this package, with their values."""
    return {(name, value) for name, value in ENVIRONMENT.items() if name.startswith("RRFP_")}
