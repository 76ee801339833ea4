"""Sources and tokenizers: what documents there are, what they hold, and what is done about bad ones."""

import errno
import fcntl
import json
import os
import warnings
from collections import UserDict
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import rrfp_jax as rrfp
from rrfp_jax.data.corpus import Corpus, write_tokens
from rrfp_jax.data.sources import Examples, ImageFolder, JsonLines, TextFiles, TokenFile, hugging_face
from rrfp_jax.data.tokenizers import Bytes, SentencePiece, TokenizerFile
from rrfp_jax.errors import UsageError

TEXTS = [
    "The cat sat.\n\nOn the mat.",
    "Ünïcode: 猫",
    "A longer line with words in it, and more.",
    "the end of it all",
]


def corpus(source, tokenizer=None, **settings):
    return Corpus(**{"source": source, "tokenizer": tokenizer, "vocabulary": 256} | settings)


def documents(corpus):
    return [corpus.tokens(d, 0, int(n) + 1).tolist() for d, n in enumerate(corpus.lengths.labels) if n]


@pytest.fixture
def folder(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def jsonl(tmp_path):
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "all.jsonl").write_text("\n".join([*lines[:2], "", *lines[2:]]))
    return tmp_path / "all.jsonl"


BYTES = [list(text.encode()) for text in TEXTS]


def test_a_full_disk_ends_no_process(folder, monkeypatch):
    def full(file, *more):
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR, (
            "glibc writes where a system cannot"
        )
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(folder.iterdir())
    with pytest.raises(UsageError, match=r"tokens\.npy: cannot be written: No space left"):
        write_tokens(corpus(TextFiles(str(folder / "*.txt")), Bytes()), folder / "tokens.npy")
    assert sorted(folder.iterdir()) == before


def test_every_source_gives_the_same_documents(folder, jsonl):
    files = TextFiles(str(folder / "*.txt"))
    write_tokens(corpus(files, Bytes()), str(folder / "tokens.npy"))
    np.concatenate([np.array(text, np.uint16) for text in BYTES]).tofile(folder / "raw.bin")
    (folder / "raw.offsets.npy").write_bytes((folder / "tokens.offsets.npy").read_bytes())
    sources = [
        (files, Bytes()),
        (JsonLines(str(jsonl)), Bytes()),
        (TokenFile(str(folder / "tokens.npy")), None),
        (TokenFile(str(folder / "raw.bin")), None),
        (Examples([{"text": text} for text in TEXTS]), Bytes()),
        (Examples([text.encode() for text in TEXTS], field=""), Bytes()),
        (Examples([{"ids": ids} for ids in BYTES], field="ids"), None),
    ]
    for source, tokenizer in sources:
        assert documents(corpus(source, tokenizer)) == BYTES, source
    ended = corpus(files, Bytes(), vocabulary=257, end=256)
    assert documents(ended) == [[*text, 256] for text in BYTES]
    assert ended.tokens(0, 5, 9).tolist() == BYTES[0][5:9]
    assert JsonLines(str(jsonl)).names[2] == "all.jsonl:4"
    prints = {corpus(s, t).fingerprint for s, t in sources} | {ended.fingerprint}
    assert len(prints) == len(sources)  # the texts and their bytes have the same; `ended` has its own


@pytest.mark.parametrize(("suffix", "name"), [(".txt", "a.TXT"), (".TXT", "a.txt"), (".Txt", "a.Txt")])
def test_the_case_of_a_suffix_keeps_no_text_from_its_image(tmp_path, suffix, name):
    (tmp_path / "a.PNG").touch()
    (tmp_path / name).write_text("a cat")
    source = ImageFolder(str(tmp_path), suffix)
    assert source.names == ["a.PNG"] and source.read(0) == [tmp_path / "a.PNG", "a cat"]


