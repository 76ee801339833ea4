"""Start a run's ranks on this machine, watch them to their end, and say how it went."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rrfp_jax.errors import DONE, INTERRUPTED, REFUSED, TrainingError
from rrfp_jax.runtime.coordinator import Coordinator, reserved_port
from rrfp_jax.runtime.lastwords import read_all
from rrfp_jax.train.crew import Crew, Patience, box_of, collected_signals
from rrfp_jax.train.diagnosis import diagnose
from rrfp_jax.train.folders import RunFolder
from rrfp_jax.train.gpus import gpu_environment
from rrfp_jax.train.rankend import RankEnd

THREADS_FLAG = "--xla_cpu_multi_thread_eigen"


def spawn(
    argv: Sequence[str],
    count: int,
    folder: RunFolder,
    *,
    command: str = "rrfp-launch",
    env: Mapping[str, str] | None = None,
    patience: Patience | None = None,
) -> int:
    """Run a command once per rank; must be called from the main thread, for it handles signals meanwhile.

    Each rank finds RRFP_COORDINATOR, RRFP_PROCESSES, RRFP_RANK and RRFP_FOLDER in its environment, and the
    launcher, not rank 0, sees to the coordination service. What they print goes to `rank-<r>.log` and, with
    the rank before each line, to stdout. None of them, nor of their groups, is left at the end.

    Args:
        argv: the command.
        count: of ranks.
        folder: for logs, black boxes (`box-<rank>`), last words and `diagnosis.txt`. One still in staging at
            the end is removed if all ranks refused or it was interrupted, else brought to its place.
        command: that messages begin with.
        env: of the ranks, before the above is added; None for this process's own.
        patience: limits; None for what `env` says.

    Returns:
        The exit status: 0 done, 1 failed, 2 refused by all ranks, 130 interrupted.

    Raises:
        TrainingError: the ranks, or the coordinator, cannot be started.
        UsageError: `env` gives nonsense as a limit; nothing has been started then.
    """
    base = os.environ if env is None else env
    patience = patience or Patience.of(base)
    with ExitStack() as stack:
        signals = stack.enter_context(collected_signals())
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        try:
            coordinator = Coordinator(address, count, linger_seconds=0.0)  # the ranks die with the launcher
            stack.callback(coordinator.close)
            crew = Crew(patience, folder, signals)
            stack.callback(crew.close)
            where = folder.path
            for rank in range(count):
                one = _environment(base, address, count, rank, where)
                crew.start(rank, argv, one, where)
        except (OSError, RuntimeError) as error:
            raise TrainingError(f"cannot start the ranks: {error}") from None
        crew.watch()
    return _conclude(crew, folder, command)


def _environment(
    base: Mapping[str, str], address: str, count: int, rank: int, folder: Path
) -> dict[str, str]:
    """What a rank is told by its environment."""
    flags = base.get("XLA_FLAGS", "")
    if THREADS_FLAG not in flags:  # ranks share the processor: one thread each computes
        flags = f"{flags} {THREADS_FLAG}=false".strip()
    return {
        **base,
        **gpu_environment(base, rank, count),
        "XLA_FLAGS": flags,
        "RRFP_COORDINATOR": address,
        "RRFP_PROCESSES": str(count),
        "RRFP_RANK": str(rank),
        "RRFP_FOLDER": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _conclude(crew: Crew, folder: RunFolder, command: str) -> int:
    """Print and keep the diagnosis, if anything was wrong, and see to the folder."""
    words = read_all(folder.path)
    ends = [
        RankEnd(
            rank=process.rank,
            status=process.status or 0,
            by_launcher=process.told,
            stopped=process.froze,
            words=words.get(process.rank),
            box=box_of(folder.path, process.rank),
            log_tail=tuple(process.tail),
            ended=process.ended,
        )
        for process in crew.ranks
    ]
    found = diagnose(ends, interrupted=crew.interrupted)
    if not folder.has_begun and found.status in (REFUSED, INTERRUPTED):
        folder.discard()
    else:
        folder.begin()
    if found.status != DONE:
        message = f"{command}: {found.text}"
        if folder.path.exists():
            (folder.path / "diagnosis.txt").write_text(
                f"{message}\n", encoding="utf-8", errors="backslashreplace"
            )
            message += f"\nlogs: {os.path.relpath(folder.path)}/rank-*.log"
        print(message, file=sys.stderr, flush=True)
    return found.status
