cimport cython
from moesim.policies.base cimport Work
from moesim.engine.block cimport Block
from moesim.engine.host cimport Host
from moesim.engine.memory cimport Memory
from moesim.engine.operations cimport Clock, Consequences, Lane, Machine, Operation
from moesim.engine.plan cimport Copies, Plan
from moesim.engine.planner cimport Planner, Rules
from moesim.engine.transfers cimport Durations, Transfers

cdef int CPU, NONE, RESIDENT, SERIAL, WAITS
cdef int WHOLLY, AHEAD, AWAITED_AHEAD, COMPUTED, COPIED, DEMAND, FETCHED, HAS_READ, KEPT, PREDICTED, TURN, UNAWAITED
cdef int ACTIVATION, COMPUTE, DENSE, FETCH, JOIN, PLAN, READ

cdef class LayerStep(Consequences):
    cdef public Machine machine
    cdef public Clock clock
    cdef public Planner planner
    cdef public Durations durations
    cdef public Transfers transfers
    cdef public int layers, experts, pending, step
    cdef public bint has_read
    cdef public long long[::1] gates, dense_parts
    cdef list _held, _ahead, _awaited
    cdef public int fetched
    cdef public bint cpu_used
    cdef unsigned char[::1] _unused
    @cython.locals(dense_s=double, gates="long long")
    cpdef double dense_s(self, Block block, int s) except? -1
    @cython.locals(block=Block, active="const int[::1]")
    cpdef begin(self, int s)
    @cython.locals(planner=Planner, plan=Plan, work=Work, transfers=Transfers, promoted=Copies, n=Py_ssize_t)
    cpdef launch(self, int s)
    @cython.locals(planner=Planner, plan=Plan)
    cpdef complete(self)
    @cython.locals(durations=Durations, join_s=double, shared=bint)
    cpdef double join_s(self, Work work, Py_ssize_t copied) except? -1
    cpdef double control_s(self, const double[::1] cost, Work work, Py_ssize_t copied) except? -1
    @cython.locals(machine=Machine, taken=bint, inline=bint, follows=int, operation=Operation)
    cpdef alone(self, int lane, int kind, int layer, double work_s)
    @cython.locals(control=int, operation=Operation)
    cpdef controls(self, int kind, int layer, double work_s)
    @cython.locals(copies=Copies, n=Py_ssize_t)
    cdef _note_reads(self, Plan plan)
    @cython.locals(planner=Planner, durations=Durations, machine=Machine, transfers=Transfers, several=bint, copied=Py_ssize_t, first_op_s=double, code=int, cpu_used=bint, count=int, n=int, i="long long", key="long long", seconds=double, first_s=double, work_s=double, product=Operation, memory=Memory)
    cdef bint _dispatch(self, Work work, Plan plan) except -1
    @cython.locals(code=int)
    cdef bint _gpu_used(self) except -1
    @cython.locals(key="long long", product=Operation)
    cdef _await(self)
    @cython.locals(held=list, product=Operation)
    cdef _release_held(self)
    @cython.locals(durations=Durations, planner=Planner, expert=int, tokens=int, key="long long", work_s=double, product=Operation)
    cdef _begin_ahead(self, Plan plan, int layer)
    @cython.locals(parts="long long", durations=Durations, work_s=double, operation=Operation)
    cdef _predict(self, Work work, Block block, int s)
    @cython.locals(follows=int, lane=Lane, key="long long")
    cpdef follow(self, Operation operation)
    @cython.locals(lane=Lane, planner=Planner, lets_go=bint, memory=Memory, key="long long")
    cdef _computed(self, Operation operation)
    cdef _count(self)
    @cython.locals(key="long long")
    cdef _unawaited_ended(self, Operation operation)
    cpdef all_computed(self)
