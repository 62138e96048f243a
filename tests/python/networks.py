"""Small networks as models write them, made sparse, and the names of the products that they run."""

from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import rarefy

K, H, T = 16, 24, 8
SPEC = "block:4x1@0.5"


class Ops(TorchDispatchMode):
    """The names of Rarefy's products that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("bsr_linear", "bsr_feed_forward"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


class Between(nn.Module):
    """up, an activation, down."""

    def __init__(self, act, dropout=0.0):
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(K, H), act, nn.Dropout(dropout), nn.Linear(H, K)

    def forward(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Plain(nn.Module):
    """Functions between layers, and no module or attribute that says so."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(K, H), nn.Linear(H, K)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Bert(nn.Module):
    """The two modules of BERT's layers, which meet in a third."""

    def __init__(self):
        super().__init__()
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense, self.intermediate.act_fn = nn.Linear(K, H), nn.GELU()
        self.output.dense = nn.Linear(H, K)

    def forward(self, x):
        return self.output.dense(self.intermediate.act_fn(self.intermediate.dense(x)))


class Llama(nn.Module):
    """A gate."""

    def __init__(self, swap=False):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((K, H), (K, H), (H, K)))
        self.act_fn, self.swap = nn.SiLU(), swap

    def forward(self, x):
        gate = self.act_fn(self.gate(x))
        return self.down(self.up(x) * gate if self.swap else gate * self.up(x))


NETWORKS = {
    "gelu": lambda: Between(nn.GELU()),
    "gelu_tanh": lambda: Between(nn.GELU(approximate="tanh")),
    "relu": lambda: Between(nn.ReLU()),
    "relu_in_place": lambda: Between(nn.ReLU(inplace=True)),
    "silu": lambda: Between(nn.SiLU()),
    "function": lambda: Between(functional.gelu),
    "sequential": lambda: nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, K)),
    "plain": Plain,
    "bert": Bert,
    "llama": Llama,
    "llama_swapped": lambda: Llama(True),
    "dropout_that_is_off": lambda: Between(nn.GELU(), 0.5).eval(),
}


def sparse(make, spec=SPEC, fuse=True):
    model = nn.ModuleDict({"net": make()})
    rarefy.sparsify(model, {r"net\..*": spec}, measure=False, fuse=fuse)
    return model["net"]


def ran(f):
    with Ops() as seen:
        y = f()
    return y, seen.names
