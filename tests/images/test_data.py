"""Pictures and their classes: how folders are read, how pictures are divided, what a Learner sees."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import raises
from PIL import Image
from torch import nn
from torch.utils.data import random_split
from torchvision.datasets import ImageFolder

from learnerkit import Callback, DataLoaders, ImageData, Learner, accuracy, load_learner


def write(path, value, size=(8, 8)):
    """Write a picture of one brightness."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(size, value, np.uint8)).save(path)


@pytest.fixture
def folder():
    """Folders of dark and light pictures, 20 and 10 of them, with what else lies in such folders."""
    for i in range(20):
        write(Path(f"pictures/dark/{'deeper/' if i == 3 else ''}{i}.png"), i)
    for i in range(10):
        write(Path(f"pictures/light/{i}.PNG"), 255 - i)
    Path("pictures/dark/deeper/3.png").rename("pictures/dark/3.png")
    for name in (".DS_Store", "dark/._1.png", "dark/notes.txt"):
        Path("pictures", name).write_text("no picture")
    return Path("pictures")


def make_learner(dls, **kwargs):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    return Learner(dls, model, nn.CrossEntropyLoss(), metrics=accuracy, **kwargs)


def names(ds):
    return [path for path, _ in ds.samples]


def test_a_share_of_each_class_is_held_out(folder):
    data = ImageData.from_folder(folder, valid=0.3, size=8)
    assert data.classes == ["dark", "light"]
    assert (len(data.train_ds), len(data.valid_ds)) == (21, 9)
    assert sum("light" in name for name in names(data.valid_ds)) == 3
    assert set(names(data.train_ds)).isdisjoint(names(data.valid_ds))
    assert names(ImageData.from_folder(folder, valid=0.3, size=8).valid_ds) == names(data.valid_ds)
    assert names(ImageData.from_folder(folder, valid=0.3, size=8, seed=1).valid_ds) != names(data.valid_ds)
    for image, number in (data.train_ds[i] for i in range(21)):
        assert image.shape == (3, 8, 8)
        assert (image.float().mean() > 100) == number
    assert "21 pictures to train on, 9 pictures to validate on" in repr(data)
    assert "8 x 8, colours, crop" in repr(data)
    whole = ImageData.from_folder(str(folder), None, size=8, channels=1)
    assert (len(whole.train_ds), whole.valid_ds) == (30, None)


def test_hidden_folders_and_files_are_left_out(folder):
    for place in (folder / ".thumbnails", next(p for p in folder.iterdir() if p.is_dir()) / ".ipynb_checkpoints"):
        place.mkdir()
        write(place / "0.png", 0)
    data = ImageData.from_folder(folder, size=8)
    assert not any(name.startswith(".") for name in data.classes)
    assert not any("/." in str(path) for ds in (data.train_ds, data.valid_ds) for path in names(ds))


def test_columns_of_a_frame_are_taken_by_their_places(folder):
    pandas = pytest.importorskip("pandas")
    paths = sorted(map(str, folder.glob("dark/[0-9]*.png")))[::-1]
    frame = pandas.DataFrame({"path": paths, "odd": [int(Path(path).stem) % 2 for path in paths]}).sort_values("path")
    data = ImageData.from_items(frame["path"], frame["odd"], size=8)
    samples = [*data.train_ds.samples, *data.valid_ds.samples]
    assert len(samples) == 20
    assert all(int(Path(path).stem) % 2 == number for path, number in samples)
    dl = data.dataloaders(4, num_workers=0, device="cpu").test_dl(frame["path"])
    assert torch.equal(torch.cat(list(dl))[0], data.reader(frame["path"].iloc[0]))


@pytest.mark.parametrize("column", ["file", "mask"])
def test_a_row_without_a_file_is_named(column):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"file": ["a.png", "b.png"], "mask": ["a.png", "b.png"]}, index=[7, 8])
    frame.loc[8, column] = None
    with raises(ValueError, f"the column {column!r} names no file in the rows 8; take them out"):
        ImageData.from_df(frame, "file", "mask", targets="masks")


