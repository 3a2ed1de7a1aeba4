"""What is kept of fitted images: the same bytes for the same image, within a number of bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pictures import make_image

from raylearner.config.actors import ImagesSection
from raylearner.images import TargetSize, fit_image
from raylearner.tokenization import vision as vision_module
from raylearner.tokenization.vision import ImageFitter, Vision

VISION = Vision(
    image_token_id=0,
    video_token_id=1,
    start_token_id=2,
    end_token_id=3,
    patch_size=14,
    merge_size=2,
    min_pixels=784,
    max_pixels=78_400,
)
SECTION = ImagesSection(min_pixels=784, max_pixels=78_400)


def test_images_least_lately_shown_go_first_and_bytes_are_bounded() -> None:
    images = [make_image(seed, 56, 56) for seed in range(4)]
    sizes = [len(image) + len(ImageFitter(VISION, SECTION).fit(image)) for image in images]
    fitter = ImageFitter(VISION, SECTION, max_kept_bytes=max(sizes) * 3)
    first, second, _ = (fitter.fit(image) for image in images[:3])
    assert fitter.kept_bytes == sum(sizes[:3])
    assert fitter.fit(bytes(bytearray(images[0]))) is first
    fitter.fit(images[3])
    assert fitter.kept_bytes == sizes[0] + sizes[2] + sizes[3]
    assert fitter.fit(images[0]) is first
    again = fitter.fit(images[1])
    assert again == second
    assert again is not second


def test_an_image_beyond_the_bound_is_fitted_and_not_kept() -> None:
    fitter = ImageFitter(VISION, SECTION, max_kept_bytes=100)
    assert fitter.fit(make_image(0, 56, 56)) == fitter.fit(make_image(0, 56, 56))
    assert fitter.kept_bytes == 0


def test_threads_that_fit_one_image_at_once_get_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = threading.Barrier(4)

    def fit_together(image: bytes, size: TargetSize) -> bytes:
        at_once.wait(timeout=10)
        return fit_image(image, size)

    monkeypatch.setattr(vision_module, "fit_image", fit_together)
    fitter, image = ImageFitter(VISION, SECTION), make_image(0, 56, 56)
    with ThreadPoolExecutor(4) as threads:
        fitted = list(threads.map(fitter.fit, [image] * 4))
    assert len({id(one) for one in fitted}) == 1
    assert fitter.kept_bytes == len(image) + len(fitted[0])
