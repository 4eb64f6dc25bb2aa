cimport cython

cdef int BEHIND_DEMAND, DEMAND, DROP, NONE, WAIT

cdef class Operation:
    cdef public int lane, kind, step, layer, expert, follows, priority
    cdef public bint behind_read
    cdef public long long nbytes, order
    cdef public double work_s, start_s, end_s, left_s, rate, settled_s
    cdef public Operation next, previous

@cython.nonecheck(False)
cdef class Queue:
    cdef public Operation first, last
    cdef void push(self, Operation operation)
    @cython.locals(before=Operation, after=Operation)
    cdef void remove(self, Operation operation)

cdef class Lane:
    cdef public int gpu
    cdef public bint gated
    cdef public Worker worker
    cdef public Queue demand, prefetches, replacements
    cdef Queue queue(self, int priority)

cdef class Worker:
    cdef public list lanes
    cdef public bint busy, kept, takes, gated
    cdef public int waiting

cdef class Gate:
    cpdef int admit(self, Operation operation) except -1

cdef class Consequences:
    cpdef follow(self, Operation operation)

cdef class Clock:
    cdef public double now_s
    cdef public long long turns
    cpdef start(self, Operation operation)
    cpdef wake(self)
    cpdef taken(self, Worker worker)

cdef class Machine:
    cdef public list lanes, workers
    cdef public bint closed
    cdef public Clock clock
    cdef public Gate gate
    cdef public Consequences consequences
    cdef Operation _free
    @cython.locals(made=Operation)
    cpdef Operation operation(self, int lane, int kind, int step, int layer, int expert, double work_s, long long nbytes, int follows)
    cpdef forget(self, Operation operation)
    @cython.locals(lane=Lane, worker=Worker)
    cpdef submit(self, Operation operation, int priority)
    @cython.locals(lane=Lane)
    cpdef withdraw(self, Operation operation, int priority)
    @cython.locals(worker=Worker)
    cpdef offer(self)
    @cython.locals(worker=Worker, named=Lane)
    cpdef bint take(self, int lane) except -1
    @cython.locals(first=Lane, second=Lane)
    cpdef bint shares(self, int lane, int other) except -1
    @cython.locals(named=Lane)
    cpdef give(self, int lane)
    @cython.locals(worker=Worker, lane=Lane)
    cpdef ended(self, Operation operation)
    cdef _go_on(self, Worker worker)
    @cython.locals(operation=Operation)
    cdef _serve(self, Worker worker)
    @cython.locals(lane=Lane, queue=Queue, operation=Operation, priority=int, verdict=int)
    cdef Operation _pick(self, Worker worker)
