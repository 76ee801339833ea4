"""The report of a large step: how long the command takes, how large its page is, and how soon it is drawn.

    python -m tests.verification.report_page [--json=FILE] [--check] [--stages=N] [--microbatches=N]

The page is opened in Chromium, each time in a new one that has nothing of it compiled; "drawn" is when the
last chart is, by the page's own clock.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Aim, finish, parse
from rrfp_jax.report.store import STEPS, write_steps
from tests.support.browser import CHROMIUM, browser
from tests.support.spoilt import large_step

OPENED = 5
LARGEST_PAGE, LONGEST_SECONDS = 10e6, 3.0

DRAWN = "document.body && document.body.dataset.drawn && performance.now()"


def seconds_to_draw(page: Path, profile: Path) -> float:
    """From the beginning of the navigation on (s)."""
    with browser(profile) as chromium:
        chromium.open(page)
        seconds = chromium.until(DRAWN) / 1e3
        assert chromium.value("document.body.dataset.drawn") == "all"
    return float(seconds)


def main() -> int:
    """Make it, open it, print, write."""
    parser = parse(__doc__)
    parser.add_argument("--stages", type=int, default=64, help="(default: 64)")
    parser.add_argument("--microbatches", type=int, default=256, help="(default: 256)")
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error("Chromium is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_steps(folder / STEPS, {"run": [large_step(options.stages, options.microbatches)]})
        began = time.monotonic()
        command = [sys.executable, "-m", "rrfp_jax", "report", str(folder / STEPS)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        command_seconds = time.monotonic() - began
        page = folder / "report.html"
        size = page.stat().st_size
        drawn = [seconds_to_draw(page, folder / f"profile-{n}") for n in range(OPENED)]
    print(
        f"{options.stages} stages, {options.microbatches} microbatches: rrfp report {command_seconds:.1f} s"
    )
    figures = {"command_seconds": command_seconds, "page_bytes": size, "drawn_seconds": drawn}
    aims = [
        Aim("page", size / 1e6, LARGEST_PAGE / 1e6, "MB"),
        Aim(f"drawn, median of {OPENED}", statistics.median(drawn), LONGEST_SECONDS, "s"),
    ]
    return finish(options, figures, aims)


if __name__ == "__main__":
    sys.exit(main())
