"""Tables as tensors: what is learned of the training part, and what new rows become."""

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import raises

from learnerkit.tabular.columns import Categories, Numbers, read_numbers
from learnerkit.tabular.data import TabularData
from learnerkit.tabular.dates import Dates

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


def test_loaders_have_the_batch_size_that_was_given():
    dls = TabularData.from_df(table(), "price", CATS, CONTS).dataloaders(bs=6, device="cpu")
    assert [len(target) for *_, target in dls.train] == [6] * 8


def joined(text):
    """A text without its line breaks."""
    return " ".join(text.split())


def test_loaders_take_other_names_of_the_classes():
    df = table()
    data = TabularData.from_df(df.assign(price=df["price"] > df["price"].median()), "price", CATS, CONTS)
    dls = data.dataloaders(bs=6, device="cpu", classes=["cheap", "dear"], decode=lambda cats, conts: "a row")
    assert dls.classes == ["cheap", "dear"]
    assert "a row" in str(dls.show_batch(1))


def test_columns_are_chosen_by_their_values(capsys):
    frame = table()
    frame["made"] = [pd.Timestamp(2020, 1, 1 + i % 22) for i in range(len(frame))]
    frame["doors"] = frame["rooms"].astype(float).where(frame["rooms"] > 1)  # whole numbers and gaps
    frame["kind"] = pd.Categorical.from_codes(frame["rooms"] % 3, ["small", "large", "huge"])
    frame["list"] = [[1]] * len(frame)
    frame["codes"] = pd.Categorical(range(len(frame)))
    frame["mixed"] = [1, "a"] * (len(frame) // 2)
    frame["object"] = frame["area"].astype(object)
    data = TabularData.from_df(frame, "price")
    printed = capsys.readouterr().out
    assert [c.name for c in data.cats] == ["town", "rooms", "garden", "built", "sold", "doors", "kind", "mixed"]
    assert [c.name for c in data.conts] == ["grade", "area", "visits", "object"]
    assert data.cats[6].values == ("small", "large", "huge")
    assert data.cats[7].values == (1, "a")
    assert joined(
        "left out same (one value); name (text that differs in most rows); made (dates: dates=[...] takes "
        "their parts); list (neither text, numbers, truth values nor timestamps); codes (categories that differ in "
        "most rows)"
    ) in joined(printed)
    assert "look at" not in printed
    assert "48 rows to train on, 12 rows to validate on" in printed
    assert [c.name for c in TabularData.from_df(frame, "price", cats=[]).conts] == [
        "rooms", "grade", "area", "visits", "doors", "object",
    ]  # fmt: skip
    assert "town, garden, built, sold, kind, mixed (not named)" in joined(capsys.readouterr().out)
    assert TabularData.from_df(frame, "price", conts=["area"]).cats == data.cats
    capsys.readouterr()
    TabularData.from_df(frame, "price", CATS, CONTS)
    assert capsys.readouterr().out == ""


def dirty(n=200):
    """As a CSV has it that is read with keep_default_na=False: text with gaps, in columns of many kinds."""
    rng = np.random.default_rng(0)
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), unit="D")
    frame = pd.DataFrame({
        "monthly": [f"{x:.2f}" for x in rng.normal(70, 20, n)],
        "age": [f" {x} " for x in rng.integers(18, 90, n)],
        "signup": days.strftime("%d/%m/%Y"),
        "paid": rng.choice(["true", "TRUE", "no"], n),
        "town": rng.choice(["Oslo", "oslo ", "Bonn"], n),
        "zip": [f"{x:05d}" for x in rng.integers(1, 60, n) * 1000],
        "stars": rng.choice(["1", "2", "n/a"], n),
        "row": np.arange(n) + 7,
        "empty": "",
        "y": rng.choice(["a", "b"], n),
    })  # fmt: skip
    frame.loc[[3, 50], "monthly"], frame.loc[9, "monthly"], frame.loc[20, "age"] = "n/a", "1,234.50", ""
    frame.loc[70, "monthly"], frame.loc[71, "age"] = None, "0x1f"
    frame.index = rng.permutation(n)
    return frame


