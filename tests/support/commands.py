"""The commands of `rrfp`, each as a function of its arguments."""

from functools import partial

from rrfp_jax.commands.cli import run_verb
from rrfp_jax.commands.verbs import VERBS

compile_ahead, doctor, export, launch, plan, report, sim, top, train, why = (
    partial(run_verb, VERBS[name])
    for name in ("compile", "doctor", "export", "launch", "plan", "report", "sim", "top", "train", "why")
)
