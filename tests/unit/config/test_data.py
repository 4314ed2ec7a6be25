"""What a description of a log or of synthetic data may say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

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
from hotrec.config.names import is_reserved
from hotrec.config.validate import validate

LABEL, USER = ColumnSpec(ColumnKind.label), ColumnSpec(ColumnKind.categorical)
DENSE, SEQUENCE = ColumnSpec(ColumnKind.dense), ColumnKind.sequence


def criteo(**settings: Any) -> SourceSpec:
    return SourceSpec(SourceFormat.criteo, ["day_0"], **settings)


def delimited(**columns: ColumnSpec) -> SourceSpec:
    return SourceSpec(SourceFormat.delimited, ["log"], columns={"label": LABEL, **columns})


def test_columns_and_tables() -> None:
    kinds = [column.kind.name for column in columns_of(criteo()).values()]
    assert kinds == ["label"] + ["dense"] * 13 + ["categorical"] * 26
    assert list(tables_of(criteo())) == list(CRITEO_FEATURES)
    item = ColumnSpec(ColumnKind.categorical, table="videos")
    seen = ColumnSpec(ColumnKind.categorical_list, table="videos")
    spec = delimited(user=USER, item=item, seen=seen, values=DENSE)
    spec.tables["videos"] = TableSpec(min_count=7)
    assert {n: t.min_count for n, t in tables_of(spec).items()} == {"user": 1, "videos": 7}
    for data in (DataSpec(source=criteo()), DataSpec(source=spec)):
        validate(data)
    validate(DataSpec(synthetic=SyntheticSpec([5, 9], mean_lengths=[2.5])))


@pytest.mark.parametrize(
    ("spec", "key", "got"),
    [
        (criteo(separator=";;"), "separator", "';;'"),
        (criteo(split=SplitSpec(valid_frac=0.6, test_frac=0.5)), "split.valid_frac + test", "1.1"),
        (
            criteo(split=SplitSpec(SplitKind.time, column="I1", valid_from=5, test_from=4)),
            *("split.test_from", "4"),
        ),
        (criteo(tables={"C99": TableSpec()}), "tables.C99", "'C99'"),
        (criteo(tables={"C3": TableSpec(Encoding.hashing, num_rows=1)}), "tables.C3.num_rows", "1"),
        (criteo(table_defaults=TableSpec(num_rows=2**63)), "table_defaults.num", "one of 65 bits"),
        (criteo(rows_per_chunk=10**5000), "rows_per_chunk", "one of 16611 bits"),
        (delimited(), "columns", r"\['label'\]"),
        (delimited(user=USER, user_hot=USER), "columns", "both"),
        (delimited(user=USER, x=ColumnSpec(ColumnKind.dense, table="t")), "columns.x.table", "'t'"),
        (
            delimited(user=USER, label=ColumnSpec(ColumnKind.label, derive=Derive.hour_of_day)),
            *("columns.label.derive", "'hour_of_day'"),
        ),
        (delimited(user=ColumnSpec(SEQUENCE)), "columns.user.max_length", "0"),
        (delimited(a=ColumnSpec(SEQUENCE, max_length=9), a_9=USER), "columns.a", r"\['a_9'\]"),
        (
            criteo(joins={"u": JoinSpec(["u"], on="C1", format=SourceFormat.criteo)}),
            *("joins.u.format", "'criteo'"),
        ),
        (SyntheticSpec([5, 1]), "num_rows[1]", "1"),
        (SyntheticSpec([5, 5], mean_lengths=[1, 2, 3]), "mean_lengths", "3"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(spec: Any, key: str, got: str) -> None:
    kind = "source" if isinstance(spec, SourceSpec) else "synthetic"
    with pytest.raises(ValueError, match=rf"^data\.{kind}\.{re.escape(key)}.*: expected .*{got}"):
        validate(DataSpec(**{kind: spec}), "data")


BAD_NAMES = ["", "..", "a/b", "a\\b", "a@b", "a\nb", "a\0b", "a\x1b[31m", "a\u202eb", "\ud800"]
BAD_NAMES += ["x" * 201, "\u00e9" * 101, "items", "__class__"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_of_features_and_tables_are_refused(name: str) -> None:
    table = ColumnSpec(ColumnKind.categorical, table=name)
    for columns in ({name: USER}, {"user": table}) if name else ({name: USER},):
        with pytest.raises(ValueError, match=r"^data\.source\.columns[^\n]*: expected [^\n]+$"):
            validate(DataSpec(source=delimited(**columns)), "data")


@pytest.mark.parametrize("name", ["x" * 200, "\u65e5\u672c", "\U0001f600", "a:b", "%s", "0", "_c0"])
def test_other_names_are_accepted(name: str) -> None:
    validate(DataSpec(source=delimited(**{name: ColumnSpec(USER.kind, table=name)})))
    assert all(map(is_reserved, dir(torch.nn.ModuleDict())))
