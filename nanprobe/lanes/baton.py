"""One lane at a time: threads that run only while they hold the baton.

The conductor (the calling thread) hands the baton to a lane with :meth:`LaneThread.resume` and gets it back when the
lane reaches a boundary, ends, or raises. Exactly one thread runs at any moment, so model code of different lanes never
overlaps; what is per thread in PyTorch (grad mode, autocast, dispatch modes) is the lane's own, and what is
process-wide travels with the baton (see :mod:`nanprobe.lanes.process_state`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nanprobe.errors import IncompleteError
from nanprobe.lanes.process_state import ProcessState

__all__ = ["LaneAborted", "LaneThread"]

_PATIENCE = 5.0
"""Seconds between two looks at a lane that does not come back."""

_STUCK_AFTER = 60.0
"""Seconds without any use of the processor after which a lane counts as stuck."""


def _processor_seconds(thread: threading.Thread) -> float | None:
    """Return the processor time that a thread has used, None where the system does not tell."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return None


class LaneAborted(BaseException):
    """Raised inside a lane that is told to end early; not an ``Exception``, so that model code does not swallow it."""


class LaneThread:
    """A thread that starts, waits and goes on only when told to.

    ``state`` is the lane's process-wide state; it is installed while the lane runs and saved when it stops.
    ``seconds`` sums the time the lane held the baton.
    """

    def __init__(self, name: str, body: Callable[[], None], state: ProcessState) -> None:
        self.name = name
        self.finished = False
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._body = body
        self._state = state
        self._abort = False
        self._used: float | None = None
        self._idle = 0.0
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=f"nanprobe-{name}", daemon=True)
        self._started = False

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._abort:
                self._body()
        except LaneAborted:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.finished = True
            if self._back.locked():
                self._back.release()

    def resume(self) -> None:
        """Give the lane the baton and wait until it comes back. Called by the conductor only."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._state.install()
        began = time.perf_counter()
        try:
            self._go.release()
            while not self._back.acquire(timeout=_PATIENCE):
                self._check_alive()
        finally:
            self.seconds += time.perf_counter() - began
            self._state.save()

    def _check_alive(self) -> None:
        """Raise IncompleteError when the lane has used no processor time for a while: it waits for another lane.

        A lane that holds a lock while it calls a module stops there with the lock held, and the next one waits for it.
        """
        used = _processor_seconds(self._thread)
        self._idle = self._idle + _PATIENCE if used is not None and used == self._used else 0.0
        self._used = used
        if self._idle >= _STUCK_AFTER:
            raise IncompleteError(
                f"the {self.name} lane has done nothing for {_STUCK_AFTER:.0f} s: it waits for a lock that another "
                "lane holds while it calls a module, or for something outside; replay the model without that lock"
            )

    def pause(self) -> None:
        """Hand the baton back and wait for it. Called inside the lane; raises LaneAborted when the lane must end."""
        self._back.release()
        self._go.acquire()
        if self._abort:
            raise LaneAborted

    def abort(self) -> None:
        """Make the lane raise :class:`LaneAborted` where it waits, and wait until it has ended."""
        self._abort = True
        if not self._started:
            self.finished = True
            return
        if not self.finished and self._thread.is_alive():
            self._go.release()
        self._thread.join()

    def is_waiting(self) -> bool:
        """Whether the lane has handed the baton back and not ended."""
        return self._started and not self.finished
