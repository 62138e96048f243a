"""PatternChange: values, gradients and optimizer state go with their blocks; the Parameter stays."""

import copy

import pytest
import torch
from torch import nn

import rarefy
from rarefy import BlockSparseLinear, BsrPattern, BsrWeight, CsrWeight, PatternChange
from rarefy.masks import from_blocks, random_blocks

SHAPE, BLOCK = (30, 41), (4, 3)  # 8 × 14 blocks, padded at both edges


def pattern(blocks: int, seed: int, block_shape=BLOCK) -> BsrPattern:
    grid = (-(-SHAPE[0] // block_shape[0]), -(-SHAPE[1] // block_shape[1]))
    density = blocks / (grid[0] * grid[1])
    mask = random_blocks(grid, density, torch.Generator().manual_seed(seed))
    return BsrPattern.from_mask(mask, shape=SHAPE, block_shape=block_shape)


def spread(p: BsrPattern, tensor: torch.Tensor) -> torch.Tensor:
    """(nnzb, R, C) of a pattern as a padded dense matrix: the oracle, one block at a time."""
    rows, cols = p.grid
    blocks = torch.zeros(rows * cols, *p.block_shape)
    for e, position in enumerate(p.positions().tolist()):
        blocks[position] = tensor.detach()[e].reshape(p.block_shape)
    r, c = p.block_shape
    return from_blocks(blocks.reshape(rows, cols, r, c), (rows * r, cols * c))


def expected(old: BsrPattern, new: BsrPattern, tensor: torch.Tensor) -> torch.Tensor:
    keep = spread(old, torch.ones(old.nnzb, *old.block_shape)) * spread(
        new, torch.ones(new.nnzb, *new.block_shape)
    )
    return spread(old, tensor) * keep


PAIRS = [(50, 50), (50, 20), (20, 50), (0, 30), (30, 0), (112, 7), (7, 112), (0, 0)]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_blocks_in_both_patterns_keep_what_they_hold(before, after, device):
    old, new = pattern(before, 1), pattern(after, 2)
    change = PatternChange(old.to(device), new)
    tensor = torch.randn(before, *BLOCK)
    moved = change.move(tensor.to(device))
    assert moved.device.type == device and moved.shape == (after, *BLOCK)
    assert torch.equal(spread(new, moved.cpu()), expected(old, new, tensor))
    assert change.kept() == int((old.mask() & new.mask()).sum())
    assert torch.equal(PatternChange(old, old).move(tensor), tensor)


def trained(optimizer_type, p: BsrPattern, kind="bsr", **options):
    """A layer after some steps, its optimizer, and a gradient."""
    torch.manual_seed(5)
    values = BsrWeight.from_dense(torch.randn(SHAPE), block_shape=p.block_shape, mask=p.mask()).values
    if kind == "csr":
        weight = CsrWeight.from_pattern(values.detach().flatten(), p)
    else:
        weight = BsrWeight.from_pattern(values, p)
    layer = BlockSparseLinear.from_weight(weight, torch.randn(SHAPE[0]))
    optimizer = optimizer_type(layer.parameters(), lr=0.05, **options)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(6, SHAPE[1])).square().mean().backward()
        optimizer.step()
    return layer, optimizer


OPTIMIZERS = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(50, 50), (50, 20), (20, 50)])
@pytest.mark.parametrize("kind", ["bsr", "csr"])
def test_values_gradient_and_state_move_and_training_goes_on(optimizer_type, options, before, after, kind):
    block_shape = BLOCK if kind == "bsr" else (1, 1)
    old, new = pattern(before, 1, block_shape), pattern(after, 2, block_shape)
    layer, optimizer = trained(optimizer_type, old, kind, **options)
    weight, values = layer.weight, layer.weight.values
    state = optimizer.state[values]
    saved = {
        k: t.clone() for k, t in state.items() if isinstance(t, torch.Tensor) and t.shape == values.shape
    }
    rest = {k: copy.copy(t) for k, t in state.items() if k not in saved}
    data, grad, memory = values.detach().clone(), values.grad.clone(), values.data_ptr()

    change = weight.change_pattern(new, optimizer)
    assert change.new == new and weight.pattern == new
    assert weight.values is values and any(p is values for p in optimizer.param_groups[0]["params"])
    assert (values.data_ptr() == memory) == (before == after)
    for key, was, now in [("data", data, values), ("grad", grad, values.grad)] + [
        (key, was, state[key]) for key, was in saved.items()
    ]:
        assert now.shape == values.shape, key
        assert torch.equal(spread(new, now), expected(old, new, was)), key
    assert all(state[key] == value for key, value in rest.items())

    oracle = nn.Linear(SHAPE[1], SHAPE[0])
    oracle.load_state_dict({"weight": weight.to_dense().detach(), "bias": layer.bias.detach()})
    x = torch.randn(6, SHAPE[1])
    torch.testing.assert_close(layer(x), oracle(x))
    optimizer.zero_grad()
    layer(x).square().mean().backward()
    optimizer.step()
    assert torch.isfinite(values).all() and not torch.equal(values, data)


