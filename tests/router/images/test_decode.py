"""Files become pixels as models want them, or are refused in words: whatever they are made of."""

from __future__ import annotations

import base64
import binascii
import gc
import hashlib
import io
import struct
import weakref
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import LIMITS, VISION, file_of, picture
from PIL import Image as pillow
from PIL import ImageOps

from diptych.common.errors import InvalidRequest
from diptych.router.images import decode
from diptych.router.images.decode import ReadImage, digest_of, open_image, read_image
from diptych.router.images.limits import ImageLimits
from diptych.router.values.images import ImageInput

GIVEN = ImageInput("messages")
KEEPING = replace(VISION, min_pixels=64, max_pixels=1 << 20)  # a multiple of 8 stays as it is


def read(
    file: bytes | str, vision: Any = KEEPING, limits: ImageLimits = LIMITS, image: ImageInput = GIVEN
) -> ReadImage:
    return read_image(open_image(image, file, vision, limits))


def pixels_of(read: ReadImage) -> Any:
    return np.frombuffer(read.image.rgb, np.uint8).reshape(read.image.height, read.image.width, 3)


def refused(file: bytes | str, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(file, limits=limits)
    assert caught.value.param == "messages"
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "how"), [("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("JPEG", {"quality": 95})]
)
def test_each_format_is_read_as_pillow_reads_it(kind: str, how: Any) -> None:
    file = file_of(picture(), kind, **how)
    assert (pixels_of(read(file)) == np.asarray(pillow.open(io.BytesIO(file)).convert("RGB"))).all()


def test_a_digest_names_size_and_pixels() -> None:
    found = read(file_of(picture()))
    assert found.digest == digest_of(found.image)
    assert len(found.digest) == 32
    assert read(file_of(picture(seed=1))).digest != found.digest
    assert digest_of(replace(found.image, height=32, width=24)) != found.digest


def test_base64_is_a_file() -> None:
    file = file_of(picture())
    text = base64.encodebytes(file).decode()  # with line breaks
    assert read(text) == read(file)


@pytest.mark.parametrize("add_lines", [False, True])
def test_base64_is_decoded_in_pieces(add_lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock is held for one at a time."""
    monkeypatch.setattr(decode, "BASE64_PIECE", 64)
    sizes: list[int] = []
    whole = binascii.a2b_base64

    def noted(piece: bytes, *, strict_mode: bool) -> bytes:
        sizes.append(len(piece))
        return whole(piece, strict_mode=strict_mode)

    monkeypatch.setattr(binascii, "a2b_base64", noted)
    for extra in range(4):  # all that may be at the end
        file = file_of(picture()) + bytes(extra)
        text = (base64.encodebytes if add_lines else base64.b64encode)(file).decode()
        assert decode._bytes_of(text, "p") == file
    assert max(sizes) == 64
    text = base64.b64encode(bytes(47)).decode()
    assert text.endswith("=")
    assert len(text) == 64
    for more in ("AAAA", text):  # the end of a file, and something behind it
        assert "base64" in refused(text + more)


@pytest.mark.parametrize("text", ["", "%%%%", "AAA", "é", "AAAA=", "QUJD" + "\ud800"])
def test_what_is_no_base64_of_an_image_is_refused(text: str) -> None:
    assert refused(text)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str) -> None:
    assert "PNG, JPEG, WebP or GIF" in refused(file_of(picture(), kind))


def test_transparent_parts_are_white() -> None:
    image = pillow.new("RGBA", (16, 16), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 8, 16))
    pixels = pixels_of(read(file_of(image)))
    assert (pixels[0, 15] == (255, 255, 255)).all()
    assert (pixels[0, 0] == (0, 0, 255)).all()


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    image = pillow.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert (pixels_of(read(file_of(image, "GIF", transparency=1)))[0, 0] == (255, 255, 255)).all()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_colours_become_red_green_and_blue(mode: str) -> None:
    image = picture(mode=mode)
    file = file_of(image, "PNG" if mode == "L" else "JPEG")
    assert pixels_of(read(file)).shape == (24, 32, 3)


def test_sixteen_bits_lose_the_lower_eight() -> None:
    values = np.array([[0x0100, 0xFFFF]], np.uint16).repeat(8, 0).repeat(8, 1)
    pixels = pixels_of(read(file_of(pillow.fromarray(values))))
    assert (pixels[0, 0] == 1).all()
    assert (pixels[0, 15] == 255).all()


def test_the_first_frame_of_an_animation_counts() -> None:
    frames = [pillow.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    for kind, how in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        file = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **how)
        assert (pixels_of(read(file)) == (255, 0, 0)).all(), kind


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_photograph_is_turned_as_the_camera_was_held(orientation: int, kind: str) -> None:
    exif = pillow.Exif()
    exif[0x0112] = orientation
    how = {"lossless": True} if kind == "WEBP" else {}
    upright = picture(32, 16)
    stored = file_of(upright, kind, exif=exif, **how)
    wanted = ImageOps.exif_transpose(pillow.open(io.BytesIO(stored)))
    assert (pixels_of(read(stored)) == np.asarray(wanted.convert("RGB"))).all()


def test_broken_exif_says_nothing() -> None:
    file = file_of(picture(), "WEBP", lossless=True, exif=b"Exif\x00\x00broken")
    assert pixels_of(read(file)).shape == (24, 32, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_ends_too_soon_is_refused(kind: str) -> None:
    file = file_of(picture(64, 64), kind)
    assert "whole file" in refused(file[: len(file) * 2 // 3])


def test_too_many_bytes_are_refused_before_they_are_read() -> None:
    few = replace(LIMITS, file_bytes=100)
    assert "more than 100 bytes" in refused(b"x" * 101, few)
    assert "more than 100 bytes" in refused("A" * 200, few)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG that has so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = zlib.compress(b"\x00" * (1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height"), [(1025, 1024), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)]
)
def test_a_bomb_is_refused_by_its_head(width: int, height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bomb(width, height)
    assert len(file) < 1 << 16
    monkeypatch.setattr(pillow.Image, "load", lambda self: pytest.fail("its pixels were made"))
    assert "pixels" in refused(file)


def test_a_jpeg_with_more_scans_than_any_camera_makes_is_refused() -> None:
    file = file_of(picture(), "JPEG", progressive=True)
    scan = file.rindex(b"\xff\xda")
    assert "scans" in refused(file[:scan] + file[scan:-2] * 101 + b"\xff\xd9")


def test_a_strip_is_refused_in_words() -> None:
    assert "longer side" in refused(file_of(picture(2010, 8)))


def test_few_pixels_are_made_of_an_image_that_is_to_be_small() -> None:
    large = replace(VISION, min_pixels=64, max_pixels=1 << 22)
    file = file_of(pillow.new("RGB", (1024, 1000)))
    whole, small = (read(file, large, image=replace(GIVEN, is_small=is_small)).image for is_small in (False, True))
    assert (whole.height, whole.width) == (1000, 1024)
    assert small.height * small.width <= 512 * 512


def test_of_an_image_that_was_opened_no_pillow_image_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them may wait for their turn, and with pixels each is as large as its head says."""
    files = [file_of(picture(seed=seed)) for seed in range(3)]
    made: list[weakref.ref[pillow.Image]] = []
    first = pillow.Image.__init__

    def noted(image: pillow.Image) -> None:
        made.append(weakref.ref(image))
        first(image)

    monkeypatch.setattr(pillow.Image, "__init__", noted)
    opened = [open_image(GIVEN, file, KEEPING, LIMITS) for file in files]
    found = [read_image(each) for each in opened]
    gc.collect()
    assert len(made) >= 6
    assert not [each() for each in made if each() is not None]
    assert len({each.digest for each in found}) == 3


def test_comments_that_inflate_are_refused_at_the_head() -> None:
    comment = zlib.compress(b"x" * (1 << 20), 9)
    texts = b"".join(_chunk(b"zTXt", b"comment\x00\x00" + comment) for _ in range(5))
    file = file_of(picture())
    assert len(texts) < 1 << 13
    assert "can't be read" in refused(file[:33] + texts + file[33:])


def test_what_is_put_on_white_in_bands_is_what_it_is_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(40, 24, mode="RGBA")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    wanted = np.asarray(pillow.alpha_composite(white, image).convert("RGB"))
    sizes: list[int] = []
    compose = pillow.alpha_composite

    def noted(below: pillow.Image, above: pillow.Image) -> pillow.Image:
        sizes.append(above.width * above.height)
        return compose(below, above)

    monkeypatch.setattr(pillow, "alpha_composite", noted)
    monkeypatch.setattr(decode, "BAND_PIXELS", 40 * 5)
    assert (pixels_of(read(file_of(image))) == wanted).all()
    assert sizes == [40 * 5] * 4 + [40 * 4]  # Python's lock is held for one at a time


def test_an_image_costs_as_many_turns_as_pixels_are_gone_over() -> None:
    plain, scanned = (file_of(picture(64, 64), "JPEG", progressive=progressive) for progressive in (False, True))
    steps = [open_image(GIVEN, file, KEEPING, LIMITS).num_steps for file in (plain, scanned)]
    assert steps == [64 * 64 * file.count(b"\xff\xda") for file in (plain, scanned)]
    assert steps[1] > 5 * steps[0]


def test_a_large_jpeg_may_have_fewer_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(picture(64, 64), "JPEG", progressive=True)
    scan = file.rindex(b"\xff\xda")
    longer = file[:scan] + file[scan:-2] * 10 + b"\xff\xd9"
    read(longer)
    monkeypatch.setattr(decode, "SCANNED_PIXELS", 64 * 64 * 12)
    assert "more than 12 scans" in refused(longer)
    read(file)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_image_or_refused(data: bytes) -> None:
    try_to_read(data)


FILES = [file_of(picture(16, 16), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]


@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8), st.data())
def test_any_damaged_file_is_an_image_or_refused(file: bytes, changes: list[tuple[int, int]], data: Any) -> None:
    damaged = bytearray(file)
    for at, value in changes:
        damaged[at % len(damaged)] = value
    try_to_read(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


def try_to_read(data: bytes) -> None:
    try:
        found = read(data)
    except InvalidRequest:
        return
    assert len(found.image.rgb) == 3 * found.image.height * found.image.width


@pytest.mark.parametrize(
    ("width", "height", "size", "digest"),
    [  # of what transformers' Qwen2VLImageProcessorPil makes; tests of platforms ask it itself
        (32, 24, (24, 32), "c9515a8dabb5d80f"),
        (33, 25, (24, 32), "5b48907076e70aad"),
        (100, 37, (40, 96), "dcd9ea6e7a243484"),
        (7, 5, (16, 24), "4dd77af9a5893e3d"),
        (640, 480, (48, 72), "e892fbbb64e43ef8"),
        (28, 28, (32, 32), "0b4900ed404249e1"),
        (57, 1, (8, 128), "1b2b12fc196f0e20"),
    ],
)
def test_pixels_are_those_of_transformers_processor(
    width: int, height: int, size: tuple[int, int], digest: str
) -> None:
    image = read(file_of(picture(width, height)), VISION).image
    assert (image.height, image.width) == size
    assert hashlib.sha256(image.rgb).hexdigest()[:16] == digest


@pytest.mark.parametrize(("width", "height"), [(50, 20), (16, 90), (32, 32)])
def test_gemma_3_s_pixels_are_those_of_transformers_processor(width: int, height: int) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image, square = picture(width, height), replace(VISION, side=32, resampling="bilinear")
    size: Any = {"height": 32, "width": 32}
    processor = Gemma3ImageProcessorPil(size=size, do_rescale=False, do_normalize=False)
    expected = processor(images=[image], return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    assert (pixels_of(read(file_of(image), square)) == expected).all()
