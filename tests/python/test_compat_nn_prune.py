"""rarefy.compat.nn_prune: torch.nn.utils.prune's numerics, its defects mended, its checkpoints read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as original

from rarefy.compat import nn_prune as prune


def layer(kind=nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(12, 10) if kind is nn.Linear else nn.Conv2d(4, 6, 3)


def mask_of(module) -> torch.Tensor:
    return module.parametrizations.weight[0].mask


CALLS = [
    ("l1_unstructured", {"amount": 0.3}),
    ("l1_unstructured", {"amount": 7}),
    ("ln_structured", {"amount": 0.5, "n": 2, "dim": 0}),
    ("ln_structured", {"amount": 2, "n": 1, "dim": 1}),
    ("ln_structured", {"amount": 1, "n": float("inf"), "dim": -1}),
]


@pytest.mark.parametrize(("name", "options"), CALLS)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_masks_are_the_originals(name, options, kind):
    mine, theirs = layer(kind), layer(kind)
    for _ in range(2):  # amounts count what is left
        assert getattr(prune, name)(mine, "weight", **options) is mine
        getattr(original, name)(theirs, "weight", **options)
        assert torch.equal(mask_of(mine), theirs.weight_mask)
    assert torch.equal(mine.weight, theirs.weight) and prune.is_pruned(nn.Sequential(mine))
    before = mine.parametrizations.weight.original
    assert prune.remove(mine, "weight") is mine
    original.remove(theirs, "weight")
    assert torch.equal(mine.weight, theirs.weight) and mine.weight is before
    assert not prune.is_pruned(mine) and isinstance(mine.weight, nn.Parameter)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_scores_instead_of_magnitudes(draw):
    """Negative ones count by their magnitude, as the original ranks them."""
    mine, theirs, scores = layer(), layer(), draw(10, 12)
    prune.l1_unstructured(mine, "weight", 0.4, importance_scores=scores)
    original.l1_unstructured(theirs, "weight", 0.4, importance_scores=scores)
    assert torch.equal(mask_of(mine), theirs.weight_mask)
    prune.ln_structured(mine, "weight", 2, 2, 0, importance_scores=scores)
    original.ln_structured(theirs, "weight", 2, 2, 0, importance_scores=scores)
    assert torch.equal(mask_of(mine), theirs.weight_mask)


def test_random_ones_are_exact_and_follow_a_generator():
    for name, options, counts in (
        ("random_unstructured", {"amount": 0.5}, [60, 90]),
        ("random_structured", {"amount": 0.5, "dim": 0}, [60, 84]),
    ):
        modules = [layer(), layer(), layer()]
        for module, seed in zip(modules, (1, 1, 2), strict=True):
            generator = torch.Generator().manual_seed(seed)
            for count in counts:
                getattr(prune, name)(module, "weight", **options, generator=generator)
                assert int((mask_of(module) == 0).sum()) == count
        assert torch.equal(mask_of(modules[0]), mask_of(modules[1]))
        assert not torch.equal(mask_of(modules[0]), mask_of(modules[2]))


def test_global_pruning_is_the_originals_and_can_keep_a_floor():
    """Of two layers whose scales differ by a thousand the small one lost 98 %."""
    pairs = []
    for method, module in ((prune, "l1"), (original, original.L1Unstructured)):
        layers = [layer(), layer(), nn.Linear(12, 4)]
        torch.manual_seed(1)
        with torch.no_grad():
            layers[1].weight.mul_(1e-3)
            layers[2].weight.copy_(torch.randn(4, 12))
        places = [(x, "weight") for x in layers]
        for _ in range(2):
            method.global_unstructured(places, module, amount=0.4)
        pairs.append([x.weight == 0 for x in layers])
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    layers = [layer(), layer()]
    with torch.no_grad():
        layers[1].weight.mul_(1e-3)
    prune.global_unstructured([(x, "weight") for x in layers], amount=0.5, min_density=0.2)
    assert [int((x.weight == 0).sum()) for x in layers] == [24, 96]
    with pytest.raises(ValueError, match=r"density of 0\.5"):
        prune.global_unstructured([(x, "weight") for x in layers], amount=0.9, min_density=0.5)


def test_amounts():
    """1 is one weight, 1.0 is all of them."""
    for amount, gone in ((1, 1), (1.0, 120), (0, 0), (0.0, 0)):
        assert int((prune.l1_unstructured(layer(), "weight", amount).weight == 0).sum()) == gone
    module = prune.custom_from_mask(prune.identity(layer(), "weight"), "weight", torch.eye(10, 12))
    assert torch.equal(mask_of(module), torch.eye(10, 12))
    assert int((prune.l1_unstructured(layer(), "bias", 3).bias == 0).sum()) == 3


def test_defect_copies_after_a_forward():
    """It raised: only tensors created explicitly by the user support it."""
    module = prune.l1_unstructured(layer(), "weight", 0.5)
    x = torch.randn(3, 12)
    y = module(x)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), y)
    theirs = original.l1_unstructured(layer(), "weight", 0.5)
    theirs(x)
    with pytest.raises(RuntimeError):
        copy.deepcopy(theirs)


def test_defect_ties_lost_whole_rows():
    module = layer()
    nn.init.ones_(module.weight)
    mask = mask_of(prune.l1_unstructured(module, "weight", 0.5))
    assert (mask.sum(1) > 0).all() and (mask.sum(0) > 0).all() and int(mask.sum()) == 60


def test_nan_leaves_and_does_not_come_through():
    module = layer()
    with torch.no_grad():
        module.weight[2, 2] = torch.nan
    prune.l1_unstructured(module, "weight", 1)
    assert module.weight[2, 2] == 0 and module.weight.isfinite().all()


@pytest.mark.parametrize("prepared", [False, True])
def test_checkpoints_of_the_original_load(prepared):
    model, theirs = (nn.Sequential(layer(), nn.ReLU(), nn.Linear(10, 4)) for _ in "12")
    original.l1_unstructured(theirs[0], "weight", 0.5)
    original.random_unstructured(theirs[2], "bias", 2)
    if prepared:
        prune.l1_unstructured(model[0], "weight", 0.1)
    state = theirs.state_dict()
    keys = list(state)
    prune.load_state_dict(model, state)
    assert list(state) == keys and "0.weight_orig" in keys
    x = torch.randn(3, 12)
    assert torch.equal(model(x), theirs(x)) and torch.equal(mask_of(model[0]), theirs[0].weight_mask)
    again = nn.Sequential(layer(), nn.ReLU(), nn.Linear(10, 4))
    for name in ("weight", "bias"):
        prune.identity(again[0 if name == "weight" else 2], name)
    prune.load_state_dict(again, model.state_dict())
    assert torch.equal(again(x), model(x))
    with pytest.raises(ValueError, match="one of the model"):
        prune.load_state_dict(nn.Sequential(layer()), state)
    with pytest.raises(ValueError, match="must be of shape"):
        prune.load_state_dict(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(10, 4)), state)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m: prune.l1_unstructured(m, "weigth", 0.5), "near names: weight"),
        (lambda m: prune.l1_unstructured(m, "weight", 1.5), r"in \[0\.0, 1\.0\]"),
        (lambda m: prune.l1_unstructured(m, "weight", 121), r"in \[0, 120\]"),
        (lambda m: prune.ln_structured(m, "weight", 1, 2, 2), "dim must be"),
        (lambda m: prune.random_structured(m, "bias", 1, 0), "2 or more dimensions"),
        (lambda m: prune.custom_from_mask(m, "weight", torch.ones(3)), "mask must be of shape"),
        (lambda m: prune.l1_unstructured(m, "weight", 1, torch.ones(3)), "importance_scores must be"),
        (lambda m: prune.global_unstructured([(m, "weight")], "l3", amount=1), "near names: l1"),
        (lambda m: prune.remove(m, "weight"), "must be pruned"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    module = layer()
    with pytest.raises(ValueError, match=text):
        call(module)
    assert not prune.is_pruned(module)


CLASSES = [
    ("L1Unstructured", (0.3,)),
    ("L1Unstructured", (7,)),
    ("LnStructured", (0.5, 2, 0)),
    ("LnStructured", (2, 1, 1)),
    ("LnStructured", (1, float("inf"), -1)),
    ("Identity", ()),
]


@pytest.mark.parametrize(("name", "args"), CLASSES)
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_classes_prune_as_the_originals(name, args, kind):
    mine, theirs = layer(kind), layer(kind)
    scores = torch.rand(mine.weight.shape)
    for given in (None, scores):  # the second on top of the first
        method = getattr(prune, name).apply(mine, "weight", *args, importance_scores=given)
        options = {} if name == "Identity" else {"importance_scores": given}
        getattr(original, name).apply(theirs, "weight", *args, **options)
        assert torch.equal(mask_of(mine), theirs.weight_mask)
    assert torch.equal(method.apply_mask(mine), theirs.weight)
    assert method.PRUNING_TYPE == getattr(original, name).PRUNING_TYPE
    t, before = torch.randn(6, 8), (torch.rand(6, 8) < 0.7).float()
    ours = getattr(prune, name)(*args).prune(t, before)
    assert ((ours != 0) <= (before != 0)).all()
    method.remove(mine)
    assert not prune.is_pruned(mine)


def test_a_method_of_ones_own():
    class EveryOther(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask.view(-1)[::2] = 0
            return mask

    class Theirs(original.BasePruningMethod):
        PRUNING_TYPE = "unstructured"
        compute_mask = EveryOther.compute_mask

    mine, theirs = layer(), layer()
    for _ in range(3):
        EveryOther.apply(mine, "weight")
        Theirs.apply(theirs, "weight")
        assert torch.equal(mask_of(mine), theirs.weight_mask)
    assert torch.equal(copy.deepcopy(mine).weight, theirs.weight)

    class Wrong(EveryOther):
        PRUNING_TYPE = "structred"

    with pytest.raises(ValueError, match=r"\[Wrong\] .*near names: structured"):
        Wrong.apply(mine, "weight")


def test_containers_combine():
    t = torch.randn(6, 8)
    rows, single = prune.LnStructured(2, 2, 0), prune.L1Unstructured(5)
    both = prune.PruningContainer(rows, single)
    assert len(both) == 2 and list(both) == [rows, single] and both[1] is single
    out = both.prune(t)
    assert int((out == 0).sum()) == 2 * 8 + 5
    assert torch.equal(out, single.prune(t, (rows.prune(t) != 0).float()))
    custom = prune.CustomFromMask((torch.arange(8) < 4).expand(6, 8)).prune(t)
    assert torch.equal(custom, torch.cat([t[:, :4], torch.zeros(6, 4)], 1))
    with pytest.raises(TypeError, match="a method must be a BasePruningMethod; got int"):
        prune.PruningContainer(1)
    other = prune.L1Unstructured.apply(layer(), "weight", 1)
    bias = prune.L1Unstructured.apply(layer(), "bias", 1)
    with pytest.raises(ValueError, match="methods must be for 'weight'; got 'bias'"):
        prune.PruningContainer(other, bias)


def test_random_classes_are_exact_and_follow_a_generator():
    for make, gone in (
        (lambda g: prune.RandomUnstructured(0.25, generator=g), 30),
        (lambda g: prune.RandomStructured(3, 1, generator=g), 30),
    ):
        outs = [make(torch.Generator().manual_seed(1)).prune(torch.ones(10, 12)) for _ in range(2)]
        assert int((outs[0] == 0).sum()) == gone and torch.equal(*outs)
    with pytest.raises(ValueError, match=r"\[L1Unstructured\] amount must be in \[0, 12\]"):
        prune.L1Unstructured(13).prune(torch.ones(12))
    with pytest.raises(ValueError, match=r"\[LnStructured\] dim must be of 2 dimensions; got 2"):
        prune.LnStructured(1, 2, 2).prune(torch.ones(3, 4))


def test_a_mask_on_top_of_another_parametrization():
    """A mask behind a parametrization that was there before is found, or refused; never an AttributeError."""
    mine = layer()
    prune.l1_unstructured(mine, "weight", 0.3)
    nn.utils.parametrize.register_parametrization(mine, "weight", nn.Identity())
    prune.l1_unstructured(mine, "weight", 0.5)
    assert int((mine.weight == 0).sum()) == 36 + 42


def test_global_scores_count_by_their_magnitude():
    mine, theirs, scores = layer(), layer(), torch.randn(10, 12)
    prune.global_unstructured([(mine, "weight")], importance_scores={(mine, "weight"): scores}, amount=0.4)
    places, given = [(theirs, "weight")], {(theirs, "weight"): scores}
    original.global_unstructured(places, original.L1Unstructured, given, amount=0.4)
    assert torch.equal(mask_of(mine), theirs.weight_mask)


def test_nan_does_not_take_the_place_of_what_has_left():
    """Two NaN and two weights that left before: one more is one more."""
    for call in (prune.l1_unstructured, prune.L1Unstructured.apply):
        module, mask = layer(), torch.ones(10, 12)
        mask[0, 0] = mask[5, 5] = 0
        prune.custom_from_mask(module, "weight", mask)
        with torch.no_grad():
            module.parametrizations.weight.original[1, 1] = torch.nan
            module.parametrizations.weight.original[2, 2] = torch.nan
        call(module, "weight", 1)
        assert int((mask_of(module) == 0).sum()) == 3
        assert mask_of(module)[1, 1] + mask_of(module)[2, 2] == 1


def test_functions_are_their_classes():
    """The same ties, the same random numbers."""
    for name, kind, options in (
        ("l1_unstructured", prune.L1Unstructured, {"amount": 0.5}),
        ("random_unstructured", prune.RandomUnstructured, {"amount": 0.5}),
        ("random_structured", prune.RandomStructured, {"amount": 3, "dim": 1}),
        ("ln_structured", prune.LnStructured, {"amount": 3, "n": 2, "dim": 1}),
    ):
        one, other = layer(), layer()
        for module in (one, other):
            nn.init.ones_(module.weight)
        for _ in range(2):
            state = torch.random.get_rng_state()
            getattr(prune, name)(one, "weight", **options)
            torch.random.set_rng_state(state)
            kind.apply(other, "weight", **options)
        assert torch.equal(mask_of(one), mask_of(other)), name
        if "unstructured" in name and "l1" in name:
            assert (mask_of(other).sum(1) > 0).all()  # ties leave evenly over rows


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    theirs = nn.Sequential(layer(), nn.ReLU(), nn.Linear(10, 4))
    original.l1_unstructured(theirs[0], "weight", 0.5)
    original.l1_unstructured(theirs[2], "weight", 0.5)
    state = theirs.state_dict()
    for change in (
        {"2.bias": torch.zeros(5)},  # refused by nn.Module.load_state_dict, after others were copied
        {"2.weight_mask": torch.zeros(5, 5)},
        {"more": torch.zeros(1)},
    ):
        model = nn.Sequential(layer(), nn.ReLU(), nn.Linear(10, 4))
        before, places = {k: v.clone() for k, v in model.state_dict().items()}, list(model.parameters())
        with pytest.raises((ValueError, RuntimeError)):
            prune.load_state_dict(model, {**state, **change})
        assert list(model.state_dict()) == list(before) and not prune.is_pruned(model)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(a is b for a, b in zip(model.parameters(), places, strict=True))


class Counted(nn.Linear):
    """A layer with a state of its own, which is no tensor."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("fits", [True, False])