def test_sections_end_with_their_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\n  \nthree\n\n\nfour")
    (tmp_path / "b.txt").write_text("five\n\n")
    source = TextFiles(str(tmp_path), "section")
    found = [bytes(text).decode() for text in documents(corpus(source, Bytes()))]
    assert found == ["one\ntwo\n\n  \n", "three\n\n\n", "four", "five\n\n"]
    assert source.names == ["a.txt:0", "a.txt:12", "a.txt:20", "b.txt:0"]


def test_only_a_part_of_a_file_is_read(folder, monkeypatch):
    texts, parts = corpus(TextFiles(str(folder / "*.txt")), Bytes()), []
    read = TextFiles.read
    monkeypatch.setattr(TextFiles, "read", lambda *args: parts.append(args[1:]) or read(*args))
    assert (texts.lengths.labels + 1).tolist() == [len(text) for text in BYTES] and not parts
    assert texts.tokens(2, 10, 15).tolist() == BYTES[2][10:15]
    assert parts == [(2, 10, 15)]


def bad_folder(folder):
    (folder / "4.txt").write_bytes(b"")
    (folder / "5.txt").write_bytes(b"\xff\xfe\xff")
    (folder / "6.txt").write_bytes(b"1")
    return TextFiles(str(folder / "*.txt"))


def bad_lines(folder):
    with (folder / "all.jsonl").open("ab") as file:
        file.write(b'\n{"text": \n{"txt": "abc"}\n{"text": 3}\n{"text": "a"}\n{"text": "\xff\xff"}\n')
    return JsonLines(str(folder / "all.jsonl"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bad_folder, "2 too short: 4.txt, 6.txt; 1 undecodable: 5.txt"),
        (
            bad_lines,
            "1 neither text nor tokens: all.jsonl:8; 1 not JSON: all.jsonl:6; 1 too short: all.jsonl:9; "
            "1 undecodable: all.jsonl:10; 1 without the field 'text': all.jsonl:7",
        ),
    ],
)
def test_bad_documents_are_refused_or_skipped_by_name(folder, jsonl, make, said):
    bad = corpus(make(folder), Bytes(strict=True))
    with pytest.raises(UsageError) as refused:
        _ = bad.lengths
    assert said in str(refused.value) and "bad='skip'" in str(refused.value)
    skipping = replace(bad, bad="skip")
    with pytest.warns(UserWarning, match="documents skipped") as warned:
        lengths = skipping.lengths.labels
    assert said in str(warned[0].message)
    assert documents(skipping) == BYTES
    assert (lengths > 0).tolist() == [True] * 4 + [False] * (len(lengths) - 4)


def test_examples_may_be_any_mapping_and_tokens_any_array():
    examples = [UserDict(ids=jnp.arange(3)), UserDict(ids=Tensor())]
    assert documents(corpus(Examples(examples, "ids"))) == [[0, 1, 2], [7, 8]]


