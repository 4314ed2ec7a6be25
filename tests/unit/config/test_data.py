import re

import pytest
import torch

from hotrec.config.data import (
    CRITEO_FEATURES,
    MAX_ROWS,
    ColumnKind,
    ColumnSpec,
    DataSpec,
    Derive,
    Encoding,
    JoinSpec,
    SourceFormat,
    SourceSpec,
    SplitKind,
    SplitSpec,
    SyntheticSpec,
    TableSpec,
    columns_of,
    tables_of,
)
from hotrec.config.names import is_reserved
from hotrec.config.validate import validate


def criteo(**settings) -> SourceSpec:
    return SourceSpec(SourceFormat.criteo, ["day_0"], **settings)


def delimited(**columns: ColumnSpec) -> SourceSpec:
    return SourceSpec(SourceFormat.delimited, ["log"], columns=columns)


LABEL, USER = ColumnSpec(ColumnKind.label), ColumnSpec(ColumnKind.categorical)
DENSE = ColumnSpec(ColumnKind.dense)


def test_criteo_has_its_own_columns():
    kinds = [column.kind.name for column in columns_of(criteo()).values()]
    assert kinds == ["label"] + ["dense"] * 13 + ["categorical"] * 26
    assert list(tables_of(criteo())) == list(CRITEO_FEATURES)


def test_features_may_share_a_table():
    item = ColumnSpec(ColumnKind.categorical, table="videos")
    seen = ColumnSpec(ColumnKind.categorical_list, table="videos")
    spec = delimited(label=LABEL, user=USER, item=item, seen=seen)
    spec.tables["videos"] = TableSpec(min_count=7)
    assert {n: t.min_count for n, t in tables_of(spec).items()} == {"user": 1, "videos": 7}


