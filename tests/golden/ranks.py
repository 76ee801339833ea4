"""Losses in hex over 60 steps in four processes, started as users start them; and the script of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.golden.folders import names
from tests.golden.losses import IN_FOUR_PROCESSES, trained, trainer

LAUNCH = ("-m", "rrfp_jax", "launch", "-n", "4")
LIMIT_SECONDS = 900


def launched(given):
    """All cases in one launch; what rank 0 found, which the others found, too."""
    done = subprocess.run(
        [sys.executable, *LAUNCH, __file__, str(given.folder)],
        capture_output=True,
        text=True,
        cwd=given.folder,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((given.folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert all(own == found[0] for own in found), "ranks disagree"
    return {**found[0], "files": names(given.folder / "runs")}


def main(folder):
    found = {}
    for name, case in IN_FOUR_PROCESSES.items():
        own, _ = trainer(**case)
        found[name] = trained(own)
    rank = os.environ["RRFP_RANK"]
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


TABLE = {"4 processes": launched}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
