"""What is predicted for a picture: classes, numbers, points, boxes and masks, from lists, frames and functions."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import raises
from PIL import Image
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from learnerkit import ImageData, Learner, load_learner, set_seed, vision_learner
from learnerkit.datasets import SHAPES, drawn_shapes

COLUMNS = {
    "class": "shape", "classes": "shapes", "numbers": "n", "points": ["cx", "cy"],
    "boxes": ["x0", "y0", "x1", "y1", "shape"], "masks": "mask",
}  # fmt: skip
OPTIONS = {"classes": {"delim": " "}, "boxes": {"classes": SHAPES}, "masks": {"classes": SHAPES}}


@pytest.fixture
def table():
    """The table of 30 drawn pictures of 32 x 32."""
    df = pd.read_csv(drawn_shapes("shapes", n=30, size=32) / "shapes.csv")
    df["shape"] = df["shapes"].str.split().str[0]
    df["held"] = df.index >= 24
    return df


def data_of(table, targets, **kwargs):
    options = {"valid": "held", "size": 32, "path": "shapes"} | OPTIONS.get(targets, {}) | kwargs
    return ImageData.from_df(table, "image", COLUMNS[targets], targets=targets, **options)


def loaders(data, bs=6, **kwargs):
    return data.dataloaders(bs, num_workers=0, device="cpu", **kwargs)


def small_network():
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)],
    )


def make_learner(dls, n_out=None):
    set_seed(0)
    return vision_learner(dls, small_network(), n_out, hidden=(), dropout=0.0, pretrained=False)


@pytest.mark.parametrize("targets", COLUMNS)
def test_columns_of_a_frame_become_targets(table, targets):
    data = data_of(table, targets)
    assert (len(data.train_ds), len(data.valid_ds)) == (24, 6)
    dls = loaders(data, shuffle=False)
    assert (dls.targets, data.targets) == (targets, targets)
    x, y = dls.one_batch()
    assert (x.shape, x.dtype) == ((6, 3, 32, 32), torch.uint8)
    rows = table[:6]
    if targets == "class":
        assert [data.classes[i] for i in y] == rows["shape"].tolist()
    elif targets == "classes":
        assert data.classes == ["circle", "square"]
        assert [{data.classes[i] for i in hot.nonzero()} for hot in y] == [set(s.split()) for s in rows["shapes"]]
    elif targets == "numbers":
        assert torch.equal(y, torch.tensor(rows["n"].to_numpy(), dtype=torch.float32)[:, None])
    elif targets == "points":
        assert torch.equal(y, torch.tensor(rows[["cx", "cy"]].to_numpy(), dtype=torch.float32)[:, None])
    elif targets == "boxes":
        assert [set(each) for each in y] == [{"boxes", "labels"}] * 6
        boxes = torch.cat([each["boxes"] for each in y])
        assert boxes.tolist() == rows[["x0", "y0", "x1", "y1"]].to_numpy().tolist()
        assert [SHAPES[each["labels"][0]] for each in y] == rows["shape"].tolist()
    else:
        assert y.dtype == torch.int64
        assert all(np.array_equal(m, Image.open(f"shapes/{name}")) for m, name in zip(y, rows["mask"], strict=True))


def test_functions_and_folders_give_targets_too(table):
    files = sorted(Path("shapes/images").iterdir())
    by_name = {row.image: row for row in table.itertuples()}

    def centre(path):
        row = by_name[f"images/{path.name}"]
        return [(row.cx, row.cy)]

    for data in (
        ImageData.from_func(map(str, files), centre, 0.5, targets="points", size=32),
        ImageData.from_folder("shapes/images", 0.5, label=centre, targets="points", size=32),
    ):
        path, points = data.valid_ds.samples[0]
        assert len(data.valid_ds) == 15
        assert points.tolist() == [[float(x) for x in centre(Path(path))[0]]]


def test_rows_of_one_picture_are_its_boxes(table):
    rows = table[["image", "x0", "y0", "x1", "y1", "shape", "held"]]
    twice = pd.concat([rows, rows.assign(x0=0, y0=0, shape="square")])
    data = data_of(twice, "boxes")
    assert (len(data.train_ds), len(data.valid_ds)) == (24, 6)
    boxes = data.valid_ds[0][1]
    masked = data_of(twice, "boxes", valid=twice["held"])
    assert (len(masked.train_ds), len(masked.valid_ds)) == (24, 6)
    for valid in ("held", [*rows["held"], *~rows["held"]]):
        with raises(ValueError, "valid= is true for some rows of", "a picture is in one part"):
            data_of(twice.assign(held=[*rows["held"], *~rows["held"]]), "boxes", valid=valid)
    assert len(boxes["boxes"]) == 2
    assert boxes["boxes"][1, :2].tolist() == [0, 0]
    with raises(ValueError, "got 4 columns of boxes; they are five: x0, y0, x1, y1 and the label"):
        ImageData.from_df(rows, "image", ["x0", "y0", "x1", "y1"], targets="boxes", path="shapes")


@pytest.mark.parametrize("kind", ["float64", "Int64"])
def test_a_row_without_values_is_a_picture_without_a_box(table, kind):
    rows = table[["image", "x0", "y0", "x1", "y1", "shape", "held"]].copy()
    corners = ["x0", "y0", "x1", "y1"]
    rows[corners] = rows[corners].round().astype(kind)
    empty = rows.held.idxmax()
    rows.loc[empty, [*corners, "shape"]] = None
    boxes = [target["boxes"] for _, target in data_of(rows, "boxes").valid_ds.samples]
    assert [len(of) for of in boxes] == [int(i != empty) for i in rows.index[rows.held]]
    assert boxes[1].tolist() == rows.loc[rows.held, corners].iloc[1:2].to_numpy(float).tolist()


def test_spaces_around_the_classes_of_a_text_do_not_count():
    data = ImageData.from_items([np.zeros((4, 4))] * 3, ["a, b", "b,c", ""], None, targets="classes", delim=",")
    assert data.classes == ["a", "b", "c"]
    assert [y.tolist() for _, y in data.train_ds.samples] == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]


def test_columns_of_0_and_1_are_named_after_their_classes(table):
    names = ["star", "circle", "square"]
    hot = table.assign(
        **{
            name: table["shapes"].str.contains(name).astype(dtype)
            for name, dtype in zip(names, ("int64", bool, float), strict=True)
        }
    )
    data = ImageData.from_df(hot, "image", names, "held", targets="classes", path="shapes", size=32)
    assert data.classes == names
    assert [y.tolist() for _, y in data.train_ds.samples] == hot[names][:24].astype(float).to_numpy().tolist()
    with raises(ValueError, "the columns of classes have 2", "delim="):
        ImageData.from_df(hot.assign(n=2), "image", ["n", "star"], targets="classes")
    with raises(ValueError, "got label=['star', 'circle']; targets='class' are in one column"):
        ImageData.from_df(hot, "image", names[:2])


def test_a_row_without_a_box_is_a_picture_without_one(table):
    rows = table[["image", *COLUMNS["boxes"], "held"]]
    rows.loc[0, COLUMNS["boxes"]] = None
    data = data_of(rows, "boxes")
    assert [len(y["boxes"]) for _, y in data.train_ds.samples] == [0] + [1] * 23


@pytest.mark.parametrize(("classes", "number"), [(["no", "yes"], 1), ([1, 2], 0)])
def test_labels_of_boxes_may_be_whole_numbers_beside_a_picture_without_one(classes, number):
    names = ["x0", "y0", "x1", "y1", "label"]
    rows = pd.DataFrame([[0, 0, 5, 5, 1], [None] * 5], columns=names).assign(image=["a.png", "b.png"])
    data = ImageData.from_df(rows, "image", names, None, targets="boxes", classes=classes)
    assert [y["labels"].tolist() for _, y in data.train_ds.samples] == [[number], []]


def test_columns_may_have_numbers_for_names():
    data = ImageData.from_df(pd.DataFrame([["a.png", "cat"], ["b.png", "dog"]]), 0, 1, None)
    assert data.train_ds.samples == [(Path("a.png"), 0), (Path("b.png"), 1)]


def test_whole_numbers_are_the_names_of_classes_that_are_numbers():
    pictures, box = [np.zeros((8, 8), np.uint8)] * 2, [[0, 0, 5, 5]]
    options = {"targets": "boxes", "valid": None, "size": 8}

    def numbers(classes, *labels):
        targets = [{"boxes": box, "labels": label} for label in labels]
        return [
            y["labels"].tolist()
            for _, y in ImageData.from_items(pictures, targets, classes=classes, **options).train_ds
        ]

    assert numbers([1, 2, 3], [1], [3]) == [[0], [2]]
    assert numbers([1, 2, 3], torch.tensor([1]), ["3"]) == [[1], [2]]  # a tensor has numbers
    assert numbers(["a", "b"], [1], ["a"]) == [[1], [0]]
    with raises(ValueError, "got the labels 0; the classes are: 1, 2, 3"):
        numbers([1, 2, 3], [0], [1])


@pytest.mark.parametrize("method", ["crop", "pad", "squish"])
@pytest.mark.parametrize("turned", [1, 6, 9])  # 9 is no orientation
def test_places_follow_their_picture_to_another_size(method, turned):
    """A bright square in a large picture is where its points, its box and its mask are, in the small one, too."""
    pixels = np.zeros((240, 400), np.uint8)
    pixels[100:140, 160:220] = 255
    exif = Image.Exif()
    exif[0x0112] = turned
    Image.fromarray(np.rot90(pixels).copy() if turned == 6 else pixels).save("one.jpg", exif=exif, quality=100)
    corners = [[160, 100], [220, 140]]
    box = {"boxes": [[160, 100, 220, 140]], "labels": [1]}
    mask = (pixels > 0).astype(np.uint8)
    read = {
        targets: ImageData([("one.jpg", y)], targets=targets, size=(60, 50), method=method, channels=1).train_ds[0]
        for targets, y in {"points": corners, "boxes": box, "masks": mask}.items()
    }
    bright = read["masks"][0][0] > 127
    found = read["masks"][1]
    down, across = bright.nonzero().T
    edges = torch.tensor([across.min(), down.min(), across.max() + 1, down.max() + 1]).float()
    assert (found.shape, found.dtype) == ((60, 50), torch.int64)
    torch.testing.assert_close(read["points"][1].flatten(), edges, atol=1.0, rtol=0)
    torch.testing.assert_close(read["boxes"][1]["boxes"][0], edges, atol=1.0, rtol=0)
    around = 2 * int((across.max() - across.min()) + (down.max() - down.min()) + 4)
    assert ((found == 1) != bright).sum() < around / 2
    assert set(found.unique().tolist()) == ({-100, 0, 1} if method == "pad" else {0, 1})
    assert (found == -100).any(1).sum() == (0 if method != "pad" else 30)


def test_boxes_are_cut_at_the_borders_and_left_out_beyond():
    boxes = {"boxes": [[0, 0, 20, 40], [15, 2, 60, 30], [90, 0, 100, 40]], "labels": [1, 2, 3]}
    data = ImageData([(np.zeros((40, 100), np.uint8), boxes)], targets="boxes", size=40)
    _, y = data.train_ds[0]  # the middle 40 of 100 columns
    assert y["boxes"].tolist() == [[0, 2, 30, 30]]
    assert y["labels"].tolist() == [2]
    empty = ImageData([(np.zeros((4, 4), np.uint8), {"boxes": [], "labels": []})], targets="boxes", size=4)
    assert empty.train_ds[0][1]["boxes"].shape == (0, 4)


@pytest.mark.parametrize(
    ("targets", "label", "words"),
    [
        ("boxes", [[5, 5, 3, 9]], r"the box \[5.0, 5.0, 3.0, 9.0\], which ends before it begins"),
        ("boxes", [[5, 5, 9]], "targets='boxes' are 4 numbers each"),
        ("boxes", [[0, 0, 9], [0, 0, 9], [1, 1, 2], [1, 1, 2]], "targets='boxes' are 4 numbers each"),
        ("points", [1, 2, 3], "targets='points' are 2 numbers each"),
    ],
)
def test_places_that_are_none_are_refused(targets, label, words):
    y = {"boxes": label, "labels": [1] * len(label)} if targets == "boxes" else label
    with pytest.raises(ValueError, match=words):
        ImageData([(np.zeros((40, 40), np.uint8), y)], targets=targets, size=40).train_ds[0]


@pytest.mark.parametrize("targets", COLUMNS)
def test_a_transform_gets_a_picture_with_its_target(table, targets):
    data = data_of(table, targets)
    flip = v2.RandomHorizontalFlip(1.0)
    plain, changed = (loaders(data, shuffle=False, transform=t) for t in (None, flip))
    (x, y), (flipped, moved) = plain.one_batch(), changed.one_batch()
    assert torch.equal(flipped, x.flip(-1))
    assert all(
        torch.equal(*pair) for pair in zip(next(iter(changed.valid))[0], next(iter(plain.valid))[0], strict=True)
    )
    if targets == "points":
        assert torch.equal(moved[..., 0], 31 - y[..., 0])  # torchvision counts points from the middle of a pixel
    elif targets == "boxes":
        assert torch.equal(
            moved[0]["boxes"],
            torch.tensor([32, 0, 32, 0]) + y[0]["boxes"][:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1]),
        )
        assert type(moved[0]["boxes"]) is torch.Tensor
    elif targets == "masks":
        assert torch.equal(moved, y.flip(-1))
    else:
        assert torch.equal(moved, y)


def test_boxes_that_a_transform_returns_in_another_format_are_converted(table):
    data = data_of(table, "boxes")
    change = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ConvertBoundingBoxFormat("CXCYWH")])
    plain, changed = (loaders(data, shuffle=False, transform=t).one_batch()[1] for t in (change.transforms[0], change))
    for one, other in zip(plain, changed, strict=True):
        assert type(other["boxes"]) is torch.Tensor
        torch.testing.assert_close(other, one)


def test_classes_may_be_a_tensor_of_whole_numbers_as_in_datasets_of_torchvision():
    data = ImageData([(np.zeros((8, 8), np.uint8), torch.tensor([1, 0, 1]))], classes="abc", targets="classes", size=8)
    (y,) = loaders(data).one_batch()[1]
    assert y.tolist() == [1, 0, 1]
    assert y.dtype == torch.float32


def test_a_transform_may_be_a_function_and_draws_for_each_picture(table):
    kinds = []

    def change(picture, mask):
        kinds.append((type(picture), type(mask)))
        return v2.RandomResizedCrop(16, scale=(0.3, 0.6))(picture, mask)

    set_seed(3)
    data = ImageData([(Image.open("shapes/images/0000.png"), "shapes/masks/0000.png")] * 6, targets="masks", size=32)
    x, y = loaders(data, transform=change).one_batch()
    assert (x.shape, y.shape, y.dtype) == ((6, 3, 16, 16), (6, 16, 16), torch.int64)
    assert set(kinds) == {(tv_tensors.Image, tv_tensors.Mask)}
    assert len({tuple(each.flatten().tolist()) for each in x}) == 6
    for wrong in (lambda x, y: x, lambda x, y: ("a", y)):
        with raises(ValueError, "a transform returns (picture, target), as tensors"):
            loaders(data, transform=wrong).one_batch()


@pytest.mark.parametrize(
    ("targets", "loss", "shape"),
    [("classes", nn.BCEWithLogitsLoss, (2,)), ("numbers", nn.MSELoss, (1,)), ("points", nn.MSELoss, (1, 2))],
)
@pytest.mark.parametrize("suffix", ["safetensors", pytest.param("pt2", marks=pytest.mark.soak)])
def test_vision_learner_fits_the_kind_and_its_export_predicts(table, targets, loss, shape, suffix, capsys):
    data = data_of(table, targets)
    learn = make_learner(loaders(data, transform=v2.RandomHorizontalFlip() if targets == "classes" else None))
    assert type(learn.loss_func) is loss
    before = learn.validate(0)[0]
    with learn.no_logging():
        learn.fit_one_cycle(8, 1e-2)
    assert learn.validate(0)[0] < 0.8 * before
    preds, y = learn.get_preds()
    assert preds.shape == y.shape == (6, *shape)
    picture = data.valid_ds.samples[0][0]
    found = learn.predict(picture)
    torch.testing.assert_close(found.pred, preds[0], rtol=1e-4, atol=1e-4)
    if targets == "classes":
        assert found.label == [name for name, score in zip(data.classes, preds[0], strict=True) if score > 0]
        assert learn.recorder.metric_names[3] == "accuracy"
        learn.metrics = "f1"  # of two labels, each with its own yes or no
        yes, there = preds > 0, y > 0
        f1 = 2 * (yes & there).sum(0) / (yes.sum(0) + there.sum(0))
        assert learn.validate()[1] == pytest.approx(f1.mean().item())
    elif targets == "numbers":
        assert found.label == pytest.approx(preds[0].item(), rel=1e-4)
        assert learn.recorder.metric_names[3] == "mae"
    else:
        assert found.label.shape == (1, 2)
        assert 0 < float(found.label.min()) <= float(found.label.max()) < 32
    path = learn.export(f"found.{suffix}")

    def make_model():
        return make_learner(
            ImageData.from_json(data.to_json()).dataloaders(device="cpu"), 2 if targets != "numbers" else 1
        ).model

    again = load_learner(path, None if suffix == "pt2" else make_model, data=ImageData, device="cpu")
    assert again.dls.targets == targets
    after = again.predict(picture)
    torch.testing.assert_close(after.pred, found.pred, rtol=1e-4, atol=1e-4)
    assert type(after.label) is type(found.label)
    if targets == "classes":
        assert after.label == found.label


def test_heads_begin_at_the_mean_of_numbers_and_in_the_middle_of_pictures(table):
    head = make_learner(loaders(data_of(table, "points", size=(32, 64)))).model.head[-1]
    assert head(torch.tensor([[0.0, 0.0], [1.0, -1.0]])).tolist() == [[[32, 16]], [[64, 0]]]
    head = make_learner(loaders(data_of(table, "numbers"))).model.head[-1]
    n = table["n"][:24]
    torch.testing.assert_close(
        head(torch.tensor([[0.0], [1.0]])), torch.tensor([[n.mean()], [n.mean() + n.std(ddof=0)]]).float()
    )
    same = ImageData([(np.zeros((4, 4), np.uint8), 3.0)] * 2, targets="numbers", size=32)
    assert make_learner(loaders(same)).model.head[-1].std.tolist() == [1]


@pytest.mark.parametrize("targets", ["points", "boxes", "masks", "classes", "numbers"])
def test_targets_are_shown_with_their_pictures(table, targets, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    dls = loaders(data_of(table, targets), shuffle=False)
    figure = dls.show_batch(4)
    ax = figure.axes[0]
    _, y = dls.one_batch()
    if targets == "points":
        assert ax.collections[0].get_offsets().tolist() == (y[0] - 0.5).tolist()
    elif targets == "boxes":
        x0, y0, x1, y1 = y[0]["boxes"][0].tolist()
        assert [*ax.patches[0].get_xy(), ax.patches[0].get_width(), ax.patches[0].get_height()] == [
            *[x0 - 0.5, y0 - 0.5],
            *[x1 - x0, y1 - y0],
        ]
    elif targets == "masks":
        assert np.array_equal(ax.images[1].get_array(), y[0])
    else:
        assert ax.get_title() == (
            ", ".join(sorted(table["shapes"][0].split())) if targets == "classes" else str(table["n"][0])
        )
        assert (len(ax.images), len(ax.collections)) == (1, 0)
    plt.close(figure)


@pytest.mark.parametrize("targets", ["points", "classes", "numbers"])
def test_results_show_predictions_beside_targets(table, targets):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    learn = make_learner(loaders(data_of(table, targets)))
    figure = learn.show_results(3)
    ax = figure.axes[0]
    if targets == "points":
        y, pred = (each.get_offsets().tolist()[0] for each in ax.collections)
        assert y == [table["cx"][24] - 0.5, table["cy"][24] - 0.5]
        assert pred != y
    else:
        assert len(ax.get_title().splitlines()) == 2
        assert not ax.collections
    plt.close(figure)


class Brightest(nn.Module):
    """A detector, which makes its own loss, and predicts the largest value of a picture."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, images, targets=None):
        found = images.amax((1, 2, 3)) * self.factor
        return found if targets is None or not self.training else {"loss": found.mean()}