def test_a_class_is_what_a_function_says(folder):
    data = ImageData.from_folder(folder, label=lambda path: "odd" if int(path.stem) % 2 else "even", size=8)
    assert data.classes == ["even", "odd"]
    assert all(int(Path(path).stem) % 2 == number for path, number in data.train_ds.samples)


def test_a_class_may_have_a_slash_in_its_name(folder, plt):
    data = ImageData.from_folder(folder, label=lambda p: "T-shirt/top" if "dark" in str(p) else "Coat", size=8)
    dls = data.dataloaders(4, num_workers=0, device="cpu")
    assert dls.classes == ["Coat", "T-shirt/top"]
    titles = [ax.get_title() for ax in dls.show_batch(4).axes]
    assert set(titles) <= {"Coat", "T-shirt/top"}
    assert "T-shirt/top" in titles
    learn = make_learner(dls)
    path = str(learn.export("slash.pt2"))
    again = load_learner(path, data=ImageData, device="cpu")
    file = next(folder.glob("dark/[0-9]*.png"))
    assert again.predict(file).label == learn.predict(file).label
    assert again.dls.classes == dls.classes


def test_training_and_validation_have_folders_of_their_own(folder):
    Path("parts").mkdir()
    folder.rename("parts/train")
    for i in range(4):
        write(Path(f"parts/val/dark/{i}.png"), i)
    data = ImageData.from_folder("parts", "val", size=8)
    assert (len(data.train_ds), len(data.valid_ds)) == (30, 4)
    with raises(ValueError, "parts has the folders 'train' and 'val'", "valid='val'"):
        ImageData.from_folder("parts")
    with raises(FileNotFoundError, "there is no folder parts/valid; beside it there are: train, val"):
        ImageData.from_folder("parts", "valid")
    write(Path("parts/val/grey/0.png"), 100)
    with raises(ValueError, "validated on, but not trained on: the classes grey"):
        ImageData.from_folder("parts", "val")


def test_links_are_followed_unless_they_lead_back(folder):
    write(Path("elsewhere/0.png"), 0)
    (folder / "grey").symlink_to(Path("elsewhere").absolute())
    (folder / "dark" / "up").symlink_to(folder.absolute())
    (folder / "light" / "here").symlink_to(".")
    Path("elsewhere/across").symlink_to((folder / "dark").absolute())  # and from there up, where it came from
    data = ImageData.from_folder(folder, None, size=8)
    assert data.classes == ["across", "dark", "grey", "light"]
    assert len(data.train_ds) == 20 + 1 + 10 + 20
    assert len(ImageData.from_folder(str(folder.absolute()), None, size=8).train_ds) == 51


def test_pictures_without_usable_labels_are_refused(folder):
    with raises(FileNotFoundError, "there are no pictures in empty; their names end in .jpg"):
        Path("empty").mkdir()
        ImageData.from_folder("empty")
    with raises(ValueError, "the classes to train on are: dark; there have to be two"):
        ImageData.from_folder("pictures/dark", label=lambda path: "dark")
    write(folder / "stray.png", 0)
    with raises(ValueError, "1 pictures lie in no folder of a class, such as pictures/stray.png", "label="):
        ImageData.from_folder(folder)
    ImageData.from_items(["a.png", "b.png"] * 5, np.array([True, False] * 5))
    assert ImageData.from_items(["a.png", "b.png"] * 5, torch.tensor([3, 4] * 5)).classes == ["3", "4"]
    for label in (None, float("nan"), 1.5):
        with raises(ValueError, f"got the labels {label}; labels are text or whole numbers"):
            ImageData.from_items(["a.png", "b.png"], ["x", label])
    with raises(ValueError, "got labels of text and of numbers"):
        ImageData.from_items(["a.png", "b.png"] * 5, [1, "x"] * 5)
    with raises(ValueError, "got 2 pictures and 1 labels"):
        ImageData.from_items(["a.png", "b.png"], ["x"])
    for folder in ("pics", Path("pics")):
        with raises(TypeError, "got 'pics' for the pictures; they are a list, such as Path"):
            ImageData.from_items(folder, ["x"])
        with raises(TypeError, "got 'pics' for the pictures; they are a list, such as Path"):
            ImageData.from_func(folder, lambda path: path.parent.name)
    with raises(ValueError, "got valid=2; it is a share between 0 and 1"):
        ImageData.from_items(["a.png", "b.png"], ["x", "y"], valid=2)


