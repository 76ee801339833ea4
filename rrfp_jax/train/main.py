"""`rrfp-train --config=configs/quickstart.py [--config.x=y ...]`: train a named run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.runtime.join import in_company
from rrfp_jax.train.commandline import configured
from rrfp_jax.train.run import train

USAGE = """\
usage: rrfp-train --config=FILE.py [--config.FIELD=VALUE ...]

Trains the run that FILE.py's get_config() describes and keeps its files in runs/<name>/.
With --config=FILE.py --help, lists the fields of that run with their values."""

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    try:
        config = configured(argv, USAGE)
        if config is not None:
            train(config)
    except (UsageError, TrainingError, KeyboardInterrupt) as error:
        if in_company():
            raise  # one of several processes ends as runtime/farewell.py has it
        said = "interrupted" if isinstance(error, KeyboardInterrupt) else error
        print(f"rrfp-train: {said}", file=sys.stderr)
        return {UsageError: REFUSED, KeyboardInterrupt: INTERRUPTED}.get(type(error), FAILED)
    return OK


def run() -> None:
    """Entry point of the `rrfp-train` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
