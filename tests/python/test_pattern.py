"""BsrPattern: one truth, shared and immutable; what it costs to move, and which others it lets in."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import rarefy
from one_truth import assert_one_truth, layer
from rarefy import BlockSparseLinear, BsrPattern, BsrWeight, ops


def pattern(mask=((1, 0, 1), (0, 0, 0), (0, 1, 1)), shape=(9, 10), block_shape=(4, 4)) -> BsrPattern:
    return BsrPattern.from_mask(torch.tensor(mask).bool(), shape=shape, block_shape=block_shape)


# The object ----------------------------------------------------------------------------------------


def test_sizes_indices_and_plan():
    p = pattern()
    assert (p.shape, p.block_shape, p.nnzb, p.grid) == (torch.Size((9, 10)), (4, 4), 4, (3, 3))
    assert p.crow_indices.tolist() == [0, 2, 2, 4] and p.col_indices.tolist() == [0, 2, 1, 2]
    assert torch.equal(p.plan, ops.bsr_plan(p.crow_indices, p.col_indices, 9, 10, 4, 4))
    assert p.density == 4 / 9 and p.is_padded and p.mask().sum() == 4
    assert p.positions().tolist() == [0, 2, 7, 8] and p.block_rows().tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_are_copied_in_and_out(dtype):
    crow, col = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    p = BsrPattern(crow, col, shape=(4, 4), block_shape=(2, 2))
    crow[1], col[0] = 0, 99
    p.crow_indices[1], p.col_indices[0] = 7, 7
    assert p.col_indices.tolist() == [1, 0] and p.crow_indices.tolist() == [0, 1, 2]


def test_equal_patterns_are_equal_and_copies_are_the_pattern_itself():
    p, q, other = pattern(), pattern(), pattern(((1, 1, 0), (0, 0, 0), (0, 1, 1)))
    assert p == q and hash(p) == hash(q) and p != other and p != pattern(shape=(9, 9)) and p != 3
    assert copy.deepcopy(p) is p and copy.copy(p) is p
    back = pickle.loads(pickle.dumps(p))
    assert back == p and torch.equal(back.plan, p.plan)


def test_a_twin_on_another_device_is_made_once_and_freed_with_its_last_user():
    p = pattern()
    twin = p.to("meta")
    assert twin.is_meta and twin.nnzb == 4 and p.to("cpu") is p and twin != p
    with pytest.raises(TypeError, match=r"\[BsrPattern.to\] .*; got one on the meta device"):
        twin.to("cpu")
    if torch.cuda.is_available():
        moved = p.to("cuda")
        assert moved is p.to("cuda") and moved.to("cpu") is p and moved == p
        gone = weakref.ref(moved)
        del moved
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"block_shape": (2**28, 1)}, "block_shape must be at most (256, 256)"),
        ({"block_shape": (1, 257)}, "got (1, 257)"),
        ({"block_shape": (2**63, 1)}, "block_shape must be at most 2147483647"),
        ({"shape": (2**63, 4)}, "shape and block_shape must be at most 2147483647"),
    ],
)
def test_sizes_that_waste_memory_or_overflow_are_refused_everywhere(change, part):
    sizes = {"shape": (4, 4), "block_shape": (2, 2)} | change
    index = torch.tensor([0, 1]), torch.tensor([0])
    n, k = sizes["shape"]
    calls = [
        lambda: BsrPattern(*index, **sizes),
        lambda: BsrWeight(torch.ones(1, 1, 1), *index, **sizes),
        lambda: BlockSparseLinear(k, n, block_shape=sizes["block_shape"]),
    ]
    names = ["BsrPattern", "BsrWeight", "BlockSparseLinear"]
    if n < 2**31:
        calls.append(lambda: BsrWeight.from_dense(torch.ones(n, k), block_shape=sizes["block_shape"]))
        linear = nn.Linear(k, n)
        calls.append(lambda: BlockSparseLinear.from_dense(linear, block_shape=sizes["block_shape"]))
        names += ["BsrWeight.from_dense"] * 2
    for name, call in zip(
        names, calls, strict=True
    ):  # by the first whom the sizes meet: nothing is allocated
        with pytest.raises(ValueError, match=rf"^\[{name}\] .+; got ") as caught:
            call()
        assert part in str(caught.value)


# Sharing -------------------------------------------------------------------------------------------


def test_copies_tied_layers_and_pickles_share_one_pattern():
    weight = layer().weight
    twin = BsrWeight.from_pattern(2 * weight.values.detach(), weight.pattern)
    assert twin.pattern is weight.pattern
    assert copy.deepcopy(weight).pattern is weight.pattern
    both = pickle.loads(pickle.dumps(nn.ModuleList([weight, twin])))
    assert both[0].pattern is both[1].pattern and both[0].pattern == weight.pattern
    alone = len(pickle.dumps(weight.pattern))
    assert len(pickle.dumps(nn.ModuleList([weight, twin]))) < len(pickle.dumps(nn.ModuleList([weight]))) + (
        alone + weight.values.nbytes + 2000
    )
    moved = copy.deepcopy(weight).double()
    assert moved.pattern is weight.pattern


def test_a_pattern_is_checked_and_planned_once_on_the_way_to_a_file_and_back(tmp_path, monkeypatch):
    calls = []
    plan = ops.bsr_plan
    monkeypatch.setattr(rarefy.pattern, "bsr_plan", lambda *a: calls.append(1) or plan(*a))
    model = nn.Sequential(nn.Linear(10, 7))
    rarefy.sparsify(model, {"0": "block:4x3@0.5"}, measure=False)
    assert len(calls) == 1
    rarefy.save_file(model, tmp_path / "m.safetensors")
    model(torch.randn(2, 10)).sum().backward()
    assert len(calls) == 1
    rarefy.load_file(nn.Sequential(nn.Linear(10, 7)), tmp_path / "m.safetensors")
    assert len(calls) == 2
    model.load_state_dict(copy.deepcopy(model).state_dict())  # the same pattern: nothing to plan
    assert len(calls) == 2
    with torch.device("meta"):
        empty = nn.Sequential(BlockSparseLinear(10, 7, density=0.5, block_shape=(4, 3)))
    before = len(calls)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert len(calls) == before + 1


class Copies(TorchDispatchMode):
    """Counts what torch runs whose results have at least so many elements and memory of their own."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.names = elements, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if torch.is_tensor(t)
        }
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.set_.source_Storage:  # safetensors views the mapped file
            return result
        for t in tree_flatten(result)[0]:
            large = torch.is_tensor(t) and t.numel() >= self.elements and not t.is_meta
            if large and (
                t.untyped_storage().data_ptr() not in before or func is torch.ops.aten.copy_.default
            ):
                self.names.append(str(func).removesuffix(".default"))
        return result


