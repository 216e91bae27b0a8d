"""Tables as tensors: what is learned of the training part, and what new rows become."""

import json
from datetime import datetime
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import raises

from learnerkit.tabular.columns import Categories
from learnerkit.tabular.data import TabularData

pd = pytest.importorskip("pandas")

ZONE = "Europe/Berlin"


def table(n=60, seed=0):
    """A column of every kind, with gaps in most of them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "town": rng.choice(["Oslo", "Bonn", "Rome"], n),
        "rooms": rng.integers(1, 6, n),
        "grade": rng.choice([0.5, 1.5, 2.5], n),
        "garden": rng.random(n) < 0.5,
        "built": rng.choice([pd.Timestamp(t, tz=ZONE) for t in ("1950-01-01", "1970-06-30 12:34:56.123456")], n),
        "area": rng.normal(90, 30, n),
        "visits": rng.integers(0, 1000, n),
        "same": 0.1,
        "name": [f"house {i}" for i in range(n)],
        "sold": rng.choice(["yes", "no"], n),
        "price": rng.normal(3e5, 1e5, n),
    })  # fmt: skip
    for name in ("town", "grade", "area", "built"):
        frame.loc[rng.random(n) < 0.2, name] = None
    return frame


CATS, CONTS = ["town", "rooms", "grade", "garden", "built"], ["area", "visits", "same"]


def same_tensors(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_only_the_training_part_is_learned_from(seed):
    frame, rng = table(seed=seed), np.random.default_rng(seed)
    mask = rng.random(len(frame)) < 0.3
    data = TabularData.from_df(frame, "sold", CATS, CONTS, mask)
    spoiled = frame.copy()
    spoiled.loc[mask, "town"] = "elsewhere"
    spoiled.loc[mask, ["area", "same"]] = np.inf, 1e30
    spoiled.index = rng.permutation(len(frame))
    other = TabularData.from_df(spoiled, "sold", CATS, CONTS, np.flatnonzero(mask))
    assert other.to_json() == data.to_json()
    assert same_tensors(other.train_ds.tensors, data.train_ds.tensors)
    cats, conts, target = data.train_ds.tensors
    train = frame[~mask]
    for i, name in enumerate(CATS):
        numbers = {value: k for k, value in enumerate(sorted(train[name].dropna().unique()), 1)}
        assert cats[:, i].tolist() == [numbers.get(value, 0) for value in train[name]]
    area = train["area"].to_numpy()
    expected = (np.nan_to_num(area, nan=np.nanmedian(area)) - np.nanmean(area)) / np.nanstd(area)
    assert torch.allclose(conts[:, 0], torch.from_numpy(expected).float())
    assert conts[:, 2].tolist() == [0] * len(train)  # a constant
    assert conts[:, 3].tolist() == np.isnan(area).tolist()  # the mark
    assert conts.shape[1] == data.n_numbers == 4
    assert [data.classes[i] for i in target] == train["sold"].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_json_brings_every_bit_back_and_rows_come_back_from_tensors(seed):
    data = TabularData.from_df(table(seed=seed), "price", CATS, CONTS)
    again = TabularData.from_json(data.to_json())
    assert again.to_json() == data.to_json()
    assert [list(map(type, column.values)) for column in again.cats] == [
        list(map(type, column.values)) for column in data.cats
    ]
    assert again.cats[-1].values[0].tz.key == ZONE
    new = table(seed=seed + 10)
    new.loc[::7, "town"] = "Paris"
    encoded = data.encode(new)
    assert same_tensors(again.encode(new.drop(columns="price")), encoded)
    assert not encoded[0][::7, 0].any()
    for row, tensors in zip(new.to_dict("records"), zip(*encoded, strict=True), strict=True):
        decoded = again.decode(*tensors)
        assert list(decoded) == CATS + CONTS
        for name, value in decoded.items():
            expected = row[name]
            if pd.isna(expected) or expected == "Paris":
                assert value is None
            else:
                assert value == (pytest.approx(expected, rel=1e-4) if name == "area" else expected)
                assert name != "area" or value == float(f"{value:.6g}")
    mapping, series = new.iloc[0].to_dict(), new.iloc[1]
    assert same_tensors(data.encode([mapping, series]), [t[:2] for t in encoded])
    assert same_tensors(data.encode(series), [t[1:2] for t in encoded])
    assert same_tensors(data.encode({**mapping, "area": None}), data.encode({**mapping, "area": float("inf")}))
    json.loads(data.to_json(), parse_constant=pytest.fail)


def test_columns_are_chosen_by_their_values(capsys):
    frame = table()
    frame["made"] = [pd.Timestamp(2020, 1, 1 + i % 22) for i in range(len(frame))]
    frame["doors"] = frame["rooms"].astype(float).where(frame["rooms"] > 1)  # whole numbers and gaps
    frame["kind"] = pd.Categorical.from_codes(frame["rooms"] % 3, ["small", "large", "huge"])
    frame["list"] = [[1]] * len(frame)
    frame["mixed"] = [1, "a"] * (len(frame) // 2)
    frame["object"] = frame["area"].astype(object)
    data = TabularData.from_df(frame, "price")
    printed = capsys.readouterr().out
    assert [c.name for c in data.cats] == ["town", "rooms", "garden", "built", "sold", "doors", "kind", "mixed"]
    assert [c.name for c in data.conts] == ["grade", "area", "visits", "same", "object"]
    assert data.cats[6].values == ("small", "large", "huge")
    assert data.cats[7].values == (1, "a")
    assert "left out    name, made, list" in printed
    assert "48 rows to train on, 12 rows to validate on" in printed
    assert [c.name for c in TabularData.from_df(frame, "price", cats=[]).conts] == [
        "rooms", "grade", "area", "visits", "same", "doors", "object",
    ]  # fmt: skip
    assert TabularData.from_df(frame, "price", conts=["area"]).cats == data.cats
    capsys.readouterr()
    TabularData.from_df(frame, "price", CATS, CONTS)
    assert capsys.readouterr().out == ""


def test_what_the_target_is():
    frame = table()
    for name, classes in {"sold": ["no", "yes"], "garden": [False, True], "rooms": [1, 2, 3, 4, 5]}.items():
        data = TabularData.from_df(frame, name, ["town"], ["area"], valid=None)
        assert data.classes == classes
        assert [data.classes[i] for i in data.train_ds.tensors[2]] == frame[name].tolist()
        assert data.valid_ds is None
    frame["rooms"] = frame["rooms"].astype(float)
    for name in ("price", "visits", "rooms"):
        data = TabularData.from_df(frame, name, ["town"], [], valid=None)
        assert data.classes is None
        assert torch.equal(data.train_ds.tensors[2], torch.tensor(frame[name].to_numpy()).float()[:, None])
        assert (data.target.mean, data.target.std) == pytest.approx((frame[name].mean(), frame[name].std(ddof=0)))


def test_a_share_is_drawn_by_class_and_leaves_each_class_to_be_learned():
    frame = pd.DataFrame({"x": np.arange(103.0), "y": ["a"] * 80 + ["b"] * 20 + ["c", "d", "d"]})
    before = torch.get_rng_state()
    data = TabularData.from_df(frame, "y", [], ["x"], 0.2)
    assert torch.equal(torch.get_rng_state(), before)
    assert TabularData.from_df(frame, "y", [], ["x"], 0.6).valid_ds.tensors[2].bincount().tolist() == [48, 12, 0, 1]
    assert data.valid_ds.tensors[2].bincount().tolist() == [16, 4]
    rows = [data.decode(*row[:2])["x"] for ds in (data.train_ds, data.valid_ds) for row in ds]
    assert sorted(rows) == list(range(103))
    same, other = (TabularData.from_df(frame, "y", [], ["x"], 0.2, seed=seed) for seed in (42, 43))
    assert torch.equal(same.valid_ds.tensors[1], data.valid_ds.tensors[1])
    assert other.train_ds.tensors[1].tolist() != data.train_ds.tensors[1].tolist()
    halves = TabularData.from_df(frame, "y", [], ["x"], frame[frame["y"] == "b"])
    assert (len(halves.train_ds), len(halves.valid_ds)) == (103, 20)


def test_what_cannot_be_is_refused():
    frame = table()
    data = TabularData.from_df(frame, "sold", CATS, CONTS)

    def make(frame=frame, y="sold", cats=("town",), conts=("area",), valid=0.2):
        return TabularData.from_df(frame, y, cats, conts, valid)

    for parts, wrong in {
        ("no column 'solt'", "did you mean 'sold'?"): {"y": "solt"},
        ("'town' is named twice",): {"cats": ["town", "town"]},
        ("'sold' is named twice",): {"cats": ["sold"]},
        ("'area', 'area'; each needs a name of its own",): {"frame": pd.concat([frame, frame["area"]], axis=1)},
        ("column 'town' is one of numbers", "'Oslo'", "to_numeric"): {"cats": [], "conts": ["town"]},
        ("values of type list", "astype(str)"): {"frame": frame.assign(town=[[1]] * 60)},
        ("values of type Fraction",): {"frame": frame.assign(town=Fraction(1, 3))},
        ("no number in the training part",): {"frame": frame.assign(area=np.nan)},
        ("1 values of 'sold' are missing",): {"frame": frame.assign(sold=[None, *frame["sold"][1:]])},
        ("nothing to learn", "'no'"): {"frame": frame.assign(sold="no")},
        ("infinite",): {"frame": frame.assign(price=[np.inf, *frame["price"][1:]]), "y": "price"},
        ("no row of the training part has 'sold' = 'maybe'",): {
            "frame": frame.assign(sold=["maybe", *frame["sold"][1:]]), "valid": [0],
        },
        ("got valid=1.5", "a share between 0 and 1"): {"valid": 1.5},
        ("got valid=[60]",): {"valid": [60]},
        ("a mask of the 60 rows",): {"valid": [True, False]},
        ("leaves 0 rows to train on and 60",): {"valid": range(60)},
        ("valid=0.2 leaves 2 rows to train on and 0",): {"frame": frame[:2]},
    }.items():  # fmt: skip
        with raises(ValueError, *parts):
            make(**wrong)
    with raises(ValueError, "no column 'area'", "the frame has town"):
        data.encode(frame.drop(columns="area"))
    with raises(ValueError, "'town' held text in training, such as 'Bonn', and now numbers, such as 3"):
        data.encode(frame.assign(town=3))
    with raises(ValueError, "'area' is one of numbers", "'large'"):
        data.encode({**frame.iloc[0], "area": "large"})
    with raises(TypeError, "got a int for a row"):
        data.encode([1, 2])
    with raises(TypeError, "got a DataFrame for a row", "frame.iloc[0]"):
        data.encode([frame[:1]])
    with raises(ValueError, "got no rows"):
        data.encode([])


def test_times_of_python_are_timestamps():
    (column,) = TabularData.from_df(
        pd.DataFrame({"t": [datetime(2020, 1, 2)] * 3, "y": [1.0, 2, 3]}), "y", ["t"], [], None
    ).cats
    assert column == Categories.from_json(json.loads(json.dumps(column.as_json())))
    assert column.encode(pd.Series([datetime(2020, 1, 2), None], name="t")).tolist() == [1, 0]
