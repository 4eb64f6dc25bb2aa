cimport cython
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport name_absent, sort_wanted

cdef class Transitions:
    cdef public int experts
    cdef public double[:, ::1] pairs
    cdef public long long[::1] seen
    @cython.locals(t=Py_ssize_t, n=Py_ssize_t, m=Py_ssize_t, expert=int, key="long long")
    cpdef observe(self, long long layer, const unsigned short[:, ::1] before, const unsigned short[:, ::1] after)
    @cython.locals(times="long long", expert=int)
    cpdef expect(self, long long key, long long tokens, double[::1] workload)

cdef class Triples:
    cdef public int experts
    cdef public long long rows
    cdef long long[::1] row_of, seen
    cdef double[:, ::1] after
    @cython.locals(t=Py_ssize_t, n=Py_ssize_t, m=Py_ssize_t, e=Py_ssize_t, row="long long")
    cpdef observe(self, long long layer, const unsigned short[:, ::1] first, const unsigned short[:, ::1] second, const unsigned short[:, ::1] after)
    @cython.locals(pair="long long")
    cpdef long long row(self, long long layer, int first, int second) except? -2
    @cython.locals(row="long long", is_pair=bint, pair="long long")
    cdef long long _noted(self, long long layer, int first, int second) except? -2

cdef class Statistical(PrefetchPolicy):
    cdef public long long size
    cdef public bint refill, looks_back, learns
    cdef public Transitions transitions
    cdef public Triples triples
    cdef double[::1] value, of_others, no_tie
    cdef int[::1] unseen
    cdef long long[::1] ranked
    @cython.locals(tokens=Py_ssize_t, follows=bint, by_pairs=bint, expert=int, i=int, key="long long", ranked="long long[::1]", layer=int)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(expert=int, t=Py_ssize_t, m=Py_ssize_t, pairs=int, key="long long")
    cdef _expect_by_pairs(self, Work work, MachineView view)
    @cython.locals(count=int, n=Py_ssize_t, m=Py_ssize_t, row="long long")
    cdef int _known_pairs(self, long long layer, Py_ssize_t t, MachineView view) except? -1
    @cython.locals(triples=Triples, n=Py_ssize_t, m=Py_ssize_t, e=int, row="long long")
    cdef _add_pairs(self, long long layer, Py_ssize_t t, MachineView view, int pairs)