def test_a_checkpoint_with_extra_state_loads_or_changes_nothing(fits):
    theirs, mine = nn.Sequential(Counted(12, 10)), nn.Sequential(Counted(12, 10))
    original.l1_unstructured(theirs[0], "weight", 0.5)
    theirs[0].seen, mine[0].seen = 7, 3
    state = theirs.state_dict() | ({} if fits else {"0.bias": torch.zeros(3)})
    if fits:
        prune.load_state_dict(mine, state)
        assert torch.equal(mine[0].weight, theirs[0].weight) and mine[0].seen == 7
    else:
        before = mine[0].weight.clone()
        with pytest.raises(RuntimeError, match="size mismatch"):
            prune.load_state_dict(mine, state)
        assert torch.equal(mine[0].weight, before) and mine[0].seen == 3


def test_a_checkpoint_finds_its_mask_behind_another_parametrization():
    theirs, mine = nn.Sequential(layer()), nn.Sequential(layer())
    original.l1_unstructured(theirs[0], "weight", 0.5)
    nn.utils.parametrize.register_parametrization(mine[0], "weight", nn.Identity())
    nn.utils.parametrize.register_parametrization(mine[0], "weight", prune.Pruned(torch.ones(10, 12)))
    prune.load_state_dict(mine, theirs.state_dict())
    assert torch.equal(mine[0].weight, theirs[0].weight)


