"""What clients may say that an image is."""

from __future__ import annotations

import pytest

from diptych.common.errors import InvalidRequest
from diptych.router.values.images import MAX_URL_LEN, ImageInput, image_at, image_or_file


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:Image/PNG;charset=x;BASE64,"])
def test_a_data_url_is_the_file(head: str) -> None:
    assert image_at(f"{head}QUJD", "p") == ImageInput("p", file="QUJD")
    assert image_or_file(f"{head}QUJD", "p") == ImageInput("p", file="QUJD")


@pytest.mark.parametrize("url", ["http://a.example/b", "HTTPS://a.example/b"])
def test_another_url_is_where_it_is(url: str) -> None:
    assert image_at(url, "p", is_small=True) == ImageInput("p", url=url, is_small=True)


def test_any_other_text_is_a_file_where_one_may_be() -> None:
    assert image_or_file("QUJD", "p") == ImageInput("p", file="QUJD")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "QUJD",
        "file:///etc/passwd",
        "ftp://a.example/b",
        "data:image/png,abc",
        "data:text/plain;base64,QUJD",
        "data:;base64,QUJD",
        "data:image/png;base64",
        f"data:image/png;{'a' * 300};base64,QUJD",
        "http://a.example/" + "a" * MAX_URL_LEN,
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        image_at(url, "p")
    assert caught.value.param == "p"
