"""OBS, weight by weight and in blocks: against elimination in plain numpy, at every sparsity."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import rarefy
from rarefy.prune import Elimination, eliminations, layer_error, reconstruct_weight, sensitivity
from rarefy.prune.patterns import parse_pattern
from reconstruct_problems import Net, data, optimal, problem


def surgeon(weight, gram, r, c, drop, steps):
    """The demo's block OBS: a few blocks of every block row at a time, the joint update after each."""
    w = weight.numpy().copy()
    h0 = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    for begin in range(0, len(w), r):
        rows, inverse, keep, done = w[begin : begin + r], np.linalg.inv(h0), np.ones(w.shape[1] // c, bool), 0
        for step in range(steps):
            count = drop * (step + 1) // steps - done
            done += count
            cost = np.full(len(keep), np.inf)
            for j in np.flatnonzero(keep):
                b = slice(j * c, (j + 1) * c)
                cost[j] = np.trace(rows[:, b] @ np.linalg.solve(inverse[b, b], rows[:, b].T))
            gone = np.argsort(cost, kind="stable")[:count]
            keep[gone] = False
            d = (gone[:, None] * c + np.arange(c)).ravel()
            if len(d):
                solved = np.linalg.solve(inverse[np.ix_(d, d)], inverse[d])
                rows -= rows[:, d] @ solved
                inverse = inverse - inverse[:, d] @ solved
            rows[:, np.repeat(~keep, c)] = 0
    return torch.from_numpy(w)


@pytest.mark.parametrize(("r", "c"), [(1, 1), (4, 1), (16, 1), (4, 4), (16, 16)])
def test_block_obs_is_the_demos(r, c):
    weight, gram = problem()
    blocks = 96 // c
    for density in (0.25, 0.5, 1.0):
        drop = blocks - round(density * blocks)
        new, mask = reconstruct_weight(weight, gram, f"row_balanced:{r}x{c}", 1 - density, "obs", steps=5)
        torch.testing.assert_close(new, surgeon(weight, gram, r, c, drop, 5), rtol=1e-7, atol=1e-8)
        kept = rarefy.masks.to_blocks(mask.unpack(), (r, c)).flatten(2).any(2).sum(1)
        assert set(kept.tolist()) == {blocks - drop}


def eliminated(weight, gram, r, c, steps):
    """What each block costs when it leaves, in rounds until none is left, in numpy."""
    h0 = gram.numpy() + 0.01 * np.mean(np.diag(gram.numpy())) * np.eye(len(gram))
    across = -(-weight.shape[1] // c)
    costs = np.zeros((-(-len(weight) // r), across))
    for i in range(len(costs)):
        w, inverse, left, last, done = (
            weight.numpy()[i * r : (i + 1) * r].copy(),
            np.linalg.inv(h0),
            [],
            0.0,
            0,
        )
        left = list(range(across))
        for step in range(steps):
            count = across * (step + 1) // steps - done
            done += count
            cost = {}
            for j in left:
                b = slice(j * c, (j + 1) * c)
                cost[j] = np.trace(w[:, b] @ np.linalg.solve(inverse[b, b], w[:, b].T))
            gone = sorted(left, key=cost.get)[:count]
            for j in gone:
                costs[i, j] = last = max(last, cost[j])
            left = [j for j in left if j not in gone]
            d = np.concatenate([np.arange(j * c, min((j + 1) * c, w.shape[1])) for j in gone] or [[]]).astype(
                int
            )
            solved = np.linalg.solve(inverse[np.ix_(d, d)], inverse[d])
            w -= w[:, d] @ solved
            inverse = inverse - inverse[:, d] @ solved
    return torch.from_numpy(costs)


@pytest.mark.parametrize(("r", "c"), [(1, 1), (4, 1), (16, 1), (4, 4), (5, 7)])
def test_elimination_is_its_oracle(r, c):
    weight, gram = problem()
    weight[:16] *= 3  # rows of different need
    found = Elimination(weight, gram, f"block:{r}x{c}", steps=7)
    torch.testing.assert_close(found.costs, eliminated(weight, gram, r, c, 7), rtol=1e-6, atol=1e-9)
    before = torch.ones(weight.shape, dtype=torch.bool)
    for sparsity in (0.0, 0.3, 0.6, 0.9, 1.0):
        new, mask = found.prune(sparsity)
        stays, units = mask.unpack(), parse_pattern(f"block:{r}x{c}")
        blocks = rarefy.masks.to_blocks(stays, (r, c)).flatten(2).any(2)
        assert int((~blocks).sum()) == units.removed(weight.shape, sparsity)
        left = found.costs[blocks].min() if blocks.any() else torch.inf
        assert blocks.all() or found.costs[~blocks].max() < left
        assert not (stays & ~before).any()  # what has left stays away
        torch.testing.assert_close(new, optimal(weight, gram, stays), rtol=1e-6, atol=1e-8)
        before = stays


def test_obs_over_the_whole_layer_gives_more_to_rows_that_need_more():
    weight, gram = problem()
    weight[:16] *= 3
    new, mask = reconstruct_weight(weight, gram, "block:16x1", 0.5, "obs")
    balanced, _ = reconstruct_weight(weight, gram, "row_balanced:16x1", 0.5, "obs")
    kept = mask.unpack()[::16].sum(1)
    assert int(kept.sum()) == 3 * 96 // 2 and int(kept[0]) > max(kept[1:])
    assert layer_error(weight, new, gram) < 0.9 * layer_error(weight, balanced, gram)
    same, _ = Elimination(weight, gram, "block:16x1").prune(0.5)
    torch.testing.assert_close(new, same)


def test_elimination_of_inputs_that_never_come():
    weight, gram = problem()
    gram[10] = gram[:, 10] = 0
    found = Elimination(weight.float(), gram, "block:4x1")
    new, mask = found.prune(12 / (12 * 96))
    assert not mask.unpack()[:, 10].any() and new.dtype == torch.float32
    new, _ = found.prune(0.0)
    torch.testing.assert_close(new, weight.float())


def test_eliminations_of_a_model_feed_sensitivity():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    found = eliminations(model, data(), "block:2x2", config={"up|down": {}})
    assert list(found) == ["up.weight", "down.weight"]
    x = torch.cat(data())
    with torch.no_grad():
        want = model(x)
    report = sensitivity(
        model,
        lambda m: (m(x) - want).square().mean().item(),
        "block:2x2",
        (0.25, 0.5, 0.75),
        prune=lambda name, weight, sparsity: found[name].prune(sparsity)[0],
        config={"up|down": {}},
        time=False,
    )
    plain = sensitivity(
        model, lambda m: (m(x) - want).square().mean().item(), "block:2x2", (0.25, 0.5, 0.75),
        config={"up|down": {}}, time=False,
    )  # fmt: skip
    assert all(p.loss <= q.loss for p, q in zip(report, plain, strict=True))
    assert [p.parameters for p in report] == [p.parameters for p in plain]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    with pytest.raises(ValueError, match=r"data must reach every layer; got none at up\.weight"):
        eliminations(model, [], "block:2x2", config={"up|down": {}})
    with pytest.raises(ValueError, match="pattern must be blocks counted over the whole layer; got 2:4"):
        Elimination(torch.ones(4, 4), torch.eye(4), "2:4")


def test_block_obs_with_ragged_edges():
    weight, gram = problem(10, 23)
    new, mask = reconstruct_weight(weight, gram, "row_balanced:4x5", 0.4, "obs")
    blocks = rarefy.masks.to_blocks(mask.unpack(), (4, 5)).flatten(2).any(2)
    assert blocks.sum(1).tolist() == [3, 3, 3]
    assert torch.equal(rarefy.masks.expand_mask(blocks, (10, 23), (4, 5)), mask.unpack())
    best = reconstruct_weight(weight, gram, "unstructured", method="least_squares", mask=mask)[0]
    torch.testing.assert_close(new, best, rtol=1e-6, atol=1e-8)  # OBS ends at the best on its mask
