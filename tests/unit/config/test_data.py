import re

import pytest

from hotrec.config.data import (
    CRITEO_FEATURES,
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
from hotrec.config.validate import validate


def criteo(**settings) -> SourceSpec:
    return SourceSpec(SourceFormat.criteo, ["day_0"], **settings)


def delimited(**columns: ColumnSpec) -> SourceSpec:
    return SourceSpec(SourceFormat.delimited, ["log"], columns=columns)


LABEL, USER = ColumnSpec(ColumnKind.label), ColumnSpec(ColumnKind.categorical)


def test_criteo_has_its_own_columns():
    kinds = [column.kind.name for column in columns_of(criteo()).values()]
    assert kinds == ["label"] + ["dense"] * 13 + ["categorical"] * 26
    assert list(tables_of(criteo())) == list(CRITEO_FEATURES)


def test_features_may_share_a_table():
    item = ColumnSpec(ColumnKind.categorical, table="items")
    seen = ColumnSpec(ColumnKind.categorical_list, table="items")
    spec = delimited(label=LABEL, user=USER, item=item, seen=seen)
    spec.tables["items"] = TableSpec(min_count=7)
    assert {n: t.min_count for n, t in tables_of(spec).items()} == {"user": 1, "items": 7}


@pytest.mark.parametrize(
    ("spec", "key", "got"),
    [
        (DataSpec(), "data", "'none'|none"),
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


def test_good_specifications_pass():
    validate(DataSpec(source=criteo()))
    validate(DataSpec(synthetic=SyntheticSpec([5, 9], mean_lengths=[2.5])))
