"""The rows that a rank relays to the ranks of its host, each of which crosses the network once.

With H hosts of G ranks, rank r is local rank r mod G of host r // G, and rail l is the set of ranks
with local rank l. A row whose owner is on rail l is requested from local rank l, the relay, which
drops the host's duplicates and requests the union from the owner on its own rail. Rows return the
same way; gradients are summed by the relay, in the order of local ranks, before they cross.
HybridBackend de-duplicates twice likewise (https://github.com/DeepRec-AI/HybridBackend, PR 130);
under look-ahead both steps run ahead of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotrec.embedding.owned_rows import RowOwners
from hotrec.embedding.update_rules import RowSums


class Union:
    """The union of the rows of one group that the ranks of a host request from one of them.

    Args:
        positions_K: Positions on their owners, int (K,), in the order of local ranks, for each of
            them in the order of hosts, distinct within a host.
        num_from_GH: The number of rows of each local rank and host.
        owners: The owners of the rows.
    """

    def __init__(
        self,
        positions_K: torch.Tensor,
        num_from_GH: Sequence[Sequence[int]],
        owners: RowOwners,
    ) -> None:
        num_hosts, num_positions = len(num_from_GH[0]), owners.num_positions
        nums = torch.tensor(num_from_GH, device=positions_K.device).view(-1)
        host_K = torch.arange(num_hosts, device=nums.device).repeat(len(num_from_GH))
        host_K = torch.repeat_interleave(host_K, nums, output_size=positions_K.numel())
        keys_K = positions_K + host_K * num_positions
        # Add up values of all requested rows, (K, D) -> (U, D), in the order of local ranks.
        self.sums = RowSums(keys_K, num_hosts * num_positions)
        keys_U = self.sums.rows_U
        self.positions_U = (keys_U % num_positions).to(owners.sent_type)
        ends_H = (torch.arange(num_hosts, device=nums.device) + 1) * num_positions
        # By host of the owner, int64 (H,).
        self.num_to_H = torch.searchsorted(keys_U, ends_H).diff(prepend=nums.new_zeros(1))

    def sums_of(self, places: torch.Tensor) -> RowSums:
        """The same for some of the requested rows, int64 (K',) in the union, and their union."""
        return RowSums(places, max(1, self.positions_U.numel()))