def test_damaged_files_are_named_or_left_out(folder, capsys):
    (folder / "dark/5.png").write_bytes(b"no picture")
    learn = make_learner(ImageData.from_folder(folder, None, size=8).dataloaders(10, num_workers=0, device="cpu"))
    with learn.no_logging(), raises(OSError, "the picture pictures/dark/5.png cannot be read"):
        learn.fit(1)
    assert capsys.readouterr().out == ""
    data = ImageData.from_folder(folder, None, size=8, skip_damaged=True)
    assert capsys.readouterr().out == "left out as damaged: 1 of 30 pictures, such as pictures/dark/5.png\n"
    assert len(data.train_ds) == 29
    assert len(list(data.dataloaders(10, num_workers=0, device="cpu").train)) == 3


def test_json_has_all_but_the_pictures(folder):
    data = ImageData.from_folder(folder, size=(8, 6), channels=1, method="pad")
    again = ImageData.from_json(data.to_json())
    assert (again.reader, again.classes, again.train_ds) == (data.reader, ["dark", "light"], None)


def test_loaders_have_bytes_and_the_model_gets_floats(folder):
    seen = []
    data = ImageData.from_folder(folder, size=8)
    dls = data.dataloaders(8, num_workers=0, device="cpu")
    x, y = dls.one_batch()
    assert (x.shape, x.dtype, y.dtype) == ((8, 3, 8, 8), torch.uint8, torch.int64)
    learn = make_learner(dls, cbs=Callback(after_pred=lambda cb: seen.append(cb.x)))
    with learn.no_logging():
        learn.fit(5, 0.1)
    assert {x.dtype for x in seen} == {torch.float32}
    assert 0 <= min(x.min() for x in seen) < 0.05
    assert 0.95 < max(x.max() for x in seen) <= 1
    assert learn.recorder.final_record[-1] > 0.95
    preds, targets = learn.get_preds()
    assert [number for _, number in data.valid_ds.samples] == targets.tolist()


def test_a_dataset_that_holds_images_is_taken_as_it_is():
    pictures = [(torch.full((1, 4, 4), i / 10), i % 2) for i in range(10)]
    data = ImageData(pictures, pictures[:2], ["even", "odd"], size=4, channels=1)
    dls = data.dataloaders(5, device="cpu", shuffle=False)
    assert dls.train.num_workers == 0
    (x,), (y,) = dls.split(dls.one_batch())
    assert torch.allclose(x[:, 0, 0, 0], torch.arange(5) / 10, atol=0.003)
    assert y.tolist() == [0, 1, 0, 1, 0]
    assert data.train_ds.classes == ["even", "odd"]
    for sample in ({"image": pictures[0][0], "label": 0}, [pictures[0][0], 0]):
        dls = ImageData([sample], size=4).dataloaders(1, device="cpu")
        with raises(TypeError, "got", "as a sample; it is a picture, or a pair"):
            dls.one_batch()


def test_two_datasets_number_their_classes_alike(folder):
    whole = ImageFolder(folder)
    one, other = random_split(whole, [12, len(whole) - 12])
    dls = ImageData(one, other, size=8).dataloaders(4, device="cpu")
    assert dls.classes == whole.classes == ["dark", "light"]
    (folder / "light" / "light").mkdir()
    Image.new("L", (8, 8)).save(folder / "light" / "light" / "1.png")
    apart = ImageFolder(folder / "light")  # its only class has number 0
    for make in (ImageData, DataLoaders.from_datasets):
        with raises(ValueError, "the datasets have other classes: dark, light, and light; a number has to stand"):
            make(whole, apart)
    assert ImageData(whole, apart, ["a", "b"]).classes == ["a", "b"]


