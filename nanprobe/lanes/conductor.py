"""Bringing lanes together at boundaries, also when they take different ways.

The reference posts what it holds at each boundary and stops there; a low-precision lane that reaches a boundary asks
for the reference's counterpart. The conductor lets the reference go on only when a lane asks for something it has not
posted, so in the ordinary case it stays one boundary ahead and nothing older is kept.

Lanes may differ: a router sends tokens to another expert, a loop ends earlier. A lane's boundary is given up on as
"the reference never came by" when the reference has already left one of the module visits that enclose it, has gone on
to a later phase, has ended, or is more than ``WINDOW`` boundaries ahead; for the end of the outermost visit, the model
itself, it waits as long as it takes. What the reference posted and a lane did not ask for is kept for ``WINDOW``
further boundaries, since in backward the order may differ a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanprobe.lanes.baton import LaneThread
from nanprobe.numerics.stats import TensorStats

__all__ = ["WINDOW", "Conductor", "Key", "Posted", "Request"]

WINDOW = 48

Key = tuple[str, str, int, str]
"""(phase, module path, visit, part): the part tells the gradients of a visit's several outputs apart."""

_PHASES = ("forward", "loss", "backward", "gradients", "end")


@dataclass(slots=True, eq=False)
class Posted:
    """What the reference holds at a boundary.

    ``inputs`` is (args, kwargs) of the visit, None once they may have changed.
    """

    key: Key
    tensors: dict[str, torch.Tensor]
    stats: dict[str, TensorStats]
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    frozen: bool = False
    index: int = 0
    waiting: set[str] = field(default_factory=set)

    def freeze(self) -> None:
        """Keep the values as they are before the reference goes on and may write over them."""
        if not self.frozen:
            self.tensors = {path: tensor.detach().clone() for path, tensor in self.tensors.items()}
            self.inputs = None
            self.frozen = True


@dataclass(slots=True)
class Request:
    """A boundary that a lane has reached; ``chain`` are the keys of the visits around it, outermost first."""

    key: Key
    chain: tuple[Key, ...] = ()


@dataclass(slots=True, eq=False)
class _Follower:
    thread: LaneThread
    request: Request | None = None
    answer: Posted | None = None
    met: int = 0
    last_index: int = 0
    asked_at: int = 0


class Conductor:
    """Runs the reference and its followers until all have ended; see the module's text for the order."""

    def __init__(self, on_step: Callable[[str], None] = lambda _: None) -> None:
        self._on_step = on_step
        self._reference: LaneThread | None = None
        self._followers: dict[str, _Follower] = {}
        self._pending: dict[Key, Posted] = {}
        self._exited: set[Key] = set()
        self._posted = 0
        self._phase = 0
        self._fresh: Posted | None = None

    def post(self, posted: Posted) -> None:
        """Called by the reference inside its thread: hand over what it holds and wait to go on."""
        self._fresh = posted
        assert self._reference is not None
        self._reference.pause()

    def meet(self, name: str, request: Request) -> Posted | None:
        """Called by a follower inside its thread: wait for the reference's counterpart, None when there is none."""
        follower = self._followers[name]
        follower.request = request
        follower.thread.pause()
        answer, follower.answer = follower.answer, None
        return answer

    def run(self, reference: LaneThread, followers: list[LaneThread]) -> None:
        """Run every lane to its end. Whatever is raised here, Ctrl-C included, first ends every lane."""
        self._reference = reference
        self._followers = {thread.name: _Follower(thread) for thread in followers}
        try:
            while not all(follower.thread.finished for follower in self._followers.values()):
                self._step()
            while not reference.finished:
                self._advance()
        finally:
            for thread in (reference, *followers):
                thread.abort()
            self._pending.clear()

    def _step(self) -> None:
        alive = [follower for follower in self._followers.values() if not follower.thread.finished]
        for follower in sorted(alive, key=lambda follower: follower.met):
            if follower.request is None or self._resolve(follower):
                follower.request = None
                follower.asked_at = self._posted
                follower.thread.resume()
                if follower.thread.finished:
                    self._forget(follower.thread.name)
                return
        self._advance()

    def _resolve(self, follower: _Follower) -> bool:
        """Decide whether the follower can go on; its answer is the counterpart, or None when there is none."""
        request = follower.request
        assert request is not None
        assert self._reference is not None
        posted = self._pending.get(request.key)
        name = follower.thread.name
        if posted is not None and name in posted.waiting:
            posted.waiting.discard(name)
            follower.answer = posted
            follower.met += 1
            follower.last_index = max(follower.last_index, posted.index)
            if not posted.waiting:
                del self._pending[request.key]
            return True
        if self._reference.finished or self._gone_by(follower, request):
            follower.met += 1
            return True
        return False

    def _gone_by(self, follower: _Follower, request: Request) -> bool:
        if _PHASES.index(request.key[0]) < self._phase:
            return True
        if any(key in self._exited for key in request.chain):
            return True
        if request.key[0] == "forward" and not request.key[3] and not request.chain:
            return False  # the model as a whole: there is nothing after it that waiting could miss
        return self._posted - follower.asked_at > WINDOW

    def _forget(self, name: str) -> None:
        for posted in list(self._pending.values()):
            posted.waiting.discard(name)
            if not posted.waiting:
                del self._pending[posted.key]

    def _advance(self) -> None:
        """Let the reference run to its next boundary; first freeze what it holds that somebody still waits for."""
        assert self._reference is not None
        followers = [follower for follower in self._followers.values() if not follower.thread.finished]
        for posted in list(self._pending.values()):
            for follower in followers:
                if posted.index < max(follower.last_index, self._posted - WINDOW) - WINDOW:
                    posted.waiting.discard(follower.thread.name)
            if posted.waiting:
                posted.freeze()
            else:
                del self._pending[posted.key]
        self._reference.resume()
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        self._posted += 1
        self._phase = max(self._phase, _PHASES.index(fresh.key[0]))
        fresh.index = self._posted
        fresh.waiting = {follower.thread.name for follower in followers}
        self._exited.add(fresh.key)
        if fresh.waiting:
            self._pending[fresh.key] = fresh
        self._on_step(fresh.key[1])
