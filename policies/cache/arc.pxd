cimport cython
from moesim.policies.cache._request_lists cimport RequestCache

cdef int NONE, ONCE, OFTEN, GHOST_ONCE, GHOST_OFTEN

cdef class ARC(RequestCache):
    cdef public bint whole
    cdef public double[::1] target

    @cython.locals(ghost=int, target=double, shift=double, size="long long", giver=int, victim="long long")
    cpdef long long miss(self, int pool, long long key) except? -1
    @cython.locals(capacity="long long", once="long long", often="long long")
    cpdef fill(self, int pool, long long key)
    cdef long long _size(self, int pool, int number) except -1
    @cython.locals(head="long long", _=Py_ssize_t)
    cdef _forget_oldest(self, int pool, int number, long long count)
    @cython.locals(others="long long", ghosts="long long")
    cdef double _shift(self, int pool, int other, int returning) except? -1