def test_numbers_written_as_text_are_read_and_cells_that_are_none_are_named(capsys):
    frame = dirty()
    data = TabularData.from_df(frame, "y", valid=None)
    printed = joined(capsys.readouterr().out)
    assert [c.name for c in data.cats] == ["paid", "town", "zip", "stars"]
    assert [c.name for c in data.conts] == ["monthly", "age", "row"]
    for said in (
        "monthly: text, read as numbers; 3 of 200 cells are no numbers, and count as missing: 'n/a' (2), '1,234.50' "
        "(1); rows 3, 9, 50; pandas.read_csv(..., thousands=',') reads numbers such as 1,234.5; conts= "
        "or cats= settles it",
        "age: text, read as numbers; 2 of 200 cells are no numbers, and count as missing: '' (1), '0x1f' (1); rows 20, "
        "71; conts=",
        "row: a different whole number in each row: an id? df.drop(columns=['row']) leaves it out",
        "paid: 'TRUE', 'true' differ by case and spaces alone",
        "town: 'Oslo', 'oslo ' differ by case and spaces alone",
        "left out signup (dates: dates=[...] takes their parts); empty (one value) look at",
    ):
        assert said in printed
    numbers = pd.to_numeric(frame["monthly"], errors="coerce").to_numpy()
    z, missing = data.train_ds.tensors[1][:, 0].double().numpy(), data.train_ds.tensors[1][:, 3]
    assert np.flatnonzero(missing).tolist() == [3, 9, 50, 70]
    assert z == pytest.approx((np.where(np.isnan(numbers), np.nanmedian(numbers), numbers) - data.conts[0].mean)
                              / data.conts[0].std, abs=1e-6)  # fmt: skip
    again = TabularData.from_json(data.to_json())
    row = {**frame.iloc[0], "monthly": "new dirt", "age": 33.0}
    assert same_tensors(again.encode(row), data.encode({**row, "monthly": None, "age": "33"}))
    for rows in ({**row, "monthly": "1,234.50"}, frame):  # in a row for a service, and in new rows for `test_dl`
        with pytest.raises(ValueError, match=r"column 'monthly' is one of numbers, and has '1,234.50'; write a number"):
            again.encode(rows)
    TabularData.from_df(frame, "y", ["town"], ["monthly", "row"])
    assert joined(capsys.readouterr().out).startswith("look at monthly: 3 of 200 cells are no numbers, and count")
    assert TabularData.from_df(frame[["age", "y"]].iloc[80:160], "y", valid=None).conts[0].name == "age"
    assert "look at age: text, read as numbers; conts= or cats= settles it" in joined(capsys.readouterr().out)
    few = frame.assign(monthly=np.where(np.arange(200) % 5, frame["monthly"], "high"))
    TabularData.from_df(few, "y")
    assert "monthly, " not in joined(capsys.readouterr().out).partition("left out")[0]


def test_a_summary_of_many_columns_is_short(capsys):
    frame = pd.DataFrame(
        {f"c{i}": [*map(str, range(i, i + 40)), *["-" * 300] * 2] for i in range(60)} | {"y": [1, 2] * 21}
    )
    TabularData.from_df(frame, "y")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 50
    assert "and 20 more" in joined(printed)
    assert "50 more columns" in printed
    assert "-" * 21 not in printed


def test_spellings_of_yes_and_no_are_told(capsys):
    TabularData.from_df(pd.DataFrame({"x": ["yes", "true", "no", "F"] * 5, "y": [1, 2] * 10}), "y")
    assert "x: yes and no are spelled in 4 ways: 'F', 'no', 'true', 'yes'" in joined(capsys.readouterr().out)


