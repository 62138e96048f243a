"""sparsify and desparsify: a whole model, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from ._torch_private import has_hooks, has_tensor_hooks
from .activations import with_activation
from .checks import fail
from .conv import BlockSparseConv2d
from .dense import KINDS
from .layers import SPARSE, dense_of, find_layers
from .modules import BlockSparseLinear
from .patcher import BlockSparseModelPatcher, FilterFn
from .pattern_weight import PatternWeight
from .pseudo import PseudoBlockSparseLinear
from .report import Report
from .spec import Spec


def sparsify(
    model: nn.Module,
    patterns: Mapping[str, Any] | str | Spec,
    *,
    scores: Mapping[str, torch.Tensor] | None = None,
    filter_fn: FilterFn | None = None,
    dry_run: bool = False,
    measure: bool = True,
    tokens: int = 512,
    optimizer: Optimizer | None = None,
    fuse: bool = True,
) -> Report:
    r"""Makes the layers whose names match a pattern block-sparse, in place, keeping trained values.

    Args:
        model: any module; its nn.Linear layers and nn.Conv2d are candidates.
        patterns: regular expressions for whole qualified names, and what the layers become:
            {r"encoder\.layer\.\d+\.output\.dense": "block:16x16@0.5"} keeps half of the 16×16 blocks,
            "csr@0.1" a tenth of the single weights, "block:16x16@nonzero" each block that is not all zeros;
            "2:4" two of each four weights in a row and "bitmap@0.5" half of all, each with a bit for every
            element, for few tokens on a CPU;
            "block:16x1@0.5:bf16" stores values as bf16 under whatever dtype the layer computes in.
            "auto@0.5" chooses the blocks that are predicted to be fastest on this processor at `tokens`
            rows, and leaves dense what dense does faster; see rarefy.advise. "auto@nonzero" does so among
            the blocks, and single elements, that are not zero, for weights that were pruned before: nothing
            changes but the speed. "auto" is that where half of a layer is zero, and else "auto@0.5".
            Values keep the layer's dtype, but for "auto:bf16x" (also ":bf16", ":int8"; "auto@0.5:int8" …),
            the best blocks whose values are stored so, and "auto:any", whatever is predicted to be fastest:
            the layer's own dtype, bf16 and bf16x under float32, and int8 in layers in eval mode, as values
            of int8 do not train. On a GPU that is the own dtype. docs/numerics.md says what each rounds.
            Convolutions without groups count as the linear layer of their matrix. Where two patterns match
            a layer, the first counts. A spec alone is for all layers.
        scores: for some of the matched layers, by name, a tensor that ranks blocks instead of their L2
            norm: (N, K), summed over each block, or one number a block.
        filter_fn: called with name and module of each layer that would change; False keeps it dense.
        dry_run: report only, change nothing.
        measure: time each layer before and after, on inputs of `tokens` rows: about 0.2 s for each kind
            of layer, three times as long where the machine is busy.
        tokens: see `measure`; of a convolution, places of its output.
        optimizer: keeps its state for layers that are sparse already and become sparser; see below.
        fuse: whether feed-forward networks run as one op where nothing is recorded; see rarefy.fuse.

    Returns:
        A Report with one row for every layer that has a weight matrix: what it became, or why it stayed.
        Layers that cannot change without changing what the model computes stay: weights tied to
        another module, embeddings, parametrized layers, layers with hooks, subclasses of nn.Linear, layers
        smaller than a block. The projections of an nn.MultiheadAttention are layers ("attention.in_proj",
        "attention.out_proj"; "q_proj" … where sizes differ), and so is GPT-2's Conv1D. An nn.Conv2d takes
        blocks alone, of its weight as the matrix (O, KH · KW · C), and becomes a BlockSparseConv2d.

    A warning names a pattern that matches layers which must stay, and no others.

    Raises:
        ValueError: a pattern matches no layer, or only layers of earlier patterns (near names are listed);
            a spec, scores or densities that are not valid.
        TypeError: arguments of the wrong kind.

    On error the model is unchanged. A layer that is used at several places is replaced at all of them.
    Biases stay the same Parameters; `weight.values` are new ones: make the optimizer afterwards.

    A layer that is sparse already becomes sparser: within its format it keeps the blocks of largest norm (or
    score, which may also add some), and the Parameter; `optimizer` then keeps its state. In another format
    it is made anew of what it stores.
    """
    op = "sparsify"
    if not isinstance(model, nn.Module):
        fail(op, "model must be an nn.Module", type(model).__name__, TypeError)
    return BlockSparseModelPatcher.of(op, patterns).patch_model(
        model,
        scores=scores,
        filter_fn=filter_fn,
        dry_run=dry_run,
        measure=measure,
        tokens=tokens,
        optimizer=optimizer,
        fuse=fuse,
    )


def desparsify(model: nn.Module) -> list[str]:
    """Turns every block-sparse layer of a model back into what it was, exactly, in place.

    Layers that share a weight share it afterwards, too; biases stay the same Parameters. A layer with an
    activation becomes an nn.Sequential of the dense layer and the activation. Returns the names of the
    layers that changed.

    Raises:
        TypeError: `model` is not a module, or is itself a sparse layer (use `.to_dense()`).
        ValueError: a layer has hooks, which the new one would lose, or a forward of its own, which may
            compute something else than nn.Linear; nothing changes then.
    """
    op = "desparsify"
    sparse = SPARSE | PseudoBlockSparseLinear
    if not isinstance(model, nn.Module) or isinstance(model, sparse):
        got = type(model).__name__
        fail(
            op,
            "model must be an nn.Module around the sparse layers (a layer has .to_dense())",
            got,
            TypeError,
        )
    layers = [layer for layer in find_layers(model, rewritten=True) if isinstance(layer.module, sparse)]
    dense, shared = [], {}
    for layer in layers:
        module = layer.module
        if has_hooks(module) or any(map(has_tensor_hooks, module.parameters())):
            fail(op, "a layer must have no hooks, which the new one would lose", layer.name)
        if is_parametrized(module) or is_parametrized(module.weight):
            fail(op, "a layer must not be parametrized (torch.nn.utils.parametrize)", layer.name)
        plain = (BlockSparseLinear, BlockSparseConv2d, PseudoBlockSparseLinear)
        if type(module) not in plain or "forward" in vars(module):
            requirement = "a layer must not have a forward of its own, which the dense one would not have"
            fail(op, requirement, f"{layer.name}, a {type(module).__name__}")
        activation = getattr(module, "activation", None)
        linear = dense_of(module)
        linear.bias = layer.module.bias  # the same Parameter, as in sparsify
        made = _as_it_was(op, layer.name, module, linear)
        # Layers of one class, that is: a Conv1D has its weight transposed.
        made.weight = shared.setdefault((type(made), _key(module.weight)), made.weight)
        dense.append(made if activation is None else with_activation(made, activation))
    for layer, linear in zip(layers, dense, strict=True):
        layer.replace(linear)
    return [layer.name for layer in layers]


def _as_it_was(op: str, name: str, module: nn.Module, linear: nn.Linear) -> nn.Module:
    """The dense layer that a sparse one stands for: an nn.Linear, or one of another library."""
    if getattr(module, "stands_for", None) is None:
        return linear
    kind = KINDS[module.stands_for]
    if (found := kind.type()) is None:
        fail(op, f"{kind.module} must be imported to give {name} back as a {kind.name}", "no such module")
    return kind.from_linear(found, linear)


def _key(weight: Any) -> Any:
    """The same for weights that are tied: one module, or one Parameter on equal patterns."""
    return (weight.values, weight.pattern) if isinstance(weight, PatternWeight) else weight
