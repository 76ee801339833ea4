"""Checkpoints in the form of the first versions, made from those of today."""

import json
import shutil
import zlib

import numpy as np

from rrfp_jax.checkpoint.folder import CheckpointFolder
from rrfp_jax.checkpoint.format import read_leaf
from rrfp_jax.checkpoint.leaves import file_of, folder_name


def rewrite(folder, step):
    """Give the checkpoint of a step the first form: zarr 2, each array in one file."""
    checkpoint = folder / str(step)
    content = json.loads((checkpoint / "rrfp.json").read_text())["content"]
    for name, leaf in CheckpointFolder(folder).open(step)[1].items():
        array = np.asarray(read_leaf(checkpoint, leaf))
        place = checkpoint / folder_name(name)
        shutil.rmtree(place)
        place.mkdir()
        files = {".zarray": json.dumps(_header(array)).encode()}
        if array.size:
            files[file_of((0,) * array.ndim)] = array.tobytes()
        written = {}
        for file, data in files.items():
            (place / file).write_bytes(data)
            written[f"{folder_name(name)}/{file}"] = [len(data), zlib.crc32(data)]
        del content["leaves"][name]["piece"]
        content["leaves"][name]["files"] = written
    sealed = {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    (checkpoint / "rrfp.json").write_text(json.dumps(sealed))


def _header(array):
    return {
        "chunks": [max(1, n) for n in array.shape],
        "compressor": None,
        "dimension_separator": ".",
        "dtype": array.dtype.name if array.dtype.kind == "V" else array.dtype.str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