@pytest.mark.parametrize(
    "written", [None, "%d/%m/%Y", "%m/%d/%y %H:%M", "mixed ISO", pytest.param("%b %d, %Y", marks=pytest.mark.slow)]
)
def test_dates_become_their_parts(written):
    days = pd.Series(pd.date_range("2023-11-25", periods=60, freq="36h"), name="d")
    days = days.dt.normalize() if written and "%H" not in written else days
    texts = days if written is None else days.dt.strftime("%Y-%m-%d" if written == "mixed ISO" else written)
    if written == "mixed ISO":
        texts = texts.where(texts.index % 2 == 0, texts + "T00:00:00")
    frame = pd.DataFrame({"d": texts, "y": [1, 2] * 30})
    frame.loc[[4, 5], "d"] = pd.NaT if written is None else ""
    data = TabularData.from_df(frame, "y", [], [], valid=None, dates=["d"])
    assert [c.name for c in data.cats] == [f"d_{part}" for part in (
        "month", "day_of_week", "is_month_start", "is_month_end", "is_quarter_start", "is_quarter_end",
        "is_year_start", "is_year_end")]  # fmt: skip
    hours = ["hour"] if days.dt.hour.any() else []
    assert [c.name for c in data.conts] == [
        f"d_{part}" for part in ("year", "week", "day", "day_of_year", *hours, "elapsed")
    ]
    assert data.n_numbers == len(data.conts) + 1  # one mark of what is missing
    again = TabularData.from_json(data.to_json())
    assert again.to_json() == data.to_json()
    rows = [again.decode(*row[:2]) for row in zip(*again.encode(frame.drop(columns="y")), strict=True)]
    for i, (row, day) in enumerate(zip(rows, days, strict=True)):
        if i in (4, 5):
            assert row["d_elapsed"] is row["d_month"] is row["d_is_month_end"] is None
            continue
        assert (row["d_month"], row["d_day_of_week"], row["d_day"]) == (day.month, day.day_of_week, day.day)
        assert (row["d_year"], row["d_day_of_year"], row["d_week"]) == (
            day.year,
            day.day_of_year,
            day.isocalendar().week,
        )
        assert row["d_is_month_end"] is day.is_month_end
        assert row["d_is_quarter_start"] is day.is_quarter_start
        assert row["d_elapsed"] == pytest.approx(day.timestamp() / 86400, abs=0.06)
    assert same_tensors(data.encode({"d": texts[0]}), [t[:1] for t in data.train_ds.tensors[:2]])
    assert data.encode({"d": None})[1][0, -1] == 1
    assert "  dates       d\n" in repr(data)


@pytest.mark.parametrize("written", [None, "%Y-%m-%dT%H:%M:%S%z"])
def test_parts_of_dates_are_those_of_the_time_zone_that_was_learned(written):
    days = pd.Series(pd.date_range("2024-01-01", periods=40, freq="25h", tz=ZONE))  # in winter: +0100
    frame = pd.DataFrame({"d": days.dt.strftime(written) if written else days, "y": [1, 2] * 20})
    data = TabularData.from_json(TabularData.from_df(frame, "y", [], [], valid=None, dates=["d"]).to_json())
    abroad = days.dt.tz_convert("America/New_York")
    for times in (abroad, abroad.dt.strftime("%Y-%m-%dT%H:%M:%S%z"), days.dt.tz_localize(None)):
        rows = [data.decode(*row) for row in zip(*data.encode(pd.DataFrame({"d": times})), strict=True)]
        assert [row["d_hour"] for row in rows] == pytest.approx(list(days.dt.hour), abs=1e-3)
        assert [row["d_day_of_week"] for row in rows] == list(days.dt.day_of_week)


def test_dates_of_several_time_zones_are_read_where_one_was_learned():
    days = pd.Series(pd.date_range("2024-03-01", periods=60, tz=ZONE))  # the clocks change in between
    frame = pd.DataFrame({"d": days, "c": ["a", "b"] * 30, "y": [1, 2] * 30})
    data = TabularData.from_df(frame, "y", "c", [], valid=None, dates="d")
    frame.to_csv("frame.csv", index=False)
    mixed = pd.Series([days[0].tz_convert("UTC"), *days[1:]], dtype=object)
    for rows in (pd.read_csv("frame.csv"), frame.assign(d=mixed)):
        assert same_tensors(data.encode(rows), data.train_ds.tensors[:2])
    with raises(ValueError, "pandas.to_datetime(df['d'], errors='coerce', format=...), with utc=True for several"):
        TabularData.from_df(pd.read_csv("frame.csv"), "y", dates=["d"])