class Tensor:
    """Of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.array([7, 8])


class Listing:
    """A source, and a tokenizer, that give tokens as lists."""

    names, size, fingerprint = ["a", "b"], 9, "listing"

    def read(self, document):
        return [document, 7, 8]

    def encode(self, text):
        return [len(text), 7, 8]


def test_tokens_may_be_lists_of_ones_own_source_or_tokenizer():
    assert documents(corpus(Listing())) == [[0, 7, 8], [1, 7, 8]]
    assert documents(corpus(Examples(["a", "bc"], ""), Listing())) == [[1, 7, 8], [2, 7, 8]]


def test_long_lists_of_bad_documents_are_cut_but_counted():
    with pytest.raises(UsageError, match=r"99 bad documents: 99 too short: e:0, .* e:9 and 89 more\."):
        _ = corpus(Examples(["x"] * 99, "", "e"), Bytes()).lengths


def write_offsets(folder, offsets):
    np.save(folder / "t.npy", np.arange(9))
    np.save(folder / "t.offsets.npy", np.array(offsets))
    return TokenFile(str(folder / "t.npy"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: corpus(TextFiles(str(f / "no"))), "no such file or folder"),
        (lambda f: corpus(TextFiles(str(f), "page")), "document='page': no such unit"),
        (lambda f: corpus(TextFiles(str(f)), bad="ignore"), "bad='ignore'"),
        (lambda f: corpus(TextFiles(str(f)), Bytes(), vocabulary=255), "256 tokens, .* vocabulary only 255"),
        (lambda f: corpus(TextFiles(str(f)), Bytes(), end=256), "end=256: not in the model's vocabulary"),
        (lambda f: corpus(JsonLines(str(f / "all.jsonl"))), "holds text; give one, such as"),
        (lambda f: corpus(Examples([[1, 2]], ""), Bytes()), "holds tokens; give None"),
        (lambda f: corpus(Examples(["x"], ""), Bytes(), bad="skip"), "none of which can be used"),
        (lambda f: Examples(iter("abc")), "a length and indices"),
        (lambda f: corpus(Examples(["x"]), Bytes()), "'text' .field='' takes them as they are.: example:0"),
        (lambda f: Examples({"text": ["a"]}), r"type dict: .* rows by index, .*from_dict\(columns\), a list"),
        (lambda f: corpus(TokenFile(str(f / "no.npy"))), "no array of offsets of documents"),
        (lambda f: corpus(write_offsets(f, [0, 5, 3])), "must ascend from 0 to at most the 9 tokens"),
        (lambda f: corpus(write_offsets(f, [0, 10])), "must ascend from 0"),
        (lambda f: write_tokens(corpus(TextFiles(str(f)), Bytes()), f / "t.bin"), "t.bin: .* ends in .npy"),
        (lambda f: corpus(write_offsets(f, [0.0])), r"float64\[1\] cannot be offsets"),
        (lambda f: corpus(write_offsets(f, [0, 4]), vocabulary=8), "tokens from 4 to 8.*vocabulary has 8"),
        (lambda f: corpus(TextFiles(str(f)), TokenizerFile("no.json")), "(cannot be read|pip install)"),
        (lambda f: corpus(TextFiles(str(f)), SentencePiece("no.model")), "(cannot be read|pip install)"),
        (lambda f: hugging_face(str(f)), "(no dataset written by save_to_disk|pip install)"),
    ],
)
def test_what_cannot_be_is_refused(folder, jsonl, make, said):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match=said) as refused:
            documents(make(folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("example", ["word", [1, 2]])
def test_messages_do_not_quote_the_data(example):
    given = {"tokenizer": Bytes()} if example == [1, 2] else {}
    with pytest.raises(UsageError, match=r"Examples\(field='', name='e', .*\) holds") as refused:
        _ = corpus(Examples([example] * 99, "", "e"), **given).lengths
    assert len(str(refused.value)) < 200


def test_tokens_beyond_the_vocabulary_are_bad_documents_from_the_start(folder):
    bad = corpus(Examples([[1, 2], [1, 256], [-1, 3]], ""))
    negative, beyond = "1 with negative tokens: example:2", "1 with tokens beyond the vocabulary of 256"
    with pytest.raises(UsageError, match=rf"{negative}; {beyond} \(give .*\): example:1\."):
        _ = bad.lengths
    with pytest.warns(UserWarning, match="2 of 3 documents skipped"):
        assert documents(replace(bad, bad="skip")) == [[1, 2]]
    np.save(folder / "t.npy", np.array([-1, 5]))
    np.save(folder / "t.offsets.npy", np.array([0, 2]))
    with pytest.raises(UsageError, match=r"from -1 to 5, but the model's vocabulary has 256; tokenize anew$"):
        documents(corpus(TokenFile(str(folder / "t.npy"))))


def test_a_folder_that_cannot_be_read_is_refused(folder, monkeypatch):
    """But for lost+found, a file system's own, which is left out."""
    (folder / "inside").mkdir()
    (folder / "lost+found").mkdir()
    look, unreadable = os.scandir, ["lost+found"]

    def scandir(path):
        if os.path.basename(path) in unreadable:  # as root, who runs tests in containers, reads everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert len(TextFiles(str(folder)).names) == 4
    unreadable.append("inside")
    with pytest.raises(UsageError, match=r"the folder .*inside cannot be read .Permission denied.; make it"):
        _ = TextFiles(str(folder)).names