def test_new_blocks_can_start_with_given_values():
    old, new = pattern(20, 1), pattern(50, 2)
    dense = torch.randn(SHAPE)
    weight = BsrWeight.from_dense(dense, block_shape=BLOCK, mask=old.mask())
    source = BsrWeight.from_dense(2 * dense, block_shape=BLOCK, mask=new.mask())
    weight.change_pattern(new, values=source.values)
    full, doubled = weight.to_dense(), source.to_dense()
    both = spread(old, torch.ones(20, *BLOCK))[: SHAPE[0], : SHAPE[1]].bool()
    assert torch.equal(full[both], (doubled / 2)[both]) and torch.equal(full[~both], doubled[~both])


def test_a_frozen_layer_and_one_without_gradient_change():
    weight = BsrWeight.from_dense(torch.randn(SHAPE).to(torch.int8), block_shape=BLOCK)
    weight.change_pattern(pattern(20, 1))
    assert weight.nnzb == 20 and weight.values.dtype == torch.int8 and weight.values.grad is None


def test_weights_tied_by_their_parameter_change_together():
    first = BsrWeight.from_dense(torch.randn(SHAPE), block_shape=BLOCK, density=0.5)
    second = BsrWeight.from_pattern(first.values, first.pattern)
    first.change_pattern(pattern(20, 1))
    assert second.values is first.values and second.pattern is first.pattern
    assert torch.equal(first.to_dense(), second.to_dense())


def test_a_pending_backward_notices():
    weight = BsrWeight.from_dense(torch.randn(SHAPE), block_shape=BLOCK, density=0.5)
    x = torch.randn(3, SHAPE[1], requires_grad=True)
    y = weight.linear(x)
    weight.change_pattern(pattern(20, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_pending_backward_notices_blocks_that_move_in_place():
    weight = BsrWeight.from_dense(torch.randn(SHAPE), block_shape=BLOCK, mask=pattern(50, 1).mask())
    y = weight.linear(torch.randn(3, SHAPE[1], requires_grad=True))
    weight.change_pattern(pattern(50, 2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tensors_of_any_dtype_and_layout_move_in_place(device):
    old, new = pattern(50, 1).to(device), pattern(50, 2)
    change = PatternChange(old, new)
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool):
        tensor = torch.randn(50, *BLOCK).to(device, dtype)
        strided = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        want = change.move(tensor)
        assert torch.equal(spread(new, want.cpu().float()), expected(old, new, tensor.cpu().float()))
        for moved in (tensor, strided):
            memory = moved.data_ptr()
            rarefy.pattern_change.move_blocks_(moved, change.source)
            assert torch.equal(moved, want) and moved.data_ptr() == memory


def test_the_op_refuses_sources_that_would_read_elsewhere():
    blocks = torch.zeros(3, 4, dtype=torch.uint8)
    for source in ([0, 3, -1], [1, 0, 2], [-2, 0, 1]):
        for op in (torch.ops.rarefy._move_blocks, torch.ops.rarefy._move_blocks_):
            with pytest.raises(ValueError, match=r"\[_move_blocks\] source must be -1, or ascend within"):
                op(blocks, torch.tensor(source))
    with pytest.raises(ValueError, match="blocks must be contiguous uint8"):
        torch.ops.rarefy._move_blocks(blocks.float(), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="source must have 3 elements; got 2"):
        torch.ops.rarefy._move_blocks_(blocks, torch.tensor([0, 1]))


def test_what_cannot_move_is_named_and_nothing_changes():
    layer, optimizer = trained(torch.optim.AdamW, pattern(50, 1))
    weight = layer.weight
    before, values = weight.pattern, weight.values.detach().clone()
    optimizer.state[weight.values]["row"] = torch.ones(50)
    cases = [
        (lambda: weight.change_pattern(pattern(20, 2), optimizer), ValueError, "the optimizer's 'row' must"),
        (lambda: weight.change_pattern(pattern(20, 2), {}), TypeError, "optimizer must be a torch.optim"),
        (lambda: weight.change_pattern(pattern(20, 2, (2, 3))), ValueError, "block_shape (4, 3); got"),
        (lambda: weight.change_pattern(torch.ones(8, 14)), TypeError, "new must be a BsrPattern"),
        (lambda: weight.change_pattern(pattern(20, 2).to("meta")), ValueError, "new must hold indices"),
        (
            lambda: weight.change_pattern(pattern(20, 2), values=torch.ones(3, 4, 3)),
            ValueError,
            "values must be of shape (20, 4, 3); got (3, 4, 3)",
        ),
    ]
    for call, kind, part in cases:
        with pytest.raises(kind, match=r"^\[PatternChange(\.\w+)?\] .+; got ") as caught:
            call()
        assert part in str(caught.value)
        assert weight.pattern is before and torch.equal(weight.values, values)


def test_loading_another_pattern_keeps_the_optimizer_usable():
    layer, optimizer = trained(torch.optim.AdamW, pattern(50, 1))
    other, its_optimizer = trained(torch.optim.AdamW, pattern(20, 2))
    rarefy.set_strict_pattern(layer, False)
    layer.load_state_dict(other.state_dict())  # as a Trainer's resume does: first the model …
    optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))  # … then the optimizer
    for _ in range(2):
        for model, steps in ((layer, optimizer), (other, its_optimizer)):
            torch.manual_seed(7)
            steps.zero_grad()
            model(torch.randn(6, SHAPE[1])).square().mean().backward()
            steps.step()
    assert layer.weight.pattern == other.weight.pattern
    assert torch.equal(layer.weight.values, other.weight.values)


# sparsify a second time ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["block:4x4", "csr"])
def test_sparsify_again_at_a_lower_density(form):
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 16))
    rarefy.sparsify(model, {"0|2": f"{form}@0.5"}, measure=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 32)).square().mean().backward()
        optimizer.step()
    weight, values = model[0].weight, model[0].weight.values
    dense = model[0].to_dense()
    moments = {k: v.clone() for k, v in optimizer.state[values].items() if k != "step"}
    wanted = BlockSparseLinear.from_dense(dense, f"{form}@0.25").weight
    old = weight.pattern

    report = rarefy.sparsify(model, {"0|2": f"{form}@0.25"}, measure=False, optimizer=optimizer)
    assert [row.name for row in report.replaced] == ["0", "2"] and report["0"].density == 0.25
    assert model[0].weight is weight and weight.values is values
    assert weight.pattern == wanted.pattern and torch.equal(weight.to_dense(), wanted.to_dense())
    for key, was in moments.items():
        assert torch.equal(optimizer.state[values][key], PatternChange(old, weight.pattern).move(was)), key
    again = rarefy.sparsify(model, {"0": f"{form}@0.25"}, measure=False)
    assert "already" in again["0"].reason
    assert "already" in rarefy.sparsify(model, {"0": f"{form}@0.75"}, measure=False)["0"].reason