def test_dates_that_cannot_be_read_are_refused():
    frame = pd.DataFrame({"d": ["03/04/2024", "05/06/2024"] * 10, "y": [1, 2] * 10})

    def make(**columns):
        TabularData.from_df(frame.assign(**columns), "y", dates=["d"])

    with raises(ValueError, "'03/04/2024', which may be %d/%m/%Y or %m/%d/%Y", "format='%d/%m/%Y'"):
        make()
    for wrong in ("soon", 20240105):
        with raises(ValueError, f"'d' is one of dates (ISO8601), and has {wrong!r}", "pandas.to_datetime(df['d']"):
            make(d=wrong)
    with raises(ValueError, "'d' is one of dates (%d/%m/%Y), and has 'soon'"):
        make(d=["13/04/2024"] * 19 + ["soon"])
    with raises(ValueError, "column 'd_year' has the name of a part of 'd'"):
        make(d=pd.Timestamp("2024-01-01"), d_year=1)
    data = TabularData.from_df(frame.assign(d=pd.date_range("2024-01-01", periods=20), n=1.0), "y", ["n"], dates=["d"])
    with raises(ValueError, "there is no column 'n'; the frame has d, y"):
        data.encode(pd.DataFrame({"d": ["2024-01-01"], "y": [1]}))
    with raises(ValueError, "column 'd' is named twice", "of dates"):
        TabularData.from_df(frame, "y", ["d"], dates=["d"])


def test_the_type_of_the_target_says_if_it_is_classes_or_numbers():
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
        ("no column 'solt'; the frame has town, rooms", "price; did you mean 'sold'?"): {"y": "solt"},
        ("'price', which is to be predicted, holds numbers as text (1 of 60 cells", "'-' (1); rows 0)"): {
            "frame": frame.assign(price=["-", *map(str, frame["price"][1:])]), "y": "price",
        },
        ("'sold', which is to be predicted, holds dates",): {"frame": frame.assign(sold=pd.Timestamp("2026-01-02"))},
        ("'town' is named twice",): {"cats": ["town", "town"]},
        ("'sold' is named twice",): {"cats": ["sold"]},
        ("'area', 'area'; each needs a name of its own",): {"frame": pd.concat([frame, frame["area"]], axis=1)},
        ("column 'town' is one of numbers", "'Oslo'", "to_numeric"): {"cats": [], "conts": ["town"]},
        ("values of type list", "astype(str)"): {"frame": frame.assign(town=[[1]] * 60)},
        ("values of type Fraction",): {"frame": frame.assign(town=Fraction(1, 3))},
        ("no number in the training part",): {"frame": frame.assign(area=np.nan)},
        ("1 values of 'sold' are missing",): {"frame": frame.assign(sold=[None, *frame["sold"][1:]])},
        ("nothing to learn", "'no'"): {"frame": frame.assign(sold="no")},
        ("all rows to train on have 'sold' = None; there is nothing to learn",): {"frame": frame.assign(sold=None)},
        ("infinite",): {"frame": frame.assign(price=[np.inf, *frame["price"][1:]]), "y": "price"},
        ("infinite, or above the 3.4e38 of float32",): {
            "frame": frame.assign(price=[1e39, *frame["price"][1:]]), "y": "price",
        },
        ("no row of the training part has 'sold' = 'maybe'",): {
            "frame": frame.assign(sold=["maybe", *frame["sold"][1:]]), "valid": [0],
        },
        ("no column 'sold'; the frame has town, rooms",): {"valid": frame.drop(columns="sold")},
        ("got valid=1.5", "a share between 0 and 1"): {"valid": 1.5},
        ("got valid=[60]",): {"valid": [60]},
        ("a mask of the 60 rows",): {"valid": [True, False]},
        ("leaves 0 rows to train on and 60",): {"valid": range(60)},
        ("no column to predict 'sold' from: name some by cats= and conts=",): {"cats": [], "conts": []},
        ("no column to predict 'sold' from", "left out: same (one value); name (text that differs in most rows)"): {
            "frame": frame[["sold", "same", "name"]], "cats": None, "conts": None,
        },
        ("valid=0.2 leaves 2 rows to train on and 0",): {"frame": frame[:2]},
    }.items():  # fmt: skip
        with raises(ValueError, *parts):
            make(**wrong)
    with raises(ValueError, "no column 'area'", "the frame has town"):
        data.encode(frame.drop(columns="area"))
    with raises(ValueError, "'garden' held truth values in training, such as False, and now text, such as 'yes'"):
        data.encode(frame.assign(garden="yes"))
    with raises(ValueError, "'town' held text in training, such as 'Bonn', and now numbers, such as 3"):
        data.encode(frame.assign(town=3))
    with raises(ValueError, "'area' is one of numbers", "'large'"):
        data.encode({**frame.iloc[0], "area": "large"})
    with raises(ValueError, "'area' is one of numbers", "'1,000'"):
        data.encode({**frame.iloc[0], "area": "1,000"})
    for path in ("train.csv", Path("train.csv")):
        with raises(TypeError, "got 'train.csv'; read the file first: pandas.read_csv('train.csv')"):
            make(frame=path)
    polars = type("DataFrame", (), {"to_pandas": lambda self: frame, "__module__": "polars.dataframe.frame"})
    with raises(TypeError, "got a DataFrame of polars; pass a frame of pandas: frame.to_pandas()"):
        make(frame=polars())
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


