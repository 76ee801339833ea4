"""A stand-in for `srun`: the tasks of one step on two "nodes", two addresses of this machine's loopback.

    python stub_srun.py --output=FILE [--other=option ...] COMMAND [ARGUMENT ...]

SLURM_JOB_ID and SLURM_NTASKS come from the job. Each task gets the variables that srun 22.05 sets, as seen on
two slurmd of one machine. SIGTERM is passed on to the tasks and all that they have started, as slurmstepd
signals a step; a task that ends badly ends the others, as --kill-on-bad-exit has it.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

NODES = ("127.0.0.2", "127.0.0.3")


def step_environment(task, tasks):
    """Of one task; blocks of neighbours share a node."""
    here = tasks // len(NODES)
    node, local = divmod(task, here)
    return {
        "RRFP_BIND": NODES[node],  # the nodes are one machine, whose routes do not tell them apart
        "SLURMD_NODENAME": NODES[node],
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(task),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": ",".join(NODES),
        "SLURM_STEP_NUM_NODES": str(len(NODES)),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{len(NODES)})",
    }


def main(arguments):
    """Run the step; its exit status is the worst of its tasks'."""
    options = [argument for argument in arguments if argument.startswith("--output=")]
    command = arguments[next(i for i, a in enumerate(arguments) if not a.startswith("--")) :]
    tasks = int(os.environ["SLURM_NTASKS"])
    with Path(options[0].partition("=")[2]).open("a", buffering=1) as log:
        running = [
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **step_environment(task, tasks)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for task in range(tasks)
        ]

        def terminate(*_):
            for process in psutil.Process().children(recursive=True):
                process.terminate()

        signal.signal(signal.SIGTERM, terminate)

        def copy(task, process):
            for line in process.stdout:
                log.write(f"{task}: {line}")
            if process.wait():
                for other in running:
                    other.kill()

        readers = [threading.Thread(target=copy, args=pair) for pair in enumerate(running)]
        for reader in readers:
            reader.start()
        for reader in readers:
            while reader.is_alive():
                reader.join(0.1)  # a handler runs between two
    return max(abs(process.returncode) for process in running)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
