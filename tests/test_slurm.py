"""The SLURM file as far as it can be checked without SLURM (launch/README.md says what was run with it)."""

import os
import re
import subprocess
from pathlib import Path

FILE = Path(__file__).parent.parent / "launch" / "slurm.sbatch"

SBATCH_OPTIONS = {"ntasks", "gpus-per-task", "signal", "nodes", "time", "partition", "job-name", "requeue"}
"""Some of those that `sbatch --help` lists. It refuses a file with any other, such as srun's own."""


def test_every_option_is_one_of_sbatch():
    options = re.findall(r"^#SBATCH --([\w-]+)", FILE.read_text(), re.MULTILINE)
    assert options and set(options) <= SBATCH_OPTIONS


def test_arguments_reach_every_task(tmp_path):
    stub = tmp_path / "srun"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ["--config=a file.py", "--config.steps=3"]
    done = subprocess.run(
        ["bash", FILE, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    given = done.stdout.splitlines()
    assert given[-5:] == ["python", "-m", "rrfp_jax.train.main", *arguments]
    assert "--kill-on-bad-exit=1" in given[:-5]
