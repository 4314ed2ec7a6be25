import numpy as np
import pytest

from hotrec.cost_model.blocks import Block, check_block
from tests.unit.cost_model.samples import SCHEMA, make_samples


def changed(tag_lengths=None, **columns):
    block = make_samples(10)
    lengths = block.lengths if tag_lengths is None else {"tags": np.array(tag_lengths)}
    return Block(10, {**block.rows, **columns}, lengths)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (changed(user=np.zeros(10)), "float64"),
        (changed(user=np.where(np.arange(10) == 7, 50, 0)), r"user at sample 107: .*49, got 50"),
        (changed([2, 0, 1, *[0] * 7], tags=np.array([0, 1, 9])), "tags at sample 102: .*got 9"),
        (changed(user=np.zeros(9, np.int32)), r"user at sample 100: .*\(9,\)"),
        (changed(other=np.zeros(10, np.int32)), "'other'"),
        (changed([-1] * 10), "-1 -1"),
    ],
)
def test_check_refuses(block, message):
    with pytest.raises(ValueError, match=message):
        check_block(block, SCHEMA, position=100)
