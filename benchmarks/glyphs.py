"""A run that learns to read: `configs/glyphs.py`, beside the same run with blank pictures."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import jax
import numpy as np

import rrfp_jax as rrfp
from benchmarks.harness import Aim, Found, bench, output_of, say
from configs.characters import END
from configs.glyphs import Reading, get_config
from models import vlm

Layer: TypeAlias = Callable[[Any, Any], Any]

LIMIT_SECONDS, LONGEST_NAME = 3600, 80
RUNS: Mapping[str, Sequence[str]] = {"sees": (), "blank": ("--config.blank=True",)}


@bench(
    "Does an encoder with a decoder learn to read in 4 processes, and what would it tell without seeing?",
    minutes="10",
    aims="8 min; a loss of 0.9 of the blind one's; 60 % of characters right, also where they are open",
)
def glyphs(steps: int = get_config().steps, frozen: bool = False) -> Found:
    """`configs/glyphs.py` in 4 processes, and the same run with blank pictures; with `--frozen` also one
    whose encoder keeps its random values. All validate on characters that none has seen. Of their names is
    reported:

    - the loss, in nats per character, and the share of characters that are predicted right when the true
      beginning of the name is given: all, and those that do not follow from it
      (`configs/open_characters.py`);
    - what greedy decoding reads from the picture alone, by plain JAX with the exported parameters: characters
      (1 - edits / length, no less than 0 each), and whole names."""
    runs = {**RUNS, "frozen": ("--config.frozen=True",)} if frozen else RUNS
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(Path(folder), name, steps, flags) for name, flags in runs.items()}
    sees, blank = found["sees"], found["blank"]
    return Found(
        found,
        [
            Aim("minutes to train in 4 processes, with compiling", sees["minutes"], 8, "min"),
            Aim("validation loss, of that with blank pictures", sees["loss"] / blank["loss"], 0.9, ""),
            Aim("characters right", 100 * sees["right"], 60, "%", at_least=True),
            Aim("characters right that do not follow", 100 * sees["right_open"], 60, "%", at_least=True),
        ],
    )


def measure(folder: Path, name: str, steps: int, flags: Sequence[str]) -> dict[str, float]:
    """What a run reaches, and how long it takes from the command to its end."""
    settings = {"name": name, "directory": str(folder), "steps": steps, "checkpoint.every_steps": steps}
    command = [sys.executable, "-m", "rrfp_jax", "launch", "--config=configs/glyphs.py", *flags]
    command += [f"--config.{key}={value}" for key, value in settings.items()]
    began = perf_counter()
    output_of(command, LIMIT_SECONDS)
    minutes = (perf_counter() - began) / 60
    with (folder / name / "metrics.jsonl").open() as file:
        last = json.loads(file.readlines()[-1])
    config = dataclasses.replace(get_config(), blank=name == "blank")
    read = reading(config, folder / f"{name}.checkpoints")
    figures = {key: last[f"validation_{key}"] for key in ("loss", "right", "right_open")}
    say(f"{name}: {minutes:.1f} min, {figures}, greedy: {read}")
    return {"minutes": minutes, **figures, **{f"greedy_{key}": value for key, value in read.items()}}


def reading(config: Reading, checkpoints: Path) -> dict[str, float]:
    """Shares of characters and of whole names that are read from the pictures of validation."""
    documents = config.validation_data().documents
    parts = [part for d in documents.documents.tolist() for part in documents.corpus.source.read(d)]
    pictures, names = parts[::2], [name.removesuffix(END) for name in parts[1::2]]
    assert documents.corpus.patches
    layers = rrfp.export(checkpoints, pipe=config.pipeline(), modules=True)
    found = read_names(layers, fields_of(documents.corpus.patches, pictures))
    shares = [max(0.0, 1 - edits(one, name) / len(name)) for one, name in zip(found, names, strict=True)]
    weights = [len(name) for name in names]
    return {
        "characters": float(np.average(shares, weights=weights)),
        "names": float(np.mean([one == name for one, name in zip(found, names, strict=True)])),
    }


def fields_of(patches: rrfp.data.Patches, pictures: Sequence[Any]) -> dict[str, np.ndarray]:
    """A microbatch of a picture a row, with room for a name behind it."""
    grids = [patches.grid_of(picture) for picture in pictures]
    counts = np.array([patches.count(grid) for grid in grids])
    tokens = counts // patches.merge**2
    rows, most, length = len(pictures), int(counts.max()), int(tokens.max()) + LONGEST_NAME
    fields: dict[str, np.ndarray] = {
        "patches": np.zeros((rows, most, patches.values), np.uint8),
        "patch_places": np.zeros((rows, most, 2), np.int32),
        "images": (np.arange(most) < counts[:, None]).astype(np.int32),
        "tokens": np.zeros((rows, length), np.int32),
        "patch_of_token": np.where(np.arange(length) < tokens[:, None], np.arange(length), -1).astype(
            np.int32
        ),
    }
    for row, (picture, grid, count) in enumerate(zip(pictures, grids, counts.tolist(), strict=True)):
        fields["patches"][row, :count] = patches.patches_of(picture)
        fields["patch_places"][row, :count] = patches.places(*grid)
    return fields


def read_names(layers: Sequence[Layer], fields: Mapping[str, np.ndarray]) -> list[str]:
    """What each row's picture is said to be, the likeliest character at a time; plain JAX."""
    joins = [isinstance(layer, vlm.Join) for layer in layers].index(True)
    begin = (fields["patch_of_token"] >= 0).sum(axis=1)
    rows, tokens = np.arange(len(begin)), np.array(fields["tokens"])
    seen = jax.jit(lambda: carried(layers[:joins], None, fields))()

    @jax.jit
    def next_of(tokens: jax.Array, of_token: jax.Array, last: jax.Array) -> jax.Array:
        logits = carried(layers[joins:], seen, {"tokens": tokens, "patch_of_token": of_token})
        next_one: jax.Array = logits[rows, last].argmax(-1)
        return next_one

    for k in range(LONGEST_NAME):
        length = (
            -(-(int(begin.max()) + k) // 16) * 16
        )  # few shapes, and nothing to the right that is not needed
        length = min(length, tokens.shape[1])
        tokens[rows, begin + k] = next_of(
            tokens[:, :length], fields["patch_of_token"][:, :length], begin + k - 1
        )
        if (tokens == ord(END)).any(axis=1).all():
            break
    texts = [
        bytes(own[at:].astype(np.uint8)).decode("latin-1") for own, at in zip(tokens, begin, strict=True)
    ]
    return [text.split(END)[0] for text in texts]


def carried(layers: Sequence[Layer], carry: Any, fields: Mapping[str, Any]) -> Any:
    """What comes out of layers that are called one behind the other."""
    for layer in layers:
        carry = layer(carry, rrfp.EvaluationBatch(fields))
    return carry


def edits(one: str, other: str) -> int:
    """Letters to insert, delete or exchange to make one text of the other (Levenshtein, 1966)."""
    least = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, least[0] = least[0], i
        for j, wanted in enumerate(other, 1):
            before, least[j] = least[j], min(before + (letter != wanted), least[j] + 1, least[j - 1] + 1)
    return least[-1]
