cimport cython
from moesim.policies.base cimport MachineView, RoutingPolicy
from moesim.policies.ranking cimport best_of

cdef int ABSENT, RESIDENT

cdef class Substitution:
    cdef public int count
    cdef public unsigned char[::1] present, chosen, replaced, alternatives
    cdef public double[::1] score
    cdef public long long[::1] experts
    cdef long long[::1] best
    cdef unsigned char[::1] everybody
    @cython.locals(width=int, expert=int, gpu=int, state="signed char")
    cpdef look(self, MachineView view, int layer, bint in_flight)
    @cython.locals(expert=int)
    cpdef read(self, const double[:, ::1] scores, int t)
    @cython.locals(column=int)
    cpdef take(self, const unsigned short[:, ::1] experts, int t)
    cpdef choose(self, int top_k)
    @cython.locals(expert=int, column=int)
    cpdef mark(self)
    @cython.locals(marked=int, taken=int, n=int, column=int)
    cpdef substitute(self)
    @cython.locals(absent=int, column=int, expert=int, missing=bint)
    cpdef keep_one_absent(self)

cdef class SubstitutingRouting(RoutingPolicy):
    cdef public bint normalises
    cdef Substitution token
