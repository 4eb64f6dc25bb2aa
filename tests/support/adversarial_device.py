"""A device that does what was launched as late and in as wrong an order as CUDA allows.

It stands in for streams, events, asynchronous copies and page-locked memory. Tensors on
it are `DeviceTensor`s: their operations are queued on the current stream and computed
on the CPU when somebody waits for them, or when a draw says so. The order is drawn
among all that the waits permit. Memory that is about to be written holds NaNs until it
is, and a read of such memory ends the run with `ReadTooEarly`: somebody has not waited.

What is modelled, after the CUDA programming guide and torch's notes on CUDA semantics:

- Operations of one stream run in order, those of two streams in any.
- Waiting for an event means the work that was on its stream when it was last recorded;
  an event that was never recorded is waited for by nobody.
- A copy from page-locked memory reads it, and one to page-locked memory writes it, at
  any time until it has ended. A copy from other host memory has taken its bytes when
  the call returns; one to other host memory has ended then.
- A copy that may block, and every question whose answer the host needs, waits for the
  current stream.
- Memory that the host lets go of may be given to others once the stream on which it was
  allocated has got so far; other streams do not count.
"""

import contextlib
import random
import threading
import weakref
from collections import deque
from functools import partial

import torch
from support.torch_calls import ANSWERS, each, leaves, shapes
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesim.runtime.accelerators import Accelerator

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
POISON = 0xFF

_COPIES_TO = {
    aten._to_copy.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
}
_ASKS = {
    aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default,
    aten.is_nonzero.default, aten.equal.default, aten.masked_select.default,
    aten.unique_dim.default, aten._unique2.default,
}  # fmt: skip


class ReadTooEarly(AssertionError):  # noqa: N818 - what it is about
    """Somebody reads what nobody waited for."""


class Bytes:
    """Some memory, and which of its bytes hold nothing yet.

    `unwritten` is False where all are written, True where none is, else uint8 by byte.
    """

    def __init__(self, tensor, name, stream=None):
        self.storage = tensor.untyped_storage()
        self.name = name
        self.stream = stream
        self.strangers = False
        self.unwritten = False
        self.freed = False

    def __len__(self):
        """How many."""
        return self.storage.nbytes()

    def poison(self, view=None):
        """Lose the content, of a view or of all."""
        if view is None or view.numel() * view.itemsize == len(self):
            self.unwritten = True
        else:
            self._map(view).fill_(1)
        target = view if view is not None else None
        if target is None:
            torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(POISON)
        elif target.dtype == torch.bool:
            target.fill_(True)
        else:
            _as_bytes(target).fill_(POISON)

    def write(self, view):
        """Note that a view was written."""
        if self.freed:
            raise ReadTooEarly(f"a copy writes into {self.name} that was let go of")
        if self.unwritten is False:
            return
        if view.numel() * view.itemsize == len(self):
            self.unwritten = False
            return
        marks = self._map(view)
        marks.fill_(0)
        if not self.unwritten.any():
            self.unwritten = False

    def read(self, view, by):
        """Raise if a view holds bytes that were not written."""
        if self.unwritten is False or view.numel() == 0:
            return
        if self.unwritten is True or bool(self._map(view).any()):
            raise ReadTooEarly(
                f"{by} reads {self.name} before it was written: nobody has waited"
            )

    def _map(self, view):
        if isinstance(self.unwritten, bool):
            self.unwritten = torch.full(
                (len(self),), int(self.unwritten), dtype=torch.uint8
            )
        size = view.itemsize
        return self.unwritten.as_strided(
            (*view.shape, size),
            (*(stride * size for stride in view.stride()), 1),
            view.storage_offset() * size,
        )


def _as_bytes(view):
    """The bytes of a view, uint8 with one more axis."""
    size = view.itemsize
    flat = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    return flat.as_strided(
        (*view.shape, size),
        (*(stride * size for stride in view.stride()), 1),
        view.storage_offset() * size,
    )


class _Owner:
    """Is let go of with the last tensor that the host has of some memory."""

    def __init__(self, memory, device):
        self.memory = memory
        weakref.finalize(self, device.let_go, memory)


