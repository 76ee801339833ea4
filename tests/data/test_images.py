"""Images of every kind, and files that are none, as patches."""

import dataclasses
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import rrfp_jax as rrfp
from rrfp_jax.data.images import MOST_PIXELS
from rrfp_jax.data.sources import BadDocument
from rrfp_jax.errors import UsageError

PATCHES = rrfp.data.Patches(size=4, longest=64)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (8, 12, 3), np.uint8)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def put_together(patches, grid, size):
    """Patches back as an image, each at its place."""
    rows, columns = grid.max(axis=0) + 1
    image = np.zeros((rows * size, columns * size, 3), np.uint8)
    for patch, (row, column) in zip(patches, grid.tolist(), strict=True):
        own = patch.reshape(size, size, 3)
        image[row * size : (row + 1) * size, column * size : (column + 1) * size] = own
    return image


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 2]), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_an_image_of_whole_patches_is_there_once_at_its_places(size, merge, rows, columns, class_token):
    class_token = class_token and merge == 1
    patches = rrfp.data.Patches(size=size, merge=merge, longest=4 * size * merge, class_token=class_token)
    pixels = RANDOM.integers(0, 256, (rows * patches.unit, columns * patches.unit, 3), np.uint8)
    grid = patches.grid_of(pixels)
    assert grid == (rows * merge, columns * merge)
    cut, places = patches.patches_of(pixels), patches.places(*grid)
    assert cut.shape == (patches.count(grid), 3 * size**2) and places.shape == (len(cut), 2)
    if class_token:
        assert not cut[0].any() and places[0].tolist() == [-1, -1]
        cut, places = cut[1:], places[1:]
    np.testing.assert_array_equal(put_together(cut, places, size), pixels)
    if merge == 2:  # four that are neighbours come one behind the other
        squares = places.reshape(-1, 4, 2)
        np.testing.assert_array_equal(
            squares - squares[:, :1], [[[0, 0], [0, 1], [1, 0], [1, 1]]] * len(squares)
        )


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (12, 8, (2, 3)),
        (13, 9, (2, 3)),
        (1, 1, (1, 1)),
        (640, 64, (2, 16)),
        (9999, 1, (1, 16)),
        (64, 66, (16, 16)),
    ],
)
def test_sides_become_whole_patches_and_no_longer_than_they_may(width, height, grid):
    assert PATCHES.grid(width, height) == grid


def kinds():
    """(name, encoded file, the pixels that it stands for); grey kinds are of 200, others red."""
    red = np.full((8, 8, 3), (255, 0, 0), np.uint8)
    grey = np.full((8, 8), 200, np.uint8)
    clear = np.dstack([red, np.zeros((8, 8), np.uint8)])
    palette = Image.fromarray(red).convert("P", palette=Image.Palette.ADAPTIVE)
    three = np.repeat(grey[..., None], 3, axis=2)
    white = np.full((8, 8, 3), 255, np.uint8)
    turned = np.zeros((8, 4, 3), np.uint8)
    turned[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: rows are columns
    return [
        ("rgb", encoded(Image.fromarray(red)), red),
        ("grey", encoded(Image.fromarray(grey)), three),
        ("16 bits", encoded(Image.fromarray(grey.astype(np.uint16) * 257)), three),
        ("palette", encoded(palette), red),
        ("transparent", encoded(Image.fromarray(clear)), white),
        ("transparent palette", encoded(palette, transparency=0), white),
        ("one bit", encoded(Image.fromarray(grey > 100)), white),
        ("grey and alpha", encoded(Image.fromarray(grey).convert("LA")), three),
        ("cmyk", encoded(Image.fromarray(red).convert("CMYK"), "TIFF"), red),
        ("gif", encoded(palette, "GIF"), red),
        ("turned", encoded(Image.fromarray(turned), "PNG", exif=exif), np.rot90(turned, -1)),
        ("turned TIFF", encoded(Image.fromarray(turned), "TIFF", tiffinfo={0x0112: 6}), np.rot90(turned, -1)),
    ]


@pytest.mark.parametrize(("kind", "file", "expected"), kinds(), ids=[name for name, *_ in kinds()])
def test_all_kinds_of_pictures_have_colours(kind, file, expected):
    grid = PATCHES.grid_of(file)
    assert dataclasses.replace(PATCHES, strict=False).grid_of(file) == grid
    found = put_together(PATCHES.patches_of(file, grid), PATCHES.places(*grid), 4)
    np.testing.assert_allclose(found.astype(int), expected.astype(int), atol=2)


def test_an_image_with_another_grid_than_before_is_told():
    with pytest.raises(BadDocument, match="of another size than before"):
        PATCHES.patches_of(WHOLE, (3, 2))  # as many patches


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(side):
    """A PNG of a few bytes that says it has so many pixels a side."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


WHOLE = encoded(Image.fromarray(PIXELS))
BAD = [
    ("truncated.png", WHOLE[: len(WHOLE) // 2], "with a broken image"),
    ("header.png", WHOLE[:20], "with a broken image"),
    ("text.png", b"only text", "with a file that is no image"),
    ("empty.png", b"", "with an empty image"),
    ("large.png", bomb(9000), "with too large an image"),  # Pillow would warn
    ("bomb.png", bomb(60_000), "with too large an image"),  # Pillow would refuse it
    ("page.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "with a file that is no image"),
    ("floats.tif", encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "floating-point numbers"),
]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[name for name, *_ in BAD])
def test_files_that_are_no_good_images_are_told(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    for read in (PATCHES.grid_of, PATCHES.patches_of):
        with pytest.raises(BadDocument, match=said) as told:
            read(tmp_path / name)
        assert told.value.args[1] == name
    assert MOST_PIXELS < 9000**2


def test_what_is_no_file_or_no_image_is_told(tmp_path):
    (tmp_path / "folder.png").mkdir()
    for odd, said in (
        (tmp_path / "absent.png", "missing"),
        (tmp_path / "folder.png", "unreadable"),
        ("a string", "something that is no image"),
        (np.ones((4, 4)), "array that is no image"),
        (np.ones((4, 4, 2), np.uint8), "array that is no image"),
    ):
        with pytest.raises(BadDocument, match=said):
            PATCHES.patches_of(odd)


def test_only_headers_are_read_if_not_strict(tmp_path):
    (tmp_path / "a.png").write_bytes(WHOLE[:-30])
    lax = rrfp.data.Patches(size=4, longest=64, strict=False)
    assert lax.grid_of(tmp_path / "a.png") == (2, 3)
    with pytest.raises(BadDocument, match="with a broken image"):
        lax.patches_of(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"size": 0}, "size=0"),
        ({"merge": 3}, "merge=3"),
        ({"merge": 2, "class_token": True}, "would be no square"),
        ({"longest": 7}, "longest=7"),
        ({"longest": 10**9}, "longest=1000000000"),
    ],
)
def test_impossible_settings_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        rrfp.data.Patches(**{"size": 8, **settings})
