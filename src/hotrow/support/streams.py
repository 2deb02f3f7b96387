"""Streams beside training, marks in them, and captured launches.

On a GPU every lane is a stream and marks are events. On a CPU everything runs in order, and every
mark has passed.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Name = Literal["sort", "plan", "rows", "back", "train"]


class Mark:
    """A point in a lane. On a CPU it has passed."""

    def wait(self) -> None:
        """Let the host wait until the lane has come there."""

    def passed(self) -> bool:
        """Return whether the lane has come there."""
        return True

    def since(self, earlier: Mark) -> float:
        """Seconds between two marks of any lanes that have passed; below 0: it came before."""
        return 0.0


class _Event(Mark):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # torch.cuda.Event adds nothing to it but a layer of Python, several times a step.
        self.event = torch._C._CudaEventBase(enable_timing=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Event)
        return earlier.event.elapsed_time(self.event) / 1000


class _On:
    """As torch.cuda.stream, which asks for the device again and again."""

    def __init__(self, lanes: Lanes, stream: torch.cuda.Stream) -> None:
        self._lanes, self._stream = lanes, stream

    def __enter__(self) -> None:
        here = self._lanes.here
        self._before, self._outside = here.inside, here.outside
        if self._outside is None:
            here.outside = torch.cuda.current_stream(self._stream.device_index)
        here.inside = self._stream
        if self._before is not self._stream:
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        here = self._lanes.here
        assert here.outside is not None
        if self._before is not self._stream:
            torch.cuda.set_stream(self._before or here.outside)
        here.inside, here.outside = self._before, self._outside


class _Here(threading.local):
    """Where one thread launches: torch's current stream is a thread's own, too.

    Holds no event: a forked child destroys what other threads had, and CUDA ends it for that.
    """

    inside: torch.cuda.Stream | None = None  # of the lane that is on
    outside: torch.cuda.Stream | None = None  # training's, while it is known
    has_turn = False
    trained_on: torch.cuda.Stream | None = None  # training's at the last turn


# Lower numbers first. A fill is first in line for the few multiprocessors it needs, and takes long;
# a plan has two cycles, so it takes what a captured training step leaves idle. Training waits for
# what is sorted.
PRIORITIES: dict[Name, int] = {"sort": -1, "plan": 0, "rows": -2, "back": -2, "train": -1}

_NOWHERE: AbstractContextManager[None] = nullcontext()


class Lanes:
    """`sort`, `plan`, `rows` and `back` run beside `train`, the lane of the caller."""

    _event: type[_Event] = _Event

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[Name, torch.cuda.Stream] = {}
        self.here = _Here()
        self._newest: dict[Name | int, Mark] = {}  # by lane, or by the number of a stream
        self._training: dict[int, torch.cuda.Stream] = {}  # streams that any thread trains on
        self._made = WeakIdKeyDictionary()  # tensor -> when it is there, where that is known
        if device.type == "cuda":
            self._streams = {
                name: _own_stream(device.index, priority)
                for name, priority in PRIORITIES.items()
                if name != "train"
            }

    def _stream(self, name: Name) -> torch.cuda.Stream:
        found = self._streams.get(name) or self.here.outside
        return found or torch.cuda.current_stream(self.device.index)

    def on(self, name: Name) -> AbstractContextManager[None]:
        """Launch the work of the block in a lane."""
        stream = self._streams.get(name)
        return _NOWHERE if stream is None else _On(self, stream)

    def take_turn(self) -> None:
        """Training's stream is the current one, and stays that until the turn is given back.

        To ask torch for it costs the host more than a launch, so it is asked once a turn.
        """
        here = self.here
        if self._streams and here.inside is None and not here.has_turn:
            here.has_turn = True
            here.outside = self._train_here()

    def trains_here(self) -> None:
        """The current stream is training's: threads that read rows wait for it."""
        if self._streams:
            self._train_here()

    def _train_here(self) -> torch.cuda.Stream:
        here = self.here
        stream = self._current(here.trained_on)
        if stream is not here.trained_on:
            here.trained_on = stream
            self._training[stream.cuda_stream] = stream
        return stream

    def _current(self, likely: torch.cuda.Stream | None) -> torch.cuda.Stream:
        # As a number it costs a tenth; mostly it is the same.
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        if likely is None or likely.cuda_stream != current:
            return torch.cuda.current_stream(self.device.index)
        return likely

    def give_turn(self) -> None:
        """From now on others may choose streams, and train."""
        here = self.here
        if here.inside is None:
            here.has_turn, here.outside = False, None

    def mark(self, name: Name) -> Mark:
        """Return a mark behind all work of a lane so far."""
        if not self._streams:
            return Mark()
        stream = self._stream(name)
        mark = self._event(stream)
        # Threads train on streams of their own.
        self._newest[stream.cuda_stream if name == "train" else name] = mark
        return mark

    def launched_on(self, stream: torch.cuda.Stream | None) -> Mark:
        """Return a mark in a stream that `newest` does not return; for any thread."""
        return self.mark("train") if stream is None else self._event(stream)

    def mark_here(self) -> Mark:
        """Return a mark in the current stream that `newest` does not return."""
        if not self._streams:
            return Mark()
        return self._event(self._current(self.here.inside or self.here.trained_on))

    def newest(self, name: Name) -> Mark | None:
        """Return the last mark of a lane; later work may follow it."""
        if name != "train":
            return self._newest.get(name)
        stream = self.here.trained_on
        return None if stream is None else self._newest.get(stream.cuda_stream)

    def after(self, name: Name, mark: Mark | None) -> None:
        """Let later work of a lane wait for a mark; the host does not wait."""
        if isinstance(mark, _Event):
            mark.event.wait(self._stream(name))

    def join(self) -> None:
        """Let later work of training wait for all lanes, and lanes for training's work so far.

        A thread that does not train joins its own stream as well as training's.
        """
        if not self._streams:
            return
        mine = self._stream("train")
        for name, stream in self._streams.items():
            mark = self._newest[name] = self._event(stream)
            mark.event.wait(mine)
        for stream in self._trained_elsewhere(mine):
            self._event(stream).event.wait(mine)
        self.read_here()

    def read_here(self) -> None:
        """Let all lanes and training wait for the current thread's work so far."""
        if self._streams:
            mine = self._stream("train")
            mark = self._newest[mine.cuda_stream] = self._event(mine)
            for stream in (*self._streams.values(), *self._trained_elsewhere(mine)):
                mark.event.wait(stream)

    def _trained_elsewhere(self, mine: torch.cuda.Stream) -> list[torch.cuda.Stream]:
        number = mine.cuda_stream
        return [stream for other, stream in self._training.items() if other != number]

    def keep_for(self, name: Name, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors until a lane has read them."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream(name))

    def hand_over(self, tensors: list[Tensor], made: Mark | None = None) -> None:
        """Keep the memory of tensors that another lane made until training has used them."""
        if self._streams:
            stream = torch.cuda.current_stream(self.device.index)
            for tensor in tensors:
                tensor.record_stream(stream)
                if made is not None:
                    self._made[tensor] = made

    def made_by(self, tensors: Sequence[Tensor]) -> Mark:
        """Return a mark after which tensors are made: training's, unless handed over."""
        marks = {self._made.get(tensor) for tensor in tensors}
        return (marks.pop() if len(marks) == 1 else None) or self.mark("train")

    def read_in(self, name: Name, tensors: Sequence[Tensor]) -> None:
        """Let a lane read tensors when they are made."""
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        if on_gpu:
            self.after(name, self.made_by(on_gpu))
            self.keep_for(name, on_gpu)


@cache
def lanes_of(device: Any) -> Lanes:
    """Return the lanes of a device, shared by all that runs on it."""
    if device.type == "cuda" and device.index is None:
        return lanes_of(torch.device("cuda", torch.cuda.current_device()))
    if device.type == "cuda":
        _keep_off_captures()
    return Lanes(device)


class Recorder:
    """Captures repeated launches as CUDA graphs.

    A launch from Python takes the host as long as a small kernel takes the GPU.
    """

    _MOST_GRAPHS = 192
    _MOST_SEEN = 4096

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seen: set[Any] = set()
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def run(self, key: Any, launch: Callable[[], None]) -> None:
        """Launch, or replay what was captured under `key`."""
        graph = self._graphs.get(key)
        if graph is None and self._on_gpu and self._comes_again(key):
            graph = self._capture(launch)
            if graph is not None:
                self._graphs[key] = graph
        if graph is None:
            launch()
        else:
            graph.replay()

    def _comes_again(self, key: Any) -> bool:
        """Return whether a key was seen before: its kernels are compiled, and a graph pays."""
        if key in self._seen:
            return len(self._graphs) < self._MOST_GRAPHS
        if len(self._seen) >= self._MOST_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def forget(self) -> None:
        """Drop all graphs, because their tensors are about to be freed."""
        if self._graphs:
            synchronize()  # graphs may still be running
            self._graphs.clear()
            self._pool = None  # it went with the last of them

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return a graph; None: another thread has spoiled it, and the next launch tries again."""
        try:
            graph = capture(launch, self._pool, torch.cuda.current_stream().priority)
        except RuntimeError as error:
            if not is_spoiled(error):
                raise
            self._pool = None  # it may still be recording, if the capture was spoiled at its end
            return None
        self._pool = graph.pool()
        return graph


@cache
def _capture_stream(device: int, priority: int) -> torch.cuda.Stream:
    return _own_stream(device, priority)


def _own_stream(device: int, priority: int) -> torch.cuda.Stream:
    """Create a stream that no other code gets.

    torch hands out the same 32 streams to all callers. If two threads shared one, a capture in one
    thread would record the launches of the other.
    """
    handle = ctypes.c_void_p()
    non_blocking = 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the device is in use, so that its context is current
        create = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority
        status = create(ctypes.byref(handle), non_blocking, priority)
    if status or handle.value is None:
        raise RuntimeError(f"CUDA cannot create a stream on device {device}: error {status}")
    return torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", device))


def capturing() -> bool:
    """Return whether the current stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# CUDA refuses to wait for a whole device while any thread captures, and spoils that capture.
_capturing = threading.RLock()


def synchronize(device: torch.device | None = None) -> None:
    """Wait for a device, when no thread captures."""
    with _capturing:
        torch.cuda.synchronize(device)


@cache
def _keep_off_captures() -> None:
    """Let a user's `torch.cuda.synchronize()` wait until no thread captures, too."""
    of_torch = torch.cuda.synchronize

    @wraps(of_torch)
    def wait(device: Any = None) -> None:
        # A thread of autograd's that works for a capture would wait for itself; CUDA refuses it.
        if torch._C._current_graph_task_id() == -1 and not capturing():
            with _capturing:
                pass  # not held while waiting: threads of several devices may need each other
        of_torch(device)

    torch.cuda.synchronize = wait


class SpoiledCapture(RuntimeError):
    """Another thread has asked something of CUDA that ended a capture."""


def is_spoiled(error: BaseException) -> bool:
    """Return whether a capture failed by what another thread has asked of CUDA meanwhile."""
    while error.__context__ is not None:
        error = error.__context__
    return isinstance(error, SpoiledCapture) or "previous error during capture" in str(error)


_INVALIDATED, _THREAD_LOCAL = 2, 1  # of CUDA's stream capture status and mode


def _mend_capture(stream: torch.cuda.Stream, node: Tensor) -> bool:
    """Replace a spoiled capture of a stream by one of a single node; return whether it was spoiled.

    torch raises where it ends a spoiled capture, and leaves open what it has begun: its allocators
    go on recording into the pool, and its generator waits for the graph. There is no way to end
    those but to end a capture that succeeds.
    """
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(stream.cuda_stream)
    status, graph = ctypes.c_int(), ctypes.c_void_p()
    driver.cuStreamIsCapturing(handle, ctypes.byref(status))
    if status.value != _INVALIDATED:
        return False
    driver.cuStreamEndCapture(handle, ctypes.byref(graph))
    if driver.cuStreamBeginCapture_v2(handle, _THREAD_LOCAL) == 0:
        with torch.cuda.stream(stream):
            node.zero_()  # torch warns of a graph without nodes
    return True


def capture(launch: Callable[[], None], pool: Any, priority: int) -> torch.cuda.CUDAGraph:
    """Return what `launch` launches as a graph, whose memory is in `pool`.

    Its kernels have the priority of the stream they were captured on, wherever they are replayed.
    Raises what `is_spoiled` recognises if another thread has ended the capture.
    """
    graph = torch.cuda.CUDAGraph()
    collects, stream = gc.isenabled(), torch.cuda.current_stream()
    side = _capture_stream(stream.device_index, priority)
    node = torch.zeros(1, device=stream.device)
    spoiled = False
    gc.disable()  # to free an older graph now would spoil this one
    try:
        # Other threads may allocate, or pin memory, meanwhile.
        with (
            _capturing,
            torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            try:
                launch()
            finally:
                spoiled = _mend_capture(side, node)
    finally:
        torch.cuda.set_stream(stream)  # where torch leaves its own after a failure
        if collects:
            gc.enable()
    if spoiled:
        raise SpoiledCapture("another thread has ended the capture of a CUDA graph")
    return graph
