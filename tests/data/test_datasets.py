"""Pictures on disk in every layout that is read, and the sentences for those that cannot be."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from odevit_serve.data.datasets import CIFAR10, held_out, open_splits
from odevit_serve.errors import UserError


def picture(path: Path, grey: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (grey, grey, grey)).save(path)
    return path


def test_a_folder_with_splits_and_classes(folder: Path) -> None:
    splits = open_splits(folder)
    assert set(splits) == {"train", "val"}
    train = splits["train"]
    assert train.classes == ("cat", "dog")
    assert train.labels is not None
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.read(4).getpixel((0, 0)) == (11, 11, 11)
    assert held_out(splits) is splits["val"]


def test_a_zip_file_is_read_in_place_and_gives_the_same(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "set.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in folder.rglob("*.png"):
            target.write(path, Path("outer") / path.relative_to(folder))
        target.writestr("__MACOSX/outer/train/cat/._0.png", b"junk")
    zipped, plain = open_splits(archive)["train"], open_splits(folder)["train"]
    assert zipped.classes == plain.classes
    assert [zipped.read(i).getpixel((0, 0)) for i in range(6)] == [plain.read(i).getpixel((0, 0)) for i in range(6)]


def test_class_folders_without_splits_and_a_flat_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "classes" / name / "x.jpg")
    assert open_splits(tmp_path / "classes")["train"].classes == ("a", "b")
    for i in range(3):
        picture(tmp_path / "flat" / f"{i}.webp")
    flat = open_splits(tmp_path / "flat")["train"]
    assert (len(flat), flat.labels, flat.classes) == (3, None, ())


def test_npz_arrays(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    y = np.arange(20) % 10
    np.savez(tmp_path / "c.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    splits = open_splits(tmp_path / "c.npz")
    assert set(splits) == {"train", "test"}
    assert splits["train"].classes == CIFAR10
    np.testing.assert_array_equal(np.asarray(splits["test"].read(3)), x[3])
    assert splits["train"].in_memory


@pytest.mark.parametrize("layout", ["python", "binary", "python-100", "binary-100"])
def test_cifar_as_published(tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(1)
    classes = 100 if "100" in layout else 10
    rows = rng.integers(0, 256, (5 * classes, 3072), dtype=np.uint8)
    fine = np.arange(5 * classes) % classes
    names = [f"class{i}" for i in range(classes)]
    if layout == "python":
        root = tmp_path / "cifar-10-batches-py"
        files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        batch: dict[str, object] = {"data": rows, "labels": fine.tolist()}
        meta = ("batches.meta", pickle.dumps({"label_names": names}))
    elif layout == "python-100":
        root = tmp_path / "cifar-100-python"
        files = ["train", "test"]
        batch = {"data": rows, "fine_labels": fine.tolist(), "coarse_labels": (fine // 5).tolist()}
        meta = ("meta", pickle.dumps({"fine_label_names": names}))
    elif layout == "binary":
        root = tmp_path / "cifar-10-batches-bin"
        files = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        meta = ("batches.meta.txt", "\n".join(names).encode())
    else:
        root = tmp_path / "cifar-100-binary"
        files = ["train.bin", "test.bin"]
        meta = ("fine_label_names.txt", "\n".join(names).encode())
    root.mkdir()
    (root / meta[0]).write_bytes(meta[1])
    for name in files:
        if "python" in layout:
            (root / name).write_bytes(pickle.dumps(batch))
        else:
            labels = [fine // 5, fine] if classes == 100 else [fine]
            (root / name).write_bytes(np.column_stack([*labels, rows]).astype(np.uint8).tobytes())
    splits = open_splits(tmp_path)
    test = splits["test"]
    assert test.classes == tuple(names)
    assert test.labels is not None
    np.testing.assert_array_equal(test.labels, fine)
    np.testing.assert_array_equal(np.asarray(test.read(7)), rows[7].reshape(3, 32, 32).transpose(1, 2, 0))
    assert len(splits["train"]) == 5 * classes * (len(files) - 1)


def test_a_pickle_with_anything_but_arrays_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (__import__("os").system, ("echo run",))

    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (root / name).write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(UserError, match=r"not a CIFAR batch \(posix.system is not allowed"):
        open_splits(tmp_path)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        open_splits(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no images"):
        open_splits(tmp_path / "empty")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(UserError, match=r"neither an image folder, a zip file nor an \.npz file"):
        open_splits(tmp_path / "text.txt")
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(UserError, match=r"cannot be read as \.npz"):
        open_splits(tmp_path / "bad.npz")
    np.savez(tmp_path / "float.npz", x=np.zeros((2, 4, 4, 3)))
    with pytest.raises(UserError, match=r"must be uint8 .* not float64"):
        open_splits(tmp_path / "float.npz")
    np.savez(tmp_path / "uneven.npz", x=np.zeros((2, 4, 4, 3), np.uint8), y=np.zeros(3, int))
    with pytest.raises(UserError, match="2 images but 3 labels"):
        open_splits(tmp_path / "uneven.npz")
    np.savez(tmp_path / "gap.npz", x=np.zeros((2, 4, 4, 3), np.uint8), y=np.array([0, 2]))
    with pytest.raises(UserError, match="class '1' has no images"):
        open_splits(tmp_path / "gap.npz")
    picture(tmp_path / "mixed" / "a" / "1.png")
    picture(tmp_path / "mixed" / "2.png")
    with pytest.raises(UserError, match=r"2\.png lies beside class folders"):
        open_splits(tmp_path / "mixed")


def test_transparent_pictures_are_seen_on_white_as_predict_sees_them(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_splits(tmp_path)["train"].read(0).getpixel((4, 4)) == (255, 255, 255)


def test_a_class_that_is_empty_in_one_split(folder: Path) -> None:
    for path in (folder / "val" / "dog").iterdir():
        path.unlink()
    splits = open_splits(folder)  # it is only not measured
    assert splits["val"].classes == ("cat", "dog")
    assert splits["val"].labels is not None
    assert splits["val"].labels.tolist() == [0, 0, 0]
    picture(folder / "val" / "dog" / "new.png")
    for path in (folder / "train" / "dog").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"\(train\): class 'dog' has no images"):
        open_splits(folder)


def test_hugging_face_datasets(tmp_path: Path) -> None:
    import datasets

    for i in range(4):
        picture(tmp_path / "data" / "train" / ("cat" if i % 2 else "dog") / f"{i}.png", i)
    splits = open_splits(f"hf:{tmp_path / 'data'}")
    train = splits["train"]
    assert datasets
    assert train.classes == ("cat", "dog")
    assert len(train) == 4
    assert train.read(0).size == (8, 6)
    with pytest.raises(UserError, match="datasets could not load 'nobody/nothing'"):
        open_splits("hf:nobody/nothing")


def test_photographs_without_labels_beside_the_classes(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "unlabelled/4.png", "unlabelled/more/5.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    splits = open_splits(tmp_path)
    assert splits["train"].classes == splits["val"].classes == ("cat", "dog")
    assert splits["unlabelled"].labels is None
    assert len(splits["unlabelled"]) == 2
    assert held_out(splits).names == ["val/cat/3.png"]
