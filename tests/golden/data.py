"""Data: hashes of plans, and the bytes of what they load, of each class, on data made in place."""

import dataclasses
import hashlib
import json
import warnings

import numpy as np
from PIL import Image

import rrfp_jax as rrfp
from configs.characters import Characters
from rrfp_jax.data.contract import as_data, plan_hash

data = rrfp.data
STEPS = (0, 1, 7, 60)  # the last in the third epoch or later
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
    for name, whole in loaded.items():  # as a stage does that reads one of them
        (alone,) = source.load(one, [name]).values()
        assert digest(np.ascontiguousarray(alone).tobytes()) == whole
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
        names = ("bucket_lengths", "steps", "padding", "buckets", "fingerprint")
        more = {name: repr(getattr(source, name)) for name in names if hasattr(source, name)}
        if hasattr(source, "rows_of_split"):
            rows = source.rows_of_split
            more["rows"] = [digest(array.tobytes()) for array in (rows.start, rows.order, rows.size)]
            more["corpus"] = source.corpus.fingerprint
        return {**found, **more}

    return golden


def corpus(**given):
    usual = {"source": data.Examples(texts(), field=""), "tokenizer": data.Bytes(), "vocabulary": 256}
    return data.Corpus(**{**usual, **given})


@dataclasses.dataclass(frozen=True)
class Words:
    """A tokenizer that is not `Bytes`, so that documents are read whole."""

    size = 300
    fingerprint = "words"

    def encode(self, text):
        return np.array([sum(word.encode()) % 300 for word in text.split(" ")], np.int32)


def documents(**given):
    usual = {"corpus": corpus(), "lengths": (16, 48, 128), "tokens": 256, "microbatches": 3}
    return data.Documents(**{**usual, **given})


def many(**given):
    """Three thousand documents of tokens, some longer than any bucket."""
    random = np.random.default_rng(11)
    sizes = random.integers(2, 1500, 3000)
    examples = [np.arange(size) % 251 for size in sizes]
    own = corpus(source=data.Examples(examples, field=""), tokenizer=None)
    return documents(corpus=own, tokens=2000, **given)


def image_corpus(**given):
    usual = {
        "source": data.Examples(pictures(), images="images"),
        "tokenizer": data.Bytes(),
        "vocabulary": 256,
    }
    return data.Corpus(**{**usual, "patches": data.Patches(size=4, longest=16), **given})


def image_documents(**given):
    fit = data.Fit(buckets=3, longest=(32, 96))
    usual = {"corpus": image_corpus(), "lengths": fit, "tokens": 160, "microbatches": 3}
    return data.Documents(**{**usual, **given})


def merged(**given):
    """Images whose patches are merged, with ends, in given buckets."""
    patches = data.Patches(size=2, merge=2, longest=16)
    usual = {"corpus": image_corpus(patches=patches, end=7), "lengths": ((128, 96), (16, 64), (64, 40))}
    return image_documents(**{**usual, "tokens": None, "rows": 2, **given})


