"""Processes that stay alive and train a few steps whenever they are asked, so that systems take turns.

Whoever is not asked waits for a line on a pipe and uses no CPU. Questions and answers are JSON, a line each.
This module needs no package of any system, as each process imports its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from benchmarks.harness import REPOSITORY

CHECKED_STEPS = 4
"""Whose losses are compared with those of other systems; they warm up, too."""


class Living:
    """A process that trains a case by one system, from the parent's side.

    Raises:
        RuntimeError: from every call, if the process ended; with the end of what it said.
    """

    def __init__(
        self, python: str, module: str, system: str, case: str, folder: str = "", cache: str = ""
    ) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed where this is left)
        self._name = f"{system}, {case}"
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.rivals.living", module, system, case, folder],
            cwd=REPOSITORY,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **(cached_in(cache) if cache else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def __enter__(self) -> Living:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def answer(self) -> dict[str, Any]:
        """What the process says next: once that it is ready, then what it was asked for."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise RuntimeError(
                f"{self._name} ended with {self._process.returncode}:\n{self._said.read()[-4000:]}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, steps: int) -> float:
        """Of a step, of so many in a row."""
        return float(self._asked(steps)["seconds"])

    def bytes(self) -> int | None:
        """By how much the process grows during a step."""
        found: int | None = self._asked(0)["bytes"]
        return found

    def _asked(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why it ended
            print(steps, file=self._process.stdin, flush=True)
        return self.answer()


def cached_in(folder: str) -> dict[str, str]:
    """The environment in which JAX keeps every program in a folder."""
    names = ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES")
    return {"JAX_COMPILATION_CACHE_DIR": folder, names[0]: "0", names[1]: "-1"}


def main(arguments: Sequence[str]) -> None:
    """Make a system, say the losses of its first steps, then train whenever there is a line."""
    module, name, case, folder = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    if folder:
        sys.path.insert(0, folder)

    import jax

    from benchmarks.rivals.cases import STAGES, model_of

    jax.config.update("jax_num_cpu_devices", STAGES)
    system = importlib.import_module(module).SYSTEMS[name](model_of(case))
    began = perf_counter()
    losses = [system.step() for _ in range(CHECKED_STEPS)]
    jax.block_until_ready(system.params())
    ready = {"losses": losses, "jax": jax.__version__, "warm_up_seconds": perf_counter() - began}
    print(json.dumps(ready), file=answers, flush=True)

    def steps(count: int) -> float:
        """Seconds of a step, of so many in a row, the last one's update included."""
        began = perf_counter()
        for _ in range(count):
            system.step()
        jax.block_until_ready(system.params())
        return (perf_counter() - began) / count

    for line in sys.stdin:
        count = int(line)
        found = {"seconds": steps(count)} if count else {"bytes": grown(partial(steps, 1))}
        print(json.dumps(found), file=answers, flush=True)


def grown(call: Callable[[], object]) -> int | None:
    """Bytes by which this process is larger at most while it calls something than before; None if the system
    does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back before, so that it counts again
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _memory("VmRSS")
        call()
        return _memory("VmHWM") - before
    except (OSError, AttributeError):
        return None


def _memory(name: str) -> int:
    """A line of what Linux says about this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    main(sys.argv[1:])
