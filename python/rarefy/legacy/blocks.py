"""Masks beside weights, and blocks: torch.nn.utils.prune, pytorch_block_sparse, torchao, nn_pruning."""

from __future__ import annotations

import torch

from ..checks import check_dtype, fail
from ..csr import CsrWeight
from ..sparse_weight import SparseWeight
from ..weight import BsrWeight
from .readers import OP, Reader, check, csr_of_mask

Pieces = dict[str, torch.Tensor]
Shape = tuple[int, int] | None


def _prune(name: str, pieces: Pieces, _: Shape) -> SparseWeight | torch.Tensor:
    original, mask = pieces["_orig"], pieces["_mask"]
    check_dtype(OP, name, original.dtype)
    check(
        mask.shape == original.shape, f"the mask of {name} must be {tuple(original.shape)}", tuple(mask.shape)
    )
    kept = mask != 0
    if original.ndim != 2:  # a convolution, a bias
        return torch.where(kept, original * mask.to(original.dtype), 0)
    return csr_of_mask((original * mask.to(original.dtype))[kept], kept)


def _block_sparse(name: str, pieces: Pieces, _: Shape) -> BsrWeight:
    """Blocks (C, R) in any order; (block column, number of the block) for each place, by block row."""
    data = pieces[".data"]
    check_dtype(OP, f"{name}.data", data.dtype)
    cols, starts, ends = pieces[".cols_a"].long(), pieces[".row_start_ends_a"], pieces[".col_start_ends_b"]
    check(cols.ndim == 2 and cols.shape[1] == 2, f"{name}.cols_a must be (blocks, 2)", tuple(cols.shape))
    count = len(cols)
    whole = data.ndim == 2 and count > 0 and data.shape[0] % count == 0 and data.shape[1] > 0
    check(whole, f"{name}.data must be ({count} blocks × rows, columns), at least one", tuple(data.shape))
    r, c = data.shape[0] // count, data.shape[1]
    once = torch.equal(cols[:, 1].sort().values, torch.arange(count))
    check(once, f"{name}.cols_a[:, 1] must name each of {count} blocks once", "others")
    check(starts.ndim == ends.ndim == 1, f"{name}.row_start_ends_a must be a vector", tuple(starts.shape))
    shape = ((len(starts) - 1) * r, (len(ends) - 1) * c)
    values = data.reshape(count, c, r).transpose(1, 2)[cols[:, 1]].contiguous()
    return BsrWeight(values, starts.int(), cols[:, 0].int(), shape=shape, block_shape=(r, c))


def _dimensions(name: str, pieces: Pieces, shape: Shape) -> CsrWeight | torch.Tensor:
    """Rows and columns that stay, as a smaller layer, and which they are."""
    weight = pieces[".linear.weight"]
    check_dtype(OP, f"{name}.linear.weight", weight.dtype)
    check(weight.ndim == 2, f"{name}.linear.weight must be a matrix", tuple(weight.shape))
    sizes = []
    for axis, ending in enumerate((".output_expand", ".input_extract")):
        index = pieces.get(ending)
        if index is None:
            sizes.append((torch.arange(weight.shape[axis]), weight.shape[axis]))
            continue
        if shape is None:
            fail(OP, f"a model must say how large {name} is: rarefy.load_legacy(model, …)", ending)
        ascending = index.ndim == 1 and len(index) == weight.shape[axis] and bool((index.diff() > 0).all())
        inside = ascending and (not len(index) or (int(index[0]) >= 0 and int(index[-1]) < shape[axis]))
        requirement = f"{name}{ending} must be {weight.shape[axis]} ascending positions below {shape[axis]}"
        check(inside, requirement, index.flatten()[:8].tolist())
        sizes.append((index.long(), shape[axis]))
    (rows, n), (cols, k) = sizes
    mask = torch.zeros(n, k, dtype=torch.bool)
    mask[rows[:, None], cols] = True
    return csr_of_mask(weight.flatten(), mask)


def expanded_bias(name: str, pieces: Pieces, shape: Shape) -> torch.Tensor | None:
    """The bias of _dimensions with zeros for the rows that are gone."""
    bias = pieces.get(".linear.bias")
    if bias is None or ".output_expand" not in pieces:
        return bias
    check(
        bias.shape == pieces[".output_expand"].shape,
        f"{name}.linear.bias must fit .output_expand",
        bias.shape,
    )
    return bias.new_zeros(shape[0]).index_copy_(0, pieces[".output_expand"].long(), bias)


def torch_sparse(name: str, tensor: torch.Tensor) -> SparseWeight:
    """A tensor of torch's own sparse layouts."""
    check(tensor.ndim == 2, f"{name} must be a matrix", tuple(tensor.shape))
    tensor = tensor.detach().cpu()
    if tensor.layout == torch.sparse_bsr:
        return BsrWeight.from_torch(tensor)
    if tensor.layout != torch.sparse_csr:
        tensor = tensor.to_sparse_csr()
    return CsrWeight.from_torch(tensor)


class BlockSparseTensor(torch.Tensor):
    """Stands for torchao's class of this name when its pickles are read; holds what they hold."""

    @staticmethod
    def __new__(cls, *args: object, **kwargs: object) -> BlockSparseTensor:
        """Only pickles make one."""
        raise TypeError("a BlockSparseTensor stands for one in a file")

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Nothing can be computed with one but what it holds."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        return fail(OP, "a tensor of torchao must be read by rarefy.load_legacy", func, TypeError)


def torchao_blocks(name: str, tensor: BlockSparseTensor) -> BsrWeight:
    """The weight in a pickle of torchao's BlockSparseTensor."""
    crow, col, values = (getattr(tensor, f"bsr_{p}", None) for p in ("crow_indices", "col_indices", "values"))
    whole = all(isinstance(t, torch.Tensor) for t in (crow, col, values)) and values.ndim == 3
    check(whole, f"{name} must hold bsr_crow_indices, bsr_col_indices and bsr_values", type(values).__name__)
    check_dtype(OP, name, values.dtype)
    arrays = (values.detach().cpu().contiguous(), crow.cpu(), col.cpu())
    return BsrWeight(*arrays, shape=tuple(tensor.shape), block_shape=tuple(values.shape[1:]))


READERS = (
    Reader("torch.nn.utils.prune (weight_orig and weight_mask)", ("_orig", "_mask"), _prune),
    Reader(
        "pytorch_block_sparse",
        (".cols_a", ".data", ".row_start_ends_a", ".col_start_ends_b"),
        _block_sparse,
        optional=(".rows_b", ".blocks"),
    ),
    Reader(
        "nn_pruning's SparseDimensionsLinear",
        (".linear.weight", ".output_expand"),
        _dimensions,
        optional=(".input_extract", ".linear.bias"),
        weight=".weight",
    ),
    Reader(
        "nn_pruning's SparseDimensionsLinear",
        (".linear.weight", ".input_extract"),
        _dimensions,
        optional=(".linear.bias",),
        weight=".weight",
    ),
)
