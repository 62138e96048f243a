"""The timing of dense against sparse: fake clocks with known truth, noise that is seen, busy machines."""

import contextlib
import io
import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import rarefy
from rarefy import timing
from rarefy.report_data import LayerRow
from rarefy.timing import Clock, Times, Timing, measure_pair, time_layers, time_pair

MS = 1e-3


class Machine:
    """A clock that only moves when work is done on it, and the functions that do the work."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = self.used = self.queue = 0.0
        self.share = share  # of the wall time that the calling thread gets
        self.calls = ""

    def work(self, name: str, seconds) -> None:
        self.calls += name
        took = next(seconds) if hasattr(seconds, "__next__") else seconds
        self.now += took
        self.used += took * self.share

    def measure(self, dense, sparse, **options) -> Times:
        clock = Clock(lambda: self.now, lambda: self.used, lambda: self.queue)
        return measure_pair(
            lambda: self.work("d", dense), lambda: self.work("s", sparse), clock=clock, **options
        )


def test_known_durations_come_out_and_are_not_swapped():
    times = Machine().measure(3 * MS, 1 * MS)
    assert times.dense.median == pytest.approx(3) and times.sparse.median == pytest.approx(1)
    assert times.speedup == pytest.approx(3) and times.noise is None
    assert times.ratios == pytest.approx([3, 3, 3]) and times.waited == pytest.approx(0)
    assert Machine().measure(1 * MS, 4 * MS).speedup == pytest.approx(0.25)


def test_dense_and_sparse_take_turns_in_alternating_order():
    machine = Machine()
    times = machine.measure(3 * MS, 1 * MS)
    warm_up, rounds = machine.calls[:2], machine.calls[2:]
    assert warm_up == "ds" and len(rounds) == 2 * times.dense.rounds
    pairs = [rounds[i : i + 2] for i in range(0, len(rounds), 2)]
    assert set(pairs) == {"ds", "sd"} and abs(pairs.count("ds") - pairs.count("sd")) <= 3


def test_short_calls_are_sampled_often_and_long_ones_at_least_nine_times():
    assert Machine().measure(1 * MS / 100, 1 * MS / 100).dense.rounds == 600
    assert Machine().measure(1.0, 1.0).dense.rounds == 9
    assert 9 < Machine().measure(1 * MS, 1 * MS).dense.rounds < 600


def test_the_first_calls_warm_up():
    slow_start = itertools.chain([1.0], itertools.repeat(1 * MS))
    assert Machine().measure(slow_start, 1 * MS).dense.upper == pytest.approx(1)


def hit(normal: float, every: int, extra: float):
    """Durations of which each `every`th is longer, as when another process gets a slice."""
    return (normal + extra * (i % every == every - 1) for i in itertools.count())


def test_a_few_samples_that_lost_their_processor_change_nothing():
    times = Machine().measure(hit(0.3 * MS, 7, 4 * MS), hit(0.1 * MS, 9, 4 * MS))
    assert times.speedup == pytest.approx(3)


def test_a_thread_that_waits_for_its_processor_makes_noise():
    times = Machine(share=0.7).measure(3 * MS, 1 * MS)
    assert times.waited == pytest.approx(0.3) and times.speedup is None
    assert times.noise == "threads waited 30% of the time for a processor"
    assert Machine(share=0.9).measure(3 * MS, 1 * MS).noise is None


def test_threads_in_the_queue_make_noise_though_the_caller_spins():
    machine = Machine()
    queued = itertools.count(0, 0.02)  # 20 ms in each pass of 70
    clock = Clock(lambda: machine.now, lambda: machine.used, lambda: next(queued))
    times = measure_pair(lambda: machine.work("d", 3 * MS), lambda: machine.work("s", 1 * MS), clock=clock)
    assert times.waited == pytest.approx(0.02 / 0.072, rel=0.05) and "waited" in times.noise


def test_passes_that_disagree_make_noise():
    # Another process takes its share while the second pass runs: of sparse alone, by bad luck.
    sparse = itertools.chain(itertools.repeat(1 * MS, 30), itertools.repeat(2 * MS, 20), itertools.repeat(MS))
    times = Machine().measure(3 * MS, sparse)
    assert times.speedup is None and times.noise.startswith("passes disagree: 1.5")


def test_wide_quartiles_make_noise():
    times = Machine().measure(hit(1 * MS, 2, 1 * MS), 1 * MS)
    assert times.speedup is None and times.noise == "quartiles lie more than 1.5x apart"


def test_the_first_quiet_result_counts_and_else_the_quietest():
    noisy, noisier, good = (quiet(2.0, waited=w) for w in (0.3, 0.6, 0.0))
    answers = iter([noisier, good, noisy])
    assert timing.quietest(lambda: next(answers)) is good and next(answers) is noisy
    answers = iter([noisier, noisy, noisier, good])
    assert timing.quietest(lambda: next(answers)) is noisy and next(answers) is good


def test_threads_that_look_for_work_wait_for_nothing(tmp_path):
    """Ran, waited, slices: of a thread that multiplies, of one that looks for work, and nonsense."""
    files = ("5000000000 1000000000 70", "10000000 9000000000 900", "", "x")
    for name, text in zip("1234", files, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    assert timing.queued(tmp_path) == pytest.approx(1.0 + 0.01)


# A busy machine -----------------------------------------------------------------------------------


def spin(steps: int) -> None:
    while steps:
        steps -= 1


@contextlib.contextmanager
def processes_on_my_processor(count: int):
    """Keeps one processor busy and this thread on it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)  # until they run
        yield
    finally:
        os.sched_setaffinity(0, before)
        for process in others:
            process.kill()
            process.wait()


