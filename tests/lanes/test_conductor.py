"""The order in which lanes run: one at a time, the reference one boundary ahead, nothing kept that nobody wants."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanprobe.inputs.rng import RandomState
from nanprobe.lanes.baton import LaneAborted, LaneThread
from nanprobe.lanes.conductor import WINDOW, Conductor, Key, Posted, Request
from nanprobe.lanes.process_state import ProcessState

Script = list[Key]


def visit(path: str, number: int = 0) -> Key:
    return ("forward", path, number, "")


class Play:
    """Lanes that go through scripts of boundaries, and what they saw of each other."""

    def __init__(self, scripts: dict[str, Script], chains: dict[Key, tuple[Key, ...]] | None = None) -> None:
        self.conductor = Conductor()
        self.log: list[tuple[str, Key]] = []
        self.met: dict[str, list[tuple[Key, int | None]]] = {name: [] for name in scripts}
        self.running: set[str] = set()
        self.most_kept = 0
        self.chains = chains or {}
        state = RandomState.capture_torch()
        self.threads = [
            LaneThread(name, self._body(name, script), ProcessState(state, {}, everything=False))
            for name, script in scripts.items()
        ]
        self.reference = self.threads[0].name

    def _body(self, name: str, script: Script) -> Callable[[], None]:
        def body() -> None:
            for key in script:
                assert not self.running, "two lanes run at once"
                self.running.add(name)
                self.log.append((name, key))
                self.running.discard(name)
                if name == self.reference:
                    value = torch.tensor(len(self.met[name]))
                    self.met[name].append((key, None))
                    self.conductor.post(Posted(key=key, tensors={"": value}, stats={}))
                else:
                    found = self.conductor.meet(name, Request(key, self.chains.get(key, ())))
                    self.most_kept = max(self.most_kept, len(self.conductor._pending))
                    self.met[name].append((key, int(found.tensors[""]) if found is not None else None))

        return body

    def run(self) -> Play:
        self.conductor.run(self.threads[0], self.threads[1:])
        assert all(thread.finished for thread in self.threads)
        assert [thread.error for thread in self.threads] == [None] * len(self.threads)
        assert not any(thread._thread.is_alive() for thread in self.threads if thread._started)
        return self


def test_lanes_in_step_all_meet_and_the_reference_is_one_ahead() -> None:
    script = [visit(str(i)) for i in range(200)]
    play = Play({"ref": script, "a": script, "b": script}).run()
    for name in ("a", "b"):
        assert play.met[name] == [(key, i) for i, key in enumerate(script)]
    ahead = 0
    for name, _ in play.log:
        ahead += {"ref": 2, "a": -1, "b": -1}[name]
        assert -2 <= ahead <= 4
    assert play.most_kept <= 2


def test_a_lane_that_skips_boundaries_keeps_nothing_alive() -> None:
    script = [visit(str(i)) for i in range(10 * WINDOW)]
    play = Play({"ref": script, "a": script[:: WINDOW // 2]}).run()
    assert [seen for _, seen in play.met["a"]] == list(range(0, 10 * WINDOW, WINDOW // 2))
    assert play.most_kept <= 2 * WINDOW + 2


def test_a_boundary_that_the_reference_never_makes_ends_with_its_enclosing_visit() -> None:
    own, root = visit("own"), visit("")
    play = Play({"ref": [visit("x"), root], "a": [visit("x"), own, root]}, {own: (root,), visit("x"): (root,)}).run()
    assert play.met["a"] == [(visit("x"), 0), (own, None), (root, 1)]


def test_a_visit_that_the_reference_has_left_is_not_waited_in() -> None:
    own, block, root = visit("own"), visit("block"), visit("")
    rest = [visit(str(i)) for i in range(WINDOW // 2)]
    chains = {own: (root, block), block: (root,), **dict.fromkeys(rest, (root,))}
    play = Play({"ref": [block, *rest, root], "a": [own, block, *rest, root]}, chains).run()
    assert play.met["a"] == [(own, None), *((key, i) for i, key in enumerate([block, *rest, root]))]
    # The reference was not sent on to its end before the lane gave up.
    assert play.log.index(("a", rest[0])) < play.log.index(("ref", rest[5]))
    assert play.most_kept <= 3


def test_no_more_than_a_window_is_waited_for_inside_a_visit() -> None:
    own, root = visit("own"), visit("")
    rest = [visit(str(i)) for i in range(3 * WINDOW)]
    chains = dict.fromkeys((own, *rest), (root,))
    play = Play({"ref": [*rest, root], "a": [own, *rest, root]}, chains).run()
    assert play.met["a"][0] == (own, None)
    # What the reference made meanwhile was kept, so that nothing after it is missed.
    assert play.met["a"][1:] == [(key, i) for i, key in enumerate([*rest, root])]


def test_the_end_of_the_model_is_waited_for_as_long_as_it_takes() -> None:
    root = visit("")
    play = Play({"ref": [*(visit(str(i)) for i in range(5 * WINDOW)), root], "a": [root]}).run()
    assert play.met["a"] == [(root, 5 * WINDOW)]
    assert play.most_kept <= 2 * WINDOW + 2


def test_a_phase_that_is_over_is_not_waited_for() -> None:
    late, loss = visit("late"), ("loss", "", 0, "loss")
    play = Play({"ref": [visit(""), loss], "a": [visit(""), late, loss]}).run()
    assert play.met["a"] == [(visit(""), 0), (late, None), (loss, 1)]


def test_a_reference_that_ends_first_leaves_nobody_waiting() -> None:
    play = Play({"ref": [visit("0")], "a": [visit(str(i)) for i in range(5)], "b": []}).run()
    assert play.met["a"] == [(visit("0"), 0)] + [(visit(str(i)), None) for i in range(1, 5)]


def test_a_reference_that_goes_on_after_the_others_is_run_to_its_end() -> None:
    play = Play({"ref": [visit(str(i)) for i in range(9)], "a": []}).run()
    assert len(play.met["ref"]) == 9
    assert play.most_kept == 0


_scripts = st.lists(st.integers(0, 8), max_size=30)


@settings(deadline=None, max_examples=150)
@given(_scripts, _scripts, _scripts)
def test_any_scripts_end_and_whatever_is_met_is_the_same_boundary(a: list[int], b: list[int], c: list[int]) -> None:
    def script(numbers: list[int]) -> Script:
        seen: dict[int, int] = {}
        keys = []
        for number in numbers:
            keys.append(visit(str(number), seen.setdefault(number, 0)))
            seen[number] += 1
        return keys

    root = visit("")
    scripts = {"ref": [*script(a), root], "b": [*script(b), root], "c": [*script(c), root]}
    chains = {key: (root,) for keys in scripts.values() for key in keys if key != root}
    play = Play(scripts, chains).run()
    for name in ("b", "c"):
        assert [key for key, _ in play.met[name]] == scripts[name]
        for key, seen in play.met[name]:
            assert seen is None or scripts["ref"][seen] == key
        assert play.met[name][-1] == (root, len(scripts["ref"]) - 1)
    if scripts["b"] == scripts["ref"]:
        assert all(seen is not None for _, seen in play.met["b"])


def test_random_orders_within_the_window_all_meet() -> None:
    rng = random.Random(0)
    script = [visit(str(i)) for i in range(300)]
    shuffled = [key for start in range(0, 300, 10) for key in rng.sample(script[start : start + 10], 10)]
    play = Play({"ref": script, "a": shuffled}, {key: (visit("root"),) for key in script}).run()
    assert all(seen is not None and script[seen] == key for key, seen in play.met["a"])


def test_what_is_kept_is_frozen_before_the_reference_writes_over_it() -> None:
    conductor = Conductor()
    state = ProcessState(RandomState.capture_torch(), {}, everything=False)
    got: list[float] = []

    def reference() -> None:
        value = torch.ones(())
        conductor.post(Posted(key=visit("x"), tensors={"": value}, stats={}))
        value.fill_(7.0)
        conductor.post(Posted(key=visit("y"), tensors={"": value}, stats={}))

    def follower() -> None:
        for name in ("y", "x"):
            found = conductor.meet("a", Request(visit(name)))
            assert found is not None
            got.append(float(found.tensors[""]))

    threads = [LaneThread("ref", reference, state), LaneThread("a", follower, state)]
    conductor.run(threads[0], threads[1:])
    assert threads[1].error is None
    assert got == [7.0, 1.0]


@pytest.mark.parametrize("where", ["ref", "a", "b"])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_lane_that_raises_leaves_the_others_to_finish(where: str, at: int) -> None:
    conductor = Conductor()
    state = ProcessState(RandomState.capture_torch(), {}, everything=False)
    finished: list[str] = []

    def body(name: str) -> Callable[[], None]:
        def run() -> None:
            for i in range(8):
                if name == where and i == at:
                    raise ValueError(name)
                if name == "ref":
                    conductor.post(Posted(key=visit(str(i)), tensors={}, stats={}))
                else:
                    conductor.meet(name, Request(visit(str(i))))
            finished.append(name)

        return run

    threads = [LaneThread(name, body(name), state) for name in ("ref", "a", "b")]
    conductor.run(threads[0], threads[1:])
    assert [type(thread.error) for thread in threads] == [
        ValueError if thread.name == where else type(None) for thread in threads
    ]
    assert set(finished) == {"ref", "a", "b"} - {where}


def test_aborting_ends_a_lane_where_it_waits_and_runs_its_cleanup() -> None:
    cleaned: list[str] = []
    state = ProcessState(RandomState.capture_torch(), {}, everything=False)

    def body() -> None:
        try:
            try:
                thread.pause()
            except Exception:
                cleaned.append("swallowed")
        except LaneAborted:
            cleaned.append("aborted")
            raise
        finally:
            cleaned.append("cleaned")

    thread = LaneThread("lane", body, state)
    thread.resume()
    assert thread.is_waiting()
    thread.abort()
    assert cleaned == ["aborted", "cleaned"]
    assert thread.finished
    assert thread.error is None
    assert not thread.is_waiting()
    thread.abort()


def test_a_lane_that_never_started_can_be_aborted() -> None:
    state = ProcessState(RandomState.capture_torch(), {}, everything=False)
    thread = LaneThread("lane", lambda: None, state)
    thread.abort()
    assert thread.finished
    assert "nanprobe-lane" not in [t.name for t in threading.enumerate()]


def test_process_state_travels_with_the_baton() -> None:
    """Each lane sees its own random state, default dtype and matrix-product precision, and the caller's come back."""
    seen: list[tuple[str, torch.dtype, str, float]] = []
    torch.manual_seed(1)
    outer = ProcessState.capture()
    drawn_outside = float(torch.rand(()))
    outer.install()

    def body(name: str, dtype: torch.dtype) -> Callable[[], None]:
        def run() -> None:
            torch.set_default_dtype(dtype)
            for _ in range(3):
                seen.append(
                    (name, torch.get_default_dtype(), torch.get_float32_matmul_precision(), float(torch.rand(())))
                )
                lanes[name].pause()

        return run

    lanes = {
        "a": LaneThread("a", body("a", torch.float64), ProcessState.capture()),
        "b": LaneThread(
            "b", body("b", torch.float32), ProcessState(outer.random, {"float32_matmul_precision": "high"})
        ),
    }
    for _ in range(3):
        for lane in lanes.values():
            lane.resume()
            outer.install()
            assert torch.get_default_dtype() is torch.float32
    for lane in lanes.values():
        lane.abort()
    outer.install()
    assert [(name, dtype) for name, dtype, _, _ in seen] == [("a", torch.float64), ("b", torch.float32)] * 3
    assert [precision for name, _, precision, _ in seen if name == "b"] == ["high"] * 3
    draws = {n: [x for name, _, _, x in seen if name == n] for n in "ab"}
    assert len(set(draws["a"])) == 3
    torch.manual_seed(1)
    assert [float(torch.rand(())) for _ in range(3)] == pytest.approx(draws["b"])
    outer.install()
    assert float(torch.rand(())) == drawn_outside
