cimport cython
from moesim.policies.base cimport Gate, MachineView
from moesim.policies.ranking cimport best_of
from moesim.policies.routing._substitute cimport SubstitutingRouting, Substitution

cdef double inf, TOLERANCE, SMALLEST
cdef int DECODE, UNUSED, CHOSEN, TOP, CLOSE, LOW

cdef class ExpertCacheRouter(SubstitutingRouting):
    cdef public double alpha
    cdef public bint batch_aware, inflight_ok, decode_only, literal
    cdef int width
    cdef long long[::1] requests, best
    cdef unsigned char[::1] low, eligible
    cdef signed char[:, ::1] known
    cdef unsigned char[:, ::1] used, missing
    cdef long long[:, ::1] experts
    @cython.locals(top_k=int, t=int, column=int)
    cpdef int route(self, Gate gate, MachineView view, unsigned short[::1] routing) except? -1
    @cython.locals(fetched=int, t=int, expert=int)
    cdef _find_present(self, Gate gate, MachineView view)
    @cython.locals(token=Substitution, expert=int, known=int, beta=double, upper=double, lower=double, score=double)
    cdef _note_bands(self, Gate gate, int t)
    @cython.locals(token=Substitution, expert="long long", column=int, close=bint, low=bint, kept=bint)
    cdef _by_residents(self, Gate gate, int t, int top_k)
    @cython.locals(most=double, expert=int, t=int, column=int, close=int)
    cdef _gather(self, Gate gate, int top_k)
    @cython.locals(best=int)
    cdef _replace(self, Gate gate, int t, int column, double most)
    @cython.locals(best=int, preference=double, expert=int, value=double)
    cdef int _most_asked(self, Gate gate, int t, double most) except? -1
    @cython.locals(token=Substitution, most=int, t=int, expert=int, taken=int, column=int)
    cdef int _to_the_letter(self, Gate gate, unsigned short[::1] routing) except? -1
    @cython.locals(token=Substitution, low=int, substitutes=int, used=int, swapped=int, expert=int, known=int, close=bint)
    cdef int _swap_low(self, int t) except -1
    @cython.locals(taken=int, n=int)
    cdef _use(self, int t, unsigned char[::1] among, int most)
