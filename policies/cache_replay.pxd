cimport cython
from moesim.policies.base cimport CachePolicy, Work

cdef int ABSENT, NONE, RESIDENT

cdef class LoneCache:
    cdef CachePolicy cache
    cdef object name
    cdef Work work
    cdef bint admits_all, in_launch_order, is_global, equal_sizes
    cdef int experts
    cdef long long promised_bytes
    cdef public long long[::1] hits, accesses
    cdef const long long[::1] bytes_of
    cdef long long[::1] free_bytes, holds, room_of, victim_of, next_victim
    cdef long long[::1] missing, incoming, one, candidates, chosen
    cdef signed char[::1] resident, enters, states

    @cython.locals(n=Py_ssize_t)
    cpdef fill(self, const long long[::1] keys)
    @cython.locals(layer="const long long[::1]", step="const long long[::1]", batch="const long long[::1]", phase="const signed char[::1]", rows="const long long[::1]", edges="const long long[::1]", experts="const int[::1]", tokens="const int[::1]", scores="const double[::1]", token_scores="const double[::1]", width=Py_ssize_t, row=Py_ssize_t, work=Work, i=Py_ssize_t)
    cpdef run(self, object block)
    @cython.locals(work=Work, layer=int, count=Py_ssize_t, i=Py_ssize_t, n=Py_ssize_t, key="long long")
    cdef _serve(self)
    @cython.locals(entering=Py_ssize_t, n=Py_ssize_t, key="long long")
    cdef Py_ssize_t _admitted_of(self, Py_ssize_t count) except -1
    @cython.locals(size="long long", room="long long", n=Py_ssize_t, candidates=Py_ssize_t, key="long long")
    cdef _promise(self, Py_ssize_t entering)
    @cython.locals(free="long long", left_over="long long", needed="long long", n=Py_ssize_t, key="long long", before="long long", missing="long long", room="long long")
    cdef _promise_unequal(self, Py_ssize_t entering)
    cdef _grant(self, long long key, long long room)
    @cython.locals(free="long long", victim="long long")
    cdef _start(self, long long key)
    @cython.locals(pool=int)
    cdef _enter(self, long long key)
    @cython.locals(size="long long", count=Py_ssize_t, most="long long", n=Py_ssize_t, victim="long long")
    cdef long long _find_room(self, long long key, long long free) except? -1
    @cython.locals(last="long long")
    cdef _append_victim(self, long long key, long long victim)
    @cython.locals(victim="long long")
    cdef _release_victims(self, long long key)
    @cython.locals(first=Py_ssize_t, end=Py_ssize_t, count=Py_ssize_t, key=Py_ssize_t)
    cdef Py_ssize_t _find_candidates(self) except -1
    @cython.locals(candidates="const long long[::1]", chosen="long long[::1]", n=Py_ssize_t, victim="long long")
    cdef _ask(self, const long long[::1] incoming, Py_ssize_t count)
    @cython.locals(in_pool=bint)
    cdef bint _may_leave(self, long long key) except -1
    @cython.locals(incoming="long long[::1]", n=Py_ssize_t, key="long long")
    cdef _reorder(self, Py_ssize_t entering)
    cdef int _pool_of(self, long long key) except -1