@pytest.mark.parametrize("collate", [None, lambda samples: (torch.stack([sample[0] for sample in samples]), None)])
def test_new_pictures_are_floats_where_batches_have_boxes_or_a_collate_function_of_the_users(table, collate):
    data = data_of(table, "boxes")
    dls = loaders(data) if collate is None else loaders(data, collate_fn=collate)
    learn = Learner(dls, Brightest(), loss_weight="samples")
    paths = [f"shapes/{name}" for name in table["image"][:3]]
    expected = [(data.reader(path) / 255).max().item() for path in paths]
    assert learn.get_preds(dl=dls.test_dl(paths))[0].tolist() == expected
    assert [learn.predict(path).pred.item() for path in paths] == expected


@pytest.mark.parametrize("kind", ["<u2", ">u2"])  # ImageJ writes the latter
def test_a_mask_may_have_16_bits_of_either_order(table, kind):
    mask = np.arange(32 * 32).reshape(32, 32) % 3
    Image.fromarray(mask.astype(kind)).save("mask.tif")
    for given in ("mask.tif", mask.astype(kind)):
        sample = ImageData([("shapes/images/0000.png", given)], targets="masks", classes=SHAPES, size=32).train_ds[0]
        assert sample[1].tolist() == mask.tolist()


def test_masks_that_do_not_fit_are_refused_by_name(table):
    def first(mask, **kwargs):
        return ImageData([("shapes/images/0000.png", mask)], targets="masks", size=32, **kwargs).train_ds[0]

    with raises(ValueError, "images/0000.png", "the mask has 16 x 32 pixels and its picture 32 x 32"):
        first(np.zeros((16, 32), np.uint8))
    with raises(ValueError, "the mask has the numbers 7, 255; those of the classes are 0 to 2, and -100 counts for"):
        first(np.full((32, 32), 255, np.uint8) - 248 * np.eye(32, dtype=np.uint8), classes=SHAPES)
    with raises(ValueError, "as a mask; it has the whole number of a class for each pixel, (H, W)"):
        first("shapes/images/0000.png")
    assert first(np.full((32, 32), -100), classes=SHAPES)[1].unique().tolist() == [-100]
    Path("shapes/masks/0003.png").unlink()
    with raises(FileNotFoundError, "1 of 24 masks are not there: shapes/masks/0003.png"):
        data_of(table[:24], "masks", valid=None)


