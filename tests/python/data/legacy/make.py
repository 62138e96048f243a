"""How the files beside this one were made, by the last releases of the libraries that wrote such files.

    pip install --no-deps compressed-tensors==0.12.2 loguru frozendict torchao==0.14.1
    git clone https://github.com/huggingface/pytorch_block_sparse  # 0.1.2
    PYTHONPATH=pytorch_block_sparse/pytorch_block_sparse python make.py

Each file holds the tensors of a layer "fc" and, as "expected", the dense weight they stand for.
"""

from pathlib import Path

import torch
from block_sparse import BlockSparseMatrixBase
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from torchao.sparsity.blocksparse import BlockSparseTensor

HERE = Path(__file__).parent


def two_of_four(*shape: int) -> torch.Tensor:
    w = torch.randn(shape)
    kept = w.reshape(-1, 4).abs().topk(2, dim=1).indices
    return w * torch.zeros_like(w).reshape(-1, 4).scatter(1, kept, 1).reshape(shape)


def save(name: str, tensors: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file({**tensors, "expected": expected}, HERE / f"{name}.safetensors")


def blocks(rows: int, cols: int, shape: tuple[int, int], density: float) -> torch.Tensor:
    grid = torch.rand(rows // shape[0], cols // shape[1]) < density
    grid[0, 0] = True
    return torch.randn(rows, cols) * grid.repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)


def block_libraries() -> None:
    w = blocks(24, 48, (4, 4), 0.4)
    kept = (w.reshape(6, 4, 12, 4) != 0).any(3).any(1).nonzero().tolist()
    matrix = BlockSparseMatrixBase.from_dense(w, (4, 4), blocks=kept)
    free = next((i, j) for i in range(6) for j in range(12) if [i, j] not in kept)
    matrix.block_replace(
        torch.tensor([[*free, 2]])
    )  # what SparseOptimizer does: pointers are no longer in order
    state = {f"fc.weight.{key}": tensor.detach() for key, tensor in matrix.state_dict().items()}
    save("pytorch-block-sparse", state | {"fc.bias": torch.randn(24)}, matrix.to_dense().detach())

    w = blocks(32, 64, (16, 16), 0.4).bfloat16()
    state = {"fc.weight": BlockSparseTensor.from_dense(w, 16), "expected": w}
    torch.save(state, HERE / "torchao-block-sparse.pt")


def main() -> None:
    torch.manual_seed(0)
    block_libraries()
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        w = (torch.randn(7, 19) * (torch.rand(7, 19) < 0.4)).to(dtype)
        w[3] = 0
        compressor = BaseCompressor.load_from_registry("sparse-bitmask", config=BitmaskConfig())
        save(f"sparse-bitmask-{short}", dict(compressor.compress({"fc.weight": w})), w)

        w = two_of_four(6, 10).to(dtype)  # groups of four cross rows
        w[0, :4] = 0
        config = Sparse24BitMaskConfig(sparsity_structure="2:4")
        compressor = BaseCompressor.load_from_registry("sparse-24-bitmask", config=config)
        save(f"sparse-24-bitmask-{short}", dict(compressor.compress({"fc.weight": w})), w)

    for bits, strategy, shape in ((4, "group", (64, 512)), (4, "group", (64, 256)), (8, "channel", (64, 64))):
        w = two_of_four(*shape).half()
        group = {"group_size": 128} if strategy == "group" else {}
        args = QuantizationArgs(num_bits=bits, strategy=strategy, symmetric=True, **group)
        parts = w.reshape(shape[0], -1, 128 if group else shape[1])
        scale = (parts.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zero = torch.zeros_like(scale, dtype=torch.int8)
        q = quantize(w, scale, zero, args, dtype=torch.float16)
        compressor = BaseCompressor.load_from_registry("marlin-24")
        state = {"fc.weight": w, "fc.weight_scale": scale, "fc.weight_zero_point": zero}
        scheme = {"fc": QuantizationScheme(targets=["Linear"], weights=args)}
        expected = dequantize(q, scale, zero, args, dtype=torch.float16)
        save(f"marlin-24-{bits}-{strategy}-{shape[1]}", compressor.compress(state, scheme), expected)


if __name__ == "__main__":
    main()
