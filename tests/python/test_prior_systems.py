"""What prior systems do and where they fail, what no other file tests: docs/design/prior_systems.md.

Facts are checked on torch itself where it has them, so that a change there is seen.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao import pruning as ao
from torch.nn.utils import parametrize
from torch.nn.utils import prune as torch_prune

import rarefy
from rarefy.compat import nn_prune, torch_ao_pruning, torchao_sparsity
from rarefy.compat.pytorch_block_sparse import PseudoBlockSparseLinear
from rarefy.prune import Mask, Sparsifier, grams, reconstruct, reconstruct_weight

TABLE = Path(__file__).parents[2] / "docs" / "design" / "prior_systems.md"
BOTH = pytest.mark.parametrize("library", [ao, torch_ao_pruning], ids=["torch", "rarefy"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))


def prepared(library, model: nn.Module, *args, config=None) -> ao.BaseSparsifier:
    sparsifier = library.WeightNormSparsifier(*args)
    sparsifier.prepare(model, config)
    return sparsifier


def test_every_test_that_the_table_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TABLE.read_text(encoding="utf-8"))
    assert len(named) > 60
    for file, name in named:
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text, f"{file} has no {name}"


# -- torch.ao.pruning -------------------------------------------------------------------------------------


@BOTH
def test_masks_are_the_models_buffers(library) -> None:
    model = net()
    sparsifier = prepared(library, model, 0.5, (1, 4))
    assert sparsifier.state["0.weight"]["mask"] is model[0].parametrizations.weight[0].mask
    assert "0.parametrizations.weight.original" in model.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        net().load_state_dict(model.state_dict())
    with pytest.raises((ValueError, AssertionError), match="shape"):
        library.FakeSparsity(torch.ones(2, 3))(torch.ones(3, 2))
    sparsifier.squash_mask()
    net().load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", ["WeightNormSparsifier", "NearlyDiagonalSparsifier"])
def test_defect_prepared_models_did_not_load(kind) -> None:
    """FakeSparsity.state_dict() is empty in torch, but loading wants the mask."""

    def made(library) -> nn.Module:
        model = net()
        sparsifier = getattr(library, kind)()
        sparsifier.prepare(model, None)
        sparsifier.step()
        return model

    with pytest.raises(RuntimeError, match="mask"):
        made(ao).load_state_dict(made(ao).state_dict())
    trained, model = made(torch_ao_pruning), net()
    getattr(torch_ao_pruning, kind)().prepare(model, None)
    model.load_state_dict(trained.state_dict())
    assert torch.equal(model[0].weight, trained[0].weight) and int((model[0].weight == 0).sum()) > 0
    saved = {k: v for k, v in trained.state_dict().items() if not k.endswith("mask")}  # as torch saves it
    before = dict(saved)
    model.load_state_dict(saved)
    assert saved.keys() == before.keys() and torch.equal(model[0].weight, trained[0].weight)


def test_config_entries_override_and_a_leading_dot_is_tolerated() -> None:
    model, library = net(), torch_ao_pruning
    config = [{"tensor_fqn": ".2.weight", "sparsity_level": 0.25}]
    sparsifier = prepared(library, model, 0.5, (1, 1), config=config)
    assert config[0]["tensor_fqn"] == ".2.weight"
    sparsifier.step()
    assert len(sparsifier.groups) == 1 and not parametrize.is_parametrized(model[0])
    assert int((model[2].weight == 0).sum()) == 24 * 8 // 4


@BOTH
def test_squash_keeps_what_is_asked_for(library) -> None:
    model = net()
    sparsifier = prepared(library, model, 0.5, (1, 4))
    per_layer = {"0": ("sparse_block_shape",)}
    sparsifier.squash_mask(("sparsity_level",), per_layer)
    assert model[0].sparse_params == {"sparsity_level": 0.5, "sparse_block_shape": (1, 4)}
    assert model[2].sparse_params == {"sparsity_level": 0.5}


@BOTH
def test_convert_swaps_and_wants_a_mapping(library) -> None:
    class Twice(nn.Linear):
        @classmethod
        def from_dense(cls, module):
            return cls(module.in_features, module.out_features)

    model = net()
    sparsifier = prepared(library, model, 0.5)
    assert [type(x) for x in sparsifier.convert(model, {nn.Linear: Twice})] == [Twice, nn.ReLU, Twice]
    with pytest.raises(NotImplementedError):
        sparsifier.convert(model)


@BOTH
def test_masks_stay_while_updates_are_off(library) -> None:
    model = net()
    sparsifier = prepared(library, model, 0.5)
    sparsifier.enable_mask_update = False
    sparsifier.step()
    assert bool(model[0].parametrizations.weight[0].mask.all())


@BOTH
def test_level_times_zeros_is_the_sparsity(library) -> None:
    for level, expected in ((0.5, 0.25), (1.0, 0.5)):
        model = net()
        prepared(library, model, level, (1, 4), 2).step()
        assert float((model[0].weight == 0).double().mean()) == expected


@BOTH
def test_nothing_regrows_whatever_is_hidden(library) -> None:
    model = net()
    sparsifier = prepared(library, model, 0.5, (1, 1))
    sparsifier.step()
    gone = model[0].weight == 0
    with torch.no_grad():
        model[0].parametrizations.weight.original[gone] *= 100
    sparsifier.step()
    assert torch.equal(model[0].weight == 0, gone)


def test_defect_hidden_originals_moved_under_decay_and_momentum() -> None:
    moved = []
    for attached in (False, True):
        model = nn.Sequential(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()  # momentum of what is going to leave
        sparsifier = Sparsifier(0.5)
        sparsifier.prepare(model)
        if attached:
            sparsifier.attach(optimizer)
        sparsifier.step()
        hidden = model[0].parametrizations.weight.original
        gone, before = model[0].weight == 0, hidden.detach().clone()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
        moved.append(float((hidden.detach() - before)[gone].abs().max()))
        assert not model[0].weight[gone].any()
    assert moved[0] > 0 and moved[1] == 0


@BOTH
def test_diagonals_are_odd_and_fit(library) -> None:
    def mask_of(nearliness: int) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(6, 8))
        sparsifier = library.NearlyDiagonalSparsifier(nearliness)
        sparsifier.prepare(model, None)
        sparsifier.step()
        return model[0].parametrizations.weight[0].mask

    apart = (torch.arange(8)[:, None] - torch.arange(6)).abs()
    assert torch.equal(mask_of(3) != 0, apart <= 1)
    assert not mask_of(0).any()
    for nearliness in (2, 13):
        with pytest.raises(ValueError, match=r"nearliness|[Nn]early"):
            mask_of(nearliness)


@BOTH
def test_schedulers_write_levels_alone(library) -> None:
    model = net()
    sparsifier = prepared(library, model, 0.5, (1, 1))
    scheduler = library.CubicSL(sparsifier, delta_t=1, total_t=4)
    seen = []
    for _ in range(4):
        sparsifier.step()
        scheduler.step()
        seen.append(round(sparsifier.groups[0]["sparsity_level"], 4))
    assert seen == [0.2891, 0.4375, 0.4922, 0.5]
    assert "sparsifier" not in scheduler.state_dict() and scheduler.get_last_sl() == [0.5, 0.5]
    other = prepared(library, net(), 0.5, (1, 1))
    half = library.LambdaSL(other, lambda epoch: 0.5**epoch)
    other.step()
    half.step()
    assert [g["sparsity_level"] for g in other.groups] == [0.25, 0.25]


def test_defect_attention_and_convolutions_gave_no_groups() -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "c": nn.Conv2d(3, 4, 3)})
    stock = ao.WeightNormSparsifier()
    stock.prepare(model, None)
    assert stock.groups == []
    sparsifier = Sparsifier(0.5)
    sparsifier.prepare(model)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == [
        "a.in_proj_weight",
        "a.out_proj.weight",
        "c.weight",
    ]


def test_rows_take_their_bias_along() -> None:
    model = net()
    sparsifier = torch_ao_pruning.SaliencyPruner({})
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.3}])
    sparsifier.step()
    mask = model[0].parametrizations.weight[0].mask
    assert int((~mask).sum()) == int(24 * 0.3)  # not rounded
    assert not model[0](torch.randn(5, 16))[:, ~mask].any()  # bias too
    small = sparsifier.prune()
    assert small.get_submodule("0").bias.shape == (24 - 7,)


def test_rows_of_lstm_gates_and_of_the_geometric_median() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 8, num_layers=1), nn.Linear(8, 3)

        def forward(self, x):
            y, _ = self.lstm(x)
            return self.out(y)

    model = Recurrent()
    gates = torch_ao_pruning.LSTMSaliencyPruner({"sparsity_level": 0.5})
    gates.prepare(model, [{"tensor_fqn": f"lstm.weight_{kind}_l0"} for kind in ("ih", "hh")])
    gates.enable_mask_update = True
    gates.step()
    for kind in ("ih", "hh"):
        mask = model.lstm.parametrizations[f"weight_{kind}_l0"][0].mask
        assert mask.view(4, 8).sum(1).tolist() == [4, 4, 4, 4]

    medians = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 2))
    with torch.no_grad():
        medians[0].weight.copy_(torch.tensor([[0.0, 0.1], [5, 0], [-5, 0], [0, 5], [0, -5]]))
    pruner = torch_ao_pruning.FPGMPruner(0.2)
    pruner.prepare(medians, [{"tensor_fqn": "0.weight"}])
    pruner.enable_mask_update = True
    pruner.step()
    assert medians[0].parametrizations.weight[0].mask.tolist() == [False, True, True, True, True]


def test_activations_are_masked_by_what_was_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    sparsifier = torch_ao_pruning.ActivationSparsifier(model)
    sparsifier.register_layer(
        model[1],
        aggregate_fn=lambda a, b: a + b,
        reduce_fn=lambda x: x.abs().sum(0),
        mask_fn=lambda x, sparsity_level: (x > x.median()).to(x),
        sparsity_level=0.5,
    )
    x = torch.randn(3, 4)
    model(x)
    model(x)
    sparsifier.step()
    mask = sparsifier.get_mask("1")
    sums = model[0](x).abs().sum(0)
    assert torch.equal(mask.bool(), sums > sums.median())
    sparsifier.squash_mask()
    torch.testing.assert_close(model(x), model[1].forward(model[0](x) * mask))


# -- torchao ----------------------------------------------------------------------------------------------


def test_sparsify_returns_the_model_and_freezes() -> None:
    model = net()
    assert torchao_sparsity.sparsify_(model, torchao_sparsity.block_sparse_weight(blocksize=8)) is model
    assert not model[0].weight.requires_grad


# -- torch.nn.utils.prune ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_defect_removed_weights_were_refilled(optimizer) -> None:
    """The original, and what is here without an optimizer: the next steps fill every zero."""

    def zeros_after(library, **options) -> int:
        torch.manual_seed(0)
        layer = nn.Linear(16, 16)
        kinds = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}}
        made = getattr(torch.optim, optimizer)(layer.parameters(), lr=0.1, **kinds.get(optimizer, {}))
        layer(torch.randn(8, 16)).square().sum().backward()
        made.step()  # state of what is going to leave
        library.l1_unstructured(layer, "weight", 0.5)
        if library is nn_prune:
            library.remove(layer, "weight", **({"optimizer": made} if options else {}))
        else:
            library.remove(layer, "weight")
            made.param_groups[0]["params"][0] = layer.weight
        for _ in range(3):
            made.zero_grad()
            layer(torch.randn(8, 16)).square().sum().backward()
            made.step()
        return int((layer.weight == 0).sum())

    assert zeros_after(torch_prune) == zeros_after(nn_prune) == 0
    assert zeros_after(nn_prune, optimizer=True) == 128


def test_defect_structured_pruning_left_the_bias_alone() -> None:
    x = torch.randn(5, 16)
    stock = torch_prune.ln_structured(nn.Linear(16, 8), "weight", 3, 2, 0)
    gone = ~stock.weight_mask.bool().any(1)
    assert stock(x)[:, gone].abs().min() > 0
    layer = nn_prune.ln_structured(nn.Linear(16, 8), "weight", 3, 2, 0, bias=True)
    gone = ~(layer.weight != 0).any(1)
    assert int(gone.sum()) == 3 and not layer(x)[:, gone].any()
    nn_prune.random_structured(layer, "weight", 2, 0, bias=True)
    assert int((layer.bias == 0).sum()) == int((~(layer.weight != 0).any(1)).sum())
    kept = nn_prune.ln_structured(nn.Linear(16, 8), "weight", 3, 2, 0)
    assert not parametrize.is_parametrized(kept, "bias")
    with pytest.raises(ValueError, match="dim must be 0"):
        nn_prune.ln_structured(nn.Linear(16, 8), "weight", 3, 2, 1, bias=True)
    with pytest.raises(ValueError, match="needs a module with a bias"):
        nn_prune.ln_structured(nn.Linear(16, 8, bias=False), "weight", 3, 2, 0, bias=True)


def test_structured_slices_of_all_layers_together() -> None:
    """The original has none: 10³ of scale between two layers, and a floor."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight.mul_(1e3)
    sparsifier = Sparsifier(0.4, pattern="row", scope=rarefy.prune.scopes.Global(min_density=0.25))
    sparsifier.prepare(model)
    sparsifier.step()
    rows = [int((layer.weight == 0).all(1).sum()) for layer in model]
    assert rows == [24, round(0.4 * 64) - 24]


