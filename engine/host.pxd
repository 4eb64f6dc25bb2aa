cimport cython
from moesim.policies.base cimport Work
from moesim.engine.memory cimport Link, Memory

cdef int ABSENT, RESIDENT

cdef class Host:
    cdef public Memory memory
    cdef public unsigned char[::1] cpu_reads, held_ahead
    cdef public long long[::1] reads
    cdef public Py_ssize_t unread
    cdef public int[::1] experts_told, tokens_told
    cdef Work _part
    cdef object _experts, _tokens
    cdef signed char[::1] _state
    cdef double[::1] _cpu_s, _host_s, _link_s
    cdef double[:, ::1] _gpu_s, _arrive_s
    cdef signed char[:, ::1] _gpu_state
    cpdef bint holds_expert(self, long long key) except -1
    @cython.locals(memory=Memory, link=Link)
    cpdef double wait_s(self, long long key, double now_s) except? -1
    @cython.locals(memory=Memory, part=Work, asked=Py_ssize_t, i=int, row=int, key="long long")
    cpdef note_accesses(self, Work work, const signed char[::1] lanes)
    cpdef promote(self, long long key)
    @cython.locals(memory=Memory, count=Py_ssize_t, n=Py_ssize_t, key="long long")
    cpdef need(self, Work work, const long long[::1] keys, bint demanded)
    @cython.locals(i=int)
    cpdef release_gpu_experts(self, Work work, const signed char[::1] lanes)
    @cython.locals(memory=Memory)
    cdef bint _drop_if_unneeded(self, long long key) except -1
    cpdef bint land(self, long long key) except -1
    @cython.locals(was_staged=bint)
    cpdef bint unneed(self, long long key) except -1
    cpdef bint computed(self, long long key) except -1
    @cython.locals(memory=Memory, key=Py_ssize_t)
    cpdef complete(self, long long first)
