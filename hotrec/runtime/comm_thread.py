"""Communication concurrent with the main thread: a task thread, and integers copied to the host."""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

T = TypeVar("T")
Task = tuple[Callable[[], Any], "CommunicationFuture[Any]", torch.cuda.Event | None]

# Threads that were started, with their tasks.
_STARTED: WeakKeyDictionary[threading.Thread, SimpleQueue[Task | None]] = WeakKeyDictionary()
# At exit; longer than any remaining task needs if its peers are alive.
_LEAVE_S = 1.0


@atexit.register
def _end_threads() -> None:
    """Stop all threads before the interpreter exits: a running one would abort the process."""
    for tasks in _STARTED.values():
        tasks.put(None)
    for thread in list(_STARTED):
        thread.join(_LEAVE_S)


def record_use(*values: torch.Tensor) -> None:
    """Record tensors of a task, made on its own stream, as used on the current stream.

    Otherwise their memory is reused by the next task once they are freed, although the current
    stream may not have read them yet.
    """
    for value in values:
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


class CommunicationFuture(Future[T]):
    """The result of a task, for the thread that submitted it."""

    event: torch.cuda.Event | None = None

    def wait(self) -> T:
        """Return the task's result; on CUDA the current stream waits for it, not the host.

        Tensors that the task made belong to its stream, see ``record_use``.

        Raises:
            Exception: what the task, or one before it, raised.
        """
        result = self.result()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return result


class CommunicationThread:
    """Runs tasks in the order of their submission on a daemon thread, started by the first one.

    After a task has failed no other task runs: its collectives would not match those of the other
    ranks. A daemon, unlike the threads of a ``ThreadPoolExecutor``, because a task that waits for a
    dead rank must not keep the process alive.

    Args:
        device: If CUDA, tasks run on their own stream, which first waits for all work queued on the
            submitting stream.
        name: The thread's name, shown in traces.
        is_apart: Whether it skips that wait, because tasks do not use results of that stream.
    """

    def __init__(self, device: torch.device, name: str, *, is_apart: bool = False) -> None:
        self._device, self._is_apart = device, is_apart
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.error: BaseException | None = None

    def submit(self, task: Callable[[], T]) -> CommunicationFuture[T]:
        """Run ``task`` after all tasks that were submitted before.

        Raises:
            Exception: what an earlier task raised.
        """
        if self.error is not None:
            raise self.error
        if self._thread.ident is None:
            self._thread.start()
            _STARTED[self._thread] = self._tasks
        future: CommunicationFuture[T] = CommunicationFuture()
        waits = self._stream is not None and not self._is_apart
        ready = torch.cuda.current_stream().record_event() if waits else None
        self._tasks.put((task, future, ready))
        return future

    def will_use(self, *values: Any) -> None:
        """Keep the memory of these tensors of the current stream until the tasks have used it."""
        if self._stream is not None:
            for value in values:
                value.record_stream(self._stream)

    def drain(self) -> None:
        """Wait until all tasks are done.

        Raises:
            Exception: what a task raised.
        """
        if self._thread.ident is not None:
            self.submit(lambda: None).wait()

    def close(self) -> None:
        """Stop the thread after its remaining tasks, without waiting for it."""
        self._tasks.put(None)

    def join(self) -> None:
        """Wait until the thread, if it was started, has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        # A new thread records gradients by default; tasks are not differentiated.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            while (item := self._tasks.get()) is not None:
                task, future, ready = item
                try:
                    if self.error is not None:
                        raise self.error
                    if self._stream is not None and ready is not None:
                        self._stream.wait_event(ready)
                    result = task()
                    if self._stream is not None:
                        future.event = self._stream.record_event()
                    future.set_result(result)
                except BaseException as error:  # of any kind: the main thread must see it
                    # Objects of the task, such as connections, would live as long as the error.
                    traceback.clear_frames(error.__traceback__)
                    self.error = error
                    future.set_exception(error)


class OnHost:
    """A tensor that is copied to the host in the order of the current stream.

    ``cpu()`` would wait for all work queued on that stream.

    Args:
        values: Must not be modified on another stream before the copy. On CPU not copied.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._is_here: torch.cuda.Event | None = None
        if values.is_cuda:
            here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = here.copy_(values, non_blocking=True)
            self._is_here = torch.cuda.current_stream(values.device).record_event()

    def tensor(self) -> torch.Tensor:
        """The tensor on the host; waits for the copy."""
        is_here = self._is_here
        if is_here is not None:
            is_here.synchronize()
            self._is_here = None  # other threads need not wait again
        return self._values


class HostInts(OnHost):
    """Integers, int64 of any shape, that are copied to the host."""

    def wait(self) -> list[int]:
        """The values, flat; waits for the copy."""
        values: list[int] = self.tensor().view(-1).tolist()
        return values


def ints_on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """The values as int64 (n,) on a device; the host does not wait for the copy."""
    here = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)