# -- pytorch_block_sparse ---------------------------------------------------------------------------------


def test_defect_twins_were_on_the_gpu_alone() -> None:
    layer = rarefy.BlockSparseLinear(64, 64, block_shape=(32, 32), density=0.5)
    twin = PseudoBlockSparseLinear(layer)
    assert twin.weight.device.type == "cpu"
    x = torch.randn(3, 64)
    torch.testing.assert_close(twin(x), layer(x))


# -- llm-compressor's modifiers ---------------------------------------------------------------------------


def correlated(tokens: int, features: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(tokens, features) @ (torch.eye(features) + 0.3 * torch.randn(features, features))


@pytest.mark.parametrize("panel", [8, 128])
def test_defect_masks_that_are_kept_were_wrong_with_n_of_m_after_the_first_block(panel) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(6, 32), correlated(200, 32)
    mask = torchao_sparsity.mask_creator(torch.rand(6, 32))
    given = Mask.pack(mask)
    got, made = reconstruct_weight(weight, x.T @ x, "2:4", mask=given, panel=panel)
    assert torch.equal(made.unpack(), mask) and torch.equal(got != 0, mask)


@pytest.mark.parametrize("method", ["sparsegpt", "obs", "wanda", "magnitude"])
def test_defect_k_and_one_more_left_and_all_was_an_error(method) -> None:
    weight, x = torch.ones(8, 16), correlated(100, 16)  # ties
    for sparsity in (0.0, 0.3, 0.5, 1.0):
        _, mask = reconstruct_weight(weight, x.T @ x, "unstructured", sparsity, method)
        removed = 128 - mask.kept
        assert removed == (8 * round(sparsity * 16) if method == "wanda" else round(sparsity * 128))


def test_defect_convolutions_in_groups_saw_each_others_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 6, 3, groups=2, padding=1))
    x = torch.randn(2, 8, 5, 5)
    got = grams(model, [x])["0.weight"]
    assert got.shape == (2, 36, 36)
    for group in range(2):
        part = nn.functional.unfold(x[:, 4 * group : 4 * group + 4].double(), 3, padding=1)
        rows = part.transpose(1, 2).reshape(-1, 36)
        torch.testing.assert_close(got[group], rows.T @ rows)
    dense = copy.deepcopy(model)
    reconstruct(model, [x], "unstructured", 0.5, "sparsegpt")
    plain = copy.deepcopy(dense)
    sparsifier = Sparsifier(0.5, in_place=True)
    sparsifier.prepare(plain)
    sparsifier.step()
    errors = [float((m(x) - dense(x)).norm()) for m in (model, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(("r", "c"), [(2, 8), (8, 2)])
def test_defect_blocks_were_repeated_on_the_wrong_side(r, c) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16))
    norms = rarefy.masks.to_blocks(model[0].weight.detach(), (r, c)).flatten(2).norm(dim=2)
    sparsifier = Sparsifier(0.5, pattern=f"block:{r}x{c}")
    sparsifier.prepare(model)
    sparsifier.step()
    kept = rarefy.masks.to_blocks(sparsifier.masks()["0.weight"], (r, c)).flatten(2)
    assert torch.equal(kept.all(2), kept.any(2))
    assert torch.equal(kept.all(2), norms > norms.flatten().sort().values[norms.numel() // 2 - 1])


# -- sparse training --------------------------------------------------------------------------------------


def test_gradients_of_what_has_left_die_even_as_nan() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Sparsifier(0.5, in_place=True)
    sparsifier.prepare(model)
    sparsifier.attach(optimizer)
    sparsifier.step()
    gone = model[0].weight == 0
    model[0].weight.grad = torch.where(gone, torch.nan, 1.0)
    optimizer.step()
    assert not model[0].weight[gone].any() and bool(torch.isfinite(model[0].weight).all())
