"""`rrfp-train --config=configs/quickstart.py [--config.x=y ...]`: train a named run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.train.config import fields_of, load_config, override
from rrfp_jax.train.run import train

USAGE = """\
usage: rrfp-train --config=FILE.py [--config.FIELD=VALUE ...]

Trains the run that FILE.py's get_config() describes and keeps its files in runs/<name>/.
With --config=FILE.py --help, lists the fields of that run with their values."""

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that configs find `models`, as with `python -m`
    argv = _joined(argv)
    files = [a.removeprefix("--config=") for a in argv if a.startswith("--config=")]
    rest = [a for a in argv if not a.startswith("--config=")]
    asks_help = bool({"--help", "-h", "--helpfull"} & set(rest))
    try:
        if len(files) != 1:
            if asks_help and not files:
                print(USAGE)
                return OK
            raise UsageError(
                f"{'no' if not files else len(files)} --config given: name one run, such as "
                f"--config=configs/quickstart.py (--help tells more)"
            )
        config = load_config(files[0])
        if asks_help:
            print(USAGE, "", *(f"  --config.{name}={value}" for name, value in fields_of(config)), sep="\n")
            return OK
        train(override(config, rest))
    except UsageError as error:
        print(f"rrfp-train: {error}", file=sys.stderr)
        return REFUSED
    except TrainingError as error:
        print(f"rrfp-train: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rrfp-train: interrupted", file=sys.stderr)
        return INTERRUPTED
    return OK


def _joined(argv: Sequence[str]) -> list[str]:
    """`--flag value` as `--flag=value`."""
    out: list[str] = []
    for argument in argv:
        waiting = out and out[-1].startswith("--config") and "=" not in out[-1]
        if waiting and not argument.startswith("-"):
            out[-1] += f"={argument}"
        else:
            out.append(argument)
    return out


def run() -> None:
    """Entry point of the `rrfp-train` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
