"""Data: hashes of plans, and the bytes of what they load, of each class, on data made in place."""

import hashlib
import json

import numpy as np

import rrfp_jax as rrfp
from rrfp_jax.data.contract import plan_hash

data = rrfp.data
STEPS = (0, 1, 7)
WORDS = (
    "when",
    "the cat",
    "sat",
    "on a mat",
    "it saw",
    "one",
    "bird, and then",
    "another; neither",
    "stayed",
)


def texts(count=40, seed=3):
    """Texts of many lengths."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(2, 40))) for _ in range(count)]


def pictures(count=14, seed=5):
    """Documents of one or two images with a few words."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        shapes = random.integers(1, 4, (1 + number % 2, 2))
        images = [random.integers(1, 256, (4 * rows, 4 * columns, 3), np.uint8) for rows, columns in shapes]
        made.append({"text": " ".join(random.choice(WORDS, random.integers(1, 6))), "images": images})
    return made


def digest(value):
    return hashlib.sha256(value).hexdigest()[:16]


def microbatch(source, one):
    """Shapes, source and weight of a microbatch, and a hash of every array."""
    arrays = source.load(one, list(one.fields))
    fields = {name: [str(spec.dtype), list(spec.shape)] for name, spec in sorted(one.fields.items())}
    loaded = {name: digest(np.ascontiguousarray(arrays[name]).tobytes()) for name in sorted(arrays)}
    return {
        "fields": fields,
        "source": json.loads(json.dumps(one.source, default=int)),
        "weight": one.weight,
        "bytes": loaded,
    }


def steps_of(make):
    """Plans and bytes of a few steps."""

    def golden(given):
        source = make(given)
        found = {f"step {step}": [microbatch(source, one) for one in source.plan(step)] for step in STEPS}
        found["hashes"] = [plan_hash(source.plan(step)) for step in STEPS]
        more = {
            name: repr(getattr(source, name)) for name in ("bucket_lengths", "steps") if hasattr(source, name)
        }
        return {**found, **more}

    return golden


def corpus(**given):
    usual = {"source": data.Examples(texts(), field=""), "tokenizer": data.Bytes(), "vocabulary": 256}
    return data.Corpus(**{**usual, **given})


def documents(**given):
    usual = {"corpus": corpus(), "lengths": (16, 48, 128), "tokens": 256, "microbatches": 3}
    return data.Documents(**{**usual, **given})


def image_documents(**given):
    patches = data.Patches(size=4, longest=16)
    own = data.ImageCorpus(
        source=data.ImageExamples(pictures()), tokenizer=data.Bytes(), vocabulary=256, patches=patches
    )
    fit = data.FitBoth(buckets=3, patches=32, tokens=96)
    return data.ImageDocuments(**{"corpus": own, "lengths": fit, "tokens": 160, "microbatches": 3, **given})


def files(given, kind):
    """A folder of files with the texts: plain, JSON lines, or tokens."""
    folder = given.folder / kind
    folder.mkdir()
    if kind == "text":
        for number, text in enumerate(texts()):
            (folder / f"{number:03}.txt").write_text(text)
        return data.TextFiles(str(folder))
    if kind == "lines":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
        return data.JsonLines(str(folder / "a.jsonl"))
    data.write_tokens(corpus(), folder / "a.npy")
    return data.TokenFile(str(folder / "a.npy"))


def byte_text(given, split):
    folder = given.folder / f"bytes-{split}"
    folder.mkdir()
    for number, text in enumerate(texts(60)):
        (folder / f"{number:03}.txt").write_text(text * 5)
    return data.ByteText(path=str(folder), sequence_length=32, batch=4, microbatches=3, split=split, seed=1)


def own_sources(given):
    """The standard library's sources, as the quickstart reads them: other ones with another Python."""
    return data.ByteText(sequence_length=64, batch=2, microbatches=2, seed=0)


def stream(given):
    return data.Stream([{"x": np.arange(6) + i} for i in range(40)], 2)


def tokens(given):
    return documents(corpus=corpus(source=files(given, "tokens"), tokenizer=None))


TABLE = {
    "ByteText": steps_of(lambda given: byte_text(given, "train")),
    "ByteText, validation": steps_of(lambda given: byte_text(given, "validation")),
    "ByteText, Python's own sources": steps_of(own_sources),
    "Documents": steps_of(lambda given: documents()),
    "Documents, packed": steps_of(lambda given: documents(packed=True)),
    "Documents, balanced": steps_of(
        lambda given: documents(packed=True, balance=data.Polynomial(square=0.01), order="longest")
    ),
    "Documents, fitted": steps_of(lambda given: documents(lengths=data.Fit(buckets=3, longest=128))),
    "Documents, rows": steps_of(lambda given: documents(tokens=None, rows=2)),
    "Documents, validation": steps_of(lambda given: documents(split="validation", validation_share=0.3)),
    "TextFiles": steps_of(lambda given: documents(corpus=corpus(source=files(given, "text")))),
    "JsonLines": steps_of(lambda given: documents(corpus=corpus(source=files(given, "lines")))),
    "TokenFile": steps_of(tokens),
    "ImageDocuments": steps_of(lambda given: image_documents()),
    "ImageDocuments, packed": steps_of(lambda given: image_documents(packed=True)),
    "ImageDocuments, balanced": steps_of(
        lambda given: image_documents(balance=data.Costs(patches=data.Polynomial(linear=3.0)))
    ),
    "Glyphs": lambda given: glyphs(),
    "Stream": steps_of(stream),
}


def glyphs():
    """Characters as pictures with their names, by the fonts and the Unicode tables that are installed."""
    source = data.Glyphs()
    documents = [source.read(number) for number in range(0, len(source.names), 997)]
    return [
        [name, [digest(p.tobytes()) if hasattr(p, "tobytes") else p for p in parts]]
        for name, parts in zip(source.names[::997], documents, strict=True)
    ]