@pytest.mark.parametrize(
    ("spec", "key", "got"),
    [
        (DataSpec(criteo(), SyntheticSpec([3])), "data", r"\['source', 'synthetic'\]"),
        (SourceSpec(SourceFormat.criteo, []), "data.source.files", r"\[\]"),
        (criteo(separator=";;"), "data.source.separator", "';;'"),
        (criteo(rows_per_chunk=0), "data.source.rows_per_chunk", "0"),
        (
            criteo(split=SplitSpec(valid_frac=0.6, test_frac=0.5)),
            *("data.source.split.valid_frac + test_frac", "1.1"),
        ),
        (criteo(split=SplitSpec(valid_frac=-0.1)), "data.source.split.valid_frac", "-0.1"),
        (
            criteo(split=SplitSpec(SplitKind.time, column="I1", valid_from="1 May")),
            *("data.source.split.valid_from", "'1 May'"),
        ),
        (
            criteo(split=SplitSpec(SplitKind.time, column="I1", valid_from=5, test_from=4)),
            *("data.source.split.test_from", "4"),
        ),
        (criteo(tables={"C99": TableSpec()}), "data.source.tables.C99", "'C99'"),
        (criteo(table_defaults=TableSpec(min_count=0)), "data.source.table_defaults.min_count", 0),
        (
            criteo(tables={"C3": TableSpec(Encoding.hashing, num_rows=1)}),
            *("data.source.tables.C3.num_rows", "1"),
        ),
        (delimited(user=USER), "data.source.columns", r"\[\]"),
        (delimited(label=LABEL), "data.source.columns", r"\['label'\]"),
        (delimited(label=LABEL, dense=USER), "data.source.columns.dense", "'dense'"),
        (delimited(label=LABEL, **{"a/b": USER}), "data.source.columns.a/b", "'a/b'"),
        (
            delimited(label=LABEL, user=USER, user_hot=USER),
            *("data.source.columns", "both"),
        ),
        (criteo(block_mib=1 << 20), "data.source.block_mib", "1048576"),
        (
            criteo(tables={"C3": TableSpec(Encoding.rows, num_rows=-1)}),
            *("data.source.tables.C3.num_rows", "-1"),
        ),
        (
            criteo(table_defaults=TableSpec(Encoding.hashing, num_rows=MAX_ROWS + 1)),
            *("data.source.table_defaults.num_rows", "1099511627777"),
        ),
        (
            criteo(table_defaults=TableSpec(Encoding.hashing, num_rows=2**63)),
            *("data.source.table_defaults.num_rows", "one of 65 bits"),
        ),
        (criteo(rows_per_chunk=10**5000), "data.source.rows_per_chunk", "one of 16611 bits"),
        (criteo(split=SplitSpec(seed=-(2**64))), "data.source.split.seed", "one of 66 bits"),
        (SyntheticSpec([2**31 + 1]), "data.synthetic.num_rows[0]", "2147483649"),
        (
            delimited(label=LABEL, user=USER, x=ColumnSpec(ColumnKind.dense, table="t")),
            *("data.source.columns.x.table", "'t'"),
        ),
        (
            delimited(label=ColumnSpec(ColumnKind.label, derive=Derive.hour_of_day), user=USER),
            *("data.source.columns.label.derive", "'hour_of_day'"),
        ),
        (
            delimited(label=LABEL, user=ColumnSpec(ColumnKind.categorical_list, separator="")),
            *("data.source.columns.user.separator", "''"),
        ),
        (
            delimited(label=LABEL, user=ColumnSpec(ColumnKind.sequence)),
            *("data.source.columns.user.max_length", "0"),
        ),
        (
            delimited(label=LABEL, a=ColumnSpec(ColumnKind.sequence, max_length=9), a_9=USER),
            *("data.source.columns.a", r"\['a_9'\]"),
        ),
        (
            criteo(joins={"u": JoinSpec(["u"], on="C1", format=SourceFormat.criteo)}),
            *("data.source.joins.u.format", "'criteo'"),
        ),
        (SyntheticSpec([]), "data.synthetic.num_rows", r"\[\]"),
        (SyntheticSpec([5, 1]), "data.synthetic.num_rows[1]", "1"),
        (SyntheticSpec([5, 5], mean_lengths=[1, 2, 3]), "data.synthetic.mean_lengths", "3"),
        (SyntheticSpec([5], drift_frac=1.5), "data.synthetic.drift_frac", "1.5"),
        (SyntheticSpec([5], click_rate=0), "data.synthetic.click_rate", "0"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(spec, key, got):
    if isinstance(spec, SourceSpec):
        spec = DataSpec(source=spec)
    elif isinstance(spec, SyntheticSpec):
        spec = DataSpec(synthetic=spec)
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}: expected .*, got ({got})\."):
        validate(spec, "data")


BAD_NAMES = [
    "",
    " ",
    ".",
    "..",
    "a/b",
    "a\\b",
    "/etc",
    "a@b",
    "a\nb",
    "a\0b",
    "a\x1b[31m",
    "a\u202eb",
]
BAD_NAMES += ["\ud800", "x" * 201, "\u00e9" * 101, "items", "forward", "_modules", "__class__"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_of_features_and_tables_are_refused(name):
    message = r"^data\.source\.columns[^\n]*: expected [^\n]+, got [^\n]+\. [A-Z][^\n]+\.$"
    table = ColumnSpec(ColumnKind.categorical, table=name)
    for columns in ({name: USER}, {"user": table}) if name else ({name: USER},):
        spec = DataSpec(source=delimited(label=LABEL, **columns))
        with pytest.raises(ValueError, match=message) as raised:
            validate(spec, "data")
        assert len(str(raised.value)) < 450


@pytest.mark.parametrize("name", ["x" * 200, "\u65e5\u672c", "\U0001f600", "a:b", "%s", "0", "_c0"])
def test_other_names_are_accepted(name):
    table = ColumnSpec(ColumnKind.categorical, table=name)
    validate(DataSpec(source=delimited(label=LABEL, **{name: table})))


def test_a_dense_column_may_have_the_name_of_an_attribute():
    validate(DataSpec(source=delimited(label=LABEL, user=USER, values=DENSE)))


def test_every_attribute_of_a_module_is_reserved():
    assert [name for name in dir(torch.nn.ModuleDict()) if not is_reserved(name)] == []


def test_good_specifications_pass():
    validate(DataSpec(source=criteo()))
    validate(DataSpec(synthetic=SyntheticSpec([5, 9], mean_lengths=[2.5])))
