"""Records what the HSTU layer of torch-rechub 0.9.0, which is as in the paper, computes.

``pip install torch-rechub==0.9.0``, which is not needed by the tests, and ``python -m
tests.unit.models.rechub`` write the record. Its weights are drawn. Its biases of positions and of
the last linear layer, which hotrec's layer does not have, are zero, and its eps is hotrec's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

RECORD = Path(__file__).with_name("rechub_hstu_layer.npz")
# Divisor of the scores is the number of tokens of a sample.
DIM, NUM_HEADS, ATTENTION_DIM, LINEAR_DIM, NUM_TOKENS = 6, 2, 3, 4, 7


def main() -> None:
    from torch_rechub.basic.layers import HSTULayer

    torch.manual_seed(0)
    layer = HSTULayer(DIM, NUM_HEADS, ATTENTION_DIM, LINEAR_DIM, 0.0, NUM_TOKENS).double()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.normal_()
            if name.startswith("rab.") or name == "proj2.bias":
                weight.zero_()
    layer.norm_in.eps = layer.norm_attn.eps = 1e-6
    tokens = torch.randn(3, NUM_TOKENS, DIM, dtype=torch.float64)
    # Padded at the front, at the end, and not at all.
    is_token = torch.ones(3, NUM_TOKENS, dtype=torch.bool)
    is_token[0, :3] = is_token[1, -2:] = False
    with torch.no_grad():
        outputs = layer(tokens, padding_mask=is_token)
    weights = {name: weight.numpy() for name, weight in layer.state_dict().items()}
    inputs = {"tokens": tokens.numpy(), "is_token": is_token.numpy()}
    np.savez(RECORD, **inputs, **weights, outputs=outputs.numpy())


if __name__ == "__main__":
    main()