def test_numbers_and_truth_values_of_a_request_may_be_text():
    frame = pd.DataFrame({"age": [31.5, None, 40.0] * 20, "year": [2007, 2008] * 30, "sold": ["no", "yes"] * 30})
    frame["new"] = frame["year"] == 2008
    data = TabularData.from_df(frame, "sold", ["year", "new"], ["age"], None)
    for given, meant in (
        ({"age": "31.5", "year": "2008"}, {"age": 31.5, "year": 2008}),
        ({"age": " 4e1 ", "year": "2008.0"}, {"age": 40.0, "year": 2008}),
        ({"age": "", "year": " "}, {"age": None, "year": None}),
        ({"age": "nan", "year": "1999"}, {"age": None, "year": 1999}),
        ({"age": "40", "year": 2007, "new": "True"}, {"age": 40.0, "year": 2007, "new": True}),
        ({"age": "40", "year": 2007, "new": " false"}, {"age": 40.0, "year": 2007, "new": False}),
        ({"age": "40", "year": 2007, "new": 1}, {"age": 40.0, "year": 2007, "new": True}),
    ):
        given, meant = {"new": None} | given, {"new": None} | meant
        assert same_tensors(data.encode(given), data.encode(meant))
        two = [{"age": 40.0, "year": 2007, "new": False}]
        assert same_tensors(data.encode([given, *two]), data.encode([meant, *two]))
    for column, value in (("age", "1,000"), ("age", "n/a"), ("year", "last")):
        with raises(ValueError, repr(column), repr(value)):
            data.encode({"age": 1.0, "year": 2007, "new": True} | {column: value})


def test_numbers_of_a_row_may_be_decimals_and_truth_values_of_numpy():
    new = pd.array([True, None, False] * 20, "boolean")
    frame = pd.DataFrame({"price": [0.25, 1.5, None] * 20, "new": new, "sold": ["no", "yes"] * 30})
    data = TabularData.from_df(frame, "sold", [], ["price", "new"], None)
    rows = [frame.iloc[i] for i in range(3)]
    rows[1]["price"] = Decimal("1.50")  # as rows of a database have it
    assert same_tensors(data.encode(rows), data.encode(frame[:3]))


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_columns_of_decimals_are_those_of_floats(library):
    arrow = pytest.importorskip(library)
    kind = object if library == "pandas" else pd.ArrowDtype(arrow.decimal128(10, 4))
    numbers = {"price": [i / 8 for i in range(60)], "rooms": [1.0, 2.0, None] * 20, "sold": ["no", "yes"] * 30}
    frame = pd.DataFrame(numbers)
    decimals = frame.copy()
    for name in ("price", "rooms"):  # as a database has them
        decimals[name] = pd.Series([None if pd.isna(x) else Decimal(x) for x in frame[name]], dtype=kind)
    for y in ("sold", "price"):
        one, other = (TabularData.from_df(each, y, valid=None) for each in (frame, decimals))
        assert repr(one) == repr(other)
        assert same_tensors(one.train_ds.tensors, other.train_ds.tensors)
        assert same_tensors(one.encode(frame), one.encode(decimals))
        assert same_tensors(one.encode(frame[:1]), one.encode({"price": Decimal(0), "rooms": Decimal(1), "sold": "no"}))
    assert isinstance(decimals["price"][0], Decimal)


