"""How a script takes its place in a run before it imports what uses JAX."""

from __future__ import annotations


def join() -> None:
    """Take this process's place in its run; a second call does nothing, nor does one in a worker.

    A `Trainer` does this by itself. But once JAX has been used, a process can join the others no more, and
    some packages use JAX when they are imported. A script that imports one of them begins with

        import rrfp_jax as rrfp

        rrfp.join()

    and then imports the rest. In a run of one process there is nothing to join. In a run of several, which
    `rrfp launch`, `srun` or the RRFP_* variables have started, it waits until all processes are connected.

    Workers that a process of a run has started, such as those of `multiprocessing` that import the script
    again, join nothing.

    Raises:
        UsageError: JAX has been used already, by the line that is named; or the environment says half of
            what is needed, or nonsense.
        TrainingError: the other processes cannot be reached.
    """
    from rrfp_jax.runtime.run.join import is_taken, join

    if not is_taken():
        join()
