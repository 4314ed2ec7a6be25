import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import SourceFormat
from hotrec.data.columns import RawBlock, texts_from_arrow
from hotrec.data.log import join, read_side_table
from hotrec.data.readers import LogFormat, Wanted
from tests.unit.data.test_columns import plain

CSV = LogFormat(SourceFormat.delimited, ",")
WANTED = Wanted(ids=("city",), numbers=("age",))


def block_of(keys: list) -> RawBlock:
    ids = {"user": texts_from_arrow(pa.array(keys, pa.string()))}
    return RawBlock(np.arange(len(keys)), ids, {})


def write(path, text):
    path.write_text(text)
    return path


def test_columns_are_matched_by_key(tmp_path):
    side = write(tmp_path / "users", "age,id,city\n30,u1,Rome\n,u2,\n50,u3,Rome\n")
    table = read_side_table("users", [side], CSV, key="id", on="user", wanted=WANTED)
    found = join(block_of(["u3", "u9", None, "u1", "u3", "u2"]), table)
    assert plain(found.ids["city"]) == ["Rome", None, None, "Rome", "Rome", None]
    ages = found.numbers["age"]
    assert ages[[0, 3, 4]].tolist() == [50.0, 30.0, 50.0]
    assert np.isnan(ages[[1, 2, 5]]).all()


def test_a_missing_key_is_no_empty_one(tmp_path):
    side = tmp_path / "users.parquet"
    pq.write_table(pa.table({"id": ["", "u1"], "city": ["Rome", "Oslo"], "age": [30, 40]}), side)
    parquet = LogFormat(SourceFormat.parquet)
    table = read_side_table("users", [side], parquet, key="id", on="user", wanted=WANTED)
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["", None, "u1"]))
    found = join(RawBlock(np.arange(3), {"user": texts_from_arrow(keys)}, {}), table)
    assert plain(found.ids["city"]) == ["Rome", None, "Oslo"]


def test_a_side_table_of_several_files(tmp_path):
    one = write(tmp_path / "1", "age,id,city\n30,u1,Rome\n")
    two = write(tmp_path / "2", "age,id,city\n40,u2,Oslo\n")
    table = read_side_table("users", [one, two], CSV, key="id", on="user", wanted=WANTED)
    found = join(block_of(["u2", "u1"]), table)
    assert plain(found.ids["city"]) == ["Oslo", "Rome"]
    assert found.numbers["age"].tolist() == [40.0, 30.0]


@pytest.mark.parametrize("num_files", [1, 2])
def test_list_columns_of_parquet(tmp_path, num_files):
    files = []
    tables = [
        pa.table({"id": [1, 2, 3], "seen": [[5, 6], [], None]}),
        pa.table({"id": [4, 5], "seen": [[7], [8, 6]]}),
    ]
    for index, table in enumerate(tables[:num_files]):
        files.append(tmp_path / f"{index}.parquet")
        pq.write_table(table, files[-1])
    table = read_side_table(
        "history",
        files,
        LogFormat(SourceFormat.parquet),
        key="id",
        on="user",
        wanted=Wanted(ids=("seen",), numbers=()),
    )
    found = plain(join(block_of(["2", "1", "3", "5", "1"]), table).ids["seen"])
    fifth = ["8", "6"] if num_files == 2 else None
    assert found == [[], ["5", "6"], None, fifth, ["5", "6"]]


def test_a_key_that_occurs_twice_is_an_error(tmp_path):
    side = write(tmp_path / "users", "age,id,city\n1,u1,a\n2,u2,b\n3,u1,c\n")
    with pytest.raises(ValueError, match="joins.users .*expected each id once, got 'u1' more than"):
        read_side_table("users", [side], CSV, key="id", on="user", wanted=WANTED)


def test_the_columns_of_the_log_come_first(tmp_path):
    side = write(tmp_path / "users", "user,city\nu1,Rome\n")
    wanted = Wanted(ids=("city",), numbers=())
    table = read_side_table("users", [side], CSV, key="user", on="user", wanted=wanted)
    found = join(block_of(["u1", "u2"]), table)
    assert plain(found.ids["user"]) == ["u1", "u2"]