def test_values_are_copied_and_padding_is_checked_once_each_way(tmp_path, monkeypatch):
    """W from nn.Linear to a file and back, into dense and sparse layers."""
    checks = []
    for module in (rarefy.pattern_weight, rarefy.pattern_state):
        check = module.check_padding
        monkeypatch.setattr(module, "check_padding", lambda *a, check=check: checks.append(1) or check(*a))
    linear, mask = nn.Linear(64, 96), torch.rand(12, 8) < 0.6
    path, stored = tmp_path / "m.safetensors", int(mask.sum()) * 64
    with Copies(stored) as made:
        model = nn.Sequential(BlockSparseLinear.from_dense(linear, block_shape=(8, 8), mask=mask))
    assert made.names == ["aten.index.Tensor"] and not checks
    with Copies(stored) as made:
        rarefy.save_file(model, path)
    assert not made.names and not checks
    others = [BlockSparseLinear.from_dense(linear, block_shape=(8, 8), mask=m) for m in (mask, ~mask)]
    for module in (nn.Linear(64, 96), *others):
        skeleton = nn.Sequential(module)
        del checks[:]
        with Copies(stored) as made:
            rarefy.load_file(skeleton, path)
        assert len(made.names) == 1 and len(checks) == 1, (module, made.names)
        assert torch.equal(skeleton[0].weight.values, model[0].weight.values)
    state = model.state_dict()
    del checks[:]
    with Copies(stored) as made:
        skeleton.load_state_dict(state)
    assert made.names == ["aten.copy_"] and len(checks) == 1


def test_x_reaches_the_kernel_as_it_is_in_one_op():
    layer = BlockSparseLinear(48, 32, density=0.5, block_shape=(8, 8))
    seen = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), args[0].data_ptr()))
            return func(*args, **(kwargs or {}))

    for x in (torch.randn(3, 48), torch.randn(2, 3, 48), torch.randn(4, 50)[:, 1:49]):
        layer(x)
        del seen[:]
        with Ops():
            layer(x)
        assert seen == [("rarefy.bsr_linear.default", x.data_ptr())]