@contextlib.contextmanager
def a_thread_in_python():
    running = threading.Event()
    running.set()
    thread = threading.Thread(target=lambda: [None for _ in iter(running.is_set, False)])
    thread.start()
    try:
        yield
    finally:
        running.clear()
        thread.join()


@pytest.mark.parametrize("busy", [lambda: processes_on_my_processor(3), a_thread_in_python])
def test_a_busy_machine_is_seen(busy):
    with busy():
        times = measure_pair(lambda: spin(3000), lambda: spin(1000))
    assert times.noise is not None and times.speedup is None, times


def test_real_functions_of_known_work_are_right_or_called_noise():
    for _ in range(20):
        times = measure_pair(lambda: spin(30000), lambda: spin(10000))
        assert times.noise is not None or times.speedup == pytest.approx(3, rel=0.25), times
        if times.noise is None:
            return


# Layers -------------------------------------------------------------------------------------------


def test_layers_are_called_with_the_tokens_and_dtype_asked_for():
    seen = []
    linear = nn.Linear(8, 4, dtype=torch.bfloat16)
    sparse = rarefy.BlockSparseLinear.from_dense(linear, block_shape=(2, 2), density=0.5)
    for layer in (linear, sparse):
        layer.register_forward_hook(lambda module, x, _y: seen.append((module, x[0].shape, x[0].dtype)))
    time_pair(linear, sparse, 7)
    assert {shape for _, shape, _ in seen} == {(7, 8)} and {dtype for _, _, dtype in seen} == {torch.bfloat16}
    assert seen[0][0] is linear and seen[1][0] is sparse


def quiet(dense: float = 2.0, waited: float = 0.0) -> Times:
    return Times(Timing(dense, dense, dense, 9), Timing(1.0, 1.0, 1.0, 9), (dense,), waited)


def layers(*kinds):
    """Rows and layers of (in_features, dtype)."""
    made = []
    for i, (width, dtype) in enumerate(kinds):
        dense = nn.Linear(width, 4, dtype=dtype)
        row = LayerRow(f"layer{i}", [], (4, width), format="block:2x2", density=0.5)
        made.append((row, dense, dense))
    return made


@pytest.fixture
def results(monkeypatch):
    """What time_pair gives, by in_features of the layer, one after another; and the calls."""
    answers, calls = {}, []

    def answer(dense, _sparse, tokens):
        calls.append((dense.in_features, tokens))
        return answers[dense.in_features].pop(0)

    monkeypatch.setattr(timing, "time_pair", answer)
    return answers, calls


def test_equal_layers_are_timed_once(results):
    answers, calls = results
    answers |= {8: [quiet(2.0), quiet(5.0)], 6: [quiet(3.0)]}
    made = layers((8, torch.float32), (6, torch.float32), (8, torch.float32), (8, torch.bfloat16))
    time_layers(made, 16)
    assert calls == [(8, 16), (6, 16), (8, 16)]
    assert [row.speedup for row, _, _ in made] == [2, 3, 2, 5]
    assert [row.timed_as for row, _, _ in made] == [None, None, "layer0", None]


def test_noisy_layers_are_timed_again_after_the_others(results):
    answers, calls = results
    answers |= {8: [quiet(9.0, waited=0.5), quiet(2.0)], 6: [quiet(3.0)]}
    made = layers((8, torch.float32), (6, torch.float32), (8, torch.float32))
    time_layers(made, 16)
    assert [width for width, _ in calls] == [8, 6, 8]
    assert [row.speedup for row, _, _ in made] == [2, 3, 2]


def test_after_three_tries_the_quietest_stays_and_is_called_noise(results):
    answers, calls = results
    answers[8] = [quiet(9.0, waited=0.5), quiet(8.0, waited=0.2), quiet(7.0, waited=0.4)]
    ((row, _, _),) = made = layers((8, torch.float32))
    time_layers(made, 16)
    assert len(calls) == 3 and row.dense_time.median == 8 and row.speedup is None
    assert row.noise == "threads waited 20% of the time for a processor" and not row.is_slower


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_after_a_second(monkeypatch, terminal):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    def slow(*_):
        time.sleep(0.4)
        return quiet()

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(timing, "time_pair", slow)
    time_layers(layers((8, torch.float32)), 16)
    assert screen.getvalue() == ""  # less than a second
    time_layers(layers(*((width, torch.float32) for width in range(1, 5))), 16)
    assert ("timing layers" in screen.getvalue()) == terminal
