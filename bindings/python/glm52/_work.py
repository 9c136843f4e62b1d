"""Long calls: they leave the GIL to others, and the main thread to its signal handlers.

A signal handler of Python runs in the main thread only, between two of its instructions. A call made there is therefore
done by a helper thread while the main thread waits; when a handler raises (Ctrl-C: KeyboardInterrupt), that call
alone is cancelled, waited for, and the handler's exception goes on. Calls of other threads run where they are.
"""
from __future__ import annotations

import logging
import queue
import signal
import threading
from typing import Any, Callable, List, Optional, Tuple, Union

from . import _glm52

Log = Union[None, logging.Logger, Callable[[int, str], Any]]

_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}
_LOOK_EVERY = 0.1  # seconds between looks for messages, and for signals that another thread took


class _Job:
    """A call for the helper. Who gets `claim` decides: the helper, and it runs, or else the waiting thread, and it
    never does. `done` is released at its end."""

    def __init__(self, function: Callable[..., Any], arguments: Tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.claim, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.finished = False
        self.thread = 0
        self.result: Any = None
        self.error: Optional[BaseException] = None

    def run(self) -> None:
        self.thread = threading.get_ident()
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:  # travels to the waiting thread
            self.error = error
        self.finished = True
        self.done.release()


def _serve(jobs: "queue.SimpleQueue[Optional[_Job]]") -> None:
    # Signals are for the main thread, whose waiting they interrupt; OpenMP's threads inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        job = jobs.get()
        if job is None:
            return
        job.run()
        del job  # keeps nothing alive while it waits


class Work:
    """How the objects of one context make long calls. `handle` is the context's."""

    def __init__(self, handle: Any, log: Log) -> None:
        self.handle, self.log = handle, log
        self._jobs: "Optional[queue.SimpleQueue[Optional[_Job]]]" = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments); `function` is one of _glm52."""
        try:
            if threading.current_thread() is threading.main_thread():
                return self._wait_for(_Job(function, arguments))
            return function(*arguments)
        finally:
            self.deliver()

    def _wait_for(self, job: _Job) -> Any:
        try:
            self._submit(job)
            while not job.finished:
                job.done.acquire(timeout=_LOOK_EVERY)
                self.deliver()
        except BaseException:  # of a signal handler, or of a log function
            _glm52.abandon(self.handle, job)
            raise
        if job.error is not None:
            try:
                raise job.error
            finally:
                del job  # its error would hold this frame, and that the job
        return job.result

    def _submit(self, job: _Job) -> None:
        if self._jobs is None:
            jobs: "queue.SimpleQueue[Optional[_Job]]" = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(jobs,), name="glm52", daemon=True).start()
            self._jobs = jobs
        self._jobs.put(job)

    def deliver(self) -> None:
        """Hands messages of the library to the log. What a log function raises goes on to the caller."""
        messages: Optional[List[Tuple[int, str]]] = _glm52.messages(self.handle)
        for level, text in messages or ():
            if isinstance(self.log, logging.Logger):
                self.log.log(_LEVELS.get(level, logging.INFO), "%s", text)
            elif self.log is not None:
                self.log(_LEVELS.get(level, logging.INFO), text)

    def stop(self) -> None:
        """Lets the helper thread end."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def __del__(self) -> None:
        self.stop()
