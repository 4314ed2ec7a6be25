"""A thread that communicates while the main thread computes: tasks in order, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def record_use(*values: torch.Tensor) -> None:
    """Tell the allocator that the current stream uses tensors which a task made on its own stream.

    Without this their memory goes to the next task as soon as nobody holds them, although the
    current stream may not have read them yet.
    """
    for value in values:
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


class CommunicationFuture(Generic[T]):
    """The result of a task, for the thread that submitted it."""

    def __init__(self, thread: CommunicationThread) -> None:
        self._thread = thread
        self._is_done = threading.Event()
        self._result: T | None = None
        self._event: torch.cuda.Event | None = None

    def set(self, result: T, event: torch.cuda.Event | None) -> None:
        self._result, self._event = result, event
        self._is_done.set()

    def set_failed(self) -> None:
        self._is_done.set()

    def wait(self) -> T:
        """Return the task's result; on CUDA the current stream waits for it, not the host.

        Tensors that the task made belong to its stream, see ``record_use``.

        Raises:
            Exception: what the task, or one before it, raised.
        """
        self._is_done.wait()
        if self._thread.error is not None:
            raise self._thread.error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._result  # type: ignore[return-value]


class CommunicationThread:
    """Runs tasks in the order of their submission on a daemon thread, started by the first one.

    After a task has raised no other task runs: its collectives would be matched with different
    ones of the other ranks. A daemon, unlike the threads of a ``ThreadPoolExecutor``, because a
    task that waits for a dead rank must not keep the process alive.

    Args:
        device: If CUDA, tasks run on a stream of their own, which first waits for all work that the
            submitting stream was given before.
        name: The thread's name, shown in traces.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[
            tuple[Callable[[], Any], CommunicationFuture[Any], torch.cuda.Event | None] | None
        ] = SimpleQueue()
        self._is_started = False
        self.error: BaseException | None = None

    def submit(self, task: Callable[[], T]) -> CommunicationFuture[T]:
        """Run ``task`` after all tasks that were submitted before.

        Raises:
            Exception: what an earlier task raised.
        """
        if self.error is not None:
            raise self.error
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        future: CommunicationFuture[T] = CommunicationFuture(self)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream().record_event()
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
        if self._is_started:
            self.submit(lambda: None).wait()

    def close(self) -> None:
        """Let the thread end after its remaining tasks, without waiting for it."""
        self._tasks.put(None)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        # A new thread records gradients by default; none of the tasks is to be differentiated.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            while (item := self._tasks.get()) is not None:
                task, future, ready = item
                if self.error is None:
                    try:
                        self._run_task(task, future, ready)
                    except BaseException as error:  # of any kind: the main thread must see it
                        self.error = error
                if self.error is not None:
                    future.set_failed()

    def _run_task(
        self,
        task: Callable[[], T],
        future: CommunicationFuture[T],
        ready: torch.cuda.Event | None,
    ) -> None:
        if self._stream is None or ready is None:
            future.set(task(), None)
            return
        self._stream.wait_event(ready)
        future.set(task(), self._stream.record_event())
