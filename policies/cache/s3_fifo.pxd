cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef int NONE, MOST_USES, PROBATION, MAIN, GHOSTS

cdef class S3FIFO(RequestCache):
    cdef public double small, ghosts
    cdef public long long qualifying
    cdef public bint as_published
    cdef public long long[::1] uses, small_slots, most_ghosts
    cdef signed char[::1] has_evicted

    @cython.locals(returning=bint, probation=bint, victim="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
    @cython.locals(returning=bint, overflows=bint)
    cpdef fill(self, int pool, long long key)
    cdef long long _waiting(self, int pool) except -1
    cdef _enter(self, int pool, int number, long long key)
    cdef bint _take_ghost(self, int pool, long long key) except? -1
    @cython.locals(small="long long", fits=bint)
    cdef bint _probation_gives(self, int pool) except? -1
    @cython.locals(probation="long long", ghosts="long long", key="long long")
    cdef long long _from_probation(self, int pool) except? -1
    @cython.locals(main="long long", key="long long")
    cdef long long _from_main(self, int pool) except? -1
