"""A tiny model with the shapes of trouble: nested names, a shared layer, tied weights, attention."""

import torch
from torch import nn


class Feed(nn.Module):
    """x + down(relu(up(x))), as the feed-forward half of an encoder layer."""

    def __init__(self, hidden: int = 16, inner: int = 32) -> None:
        super().__init__()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, inner)})
        self.output = nn.ModuleDict({"dense": nn.Linear(inner, hidden)})

    def forward(self, x):
        return x + self.output["dense"](torch.relu(self.intermediate["dense"](x)))


class Tiny(nn.Module):
    """Token ids (B, T) to logits (B, T, 30); `decoder` is tied to the embeddings, `again` is `once`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(30, 16)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Feed() for _ in range(layers))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.once = nn.Linear(16, 16, bias=False)
        self.again = self.once
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 7)
        self.decoder = nn.Linear(16, 30)
        self.decoder.weight = self.embeddings.weight

    def forward(self, ids):
        x = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.again(torch.tanh(self.once(x)))
        return self.decoder(self.norm(x))


FEED = r"encoder\.layer\.\d+\.(intermediate|output)\.dense"


def ids() -> torch.Tensor:
    return torch.arange(24).reshape(2, 12)


def snapshot(model: nn.Module) -> dict[str, tuple]:
    """All that an error must leave as it was: types, tensor identities, bits and flags."""
    modules = {name: (type(m), m.training) for name, m in model.named_modules(remove_duplicate=False)}
    tensors = {
        name: (id(t), t.requires_grad, t.detach().clone())
        for name, t in model.state_dict(keep_vars=True).items()
    }
    return {"modules": modules, "tensors": tensors}


def assert_unchanged(model: nn.Module, before: dict) -> None:
    after = snapshot(model)
    assert after["modules"] == before["modules"]
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (identity, grad, data) in before["tensors"].items():
        assert after["tensors"][name][:2] == (identity, grad), name
        assert torch.equal(after["tensors"][name][2], data), name
