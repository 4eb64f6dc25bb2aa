cimport cython
from moesim.engine.memory cimport Link, Memory
from moesim.engine.operations cimport Clock, Gate, Lane, Machine, Operation, Queue
from moesim.engine.plan cimport Copies, Plan
from moesim.engine.planner cimport Planner, Rules

cdef int AHEAD, BEHIND_DEMAND, COMPUTED, COPIED, DEMAND, DROP, HAS_READ, LATE_KEEP, LATE_WAIT, REPLACEMENT, START, UNAWAITED, WAIT
cdef int FETCH, PREFETCH, READ, REPLACE, NONE

cdef class PendingRead:
    cdef public Operation operation, product
    cdef public bint started
    cdef public Queue copies

cdef class Durations:
    cdef public int control, ssd
    cdef public bint inline, moves_activations, writes_back
    cdef public double dispatch_s, cpu_first_s, gpu_first_s, first_read_s, split_s
    cdef public double dense_after_read, copy_after_read, compute_after_read
    cdef public const int[::1] compute, link, back, predicts
    cdef public const double[::1] plan_s, first_op_s, join_s, read_s
    cdef public const unsigned char[::1] always_split
    cdef public const double[:, ::1] copy_s, back_s

cdef class Transfers(Gate):
    cdef public Machine machine
    cdef public Clock clock
    cdef public Planner planner
    cdef public Durations durations
    cdef public long long model
    cdef public int experts, under_way, prefetches, barred_layer
    cdef public bint predicting
    cdef public list queued, awaiting, reads, prefetched, barred
    cdef unsigned char[::1] copying, _is_prefetched
    cdef public long long[::1] outstanding, unawaited
    cdef list _reports
    cdef int _read_at, _read_in
    @cython.locals(target=int)
    cpdef begin_decisions(self, int layer, const int[::1] active)
    @cython.locals(rules=Rules, first=Py_ssize_t, gpu=int, key=Py_ssize_t, copy=Operation, awaited=bint, i=Py_ssize_t)
    cdef _drop_late(self, int target, int layer, const int[::1] active)
    @cython.locals(follows=int, gpu=int, key="long long")
    cpdef end_decisions(self)
    cpdef report(self, int follows, int gpu, long long key)
    @cython.locals(planner=Planner)
    cdef bint _note(self, int follows, int gpu, long long key) except -1
    @cython.locals(durations=Durations, copies=Copies, planner=Planner, n=Py_ssize_t, key="long long", kind=int, read=bint, gpu=int, memory=Memory, layer=int, copy_s=double, copy=Operation, priority=int)
    cpdef enqueue(self, Plan plan, int step)
    @cython.locals(copy=Operation, was=int)
    cpdef promote(self, int gpu, long long key)
    @cython.locals(place="long long")
    cpdef start_on_gpu(self, int gpu, Operation product)
    @cython.locals(read=PendingRead)
    cpdef start_on_cpu(self, Operation product)
    @cython.locals(durations=Durations, layer=int, work_s=double, memory=Memory, operation=Operation)
    cdef _read(self, int step, long long key, int priority, bint new)
    @cython.locals(read=PendingRead)
    cdef _wait_for_read(self, Operation copy, long long key)
    @cython.locals(read=PendingRead, operation=Operation, was=int)
    cdef _promote_read(self, long long key)
    @cython.locals(read=PendingRead, operation=Operation)
    cdef _leave_read(self, Operation copy, long long key)
    @cython.locals(key="long long", read=PendingRead, copy=Operation)
    cpdef has_read(self, Operation operation)
    @cython.locals(planner=Planner, key="long long", lane=Lane, gpu=int)
    cpdef int admit(self, Operation operation) except -1
    @cython.locals(durations=Durations, memory=Memory, key="long long", following="long long", layer=int, copy=Operation)
    cdef _write_back(self, int gpu, int step)
    @cython.locals(planner=Planner, started=bint, read=PendingRead)
    cdef bint _start_read(self, int layer, long long key) except -1
    @cython.locals(planner=Planner, host=Memory, key="long long", copies=int, demanded=bint, gpu=int, memory=Memory)
    cdef bint _yields(self, int layer, long long wanted) except -1
    @cython.locals(copy=Operation)
    cdef _take_back(self, int gpu, long long key)
    @cython.locals(place="long long", copy=Operation)
    cdef _unqueue(self, int gpu, long long key)
    @cython.locals(lane=Lane, gpu=int, layer=int, key="long long", place="long long", product=Operation)
    cpdef copied(self, Operation operation)
    cdef _settle(self, int layer)
    cpdef open_when_landed(self, int layer)
    @cython.locals(barred=list, product=Operation, lane=Lane)
    cdef _open(self)