def drawn(given):
    """A folder of images beside texts, some of them bad, and lines of JSON with paths to them."""
    folder = given.folder / "images"
    if not folder.exists():
        folder.mkdir()
        lines = []
        for number, document in enumerate(pictures()):
            image, *_ = document["images"]
            Image.fromarray(image).save(folder / f"{number:02}.png")
            (folder / f"{number:02}.txt").write_text(document["text"])
            paths = [f"{number:02}.png", f"{number // 2:02}.png"][: 1 + number % 2]
            lines.append({"text": "a <image> b" * len(paths) + " c", "images": paths})
        (folder / "bad.png").write_bytes(b"no image")
        (folder / "bad.txt").write_text("but a text")
        (folder / "alone.png").write_bytes((folder / "00.png").read_bytes())
        (folder / "text.txt").write_text("without an image")
        lines += [{"text": "only text"}, {"text": "x", "images": ["../00.png"]}, {"images": ["00.png"]}]
        (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def image_lines(given):
    return data.JsonLines(str(drawn(given) / "lines.jsonl"), images="images")


def skipping(make):
    """Data of which something is skipped, and the warnings that say so."""

    def golden(given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = steps_of(make)(given)
        return {**found, "warnings": [str(one.message) for one in caught]}

    return golden


def bad_texts():
    return [*texts(30), "", "x", 3, "half \ud83d", b"\xff\xfe\xfd", {"a": 1}, b"good bytes, and more of them"]


def refused(make):
    """What documents are refused with."""

    def golden(given):
        try:
            make(given).plan(0)
        except rrfp.UsageError as error:
            return str(error).replace(str(given.folder), "FOLDER")

    return golden


def files(given, kind):
    """A folder of files with the texts: plain, JSON lines, or tokens."""
    folder = given.folder / kind
    folder.mkdir(exist_ok=True)
    if kind == "text":
        for number, text in enumerate(texts()):
            (folder / f"{number:03}.txt").write_text(text)
        return data.TextFiles(str(folder))
    if kind == "sections":
        for number in range(6):
            text = "\n\n".join(texts(12, number))
            (folder / f"{number}.txt").write_text(text)
        return data.TextFiles(str(folder), "section")
    if kind == "raw":
        joined, lengths = b"".join(map(str.encode, texts())), [len(text) for text in texts()]
        np.frombuffer(joined, np.uint8).astype(np.uint16).tofile(folder / "a.bin")
        np.save(folder / "a.offsets.npy", np.concatenate([[0], np.cumsum(lengths)])[:-1])
        return data.TokenFile(str(folder / "a.bin"))
    if kind == "lines":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
        return data.JsonLines(str(folder / "a.jsonl"))
    data.write_tokens(corpus(), folder / "a.npy")
    return data.TokenFile(str(folder / "a.npy"))


def byte_text(given, split):
    folder = given.folder / f"bytes-{split}"
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts(60)):
        (folder / f"{number:03}.txt").write_text(text * 5)
    return data.ByteText(path=str(folder), sequence_length=32, batch=4, microbatches=3, split=split, seed=1)


def one_file(given, split):
    (given.folder / "one.txt").write_text("".join(texts(30)))
    path = str(given.folder / "one.txt")
    return data.ByteText(
        path=path, sequence_length=24, batch=2, microbatches=2, split=split, validation_share=0.3
    )


def own_sources(given):
    """The standard library's sources, as the quickstart reads them: other ones with another Python."""
    return data.ByteText(sequence_length=64, batch=2, microbatches=2, seed=0)


def stream(given):
    return data.Stream([{"x": np.arange(6) + i} for i in range(140)], 2)


def tokens(given, kind="tokens"):
    return documents(corpus=corpus(source=files(given, kind), tokenizer=None))


def written(given):
    """The files of `write_tokens`, with ends, for vocabularies that need 16 and 32 bits."""
    found = {}
    for vocabulary in (300, 2**20):
        path = given.folder / f"{vocabulary}.npy"
        data.write_tokens(corpus(tokenizer=Words(), vocabulary=vocabulary, end=299), path)
        beside = path.with_suffix(".offsets.npy")
        found[str(vocabulary)] = [digest(one.read_bytes()) for one in (path, beside)]
    return found


def in_memory(given):
    """A function of the step as a Trainer reads it, with numbers of 64 bits."""
    return as_data(lambda step: [{"x": np.arange(4) + step, "y": np.full(2, 0.5)}, {"x": np.arange(3)}])


def back_and_forth(given):
    """A stream that goes back: sources are hashes of contents."""
    source = stream(given)
    return [[list(one.source) for one in source.plan(step)] for step in (3, 0, 9, 9, 1)]


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
    "ByteText, one file": steps_of(lambda given: one_file(given, "train")),
    "ByteText, one file, validation": steps_of(lambda given: one_file(given, "validation")),
    "Documents, a share of padding": steps_of(
        lambda given: documents(lengths=data.Fit(padding=0.1, longest=128, multiple=4), seed=5)
    ),
    "Documents, packed and fitted": steps_of(
        lambda given: documents(lengths=data.Fit(buckets=2, longest=96), packed=True, order="zigzag")
    ),
    "Documents, packed validation": steps_of(
        lambda given: documents(packed=True, split="validation", validation_share=0.3, order="shortest")
    ),
    "Documents, a table of costs": steps_of(
        lambda given: documents(
            tokens=None, rows=2, balance=data.Table(((8, 1.0), (64, 1.0), (128, 9.0))), order="shortest"
        )
    ),
    "Documents, few and large": steps_of(lambda given: documents(tokens=2**14, microbatches=1)),
    "Documents, a tokenizer": steps_of(
        lambda given: documents(corpus=corpus(tokenizer=Words(), vocabulary=300, end=299), lengths=(4, 8, 16))
    ),
    "Documents, tokens": steps_of(
        lambda given: documents(
            corpus=corpus(source=data.Examples([list(map(ord, t)) for t in texts()], ""), tokenizer=None)
        )
    ),
    "Documents, bad ones": skipping(
        lambda given: documents(
            corpus=corpus(
                source=data.Examples(bad_texts(), ""), tokenizer=data.Bytes(strict=True), bad="skip"
            )
        )
    ),
    "Documents, bad ones refused": refused(
        lambda given: documents(corpus=corpus(source=data.Examples(bad_texts(), "")))
    ),
    "TextFiles, sections": steps_of(lambda given: documents(corpus=corpus(source=files(given, "sections")))),
    "TokenFile, raw": steps_of(lambda given: tokens(given, "raw")),
    "write_tokens": written,
    "ImageDocuments, a share of padding": steps_of(
        lambda given: image_documents(lengths=data.Fit(padding=0.2, longest=(32, 96), multiple=(2, 8)))
    ),
    "ImageDocuments, merged": steps_of(lambda given: merged()),
    "ImageDocuments, merged and packed": steps_of(
        lambda given: merged(
            packed=True, balance=data.Costs(tokens=data.Polynomial(square=0.1)), order="longest"
        )
    ),
    "ImageDocuments, validation": steps_of(
        lambda given: image_documents(split="validation", validation_share=0.4, order="zigzag")
    ),
    "ImageDocuments, both limits": steps_of(lambda given: image_documents(patches=64, seed=9)),
    "ImageDocuments, few and large": steps_of(lambda given: image_documents(tokens=2**14, microbatches=1)),
    "ImageDocuments, class tokens": steps_of(
        lambda given: image_documents(
            corpus=image_corpus(patches=data.Patches(size=4, longest=8, class_token=True), end=1)
        )
    ),
    "ImageDocuments, text alone": steps_of(
        lambda given: image_documents(
            corpus=image_corpus(
                source=data.Examples([*pictures(), {"text": "abc"}], images="images"), text_alone=True
            )
        )
    ),
    "ImageDocuments, long ones": skipping(
        lambda given: image_documents(corpus=image_corpus(bad="skip"), lengths=((2, 30), (6, 20)))
    ),
    "ImageDocuments, long ones refused": refused(lambda given: image_documents(lengths=((2, 30), (6, 20)))),
    "ImageFolder": skipping(
        lambda given: image_documents(
            corpus=image_corpus(source=data.ImageFolder(str(drawn(given))), bad="skip")
        )
    ),
    "ImageLines": skipping(
        lambda given: image_documents(corpus=image_corpus(source=image_lines(given), bad="skip"))
    ),
    "ImageLines refused": refused(
        lambda given: image_documents(corpus=image_corpus(source=image_lines(given)))
    ),
    "Glyphs, documents": steps_of(
        lambda given: image_documents(
            corpus=image_corpus(source=Characters(most=2, seed=1)),
            lengths=data.Fit(buckets=2, longest=(200, 400)),
            rows=2,
            tokens=None,
        )
    ),
    "Glyphs, packed": steps_of(
        lambda given: image_documents(
            corpus=image_corpus(source=Characters()), lengths=((90, 300),), packed=True, tokens=600
        )
    ),
    "Documents, many": steps_of(lambda given: many(lengths=data.Fit(buckets=7, longest=700, multiple=2))),
    "Documents, many and packed": steps_of(lambda given: many(lengths=(150, 700), packed=True)),
    "InMemory": steps_of(in_memory),
    "Stream, back and forth": back_and_forth,
}


def glyphs():
    """Characters as pictures with their names, by the fonts and the Unicode tables that are installed."""
    source = Characters()
    documents = [source.read(number) for number in range(0, len(source.names), 997)]
    return [
        [name, [digest(p.tobytes()) if hasattr(p, "tobytes") else p for p in parts]]
        for name, parts in zip(source.names[::997], documents, strict=True)
    ]
