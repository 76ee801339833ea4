"""What may be wrong in a checkpoint's small files, though they are sealed, and what is then said of it."""

import json
import zlib

LEAF = "params.0.w"
"""Of shape (4, 2), in one file."""


def reseal(checkpoint, manifest=lambda content: None, metadata=lambda tree: None, seal=lambda sealed: None):
    """Change what is in the small files of a checkpoint, with checksums that are right again."""
    tree = json.loads((checkpoint / "_METADATA").read_text())
    metadata(tree)
    text = json.dumps(tree).encode()
    (checkpoint / "_METADATA").write_bytes(text)
    content = json.loads((checkpoint / "rrfp.json").read_text())["content"]
    content["files"]["_METADATA"] = [len(text), zlib.crc32(text)]
    manifest(content)
    sealed = {"crc32": zlib.crc32(json.dumps(content).encode()), "content": content}
    seal(sealed)
    (checkpoint / "rrfp.json").write_text(json.dumps(sealed))


def change(*way, to=None, drop=False):
    """A function that changes, or drops, what is at the end of a way through a tree."""

    def changed(tree):
        *first, last = way
        for key in first:
            tree = tree[key]
        if drop:
            del tree[last]
        else:
            tree[last] = to

    return changed


def of_leaf(key, to=None, drop=False):
    return change("leaves", LEAF, key, to=to, drop=drop)


def of_state(key, to=None, drop=False):
    return change("custom_metadata", key, to=to, drop=drop)


def of_standing(key, to=None, drop=False):
    return change("custom_metadata", "standing", key, to=to, drop=drop)


def of_scale(key, to):
    return change("custom_metadata", "standing", "loss_scale", key, to=to)


def renamed(name):
    """The leaf under another name, with its key and files to match."""

    def changed(content):
        leaf = content["leaves"].pop(LEAF)
        leaf["key"] = name.split(".")
        files = leaf.get("files", {})
        leaf["files"] = {path.replace(LEAF, name): written for path, written in files.items()}
        content["leaves"][name] = leaf

    return changed


def file(path, written):
    return change("leaves", LEAF, "files", path, to=written)


def only_files(*paths):
    return of_leaf("files", {path: [32, 1] for path in paths})