def test_modules_are_listed_once(monkeypatch):
    model = nn.Sequential(*(layer() for _ in range(20)))
    for inner in model:
        original.l1_unstructured(inner, "weight", 0.5)
    state = model.state_dict()
    fresh, calls = nn.Sequential(*(layer() for _ in range(20))), []
    real = nn.Module.named_modules
    monkeypatch.setattr(
        nn.Module, "named_modules", lambda self, *a, **k: calls.append(self) or real(self, *a, **k)
    )
    prune.load_state_dict(fresh, state)
    assert sum(module is fresh for module in calls) <= 2


def test_the_parts_have_their_old_names():
    layer = prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5)
    prune.identity(layer, "bias")
    copied = copy.deepcopy(layer)
    for one in (layer, copied):
        assert one.weight_orig is one.parametrizations.weight.original and one.weight_orig.is_leaf
        assert one.weight_mask is one.parametrizations.weight[0].mask and one.weight_mask.sum() == 12
        assert torch.equal(one.weight, one.weight_orig * one.weight_mask)
        assert one.bias_mask.all()
    prune.remove(layer, "weight")
    for name in ("weight_orig", "weight_mask"):
        assert not hasattr(layer, name) and hasattr(copied, name)
    prune.remove(layer, "bias")
    assert type(layer) is nn.Linear and not hasattr(nn.Linear, "weight_mask")
    assert not hasattr(layer, "bias_mask") and hasattr(copied, "bias_mask")
