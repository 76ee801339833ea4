"""Runs one producer in a process of its own: `python -m tests.golden.producing NAME FOLDER`.

A producer is a module of this folder with a `TABLE` from names of goldens to functions. A function takes
`Given` and returns plain data for JSON.
"""

import argparse
import dataclasses
import importlib
import json
import resource
import sys
import time
import traceback
from pathlib import Path

PRODUCERS = (
    *("programs", "plans", "losses", "ranks", "folders", "suite"),
    *("simulated", "refusals", "data", "messages", "helps"),
)
"""The slowest first."""

DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Given:
    """What a golden may use.

    Attributes:
        folder: empty at first, of this producer alone, and kept.
        before: the folder of the same producer of the older checkout that this one is compared with.
    """

    folder: Path
    before: Path | None = None


def wanted(name, words):
    """Whether a golden is asked for, by words of which its name must have one; no words ask for all."""
    return not words or any(word in name for word in words)


def produce(producer, table, given, words=()):
    """The goldens of a table, those that failed with their traceback, and how long each took (s)."""
    found = {"goldens": {}, "failed": {}, "seconds": {}}
    for name, make in table.items():
        full = f"{producer}/{name}"
        if not wanted(full, words):
            continue
        began = time.perf_counter()
        try:
            found["goldens"][full] = plain(make(given))
        except Exception:
            found["failed"][full] = traceback.format_exc()
        found["seconds"][full] = round(time.perf_counter() - began, 2)
    return found


def plain(value):
    """What JSON makes of a value, so that values of two checkouts compare as their files do."""
    return json.loads(json.dumps(value, sort_keys=True))


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m tests.golden.producing")
    parser.add_argument("producer", choices=PRODUCERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args(arguments)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    folder = options.folder / options.producer
    folder.mkdir(parents=True)
    given = Given(folder.resolve(), options.before and options.before.resolve() / options.producer)
    table = importlib.import_module(f"tests.golden.{options.producer}").TABLE
    found = produce(options.producer, table, given, options.only.split())
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_seconds"] = round(sum(own.ru_utime + own.ru_stime for own in used))
    text = json.dumps(found, sort_keys=True, indent=0)
    (options.folder / f"{options.producer}.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
