"""What each command says to `--help`, and to no arguments at all."""

import contextlib
import io

from rrfp_jax.commands.cli import run_verb
from rrfp_jax.commands.verbs import VERBS
from tests.golden.checkout import ROOT

COMMANDS = ("compile", "doctor", "export", "launch", "plan", "report", "sim", "top", "train", "why")
CONFIGS = ("quickstart", "sharded", "glyphs")


def said(name, *arguments):
    """A command's status, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_verb(VERBS[name], arguments)
    text = f"{out.getvalue()}{err.getvalue()}".replace(str(ROOT), "<root>")
    return {"status": status, "text": text.splitlines()}


TABLE = {name: lambda given, name=name: said(name, "--help") for name in COMMANDS}
TABLE |= {
    f"fields of {config}": lambda given, config=config: said(
        "train", f"--config={ROOT}/configs/{config}.py", "--help"
    )
    for config in CONFIGS
}
