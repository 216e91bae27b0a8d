"""Showing samples: images, text, tables."""

import numpy as np
import pytest
import torch
from helpers import make_dls
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset, get_worker_info

from learnerkit import DataLoaders
from learnerkit.data.show import WIDTH, Table, label
from learnerkit.text import columns


def images(figure):
    return [np.asarray(ax.images[0].get_array()) for ax in figure.axes if ax.images]


def titles(figure):
    return [ax.get_title() for ax in figure.axes if ax.images]


@pytest.mark.parametrize("kind", ["normalised", "uint8", "gray", "array"])
def test_images_are_shown_with_their_classes(plt, kind):
    x = torch.rand(6, 3, 5, 4)
    made = {"normalised": x * 4 - 2, "uint8": (x * 255).byte(), "gray": x[:, 0], "array": x.movedim(1, -1)}[kind]
    y = torch.arange(6) % 2
    train = list(zip(made.numpy(), y, strict=True)) if kind == "array" else TensorDataset(made, y)
    dls = DataLoaders(DataLoader(train, 4), device="cpu", classes=["no", "yes"])
    figure = dls.show_batch(3)
    assert titles(figure) == ["no", "yes", "no"]
    shown = np.stack(images(figure))
    assert shown.shape == ((3, 5, 4) if kind == "gray" else (3, 5, 4, 3))
    assert 0 <= shown.min() <= shown.max() <= 1
    expected = (x if kind == "gray" else x.movedim(1, -1))[:3]
    expected = expected[:, 0] if kind == "gray" else expected
    if kind == "normalised":
        expected = (expected - expected.min()) / (expected.max() - expected.min())
    assert np.allclose(shown, expected, atol=0.01)


def test_pictures_of_pillow_are_shown_with_their_targets(plt):
    image = pytest.importorskip("PIL.Image")
    data = [(image.new("RGB", (4, 5), (255, 0, 0)), 1.5), (image.new("L", (4, 5), 51), 2.0)]
    dls = DataLoaders(
        DataLoader(data, 2, collate_fn=lambda rows: list(map(list, zip(*rows, strict=True)))), device="cpu"
    )
    figure = dls.show_batch()
    assert titles(figure) == ["1.5", "2"]
    red, gray = images(figure)
    assert red[0, 0].tolist() == [1, 0, 0]
    assert gray[0, 0] == pytest.approx(0.2)


def test_text_and_tokens_are_shown_as_rows():
    long = "a long and winding text " * 20
    dls = DataLoaders(DataLoader([("short", 1), (f"{long}\n<b>", 0)], 2), classes=["bad", "good"])
    table = dls.show_batch()
    assert isinstance(table, Table)
    first, *rows = str(table).splitlines()
    assert (first.split(), len(rows)) == (["text", "target"], 2)
    assert max(map(len, rows)) <= 100
    assert rows[0].split() == ["short", "good"]
    assert rows[1].endswith("...  bad")
    assert "&lt;b&gt;</td>" in table._repr_html_()
    tokens = TensorDataset(torch.tensor([[1, 2, 0], [2, 2, 1]]), torch.tensor([0, 1]))
    decoded = DataLoaders(DataLoader(tokens, 2), decode=lambda ids: " ".join("abc"[i] for i in ids))
    assert [row[0] for row in decoded.show_batch().rows] == ["b c a", "c c b"]
    mapped = DataLoaders(DataLoader([{"ids": torch.arange(30), "labels": 1}], 1))
    (row,) = mapped.show_batch().rows
    assert row == ["0 1 2 3 4 5 6 7 8 9 10 11 ... (30 values)", "1"]


def test_truth_values_are_shown_as_the_numbers_that_targets_have():
    assert label(torch.tensor([True, False]), None) == label(torch.tensor([1.0, 0.0]), None) == "1 0"


def test_arrays_are_shown_as_tensors_are():
    def rows(batch, **options):
        return DataLoaders([batch], classes=["no", "yes"], **options).show_batch().rows

    x, y = torch.tensor([[1.5, 2.0], [3.0, 4.25]]), torch.tensor([1, 0])
    for batch in ((x, y), (x[:, 0], x), (x, y > 0), {"x": x[:, 0], "labels": y}):
        arrays = {k: v.numpy() for k, v in batch.items()} if isinstance(batch, dict) else [v.numpy() for v in batch]
        assert rows(arrays) == rows(batch)
    (row, _) = rows((x, y), decode=lambda x: {"sum": x.numpy().sum(), "gap": None, "all": x.numpy()})
    assert row == ["3.5", "None", "1.5 2", "yes"]