SEALS = {
    "no seal": (change("crc32", drop=True), "missing required field `crc32`"),
    "no content": (change("content", drop=True), "missing required field `content`"),
    "more beside the seal": (change("more", to=1), "unknown field `more`"),
    "a seal of text": (change("crc32", to="1"), "got `str` - at `$.crc32`"),
    "a seal too large": (change("crc32", to=2**32), "at `$.crc32`"),
    "a broken seal": (change("crc32", to=1), "is not as it was written"),
    "content is a list": (change("content", to=[]), "got `array` - at `$.content`"),
}
_OF_FILES = {
    "a name with a slash",
    "an absolute name",
    "a shape without end",
    "another size of dtype",
    "no files of a leaf",
    "a part beyond the last",
    "a part that leads out",
    "a part of another leaf",
    "an absolute part",
    "no header",
    "no part",
    "a part too many",
    "a part of another size",
    "a header without end",
    "a header of another size",
    "a part with another checksum",
    "a checksum too large",
    "a size of text",
}
"""Of `MANIFESTS`, what is about the files that leaves had in the first form."""
MANIFESTS = {
    "no files": (change("files", drop=True), "missing required field `files`"),
    "no leaves": (change("leaves", drop=True), "missing required field `leaves`"),
    "more in it": (change("more", to=1), "unknown field `more`"),
    "leaves are a list": (change("leaves", to=[]), "at `$.leaves`"),
    "no size of the metadata": (
        change("files", "_METADATA", drop=True),
        "missing required field `_METADATA`",
    ),
    "another file": (change("files", "../x", to=[1, 1]), "unknown field `../x`"),
    "a size below 0": (change("files", "_METADATA", to=[-1, 1]), "at `$.files._METADATA[0]`"),
    "a size without end": (change("files", "_METADATA", to=[2**60, 1]), f"_METADATA has {2**60} bytes"),
    "a size of no machine": (change("files", "_METADATA", to=[2**70, 1]), "at `$.files._METADATA[0]`"),
    "a size and no checksum": (change("files", "_METADATA", to=[1]), "at `$.files._METADATA`"),
    "a leaf is null": (change("leaves", LEAF, to=None), "got `null`"),
    "a leaf is a list": (change("leaves", LEAF, to=[]), "got `array`"),
    "no key": (of_leaf("key", drop=True), "missing required field `key`"),
    "no shape": (of_leaf("shape", drop=True), "missing required field `shape`"),
    "no dtype": (of_leaf("dtype", drop=True), "missing required field `dtype`"),
    "no files of a leaf": (of_leaf("files", drop=True), f"{LEAF}/zarr.json cannot be read"),  # today's form
    "more of a leaf": (of_leaf("compressor", "zstd"), "unknown field `compressor`"),
    "a key of text": (of_leaf("key", "params.0.w"), "at `$.leaves[...].key`"),
    "a key of numbers": (of_leaf("key", ["params", 0, "w"]), "at `$.leaves[...].key[1]`"),
    "another key": (of_leaf("key", ["params", "1", "w"]), "has the key ['params', '1', 'w']"),
    "an empty key": (of_leaf("key", []), "has the key []"),
    "a name that leads out": (renamed(".."), "is no name of a folder"),
    "a name with a slash": (renamed("params/../../x"), "has a file 'params/../../x/"),
    "an absolute name": (renamed("/etc/passwd"), "has a file '/etc/passwd/"),
    "a name with NUL": (renamed("params.\0"), "a character that cannot be printed"),
    "a name that clears the screen": (renamed("\x1b[2J"), "a character that cannot be printed"),
    "a name of 300 letters": (renamed("x" * 300), "has 300 bytes"),
    "a shape of text": (of_leaf("shape", "4,2"), "at `$.leaves[...].shape`"),
    "a shape below 0": (of_leaf("shape", [-4, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of fractions": (of_leaf("shape", [4.5, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of truths": (of_leaf("shape", [True, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape of no machine": (of_leaf("shape", [2**70, 2]), "at `$.leaves[...].shape[0]`"),
    "a shape without end": (of_leaf("shape", [2**62, 2]), "instead of"),
    "objects": (of_leaf("dtype", "object"), "has the dtype 'object'"),
    "text": (of_leaf("dtype", "str_"), "has the dtype 'str_'"),
    "a dtype in code": (of_leaf("dtype", "f4"), "has the dtype 'f4'"),
    "a dtype of fields": (of_leaf("dtype", "i4,i4"), "has the dtype 'i4,i4'"),
    "an unknown dtype": (of_leaf("dtype", "float33"), "has the dtype 'float33'"),
    "another size of dtype": (of_leaf("dtype", "float64"), "of 32 bytes"),
    "parts of another rank": (of_leaf("part", [4]), "has parts [4] of [4, 2]"),
    "parts of nothing": (of_leaf("part", [0, 2]), "has parts [0, 2] of [4, 2]"),
    "parts that do not fit": (of_leaf("part", [3, 2]), "has parts [3, 2] of [4, 2]"),
    "parts larger than the whole": (of_leaf("part", [8, 2]), "has parts [8, 2] of [4, 2]"),
    "half the parts": (of_leaf("part", [2, 2]), "has 2 files instead of 3"),
    "very many parts": (of_leaf("part", [1, 1]), "has 2 files instead of 9"),
    "a part beyond the last": (only_files(f"{LEAF}/.zarray", f"{LEAF}/1.0"), f"has a file '{LEAF}/1.0'"),
    "a part that leads out": (only_files(f"{LEAF}/.zarray", "../../x"), "has a file '../../x'"),
    "a part of another leaf": (only_files(f"{LEAF}/.zarray", "optimizer.count/0"), "'optimizer.count/0'"),
    "an absolute part": (only_files(f"{LEAF}/.zarray", "/dev/zero"), "has a file '/dev/zero'"),
    "no header": (only_files(f"{LEAF}/0.0", f"{LEAF}/0.1"), f"has a file '{LEAF}/0.1'"),
    "no part": (only_files(f"{LEAF}/.zarray"), "has 1 files instead of 2"),
    "a part too many": (file(f"{LEAF}/1.0", [32, 1]), "has 3 files instead of 2"),
    "a part of another size": (file(f"{LEAF}/0.0", [31, 1]), f"has a file '{LEAF}/0.0' of 31 bytes"),
    "a header without end": (file(f"{LEAF}/.zarray", [2**40, 1]), f"of {2**40} bytes"),
    "a header of another size": (file(f"{LEAF}/.zarray", [7, 1]), "instead of 7"),
    "a part with another checksum": (file(f"{LEAF}/0.0", [32, 1]), "has other bytes than were written"),
    "a checksum too large": (file(f"{LEAF}/0.0", [32, 2**32]), "at `$.leaves[...].files[...][1]`"),
    "a size of text": (file(f"{LEAF}/0.0", ["32", 1]), "at `$.leaves[...].files[...][0]`"),
}
TODAYS_MANIFESTS = {
    **{case: change for case, change in MANIFESTS.items() if case not in _OF_FILES},
    "half the parts": (of_leaf("part", [2, 2]), "zarr.json has other bytes than were written"),
    "very many parts": (of_leaf("part", [1, 1]), "zarr.json has other bytes than were written"),
    "pieces of another rank": (of_leaf("piece", [4]), "has pieces [4] of [4, 2]"),
    "pieces of nothing": (of_leaf("piece", [0, 2]), "has pieces [0, 2] of [4, 2]"),
    "pieces that do not fit": (of_leaf("piece", [3, 2]), "has pieces [3, 2] of [4, 2]"),
    "other pieces": (of_leaf("piece", [2, 2]), "zarr.json has 340 bytes instead of 520"),
    "pieces of text": (of_leaf("piece", "4,2"), "at `$.leaves[...].piece`"),
    "files of the first form": (of_leaf("files", {"params.0.w/0.0": [36, 1]}), "has 1 files instead of 2"),
}
OTHER_MODELS = {
    "a name with a slash": (renamed("params/../../x"), "(it lacks params.0.w)"),
    "an absolute name": (renamed("/etc/passwd"), "(it lacks params.0.w)"),
    "a shape without end": (of_leaf("shape", [2**62, 2]), f"its params.0.w is float32[{2**62}, 2] instead"),
    "another size of dtype": (of_leaf("dtype", "float64"), "its params.0.w is float64[4, 2] instead"),
}
"""What a checkpoint of today's form may be, but of another model."""
KEYS = ("step", "data", "seed", "standing", "config", "plan_hash")
METADATA = {
    "nothing of ours": (change("custom_metadata", drop=True), "missing required field `custom_metadata`"),
    "ours is a list": (change("custom_metadata", to=[]), "at `$.custom_metadata`"),
    **{f"no {key}": (of_state(key, drop=True), f"{key} is missing") for key in KEYS},
    "another step": (of_state("step", 10), "it is of step 10"),
    "a step of text": (of_state("step", "20"), "at `$.step`"),
    "a step and a half": (of_state("step", 20.5), "at `$.step`"),
    "a step below 0": (of_state("step", -20), "at `$.step`"),
    "a step that is true": (of_state("step", True), "at `$.step`"),
    "a step that is null": (of_state("step", None), "at `$.step`"),
    "a step of no machine": (of_state("step", 2**70), "at `$.step`"),
    "a seed of text": (of_state("seed", "0"), "at `$.seed`"),
    "a seed below 0": (of_state("seed", -1), "at `$.seed`"),
    "a hash of numbers": (of_state("plan_hash", 3), "at `$.plan_hash`"),
    "standing is a list": (of_state("standing", []), "at `$.standing`"),
    "nothing stands": (of_state("standing", {}), "loss_scale is missing"),
    "more stands": (of_standing("x", 1), "'x' is unknown - at `$`"),
    "nothing was skipped": (of_standing("skipped", drop=True), "skipped is missing"),
    "less than nothing was skipped": (
        of_standing("skipped", -1),
        "at `$.skipped`",
    ),
    "a scale of text": (
        of_scale("value", "1"),
        "at `$.loss_scale",
    ),
    "a scale of 0": (of_scale("value", 0.0), "loss_scale=0.0"),
    "no scale": (
        of_scale("value", float("nan")),
        "loss_scale=nan",
    ),
    "more of a scale": (of_scale("x", 1), "'x' is unknown - at `$.loss_scale`"),
}
TEXTS = {
    "nothing": (b"", "no JSON: Expecting value"),
    "half": (b'{"crc32": 1', "no JSON: Expecting"),
    "no text": (b"\xff\xfe{}", "byte 0 is not UTF-8"),
    "deep": (b"[" * 10**6, "nested too deeply"),
    "a list": (b"[]", "got `array`"),
    "a key twice": (b'{"crc32": 1, "crc32": 1, "content": {}}', "the key 'crc32' is there twice"),
    "digits without end": (b'{"crc32": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    "a control character": (b'"\x1b"', "no JSON: Invalid control character"),
}
