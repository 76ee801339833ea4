"""Documents of text and images that are bad: counted and named, in a folder, in JSON lines, in examples."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

import rrfp_jax as rrfp
from rrfp_jax.errors import UsageError
from tests.data.test_image_documents import picture
from tests.data.test_images import BAD, WHOLE

data = rrfp.data


def test_what_cannot_be_read_or_encoded_is_a_bad_document():
    class Decoding(list):
        def __getitem__(self, i):
            if i == 1:
                raise OSError("cannot identify image file")
            return super().__getitem__(i)

    good = {"text": "good", "images": [picture(1, 1, 4)]}
    source = data.Examples(Decoding([good, good, {**good, "text": "half \ud83d"}, good]), images="images")
    patches = data.Patches(size=4, longest=8)
    corpus = data.Corpus(source=source, tokenizer=data.Bytes(), vocabulary=256, patches=patches, bad="skip")
    with pytest.warns(UserWarning, match="2 of 4 .* 1 undecodable: example:2; 1 with an example that cannot"):
        assert np.flatnonzero(corpus.lengths.labels).tolist() == [0, 3]


def folder(path):
    """Images with texts, and everything that may be wrong with them."""
    for name in ("a", "b", "c", "no text", "blank"):
        (path / f"{name}.png").write_bytes(WHOLE)
    for name, content, _ in BAD:
        (path / name).write_bytes(content)
        (path / name).with_suffix(".txt").write_text("a picture")
    for name in ("a", "b", "c"):
        (path / f"{name}.txt").write_text(f"picture {name}")
    (path / "blank.txt").write_text(" \n")
    (path / "only text.txt").write_text("there is no picture")
    (path / "latin.png").write_bytes(WHOLE)
    (path / "latin.txt").write_bytes("é".encode("latin-1"))
    return path


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bad_documents_of_a_folder_are_counted_and_named(tmp_path):
    source = data.ImageFolder(str(folder(tmp_path)))
    corpus = data.Corpus(
        source=source, tokenizer=data.Bytes(), vocabulary=256, patches=data.Patches(size=4, longest=16)
    )
    said = [
        r"12 bad documents: ",
        r"1 undecodable: latin.png",
        r"2 with a broken image: header.png \(header.png\), truncated.png",
        r"2 with a file that is no image: page.png \(page.png\), text.png",
        r"2 with too large an image: bomb.png \(bomb.png\), large.png",
        r"1 with an empty image: empty.png",
        r"1 with an image of floating-point numbers: floats.tif",
        r"1 without an image: only text.txt",
        r"2 without text: blank.png, no text.png",
    ]
    with pytest.raises(UsageError) as refused:
        _ = corpus.lengths
    for words in said:
        assert re.search(words, str(refused.value))
    with pytest.warns(UserWarning, match="12 of 15 documents skipped: "):
        kept = np.flatnonzero(dataclasses.replace(corpus, bad="skip").lengths.labels)
    assert [source.names[i] for i in kept] == ["a.png", "b.png", "c.png"]


def lines(path, *documents, strict=True):
    (path / "lines.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    return data.Corpus(
        source=data.JsonLines(str(path / "lines.jsonl"), images="images"),
        tokenizer=data.Bytes(),
        vocabulary=256,
        patches=data.Patches(size=4, longest=16, strict=strict),
    )


def test_json_lines_put_images_where_they_stand(tmp_path):
    (tmp_path / "inside").mkdir()
    Image.fromarray(picture(1, 1, 4)).save(tmp_path / "inside" / "a.png")
    corpus = lines(
        tmp_path,
        {"text": "a<image>b", "images": ["inside/a.png"]},
        {"text": "behind", "images": "inside/a.png"},
    )
    assert corpus.document(0).patch.tolist() == [-1, 0, -1]
    assert corpus.document(1).patch.tolist() == [0] + [-1] * 6
    assert corpus.lengths.tokens.tolist() == [2, 6] and corpus.lengths.labels.tolist() == [1, 6]


def test_json_lines_do_not_lead_out_of_their_folder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside, outside):
        place.mkdir()
        (place / "a.png").write_bytes(WHOLE)
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    for path, said in (
        ("../outside/a.png", "out of the folder"),
        ("./../inside/a.png", "out of the folder"),
        (str(outside / "a.png"), "out of the folder"),
        (str(inside / "a.png"), "out of the folder"),
        ("link.png", "out of the folder"),
        ("loop.png", "unreadable|missing"),
        ("absent.png", r"1 with a missing image: lines.jsonl:1 \(absent.png\)"),
        ("https://example.org/a.png", "missing"),
        ("a\0.png", "path that is none"),
        ("a" * 5000, "unreadable"),
        (7, "path that is none"),
        ("", "path that is none"),
    ):
        with pytest.raises(UsageError, match=said):
            _ = lines(inside, {"text": "a picture", "images": [path]}).lengths
    for document, said in (
        ({"text": "a picture"}, "without an image"),
        ({"images": ["a.png"]}, "without text"),
        ({"text": 3, "images": ["a.png"]}, "field 'text' that is no text"),
        ({"text": "<image><image>b", "images": ["a.png"]}, "more or fewer images than places"),
        (["a"], "no object with fields"),
    ):
        with pytest.raises(UsageError, match=said):
            _ = lines(inside, document).lengths


def test_data_that_changes_during_the_run_ends_it(tmp_path):
    (tmp_path / "a.png").write_bytes(WHOLE)
    corpus = lines(tmp_path, {"text": "a picture", "images": ["a.png"]})
    assert corpus.lengths.patches.tolist() == [6]
    (tmp_path / "a.png").write_bytes(WHOLE[:-30])
    with pytest.raises(UsageError, match=r"lines.jsonl:1: with a broken image a.png; the data was changed"):
        corpus.pixels(0)
    Image.fromarray(picture(1, 1, 4)).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match="another size than before"):
        corpus.pixels(0)


def test_a_picture_that_was_broken_from_the_start_is_told_as_such_when_only_headers_were_read(tmp_path):
    (tmp_path / "a.png").write_bytes(WHOLE[:-30])
    corpus = lines(tmp_path, {"text": "a picture", "images": ["a.png"]}, strict=False)
    assert corpus.lengths.patches.tolist() == [6]
    with pytest.raises(
        UsageError, match=r"a broken image a.png; it is broken, or was .* Patches\(strict=True\)"
    ):
        corpus.pixels(0)
