"""`rrfp-export`: a run's parameters as safetensors files, under the public names of a family."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp_jax.commands.command_line import Parser, exit_status, interruptible, path_argument, print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.weights.families import FAMILIES

COMMAND = "rrfp-export"

DESCRIPTION = """\
Writes the parameters of a run's latest intact checkpoint as safetensors files: under the names that they have
here, or, with --as, as models of a published family are, with config.json, so that other programs read them
and rrfp_jax.weights.published does. Values are those of the checkpoint to the bit, unless --dtype is given.

The folder is written beside its place and then renamed, so it is there in full or not at all. It is never
written over. The run may still train. A file at a time is in memory."""

EPILOG = """\
A tokenizer is not written: copy its files from the model that the run began with. tie_word_embeddings is true
where embedding and head are equal to the bit.

exit status: 0 done, 1 failed, 2 refused, 130 interrupted

examples:
  rrfp-export runs/quickstart --to=quickstart-weights
  rrfp-export runs/tuned --to=tuned --as=qwen3 --dtype=bfloat16
  rrfp-export runs/seeing --to=encoder --as=siglip --model=model.encoder --first=0"""

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status (0 done, 1 failed, 2 refused, 130 interrupted)."""
    return exit_status(COMMAND, interruptible(COMMAND, lambda: _export(arguments)))


def _export(arguments: Sequence[str]) -> int:
    options = _parser().options(arguments)
    if options is None:
        return DONE
    if options.step is not None and options.step < 0:
        raise UsageError(f"--step={options.step}: give the step of a checkpoint, at least 0")
    if options.first is not None and options.first < 0:
        raise UsageError(f"--first={options.first}: give the number of a layer, at least 0")
    if not options.shard_gb > 0:
        raise UsageError(f"--shard-gb={options.shard_gb}: give a size above 0")
    if options.family is None and options.first is not None:
        raise UsageError("--first= without --as=: without a family's names all parameters are written")
    import numpy as np  # after --help, which is to be quick

    from rrfp_jax.checkpoint.folder import readable_checkpoints
    from rrfp_jax.errors import TrainingError
    from rrfp_jax.weights.published_models import Parameters, as_family, fields_at, own_names
    from rrfp_jax.weights.tensors import check_absent, write_tensors

    check_absent(options.to, options.replace)
    folder = _checkpoints(options.run)
    checkpoint = next(readable_checkpoints("RUN", folder, options.step), None)
    if checkpoint is None:
        raise TrainingError(f"{folder}: no checkpoint is intact")
    params = Parameters(checkpoint, None if options.dtype is None else np.dtype(options.dtype))
    if options.family is None:
        content = own_names(params)
    else:
        fields = fields_at(checkpoint, options.model)
        content = as_family(params, FAMILIES[options.family], options.first, fields)
    files = write_tensors(
        options.to, content.sources, options.shard_gb * 1e9, content.others, options.replace
    )
    tensors, total = (
        sum(len(own.names) for own in content.sources),
        sum(own.nbytes for own in content.sources),
    )
    print_whole(
        f"{checkpoint.folder}: {tensors} tensors, {total:,} bytes, in {options.to}/ ({_files(files)})"
        + (
            f"\nleft out, as no part of {options.family}: {_layers(content.left_out)}"
            if content.left_out
            else ""
        )
    )
    return DONE


def _checkpoints(run: Path) -> Path:
    """The checkpoints of a run, which lie beside its folder; or what was given, if they do not."""
    beside = Path(f"{run}.checkpoints")
    return beside if beside.is_dir() else run


def _files(count: int) -> str:
    return "one file" if count == 1 else f"{count} files"


def _layers(paths: Sequence[str]) -> str:
    """How many parameters of which layers."""
    layers = sorted({int(path.partition(".")[0]) for path in paths})
    return f"{len(paths)} parameters of the layers {', '.join(map(str, layers))}"


def _parser() -> Parser:
    parser = Parser(COMMAND, DESCRIPTION, EPILOG)
    parser.add_argument(
        "run",
        type=path_argument,
        metavar="RUN",
        help="the run's folder, that of its checkpoints, or one of them",
    )
    parser.add_argument("--to", type=path_argument, required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--as", dest="family", choices=FAMILIES, help="the family whose names and config.json are written"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of another checkpoint than the latest")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating-point values (as they are stored)")
    parser.add_argument(
        "--model",
        default="model",
        metavar="NAME",
        help="the object with the sizes of the layers, in the run's config (%(default)s)",
    )
    parser.add_argument(
        "--first", type=int, metavar="N", help="only a part of the model is of the family; its first layer"
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="10^9 bytes of a file at most (%(default)g)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="rename what is at FOLDER to FOLDER.1, or the next free number"
    )
    return parser


def run() -> None:
    """Entry point of the `rrfp-export` command."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