def test_other_targets_are_refused(table):
    with raises(ValueError, "the column 'said' has", "'no'", "'yes'", "it is true or false in each row"):
        data_of(table.assign(said=["yes", "no"] * 15), "class", valid="said")
    with raises(ValueError, "got targets='mask'; did you mean 'masks'?; it is one of 'class', 'classes', 'numbers'"):
        ImageData([], targets="mask")
    with raises(ValueError, "there is no column 'imag'", "did you mean 'image'"):
        ImageData.from_df(table, "imag", "shape")
    with raises(ValueError, "the column 'n' has 1, 2; it is true or false in each row"):
        data_of(table, "class", valid="n")
    with raises(ValueError, "as the classes of a picture; they are a list or a set of names, or a text with delim="):
        data_of(table, "classes", delim=None)
    with raises(ValueError, "got the labels circle; the classes are: square, star"):
        data_of(table, "classes", classes=["square", "star"])
    with raises(ValueError, "the classes are: not given as classes=, so that labels are numbers"):
        data_of(table[:24], "boxes", classes=None, valid=None)
    with raises(ValueError, "got the labels circle; the classes are: square, star"):
        data_of(table, "class", classes=["square", "star"])
    with raises(ValueError, "the boxes of a picture are a dict with 'boxes' and 'labels'"):
        ImageData.from_items(["a.png"], [[1, 2, 3, 4]], None, targets="boxes")
    with raises(ValueError, "got 1 boxes and 2 labels; each box has one"):
        ImageData.from_items(["a.png"], [{"boxes": [[1, 2, 3, 4]], "labels": [1, 1]}], None, targets="boxes")
    for wrong in ("a", float("nan"), None):
        with raises(ValueError, f"got the target {wrong!r}; targets='numbers' are finite numbers"):
            ImageData.from_items(["a.png"], [wrong], None, targets="numbers")
    with raises(ValueError, "the pictures have 1 to 2 points; each has as many as the others"):
        ImageData.from_items(["a.png", "b.png"], [[1, 2], [1, 2, 3, 4]], None, targets="points")
    with raises(ValueError, "got loaders with masks; vision_learner predicts classes, numbers and points"):
        make_learner(loaders(data_of(table, "masks")))
    with raises(TypeError, "dls is a ImageData; pass what its dataloaders() returns"):
        make_learner(data_of(table, "points"))
    with raises(ValueError, "got n_out=3; the targets have 2 numbers, of shape (1, 2)"):
        make_learner(loaders(data_of(table, "points")), 3)
    with raises(ValueError, "how many points? The learner has no data; pass n_out="):
        make_learner(ImageData(targets="points", size=32).dataloaders(device="cpu"))
