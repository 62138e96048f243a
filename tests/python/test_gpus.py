"""Streams at once, large matrices; two GPUs in one process, and one for each of two, each with its own."""

import copy
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import rarefy
from ranks import results_of_ranks
from rarefy import sparse

_INFO = rarefy.backend_info()
_GPUS = torch.cuda.device_count() if _INFO["problem"] is None and _INFO["cuda_built"] else 0
pytestmark = pytest.mark.skipif(_GPUS == 0, reason="no GPU, or a build without CUDA")
needs_two = pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")
FIRST, SECOND = (torch.device("cuda", index) for index in (0, 1))


class Case(NamedTuple):
    block: tuple[int, int]
    dtype: torch.dtype
    tokens: int
    features: tuple[int, int] = (512, 1024)


# For each family of kernels and what it derives: strips, unions, tall vectors, decode, W packed whole, f32 as
# tf32 and true, sm80 and what takes any shape; and copies of rows that are no multiple of 16 bytes.
CASES = [
    Case((128, 128), torch.bfloat16, 512),
    Case((64, 64), torch.float16, 512),
    Case((32, 32), torch.bfloat16, 512),
    Case((16, 16), torch.bfloat16, 512),
    Case((16, 16), torch.bfloat16, 1),
    Case((64, 64), torch.bfloat16, 16),
    Case((128, 1), torch.bfloat16, 512),
    Case((64, 1), torch.bfloat16, 512),
    Case((32, 1), torch.bfloat16, 512),
    Case((32, 32), torch.float32, 512),
    Case((8, 8), torch.bfloat16, 100),
    Case((8, 8), torch.bfloat16, 4096),
    Case((4, 1), torch.float32, 33),
    Case((1, 1), torch.float32, 33),
    Case((64, 64), torch.bfloat16, 300, (515, 1001)),
    Case((16, 16), torch.float16, 300, (515, 1001)),
    Case((64, 1), torch.bfloat16, 300, (515, 1001)),
]
SQUARES = Case((64, 64), torch.bfloat16, 256)


