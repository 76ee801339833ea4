"""Python imports this at its start, before anything else, where the folder is on PYTHONPATH."""

import os
import sys
from pathlib import Path

if "RRFP_TEST_MUTANT" in os.environ:
    root = str(Path(__file__).parents[4])
    sys.path.insert(0, root)
    from tests.verification.mutation.install import install

    sys.path.remove(root)
    install(os.environ["RRFP_TEST_MUTANT"])