def test_large_whole_numbers_of_a_request_may_be_text():
    ids = [2**62 + i for i in range(3)]
    column = Categories.of(pd.Series(ids, name="id"))
    assert column.encode(pd.Series([*map(str, ids), "", " 1.5 ", "1" * 400], name="id")).tolist() == [1, 2, 3, 0, 0, 0]


@pytest.mark.parametrize("gap", [{"id": None}, {"id": np.nan}, {}])
def test_large_whole_numbers_in_rows_stay_exact_beside_a_gap(gap):
    ids = [2**62 + i for i in range(3)]
    data = TabularData.from_df([{"id": i, "x": 0.5, "y": i % 2} for i in ids], "y", ["id"], ["x"], None)
    cats, _ = data.encode([{"id": ids[0], "x": 1}, {"x": 1, **gap}, {"id": ids[2], "x": None}])
    assert cats.tolist() == [[1], [0], [3]]


def test_times_with_and_without_a_zone_are_of_two_kinds():
    times = pd.Series([pd.Timestamp("2020-01-02"), pd.Timestamp("2020-01-03"), None], name="t")
    there, other = times.dt.tz_localize("UTC"), "Asia/Tokyo"
    for known, new, held in ((times, there, "timestamps in"), (there, times, "timestamps with a time zone in")):
        assert Categories.of(known).encode(known).tolist() == [1, 2, 0]
        with raises(ValueError, f"held {held} training", "give it the type that it had"):
            Categories.of(known).encode(new)
    assert Categories.of(there).encode(there.dt.tz_convert(other)).tolist() == [1, 2, 0]
    both = pd.Series([*times, *there], dtype=object, name="t")
    assert Categories.of(both).encode(both).tolist() == [1, 2, 0, 3, 4, 0]


def test_times_keep_their_hours_in_any_zone():
    days = pd.date_range("2020-07-01", periods=40, freq="31h")
    frame = pd.DataFrame({"x": np.arange(40) * 1.3, "y": np.arange(40) ** 1.5})
    hour = timedelta(hours=1)
    for zone in (ZONE, timezone(5.5 * hour, "IST"), timezone(hour, "CET"), UTC):
        times = days.tz_localize(zone).to_series(index=frame.index)
        data = TabularData.from_df(frame.assign(d=times), "y", dates=["d"])
        again = TabularData.from_json(data.to_json())
        assert again.dates[0].parts(times)["d_hour"].tolist() == times.dt.hour.tolist()
    with raises(ValueError, "which has no name that pandas finds", "tz_convert"):
        TabularData.from_df(frame.assign(d=days.tz_localize("dateutil/Europe/Berlin")), "y", dates=["d"])


@pytest.mark.parametrize("zone", [None, "UTC", ZONE])
@pytest.mark.parametrize("unit", ["s", "us"])
def test_dates_may_lie_beyond_the_range_of_nanoseconds(zone, unit):
    texts = pd.Series(["9999-12-30T01:00:00", "2020-01-02T13:00:00", "0900-03-01T00:00:00"], name="d")
    days = [(datetime.fromisoformat(text) - datetime(1970, 1, 1)) / timedelta(days=1) for text in texts]
    column = texts.astype(f"datetime64[{unit}]")
    column = column if zone is None else column.dt.tz_localize("UTC").dt.tz_convert(zone)
    assert Dates.of(column).parts(column)["d_elapsed"].tolist() == pytest.approx(days, rel=1e-12)