class DeviceTensor(torch.Tensor):
    """A tensor on the device: `there` are its values as far as they are computed."""

    @staticmethod
    def __new__(cls, there, owner, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            there.size(),
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=DEVICE,
        )
        made.there = there
        made.owner = owner
        made.on = device
        return made

    def __repr__(self):
        """Shape and type; values may not be there yet."""
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Hand an operation to the device."""
        kwargs = kwargs or {}
        some = next(leaf for leaf in leaves(args, kwargs) if isinstance(leaf, cls))
        return some.on.call(func, args, kwargs)


class Work:
    """Something on a stream's queue."""

    def __init__(self, name, run=None, reads=(), writes=(), after=None, begin=None):
        self.name = name
        self.run = run or (lambda: None)
        self.reads = reads
        self.writes = writes
        self.after = after
        self.begin = begin
        self.begun = False
        self.done = False
        self.at_s = 0.0


class Stream:
    """A queue of work."""

    def __init__(self, device, number):
        self.device = device
        self.number = number
        self.queue = deque()
        self.haste = 0.0

    def wait_event(self, event):
        """Let what comes wait for what the event stands for now."""
        self.device.threads.turn()
        if event.work is not None:
            self.queue.append(Work("a wait", after=event.work))

    def synchronize(self):
        """Wait for all of it."""
        self.device.threads.turn()
        while self.queue:
            self.device.force(self.queue[-1])


class Event:
    """A mark on a stream."""

    def __init__(self, device):
        self.device = device
        self.work = None

    def record(self, stream):
        """Stand for what is on a stream now."""
        assert isinstance(stream, Stream), "on a stream that is named"
        self.device.threads.turn()
        self.work = Work("an event")
        self.work.stream = stream
        stream.queue.append(self.work)

    def synchronize(self):
        """Wait for it."""
        self.device.threads.turn()
        if self.work is not None:
            self.device.force(self.work)
        self.device.threads.turn()

    def query(self):
        """Whether it is over."""
        return self.work is None or self.work.done

    def elapsed_time(self, later):
        """Milliseconds in between."""
        if not (self.work and self.work.done and later.work and later.work.done):
            raise ReadTooEarly("times of an event that is not over")
        return 1e3 * (later.work.at_s - self.work.at_s)


