"""A thread that communicates while the main thread computes: tasks in order, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def used_here(*values: torch.Tensor) -> None:
    """Say that the current stream uses tensors that a task made on the lane's.

    Else the allocator gives their memory to the lane's next task as soon as nobody holds them,
    although this stream may not have read them yet.
    """
    for value in values:
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


class Pending(Generic[T]):
    """The outcome of a task, to be waited for by the main thread."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._is_done = threading.Event()
        self._result: T | None = None
        self._event: Any = None

    def set(self, result: T, event: Any) -> None:
        self._result, self._event = result, event
        self._is_done.set()

    def fail(self) -> None:
        self._is_done.set()

    def wait(self) -> T:
        """The task's result; on CUDA the current stream waits for it.

        Tensors that the task made are its stream's: see ``used_here``.

        Raises:
            Exception: what the task, or one before it, raised.
        """
        self._is_done.wait()
        if self._lane.error is not None:
            raise self._lane.error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return self._result  # type: ignore[return-value]


class Lane:
    """Runs tasks in the order in which they are submitted, on a daemon thread.

    After a task has raised no other runs: its collectives would meet the wrong ones of other ranks.

    Args:
        device: on CUDA tasks run on a stream of their own, which waits for what the submitting
            stream has been given so far.
        name: of the thread.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Pending[Any], Any] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Pending[T]:
        """Run ``task`` after all that were submitted before.

        Raises:
            Exception: what an earlier task raised.
        """
        if self.error is not None:
            raise self.error
        pending: Pending[T] = Pending(self)
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream().record_event()
        self._tasks.put((task, pending, ready))
        return pending

    def uses(self, *values: Any) -> None:
        """Say that tasks will use these tensors of the current stream, also after it let go."""
        if self._stream is not None:
            for value in values:
                value.record_stream(self._stream)

    def drain(self) -> None:
        """Wait until all tasks are done.

        Raises:
            Exception: what a task raised.
        """
        self.submit(lambda: None).wait()

    def close(self) -> None:
        """Let the thread end after the tasks that it has; does not wait."""
        self._tasks.put(None)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        # Gradients are the main thread's affair.
        with torch.no_grad(), torch.cuda.stream(self._stream):
            while (item := self._tasks.get()) is not None:
                task, pending, ready = item
                if self.error is None:
                    try:
                        self._run_task(task, pending, ready)
                    except BaseException as error:  # whatever it is, the main thread must see it
                        self.error = error
                if self.error is not None:
                    pending.fail()

    def _run_task(self, task: Callable[[], T], pending: Pending[T], ready: Any) -> None:
        if self._stream is not None:
            self._stream.wait_event(ready)
        result = task()
        pending.set(result, None if self._stream is None else self._stream.record_event())