def test_rows_may_have_the_same_names_and_lack_dates():
    days = pd.date_range("2020-07-01", periods=40, freq="31h").strftime("%Y-%m-%d")
    frame = pd.DataFrame({"d": days, "x": np.arange(40) * 1.3, "y": np.arange(40) ** 1.5})
    data = TabularData.from_df(frame, "y", dates=["d"])
    rows = frame[:3].copy()
    rows.loc[1, "d"] = None
    once, twice = data.encode(rows), data.encode(pd.concat([rows, rows]))
    for a, b in zip(once, twice, strict=True):
        assert a is b is None or torch.equal(torch.cat([a, a]), b)


@pytest.mark.parametrize("kind", ["date32", "date64"])
def test_dates_may_be_days_of_arrow(kind):
    pa = pytest.importorskip("pyarrow")
    days = pd.Series(pd.date_range("2020-07-01", periods=40, freq="3D"))
    days[7] = None
    frame = pd.DataFrame({"d": days, "y": np.arange(40) ** 1.5})
    of_arrow = frame.assign(d=days.dt.date.astype(pd.ArrowDtype(getattr(pa, kind)())))
    data, again = (TabularData.from_df(each, "y", dates=["d"]) for each in (frame, of_arrow))
    for found in (again.encode(frame), again.encode(of_arrow), data.encode(of_arrow)):
        assert all(map(torch.equal, data.encode(frame), found))


def test_lists_of_arrow_are_left_out_like_others(capsys):
    pa = pytest.importorskip("pyarrow")
    TabularData.from_df(table().assign(tags=pd.Series([[1]] * 60, dtype=pd.ArrowDtype(pa.list_(pa.int64())))), "price")
    assert "tags (neither text, numbers, truth values nor timestamps)" in joined(capsys.readouterr().out)


@pytest.mark.parametrize("names", [[2, 0, 1], np.arange(3)])
def test_columns_may_have_numbers_for_names(names):
    frame = pd.DataFrame({"x": np.arange(40) * 1.3, "y": ["u", "v"] * 20, "c": ["a", "b", "c", "d"] * 10})
    frame.columns = names
    data = TabularData.from_df(frame, names[1])
    assert [type(column.name) for column in (*data.cats, *data.conts, data.target)] == [int, int, int]
    again = data.dataloaders().data.from_json(data.to_json())
    assert all(map(torch.equal, data.encode(frame), again.encode(frame)))


def test_numbers_of_single_precision_are_categories_as_they_are_written():
    column = pd.Series([0.1, 0.2, 0.5, 0.1], dtype="float32", name="dose")
    found = Categories.from_json(Categories.of(column).as_json())
    for other in ("float32", "float64", "category", "object"):
        assert found.encode(column.astype(other)).tolist() == [1, 2, 3, 1]
    assert found.encode(pd.Series([0.1, 0.2, 0.5, 0.1])).tolist() == [1, 2, 3, 1]
    assert Categories.of(column.astype("category")).encode(column).tolist() == [1, 2, 3, 1]
    large = pd.Series([1e300, 0.5])
    assert Categories.of(large).encode(large).tolist() == [2, 1]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("size", [1e-170, 1e200])
def test_numbers_whose_squares_are_zero_or_infinite_are_standardised(size):
    column = pd.Series(np.arange(6) * size)
    values, missing = Numbers.of(column).encode(column)
    assert values == pytest.approx((np.arange(6) - 2.5) / np.arange(6).std())
    assert not missing.any()


def test_numbers_beside_text_are_read():
    column = pd.Series([1.5, "n/a", " 2.5 ", 4, True, None], dtype=object)
    assert read_numbers(column) == pytest.approx([1.5, np.nan, 2.5, 4, np.nan, np.nan], nan_ok=True)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_prediction_for_whole_numbers_need_not_be_finite(number):
    assert Numbers.of(pd.Series([1, 2, 4])).decode(number) == pytest.approx(number, nan_ok=True)
