"""MNIST from files, and what takes its place; a text that ships with Python."""

from __future__ import annotations

import gzip
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from packprop import examples
from packprop.errors import BadInput, PackpropError, PackpropWarning
from packprop.examples import MNIST_FOLDER, load_digits, load_mnist, load_one_batch_mnist, read_idx
from packprop.examples import images as source
from tests.selection import thorough

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(tensor: Tensor) -> bytes:
    head = bytes([0, 0, 8, tensor.dim()]) + struct.pack(f">{tensor.dim()}i", *tensor.shape)
    return head + tensor.numpy().tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> tuple[Path, Tensor, Tensor]:
    """A folder with 20 images, one file compressed."""
    images = torch.randint(0, 256, (20, 28, 28), dtype=torch.uint8)
    labels = (torch.arange(20) % 10).to(torch.uint8)
    (tmp_path / IMAGES).write_bytes(idx(images))
    (tmp_path / f"{LABELS}.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path, images, labels.long()


@pytest.fixture(autouse=True)
def _without_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MNIST_FOLDER, raising=False)


@pytest.fixture
def _without_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without torchvision and without files, and no data set chosen yet."""
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    monkeypatch.chdir(tmp_path)
    source._downloaded_mnist.cache_clear()
    yield
    source._downloaded_mnist.cache_clear()


def test_files_are_read(mnist: tuple[Path, Tensor, Tensor]) -> None:
    folder, images, labels = mnist
    assert torch.equal(read_idx(folder / IMAGES), images)
    found = load_mnist(folder)
    assert torch.equal(found[0], images)
    assert torch.equal(found[1], labels)


@pytest.mark.parametrize("way", ["root", "environment", "data"])
def test_where_files_are_looked_for(
    way: str, mnist: tuple[Path, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, images, labels = mnist
    root = None
    if way == "root":
        root = str(folder)
    elif way == "environment":
        monkeypatch.setenv(MNIST_FOLDER, str(folder))
    else:
        (tmp_path / "data/MNIST").mkdir(parents=True)
        (tmp_path / "data/MNIST/raw").symlink_to(folder, target_is_directory=True)
        monkeypatch.chdir(tmp_path)
    x, y = load_one_batch_mnist(20, shuffle=False, root=root)
    assert torch.equal(y, labels)
    assert x.dtype == torch.float32
    torch.testing.assert_close((x * 0.3081 + 0.1307) * 255, images.float().unsqueeze(1))


def test_a_seed_chooses_the_batch(mnist: tuple[Path, Tensor, Tensor]) -> None:
    folder, images, labels = mnist
    batches = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        batches.append(load_one_batch_mnist(8, root=folder))
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][1], batches[2][1])
    x, y = batches[0]
    grey = ((x * 0.3081 + 0.1307) * 255).round().to(torch.uint8)
    for image, label in zip(grey, y, strict=True):
        assert any(
            torch.equal(image[0], other) and label == its for other, its in zip(images, labels, strict=True)
        )
    assert load_one_batch_mnist(8, flat=True, root=folder)[0].shape == (8, 784)


def test_a_folder_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not hold train-images-idx3-ubyte"):
        load_one_batch_mnist(root=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08\x03",
        b"\0\0\x0d\x01\0\0\0\x01\0",
        b"\0\0\x08\x01\0\0\0\x02\0",
        b"\0\0\x08\x01\0\0\0\x01\0\0",
    ],
    ids=["empty", "no sizes", "another type", "too short", "too long"],
)
def test_a_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInput, match="it has no header of an IDX file of bytes, or its length"):
        read_idx(tmp_path / "file")


@pytest.mark.usefixtures("_without_mnist")
def test_digits_take_its_place_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        x, _ = load_one_batch_mnist(16)
        load_one_batch_mnist(16)
    (warning,) = noted
    assert warning.category is PackpropWarning
    assert warning.filename == __file__
    assert "packprop uses the digits of scikit-learn" in str(warning.message)
    assert MNIST_FOLDER in str(warning.message)
    assert x.shape == (16, 1, 28, 28)
    assert ((x[:, :, :4] * 0.3081 + 0.1307).abs() < 1e-6).all()  # the border is black
    images, classes = load_mnist()
    assert images.dtype == torch.uint8
    assert torch.equal(classes, load_digits()[1])
    small = torch.nn.functional.adaptive_avg_pool2d(images[:, None, 4:24, 4:24] / 255, 8)
    assert (small - load_digits()[0]).abs().mean() < 0.1  # each is still the same digit


@pytest.mark.usefixtures("_without_mnist")
def test_neither_mnist_nor_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(PackpropError, match="scikit-learn cannot be imported"):
        load_one_batch_mnist()


def test_torchvision_brings_it(
    mnist: tuple[Path, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchvision is used where it can be imported; a module with the same interface stands in for it."""
    _, images, labels = mnist
    asked = []

    class MNIST:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            asked.append((root, train, download))
            self.data, self.targets = images, labels

    module = type(sys)("torchvision.datasets")
    module.MNIST = MNIST  # type: ignore[attr-defined]  # an attribute of a made-up module
    monkeypatch.setitem(sys.modules, "torchvision", type(sys)("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    monkeypatch.chdir(tmp_path)
    source._downloaded_mnist.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(load_mnist()[0], images)
    assert asked == [("./data", True, True)]
    source._downloaded_mnist.cache_clear()


def test_windows_of_text_follow_each_other() -> None:
    inputs, targets = examples.load_windows(50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    text = "".join(piece for window in inputs[:200] for piece in examples.decode(window, window))
    assert text.startswith('The "assert" statement\n')
    assert float((inputs == 0).float().mean()) < 0.01


@thorough
def test_the_language_model_is_trained_and_draws_from_no_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    losses = []
    for steps in (0, 15):
        model, loss, windows = examples.language_model(steps=steps, samples=8)
        inputs, targets = windows.tensors
        losses.append(float(loss(model(inputs), targets).detach()))
        assert not model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[1] < losses[0] - 1
    changed = inputs.clone()
    changed[:, 40:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(changed)[:, :40], model(inputs)[:, :40])


def test_a_python_without_its_help_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(PackpropError, match="this Python comes without them"):
        examples.load_windows()
