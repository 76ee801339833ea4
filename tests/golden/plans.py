"""What `rrfp plan` predicts of every config: footprints, peaks of the meter, splits, what `auto` takes."""

import contextlib
import io
import json

from tests.golden.checkout import ROOT
from tests.support.commands import plan

CONFIGS = (
    *("glyphs", "gpt3_large", "gpt_lengths", "llama3_70b", "llama3_70b_vit_22b", "llama3_8b_vit_5b"),
    *("mixtral_8x7b", "open_characters", "quickstart", "qwen3_32b_internvit_6b", "qwen3_4b"),
    *("qwen3_4b_vit_bigg", "sharded", "vision_language"),
)
ONE_DEVICE = ("--config.mesh.tp=1", "--config.mesh.dp=1")
WAYS = {
    "as it is": (),
    "auto": ("--config.schedule=auto", "--config.split=auto"),
    "1f1b": ("--config.schedule=1f1b",),
    "bfw": ("--config.schedule=bfw",),
}
SMALL = ("gpt3_large", "gpt_lengths", "quickstart")
"""Those that are planned in all ways; the others in the first two."""


def planned(given, config, *more):
    """The figures and the sentence of a plan, or of its refusal."""
    file = given.folder / f"{config}-{len(list(given.folder.iterdir()))}.json"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = plan(
            [f"--config={ROOT}/configs/{config}.py", "--card=h100", f"--json={file}", *ONE_DEVICE, *more]
        )
    figures = json.loads(file.read_text()) if file.exists() else None
    text = f"{out.getvalue()}{err.getvalue()}"
    for path, name in ((given.folder, "<folder>"), (ROOT, "<checkout>")):
        text = text.replace(str(path), name)
    return {"status": status, "figures": figures, "text": text.splitlines()}


def ways(config):
    """What is planned of a config."""
    return {name: more for name, more in WAYS.items() if config in SMALL or name in ("as it is", "auto")}


TABLE = {
    f"{config}, {way}": lambda given, config=config, more=more: planned(given, config, *more)
    for config in CONFIGS
    for way, more in ways(config).items()
}