def test_a_file_that_shrinks_is_refused(folder):
    texts = corpus(TextFiles(str(folder / "*.txt")), Bytes())
    assert texts.lengths.labels[0]
    (folder / "0.txt").write_text("s")
    with pytest.raises(UsageError, match=r"0\.txt: shorter than the 25 bytes.*start again"):
        texts.tokens(0, 0, 9)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"a\.json needs the package tokenizers.*pip install tokenizers"):
        _ = TokenizerFile("a.json").size


def test_a_tokenizers_path_is_text_whatever_was_given(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert SentencePiece("~/m.model").path == SentencePiece(folder / "m.model").path == f"{folder}/m.model"


# What follows needs packages of the extra `data`.


def test_a_tokenizers_file(folder):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["?"]))
    made.enable_truncation(2)  # must not cut documents here
    made.save(str(folder / "t.json"))
    made.no_truncation()
    tokenizer = TokenizerFile(str(folder / "t.json"))
    assert tokenizer.size == made.get_vocab_size()
    found = corpus(TextFiles(str(folder / "*.txt")), tokenizer)
    assert documents(found) == [made.encode(text).ids for text in TEXTS]
    assert found.tokens(0, 2, 4).tolist() == made.encode(TEXTS[0]).ids[2:4]
    with pytest.raises(UsageError, match=f"has {tokenizer.size} tokens, the model's vocabulary only 5"):
        replace(found, vocabulary=5)
    (folder / "t.json").write_text("{}")
    with pytest.raises(UsageError, match="not the JSON file of a tokenizer"):
        _ = TokenizerFile(str(folder / "t.json")).size


def test_a_sentencepiece_model(folder):
    package = pytest.importorskip("sentencepiece")
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5), model_prefix=str(folder / "m"), vocab_size=31, minloglevel=2
    )
    model = SentencePiece(str(folder / "m.model"))
    made = package.SentencePieceProcessor(model_file=model.path)
    assert model.size == 31
    found = corpus(TextFiles(str(folder / "*.txt")), model)
    assert documents(found) == [made.encode(text) for text in TEXTS]


def test_a_hugging_face_dataset_on_disk(folder):
    datasets = pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow").table({"text": TEXTS, "ids": BYTES})
    # from_dict would hash the table, which fails with datasets 5.2 and pyarrow's newest.
    made = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="0")
    made.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(folder / "many"))
    for path in (folder / "one", folder / "many"):
        assert documents(corpus(hugging_face(str(path)), Bytes())) == BYTES
        assert documents(corpus(hugging_face(str(path), "ids"))) == BYTES
    with pytest.raises(UsageError, match="no split 'test'; there are train"):
        hugging_face(str(folder / "many"), split="test")
    with pytest.raises(UsageError, match="no field 'body'; there are text, ids"):
        hugging_face(str(folder / "one"), "body")


def test_grain_datasets():
    grain = pytest.importorskip("grain")
    texts = grain.MapDataset.source(TEXTS)
    assert documents(corpus(Examples(texts, ""), Bytes())) == BYTES
    with pytest.raises(UsageError, match="without end; leave out repeat"):
        Examples(texts.repeat())
    numbers = grain.MapDataset.range(100).seed(3).shuffle().map(lambda i: {"x": np.full(2, i)})
    stream = rrfp.data.Stream(numbers.batch(4).to_iter_dataset(), microbatches=2)
    expected = [batch["x"] for batch in numbers.batch(4)]
    for step in (0, 3, 1):
        for j, mb in enumerate(stream.plan(step)):
            np.testing.assert_array_equal(stream.load(mb, ["x"])["x"], expected[2 * step + j])
