"""`rrfp-compile --config=configs/gpt3_large.py --card=h100`: a run's programs compiled without its GPUs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.commands.plan import MEMORY_SHARE
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, FAILED, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.forecast.devices import ACCELERATORS, TARGETS, target_text
from rrfp_jax.json_files import write_json

COMMAND = "rrfp-compile"

REMEDY = "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false has cuBLAS do all products, here and in the run"

MOST_SAID = 400
"""Characters of a reason."""

DESCRIPTION = """\
Compiles all programs of a run for GPUs that are not there: every stage, every shape of microbatch. Says per
stage what XLA's compiler wants in bytes, beside what rrfp-plan predicts, and whether the run fits. The
programs are kept where the run looks for them, so that a start on such GPUs finds them there.

It needs XLA's compiler for GPUs (pip install 'jax[cuda12]'), but neither a GPU nor a driver. Nothing is
allocated. Without a GPU XLA cannot try out which kernel is fastest: it goes by its own estimates."""

EPILOG = f"""\
--config.FIELD=VALUE may be given as for rrfp-train (--config=FILE --help lists them). XLA_FLAGS must be those
of the run; flags for CPUs do not matter. Elsewhere the programs are taken only with this user's key
(docs/security.md).

cards: {", ".join(TARGETS)}

columns: fixed = weights, optimizer state, gradient sums and parked gradients; held = per microbatch in
flight; temporaries = of the largest program of each kind; of two numbers the first is what rrfp-plan
predicts, the second what XLA says

exit status: 0 done and it fits, 1 it does not fit or failed, 2 refused, 130 interrupted"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, lambda: _compile(arguments))


def _compile(arguments: Sequence[str]) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.help:
        parser.print_help()
        rest = [*rest, "--help"]
        if not any(argument.startswith("--config") for argument in rest):
            return DONE
    if options.card not in TARGETS:
        raise UsageError(f"--card={options.card}: choose one of {', '.join(TARGETS)}")
    if not 0 < options.memory_share <= 1:
        raise UsageError(f"--memory-share={options.memory_share}: give a share above 0, at most 1")
    if options.json is not None:
        output_of("--json", options.json)
    stages = None if options.stages is None else _numbers(options.stages)
    line = read_config_line(rest)
    if options.json is not None:
        check_not_read("--json", options.json, [Path(line.file)])
    from rrfp_jax.runtime.programs import compiler  # these import JAX

    ENVIRONMENT.update(compiler.ENVIRONMENT)
    compiler.require_gpu_compiler()
    from jax.errors import JaxRuntimeError

    from rrfp_jax.commands.compiling import compile_run
    from rrfp_jax.commands.overrides import configured

    config = configured(line, "")
    if config is None:
        return DONE
    card = ACCELERATORS[options.card]
    memory = int((card.memory or 0) * options.memory_share)
    try:
        found = compile_run(config, card, target_text(card), memory, options.processes, stages, options.out)
    except JaxRuntimeError as error:
        print(f"{COMMAND}: XLA gives up: {_reason(error)}; {REMEDY}", file=sys.stderr)
        return FAILED
    if options.json is not None:
        write_json(options.json, found.as_json_object(), indent=1)
    if options.hlo is not None:
        found.write_texts(options.hlo)
    print(found, flush=True)
    return DONE if found.run.refusal is None else FAILED


def _reason(error: Exception) -> str:
    """The first line of what the compiler says, which may go on for pages."""
    return str(error).partition("\n")[0][:MOST_SAID]


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(f"--stages={text}: give numbers of stages, such as 0,1,7") from None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        COMMAND,
        DESCRIPTION,
        EPILOG,
        usage=f"{COMMAND} --config=FILE.py --card=NAME [--stages=N,...] [--config.FIELD=VALUE ...]",
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="this, and the fields of --config if given")
    parser.add_argument("--card", metavar="NAME", help="every stage's device")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="that the run will have (one for each device)"
    )
    parser.add_argument("--stages", metavar="N,...", help="compile only these (all)")
    parser.add_argument(
        "--out", type=path_argument, metavar="FOLDER", help="for programs (where the run looks)"
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=MEMORY_SHARE,
        metavar="X",
        help=f"part of the card's memory that JAX takes ({MEMORY_SHARE})",
    )
    parser.add_argument(
        "--hlo", type=path_argument, metavar="FOLDER", help="write every program's HLO here, as text"
    )
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write all figures here")
    return parser


def run() -> None:
    """Entry point of the `rrfp-compile` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
