"""Processes that stay alive and train a few steps whenever they are asked, so that systems take turns.

Whoever is not asked waits for a line on a pipe and uses no CPU. Questions and answers are JSON, a line each.
This module needs no package of any system, as each process imports its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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

    def __init__(self, python: str, module: str, system: str, case: str, folder: str = "") -> None:
        self._said = tempfile.TemporaryFile("w+")
        self._name = f"{system}, {case}"
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.rivals.living", module, system, case, folder],
            cwd=REPOSITORY,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
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

    def ask(self, steps: int) -> None:
        """Begin so many steps; the answer is for `answer`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why it ended
            print(steps, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """What the process says next: once that it is ready, then about the steps that it was asked for."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            raise RuntimeError(f"{self._name} ended with {self._process.returncode}:\n{self._said.read()[-4000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def steps(self, count: int) -> dict[str, Any]:
        """Seconds of a step, of so many in a row, and further figures."""
        self.ask(count)
        return self.answer()


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
    for line in sys.stdin:
        count = int(line)
        began = perf_counter()
        for _ in range(count):
            system.step()
        jax.block_until_ready(system.params())
        seconds = (perf_counter() - began) / count
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
