cimport cython
from libc cimport math
from moesim.policies.base cimport Work

cdef int NONE, PREFILL, _UNION, _GRADED
cdef double _SHARPNESS, _FAINT, _BELIEVED, _HALF_BELIEVED, _PRIOR

cdef class RoutingMemory:
    cdef public int layers, experts, history, width, words
    cdef public double[::1] value, score, copy_value, coming, following, promises
    cdef public double total, margin, believed, share_short, margin_a_token
    cdef double[::1] lately, short, long, seen_short, seen_long
    cdef double decay_short, decay_long
    cdef long long last
    cdef int step, slot, active, tokens, similar
    cdef long long[::1] overlaps, uses
    cdef int[::1] counts, chosen, listed
    cdef double[::1] weights, by_overlap
    cdef double kept, promised, better, different

    @cython.locals(now="long long", key="long long")
    cpdef observe(self, Work work)
    @cython.locals(first="long long", key="long long")
    cpdef expect(self, int layer)
    cpdef double kept_promises(self) except? -1.0
    @cython.locals(i=int, key="long long")
    cdef _hold_to_promises(self, Work work)
    @cython.locals(i=int, key="long long", better=double, different=double, more=double)
    cdef _grade(self, Work work)
    @cython.locals(word=int)
    cdef _begin_token(self, int step)
    @cython.locals(words="long long", uses="long long", bit="long long", of_slot=int, place="long long", begin="long long", n="long long", i=int, of_expert="long long", word=int, count=int, expert=int)
    cdef _remember(self, Work work)
    cdef long long _overlap(self, int slot) except? -1
    @cython.locals(most="long long", slot=int, slope=double, fainter="long long", weight=double, step=double, behind="long long", count=int, total=double, overlap="long long")
    cdef _list_similar(self)
    @cython.locals(first="long long", share=double, n=int, slot=int, weight=double, place="long long", begin="long long", chosen="long long")
    cdef _recall(self, int layer, int later, double[::1] expected)
    @cython.locals(passed=int, kept=double, of_short=double, of_long=double, recall=double, better=double, key="long long", of_late=double, more=double)
    cdef _value(self, Work work)
    @cython.locals(key="long long", i=int, share=double)
    cdef _count(self, Work work, double[::1] frequency, double kept)

@cython.locals(weight=double, before=double)
cdef double _per_pass(int layer, double[::1] seen, double kept, double decay) except? -1.0
