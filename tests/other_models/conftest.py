"""Which packages are here, and a table of all comparisons after the tests."""

import os
from importlib.util import find_spec

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

PACKAGES = {
    "artifex": "artifex",
    "equimo": "equimo",
    "haiku": "mlp_gpt_jax",
    "haliax": "haliax",
    "keras": "keras_hub",
    "mamba2": "mamba2_jax",
    "penzai": "penzai",
    "transformers": "transformers",
    "tunix": "tunix",
    "vitax": "vitax",
}
"""By test file, the package whose models it has."""

if (
    os.environ.get("RRFP_OTHER_MODELS") != "all"
):  # as `make other-models` says, where a missing one is an error
    collect_ignore = [f"test_{name}.py" for name, package in PACKAGES.items() if find_spec(package) is None]


def pytest_terminal_summary(terminalreporter):
    """The largest difference of each comparison."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    rows = sorted(
        value
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "compared" and report.when == "call"
    )
    if rows:
        terminalreporter.section("models that other people wrote: the largest difference")
    for package, framework, model, stages, what, difference in rows:
        line = f"{package:36} {framework:8} {model:22} {stages} stages  {what:10} {difference:.1e}"
        terminalreporter.write_line(line)
