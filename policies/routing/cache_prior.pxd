cimport cython
from libc cimport math
from moesim.policies.base cimport Gate, MachineView
from moesim.policies.ranking cimport best_of
from moesim.policies.routing._substitute cimport SubstitutingRouting, Substitution

cdef double SMALLEST_SCORE, TIE_BONUS

cdef class CachePrior(SubstitutingRouting):
    cdef public double strength
    cdef public int top_j, width
    cdef public bint by_mean, by_sigmoid
    cdef double[::1] range_sum, range_count, value, ranges
    cdef double[:, ::1] logits
    cdef unsigned char[::1] among, first
    cdef long long[::1] best
    @cython.locals(top_k=int, t=int, column=int, mean=double, bonus=double, same=bint)
    cpdef int route(self, Gate gate, MachineView view, unsigned short[::1] routing) except? -1
    @cython.locals(t=int, expert=int, least=double, most=double, logit=double)
    cdef _read_logits(self, Gate gate)
    cdef double _logit(self, double score) except? -1
    @cython.locals(token=Substitution, expert=int, column=int, recorded=bint, resident=bint, value=double)
    cdef _choose(self, Gate gate, int t, int top_k, double bonus)
