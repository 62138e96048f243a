"""Whoever writes to the copies of a pattern, edits, averages and DDP: the next use puts it right."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rarefy
from one_truth import assert_one_truth, layer
from ranks import one_rank, results_of_ranks


def test_an_edited_index_is_put_back_with_a_warning():
    weight = layer().weight
    dense = weight.to_dense().detach().clone()
    weight.col_indices[0] += 1
    with pytest.warns(UserWarning, match="put back: weight.change_pattern changes a pattern"):
        weight.linear(torch.randn(2, 10))
    assert_one_truth(weight, dense)
    weight.crow_indices.zero_()
    with pytest.warns(UserWarning, match="put back"):
        weight.state_dict()
    assert_one_truth(weight, dense)
    weight.col_indices = torch.zeros_like(weight.col_indices)
    with pytest.warns(UserWarning, match="put back"):
        assert torch.equal(weight.to_dense(), dense)
    assert_one_truth(weight, dense)


def test_writing_the_same_indices_changes_nothing():
    weight = layer().weight
    before = weight.pattern
    for index in (weight.crow_indices, weight.col_indices):
        index.copy_(index.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weight.pattern is before


@pytest.mark.filterwarnings("ignore:.*put back")
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.999), get_ema_multi_avg_fn(0.5)])
def test_averaged_models_average_values_and_keep_the_pattern(average):
    model = layer(k=300, n=200, block_shape=(4, 4))
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    for step in range(4):
        with torch.no_grad():
            model.weight.values.fill_(step)
        averaged.update_parameters(model)
    assert averaged.module.weight.pattern == model.weight.pattern
    assert 0 < averaged.module.weight.values.max() < 3
    assert_one_truth(averaged.module.weight)
    model.load_state_dict(averaged.module.state_dict())
    assert_one_truth(model.weight)


@pytest.mark.filterwarnings("ignore:.*put back")
def test_averages_over_a_state_dict_keep_the_pattern():
    model = layer(k=300, n=200, block_shape=(4, 4))
    ema = copy.deepcopy(model)
    for mine, theirs in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(0.999 * mine + 0.001 * theirs)  # as timm's ModelEmaV2 does, integers and all
    model.load_state_dict(ema.state_dict())
    assert_one_truth(ema.weight)


def broadcast(source: nn.Module, target: nn.Module) -> None:
    """What DistributedDataParallel does to the modules of other ranks when it is made."""
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        path, _, attribute = name.rpartition(".")
        getattr(target.get_submodule(path), attribute).detach().copy_(tensor)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_pattern_of_another_rank_is_taken_over(used_before, compiled):
    torch.compiler.reset()
    first, second = (layer(seed, k=40, n=28) for seed in (1, 2))
    assert first.weight.pattern != second.weight.pattern
    x = torch.randn(3, 40)
    if used_before:
        second(x)
    broadcast(first, second)
    run = torch.compile(second, fullgraph=True, backend="eager") if compiled else second
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x), first(x))
    assert second.weight.pattern == first.weight.pattern
    assert_one_truth(second.weight)


@torch.no_grad()
@pytest.mark.parametrize("block_shape", [(16, 16), (4, 1), (32, 32)])
def test_what_kernels_derived_goes_when_the_pattern_of_another_rank_is_taken_over(block_shape):
    first, second = (layer(seed, k=256, n=192, block_shape=block_shape).to(torch.bfloat16) for seed in (1, 2))
    x = torch.randn(70, 256).to(torch.bfloat16)
    for _ in range(2):
        second(x)
    broadcast(first, second)
    assert torch.equal(second(x), first(x))


def test_indices_that_only_look_like_a_pattern_of_another_rank_are_refused():
    weight = layer().weight
    bad = weight.col_indices.flip(0)
    weight.col_indices.copy_(bad)
    weight.pattern_digest.copy_(rarefy.pattern.digest(weight.crow_indices, bad))
    with pytest.raises(ValueError, match=r"^\[BsrWeight\] .*col_indices"):
        weight.linear(torch.randn(2, 10))


def _train_on_a_rank(rank):
    model = nn.Sequential(layer(seed=rank, k=40, n=28), nn.ReLU(), layer(seed=rank + 7, k=28, n=40))
    ddp = nn.parallel.DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(3 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        # Two forwards before one backward, with DDP's broadcast of buffers before each.
        loss = sum(ddp(torch.randn(5, 40, generator=generator)).square().mean() for _ in range(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict(), model[0].weight.to_dense()


@pytest.mark.timeout(300)
def test_ddp_with_a_seed_for_each_rank_trains_one_model(tmp_path):
    (first, dense), (second, other) = results_of_ranks(_train_on_a_rank, tmp_path)
    assert torch.equal(dense, other)
    for key in first:
        assert torch.equal(first[key], second[key]), key


def test_ddp_makes_a_weight_look_at_its_buffers_once(tmp_path, monkeypatch):
    looks = []
    equal = rarefy.watched_pattern._equal
    monkeypatch.setattr(rarefy.watched_pattern, "_equal", lambda *a: looks.append(1) or equal(*a))
    with one_rank(tmp_path):
        model = layer()
        for turn in (1, 2):  # a second DDP module may bring another pattern
            ddp = nn.parallel.DistributedDataParallel(model)
            for _ in range(3):
                for buffer in model.buffers():
                    buffer.copy_(buffer.clone())  # what DDP does where there are more ranks
                ddp(torch.randn(2, 10)).sum().backward()
            assert len(looks) == turn
        copy.deepcopy(model), pickle.dumps(model)
