"""Threads that take turns as a seed draws them: the same seed, the same interleaving.

Real threads run, one at a time. At every lock, start, join and wait the thread that
runs draws who goes on. It stands in for `threading` and `time` in
`moesim.runtime.executor.lanes`.
"""

import contextlib
import random
import signal
import threading


class Deadlock(RuntimeError):  # noqa: N818 - what it is called
    """Every thread waits for another one."""


class _Ended(BaseException):
    """Leaves a thread that nobody wakes any more."""


class _Turn:
    """One thread's place among the others."""

    def __init__(self, name):
        self.name = name
        self.go = threading.Semaphore(0)
        self.waits_for = None
        self.over = False

    def can_go_on(self):
        return not self.over and (self.waits_for is None or self.waits_for())


class DrawnThreads:
    """Draws whose turn it is.

    Args:
        seed: of the draws.
        around: has `enter`, the context of every thread that is started, and
            `between`, called whenever a turn is drawn; None where nothing is.
    """

    def __init__(self, seed, around=None):
        self.draws = random.Random(seed)
        self._around = around
        self._main = _Turn("main")
        self._turns = [self._main]
        self._now = self._main
        self._clock_s = 0.0
        # Some schedules change threads at every chance, some hardly ever.
        self._restless = self.draws.choice((0.05, 0.3, 1.0))
        self.failure = None
        # Number of the turn at which somebody presses ctrl-C.
        self.interrupt_at = float("inf")
        self._turns_drawn = 0
        self._threads = []
        self._ending = False

    # Real ones, whoever's turn it is: signals are the main thread's.
    current_thread = staticmethod(threading.current_thread)
    main_thread = staticmethod(threading.main_thread)

    # -- what `time` offers -----------------------------------------------------------

    def perf_counter(self):
        """Seconds of a clock that only goes on when it is looked at."""
        self._clock_s += 1e-6
        return self._clock_s

    # -- what `threading` offers ------------------------------------------------------

    def Lock(self):  # noqa: N802 - the library's name
        """A lock whose waiters are woken in drawn order."""
        return _Lock(self)

    def Thread(self, target, name, daemon=True):  # noqa: N802 - as the library's
        """A thread that runs when it is its turn."""
        del daemon
        thread = _Thread(self, target, name)
        self._threads.append(thread)
        return thread

    # -- turns ------------------------------------------------------------------------

    def enter(self):
        """The context of a thread."""
        if self._around is None:
            return contextlib.nullcontext()
        return self._around.enter()

    def names(self):
        """Threads that have not ended by themselves."""
        return [turn.name for turn in self._turns]

    def end(self):
        """End the threads that a deadlock has left waiting for each other."""
        self._ending = True
        for thread in self._threads:
            thread.end()

    def turn(self):
        """Let the draw decide who goes on."""
        self._leave_if_ending()
        if self._ending:
            return
        self._turns_drawn += 1
        if self._now is self._main and self._turns_drawn >= self.interrupt_at:
            self.interrupt_at = float("inf")
            signal.raise_signal(signal.SIGINT)
        if self._around is not None:
            self._around.between()
        if self.draws.random() < self._restless:
            self._pass_on()

    def wait(self, until):
        """Sleep until `until()` holds."""
        self._leave_if_ending()
        mine = self._now
        mine.waits_for = until
        self._pass_on()
        mine.waits_for = None

    def _pass_on(self):
        mine = self._now
        able = [turn for turn in self._turns if turn.can_go_on()]
        if not able:
            self.failure = Deadlock(
                "all wait: " + ", ".join(t.name for t in self._turns if not t.over)
            )
            # The main thread ends the test, and then the others.
            able = [self._main]
        chosen = self.draws.choice(able)
        if chosen is not mine:
            self._now = chosen
            chosen.go.release()
            if mine.over:
                return
            mine.go.acquire()
            self._leave_if_ending()
        if self.failure is not None and mine is self._main:
            raise self.failure

    def _leave_if_ending(self):
        if self._ending and threading.current_thread() is not threading.main_thread():
            raise _Ended

    def started(self, turn):
        self._turns.append(turn)

    def ended(self, turn):
        if self._ending:
            return
        turn.over = True
        self._turns.remove(turn)
        self._pass_on()


class _Lock:
    def __init__(self, owner):
        self._owner = owner
        self._held = False

    def acquire(self):
        self._owner.turn()
        if self._held:
            self._owner.wait(lambda: not self._held)
        self._held = True
        return True

    def release(self):
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        self._owner.turn()

    def locked(self):
        return self._held

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class _Thread:
    def __init__(self, owner, target, name):
        self.name = name
        self._owner = owner
        self._target = target
        self._turn = _Turn(name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self):
        self._owner.started(self._turn)
        self._thread.start()
        self._owner.turn()

    def _run(self):
        self._turn.go.acquire()
        try:
            with self._owner.enter():
                self._target()
        except _Ended:
            pass
        finally:
            self._owner.ended(self._turn)

    def join(self, timeout=None):
        if not self._turn.over:
            self._owner.wait(lambda: self._turn.over)

    def end(self):
        """Let the thread leave wherever it waits, and see that it does."""
        if self._thread.ident is None or not self._thread.is_alive():
            return
        self._turn.go.release()
        self._thread.join(timeout=20.0)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def is_alive(self):
        return not self._turn.over
