cimport cython
from moesim.policies.base cimport CachePolicy, Work

cdef int ABSENT, IN_FLIGHT, NONE, RESIDENT, NO_PLACE, CACHED, STAGED, RESERVED_SLOTS

cdef class Link:
    cdef public const double[::1] copy_s
    cdef public double busy_until_s, queued_s
    cdef public long long queued
    cpdef enqueue(self, long long key)
    cpdef withdraw(self, long long key)
    cpdef double left_s(self, double now_s)

cdef class Placement:
    cpdef take(self, long long key)
    cpdef release(self, long long key)

cdef class Memory:
    cdef public int layers, experts, staging, staged_total
    cdef public bint is_global, equal_sizes, admits_all, in_launch_order, replaces_itself, hurries
    cdef public CachePolicy cache
    cdef public object name, size
    cdef public Placement slots
    cdef public Link link
    cdef public const long long[::1] bytes_of
    cdef public long long[::1] free_bytes, promised_bytes, staged_of
    cdef public signed char[::1] state
    cdef public short[::1] holds
    cdef public double[::1] landing_s
    cdef public unsigned char[::1] staged, used, orphan, shielded, wished, enters, demanded, hurried
    cdef public long long[::1] replaces, order, next_victim
    cdef public long long used_bytes, used_high_bytes, evicted
    cdef unsigned char[::1] _promised
    cdef long long[::1] _room_of, _victim_of, _incoming, _candidates, _chosen, _victims
    cdef long long _wishes
    cdef int _pool(self, int layer)
    cdef long long _room(self, int layer) except? -1
    cdef _take(self, int layer, long long nbytes)
    cpdef bint may_leave(self, long long key) except -1
    @cython.locals(first=Py_ssize_t, end=Py_ssize_t, key=Py_ssize_t, count=int)
    cdef int _find_candidates(self, int layer, bint demanded) except -1
    cpdef drop_staged(self, long long key)
    cpdef forget_staged(self, long long key)
    cpdef bint land(self, long long key) except -1
    cpdef bint computed(self, long long key) except -1
    cpdef wish(self, long long key, bint enters, bint demanded)
    @cython.locals(enters=bint)
    cpdef prefetch(self, Work work, long long key)
    @cython.locals(n=Py_ssize_t, victim="long long")
    cdef _promise(self, long long key, int layer, long long room, const long long[::1] victims)
    @cython.locals(victim="long long")
    cdef _keep_promises(self, long long key, int layer, int sign)
    cpdef cancel(self, long long key)
    @cython.locals(layer=int, n=Py_ssize_t, entering=Py_ssize_t, room="long long", free="long long", size="long long", key="long long", count=Py_ssize_t, incoming="long long[::1]", chosen="long long[::1]")
    cpdef demand(self, Work work, const long long[::1] keys)
    @cython.locals(n=Py_ssize_t, victim=Py_ssize_t, count=Py_ssize_t, key="long long", free="long long", left_over="long long", total="long long", size="long long", before="long long", gained="long long", missing="long long", room="long long")
    cdef _demand_unequal(self, int layer, Py_ssize_t entering)
    @cython.locals(key="long long", size="long long", demanded=bint, layer=int, n=Py_ssize_t, listed=Py_ssize_t, chosen="long long[::1]")
    cdef Py_ssize_t _name_victims(self, const long long[::1] incoming, Py_ssize_t count, long long free) except -1
    @cython.locals(kept=Py_ssize_t, n=Py_ssize_t, candidate="long long")
    cdef Py_ssize_t _strike_out(self, Py_ssize_t listed, Py_ssize_t count) except -1
    @cython.locals(n=Py_ssize_t)
    cdef bint _can_free(self, long long missing_bytes, Py_ssize_t listed) except -1
    @cython.locals(candidates="long long[::1]", chosen="long long[::1]", n=Py_ssize_t, victim="long long")
    cdef long long[::1] _name(self, const long long[::1] incoming, Py_ssize_t listed)
    cdef _reorder(self, long long[::1] incoming)
    @cython.locals(layer=int, demanded=bint, free=int)
    cpdef int start(self, long long key, double landing_s) except -1
    @cython.locals(outgoing="long long", victim="long long", free="long long", count=Py_ssize_t, n=Py_ssize_t)
    cdef bint _make_room(self, long long key, int layer) except -1
    @cython.locals(gone=bint)
    cdef bint _make_room_by_swap(self, long long key, int layer, long long outgoing) except -1
    @cython.locals(missing_bytes="long long")
    cpdef bint swap_fits(self, long long key, long long outgoing) except -1
    @cython.locals(n=Py_ssize_t, victim="long long")
    cdef _evict(self, Py_ssize_t count)
    @cython.locals(guesses=int, key=Py_ssize_t)
    cpdef bint staging_will_have_room(self) except -1
    @cython.locals(distance=int, farthest=int, distant=int, first=Py_ssize_t, key=Py_ssize_t, landed=bint)
    cpdef long long idle_prefetch(self, int layer, long long after) except? -2

@cython.locals(n=Py_ssize_t)
cpdef bint contains(const long long[::1] keys, long long key) except -1