# Writers of buffers --------------------------------------------------------------------------------
# Meta and empty memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_after_to_meta_a_state_dict_loads(seed):
    model, source = layer(0), layer(seed)
    model.to("meta")
    assert model.weight.pattern.is_meta and model.weight.values.is_meta
    model.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 10)
    assert torch.equal(model(x), source(x))
    assert_one_truth(model.weight)


def test_after_to_empty_a_state_dict_loads():
    model, source = layer(0), layer(0)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    x = torch.randn(3, 10)
    assert torch.equal(model(x), source(x))
    other = layer(0).to("meta").to_empty(device="cpu")
    assert other(x).shape == (3, 7)  # memory without content is never seen as indices
    other.load_state_dict(layer(1).state_dict())
    assert torch.equal(other(x), layer(1)(x))


# Other patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.25, 0.5, 0.75])
def test_another_pattern_is_refused_unless_the_weight_lets_it_in(density):
    model, source = layer(0, density=0.5), layer(1, density=density)
    with pytest.raises(ValueError, match="must be of this module's pattern"):
        model.load_state_dict(source.state_dict())
    model.weight.strict_pattern = False
    values = model.weight.values
    model.load_state_dict(source.state_dict())
    assert model.weight.values is values
    x = torch.randn(3, 10)
    assert torch.equal(model(x), source(x))
    model(x).sum().backward()
    assert values.grad.shape == values.shape
    assert_one_truth(model.weight)


@pytest.mark.parametrize("block", [(1, 1), (2, 3)])
def test_transposed_patterns_are_those_that_are_made_for_it(device, block):
    mask = torch.rand(7, 9) < 0.4
    shape = (7 * block[0] - block[0] // 2, 9 * block[1])
    sizes = {"shape": shape, "block_shape": block}
    pattern = BsrPattern.from_mask(mask, **sizes, device=device)
    want = BsrPattern.from_mask(
        mask.T.contiguous(), shape=shape[::-1], block_shape=block[::-1], device=device
    )
    got, order = pattern.transposition()
    assert torch.equal(got.plan, want.plan)
    assert torch.equal(pattern.positions()[order.long()] // 9, got.indices()[1].long())
    assert pattern.transposition()[0] is got
    assert got.transposition()[0] == pattern
    values = torch.randn(pattern.nnzb, *block, device=device)
    one_by_one = BsrPattern.by_rows(*pattern.indices(), **sizes) if device == "cpu" else pattern
    for known in (pattern, one_by_one):
        other, moved = known.transposed(values)
        assert other == want
        assert torch.equal(other.plan, want.plan)
        assert torch.equal(moved, values[order.long()].mT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_plans_are_the_first_part_of_plans(dtype):
    pattern = BsrPattern.from_mask(torch.rand(300, 500) < 0.3, shape=(600, 500), block_shape=(2, 1))
    crow, col = (index.to(dtype) for index in pattern.indices())
    rows = BsrPattern.by_rows(crow, col, shape=(600, 500), block_shape=(2, 1))
    assert "plan" not in rows.__dict__
    assert torch.equal(rows.row_plan, pattern.plan[: len(rows.row_plan)])
    assert len(rows.row_plan) == 8 + len(crow) + len(col)
    assert rows == pattern
    assert torch.equal(pickle.loads(pickle.dumps(rows)).plan, pattern.plan)
    assert torch.equal(rows.plan, pattern.plan)


@pytest.mark.parametrize(
    "damage",
    [
        lambda crow, col: col.__setitem__(1, col[0].item()),
        lambda crow, col: col.__setitem__(slice(0, 2), col[:2].flip(0)),
        lambda crow, col: col.__setitem__(0, -1),
        lambda crow, col: col.__setitem__(-1, 500),
        lambda crow, col: col.__setitem__(5, 2**32 + col[5].item()),
        lambda crow, col: crow.__setitem__(0, 1),
        lambda crow, col: crow.__setitem__(-1, len(col) - 1),
        lambda crow, col: crow.__setitem__(3, crow[5].item()),
    ],
)
def test_row_plans_are_refused_where_plans_are(damage):
    pattern = BsrPattern.from_mask(torch.rand(300, 500) < 0.3, shape=(300, 500), block_shape=(1, 1))
    crow, col = (index.long() for index in pattern.indices())
    damage(crow, col)
    assert BsrPattern.by_rows(crow, col, shape=(300, 500), block_shape=(1, 1)) is None
    with pytest.raises(ValueError, match="must"):
        BsrPattern(crow, col, shape=(300, 500), block_shape=(1, 1))
