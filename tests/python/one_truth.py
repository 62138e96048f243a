"""Layers on random patterns, and the check that all that a weight shows is of one pattern."""

import torch

from rarefy import BlockSparseLinear, BsrWeight


def layer(seed=0, k=10, n=7, block_shape=(4, 3), density=0.5, **options) -> BlockSparseLinear:
    generator = torch.Generator().manual_seed(seed)
    return BlockSparseLinear(k, n, density=density, block_shape=block_shape, generator=generator, **options)


def assert_one_truth(weight: BsrWeight, dense: torch.Tensor | None = None) -> None:
    """Products, to_dense, buffers and state_dict must all tell of one pattern."""
    x = torch.randn(3, weight.shape[1])
    dense = weight.to_dense().detach() if dense is None else dense
    torch.testing.assert_close(weight.linear(x).detach(), x @ dense.T)
    assert torch.equal(weight.to_dense(), dense)
    state = weight.state_dict()
    for name, index in zip(("crow_indices", "col_indices"), weight.pattern.indices(), strict=True):
        assert torch.equal(getattr(weight, name), index) and torch.equal(state[name], index)
