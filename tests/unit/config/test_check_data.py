import dataclasses

import pytest

from hotrec.config.check_data import check_data_spec
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


def criteo(**settings: object) -> SourceSpec:
    return SourceSpec(SourceFormat.criteo, ["day_0"], **settings)


def delimited(**columns: ColumnSpec) -> SourceSpec:
    return SourceSpec(SourceFormat.delimited, ["log"], columns=columns)


LABEL = ColumnSpec(ColumnKind.label)
USER = ColumnSpec(ColumnKind.categorical)


def test_criteo_has_its_own_columns():
    columns = columns_of(criteo())
    assert [c.kind.name for c in columns.values()] == ["label"] + ["dense"] * 13 + [
        "categorical"
    ] * 26
    assert list(tables_of(criteo())) == list(CRITEO_FEATURES)


def test_features_may_share_a_table():
    spec = delimited(
        label=LABEL,
        user=USER,
        item=ColumnSpec(ColumnKind.categorical, table="items"),
        seen=ColumnSpec(ColumnKind.categorical_list, table="items"),
    )
    spec.tables["items"] = TableSpec(min_count=7)
    assert {name: table.min_count for name, table in tables_of(spec).items()} == {
        "user": 1,
        "items": 7,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(), r"data: expected exactly one of source and synthetic, got 'none'|got none"),
        (DataSpec(criteo(), SyntheticSpec([3])), "data: expected exactly one"),
        (SourceSpec(SourceFormat.criteo, []), "data.source.files: expected at least one path"),
        (criteo(separator=";;"), "data.source.separator"),
        (criteo(rows_per_chunk=0), "data.source.rows_per_chunk: expected >= 1, got 0"),
        (criteo(split=SplitSpec(valid_frac=0.6, test_frac=0.5)), "less than 1, got 1.1"),
        (criteo(split=SplitSpec(valid_frac=-0.1)), "split.valid_frac: expected a fraction"),
        (criteo(split=SplitSpec(SplitKind.time)), "data.source.split.column"),
        (
            criteo(split=SplitSpec(SplitKind.time, column="I1", valid_from=5, test_from=4)),
            "split.test_from: expected >= valid_from, which is 5, got 4",
        ),
        (criteo(tables={"C99": TableSpec()}), "data.source.tables.C99: expected one of the tables"),
        (criteo(table_defaults=TableSpec(min_count=0)), "data.source.table_defaults.min_count"),
        (
            criteo(tables={"C3": TableSpec(Encoding.hashing, num_rows=1)}),
            "data.source.tables.C3.num_rows: expected >= 2 with hashing, got 1",
        ),
        (
            criteo(columns={"label": LABEL, "C27": USER}),
            "data.source.columns.C27: expected one of label, I1..I13, C1..C26, got 'C27'",
        ),
        (delimited(user=USER), "data.source.columns: expected exactly one column of kind label"),
        (delimited(label=LABEL), "data.source.columns: expected at least one categorical"),
        (delimited(label=LABEL, dense=USER), "data.source.columns.dense: expected another name"),
        (delimited(label=LABEL, **{"a/b": USER}), "without '/'"),
        (
            delimited(label=LABEL, user=USER, x=ColumnSpec(ColumnKind.dense, table="t")),
            "data.source.columns.x.table: expected none for this kind, got 't'",
        ),
        (
            delimited(label=ColumnSpec(ColumnKind.label, derive=Derive.hour_of_day), user=USER),
            "data.source.columns.label.derive",
        ),
        (
            delimited(label=LABEL, user=ColumnSpec(ColumnKind.categorical_list, separator="")),
            "data.source.columns.user.separator: expected one character, got ''",
        ),
        (
            criteo(joins={"u": JoinSpec(["users"], on="")}),
            "data.source.joins.u.on: expected a column of the log",
        ),
        (SyntheticSpec([]), "data.synthetic.num_rows: expected at least one table"),
        (SyntheticSpec([5, 1]), r"data.synthetic.num_rows\[1\]: expected >= 2"),
        (SyntheticSpec([5, 5], mean_lengths=[1, 2, 3]), "expected none, one or 2 values, got 3"),
        (SyntheticSpec([5], drift_frac=1.5), "data.synthetic.drift_frac"),
        (SyntheticSpec([5], click_rate=0), "data.synthetic.click_rate"),
        (SyntheticSpec([5], num_train=0), "data.synthetic.num_train: expected >= 1, got 0"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(spec, message):
    if isinstance(spec, SourceSpec):
        spec = DataSpec(source=spec)
    elif isinstance(spec, SyntheticSpec):
        spec = DataSpec(synthetic=spec)
    with pytest.raises(ValueError, match=message):
        check_data_spec(spec)


def test_good_specifications_pass():
    check_data_spec(DataSpec(source=criteo()))
    check_data_spec(DataSpec(synthetic=SyntheticSpec([5, 9], mean_lengths=[2.5])))


def test_specifications_can_be_structured_configurations():
    # omegaconf refuses frozen schemas and Literal (hydra issues), so neither may appear here.
    for kind in (SourceSpec, SyntheticSpec, DataSpec, ColumnSpec, TableSpec, JoinSpec, SplitSpec):
        assert not kind.__dataclass_params__.frozen
        assert all("Literal" not in str(field.type) for field in dataclasses.fields(kind))