class AdversarialDevice(Accelerator):
    """The accelerator; a context manager, within which tensors can be on it.

    Args:
        seed: of the draws.
        threads: who takes turns with whom (`drawn_threads.DrawnThreads`).

    Attributes:
        findings: what was read too early, in words; the first one is raised where a
            thread waits next.
        log: stream and name of everything that was computed, in its order.
    """

    kind = "cuda"
    type = "cuda"

    def __init__(self, seed, threads):
        super().__init__()
        self.draws = random.Random(f"device {seed}")
        self.threads = threads
        self.streams = []
        self.locked = []
        self.log = []
        self.findings = []
        self._told = False
        # Whether torch is asked by the device itself, not by the code that runs on it.
        self.inside = False
        self._current = threading.local()
        self._freed = deque()
        self._default = self.new_stream()

    # -- accelerator ------------------------------------------------------------------

    def current_stream(self):
        return getattr(self._current, "stream", self._default)

    def new_stream(self):
        made = Stream(self, len(self.streams))
        # Late for ever, soon, or anything between.
        made.haste = self.draws.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        self.streams.append(made)
        return made

    @contextlib.contextmanager
    def on(self, stream):
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def event(self, *, asleep=True):
        return Event(self)

    def synchronize(self):
        self.threads.turn()
        for stream in self.draws.sample(self.streams, len(self.streams)):
            stream.synchronize()

    def page_lock(self, memory):
        self._lock(memory, "page-locked slots")

    def page_unlock(self, memory):
        """From now on the pages may be anybody's."""
        found = self._locked(memory)
        assert found is not None, "unlocked twice"
        with self._by_itself():
            found.poison()
        found.freed = True

    def page_locked_like(self, values):
        made = torch.empty(values.shape, dtype=values.dtype)
        self._lock(made, "a page-locked buffer")
        return made

    def page_locked(self, values):
        made = values.clone()
        self._lock(made, "a page-locked buffer")
        return made

    # -- page-locked memory -----------------------------------------------------------

    def _lock(self, tensor, name):
        # Kept, so that no other tensor gets the address.
        self.locked.append((tensor, Bytes(tensor, name)))

    def _locked(self, tensor):
        """The page-locked memory in which a tensor lies."""
        address = tensor.untyped_storage().data_ptr()
        for whole, memory in self.locked:
            if whole.untyped_storage().data_ptr() == address:
                return memory
        return None

    # -- the queues -------------------------------------------------------------------

    def let_go(self, memory):
        """The host has no tensor of some memory any more."""
        self._freed.append(memory)

    def _take_freed(self):
        while self._freed:
            memory = self._freed.popleft()
            # Its own stream is in order by itself.
            if memory.strangers:
                memory.stream.queue.append(Work("another tensor", begin=memory.poison))

    def launch(self, work, stream=None):
        """Queue work on a stream, the current one if None."""
        self._take_freed()
        stream = stream or self.current_stream()
        work.stream = stream
        stream.queue.append(work)
        self.hurry()

    def hurry(self):
        """Do some of what may be done, as drawn."""
        for stream in self.streams:
            while stream.queue and self.draws.random() < stream.haste:
                if not self._step(stream):
                    break

    def force(self, work):
        """Do what a host thread waits for, and nothing that it does not need, but by
        draw.
        """
        self._take_freed()
        while not work.done:
            self._needed(work)
            self.hurry()
        if self.findings and not self._told:
            self._told = True
            raise ReadTooEarly(self.findings[0])

    def _needed(self, work):
        """Take one step towards some work."""
        stream = work.stream
        while stream.queue[0].after is not None and not stream.queue[0].after.done:
            stream = stream.queue[0].after.stream
        self._step(stream)

    def _step(self, stream):
        """Take a step on a stream, half a one for a copy; whether there was one."""
        work = stream.queue[0]
        if work.after is not None and not work.after.done:
            return False
        with self._by_itself():
            if work.begin is not None and not work.begun:
                work.begun = True
                work.begin()
                if self.draws.random() < 0.5:
                    return True
            try:
                for view, memory in work.reads:
                    memory.read(view, f"{work.name} on stream {stream.number}")
                work.run()
                for view, memory in work.writes:
                    memory.write(view)
            # Indices that nobody has written lead anywhere.
            except (ReadTooEarly, IndexError, RuntimeError) as error:
                self.findings.append(str(error))
        stream.queue.popleft()
        work.done = True
        work.at_s = self.threads.perf_counter()
        self.log.append((stream.number, work.name))
        return True

    @contextlib.contextmanager
    def _by_itself(self):
        before = self.inside
        self.inside = True
        try:
            yield
        finally:
            self.inside = before

    # -- operations -------------------------------------------------------------------

    def own(self, there, stream=None):
        """A tensor on the device over values on the CPU."""
        memory = Bytes(there, "device memory", stream or self.current_stream())
        return DeviceTensor(there, _Owner(memory, self), self)

    def call(self, func, args, kwargs):
        """Do what torch asks for, some of whose tensors are on the device."""
        if func in _COPIES_TO:
            return self._to(func, args, kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func in _ASKS or (func is aten.index.Tensor and self._asks_masks(args)):
            return self._ask(func, args, kwargs)
        alias = [r.alias_info for r in func._schema.returns if r.alias_info]
        if alias and not any(info.is_write for info in alias):
            seen = (
                func.decompose if func._can_decompose() else partial(self._view, func)
            )
            return seen(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def make(self, func, args, kwargs):
        """Make a tensor on the device: zeros, ones, a range, noise."""
        kwargs = kwargs | {"device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        if func in (aten.empty.memory_format, aten.empty_strided.default):
            made = self.own(func(*args, **kwargs))
            made.owner.memory.poison()
            return made
        # Drawn or counted now, there later.
        values = func(*args, **kwargs)
        return self._later(torch.empty_like(values), values, func)

    def _later(self, there, values, func):
        """A tensor whose values come when its stream has got so far."""
        made = self.own(there)
        made.owner.memory.poison()
        self.launch(
            Work(
                str(func),
                lambda: there.copy_(values),
                writes=[(there, made.owner.memory)],
            )
        )
        return made

    def _asks_masks(self, args):
        return any(
            index is not None and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )

    def _ask(self, func, args, kwargs):
        """Answer a question of the host: wait for the current stream."""
        self.current_stream().synchronize()
        for leaf in leaves(args, kwargs):
            if isinstance(leaf, DeviceTensor):
                leaf.owner.memory.read(leaf.there, f"{func} by the host")
        args, kwargs = each(_there, args, kwargs)
        answer = func(*args, **kwargs)
        return self.own(answer) if isinstance(answer, torch.Tensor) else answer

    def _view(self, func, *args, **kwargs):
        """See the same memory in another way; nothing is computed."""
        base = next(
            leaf for leaf in leaves(args, kwargs) if isinstance(leaf, DeviceTensor)
        )
        args, kwargs = each(_there, args, kwargs)
        seen = func(*args, **kwargs)
        if isinstance(seen, torch.Tensor):
            return DeviceTensor(seen, base.owner, self)
        return type(seen)(DeviceTensor(one, base.owner, self) for one in seen)

    def _compute(self, func, args, kwargs):
        """Queue a kernel; its results exist already, as memory without content."""
        stream = self.current_stream()
        reads = []
        for leaf in leaves(args, kwargs):
            if isinstance(leaf, DeviceTensor):
                reads.append((leaf.there, leaf.owner.memory))
                if leaf.owner.memory.stream is not stream:
                    leaf.owner.memory.strangers = True
            else:
                assert not isinstance(leaf, torch.Tensor) or leaf.dim() == 0, (
                    f"{func} of a tensor that is not on the device"
                )
        there_args, there_kwargs = each(_there, args, kwargs)
        written = [
            (argument, args[place] if place < len(args) else kwargs.get(argument.name))
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            return self._change(func, (there_args, there_kwargs), reads, written)

        results = shapes(func, there_args, there_kwargs)
        one = isinstance(results, torch.Tensor)
        made = [results] if one else list(results)
        owned = [self.own(one) for one in made]
        for tensor in owned:
            tensor.owner.memory.unwritten = True

        def run():
            answers = func(*there_args, **there_kwargs)
            answers = [answers] if one else answers
            for target, answer in zip(made, answers, strict=True):
                target.copy_(answer)

        writes = [(tensor.there, tensor.owner.memory) for tensor in owned]
        self.launch(Work(str(func), run, reads, writes))
        return owned[0] if one else tuple(owned)

    def _change(self, func, there, reads, written):
        """Queue a kernel that writes into what it is given."""
        targets = [tensor for _, tensor in written if tensor is not None]
        writes = [(tensor.there, tensor.owner.memory) for tensor in targets]
        if func in (aten.zero_.default, aten.normal_.default) or (
            func._schema.name in ("aten::fill_", "aten::uniform_")
        ):
            reads = []
        args, kwargs = there
        run = partial(func, *args, **kwargs)
        if kwargs.get("generator") is not None:
            # Random numbers are drawn in the order of the calls.
            values = func(torch.empty_like(args[0]), *args[1:], **kwargs)
            run = partial(args[0].copy_, values)
        self.launch(Work(str(func), run, reads, writes))
        return targets[0] if len(targets) == 1 else tuple(targets)

    # -- copies -----------------------------------------------------------------------

    def _to(self, func, args, kwargs):
        """Bring a tensor to a device or type."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        source = given["self"]
        other = given.get("other")
        device = given.get("device") or (other.device if other is not None else None)
        device = torch.device(device) if device is not None else source.device
        dtype = given.get("dtype") or (other.dtype if other is not None else None)
        dtype = dtype or source.dtype
        copies = func is aten._to_copy.default or given.get("copy", False)
        if device.type == source.device.type:
            if not copies and dtype == source.dtype:
                return source
            return self._compute(aten._to_copy.default, (source,), {"dtype": dtype})
        wait = not given.get("non_blocking", False)
        if source.device.type == DEVICE.type:
            target = torch.empty_like(source.there)
            self._copy_out(target, source, wait=True)
            return target.to(dtype)
        there = torch.empty_like(source, dtype=dtype)
        target = self.own(there)
        target.owner.memory.unwritten = True
        self._copy_in(target, source, wait=wait)
        return target

    def _copy(self, target, source, non_blocking=False):
        """Copy into a tensor that is there."""
        there = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
        if there == (True, True):
            return self._copy_within(target, source)
        if there[0]:
            self._copy_in(target, source, wait=not non_blocking)
        else:
            self._copy_out(target, source, wait=not non_blocking)
        return target

    def _copy_within(self, target, source):
        memory, other = target.owner.memory, source.owner.memory
        to, values = target.there, source.there
        self._note_strangers(memory, other)
        self.launch(
            Work(
                "a copy",
                lambda: to.copy_(values),
                [(values, other)],
                [(to, memory)],
                begin=lambda: self._begin(memory, to, values, other),
            )
        )
        return target

    def _begin(self, memory, to, values=None, other=None):
        """A copy begins: its target holds nothing until it ends."""
        if other is None or other is not memory:
            memory.poison(to)

    def _note_strangers(self, *memories):
        for memory in memories:
            if memory.stream is not self.current_stream():
                memory.strangers = True

    def _copy_in(self, target, source, *, wait):
        """Host to device."""
        memory, to = target.owner.memory, target.there
        self._note_strangers(memory)
        host = self._locked(source)
        reads = [] if host is None else [(source, host)]
        # Memory that is not page-locked is staged before the call returns.
        values = source.clone() if host is None else source
        work = Work(
            "a copy to the device",
            lambda: to.copy_(values),
            reads,
            [(to, memory)],
            begin=lambda: memory.poison(to),
        )
        self.launch(work)
        if wait:
            self.current_stream().synchronize()

    def _copy_out(self, target, source, *, wait):
        """Device to host."""
        memory, values = source.owner.memory, source.there
        self._note_strangers(memory)
        host = self._locked(target)
        writes = [] if host is None else [(target, host)]
        if host is not None:
            host.poison(target)
        work = Work(
            "a copy to the host",
            lambda: target.copy_(values),
            [(values, memory)],
            writes,
        )
        self.launch(work)
        if wait or host is None:
            self.current_stream().synchronize()

    # -- the host ---------------------------------------------------------------------

    def host_reads(self, func, args, kwargs):
        """Complain about host code that looks at what has not been waited for."""
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for leaf in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                    continue
                memory = self._locked(leaf)
                if memory is None or memory.unwritten is False:
                    continue
                if written:
                    memory.write(leaf)
                elif not any(r.alias_info for r in func._schema.returns):
                    try:
                        memory.read(leaf, f"{func} on the host")
                    except ReadTooEarly as error:
                        self.findings.append(str(error))
                        self._told = True
                        raise

    @contextlib.contextmanager
    def in_use(self):
        """Let tensors of the thread be on the device."""
        with torch.inference_mode(), _Functions(self), _Dispatch(self):
            yield


def _there(leaf):
    """Where the values of a tensor are."""
    return leaf.there if isinstance(leaf, DeviceTensor) else leaf


class _Dispatch(TorchDispatchMode):
    """Sees what torch does on this thread: tensors made on the device, host reads."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._device.inside:
            return func(*args, **kwargs)
        given = leaves(args, kwargs)
        if any(isinstance(leaf, DeviceTensor) for leaf in given):
            return self._device.call(func, args, kwargs)
        wanted = next((x for x in given if isinstance(x, torch.device)), None)
        if wanted is not None and wanted.type == DEVICE.type:
            if func in _COPIES_TO:
                return self._device.call(func, args, kwargs)
            return self._device.make(func, args, kwargs)
        self._device.host_reads(func, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Answers what torch would ask the device's driver about before its dispatcher."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Answer instead of torch, where its own answer needs a driver."""
        kwargs = kwargs or {}
        if not self._device.inside:
            if func is torch.tensor and kwargs.get("device") is not None:
                where = torch.device(kwargs.pop("device"))
                return func(*args, **kwargs).to(where)
            if args and isinstance(args[0], DeviceTensor) and func in ANSWERS:
                return ANSWERS[func](*args, **kwargs)
        return func(*args, **kwargs)