def test_rows_of_tables_are_shown_by_their_columns():
    rows = [({"age": 30 + i, "fare": 1.5 * i, "name": f"p{i}"}, 12345.5 * i) for i in range(3)]
    table = DataLoaders(DataLoader(rows, 3)).show_batch(2)
    assert table.names == ["age", "fare", "name", "target"]
    assert str(table).splitlines() == ["age  fare  name  target", " 30     0  p0         0", " 31   1.5  p1     12346"]
    pairs = DataLoaders(DataLoader([(torch.ones(2), torch.zeros(1), 3)], 1)).show_batch()
    assert pairs.rows == [["1 1", "0", "3"]]
    assert make_dls(train=8).show_batch(2).names == ["0", "1", "2", "3", "target"]


class Here(Dataset):
    """Tells whether it is read in this process."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor([float(get_worker_info() is None)])


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((f"text {i}", i) for i in range(5))


def test_a_batch_is_shown_without_moving_anything():
    dls = DataLoaders(DataLoader(TensorDataset(torch.arange(8.0)[:, None]), 4, shuffle=True, num_workers=2))
    state = torch.get_rng_state()
    assert dls.show_batch().rows == dls.show_batch().rows
    assert torch.equal(state, torch.get_rng_state())
    assert DataLoaders(DataLoader(Here(), 2, num_workers=1)).show_batch().rows == [[1.0]] * 2
    assert DataLoaders(DataLoader(Stream(), 2)).show_batch().rows == [["text 0", "0"], ["text 1", "1"]]
    with pytest.raises(ValueError, match="read only once"):
        DataLoaders(iter([])).show_batch()
    with pytest.raises(ValueError, match="no samples to show"):
        dls.show_batch(0)


def test_samples_of_time_major_batches_are_shown_by_their_own_dimension():
    """A batch of three samples of two steps each."""
    x, y = torch.tensor([[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]), torch.tensor([5, 6, 7])
    for batch, dim in (((x, y), (1, 0)), ((x, y[None]), 1), ({"x": x, "labels": y}, {"x": 1})):
        rows = DataLoaders([batch], batch_dim=dim).show_batch(2).rows
        assert [row[-1] for row in rows] == ["5", "6"]
        steps = [row[:-1] if len(row) > 2 else [float(t) for t in row[0].split()] for row in rows]
        assert steps == [[0.0, 1.0], [10.0, 11.0]]


def test_classes_are_those_of_the_dataset():
    data = TensorDataset(torch.zeros(4, 1))
    assert DataLoaders(DataLoader(data, 2)).classes is None
    data.classes = ("a", "b")
    assert DataLoaders.from_datasets(Subset(data, [1, 2])).classes == ["a", "b"]
    assert DataLoaders.from_datasets(data, classes=range(2)).classes == [0, 1]
    assert DataLoaders.from_datasets(StackDataset(data, data)).classes == ["a", "b"]
    assert DataLoaders.from_datasets(StackDataset(x=data, y=data)).classes is None


def test_long_names_of_columns_are_cut_before_what_is_in_them():
    names = [f"a long name of column {i}" for i in range(6)]
    first, second = str(Table([*names, "prediction"], [[*range(6), "wrong: Chinstrap, Gentoo"]])).splitlines()
    assert second.endswith("  wrong: Chinstrap, Gentoo")
    assert len(first) <= WIDTH
    assert first.count("...") == 6


@pytest.mark.timeout(20)
def test_a_long_document_is_cut_in_no_time_that_anybody_notices():
    loader = DataLoader([("好 e\u0301" * 30_000, 1)], batch_size=1)
    _, line = str(DataLoaders(loader, device="cpu").show_batch()).splitlines()
    assert line.startswith("好 e\u0301好")
    assert line.endswith("...        1")
    assert WIDTH - 2 < columns(line) <= WIDTH
    assert str(Table(["n"], [["1" * 30_000 + "x"]])).endswith("1...")
