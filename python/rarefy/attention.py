"""nn.MultiheadAttention with sparse projections: the same module, under the same names, in another class.

torch's own forward gives its weights to one function, which multiplies by plain tensors only. The class of a
module is changed in place while one of its weights is sparse, so that hooks and references stay, and a
state_dict has "in_proj_weight.values" where it had "in_proj_weight".
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from .checks import fail
from .modules import BlockSparseLinear
from .sparse_weight import SparseWeight

_THREE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class SparseMultiheadAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose in_proj_weight, q_proj_weight … and out_proj.weight may be sparse.

    Its heads need not fill embed_dim: q_proj_weight is (num_heads · head_dim, E) then, and so are the others.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As nn.MultiheadAttention: (L, N, E) or, with batch_first, (N, L, E), or (L, E)."""
        if is_causal and attn_mask is None:
            fail("MultiheadAttention", "attn_mask must come with is_causal", "none", RuntimeError)
        batched, same, one = query.dim() == 3, query is key is value, key is value
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # From here on (N, L, E), then (N, heads, L, E / heads).
        q, k, v = self._project(query, key, value, same, one)
        if self.bias_k is not None:
            k, v = (
                torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = None
        if not is_causal or key_padding_mask is not None or need_weights:
            mask, is_causal = self._mask(attn_mask, key_padding_mask, q, k.shape[1] - key.shape[1]), False
        q, k, v = (x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * math.sqrt(1 / self.head_dim)) @ k.transpose(2, 3)
            weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = functional.dropout(weights, dropout) if dropout else weights
            out = weights @ v
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        out = functional.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, same: bool, one: bool
    ) -> tuple[torch.Tensor, ...]:
        inputs, bias, e = (query, key, value), self.in_proj_bias, self.embed_dim
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = (getattr(self, name) for name in _THREE)
            return tuple(map(functional.linear, inputs, weights, biases))
        weight = self.in_proj_weight
        if same:
            return functional.linear(query, weight, bias).chunk(3, -1)
        if not isinstance(weight, SparseWeight):
            return tuple(map(functional.linear, inputs, weight.chunk(3), biases))
        # A sparse weight is multiplied as a whole, and other rows of the result are left alone.
        first, second = functional.linear(query, weight, bias), functional.linear(key, weight, bias)
        third = second if one else functional.linear(value, weight, bias)
        return first[..., :e], second[..., e : 2 * e], third[..., 2 * e :]

    def _mask(
        self, attention: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, extra: int
    ) -> torch.Tensor | None:
        """What is added to scores: −∞ where a bool mask is True; zero for `extra` columns at the end."""
        total = None
        if attention is not None:
            shape = (-1, self.num_heads) if attention.dim() == 3 else (1, 1)
            attention = attention.reshape(*shape, *attention.shape[-2:])
        for mask in (attention, None if padding is None else padding[:, None, None, :]):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = q.new_zeros(mask.shape).masked_fill(mask, -math.inf)
            total = mask if total is None else total + mask
        return total if total is None or not extra else functional.pad(total, (0, extra))


def projections(module: nn.Module) -> list[str]:
    """The attributes of the projection weights of a module that is just an nn.MultiheadAttention or ours."""
    if type(module) not in (nn.MultiheadAttention, SparseMultiheadAttention) or "forward" in vars(module):
        return []
    return ["in_proj_weight"] if module._qkv_same_embed_dim else list(_THREE)


def separate(module: nn.Module) -> None:
    """Makes three of one in_proj_weight, as torch does where keys are of another width than embed_dim.

    torch's own forward, and nn.TransformerEncoderLayer's fused one, want E rows of each projection otherwise.
    """
    if module._qkv_same_embed_dim:
        packed = module.in_proj_weight
        module.register_parameter("in_proj_weight", None)
        for name, weight in zip(_THREE, packed.detach().chunk(3), strict=True):
            module.register_parameter(name, nn.Parameter(weight.clone(), packed.requires_grad))
        module._qkv_same_embed_dim = False


def settle(module: nn.Module) -> None:
    """Gives an nn.MultiheadAttention the class that its weights and heads want."""
    if names := projections(module):
        sparse = any(isinstance(getattr(module, name), SparseWeight) for name in names)
        sparse = sparse or module.num_heads * module.head_dim != module.embed_dim
        sparse = sparse or isinstance(module.out_proj, BlockSparseLinear)
        module.__class__ = SparseMultiheadAttention if sparse else nn.MultiheadAttention


def put_projection(module: nn.Module, name: str, weight: SparseWeight | nn.Parameter) -> None:
    """Makes a weight the projection `name`, whether there is a Parameter or a module now."""
    delattr(module, name)
    setattr(module, name, weight)
    settle(module)
