cimport cython
from moesim.engine.operations cimport Clock, Machine, Operation

cdef double NEVER_S

cdef class Spans:
    cdef public long long count, room
    cdef public signed char[::1] lane, kind
    cdef public int[::1] step, expert
    cdef public short[::1] layer
    cdef public double[::1] start_s, end_s
    cdef public long long[::1] nbytes
    @cython.locals(n="long long")
    cpdef add(self, Operation operation)

cdef class VirtualClock(Clock):
    cdef public double[:, ::1] slowdown
    cdef public bint alone, noisy
    cdef public int[::1] rank
    cdef public Spans spans
    cdef public list running
    cdef public int count
    cdef public long long scheduled
    cdef object _noise
    cdef list _factors
    cdef long long[::1] _used
    cpdef start(self, Operation operation)
    @cython.locals(used="long long", factors=list)
    cdef double _factor(self, int lane) except? -1
    cpdef schedule(self, Operation operation, double delay_s)
    @cython.locals(running=list, n=int, later=int)
    cpdef end(self, Operation operation)
    @cython.locals(running=list, count=int, n=int, m=int, operation=Operation, other=Operation, rate=double, done_s=double)
    cdef _adjust(self)

    cpdef sleep(self, double until_s)
    cpdef bint drive(self, process, Machine machine) except -1

cdef class FastClock(VirtualClock):
    cdef public bint turn
    cdef public double wakes_at_s
    cpdef sleep(self, double until_s)
    cpdef wake(self)
    @cython.locals(operation=Operation)
    cpdef bint drive(self, process, Machine machine) except -1
    @cython.locals(running=list, count=int, n=int, first=Operation, other=Operation, rank=int)
    cdef Operation _next_end(self)
