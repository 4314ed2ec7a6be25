"""Which samples are train, valid and test: decided sample by sample, the same in both passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrec.config.data import SplitKind, SplitSpec
from hotrec.data.columns import RawBlock
from hotrec.data.hashing import hash_numbers
from hotrec.data.readers import numbers_of

TRAIN, VALID, TEST = range(3)  # positions in hotrec.data.chunks.SPLITS


@dataclass(frozen=True)
class Splitter:
    """Divides the samples of a log.

    Args:
        spec: how.
        first_positions: for ``last``, position in the whole log of each file's first sample.
        num_positions: for ``last``, samples of the whole log.
        header_lines: lines before the first sample of a file.
    """

    spec: SplitSpec
    first_positions: tuple[int, ...] = ()
    num_positions: int = 0
    header_lines: int = 0

    def split_of(self, block: RawBlock, file: int) -> npt.NDArray[np.int8]:
        """Split of each sample, int8 (n,).

        Args:
            block: samples of one file.
            file: number of the file in the list.
        """
        spec = self.spec
        valid_from, test_from = spec.valid_from, spec.test_from
        match spec.kind:
            case SplitKind.time:
                values = numbers_of(block, spec.column).values
            case SplitKind.fraction:
                hashes = hash_numbers(spec.seed, file, block.numbers)
                values = hashes.astype(np.float64) / 2.0**64
                valid_from = 1 - spec.valid_frac - spec.test_frac
                test_from = 1 - spec.test_frac
            case SplitKind.last:
                in_file = block.numbers - 1 - self.header_lines
                values = (self.first_positions[file] + in_file).astype(np.float64)
                num_test = round(spec.test_frac * self.num_positions)
                num_valid = round(spec.valid_frac * self.num_positions)
                valid_from = self.num_positions - num_test - num_valid
                test_from = self.num_positions - num_test
        split = np.full(values.size, TRAIN, np.int8)
        split[values >= valid_from] = VALID
        split[values >= test_from] = TEST
        return split
