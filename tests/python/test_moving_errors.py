"""What methods that move patterns refuse: options, calls, states that are damaged, bitmaps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moving_oracle import layer_of
from rarefy import PseudoBlockSparseLinear
from rarefy.prune import SET, GraNet, RigL, TopKAST, sparse_start
from states import with_entry, without_entry

BAD = [
    ({"fraction": "cosin:0.3", "end": 9}, "near names: cosine"),
    ({"fraction": "cosine:0.3"}, "end must be given"),
    ({"fraction": 1.5}, r"in \[0, 1\]"),
    ({"fraction": "cosine:1:2:3", "end": 9}, "must be written"),
    ({"fraction": "power:0.3:-1", "end": 9}, "exponent must not be negative"),
    ({"fraction": 0.3, "every": 0}, "every must be at least 1"),
    ({"fraction": 0.3, "begin": 5, "end": 4}, "end must be at least 5"),
    ({"fraction": 0.3, "init": "ones"}, "init must be a known one"),
    ({"fraction": 0.3, "layers": ["1"]}, "near names: 0"),
    ({"fraction": 0.3, "layers": ["("]}, "regular expressions"),
    ({"fraction": 0.3, "candidates": 0}, "candidates must be positive"),
    ({"fraction": 0.3, "tokens": 0}, "tokens must be at least 1"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        RigL(nn.Sequential(layer_of("block:4x3", 0.3)), **options)


def test_other_misuse_is_refused():
    layer = layer_of("block:4x3", 0.3)
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match="must have a BlockSparseLinear"):
        SET(nn.Sequential(nn.Linear(2, 2)), fraction=0.1)
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim"):
        SET(model, [3], fraction=0.1)
    moving = RigL(model, fraction=0.3, every=1)
    with pytest.raises(ValueError, match="forward and backward"):
        moving.step()
    with pytest.raises(ValueError, match="settings"):
        SET(model, fraction=0.3).load_state_dict(moving.state_dict())
    with pytest.raises(ValueError, match="settings"):
        RigL(model, fraction=0.2, every=1).load_state_dict(moving.state_dict())
    other = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(ValueError, match="same layers"):
        RigL(other, fraction=0.3, every=1).load_state_dict(moving.state_dict())
    with pytest.raises(TypeError, match="BsrWeight or a CsrWeight"):
        TopKAST(nn.Sequential(PseudoBlockSparseLinear(8, 8, block_shape=(2, 2))), fraction=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[layer.weight.values]["factors"] = torch.ones(7)
    with pytest.raises(ValueError, match="shape to move with it"):
        RigL(model, optimizer, fraction=0.3)
    others = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optimizer must hold weights of 0 or another layer"):
        RigL(model, others, fraction=0.3)
    SET(model, [others, torch.optim.SGD(model.parameters(), lr=0.1)], fraction=0.3)
    frozen = nn.Sequential(layer_of("block:4x3", 0.3)).requires_grad_(False)
    assert SET(frozen, others, fraction=0.3).layers == []  # nothing to hold
    with pytest.raises(ValueError, match=r"blocks must not be larger than 1, 4x8; got 8x8"):
        sparse_start(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "block:8x8", 0.5)
    with pytest.raises(ValueError, match="whole name"):
        sparse_start(nn.Sequential(nn.Linear(4, 4)), "csr", 0.5, layers=["weight"])
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        sparse_start(nn.Sequential(nn.Linear(4, 4)), "csr", 1.5)


def test_damaged_states_are_refused_before_anything_changes():
    model = nn.Sequential(layer_of("block:4x3", 0.3))
    for make in (SET, GraNet, TopKAST):
        options = {"final": 0.5, "end": 4} if make is GraNet else {}
        options |= {"forward": 0.5} if make is TopKAST else {}
        moving = make(model, fraction=0.3, every=2, **options)
        state = moving.state_dict()
        damaged = [
            *(without_entry(state, key) for key in state),
            with_entry(state, -1, "clock"),
            with_entry(state, True, "clock"),
            with_entry(state, 1, "late"),
            with_entry(state, torch.zeros(3, dtype=torch.uint8), "random"),
            with_entry(state, torch.zeros(16), "random"),
            with_entry(state, {}, "explored"),
            with_entry(state, None, "explored", "0"),
            with_entry(state, state["explored"]["0"].float(), "explored", "0"),
            with_entry(state, None, "grown", "0"),
            with_entry(state, {}, "settings"),
            with_entry(state, {"method": make.__name__}, "settings"),
            with_entry(state, "1", "settings", "unknown"),
        ]
        if make is GraNet:
            damaged += [with_entry(state, {}, "first"), with_entry(state, 2.5, "first", "0")]
        if make is TopKAST:
            damaged += [
                with_entry(state, {}, "active"),
                with_entry(state, torch.tensor([10**6]), "active", "0"),
            ]
        moving.clock = 7
        random = moving.random.get_state()
        for bad in damaged:
            with pytest.raises(ValueError, match=r"\.load_state_dict\] "):
                moving.load_state_dict(bad)
            assert moving.clock == 7 and torch.equal(moving.random.get_state(), random)
        moving.load_state_dict(state)
        assert moving.clock == 0


def test_bitmaps_do_not_move_and_are_told_so():
    model = nn.Sequential(nn.Linear(8, 8))
    sparse_start(model, "bitmap", 0.5)
    with pytest.raises(ValueError, match=r"blocks or csr, that trains .* got bitmap, which do not move"):
        RigL(model, fraction=0.3)
