"""`rrfp-plan --config=configs/gpt3_large.py --card=h100`: what a run would need, and how fast it would go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import Parser, exit_status, path_argument
from rrfp_jax.commands.config_line import read_config_line
from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.fields import check_not_read, output_of
from rrfp_jax.forecast.devices import ACCELERATORS, LINKS, Accelerator, Link, accelerator_of_kind
from rrfp_jax.json_files import write_json
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY

COMMAND = "rrfp-plan"

MEASURED = "measured"

MEMORY_SHARE = 0.75
"""Part of a GPU's memory that JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise."""

DESCRIPTION = """\
Predicts a run's step from its config alone: parameters, bytes and FLOPs of every stage, step time, idle time
and memory on a given device, and the split of the layers that its costs suggest. Nothing is allocated,
compiled or loaded: shapes are abstract, costs are XLA's analysis of every distinct layer, the step is
simulated."""

EPILOG = f"""\
--config.FIELD=VALUE may be given as for rrfp-train (--config=FILE --help lists them), such as
--config.schedule=1f1b, --config.remat=full, --config.split=auto.

devices: {", ".join(ACCELERATORS)}, and {MEASURED}: this machine's, two rates measured in seconds
links: {", ".join(LINKS)}, or BYTES_PER_SECOND,SECONDS such as 12.5e9,50e-6

columns: GFLOP = forward and backward of a microbatch; fixed = weights, optimizer state, gradient sums,
parked gradients and, unless config.transport is socket, slots for messages; held = per microbatch in flight;
peak = the most on the device in the simulated order

exit status: 0 done, whether or not the run fits; 1 failed, 2 refused, 130 interrupted"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, lambda: _plan(arguments))


def _plan(arguments: Sequence[str]) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.pp is not None:
        rest.append(f"--config.mesh.pp={options.pp}")
    if options.help:
        parser.print_help()
        rest = [*rest, "--help"]
        if not any(argument.startswith("--config") for argument in rest):
            return DONE
    for name in ("efficiency", "memory_share"):
        if (value := getattr(options, name)) is not None and not 0 < value <= 1:
            raise UsageError(f"--{name.replace('_', '-')}={value}: give a share above 0, at most 1")
    if options.json is not None:
        output_of("--json", options.json)
    link = None if options.link is None else _link(options.link)
    line = read_config_line(rest)
    if options.json is not None:
        check_not_read("--json", options.json, [Path(line.file)])
    from rrfp_jax.commands.overrides import configured  # these import JAX
    from rrfp_jax.commands.planning import plan_run

    config = configured(line, "")
    if config is None:
        return DONE
    device = _accelerator(options.card, options.memory_share)
    memory = device.memory
    if memory is None and options.memory_share is not None:
        raise UsageError(
            f"--memory-share={options.memory_share}: device {device.name} has no limit on memory; "
            f"leave it out"
        )
    if memory is not None and device.name != MEASURED:  # which has what JAX takes
        memory = int(memory * (options.memory_share or MEMORY_SHARE))
    planned = plan_run(config, device.at(options.efficiency), link or LINKS[device.link], memory)
    if options.json is not None:
        write_json(options.json, planned.as_json_object(), indent=1)
    print(planned, flush=True)
    return DONE


def _accelerator(name: str | None, memory_share: float | None) -> Accelerator:
    """The accelerator of a name; without one, of this machine's device, of which JAX is to take a share."""
    import jax

    from rrfp_jax.forecast.measured_accelerator import measured_accelerator
    from rrfp_jax.launcher.spawn import THREADS_FLAG

    if name in ACCELERATORS:
        jax.config.update("jax_platforms", "cpu")  # to be told of shapes; leaves GPUs to those who compute
        return ACCELERATORS[str(name)]
    if name not in (None, MEASURED):
        raise UsageError(f"--card={name}: choose one of {', '.join(ACCELERATORS)}, or {MEASURED}")
    ENVIRONMENT.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if memory_share is not None:
        ENVIRONMENT.pop(OLD_MEMORY, None)
        ENVIRONMENT[MEMORY] = str(memory_share)
    ENVIRONMENT["XLA_FLAGS"] = f"{ENVIRONMENT.get('XLA_FLAGS', '')} {THREADS_FLAG}=false".strip()
    device = jax.local_devices()[0]
    known = None if name == MEASURED or device.platform == "cpu" else accelerator_of_kind(device.device_kind)
    return known or measured_accelerator(device)


def _link(text: str) -> Link:
    if text in LINKS:
        return LINKS[text]
    try:
        rate, latency = map(float, text.split(","))
    except ValueError:
        rate = latency = -1.0
    if not (0 < rate < float("inf") and 0 <= latency < float("inf")):
        raise UsageError(f"--link={text}: choose one of {', '.join(LINKS)}, or BYTES_PER_SECOND,SECONDS")
    return Link(bytes_per_second=rate, latency=latency)


def _parser() -> Parser:
    parser = Parser(
        COMMAND,
        DESCRIPTION,
        EPILOG,
        usage=f"{COMMAND} --config=FILE.py [--card=NAME] [--link=NAME] [--config.FIELD=VALUE ...]",
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="this, and the fields of --config if given")
    parser.add_argument("--card", metavar="NAME", help="every stage's device (this machine's)")
    parser.add_argument("--link", metavar="NAME", help="between neighbours (what the device usually has)")
    parser.add_argument("--pp", metavar="N", help="stages; short for --config.mesh.pp=N")
    parser.add_argument(
        "--efficiency", type=float, default=1.0, metavar="X", help="share of the device's peaks reached (1)"
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        metavar="X",
        help=f"part of the device's memory that JAX takes ({MEMORY_SHARE}; as told, of a measured one)",
    )
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write all figures here")
    return parser


def run() -> None:
    """Entry point of the `rrfp-plan` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