def test_sparsify_again_in_another_format_with_scores_and_dry():
    model = nn.Sequential(nn.Linear(32, 24))
    rarefy.sparsify(model, {"0": "block:4x4@0.5"}, measure=False)
    layer, dense = model[0], model[0].to_dense().weight
    before = layer.weight.pattern
    rarefy.sparsify(model, {"0": "block:4x4@0.25"}, measure=False, dry_run=True)
    assert layer.weight.pattern is before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^\[patch_model\] layer 0: .*optimizer.*; got block:4x4 to csr"):
        rarefy.sparsify(model, {"0": "csr@0.25"}, measure=False, optimizer=optimizer)
    rarefy.sparsify(model, {"0": "csr@0.25"}, measure=False)
    assert model[0] is layer and isinstance(layer.weight, CsrWeight)
    assert torch.equal(layer.weight.to_dense(), CsrWeight.from_dense(dense, density=0.25).to_dense())
    scores = torch.rand(24, 32)
    rarefy.sparsify(model, {"0": "csr@0.5"}, measure=False, scores={"0": scores})  # scores may grow it
    assert torch.equal(layer.weight.block_mask(), CsrWeight.from_dense(scores, density=0.5).block_mask())


@pytest.mark.parametrize("form", ["block:4x3", "csr"])
def test_fewer_blocks_while_an_earlier_loss_is_alive(form):
    layer = BlockSparseLinear.from_dense(nn.Linear(41, 30), f"{form}@0.5")
    weight, x = layer.weight, torch.randn(3, 41)
    loss = layer(x).square().mean()
    loss.backward()
    mask = weight.block_mask()
    mask[::2] = False
    weight.change_pattern(BsrPattern.from_mask(mask, shape=(30, 41), block_shape=weight.block_shape))
    again = layer(x).square().mean()
    again.backward()  # was: an invalid gradient, of the size that the values had before
    assert weight.values.grad.shape == weight.values.shape and loss.grad_fn is not None
