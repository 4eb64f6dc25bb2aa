cimport cython
from moesim.policies.base cimport CachePolicy, Work

cdef int NONE

cdef class RequestCache(CachePolicy):
    cdef public int experts, pools, lists, cached_lists
    cdef public long long keys
    cdef public const long long[::1] capacity
    cdef public long long[::1] following, previous, head_of, size
    cdef public signed char[::1] free
    cdef signed char[::1] placed
    cdef long long[::1] placed_keys
    cdef Py_ssize_t placed_count

    cpdef hit(self, int pool, long long key)
    cpdef long long miss(self, int pool, long long key) except? -1
    cpdef fill(self, int pool, long long key)
    cpdef drop(self, int pool, long long key)

    @cython.locals(i=Py_ssize_t, pool=int, key="long long")
    cpdef accessed(self, Work work)
    @cython.locals(count=Py_ssize_t, c=Py_ssize_t, n=Py_ssize_t, key="long long", victim="long long")
    cpdef victims(self, const long long[::1] incoming, const long long[::1] candidates, long long[::1] chosen)
    @cython.locals(pool=int)
    cpdef evicted(self, long long key)
    @cython.locals(n=Py_ssize_t, key="long long")
    cdef _forget_placed(self)
    @cython.locals(pool=int)
    cdef _fill_unless_cached(self, long long key)
    cdef int _pool_of(self, long long key) except -1
    @cython.locals(number=int)
    cdef bint _is_cached(self, int pool, long long key) except? -1

    cpdef long long head(self, int pool, int number) except -1
    @cython.locals(head="long long")
    cpdef int list_of(self, int pool, long long key) except? -1
    @cython.locals(newest="long long")
    cpdef append(self, long long head, long long key)
    cpdef remove(self, long long key)
    @cython.locals(key="long long")
    cpdef long long first_free(self, long long head) except? -1