@pytest.fixture
def tf32(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def _layer(case: Case, bias: bool = True) -> rarefy.BlockSparseLinear:
    layer = rarefy.BlockSparseLinear(*case.features, density=0.3, block_shape=case.block, bias=bias)
    return layer.to(case.dtype)


def _input(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(case.tokens, case.features[0], device=device, dtype=case.dtype)


def _results(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The product and all gradients, in training and without recording; all on the CPU."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    with torch.no_grad():
        made = [y, layer(x), layer(x), x.grad, *(p.grad for p in layer.parameters())]
    assert {part.device for part in made} == {x.device}
    layer.zero_grad()
    return [part.detach().cpu() for part in made]


def test_layers_that_follow_one_another_read_what_was_just_written():
    """A kernel may start while the one before it ends, which writes its x, its weights or its bias."""
    blocks = [(128, 128), (64, 64), (32, 32), (128, 1), (8, 8), (16, 16), (64, 1)]
    layers = [rarefy.BlockSparseLinear(2048, 2048, density=0.3, block_shape=block) for block in blocks]
    layers = nn.ModuleList(layers).to(FIRST, torch.bfloat16)
    x = torch.randn(1500, 2048, device=FIRST, dtype=torch.bfloat16)
    start = copy.deepcopy(layers.state_dict())

    def results(wait: bool) -> list[torch.Tensor]:
        layers.load_state_dict(start)
        made = [x]
        for layer in layers:
            layer.weight.values.mul_(-1)
            layer.bias.add_(0.125)
            if wait:
                torch.cuda.synchronize(FIRST)
            made.append(layer(made[-1]))
            if wait:
                torch.cuda.synchronize(FIRST)
        return made

    with torch.no_grad():
        want = results(wait=True)
        for _ in range(20):
            for layer, got, expected in zip(blocks, results(wait=False)[1:], want[1:], strict=True):
                assert torch.equal(got, expected), layer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_streams_share_a_layer(case):
    """Each with inputs of its own, forward and backward in turns, and no wait between."""
    layer = _layer(case).to(FIRST)
    inputs = [_input(case, FIRST) for _ in range(2)]
    want = [_results(layer, x) for x in inputs]
    streams = [torch.cuda.Stream(FIRST) for _ in inputs]
    made: list[list[torch.Tensor]] = []
    torch.cuda.synchronize(FIRST)
    for step in range(20):
        with torch.cuda.stream(streams[step % 2]):
            x = inputs[step % 2].detach().requires_grad_()
            y = layer(x)
            made.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    torch.cuda.synchronize(FIRST)
    for step, got in enumerate(made):
        y, _, _, *gradients = want[step % 2]
        assert all(torch.equal(a, b.cpu()) for a, b in zip([y, *gradients], got, strict=True))


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_one_stream_derives_another_waits_for(case, changed):
    """The first call of all, or after values changed, behind long work of one stream; the other is idle."""
    layer, x = _layer(case).to(FIRST), _input(case, FIRST)
    with torch.no_grad():
        if changed:
            layer(x)
            layer.weight.values.mul_(-1)
        streams = [torch.cuda.Stream(FIRST) for _ in range(2)]
        torch.cuda.synchronize(FIRST)
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(200_000_000)  # clocks: a tenth of a second
            first = layer(x)
        with torch.cuda.stream(streams[1]):
            second = layer(x)
        torch.cuda.synchronize(FIRST)
        want = layer(x)
    assert torch.equal(first, want) and torch.equal(second, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_capture_while_another_stream_runs_and_another_thread_calls(case):
    layer = _layer(case).to(FIRST)
    x, other = (_input(case, FIRST) for _ in range(2))
    stop, got = threading.Event(), []

    def call_on_and_on() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream(FIRST)):
            while not stop.is_set() or not got:
                got.append(layer(other))
                torch.cuda.current_stream(FIRST).synchronize()

    with torch.no_grad():
        want, want_other = layer(x), layer(other)
        torch.cuda.synchronize(FIRST)
        thread = threading.Thread(target=call_on_and_on)
        thread.start()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = layer(x)
            for _ in range(5):
                y.zero_()
                graph.replay()
                torch.cuda.current_stream(FIRST).synchronize()
                assert torch.equal(y, want)
        finally:
            stop.set()
            thread.join()
    assert all(torch.equal(one, want_other) for one in got[:100])


def _train_steps(call, layer: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Products, gradients and weights of some steps of SGD."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    made = []
    for x in inputs:
        x = x.clone().requires_grad_()
        y = call(x)
        y.float().square().mean().backward()
        made += [part.detach().clone() for part in (y, x.grad, *(p.grad for p in layer.parameters()))]
        optimizer.step()
        optimizer.zero_grad()
    return made + [p.detach().clone() for p in layer.parameters()]


@pytest.mark.parametrize("how", ["reduce-overhead", "make_graphed_callables"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_steps_in_graphs_of_torch(case, how):
    """Forward and backward replayed while weights change between: the bits of eager steps."""
    # No op of ours makes a bias's gradient in float32; inductor's sum is not torch's to the last bit.
    layer = _layer(case, bias=how != "reduce-overhead" or case.dtype != torch.float32).to(FIRST)
    twin = copy.deepcopy(layer)
    inputs = [_input(case, FIRST) for _ in range(5)]
    want = _train_steps(twin, twin, inputs)
    if how == "reduce-overhead":
        torch._dynamo.reset()  # each layer here is one more of the same code
        counters["inductor"].clear()
        compiled = torch.compile(layer, mode=how, fullgraph=True)

        def call(x: torch.Tensor) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(x)
    else:
        call = torch.cuda.make_graphed_callables(layer, (torch.randn_like(inputs[0], requires_grad=True),))
    got = _train_steps(call, layer, inputs)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert counters["inductor"]["cudagraph_skips"] == 0


FAR = [
    Case(block, torch.bfloat16, 2**20 + 5, features)
    for features, blocks in {
        (2048, 2056): [(128, 128), (64, 64), (32, 32), (16, 16), (8, 8), (128, 1), (64, 1), (32, 1)],
        (2051, 2049): [(64, 64), (16, 16), (64, 1)],
    }.items()
    for block in blocks
]


@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("case", FAR, ids=str)
def test_more_than_2_31_elements(case, by_feature):
    """What some tokens in three places give, among zeros: that of the same tokens alone."""
    if torch.cuda.get_device_properties(FIRST).total_memory < 60e9:
        pytest.skip("needs 60 GB on the GPU")
    layer = _layer(case).to(FIRST)
    few = _input(case._replace(tokens=300), FIRST).requires_grad_()
    want = layer(few)
    d_few = torch.randn_like(want)
    want_dx, *sums = torch.autograd.grad(want, [few, layer.weight.values, layer.bias], d_few)

    places = [slice(at, at + 300) for at in (0, case.tokens // 2, case.tokens - 300)]
    many = torch.zeros(case.tokens, case.features[0], device=FIRST, dtype=case.dtype)
    if by_feature:
        many = torch.empty_like(many.t()).t().zero_()
    for place in places:
        many[place] = few.detach()
    many.requires_grad_()
    y = layer(many)
    dy = torch.zeros_like(y)
    for place in places:
        dy[place] = d_few
    dx, *many_sums = torch.autograd.grad(y, [many, layer.weight.values, layer.bias], dy)
    assert min(many.numel(), y.numel()) > 2**31
    bias = layer.bias.detach()
    for begin, end in itertools.pairwise(places):
        between = slice(begin.stop, end.start)
        assert torch.equal(y[between], bias.expand_as(y)[between])
        assert not dx[between].any()
    pairs = [(y[place], want) for place in places] + [(dx[place], want_dx) for place in places]
    pairs += [(got, len(places) * one) for got, one in zip(many_sums, sums, strict=True)]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1.6e-2, atol=1e-2 * expected.abs().max().item())


@needs_two
@pytest.mark.parametrize("tf32", [False, True], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("tf32")
def test_each_gpu_computes_the_same(case):
    """Also while another one is current, and after the kernel ran on the first alone."""
    layer, x = _layer(case), _input(case)
    first, second = copy.deepcopy(layer).to(FIRST), copy.deepcopy(layer).to(SECOND)
    want = _results(first, x.to(FIRST))
    for current in (0, 1):
        with torch.cuda.device(current):
            got = _results(second, x.to(SECOND))
            again = _results(first, x.to(FIRST))
            assert torch.cuda.current_device() == current
        for a, b, c in zip(want, got, again, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)


@needs_two
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_that_moves_takes_along_what_it_computes(case):
    layer, x = _layer(case), _input(case)
    layer.to(FIRST)
    want = _results(layer, x.to(FIRST))
    for device in (SECOND, FIRST, SECOND):
        layer.to(device)
        assert all(torch.equal(a, b) for a, b in zip(want, _results(layer, x.to(device)), strict=True))


@needs_two
def test_both_at_once_each_in_a_stream_of_its_own():
    """Queues of products without a wait between; each GPU's own input and weight."""
    layers = [_layer(SQUARES).to(device) for device in (FIRST, SECOND)]
    inputs = [[_input(SQUARES, device) for _ in range(40)] for device in (FIRST, SECOND)]
    with torch.no_grad():
        want = [[layer(x).cpu() for x in xs] for layer, xs in zip(layers, inputs, strict=True)]
        streams = [torch.cuda.Stream(device) for device in (FIRST, SECOND)]
        torch.cuda.synchronize(FIRST)
        torch.cuda.synchronize(SECOND)
        got: list[list[torch.Tensor]] = [[], []]
        for step in range(40):
            for gpu in (0, 1):
                with torch.cuda.stream(streams[gpu]):
                    got[gpu].append(layers[gpu](inputs[gpu][step]))
        for stream in streams:
            stream.synchronize()
    for gpu in (0, 1):
        assert all(torch.equal(a, b.cpu()) for a, b in zip(want[gpu], got[gpu], strict=True))


@needs_two
def test_a_graph_of_the_second_while_the_first_is_current():
    layer = _layer(SQUARES).to(SECOND)
    x = _input(SQUARES, SECOND)
    with torch.no_grad():
        want = [layer(x), layer(x + 1)]
        graph = torch.cuda.CUDAGraph()
        # Without a stream torch captures in one of the GPU that was captured on first.
        with torch.cuda.device(SECOND), torch.cuda.graph(graph, stream=torch.cuda.Stream(SECOND)):
            y = layer(x)
        assert torch.cuda.current_device() == 0
        for turn in (0, 1):
            x.add_(turn)
            graph.replay()
            torch.cuda.synchronize(SECOND)
            assert torch.equal(y, want[turn])


@needs_two
def test_a_compiled_layer_on_the_second():
    layer = _layer(SQUARES).to(SECOND)
    x = _input(SQUARES, SECOND)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=0, atol=0)


@needs_two
def test_matrices_and_their_products():
    scores = torch.randn(300, 300)
    for block in ((1, 1), (10, 10)):
        kept = rarefy.BsrWeight.from_dense(scores, block_shape=block, density=0.2)
        made = []
        for device in (FIRST, SECOND):
            a = sparse.SparseMatrix.of(kept).to(device)
            b = torch.linspace(-1, 1, 300 * 40, device=device).view(300, 40)
            made.append([(a @ b).cpu(), sparse.sddmm(a, b, b).data.cpu(), (a @ a).to_dense().cpu()])
            assert (a @ b).device == device
        assert all(torch.equal(p, q) for p, q in zip(*made, strict=True))


@needs_two
@pytest.mark.parametrize("wrong", ["x", "bias"])
def test_what_lies_on_the_other_gpu_is_refused_and_nothing_is_lost(wrong):
    layer = _layer(SQUARES).to(FIRST)
    x = _input(SQUARES, FIRST)
    want = layer(x)
    if wrong == "bias":
        bias, layer.bias = layer.bias, nn.Parameter(layer.bias.detach().to(SECOND))
    with pytest.raises((TypeError, RuntimeError), match=rf"{wrong} .*cuda:[01]; got cuda:[01]|same device"):
        layer(x.to(SECOND) if wrong == "x" else x)
    if wrong == "bias":
        layer.bias = bias
    assert torch.equal(layer(x), want)


def _train(rank: int, dense: bool = False) -> list[torch.Tensor]:
    """Some steps of a network on this rank's half of each batch, or of its dense twin."""
    torch.manual_seed(0)
    layers = [
        _layer(SQUARES._replace(dtype=torch.float32)),
        nn.GELU(),
        rarefy.BlockSparseLinear(1024, 256, density=0.3),
    ]
    model = nn.Sequential(
        *(part.to_dense() if dense and hasattr(part, "to_dense") else part for part in layers)
    )
    masks = [(part.weight != 0).float() for part in model if isinstance(part, nn.Linear)]
    model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(256, 512, generator=generator)[rank::2].cuda()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if dense:
            linears = [part for part in model.module if isinstance(part, nn.Linear)]
            for part, mask in zip(linears, masks, strict=True):
                part.weight.grad.mul_(mask.cuda())
        optimizer.step()
    weights = [part for part in model.module if hasattr(part, "weight")]
    return [(p.weight if dense else p.weight.to_dense()).detach().cpu() for p in weights]


def _train_both(rank: int) -> list[list[torch.Tensor]]:
    return [_train(rank), _train(rank, dense=True)]


@needs_two
@pytest.mark.timeout(300)
def test_ddp_over_nccl_trains_as_the_dense_network(tmp_path):
    (ours, dense), (others, _) = results_of_ranks(_train_both, tmp_path, "nccl")
    for mine, other, want in zip(ours, others, dense, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
