"""The images of the replay: each kept once, for as long as an episode shows it."""

from raylearner.replay.store import ImageStore


def test_equal_images_are_kept_once_and_freed_with_the_last_reference() -> None:
    store = ImageStore()
    first = store.add((bytes(1000) + b"end",))
    again = store.add((bytes(1000) + b"end", b"other"))
    assert again[0] is first[0]
    assert (len(store), store.num_bytes) == (2, 1008)
    store.remove(first)
    assert len(store) == 2
    store.remove(again)
    assert (len(store), store.num_bytes) == (0, 0)


def test_images_that_differ_only_in_the_middle_are_kept_apart() -> None:
    store = ImageStore()
    images = tuple(bytes(500) + bytes([index]) + bytes(500) for index in range(8))
    assert store.add(images) == images
    assert len(store) == 8
    store.remove(images[3:4])
    assert store.add(images[:1])[0] is images[0]
    assert len(store) == 7
