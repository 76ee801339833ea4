"""`rrfp export`: a run's parameters as safetensors files, under the public names of a family."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rrfp_jax.checkpoint.folder import readable_checkpoints
from rrfp_jax.commands.command_line import print_whole
from rrfp_jax.errors import DONE, UsageError
from rrfp_jax.weights.families import FAMILIES
from rrfp_jax.weights.published_models import Parameters, Publication, as_family, fields_at
from rrfp_jax.weights.tables import TensorNames
from rrfp_jax.weights.tensors import check_absent, write_tensors


def main(options: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    if options.as_ is None and options.first is not None:
        raise UsageError("--first= without --as=: without a family's names all parameters are written")
    check_absent(options.to, options.replace)
    run: Path = options.run
    # A run's checkpoints lie beside its folder.
    beside = Path(f"{run if run.name not in ('', '..') else run.resolve()}.checkpoints")
    folder = beside if beside.is_dir() else run
    checkpoint = next(readable_checkpoints("RUN", folder, options.step))
    params = Parameters(checkpoint, None if options.dtype is None else np.dtype(options.dtype))
    if options.as_ is None:
        content = Publication(sources=[params.source(path, TensorNames((path,))) for path in params.keys])
    elif checkpoint.run.base is not None:
        raise UsageError(
            f"--as={options.as_}: {checkpoint.folder} leaves out {checkpoint.run.base}: without --as= the "
            f"command writes what is there"
        )
    else:
        fields = fields_at(checkpoint, options.model)
        content = as_family(params, FAMILIES[options.as_], options.first, fields)
    files = write_tensors(
        options.to, content.sources, options.shard_gb * 1e9, content.others, options.replace
    )
    tensors = sum(len(own.names) for own in content.sources)
    total, count = sum(own.nbytes for own in content.sources), "one file" if files == 1 else f"{files} files"
    told = [f"{checkpoint.folder}: {tensors} tensors, {total:,} bytes, in {options.to}/ ({count})"]
    if content.left_out:
        layers = sorted({int(path.partition(".")[0]) for path in content.left_out})
        parameters = f"{len(content.left_out)} parameters of the layers {', '.join(map(str, layers))}"
        told.append(f"left out, as no part of {options.as_}: {parameters}")
    print_whole("\n".join(told))
    return DONE