def test_what_is_raw_is_predicted_from_files_and_after_an_export(folder):
    dls = ImageData.from_folder(folder, size=8).dataloaders(8, device="cpu", num_workers=0)
    learn = make_learner(dls)
    with learn.no_logging():
        learn.fit(5, 0.1)
    path = folder / "light/1.PNG"
    expected = learn.predict(path)
    assert (expected.label, int(expected.decoded)) == ("light", 1)
    paths = [path, str(folder / "dark/1.png"), Image.open(path), np.full((20, 30), 3, np.uint8)]
    preds, targets = learn.get_preds(dl=dls.test_dl(paths, bs=3))
    assert (preds.argmax(1).tolist(), targets) == ([1, 0, 1, 0], None)
    assert torch.allclose(preds[0], expected.pred, atol=1e-5)
    for pairs in (dls.data.valid_ds, dls.data.valid_ds.samples):
        with raises(TypeError, "got pairs of a picture and its target; test_dl takes pictures alone"):
            dls.test_dl(pairs)
    for wrong in ("pictures/dark", path, Image.new("L", (3, 3)), {"a": path}):
        with raises(TypeError, f"got a {type(wrong).__name__}; test_dl takes a list of pictures"):
            dls.test_dl(wrong)
    with raises(TypeError, "got uint8 array of shape (20, 30, 3), a picture with its channels; test_dl takes a list"):
        dls.test_dl(np.zeros((20, 30, 3), np.uint8))  # not 20 gray pictures
    assert len(learn.get_preds(dl=dls.test_dl((folder / "light").glob("*.PNG")))[0]) == 10
    with raises(ValueError, "the loader is empty: its dataset has 0 samples"):
        learn.get_preds(dl=dls.test_dl([]))
    loaded = load_learner(learn.export("shades"), make_learner(dls).model, data=ImageData, device="cpu")
    found = loaded.predict(path)
    assert found.label == "light"
    assert torch.allclose(found.pred, expected.pred, atol=1e-5)
    reading = {"size": [8, 8], "channels": 3, "method": "crop", "classes": ["dark", "light"], "targets": "class"}
    assert loaded.dls.preprocessing == reading
    assert len(loaded.get_preds(dl=loaded.dls.test_dl(paths))[0]) == 4


@pytest.mark.parametrize("augment", [True, lambda x: 1 - x])
def test_training_batches_are_augmented_on_the_device_and_others_are_not(folder, augment):
    seen = {True: [], False: []}
    data = ImageData.from_folder(folder, 0.5, size=8)
    dls = data.dataloaders(8, augment=augment, device="cpu", num_workers=0)
    learn = make_learner(dls, cbs=Callback(after_pred=lambda cb: seen[cb.training].append(cb.x)))
    with learn.no_logging():
        learn.fit(1)
    found = {training: torch.cat(xs)[:, 0].flatten(1).mean(1).mul(255).round().long() for training, xs in seen.items()}
    expected = [sorted(int(x[0, 0, 0]) for x, _ in ds) for ds in (data.train_ds, data.valid_ds)]
    assert sorted(found[False].tolist()) == expected[1]
    train = found[True] if augment is True else 255 - found[True]  # pictures of one brightness stay so
    assert sorted(train.tolist()) == expected[0]
    assert make_learner(dls).batch_transform.fn is learn.batch_transform.fn


def test_show_batch_shows_what_training_sees(folder):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    data = ImageData.from_folder(folder, size=8)
    dls = data.dataloaders(8, augment=lambda x: x * 0 + 0.5, device="cpu", num_workers=0)
    state = torch.get_rng_state()
    for ds_idx, shows_augmented in ((0, True), (1, False)):
        figure = dls.show_batch(4, ds_idx)
        pictures = [ax.images[0].get_array() for ax in figure.axes]
        assert len(pictures) == 4
        assert all((np.abs(p - 0.5) < 1e-3).all() for p in pictures) == shows_augmented
        assert {ax.get_title() for ax in figure.axes} <= {"dark", "light"}
        plt.close(figure)
    assert torch.equal(torch.get_rng_state(), state)
